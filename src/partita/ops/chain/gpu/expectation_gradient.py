"""The gradient of the mean over paths of sparse linear chains.

The forward pass (`expectation.py`) saves alpha and the mean of the values over the paths into
each state. Here one program per chain scans beta down from the length, with the mean of the
values over the paths onward from each state. For an edge with posterior p and value v,

    through          = mean into its source + v + mean onward from the state that it enters
    d mean / d value = p
    d mean / d score = p * (through - mean over all paths)

The same holds for initial and final scores, with the posteriors of the first and last states.
Every eighth step log Z is computed again from the states at that step, so that rounding errors of
alpha and beta do not accumulate.

Source: Li and Eisner, First- and second-order expectation semirings, 2009.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, finite_shift
from .expectation import weighted
from .steps import (
    edge_score,
    is_renormalization_step,
    load_length,
    load_source,
    log_normalizer,
    shifted_log,
    store_boundary_scores,
)


@triton.jit
def beta_mean_step(
    beta_ptr,
    mean_ptr,
    score_ptr,
    value_ptr,
    out_offsets_ptr,
    out_edges_ptr,
    s,
    C,
    K,
    stride_c,
    stride_k,
    value_c,
    value_k,
    ACC_DTYPE: tl.constexpr,
):
    """Compute beta before a step and the mean of the values over the paths onward from s.

    Each is [BLOCK_C] and fp64.
    """
    maximum = tl.full(s.shape, -float("inf"), tl.float64)
    total = tl.zeros(s.shape, ACC_DTYPE)
    mean = tl.zeros(s.shape, tl.float64)
    start = tl.load(out_offsets_ptr + s, mask=s < C, other=0)
    degree = tl.load(out_offsets_ptr + s + 1, mask=s < C, other=0) - start
    for j in range(tl.max(degree, axis=0)):
        edge = tl.load(out_edges_ptr + start + j, mask=j < degree, other=0)
        beta = tl.load(beta_ptr + edge // K, mask=j < degree, other=-float("inf"))
        maximum = tl.maximum(
            maximum,
            beta + edge_score(score_ptr, edge // K, edge % K, j < degree, stride_c, stride_k),
        )
    shift = finite_shift(maximum)
    for j in range(tl.max(degree, axis=0)):
        edge = tl.load(out_edges_ptr + start + j, mask=j < degree, other=0)
        beta = tl.load(beta_ptr + edge // K, mask=j < degree, other=-float("inf"))
        term = beta + edge_score(score_ptr, edge // K, edge % K, j < degree, stride_c, stride_k)
        edge_value_ptr = (
            value_ptr + (edge // K).to(tl.int64) * value_c + edge % K * tl.cast(value_k, tl.int64)
        )
        value = tl.load(edge_value_ptr, mask=j < degree, other=0.0).to(tl.float64)
        weight = exp((term - shift).to(ACC_DTYPE))
        total += weight
        mean += weighted(weight, value + tl.load(mean_ptr + edge // K, mask=j < degree, other=0.0))
    return shifted_log(shift, total), tl.where(total == 0.0, 0.0, mean / total.to(tl.float64))


@triton.jit
def store_gradients(
    scores_ptr,
    values_ptr,
    offset,
    posterior,
    value,
    valid,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
):
    """Store the gradients of edges or states.

    The gradient of a value is the posterior. The gradient of a score is the posterior times
    `value`, which is the mean of the paths through the edge or state minus the mean of all paths.
    """
    if OF_SCORES:
        tl.store(
            scores_ptr + offset,
            weighted(posterior, value).to(scores_ptr.dtype.element_ty),
            mask=valid,
        )
    if OF_VALUES:
        tl.store(values_ptr + offset, posterior.to(values_ptr.dtype.element_ty), mask=valid)


@triton.jit
def store_edge_gradients(
    d_scores_ptr,
    d_values_ptr,
    alpha_ptr,
    saved_mean_offset,
    beta_ptr,
    workspace_mean_offset,
    score_ptr,
    value_ptr,
    source_ptr,
    c,
    offset,
    logz,
    mean,
    grad,
    C,
    K,
    stride_c,
    stride_k,
    value_c,
    value_k,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Store the gradients of the edges into the states c, [BLOCK_C]."""
    beta = tl.load(beta_ptr + c, mask=c < C, other=-float("inf"))
    beta_mean = tl.load(beta_ptr + workspace_mean_offset + c, mask=c < C, other=0.0) - mean
    for k in range(K):
        source, valid = load_source(source_ptr, c, k, C, K)
        term = tl.load(alpha_ptr + source, mask=valid, other=-float("inf")) + edge_score(
            score_ptr, c, k, valid, stride_c, stride_k
        )
        value = tl.load(
            value_ptr + c.to(tl.int64) * value_c + k * tl.cast(value_k, tl.int64),
            mask=valid,
            other=0.0,
        ).to(tl.float64)
        value += tl.load(alpha_ptr + saved_mean_offset + source, mask=valid, other=0.0) + beta_mean
        posterior = exp((term + (beta - logz)).to(ACC_DTYPE)) * grad
        store_gradients(
            d_scores_ptr,
            d_values_ptr,
            offset + c * K + k,
            posterior,
            value,
            c < C,
            OF_SCORES,
            OF_VALUES,
        )


@triton.jit
def store_boundary_gradients(
    d_scores_ptr,
    d_values_ptr,
    alpha_ptr,
    saved_mean_offset,
    beta_ptr,
    workspace_mean_offset,
    n,
    C,
    logz,
    mean,
    grad,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Store the gradients of the first or last states."""
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        log_weight = tl.load(alpha_ptr + c, mask=c < C, other=-float("inf")) + tl.load(
            beta_ptr + c, mask=c < C, other=0.0
        )
        value = (
            tl.load(alpha_ptr + saved_mean_offset + c, mask=c < C, other=0.0)
            + tl.load(beta_ptr + workspace_mean_offset + c, mask=c < C, other=0.0)
            - mean
        )
        posterior = exp((log_weight - logz).to(ACC_DTYPE)) * grad
        store_gradients(
            d_scores_ptr,
            d_values_ptr,
            n * C + c,
            posterior,
            value,
            c < C,
            OF_SCORES,
            OF_VALUES,
        )


@triton.jit
def chain_expectation_gradient_kernel(
    grad_ptr,  # [N]
    scores_ptr,  # [T, N, C, K]
    source_ptr,  # [C, K] int32
    out_offsets_ptr,  # [C + 1] int32
    out_edges_ptr,  # [C * K] int32
    final_ptr,  # [N, C]
    lengths_ptr,  # [N] or None
    values_ptr,  # [T, N, C, K]
    last_values_ptr,  # [N, C]
    mean_ptr,  # [N] fp64
    logz_ptr,  # [N] fp64
    saved_ptr,  # [2, T + 1, N, C] fp64: alpha and means
    workspace_ptr,  # [2, 2, N, C] fp64: beta and means onward
    d_scores_ptr,  # [T, N, C, K]
    d_initial_ptr,  # [N, C]
    d_final_ptr,  # [N, C]
    d_values_ptr,  # [T, N, C, K]
    d_first_values_ptr,  # [N, C]
    d_last_values_ptr,  # [N, C]
    saved_mean_offset,
    T,
    N,
    C,
    K,
    grad_n,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    value_t,
    value_n,
    value_c,
    value_k,
    final_n,
    final_c,
    last_n,
    last_c,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan beta and the mean onward down from the length, and store the gradients of each step."""
    n = tl.program_id(0).to(tl.int64)
    length, invalid = load_length(lengths_ptr, n, T)
    row_stride, lane = tl.full([], N, tl.int64) * C, tl.arange(0, BLOCK_C)
    grad = tl.load(grad_ptr + n * grad_n).to(tl.float64)
    mean, logz = tl.load(mean_ptr + n), tl.load(logz_ptr + n)
    # A chain without a path has no posterior.
    logz = tl.where(logz == -float("inf"), float("inf"), logz)
    saved_ptr += n * C
    workspace_ptr += n * C
    workspace_mean_offset = 2 * row_stride
    for t in range(length, T):
        for e0 in range(0, C * K, BLOCK_C):
            fill = tl.zeros([BLOCK_C], tl.float64) + invalid
            offset = (tl.full([], t, tl.int64) * N + n) * C * K + e0 + lane
            store_gradients(
                d_scores_ptr,
                d_values_ptr,
                offset,
                fill,
                fill,
                e0 + lane < C * K,
                OF_SCORES,
                OF_VALUES,
            )
    store_boundary_scores(
        workspace_ptr + length % 2 * row_stride, final_ptr + n * final_n, C, final_c, 0.0, BLOCK_C
    )
    store_boundary_scores(
        workspace_ptr + workspace_mean_offset + length % 2 * row_stride,
        last_values_ptr + n * last_n,
        C,
        last_c,
        0.0,
        BLOCK_C,
    )
    tl.debug_barrier()
    store_boundary_gradients(
        d_final_ptr,
        d_last_values_ptr,
        saved_ptr + length * row_stride,
        saved_mean_offset,
        workspace_ptr + length % 2 * row_stride,
        workspace_mean_offset,
        n,
        C,
        logz,
        mean,
        grad,
        OF_SCORES,
        OF_VALUES,
        BLOCK_C,
        ACC_DTYPE,
    )
    for i in range(0, length):
        t = length - 1 - i
        t64 = tl.full([], t, tl.int64)
        score_ptr = scores_ptr + n * stride_n + t64 * stride_t
        value_ptr = values_ptr + n * value_n + t64 * value_t
        beta_ptr = workspace_ptr + (t + 1) % 2 * row_stride
        new_beta_ptr = workspace_ptr + t % 2 * row_stride
        tl.debug_barrier()
        if is_renormalization_step(i):
            logz = log_normalizer(
                saved_ptr + (t64 + 1) * row_stride, beta_ptr, C, logz, BLOCK_C, ACC_DTYPE
            )
        for c0 in range(0, C, BLOCK_C):
            c = c0 + lane
            store_edge_gradients(
                d_scores_ptr,
                d_values_ptr,
                saved_ptr + t64 * row_stride,
                saved_mean_offset,
                beta_ptr,
                workspace_mean_offset,
                score_ptr,
                value_ptr,
                source_ptr,
                c,
                (t64 * N + n) * C * K,
                logz,
                mean,
                grad,
                C,
                K,
                stride_c,
                stride_k,
                value_c,
                value_k,
                OF_SCORES,
                OF_VALUES,
                ACC_DTYPE,
            )
            beta, beta_mean = beta_mean_step(
                beta_ptr,
                beta_ptr + workspace_mean_offset,
                score_ptr,
                value_ptr,
                out_offsets_ptr,
                out_edges_ptr,
                c,
                C,
                K,
                stride_c,
                stride_k,
                value_c,
                value_k,
                ACC_DTYPE,
            )
            tl.store(new_beta_ptr + c, beta, mask=c < C)
            tl.store(new_beta_ptr + workspace_mean_offset + c, beta_mean, mask=c < C)
    tl.debug_barrier()
    store_boundary_gradients(
        d_initial_ptr,
        d_first_values_ptr,
        saved_ptr,
        saved_mean_offset,
        workspace_ptr,
        workspace_mean_offset,
        n,
        C,
        logz,
        mean,
        grad,
        OF_SCORES,
        OF_VALUES,
        BLOCK_C,
        ACC_DTYPE,
    )
