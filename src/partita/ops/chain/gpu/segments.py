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

A program scans ROWS vectors of states at once, `[ROWS, BLOCK_C]`. They may belong to different
chains, or to different segments of a chain. The vectors do not depend on each other, so that
shuffles inside of a warp exchange all states, and a step needs no barrier.

For the gradient each row takes one segment: alpha runs through it and is stored, then beta comes
back and each step stores marginal * grad for its edges. The marginals are divided by sums over the
states of the same segment, so that only the differences between its states matter.

For the best path each row takes one segment and stores backpointers as `paths.py` does. It also
follows them forwards: the map of a segment has, for each state after it, the state before it on the
best path to that state. The maps of a group of segments are composed. Then the path is traced from
its last state through the groups, through the segments of all groups at the same time, and through
the steps of all segments. Scores are sums in fp64. Integers of at most 53 bits stay exact, so ties
are broken as in the scan of one step after the other. Other scores are added in another order than
there, and may choose another path among those whose scores differ by rounding.

See `steps.py` for the recursions and for the slots, here blocks `[1, BLOCK_C]`. Those of all steps
stay in registers if they are few.

Source: Särkkä and García-Fernández, Temporal parallelization of Bayesian smoothers, 2021; Forney,
The Viterbi algorithm, 1973.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, finite_shift
from ....primitives.gpu.memory import load_length, load_matrix
from .arguments import StridedEdges
from .steps import (
    add_term,
    edge_score,
    from_step,
    is_renormalization_step,
    load_slot,
    load_slots,
    lse_value,
    max_add,
    shifted_log,
    slot_count,
    store_marginal,
)


class SegmentGroups(NamedTuple):
    """The groups of the segments of a chain, or of the groups of a chain in one group.

    Fields:
        segments: the number of segments.
        number: the number of groups.
        size: the number of segments in a group.
    """

    segments: tl.tensor
    number: tl.tensor
    size: tl.tensor


@triton.jit
def slot_score(scores, slot, active):
    """Return the scores of the edges of a slot, `[ROWS, BLOCK_C]`; -inf for none and if inactive.

    The first step of `scores` is a pointer for each row.
    """
    neighbor, c, k = slot
    return edge_score(scores, c, k, (neighbor >= 0) & active)


@triton.jit
def slot_value(x, slot):
    """Return the value of the neighbor of each state, `[ROWS, BLOCK_C]`; -inf for none."""
    neighbor = slot[0]
    index = tl.broadcast_to(tl.maximum(neighbor, 0), x.shape)
    return tl.where(neighbor >= 0, tl.gather(x, index, 1), -float("inf"))


@triton.jit
def weight_in_sum(term, maximum, ACC_DTYPE: tl.constexpr):
    """Return exp(term - maximum), fp64; exactly 1 for a term that is the maximum, also infinite."""
    difference = tl.where(term == maximum, 0.0, term - maximum)
    return exp(difference.to(ACC_DTYPE)).to(tl.float64)


@triton.jit
def log_of_weights(maximum, total, ACC_DTYPE: tl.constexpr):
    """Return the log-sum-exp of terms from their maximum and the sum of their weights, fp64.

    The 1 of the greatest term is subtracted before the sum is rounded to ACC_DTYPE, see `lse_add`.
    """
    return lse_value(maximum, (total - 1.0).to(ACC_DTYPE))


@triton.jit
def rows_step(
    x,
    scores,
    edges,
    c,
    slots,
    active,
    DEGREE: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    IS_MAX: tl.constexpr = False,
    REVERSE: tl.constexpr = False,
):
    """Return the states after a step of all rows; those of inactive rows stay as they are.

    The slots are in registers, or are loaded one after the other if DEGREE is 0.
    """
    if DEGREE > 0:
        terms = ()
        for j in tl.static_range(DEGREE):
            terms = terms + (slot_value(x, slots[j]) + slot_score(scores, slots[j], active),)
        value = terms[0]  # type: ignore[misc]
        for j in tl.static_range(1, DEGREE):
            value = max_add(value, terms[j]) if IS_MAX else tl.maximum(value, terms[j])
        if not IS_MAX:
            total = tl.zeros(x.shape, tl.float64)
            for j in tl.static_range(DEGREE):
                total += weight_in_sum(terms[j], value, ACC_DTYPE)
            value = log_of_weights(value, total, ACC_DTYPE)
    else:
        maximum, rest = tl.full(x.shape, -float("inf"), tl.float64), tl.zeros(x.shape, ACC_DTYPE)
        for j in range(slot_count(edges, c, REVERSE)):
            slot = load_slot(edges, c, j, REVERSE)
            term = slot_value(x, slot) + slot_score(scores, slot, active)
            maximum, rest = add_term(maximum, rest, term, IS_MAX)
        value = maximum if IS_MAX else lse_value(maximum, rest)
    return tl.where(active, value, x)


@triton.jit
def program_rows(total, ROWS: tl.constexpr):
    """Return the rows of a program, `[ROWS, 1]` int64, and which of them exist.

    A row that does not exist computes what the last one does.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return tl.minimum(row, tl.cast(total, tl.int64) - 1), row < total


@triton.jit
def chain_segment_operators_kernel(
    chains,  # Chains
    operators_ptr,  # [N, segments, C, C] fp64
    segments,
    steps,  # in a segment
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DEGREE: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    IS_MAX: tl.constexpr,
):
    """Form rows of the operators of segments."""
    scores, edges = chains[:2]
    lengths_ptr, T, N = chains[4:]
    C = edges.C
    row, exists = program_rows(tl.full([], N, tl.int64) * segments * C, ROWS)
    n, segment, start = row // C // segments, row // C % segments, row % C
    length, _ = load_length(lengths_ptr, n, T)
    c = tl.arange(0, BLOCK_C)[None, :]
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
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
def chain_group_operators_kernel(
    operators_ptr,  # [N, segments, C, C] fp64
    group_operators_ptr,  # [N, groups, C, C] fp64
    C,
    groups,  # SegmentGroups
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    IS_MAX: tl.constexpr,
):
    """Form one row of the operator of a group of segments, the product of theirs."""
    row = tl.program_id(0).to(tl.int64)
    n, group, start = row // C // groups.number, row // C % groups.number, row % C
    c = tl.arange(0, BLOCK_C)
    x = tl.where(c == start, 0.0, -float("inf")).to(tl.float64)
    first = group * groups.size
    last = tl.minimum((group + 1) * groups.size, groups.segments)
    operators_ptr += n * groups.segments * C * C
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
    chains,  # Chains
    operators_ptr,  # [N, segments, C, C] fp64
    known_ptr,  # [2, N, groups + 1, C] fp64, states between groups, or None for one group
    boundaries_ptr,  # [2, N, segments + 1, C] fp64: alpha, then beta
    totals,  # ChainTotals, with one group
    groups,  # SegmentGroups
    DIRECTIONS: tl.constexpr,  # 2, or 1 for alpha alone
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    IS_MAX: tl.constexpr,
):
    """Scan alpha or beta over the operators of a group; one group gives log Z or the best score.

    The best score comes with the state that ends the best path, the lowest of equal ones.
    """
    initial, final, lengths_ptr, T, N = chains[2:]
    C = chains.edges.C
    group, rest = tl.program_id(0) % groups.number, tl.program_id(0) // groups.number
    n, direction = (rest // DIRECTIONS).to(tl.int64), rest % DIRECTIONS
    is_alpha, c = direction == 0, tl.arange(0, BLOCK_C)
    _, invalid = load_length(lengths_ptr, n, T)
    final_ptr = final.ptr + n * final.n
    if known_ptr is None:
        alpha = tl.load(initial.ptr + n * initial.n + c * initial.c, mask=c < C, other=0.0)
        beta = tl.load(final_ptr + c * final.c, mask=c < C, other=0.0)
        x = tl.where(is_alpha, alpha.to(tl.float64), beta.to(tl.float64)) + invalid
        x = tl.where(c < C, x, -float("inf"))
    else:
        at = (direction * N + n) * (groups.number + 1) + group + direction
        x = tl.load(known_ptr + at * C + c, mask=c < C, other=-float("inf"))
        if not IS_MAX:  # Long chains lose no digits, because an offset is removed.
            x -= finite_shift(tl.max(x, axis=0))
    first = group * groups.size
    last = tl.minimum((group + 1) * groups.size, groups.segments)
    operators_ptr += n * groups.segments * C * C
    row_ptr = boundaries_ptr + (direction * N + n) * (groups.segments + 1) * C + c
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
    is_end = tl.where(is_alpha, last == groups.segments, first == 0)
    tl.store(row_ptr + tl.where(is_alpha, last, first) * C, x, mask=(c < C) & is_end)
    if known_ptr is None:
        if is_alpha:
            ends = x + tl.load(final_ptr + c * final.c, mask=c < C, other=0.0).to(tl.float64)
            maximum = tl.max(ends, axis=0)
            if IS_MAX:
                is_nan = tl.max((ends != ends).to(tl.int32), axis=0) > 0
                result = tl.where(is_nan, float("nan"), maximum) + invalid
                state = tl.min(tl.where(ends == maximum, c, BLOCK_C), axis=0)
                tl.store(totals.last_ptr + n, tl.where(result > -float("inf"), state, -1))
            else:
                total = tl.sum(weight_in_sum(ends, maximum, tl.float64), axis=0)
                result = log_of_weights(maximum, total, tl.float64) + invalid
            if totals.logz_ptr is not None:
                tl.store(totals.logz_ptr + n, result)
            if totals.rounded_ptr is not None:
                tl.store(totals.rounded_ptr + n, result.to(totals.rounded_ptr.dtype.element_ty))


@triton.jit
def store_row_marginals(d_ptr, term, step):
    """Store the marginals of an edge into each state, given alpha plus score.

    `step` has, for the rows of a program, whether the step is active, beta - log Z, the gradient of
    log Z, the value after a length, which is 0 or NaN, and the mask of what is stored.
    """
    active, log_weight, grad, inactive_value, mask = step
    marginal = exp((term + log_weight).to(grad.dtype)) * grad
    marginal = tl.where(active, marginal, inactive_value)
    tl.store(d_ptr, marginal.to(d_ptr.dtype.element_ty), mask=mask)


@triton.jit
def chain_segment_gradient_kernel(
    grad,  # StridedChains [N]
    chains,  # Chains
    boundaries_ptr,  # [2, N, segments + 1, C] fp64
    alpha_ptr,  # [T, N, C] fp64, a workspace
    gradients,  # ChainGradients
    segments,
    steps,  # in a segment
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DEGREE_IN: tl.constexpr,
    DEGREE_OUT: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Store the marginals of the steps of segments, and those of the first and the last states."""
    scores, edges = chains[:2]
    lengths_ptr, T, N = chains[4:]
    C, K = edges.C, edges.K
    N64 = tl.full([], N, tl.int64)
    row, exists = program_rows(N64 * segments, ROWS)
    n, segment, c = row // segments, row % segments, tl.arange(0, BLOCK_C)[None, :]
    mask, first = exists & (c < C), segment * steps
    length, invalid = load_length(lengths_ptr, n, T)
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    known_ptr = boundaries_ptr + (n * (segments + 1) + segment) * C + c
    alpha = tl.load(known_ptr, mask=c < C, other=-float("inf"))
    known_ptr += N64 * (segments + 1) * C + C
    beta = tl.load(known_ptr, mask=c < C, other=-float("inf"))
    # Long chains lose no digits, because the offset of each row is removed.
    alpha -= finite_shift(tl.max(alpha, axis=1)[:, None])
    beta -= finite_shift(tl.max(beta, axis=1)[:, None])
    alpha_ptr += n * C + c
    row_stride = N64 * C
    slots = load_slots(edges, c, DEGREE_IN, False)
    for i in range(0, steps):
        t = first + i
        active = t < length
        tl.store(alpha_ptr + t * row_stride, alpha, mask=mask & active)
        step_scores = from_step(scores, t)
        alpha = rows_step(alpha, step_scores, edges, c, slots, active, DEGREE_IN, ACC_DTYPE)
    tl.debug_barrier()
    grad_logz = tl.load(grad.ptr + n * grad.n).to(ACC_DTYPE)
    log_weight = alpha + beta
    maximum = tl.max(log_weight, axis=1)[:, None]
    total = tl.sum(weight_in_sum(log_weight, maximum, ACC_DTYPE), axis=1)[:, None]
    logz = log_of_weights(maximum, total, ACC_DTYPE)
    # A chain without a path has no marginals.
    logz = tl.where(logz == -float("inf"), float("inf"), logz)
    is_last = mask & (segment == segments - 1)
    store_marginal(gradients.final_ptr + n * C + c, log_weight - logz, grad_logz, is_last)
    slots = load_slots(edges, c, DEGREE_IN, False)
    out_slots = load_slots(edges, c, DEGREE_OUT, True)
    for i in range(0, steps):
        t = first + steps - 1 - i
        active, step_scores = t < length, from_step(scores, t)
        if is_renormalization_step(i):
            weights = exp((alpha + beta - logz).to(ACC_DTYPE))
            sum_exp = tl.sum(weights, axis=1)[:, None]
            logz = tl.where(sum_exp > 0.0, shifted_log(logz, sum_exp), logz)
        stored = tl.load(alpha_ptr + t * row_stride, mask=mask & active, other=-float("inf"))
        alpha = tl.where(active, stored, alpha)
        step = (active, beta - logz, grad_logz, invalid, mask & (t < T))
        d_ptr = gradients.edges_ptr + (t * N + n) * C * K + c * K
        if DEGREE_IN > 0:
            for k in tl.static_range(DEGREE_IN):
                term = slot_value(alpha, slots[k]) + slot_score(step_scores, slots[k], active)
                store_row_marginals(d_ptr + k, term, step)
        else:
            for k in range(K):
                slot = load_slot(edges, c, k, False)
                term = slot_value(alpha, slot) + slot_score(step_scores, slot, active)
                store_row_marginals(d_ptr + k, term, step)
        beta = rows_step(
            beta, step_scores, edges, c, out_slots, active, DEGREE_OUT, ACC_DTYPE, REVERSE=True
        )
    is_first = mask & (segment == 0)
    store_marginal(gradients.initial_ptr + n * C + c, alpha + beta - logz, grad_logz, is_first)


@triton.jit
def greater_term(best, x, scores, slot, active, j):
    """Return the greatest term of each state up to slot j, its slot, and the state it comes from.

    An equal term changes nothing, so the lowest slot wins.
    """
    maximum, backpointer, origin = best
    term = slot_value(x, slot) + slot_score(scores, slot, active)
    is_greater = term > maximum
    return (
        tl.where(is_greater, term, maximum),
        tl.where(is_greater, j, backpointer),
        tl.where(is_greater, slot[0], origin),
    )


@triton.jit
def chain_segment_pointers_kernel(
    chains,  # Chains
    boundaries_ptr,  # [N, segments + 1, C] fp64, alpha under Max
    backpointers_ptr,  # [T, N, C] integers
    maps_ptr,  # [N, segments, C] int32
    segments,
    steps,  # in a segment
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DEGREE: tl.constexpr,
):
    """Store the backpointers of the steps of segments, and the maps of the segments."""
    scores, edges = chains[:2]
    lengths_ptr, T, N = chains[4:]
    C = edges.C
    row, exists = program_rows(tl.full([], N, tl.int64) * segments, ROWS)
    n, segment, c = row // segments, row % segments, tl.arange(0, BLOCK_C)[None, :]
    mask = exists & (c < C)
    length, _ = load_length(lengths_ptr, n, T)
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    known_ptr = boundaries_ptr + (n * (segments + 1) + segment) * C + c
    x = tl.load(known_ptr, mask=c < C, other=-float("inf"))
    slots = load_slots(edges, c, DEGREE, False)
    start = tl.zeros(x.shape, tl.int32) + c
    for i in range(0, steps):
        t = segment * steps + i
        active = t < length
        step_scores, none = from_step(scores, t), tl.zeros(x.shape, tl.int32)
        best = (tl.full(x.shape, -float("inf"), tl.float64), none, none)
        if DEGREE > 0:
            for j in tl.static_range(DEGREE):
                best = greater_term(best, x, step_scores, slots[j], active, j)
        else:
            for j in range(edges.K):
                slot = load_slot(edges, c, j, False)
                best = greater_term(best, x, step_scores, slot, active, j)
        y, backpointer, origin = best
        pointers = backpointers_ptr + (t * N + n) * C + c
        tl.store(pointers, backpointer.to(backpointers_ptr.dtype.element_ty), mask=mask & active)
        start = tl.where(active, tl.gather(start, origin, 1), start)
        x = tl.where(active, y, x)
    tl.store(maps_ptr + row * C + c, start, mask=mask)


@triton.jit
def chain_group_maps_kernel(
    maps_ptr,  # [N, segments, C] int32
    group_maps_ptr,  # [N, groups, C] int32
    C,
    groups,  # SegmentGroups
    BLOCK_C: tl.constexpr,
):
    """Compose the maps of the segments of a group."""
    n, group = (tl.program_id(0) // groups.number).to(tl.int64), tl.program_id(0) % groups.number
    c, state = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_C)
    first = group * groups.size
    last = tl.minimum((group + 1) * groups.size, groups.segments)
    maps_ptr += n * groups.segments * C + c
    for i in range(0, last - first):
        segment_map = tl.load(maps_ptr + (last - 1 - i) * C, mask=c < C, other=0)
        state = tl.gather(segment_map, state, 0)
    tl.store(group_maps_ptr + (n * groups.number + group) * C + c, state, mask=c < C)


@triton.jit
def chain_trace_maps_kernel(
    maps_ptr,  # [N, segments, C] int32
    known_ptr,  # [N, groups] int32, the state after each group; -1 for no path
    states_ptr,  # [N, segments] int32, the state after each segment
    N,
    C,
    groups,  # SegmentGroups
    LANES: tl.constexpr,
):
    """Trace the best path through one group in each lane."""
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    exists = lane < tl.full([], N, tl.int64) * groups.number
    n, first = lane // groups.number, lane % groups.number * groups.size
    state = tl.load(known_ptr + lane, mask=exists, other=-1)
    for i in range(0, groups.size):
        at = first + groups.size - 1 - i
        inside = exists & (at < groups.segments)
        row = n * groups.segments + at
        tl.store(states_ptr + row, state, mask=inside)
        before = tl.load(maps_ptr + row * C + state, mask=inside & (state >= 0), other=-1)
        state = tl.where(inside, before, state)


@triton.jit
def chain_trace_steps_kernel(
    chains,  # Chains
    backpointers_ptr,  # [T, N, C] integers
    known_ptr,  # [N, segments] int32, the state after each segment; -1 for no path
    paths,  # ChainPaths
    segments,
    steps,  # in a segment
    LANES: tl.constexpr,
):
    """Trace the best path through the steps of one segment in each lane."""
    edges = chains.edges
    lengths_ptr, T, N = chains[4:]
    C, K = edges.C, edges.K
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    exists = lane < tl.full([], N, tl.int64) * segments
    n, segment = lane // segments, lane % segments
    if lengths_ptr is None:
        length = tl.zeros([LANES], tl.int64) + T
    else:
        length = tl.load(lengths_ptr + n, mask=exists, other=0).to(tl.int64)
    state = tl.load(known_ptr + lane, mask=exists, other=-1)
    for i in range(0, steps):
        t = segment * steps + steps - 1 - i
        row, inside = t * N + n, exists & (t < T)
        on_path = inside & (t < length) & (state >= 0)
        slot = tl.load(backpointers_ptr + row * C + state, mask=on_path, other=0).to(tl.int32)
        edge = state * K + slot
        tl.store(paths.edges_ptr + row, tl.where(on_path, edge, -1).to(tl.int64), mask=inside)
        after = tl.where(on_path, state, -1).to(tl.int64)
        tl.store(paths.states_ptr + row + N, after, mask=inside)
        state = tl.where(on_path, tl.load(edges.source_ptr + edge, mask=on_path, other=0), state)
    tl.store(paths.states_ptr + n, state.to(tl.int64), mask=exists & (segment == 0))
