"""Operators of segments in max-plus arithmetic on NVIDIA GPUs, for 9 to 16 states.

These states do not fit into lanes as those of `lanes.py` do. Here the threads of a program share an
operator, and each of them takes the maxima over all states between for one row and a few columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .arguments import Batch
from .resident import load_vector
from .resident_best import greater, load_ahead
from .scores import fold_ends, load_tokens


@gluon.jit
def best_matrix_product(x, matrix, LAYOUT: gl.constexpr):
    """Return the max-plus product of two matrices `[16, 16]`, as a tree of maxima."""
    terms = gl.expand_dims(x, 2) + gl.expand_dims(matrix, 0)
    groups = gl.reshape(terms, [16, 4, 4, 16])
    best = gl.reduce(gl.reduce(groups, 2, greater), 1, greater)
    return gl.convert_layout(best, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def unit_operator(LAYOUT: gl.constexpr):
    """Return the operator of no step, `[16, 16]`."""
    k = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)), 1)
    c = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.where(k == c, 0.0, -float("inf")).to(gl.float64)


@gluon.jit
def load_operator(ptr, C, LAYOUT: gl.constexpr):
    """Load a matrix `[C, C]`, with -inf outside of it."""
    k = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)), 1)
    c = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(ptr + k * C + c, mask=(k < C) & (c < C), other=-float("inf"))


@gluon.jit
def store_operator(ptr, x, C, LAYOUT: gl.constexpr):
    """Store a matrix `[C, C]`."""
    k = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)), 1)
    c = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)), 0)
    gl.store(ptr + k * C + c, x, mask=(k < C) & (c < C))


@gluon.jit
def linear_chain_best_operators_kernel(
    batch,  # Batch, without start
    table_ptr,  # [C, C] fp64
    operators,  # Operators, written
    segments,
    STEPS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Form the operator of a segment."""
    batch = Batch(*batch)
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 16, 8 // WARPS], [8, 1, 4], [2, 1, WARPS // 2], [2, 1, 0]
    )
    ROWS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    SCORES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    C, emissions = batch.C, batch.emissions
    n, segment = (gl.program_id(0) // segments).to(gl.int64), gl.program_id(0) % segments
    tokens, _ = load_tokens(batch.lengths, n, batch.T)
    low = gl.minimum(segment * STEPS, tokens - 1)
    num_steps = gl.minimum(STEPS, tokens - 1 - low)
    c = gl.arange(0, 16, SCORES)
    end = load_vector(batch.end, n, c, C)
    table = load_operator(table_ptr, C, gl.SliceLayout(0, LAYOUT))
    x, bad = unit_operator(ROWS), c * 0
    score_ptr = emissions.ptr + n * emissions.n + c.to(gl.int64) * emissions.c
    score_ptr += gl.to_tensor(low).to(gl.int64) * emissions.t
    scores = load_ahead(score_ptr, 1, num_steps, emissions.t, c, C, AHEAD)
    for i in range(1, num_steps + 1, AHEAD):
        following = load_ahead(score_ptr, i + AHEAD, num_steps, emissions.t, c, C, AHEAD)
        for j in gl.static_range(AHEAD):
            active = i + j <= num_steps
            score = fold_ends(scores[j], low + i + j, tokens, end * 0.0, end)
            bad = gl.maximum(bad, ((score != score) & active).to(gl.int32))
            y = best_matrix_product(x, table, LAYOUT) + gl.expand_dims(score, 0)
            x = gl.where(active, gl.convert_layout(y, ROWS), x)
        scores = following
    at = n * segments + segment
    store_operator(operators.matrices + at * C * C, x, C, ROWS)
    offset = gl.where(gl.max(bad, axis=0) > 0, float("nan"), 0.0)
    gl.store(operators.offsets + at, offset.to(gl.float64))


@gluon.jit
def linear_chain_best_groups_kernel(
    operators,  # Operators of segments
    group_operators,  # Operators of groups, written
    C,
    segments,
    groups,
    SIZE: gl.constexpr,  # segments in a group
):
    """Form the product of the operators of a group."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 16, 8 // WARPS], [8, 1, 4], [2, 1, WARPS // 2], [2, 1, 0]
    )
    ROWS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    n, group = (gl.program_id(0) // groups).to(gl.int64), gl.program_id(0) % groups
    first, last = group * SIZE, gl.minimum((group + 1) * SIZE, segments) - 1
    at = n * segments + first
    x, total = unit_operator(ROWS), gl.to_tensor(0.0).to(gl.float64)
    matrix = load_operator(operators.matrices + at * C * C, C, COLUMNS)
    for segment in range(first, last + 1):
        # The next operator is loaded while this one is used.
        at = n * segments + gl.minimum(segment + 1, last)
        following = load_operator(operators.matrices + at * C * C, C, COLUMNS)
        total += gl.load(operators.offsets + n * segments + segment)
        x = gl.convert_layout(best_matrix_product(x, matrix, LAYOUT), ROWS)
        matrix = following
    at = n * groups + group
    store_operator(group_operators.matrices + at * C * C, x, C, ROWS)
    gl.store(group_operators.offsets + at, total)
