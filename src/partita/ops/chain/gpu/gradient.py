"""The gradient of log Z of sparse linear chains of any size: the marginals of all edges.

The forward scan (`forward_scan.py`) saves alpha in the first half of a chain and beta in the
second. Here two programs per chain continue both scans: one takes alpha from the meeting point to
the end, along the saved beta; the other takes beta from the meeting point to the start, along the
saved alpha. Each step stores marginal * grad for its edges. The middle step belongs to alpha.

Every eighth step log Z is computed again from the states at that step, so that rounding errors of
alpha and beta do not accumulate. See `steps.py` for the equations.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .steps import (
    EdgeArray,
    beta_step,
    clear_after_length,
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


class GradientMemory(NamedTuple):
    """The memory of a chain in the gradient.

    Fields:
        saved_ptr: alpha up to the meeting point and beta after it, a row for each time.
        workspace_ptr: alpha after that point and beta before it, two rows for each direction.
        d_scores_ptr: the gradient of the scores.
        row_stride: the stride over the rows of states, which K multiplies for d_scores.
    """

    saved_ptr: tl.tensor
    workspace_ptr: tl.tensor
    d_scores_ptr: tl.tensor
    row_stride: tl.tensor


@triton.jit
def chain_gradient_kernel(
    grad_ptr,  # [N]
    grad_n,
    scores,  # StridedEdges [T, N, C, K]
    edges,  # ChainEdges
    initial,  # StridedStates [N, C]
    final,  # StridedStates [N, C]
    lengths_ptr,  # [N] or None
    logz_ptr,  # [N] fp64
    saved_ptr,  # [T + 1, N, C] fp64
    workspace_ptr,  # [4, N, C] fp64
    d_scores_ptr,  # [T, N, C, K]
    d_initial_ptr,  # [N, C]
    d_final_ptr,  # [N, C]
    T,
    N,
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Continue alpha to the end and beta to the start, and store the marginals."""
    n = (tl.program_id(0) // 2).to(tl.int64)
    C, K = edges.C, edges.K
    length, invalid = load_length(lengths_ptr, n, T)
    middle, row_stride = tl.maximum(length - 1, 0) // 2, tl.full([], N, tl.int64) * C
    scores = EdgeArray(scores.ptr + n * scores.n, scores.t, scores.c, scores.k)
    d_scores_ptr += n * C * K
    memory = GradientMemory(saved_ptr + n * C, workspace_ptr + n * C, d_scores_ptr, row_stride)
    initial_ptr, initial_c = initial.ptr + n * initial.n, initial.c
    final_ptr, final_c = final.ptr + n * final.n, final.c
    d_initial_ptr += n * C
    d_final_ptr += n * C
    grad = tl.load(grad_ptr + n * grad_n).to(ACC_DTYPE)
    logz = tl.load(logz_ptr + n)
    # A chain without a path has no marginals.
    logz = tl.where(logz == -float("inf"), float("inf"), logz)
    if tl.program_id(0) % 2 == 0:
        alpha_ptr = extend_alpha(
            memory, scores, edges, length, middle, logz, grad, UNROLL_IN, BLOCK_C, ACC_DTYPE
        )
        clear_after_length(d_scores_ptr, length, T, row_stride * K, C * K, invalid, BLOCK_C)
        if length > 0:
            store_boundary_marginals(
                d_final_ptr, final_ptr, final_c, alpha_ptr, 1, C, logz, grad, BLOCK_C
            )
        else:
            store_boundary_marginals(
                d_final_ptr, final_ptr, final_c, initial_ptr, initial_c, C, logz, grad, BLOCK_C
            )
    elif length > 0:
        beta_ptr = extend_beta(
            memory, scores, edges, middle, logz, grad, UNROLL_IN, UNROLL_OUT, BLOCK_C, ACC_DTYPE
        )
        store_boundary_marginals(
            d_initial_ptr, initial_ptr, initial_c, beta_ptr, 1, C, logz, grad, BLOCK_C
        )
    else:
        store_boundary_marginals(
            d_initial_ptr, initial_ptr, initial_c, final_ptr, final_c, C, logz, grad, BLOCK_C
        )


@triton.jit
def extend_alpha(
    memory,
    scores,
    edges,
    length,
    middle,
    logz,
    grad,
    UNROLL_IN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan alpha from the meeting point to the end, and store the marginals of its steps.

    Returns the address of alpha at the end.
    """
    saved_ptr, workspace_ptr, d_scores_ptr, row_stride = memory
    C = edges.C
    copy_states(
        workspace_ptr + state_row(middle, 0, False) * row_stride,
        saved_ptr + state_row(middle, 0, True) * row_stride,
        C,
        BLOCK_C,
    )
    for i in range(0, length - middle):
        t = middle + i
        t64 = tl.full([], t, tl.int64)
        alpha_ptr = workspace_ptr + state_row(t, 0, False) * row_stride
        next_ptr = workspace_ptr + state_row(t + 1, 0, False) * row_stride
        if is_renormalization_step(i):
            beta_ptr = saved_ptr + t64 * row_stride
            logz = log_normalizer(alpha_ptr, beta_ptr, C, logz, BLOCK_C, ACC_DTYPE)
        step_scores, d_step_ptr = from_step(scores, t64), d_scores_ptr + t64 * row_stride * edges.K
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            beta = tl.load(saved_ptr + (t64 + 1) * row_stride + c, mask=c < C, other=-float("inf"))
            value = store_marginals(
                d_step_ptr, alpha_ptr, step_scores, edges, c, beta, logz, grad, UNROLL_IN, ACC_DTYPE
            )
            tl.store(next_ptr + c, value, mask=c < C)
    return workspace_ptr + state_row(length, 0, False) * row_stride


@triton.jit
def extend_beta(
    memory,
    scores,
    edges,
    middle,
    logz,
    grad,
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan beta from the middle step to the start, and store the marginals before that step.

    Returns the address of beta at the start.
    """
    saved_ptr, workspace_ptr, d_scores_ptr, row_stride = memory
    C, t64 = edges.C, tl.full([], middle, tl.int64)
    store_beta_step(
        workspace_ptr + state_row(middle, 1, False) * row_stride,
        saved_ptr + (t64 + 1) * row_stride,
        from_step(scores, t64),
        edges,
        UNROLL_OUT,
        BLOCK_C,
        ACC_DTYPE,
    )
    for i in range(0, middle):
        t = middle - 1 - i
        t64 = tl.full([], t, tl.int64)
        beta_ptr = workspace_ptr + state_row(t + 1, 1, False) * row_stride
        next_ptr = workspace_ptr + state_row(t, 1, False) * row_stride
        if is_renormalization_step(i):
            alpha_ptr = saved_ptr + (t64 + 1) * row_stride
            logz = log_normalizer(alpha_ptr, beta_ptr, C, logz, BLOCK_C, ACC_DTYPE)
        step_scores, d_step_ptr = from_step(scores, t64), d_scores_ptr + t64 * row_stride * edges.K
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            value = beta_step(beta_ptr, step_scores, edges, c, UNROLL_OUT, ACC_DTYPE)
            tl.store(next_ptr + c, value, mask=c < C)
            beta = tl.load(beta_ptr + c, mask=c < C, other=-float("inf"))
            alpha_ptr = saved_ptr + t64 * row_stride
            store_marginals(
                d_step_ptr, alpha_ptr, step_scores, edges, c, beta, logz, grad, UNROLL_IN, ACC_DTYPE
            )
    return workspace_ptr + state_row(0, 1, False) * row_stride
