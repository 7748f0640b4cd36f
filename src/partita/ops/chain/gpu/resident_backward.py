"""Beta at all times over small tables, with register-resident states.

The recursion is that of `resident_scan.py`, from the last step to the first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.sync import unpack_pair
from .resident_steps import (
    ResidentShape,
    StepRows,
    gather_scores,
    load_boundary_pair,
    load_edge_table,
    load_rows,
    log_step,
    score_offsets,
    skip_rows,
)
from .steps import load_length


@gluon.jit
def store_states(rows, state, mask):
    """Store packed states in fp64, and return the rows that follow."""
    high, low = unpack_pair(state)
    value = high.to(gl.float64) + low.to(gl.float64)
    gl.store(rows.ptr + rows.offsets, value, mask=rows.mask & mask)
    return skip_rows(rows, 1)


@gluon.jit
def chain_resident_backward_kernel(
    scores,  # StridedEdges [T, N, C, K]
    table,  # ResidentEdges
    final,  # StridedStates [N, C]
    lengths_ptr,  # [N] or None
    result_ptr,  # [T + 1, N, C] fp64
    T,
    N,
    DEGREE: gl.constexpr,
    PADDED_DEGREE: gl.constexpr,
    REGULAR: gl.constexpr,
    CONTIGUOUS: gl.constexpr,
    VEC: gl.constexpr,
    PREFETCH: gl.constexpr,
    BLOCK_C: gl.constexpr,
    BLOCK_E: gl.constexpr,
):
    """Scan beta from the last step to the first. After the length it is the final scores."""
    STATE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ROW: gl.constexpr = gl.BlockedLayout([VEC], [32], [gl.num_warps()], [0])
    shape: gl.constexpr = ResidentShape(
        DEGREE, PADDED_DEGREE, REGULAR, PREFETCH, BLOCK_C, BLOCK_E, STATE, ROW
    )
    C, K = table.C, table.K
    n = gl.program_id(0).to(gl.int64)
    length, invalid = load_length(lengths_ptr, n, T)
    c = gl.load(table.state_of_lane_ptr + gl.arange(0, BLOCK_C, STATE))
    e = gl.arange(0, BLOCK_E, ROW)
    neighbors, edges = load_edge_table(table, 1, shape)
    offsets = score_offsets(scores, e, K, CONTIGUOUS)
    N64 = n * 0 + N
    scores_ptr = scores.ptr + (n * scores.n + (N64 * 0 + length - 1) * scores.t)
    rows = StepRows(scores_ptr, (N64 * 0 - 1) * scores.t, offsets, e < C * K)
    state = load_boundary_pair(final.ptr + n * final.n, c, final.c, invalid)
    results = StepRows(result_ptr + (T * N64 + n) * C, -N64 * C, c, c >= 0)
    for _ in range(0, T - length + 1):
        results = store_states(results, state, True)
    prefetched = load_rows(rows, length, PREFETCH)
    for i in range(0, length, PREFETCH):
        edge_scores = gather_scores(prefetched, edges, shape)
        rows = skip_rows(rows, PREFETCH)
        prefetched = load_rows(rows, length - i - PREFETCH, PREFETCH)
        for u in gl.static_range(PREFETCH):
            next_state = log_step(state, edge_scores[u], neighbors, shape)[0]
            state = gl.where(i + u < length, next_state, state)
            results = store_states(results, state, i + u < length)
