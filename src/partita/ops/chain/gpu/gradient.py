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
    copy_states,
    from_step,
    is_renormalization_step,
    load_length,
    log_normalizer,
    state_step,
    store_boundary_marginals,
    store_boundary_scores,
    store_slot_marginal,
    store_step,
)


@triton.jit
def continue_scan(
    states_ptr,  # [2, N, C] fp64: two rows that the states alternate between, given those at first
    saved_ptr,  # [T + 1, N, C] fp64, of the other direction
    scores,
    d_scores_ptr,
    edges,
    row_stride,
    first,
    num_steps,
    logz,
    grad,
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Continue alpha from the time `first` or, with REVERSE, beta, and store the marginals.

    Returns where the last states are.
    """
    C, K = edges.C, edges.K
    DEGREE: tl.constexpr = UNROLL_OUT if REVERSE else UNROLL_IN
    for i in range(0, num_steps):
        time = tl.full([], first - i if REVERSE else first + i, tl.int64)
        t = time - 1 if REVERSE else time
        state_ptr = states_ptr + i % 2 * row_stride
        next_ptr = states_ptr + (i + 1) % 2 * row_stride
        if is_renormalization_step(i):
            opposite_ptr = saved_ptr + time * row_stride
            logz = log_normalizer(state_ptr, opposite_ptr, C, logz, BLOCK_C, ACC_DTYPE)
        alpha_ptr = saved_ptr + t * row_stride if REVERSE else state_ptr
        beta_ptr = state_ptr if REVERSE else saved_ptr + (t + 1) * row_stride
        step_scores, d_step_ptr = from_step(scores, t), d_scores_ptr + t * row_stride * K
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            value = state_step(state_ptr, step_scores, edges, c, DEGREE, ACC_DTYPE, False, REVERSE)
            tl.store(next_ptr + c, value, mask=c < C)
            log_weight = tl.load(beta_ptr + c, mask=c < C, other=-float("inf")) - logz
            step = (d_step_ptr, alpha_ptr, step_scores, edges, c)
            if UNROLL_IN > 0:
                for k in tl.static_range(UNROLL_IN):
                    store_slot_marginal(*step, k, log_weight, grad)
            else:
                for k in range(K):
                    store_slot_marginal(*step, k, log_weight, grad)
    return states_ptr + num_steps % 2 * row_stride


@triton.jit
def chain_gradient_kernel(
    grad,  # StridedChains [N]
    chains,  # Chains
    logz_ptr,  # [N] fp64
    saved_ptr,  # [T + 1, N, C] fp64
    workspace_ptr,  # [4, N, C] fp64
    gradients,  # ChainGradients
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Continue alpha to the end and beta to the start, and store the marginals.

    The workspace has alpha after the meeting point and beta before it, two rows for each direction.
    """
    scores, edges, initial, final, lengths_ptr, T, N = chains
    n, C, K = (tl.program_id(0) // 2).to(tl.int64), edges.C, edges.K
    length, invalid = load_length(lengths_ptr, n, T)
    middle, row_stride = tl.maximum(length - 1, 0) // 2, tl.full([], N, tl.int64) * C
    middle64 = tl.full([], middle, tl.int64)
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    d_scores_ptr = gradients.edges_ptr + n * C * K
    saved_ptr += n * C
    states_ptr = workspace_ptr + tl.program_id(0) % 2 * 2 * row_stride + n * C
    initial_ptr, final_ptr = initial.ptr + n * initial.n, final.ptr + n * final.n
    grad_logz = tl.load(grad.ptr + n * grad.n).to(ACC_DTYPE)
    logz = tl.load(logz_ptr + n)
    # A chain without a path has no marginals.
    logz = tl.where(logz == -float("inf"), float("inf"), logz)
    inputs = (states_ptr, saved_ptr, scores, d_scores_ptr, edges, row_stride, middle)
    weights = (logz, grad_logz)
    if tl.program_id(0) % 2 == 0:
        copy_states(states_ptr, saved_ptr + middle64 * row_stride, C, BLOCK_C)
        last_ptr = continue_scan(
            *inputs, length - middle, *weights, UNROLL_IN, UNROLL_OUT, BLOCK_C, ACC_DTYPE, False
        )
        # After the length the gradient is 0, or NaN for an invalid length.
        step_stride, width = row_stride * K, C * K
        for t in range(length, T):
            for e0 in range(0, width, BLOCK_C):
                e = e0 + tl.arange(0, BLOCK_C)
                values = tl.full([BLOCK_C], invalid, tl.float64).to(d_scores_ptr.dtype.element_ty)
                step_ptr = d_scores_ptr + tl.full([], t, tl.int64) * step_stride
                tl.store(step_ptr + e, values, mask=e < width)
        d_final_ptr = gradients.final_ptr + n * C
        store_boundary_marginals(d_final_ptr, final_ptr, final.c, last_ptr, C, *weights, BLOCK_C)
    else:
        if length > 0:
            beta_ptr, step_scores = (
                saved_ptr + (middle64 + 1) * row_stride,
                from_step(scores, middle64),
            )
            step = (states_ptr, beta_ptr, step_scores, edges)
            store_step(*step, UNROLL_OUT, BLOCK_C, ACC_DTYPE, False, True)
        else:
            store_boundary_scores(states_ptr, final_ptr, C, final.c, 0.0, BLOCK_C)
        first_ptr = continue_scan(
            *inputs, middle, *weights, UNROLL_IN, UNROLL_OUT, BLOCK_C, ACC_DTYPE, True
        )
        d_initial_ptr = gradients.initial_ptr + n * C
        store_boundary_marginals(
            d_initial_ptr, initial_ptr, initial.c, first_ptr, C, *weights, BLOCK_C
        )
