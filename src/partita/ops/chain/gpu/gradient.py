"""The gradient of log Z of sparse linear chains of any size: the marginals of all edges.

The forward scan (`forward_scan.py`) saves alpha in the first half of a chain and beta in the
second. Here two programs per chain continue both scans: one takes alpha from the meeting point to
the end, along the saved beta; the other takes beta from the meeting point to the start, along the
saved alpha. Each step stores marginal * grad for its edges. The middle step belongs to alpha.

Every eighth step log Z is computed again from the states at that step, so that rounding errors of
alpha and beta do not accumulate. See `steps.py` for the equations.
"""

import triton
import triton.language as tl

from .arguments import StridedEdges
from .steps import (
    beta_step,
    copy_states,
    from_step,
    is_renormalization_step,
    load_length,
    log_normalizer,
    state_row,
    store_beta_step,
    store_boundary_marginals,
    store_marginals,
)


@triton.jit
def chain_gradient_kernel(
    grad,  # StridedChains [N]
    scores,  # StridedEdges [T, N, C, K]
    edges,  # ChainEdges
    initial,  # StridedStates [N, C]
    final,  # StridedStates [N, C]
    lengths_ptr,  # [N] or None
    logz_ptr,  # [N] fp64
    saved_ptr,  # [T + 1, N, C] fp64
    workspace_ptr,  # [4, N, C] fp64
    gradients,  # ChainGradients
    T,
    N,
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Continue alpha to the end and beta to the start, and store the marginals.

    The workspace has alpha after the meeting point and beta before it, two rows for each direction.
    """
    n, C, K = (tl.program_id(0) // 2).to(tl.int64), edges.C, edges.K
    length, invalid = load_length(lengths_ptr, n, T)
    middle, row_stride = tl.maximum(length - 1, 0) // 2, tl.full([], N, tl.int64) * C
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    d_scores_ptr = gradients.edges_ptr + n * C * K
    saved_ptr += n * C
    workspace_ptr += n * C
    initial_ptr, initial_c = initial.ptr + n * initial.n, initial.c
    final_ptr, final_c = final.ptr + n * final.n, final.c
    d_initial_ptr, d_final_ptr = gradients.initial_ptr + n * C, gradients.final_ptr + n * C
    grad_logz = tl.load(grad.ptr + n * grad.n).to(ACC_DTYPE)
    logz = tl.load(logz_ptr + n)
    # A chain without a path has no marginals.
    logz = tl.where(logz == -float("inf"), float("inf"), logz)
    step_logz = logz
    if tl.program_id(0) % 2 == 0:
        first_ptr = workspace_ptr + state_row(middle, 0, False) * row_stride
        copy_states(first_ptr, saved_ptr + state_row(middle, 0, True) * row_stride, C, BLOCK_C)
        for i in range(0, length - middle):
            t = middle + i
            t64 = tl.full([], t, tl.int64)
            alpha_ptr = workspace_ptr + state_row(t, 0, False) * row_stride
            next_ptr = workspace_ptr + state_row(t + 1, 0, False) * row_stride
            if is_renormalization_step(i):
                beta_ptr = saved_ptr + t64 * row_stride
                step_logz = log_normalizer(alpha_ptr, beta_ptr, C, step_logz, BLOCK_C, ACC_DTYPE)
            step_scores, d_step_ptr = from_step(scores, t64), d_scores_ptr + t64 * row_stride * K
            for c0 in range(0, C, BLOCK_C):
                c = c0 + tl.arange(0, BLOCK_C)
                beta_ptr = saved_ptr + (t64 + 1) * row_stride
                beta = tl.load(beta_ptr + c, mask=c < C, other=-float("inf"))
                step = (d_step_ptr, alpha_ptr, step_scores, edges, c, beta, step_logz, grad_logz)
                value = store_marginals(*step, UNROLL_IN, ACC_DTYPE)
                tl.store(next_ptr + c, value, mask=c < C)
        last_ptr = workspace_ptr + state_row(length, 0, False) * row_stride
        # After the length the gradient is 0, or NaN for an invalid length.
        step_stride, width = row_stride * K, C * K
        for t in range(length, T):
            for e0 in range(0, width, BLOCK_C):
                e = e0 + tl.arange(0, BLOCK_C)
                values = tl.full([BLOCK_C], invalid, tl.float64).to(d_scores_ptr.dtype.element_ty)
                step_ptr = d_scores_ptr + tl.full([], t, tl.int64) * step_stride
                tl.store(step_ptr + e, values, mask=e < width)
        if length > 0:
            store_boundary_marginals(
                d_final_ptr, final_ptr, final_c, last_ptr, 1, C, logz, grad_logz, BLOCK_C
            )
        else:
            store_boundary_marginals(
                d_final_ptr, final_ptr, final_c, initial_ptr, initial_c, C, logz, grad_logz, BLOCK_C
            )
    elif length > 0:
        t64 = tl.full([], middle, tl.int64)
        next_ptr = workspace_ptr + state_row(middle, 1, False) * row_stride
        beta_ptr, step_scores = saved_ptr + (t64 + 1) * row_stride, from_step(scores, t64)
        store_beta_step(next_ptr, beta_ptr, step_scores, edges, UNROLL_OUT, BLOCK_C, ACC_DTYPE)
        for i in range(0, middle):
            t = middle - 1 - i
            t64 = tl.full([], t, tl.int64)
            beta_ptr = workspace_ptr + state_row(t + 1, 1, False) * row_stride
            next_ptr = workspace_ptr + state_row(t, 1, False) * row_stride
            if is_renormalization_step(i):
                alpha_ptr = saved_ptr + (t64 + 1) * row_stride
                step_logz = log_normalizer(alpha_ptr, beta_ptr, C, step_logz, BLOCK_C, ACC_DTYPE)
            step_scores, d_step_ptr = from_step(scores, t64), d_scores_ptr + t64 * row_stride * K
            for c0 in range(0, C, BLOCK_C):
                c = c0 + tl.arange(0, BLOCK_C)
                value = beta_step(beta_ptr, step_scores, edges, c, UNROLL_OUT, ACC_DTYPE)
                tl.store(next_ptr + c, value, mask=c < C)
                beta = tl.load(beta_ptr + c, mask=c < C, other=-float("inf"))
                alpha_ptr = saved_ptr + t64 * row_stride
                step = (d_step_ptr, alpha_ptr, step_scores, edges, c, beta, step_logz, grad_logz)
                store_marginals(*step, UNROLL_IN, ACC_DTYPE)
        first_ptr = workspace_ptr + state_row(0, 1, False) * row_stride
        store_boundary_marginals(
            d_initial_ptr, initial_ptr, initial_c, first_ptr, 1, C, logz, grad_logz, BLOCK_C
        )
    else:
        store_boundary_marginals(
            d_initial_ptr, initial_ptr, initial_c, final_ptr, final_c, C, logz, grad_logz, BLOCK_C
        )
