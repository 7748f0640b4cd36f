"""The gradient of log Z over small tables, with register-resident states: marginals of all edges.

The algorithm is that of `gradient.py`: two programs per chain continue alpha and beta from the
meeting point, along the saved states of the opposite direction. For an edge e into a lane,

    marginal(e) = exp(term(e) - maximum) / (1 + rest) * exp(alpha + beta - log Z)

The exponentials and 1 / (1 + rest) come from the step of the scan itself. Alpha and beta are
those of the lane after the step. The inverse gather, through shared memory, returns marginals to
memory order. The middle step belongs to alpha. Every eighth step the logarithm of the sum of the
posteriors is added to log Z, so that rounding errors of alpha and beta do not accumulate.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.math import log_exact
from .resident_steps import (
    StepRows,
    concat_blocks,
    gather_scores,
    load_boundary_pair,
    load_edge_table,
    load_lanes,
    load_logz_pair,
    load_rows,
    log_step,
    rows_from,
    skip_rows,
    split_blocks,
    state_posterior,
    store_row,
    tile_index,
    two_sum,
    zero_if_infinite,
)
from .steps import load_length


@gluon.jit
def chain_resident_gradient_kernel(
    grad,  # StridedChains [N]
    chains,  # Chains with ResidentEdges
    logz_ptr,  # [N] fp64
    saved_ptr,  # [T + 1, N, C] int64
    gradients,  # ChainGradients
    shape: gl.constexpr,  # ResidentShape
):
    """Continue alpha to the end or beta to the start, and store the marginals."""
    scores, table, initial, final, lengths_ptr, T, N = chains
    PREFETCH: gl.constexpr = shape.PREFETCH
    C, width = table.C, table.C * table.K
    n, direction = (gl.program_id(0) // 2).to(gl.int64), gl.program_id(0) % 2
    length, invalid = load_length(lengths_ptr, n, T)
    middle = gl.maximum(length - 1, 0) // 2
    sign, start = (1 - 2 * direction).to(gl.int64), (middle + direction).to(gl.int64)
    num_steps = gl.where(length == 0, 0, gl.where(direction == 0, length - middle, middle + 1))
    step, state_stride, e = start - direction, sign * N * C, gl.arange(0, shape.BLOCK_E, shape.ROW)
    c, first_scores = load_lanes(scores, table, n, shape)
    first_scores = rows_from(first_scores, step, sign)
    neighbors, edges = load_edge_table(table, direction, shape)
    # Where each score of PREFETCH steps has its marginal among those of the lanes' edges.
    PADDED_DEGREE: gl.constexpr = shape.PADDED_DEGREE
    BLOCK_C: gl.constexpr = shape.BLOCK_C
    BLOCK_E: gl.constexpr = shape.BLOCK_E
    LANE_EDGES: gl.constexpr = PADDED_DEGREE * BLOCK_C
    positions = gl.load(table.edge_positions_ptr + direction * BLOCK_E + e)
    tiles = tile_index(gl.maximum(positions, 0), LANE_EDGES, PREFETCH, BLOCK_E, shape.ROW)
    has_edge = positions >= 0
    # The states of the opposite direction after each step.
    first_saved = StepRows(saved_ptr + (start * N + n) * C, state_stride, c, c >= 0)
    d_scores_ptr = gradients.edges_ptr + (step * N + n) * width
    first_marginals = StepRows(d_scores_ptr, state_stride * table.K, e, e < width)
    grad_logz = gl.load(grad.ptr + n * grad.n).to(gl.float32)
    logz = load_logz_pair(logz_ptr + n)
    first_state = load_boundary_pair(initial.ptr + n * initial.n, c, initial.c, invalid)
    last_state = load_boundary_pair(final.ptr + n * final.n, c, final.c, 0.0)
    state = gl.where(direction == 0, first_state, last_state)
    if length > 0:
        state = gl.load(first_saved.ptr + c, mask=c >= 0, other=0)
    rows, saved, marginals = first_scores, skip_rows(first_saved, 1), first_marginals
    logz_high, logz_low = logz
    prefetched = load_rows(rows, num_steps, PREFETCH)
    prefetched_opposite = load_rows(saved, num_steps, PREFETCH)
    for i in range(0, num_steps, PREFETCH):
        edge_scores, opposite = gather_scores(prefetched, edges, shape), prefetched_opposite
        rows, saved = skip_rows(rows, PREFETCH), skip_rows(saved, PREFETCH)
        prefetched = load_rows(rows, num_steps - i - PREFETCH, PREFETCH)
        prefetched_opposite = load_rows(saved, num_steps - i - PREFETCH, PREFETCH)
        lane_marginals = ()
        for u in gl.static_range(PREFETCH):
            next_state, exponentials, inverse = log_step(state, edge_scores[u], neighbors, shape)
            state = gl.where(i + u < num_steps, next_state, state)
            posterior = state_posterior(next_state, opposite[u], logz_high, logz_low)
            coefficient = posterior * inverse * grad_logz
            for k in gl.static_range(PADDED_DEGREE):
                factor = exponentials[k] if k < shape.DEGREE else coefficient
                lane_marginals = lane_marginals + (factor * coefficient,)
        # Return the marginals to memory order.
        in_lanes = concat_blocks(lane_marginals, BLOCK_C, PREFETCH * PADDED_DEGREE, shape.STATE)
        in_rows = split_blocks(gl.gather(in_lanes, tiles, 0), BLOCK_E, PREFETCH, shape.ROW)
        for u in gl.static_range(PREFETCH):
            # The middle step belongs to alpha.
            in_range = (i + u < num_steps) & ((direction == 0) | (i + u > 0))
            row = in_rows[u] if shape.REGULAR else gl.where(has_edge, in_rows[u], 0.0)
            marginals = store_row(marginals, row, in_range)
        if (i % 8 == 8 - PREFETCH) & (i + PREFETCH <= num_steps):
            # Log Z takes the rounding errors of alpha and beta, so that they do not accumulate.
            total = gl.sum(posterior, axis=0)
            logz_high, error = two_sum(logz_high, gl.where(total > 0.0, log_exact(total), 0.0))
            logz_low += zero_if_infinite(error, logz_high)
    boundary = gl.where(direction == 0, last_state, first_state)
    d_boundary = state_posterior(state, boundary, logz_high, logz_low) * grad_logz
    if direction == 0:
        d_final_ptr = gradients.final_ptr + n * C + c
        gl.store(d_final_ptr, d_boundary.to(d_final_ptr.dtype.element_ty), mask=c >= 0)
        # After the length the gradient is 0, or NaN for an invalid length.
        rest, fill = skip_rows(first_marginals, num_steps), e.to(gl.float32) * 0.0 + invalid
        for _ in range(T - length):
            rest = store_row(rest, fill, True)
    else:
        rounded = d_boundary.to(gradients.initial_ptr.dtype.element_ty)
        gl.store(gradients.initial_ptr + n * C + c, rounded, mask=c >= 0)
