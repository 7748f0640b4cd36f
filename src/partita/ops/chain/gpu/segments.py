"""Scans of few long chains of few states, parallel in time.

The steps of a segment are an operator M on states, `[C, C]`: under Log,

    alpha after it, of the state c  = log sum over j of exp(alpha before it, of j, + M[j, c])
    beta before it, of the state j  = log sum over c of exp(M[j, c] + beta after it, of c)

and a maximum replaces each log-sum-exp under Max. Row j of M is alpha after the segment for a chain
that starts in the state j, so the steps of the chain itself form it. Operators are logarithms in
fp64: their elements may differ by more than fp64 could hold as factors. Steps after the length of a
chain change nothing.

First the operators of all segments are formed at the same time, then those of groups of segments.
One program scans the groups in either direction, others the segments inside of each group. Then the
states at the boundaries of all segments are known, and each segment runs on its own.

Source: Särkkä and García-Fernández, Temporal parallelization of Bayesian smoothers, 2021.
"""

import triton
import triton.language as tl

from ....primitives.gpu.memory import load_matrix
from .segment_steps import load_slots, log_of_weights, rows_step, weight_in_sum, without_offset
from .steps import ChainEdges, EdgeArray, from_step, load_length


@triton.jit
def program_rows(total, ROWS: tl.constexpr):
    """Return the rows of a program, `[ROWS, 1]` int64, and which of them exist.

    A row that does not exist computes what the last one does.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return tl.minimum(row, tl.cast(total, tl.int64) - 1), row < total


@triton.jit
def chain_segment_operators_kernel(
    scores_ptr,  # [T, N, C, K]
    source_ptr,  # [C, K] int32
    lengths_ptr,  # [N] or None
    operators_ptr,  # [N, segments, C, C] fp64
    T,
    N,
    C,
    K,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    segments,
    steps,  # in a segment
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DEGREE: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    IS_MAX: tl.constexpr,
):
    """Form rows of the operators of segments."""
    row, exists = program_rows(tl.full([], N, tl.int64) * segments * C, ROWS)
    n, segment, start = row // C // segments, row // C % segments, row % C
    length, _ = load_length(lengths_ptr, n, T)
    c = tl.arange(0, BLOCK_C)[None, :]
    edges = ChainEdges(source_ptr, None, None, C, K)
    scores = EdgeArray(scores_ptr + n * stride_n, stride_t, stride_c, stride_k)
    slots = load_slots(edges, c, DEGREE, False)
    x = tl.where(c == start, 0.0, -float("inf")).to(tl.float64)
    for i in range(0, steps):
        t = segment * steps + i
        step_scores = from_step(scores, t)
        x = rows_step(x, step_scores, edges, c, slots, t < length, DEGREE, ACC_DTYPE, IS_MAX)
    tl.store(operators_ptr + row * C + c, x, mask=exists & (c < C))


@triton.jit
def nan_of(has_nan, x):
    """Return x, or NaN for all of its states if something in a block has been NaN."""
    is_nan = tl.max(tl.max(has_nan.to(tl.int32), axis=1), axis=0) > 0
    return tl.where(is_nan, float("nan"), x)


@triton.jit
def operator_step(x, matrix, ACC_DTYPE: tl.constexpr, IS_MAX: tl.constexpr):
    """Apply an operator `[BLOCK_C, BLOCK_C]`, of which the first index is that of x.

    The maximum skips NaN, so whoever applies operators under Max looks for NaN, see `nan_of`.
    """
    terms = matrix + x[:, None]
    maximum = tl.max(terms, axis=0)
    if IS_MAX:
        return maximum
    else:
        weights = weight_in_sum(terms, maximum[None, :], ACC_DTYPE)
        return log_of_weights(maximum, tl.sum(weights, axis=0), ACC_DTYPE)


@triton.jit
def store_total(logz_ptr, rounded_ptr, last_ptr, n, x, c, invalid, IS_MAX: tl.constexpr):
    """Store log Z, or the best score and the state that ends the best path, lowest first."""
    maximum = tl.max(x, axis=0)
    if IS_MAX:
        is_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
        result = tl.where(is_nan, float("nan"), maximum) + invalid
        state = tl.min(tl.where(x == maximum, c, x.shape[0]), axis=0)
        tl.store(last_ptr + n, tl.where(result > -float("inf"), state, -1))
    else:
        total = tl.sum(weight_in_sum(x, maximum, tl.float64), axis=0)
        result = log_of_weights(maximum, total, tl.float64) + invalid
    if logz_ptr is not None:
        tl.store(logz_ptr + n, result)
    if rounded_ptr is not None:
        tl.store(rounded_ptr + n, result.to(rounded_ptr.dtype.element_ty))


@triton.jit
def chain_group_operators_kernel(
    operators_ptr,  # [N, segments, C, C] fp64
    group_operators_ptr,  # [N, groups, C, C] fp64
    C,
    segments,
    groups,
    size,  # segments in a group
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    IS_MAX: tl.constexpr,
):
    """Form one row of the operator of a group of segments, the product of theirs."""
    row = tl.program_id(0).to(tl.int64)
    n, group, start = row // C // groups, row // C % groups, row % C
    c = tl.arange(0, BLOCK_C)
    x = tl.where(c == start, 0.0, -float("inf")).to(tl.float64)
    first, last = group * size, tl.minimum((group + 1) * size, segments)
    operators_ptr += n * segments * C * C
    matrix = load_matrix(operators_ptr + first * C * C, C, C, 1, BLOCK_C, -float("inf"))
    has_nan = matrix != matrix
    for segment in range(first, last):
        # The next operator is loaded while this one is used.
        at = tl.minimum(segment + 1, last - 1) * C * C
        following = load_matrix(operators_ptr + at, C, C, 1, BLOCK_C, -float("inf"))
        x = operator_step(x, matrix, ACC_DTYPE, IS_MAX)
        matrix = following
        if IS_MAX:
            has_nan = has_nan | (matrix != matrix)
    if IS_MAX:
        x = nan_of(has_nan, x)
    tl.store(group_operators_ptr + row * C + c, x, mask=c < C)


@triton.jit
def chain_boundaries_kernel(
    initial_ptr,  # [N, C]
    final_ptr,  # [N, C]
    lengths_ptr,  # [N] or None
    operators_ptr,  # [N, segments, C, C] fp64
    known_ptr,  # [2, N, groups + 1, C] fp64, states between groups, or None for one group
    boundaries_ptr,  # [2, N, segments + 1, C] fp64: alpha, then beta
    logz_ptr,  # [N] fp64, or None
    rounded_ptr,  # [N] in the dtype of results, or None
    last_ptr,  # [N] int32, the last state of the best path or -1, or None
    T,
    N,
    C,
    segments,
    groups,
    size,  # segments in a group
    initial_n,
    initial_c,
    final_n,
    final_c,
    DIRECTIONS: tl.constexpr,  # 2, or 1 for alpha alone
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    IS_MAX: tl.constexpr,
):
    """Scan alpha or beta over the operators of a group; one group gives log Z or the best score."""
    group, rest = tl.program_id(0) % groups, tl.program_id(0) // groups
    n, direction = (rest // DIRECTIONS).to(tl.int64), rest % DIRECTIONS
    is_alpha, c = direction == 0, tl.arange(0, BLOCK_C)
    _, invalid = load_length(lengths_ptr, n, T)
    final_ptr += n * final_n
    if known_ptr is None:
        alpha = tl.load(initial_ptr + n * initial_n + c * initial_c, mask=c < C, other=0.0)
        beta = tl.load(final_ptr + c * final_c, mask=c < C, other=0.0)
        x = tl.where(is_alpha, alpha.to(tl.float64), beta.to(tl.float64)) + invalid
        x = tl.where(c < C, x, -float("inf"))
    else:
        at = (direction * N + n) * (groups + 1) + group + direction
        x = tl.load(known_ptr + at * C + c, mask=c < C, other=-float("inf"))
        x = x if IS_MAX else without_offset(x, 0)
    first, last = group * size, tl.minimum((group + 1) * size, segments)
    operators_ptr += n * segments * C * C
    row_ptr = boundaries_ptr + (direction * N + n) * (segments + 1) * C + c
    step_in, step_out = tl.where(is_alpha, C, 1), tl.where(is_alpha, 1, C)
    at = tl.where(is_alpha, first, last - 1).to(tl.int64) * C * C
    matrix = load_matrix(operators_ptr + at, C, step_in, step_out, BLOCK_C, -float("inf"))
    has_nan = (matrix != matrix) | (x != x)[:, None]
    for i in range(0, last - first):
        segment = tl.where(is_alpha, first + i, last - 1 - i)
        tl.store(row_ptr + (segment + direction) * C, x, mask=c < C)
        # The next operator is loaded while this one is used.
        following = tl.where(is_alpha, segment + 1, segment - 1)
        at = tl.minimum(tl.maximum(following, first), last - 1).to(tl.int64) * C * C
        next_matrix = load_matrix(operators_ptr + at, C, step_in, step_out, BLOCK_C, -float("inf"))
        x = operator_step(x, matrix, ACC_DTYPE, IS_MAX)
        matrix = next_matrix
        if IS_MAX:
            has_nan = has_nan | (matrix != matrix)
    if IS_MAX:
        x = nan_of(has_nan, x)
    is_end = tl.where(is_alpha, last == segments, first == 0)
    tl.store(row_ptr + tl.where(is_alpha, last, first) * C, x, mask=(c < C) & is_end)
    if known_ptr is None:
        if is_alpha:
            final = tl.load(final_ptr + c * final_c, mask=c < C, other=0.0).to(tl.float64)
            store_total(logz_ptr, rounded_ptr, last_ptr, n, x + final, c, invalid, IS_MAX)
