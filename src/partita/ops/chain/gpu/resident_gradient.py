"""The gradient of log Z over small tables, with register-resident states: marginals of all edges.

The algorithm is that of `gradient.py`: two programs per chain continue alpha and beta from the
meeting point, along the saved states of the opposite direction. For an edge e into a lane,

    marginal(e) = exp(term(e) - maximum) / (1 + rest) * exp(alpha + beta - log Z)

The exponentials and 1 / (1 + rest) come from the step of the scan itself. Alpha and beta are
those of the lane after the step. The inverse gather, through shared memory, returns marginals to
memory order. The middle step belongs to alpha. Every eighth step the logarithm of the sum of the
posteriors is added to log Z, so that rounding errors of alpha and beta do not accumulate.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.math import log_exact
from .resident_steps import (
    ResidentShape,
    StepRows,
    concat_blocks,
    gather_scores,
    load_boundary_pair,
    load_edge_table,
    load_rows,
    log_step,
    score_offsets,
    skip_rows,
    split_blocks,
    split_fp64,
    state_posterior,
    tile_index,
    two_sum,
    zero_if_infinite,
)
from .steps import load_length


class LaneEdges(NamedTuple):
    """The edges into each lane, and where their marginals go.

    Fields:
        neighbors: the lanes from which the edges come; see `load_edge_table`.
        edges: the positions of the edges' scores.
        positions: where each score of PREFETCH steps has its marginal among those of the lanes.
        has_edge: which scores of a step have an edge.
    """

    neighbors: Any
    edges: Any
    positions: Any
    has_edge: Any


@gluon.jit
def load_lane_edges(neighbors_ptr, edges_ptr, edge_positions_ptr, direction, e, shape):
    """Load the edges that a direction takes into each lane, and the positions of their marginals.

    `e` are the scores of a step in memory order.
    """
    neighbors, edges = load_edge_table(neighbors_ptr, edges_ptr, direction, shape)
    positions = gl.load(edge_positions_ptr + direction * shape.BLOCK_E + e)
    SIZE: gl.constexpr = shape.PADDED_DEGREE * shape.BLOCK_C
    tiles = tile_index(gl.maximum(positions, 0), SIZE, shape.PREFETCH, shape.BLOCK_E, shape.ROW)
    return LaneEdges(neighbors, edges, tiles, positions >= 0)


@gluon.jit
def gather_marginals(marginals, edge_positions, shape):
    """Return the marginals of PREFETCH steps in memory order, given those of the lanes' edges."""
    PARTS: gl.constexpr = shape.PREFETCH * shape.PADDED_DEGREE
    lanes = concat_blocks(marginals, shape.BLOCK_C, PARTS, shape.STATE)
    rows = gl.gather(lanes, edge_positions, 0)
    return split_blocks(rows, shape.BLOCK_E, shape.PREFETCH, shape.ROW)


@gluon.jit
def edge_marginals(exponentials, coefficient, shape):
    """Return a step's marginals of the edges of each lane, PADDED_DEGREE tensors."""
    marginals = ()
    for k in gl.static_range(shape.PADDED_DEGREE):
        e = exponentials[k] if k < shape.DEGREE else coefficient
        marginals = marginals + (e * coefficient,)
    return marginals


@gluon.jit
def add_rounding_error(logz_high, logz_low, posterior):
    """Add the logarithm of the sum of the posteriors to log Z, a pair.

    Log Z takes the rounding errors of alpha and beta, so that they do not accumulate.
    """
    total = gl.sum(posterior, axis=0)
    logz_high, error = two_sum(logz_high, gl.where(total > 0.0, log_exact(total), 0.0))
    return logz_high, logz_low + zero_if_infinite(error, logz_high)


@gluon.jit
def load_logz_pair(logz_ptr):
    """Load log Z as a pair of fp32 numbers; a chain without a path has no marginals."""
    logz = gl.load(logz_ptr)
    return split_fp64(gl.where(logz == -float("inf"), float("inf"), logz))


@gluon.jit
def scan_marginals(state, logz, grad, scores, saved, marginals, table, num_steps, direction, shape):
    """Continue the states of a direction, and store marginal * grad of the edges of its steps.

    `scores`, `saved` and `marginals` are `StepRows`, where `saved` are the states of the opposite
    direction after each step. Returns the last states, and log Z, a pair, with the rounding errors.
    """
    PREFETCH: gl.constexpr = shape.PREFETCH
    logz_high, logz_low = logz
    prefetched = load_rows(scores, num_steps, PREFETCH)
    prefetched_opposite = load_rows(saved, num_steps, PREFETCH)
    for i in range(0, num_steps, PREFETCH):
        edge_scores, opposite = gather_scores(prefetched, table.edges, shape), prefetched_opposite
        scores, saved = skip_rows(scores, PREFETCH), skip_rows(saved, PREFETCH)
        prefetched = load_rows(scores, num_steps - i - PREFETCH, PREFETCH)
        prefetched_opposite = load_rows(saved, num_steps - i - PREFETCH, PREFETCH)
        lane_marginals = ()
        for u in gl.static_range(PREFETCH):
            next_state, exponentials, inverse = log_step(
                state, edge_scores[u], table.neighbors, shape
            )
            state = gl.where(i + u < num_steps, next_state, state)
            posterior = state_posterior(next_state, opposite[u], logz_high, logz_low)
            coefficient = posterior * inverse * grad
            lane_marginals = lane_marginals + edge_marginals(exponentials, coefficient, shape)
        rows = gather_marginals(lane_marginals, table.positions, shape)
        for u in gl.static_range(PREFETCH):
            # The middle step belongs to alpha.
            in_range = (i + u < num_steps) & ((direction == 0) | (i + u > 0))
            row = rows[u] if shape.REGULAR else gl.where(table.has_edge, rows[u], 0.0)
            ptrs = marginals.ptr + marginals.offsets
            gl.store(ptrs, row.to(ptrs.dtype.element_ty), mask=marginals.mask & in_range)
            marginals = skip_rows(marginals, 1)
        if (i % 8 == 8 - PREFETCH) & (i + PREFETCH <= num_steps):
            logz_high, logz_low = add_rounding_error(logz_high, logz_low, posterior)
    return state, (logz_high, logz_low)


@gluon.jit
def fill_rows(rows, num_rows, value):
    """Fill rows of the gradient with a value."""
    ptrs = rows.ptr + rows.offsets
    fill = (rows.offsets.to(gl.float32) * 0.0 + value).to(ptrs.dtype.element_ty)
    for _ in range(num_rows):
        gl.store(ptrs, fill, mask=rows.mask)
        ptrs += rows.stride


@gluon.jit
def chain_resident_gradient_kernel(
    grad_ptr,  # [N]
    scores_ptr,  # [T, N, C, K]
    state_of_lane_ptr,  # [BLOCK_C] int32
    neighbors_ptr,  # [2, DEGREE, BLOCK_C] int32
    edges_ptr,  # [2, DEGREE, BLOCK_C] int32
    edge_positions_ptr,  # [2, BLOCK_E] int32
    initial_ptr,  # [N, C]
    final_ptr,  # [N, C]
    lengths_ptr,  # [N] or None
    logz_ptr,  # [N] fp64
    saved_ptr,  # [T + 1, N, C] int64
    d_scores_ptr,  # [T, N, C, K]
    d_initial_ptr,  # [N, C]
    d_final_ptr,  # [N, C]
    T,
    N,
    C,
    K,
    grad_n,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    initial_n,
    initial_c,
    final_n,
    final_c,
    DEGREE: gl.constexpr,
    PADDED_DEGREE: gl.constexpr,
    REGULAR: gl.constexpr,
    CONTIGUOUS: gl.constexpr,
    VEC: gl.constexpr,
    PREFETCH: gl.constexpr,
    BLOCK_C: gl.constexpr,
    BLOCK_E: gl.constexpr,
):
    """Continue alpha to the end or beta to the start, and store the marginals."""
    STATE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ROW: gl.constexpr = gl.BlockedLayout([VEC], [32], [gl.num_warps()], [0])
    shape: gl.constexpr = ResidentShape(
        DEGREE, PADDED_DEGREE, REGULAR, PREFETCH, BLOCK_C, BLOCK_E, STATE, ROW
    )
    n, direction = (gl.program_id(0) // 2).to(gl.int64), gl.program_id(0) % 2
    length, invalid = load_length(lengths_ptr, n, T)
    middle = gl.maximum(length - 1, 0) // 2
    sign, start = (1 - 2 * direction).to(gl.int64), (middle + direction).to(gl.int64)
    num_steps = gl.where(length == 0, 0, gl.where(direction == 0, length - middle, middle + 1))
    step, state_stride, width = start - direction, sign * N * C, C * K
    c, e = gl.load(state_of_lane_ptr + gl.arange(0, BLOCK_C, STATE)), gl.arange(0, BLOCK_E, ROW)
    table = load_lane_edges(neighbors_ptr, edges_ptr, edge_positions_ptr, direction, e, shape)
    offsets = score_offsets(e, K, stride_c, stride_k, CONTIGUOUS)
    scores_ptr += n * stride_n + step * stride_t
    scores = StepRows(scores_ptr, sign * stride_t, offsets, e < width)
    saved = StepRows(saved_ptr + (start * N + n) * C, state_stride, c, c >= 0)
    marginals = StepRows(d_scores_ptr + (step * N + n) * width, state_stride * K, e, e < width)
    grad = gl.load(grad_ptr + n * grad_n).to(gl.float32)
    logz = load_logz_pair(logz_ptr + n)
    initial = load_boundary_pair(initial_ptr + n * initial_n, c, initial_c, invalid)
    final = load_boundary_pair(final_ptr + n * final_n, c, final_c, 0.0)
    state = gl.where(direction == 0, initial, final)
    if length > 0:
        state = gl.load(saved.ptr + c, mask=c >= 0, other=0)
    saved = skip_rows(saved, 1)
    state, logz = scan_marginals(
        state, logz, grad, scores, saved, marginals, table, num_steps, direction, shape
    )
    boundary = gl.where(direction == 0, final, initial)
    d_boundary = state_posterior(state, boundary, logz[0], logz[1]) * grad
    if direction == 0:
        gl.store(d_final_ptr + n * C + c, d_boundary.to(d_final_ptr.dtype.element_ty), mask=c >= 0)
        fill_rows(skip_rows(marginals, num_steps), T - length, invalid)
    else:
        rounded = d_boundary.to(d_initial_ptr.dtype.element_ty)
        gl.store(d_initial_ptr + n * C + c, rounded, mask=c >= 0)
