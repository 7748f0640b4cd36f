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

from .steps import (
    beta_step,
    clear_after_length,
    is_renormalization_step,
    load_length,
    log_normalizer,
    state_row,
    store_boundary_marginals,
    store_marginals,
)


@triton.jit
def chain_gradient_kernel(
    grad_ptr,  # [N]
    scores_ptr,  # [T, N, C, K]
    source_ptr,  # [C, K] int32
    out_offsets_ptr,  # [C + 1] int32
    out_edges_ptr,  # [C * K] int32
    initial_ptr,  # [N, C]
    final_ptr,  # [N, C]
    lengths_ptr,  # [N] or None
    logz_ptr,  # [N] fp64
    saved_ptr,  # [T + 1, N, C] fp64
    workspace_ptr,  # [4, N, C] fp64
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
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Continue alpha to the end and beta to the start, and store the marginals."""
    n = (tl.program_id(0) // 2).to(tl.int64)
    length, invalid = load_length(lengths_ptr, n, T)
    middle = tl.maximum(length - 1, 0) // 2
    row_stride = tl.full([], N, tl.int64) * C
    saved_ptr += n * C
    workspace_ptr += n * C
    scores_ptr += n * stride_n
    d_scores_ptr += n * C * K
    initial_ptr += n * initial_n
    final_ptr += n * final_n
    grad = tl.load(grad_ptr + n * grad_n).to(ACC_DTYPE)
    logz = tl.load(logz_ptr + n)
    # A chain without a path has no marginals.
    logz = tl.where(logz == -float("inf"), float("inf"), logz)
    if tl.program_id(0) % 2 == 0:
        extend_alpha(
            d_scores_ptr,
            saved_ptr,
            workspace_ptr,
            scores_ptr,
            source_ptr,
            length,
            middle,
            logz,
            grad,
            row_stride,
            C,
            K,
            stride_t,
            stride_c,
            stride_k,
            UNROLL_IN,
            BLOCK_C,
            ACC_DTYPE,
        )
        clear_after_length(d_scores_ptr, length, T, row_stride * K, C * K, invalid, BLOCK_C)
        if length > 0:
            final_alpha_ptr = workspace_ptr + state_row(length, 0, False) * row_stride
            store_boundary_marginals(
                d_final_ptr + n * C,
                final_ptr,
                final_c,
                final_alpha_ptr,
                1,
                C,
                logz,
                grad,
                BLOCK_C,
            )
        else:
            store_boundary_marginals(
                d_final_ptr + n * C,
                final_ptr,
                final_c,
                initial_ptr,
                initial_c,
                C,
                logz,
                grad,
                BLOCK_C,
            )
    elif length > 0:
        extend_beta(
            d_scores_ptr,
            saved_ptr,
            workspace_ptr,
            scores_ptr,
            source_ptr,
            out_offsets_ptr,
            out_edges_ptr,
            middle,
            logz,
            grad,
            row_stride,
            C,
            K,
            stride_t,
            stride_c,
            stride_k,
            UNROLL_IN,
            UNROLL_OUT,
            BLOCK_C,
            ACC_DTYPE,
        )
        initial_beta_ptr = workspace_ptr + state_row(0, 1, False) * row_stride
        store_boundary_marginals(
            d_initial_ptr + n * C,
            initial_ptr,
            initial_c,
            initial_beta_ptr,
            1,
            C,
            logz,
            grad,
            BLOCK_C,
        )
    else:
        store_boundary_marginals(
            d_initial_ptr + n * C,
            initial_ptr,
            initial_c,
            final_ptr,
            final_c,
            C,
            logz,
            grad,
            BLOCK_C,
        )


@triton.jit
def extend_alpha(
    d_scores_ptr,
    saved_ptr,
    workspace_ptr,
    scores_ptr,
    source_ptr,
    length,
    middle,
    logz,
    grad,
    row_stride,
    C,
    K,
    stride_t,
    stride_c,
    stride_k,
    UNROLL_IN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan alpha from the meeting point to the end, and store the marginals of its steps."""
    lane = tl.arange(0, BLOCK_C)
    for c0 in range(0, C, BLOCK_C):
        value = tl.load(
            saved_ptr + state_row(middle, 0, True) * row_stride + c0 + lane, mask=c0 + lane < C
        )
        tl.store(
            workspace_ptr + state_row(middle, 0, False) * row_stride + c0 + lane,
            value,
            mask=c0 + lane < C,
        )
    for i in range(0, length - middle):
        t = middle + i
        t64 = tl.full([], t, tl.int64)
        alpha_ptr = workspace_ptr + state_row(t, 0, False) * row_stride
        beta_ptr = saved_ptr + (t64 + 1) * row_stride
        if is_renormalization_step(i):
            logz = log_normalizer(
                alpha_ptr, saved_ptr + t64 * row_stride, C, logz, BLOCK_C, ACC_DTYPE
            )
        for c0 in range(0, C, BLOCK_C):
            c = c0 + lane
            beta = tl.load(beta_ptr + c, mask=c < C, other=-float("inf"))
            value = store_marginals(
                d_scores_ptr + t64 * row_stride * K,
                alpha_ptr,
                scores_ptr + t64 * stride_t,
                source_ptr,
                c,
                beta,
                logz,
                grad,
                C,
                K,
                stride_c,
                stride_k,
                UNROLL_IN,
                ACC_DTYPE,
            )
            tl.store(workspace_ptr + state_row(t + 1, 0, False) * row_stride + c, value, mask=c < C)


@triton.jit
def extend_beta(
    d_scores_ptr,
    saved_ptr,
    workspace_ptr,
    scores_ptr,
    source_ptr,
    out_offsets_ptr,
    out_edges_ptr,
    middle,
    logz,
    grad,
    row_stride,
    C,
    K,
    stride_t,
    stride_c,
    stride_k,
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan beta from the middle step to the start, and store the marginals before that step."""
    lane = tl.arange(0, BLOCK_C)
    t64 = tl.full([], middle, tl.int64)
    for c0 in range(0, C, BLOCK_C):
        c = c0 + lane
        value = beta_step(
            saved_ptr + (t64 + 1) * row_stride,
            scores_ptr + t64 * stride_t,
            out_offsets_ptr,
            out_edges_ptr,
            c,
            C,
            K,
            stride_c,
            stride_k,
            UNROLL_OUT,
            ACC_DTYPE,
        )
        tl.store(workspace_ptr + state_row(middle, 1, False) * row_stride + c, value, mask=c < C)
    for i in range(0, middle):
        t = middle - 1 - i
        t64 = tl.full([], t, tl.int64)
        step_ptr = scores_ptr + t64 * stride_t
        beta_ptr = workspace_ptr + state_row(t + 1, 1, False) * row_stride
        if is_renormalization_step(i):
            logz = log_normalizer(
                saved_ptr + (t64 + 1) * row_stride, beta_ptr, C, logz, BLOCK_C, ACC_DTYPE
            )
        for c0 in range(0, C, BLOCK_C):
            c = c0 + lane
            value = beta_step(
                beta_ptr,
                step_ptr,
                out_offsets_ptr,
                out_edges_ptr,
                c,
                C,
                K,
                stride_c,
                stride_k,
                UNROLL_OUT,
                ACC_DTYPE,
            )
            tl.store(workspace_ptr + state_row(t, 1, False) * row_stride + c, value, mask=c < C)
            beta = tl.load(beta_ptr + c, mask=c < C, other=-float("inf"))
            store_marginals(
                d_scores_ptr + t64 * row_stride * K,
                saved_ptr + t64 * row_stride,
                step_ptr,
                source_ptr,
                c,
                beta,
                logz,
                grad,
                C,
                K,
                stride_c,
                stride_k,
                UNROLL_IN,
                ACC_DTYPE,
            )
