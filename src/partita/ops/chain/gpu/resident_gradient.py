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
    concat_blocks,
    gather_scores,
    load_boundary_pair,
    load_edge_table,
    load_rows,
    log_step,
    score_offsets,
    split_blocks,
    split_fp64,
    state_posterior,
    tile_index,
    two_sum,
    zero_if_infinite,
)
from .steps import load_length


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
    n = (gl.program_id(0) // 2).to(gl.int64)
    direction = gl.program_id(0) % 2
    length, invalid = load_length(lengths_ptr, n, T)
    middle = gl.maximum(length - 1, 0) // 2
    sign = (1 - 2 * direction).to(gl.int64)
    start = (middle + direction).to(gl.int64)
    num_steps = gl.where(length == 0, 0, gl.where(direction == 0, length - middle, middle + 1))
    score_stride, state_stride = sign * stride_t, sign * N * C
    scores_ptr += n * stride_n + (start - direction) * stride_t
    saved_ptr += (start * N + n) * C
    d_scores_ptr += ((start - direction) * N + n) * C * K
    c, e = gl.load(state_of_lane_ptr + gl.arange(0, BLOCK_C, STATE)), gl.arange(0, BLOCK_E, ROW)
    neighbors, edges = load_edge_table(
        neighbors_ptr,
        edges_ptr,
        direction,
        PREFETCH,
        BLOCK_C,
        BLOCK_E,
        PADDED_DEGREE,
        DEGREE,
        STATE,
    )
    edge_positions = gl.load(edge_positions_ptr + direction * BLOCK_E + e)
    has_edge = edge_positions >= 0
    edge_positions = tile_index(
        gl.maximum(edge_positions, 0), PADDED_DEGREE * BLOCK_C, PREFETCH, BLOCK_E, ROW
    )
    offsets, valid = score_offsets(e, K, stride_c, stride_k, CONTIGUOUS), e < C * K
    grad = gl.load(grad_ptr + n * grad_n).to(gl.float32)
    logz = gl.load(logz_ptr + n)
    # A chain without a path has no marginals.
    logz_high, logz_low = split_fp64(gl.where(logz == -float("inf"), float("inf"), logz))
    initial = load_boundary_pair(initial_ptr + n * initial_n, c, initial_c, invalid)
    final = load_boundary_pair(final_ptr + n * final_n, c, final_c, 0.0)
    state = gl.where(direction == 0, initial, final)
    if length > 0:
        state = gl.load(saved_ptr + c, mask=c >= 0, other=0)
    saved_ptr += state_stride
    prefetched = load_rows(scores_ptr, offsets, valid, score_stride, num_steps, PREFETCH)
    prefetched_opposite = load_rows(saved_ptr, c, c >= 0, state_stride, num_steps, PREFETCH)
    for i in range(0, num_steps, PREFETCH):
        scores = gather_scores(
            prefetched, edges, PREFETCH, PADDED_DEGREE, BLOCK_C, BLOCK_E, STATE, ROW
        )
        opposite = prefetched_opposite
        scores_ptr += PREFETCH * score_stride
        saved_ptr += PREFETCH * state_stride
        prefetched = load_rows(
            scores_ptr, offsets, valid, score_stride, num_steps - i - PREFETCH, PREFETCH
        )
        prefetched_opposite = load_rows(
            saved_ptr, c, c >= 0, state_stride, num_steps - i - PREFETCH, PREFETCH
        )
        products = ()
        for u in gl.static_range(PREFETCH):
            next_state, exponentials, inverse = log_step(
                state, scores, neighbors, u, BLOCK_C, PADDED_DEGREE, DEGREE, REGULAR, STATE
            )
            state = gl.where(i + u < num_steps, next_state, state)
            posterior = state_posterior(next_state, opposite[u], logz_high, logz_low)
            coefficient = posterior * inverse * grad
            for k in gl.static_range(PADDED_DEGREE):
                products = products + (
                    (exponentials[k] if k < DEGREE else coefficient) * coefficient,
                )
        gathered = split_blocks(
            gl.gather(
                concat_blocks(products, BLOCK_C, PREFETCH * PADDED_DEGREE, STATE), edge_positions, 0
            ),
            BLOCK_E,
            PREFETCH,
            ROW,
        )
        for u in gl.static_range(PREFETCH):
            # The middle step belongs to alpha.
            in_range = (i + u < num_steps) & ((direction == 0) | (i + u > 0))
            marginals = gathered[u] if REGULAR else gl.where(has_edge, gathered[u], 0.0)
            gl.store(
                d_scores_ptr + e, marginals.to(d_scores_ptr.dtype.element_ty), mask=valid & in_range
            )
            d_scores_ptr += state_stride * K
        if (i % 8 == 8 - PREFETCH) & (i + PREFETCH <= num_steps):
            # Log Z takes the rounding errors of alpha and beta, so that they do not accumulate.
            total = gl.sum(posterior, axis=0)
            logz_high, error = two_sum(logz_high, gl.where(total > 0.0, log_exact(total), 0.0))
            logz_low += zero_if_infinite(error, logz_high)
    boundary = gl.where(direction == 0, final, initial)
    boundary_gradient = state_posterior(state, boundary, logz_high, logz_low) * grad
    if direction == 0:
        gl.store(
            d_final_ptr + n * C + c, boundary_gradient.to(d_final_ptr.dtype.element_ty), mask=c >= 0
        )
        # The loop above moved the pointer over masked steps too.
        padded_steps = (num_steps + PREFETCH - 1) // PREFETCH * PREFETCH
        d_scores_ptr -= padded_steps * (state_stride * K) - num_steps * (state_stride * K)
        for _ in range(length, T):
            gl.store(
                d_scores_ptr + e,
                (gl.full([BLOCK_E], 0.0, gl.float32, ROW) + invalid).to(
                    d_scores_ptr.dtype.element_ty
                ),
                mask=valid,
            )
            d_scores_ptr += state_stride * K
    else:
        gl.store(
            d_initial_ptr + n * C + c,
            boundary_gradient.to(d_initial_ptr.dtype.element_ty),
            mask=c >= 0,
        )
