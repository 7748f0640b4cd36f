"""Means over the paths of sparse linear chains: alpha with the mean of the values along the paths.

A path has a value on each of its edges, on its first state and on its last state. The value of the
path is their sum. With the posterior of the edges into a state,

    p[c, k]        = exp(alpha[t, source[c, k]] + scores[t, c, k] - alpha[t + 1, c])
    mean[t + 1, c] = sum over k of p[c, k] * (mean[t, source[c, k]] + values[t, c, k])

is the mean value of the paths that end in c. The mean over all paths weights mean[length, c] +
last_values[c] by the posterior of the final states. This is the expectation semiring; it carries
means and not sums, so that both components stay bounded. One program serves one chain.

Source: Eisner, Parameter estimation for probabilistic finite-state transducers, 2002.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, finite_shift
from .steps import edge_score, load_length, load_source, shifted_log, store_boundary_scores


@triton.jit
def weighted(weight, value):
    """Return weight * value in fp64, with 0 * (±inf) = 0."""
    return tl.where(weight == 0.0, 0.0, weight.to(tl.float64) * value)


@triton.jit
def alpha_mean_step(
    alpha_ptr,
    mean_ptr,
    score_ptr,
    value_ptr,
    source_ptr,
    c,
    C,
    K,
    stride_c,
    stride_k,
    value_c,
    value_k,
    ACC_DTYPE: tl.constexpr,
):
    """Compute alpha after a step and the mean of the values over the paths into the states c.

    Each is [BLOCK_C] and fp64.
    """
    maximum = tl.full(c.shape, -float("inf"), tl.float64)
    total = tl.zeros(c.shape, ACC_DTYPE)
    mean = tl.zeros(c.shape, tl.float64)
    for k in range(K):
        source, valid = load_source(source_ptr, c, k, C, K)
        maximum = tl.maximum(
            maximum,
            tl.load(alpha_ptr + source, mask=valid, other=-float("inf"))
            + edge_score(score_ptr, c, k, valid, stride_c, stride_k),
        )
    shift = finite_shift(maximum)
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
        weight = exp((term - shift).to(ACC_DTYPE))
        total += weight
        mean += weighted(weight, value + tl.load(mean_ptr + source, mask=valid, other=0.0))
    return shifted_log(shift, total), tl.where(total == 0.0, 0.0, mean / total.to(tl.float64))


@triton.jit
def final_terms(alpha_ptr, final_ptr, c, C, final_c):
    """Return alpha + final of the states c at the length, -inf for lanes without a state."""
    value = tl.load(alpha_ptr + c, mask=c < C, other=-float("inf"))
    value += tl.load(final_ptr + c * final_c, mask=c < C, other=0.0).to(tl.float64)
    return tl.where(c < C, value, -float("inf"))


@triton.jit
def chain_expectation_kernel(
    scores_ptr,  # [T, N, C, K]
    source_ptr,  # [C, K] int32
    initial_ptr,  # [N, C]
    final_ptr,  # [N, C]
    lengths_ptr,  # [N] or None
    values_ptr,  # [T, N, C, K]
    first_values_ptr,  # [N, C]
    last_values_ptr,  # [N, C]
    saved_ptr,  # [2, T + 1, N, C] fp64, or [2, 2, N, C]: alpha and means
    mean_ptr,  # [N] fp64
    logz_ptr,  # [N] fp64
    saved_mean_offset,
    T,
    N,
    C,
    K,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    value_t,
    value_n,
    value_c,
    value_k,
    initial_n,
    initial_c,
    final_n,
    final_c,
    first_n,
    first_c,
    last_n,
    last_c,
    SAVE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Compute the mean of the values over all paths of a chain, and log Z."""
    n = tl.program_id(0).to(tl.int64)
    length, invalid = load_length(lengths_ptr, n, T)
    row_stride, lane = tl.full([], N, tl.int64) * C, tl.arange(0, BLOCK_C)
    saved_ptr += n * C
    store_boundary_scores(saved_ptr, initial_ptr + n * initial_n, C, initial_c, invalid, BLOCK_C)
    store_boundary_scores(
        saved_ptr + saved_mean_offset, first_values_ptr + n * first_n, C, first_c, 0.0, BLOCK_C
    )
    for t in range(0, length):
        row, next_row = tl.full([], t, tl.int64), tl.full([], t + 1, tl.int64)
        score_ptr = scores_ptr + n * stride_n + row * stride_t
        value_ptr = values_ptr + n * value_n + row * value_t
        if not SAVE:
            row, next_row = row % 2, next_row % 2
        tl.debug_barrier()
        for c0 in range(0, C, BLOCK_C):
            c = c0 + lane
            alpha, mean = alpha_mean_step(
                saved_ptr + row * row_stride,
                saved_ptr + saved_mean_offset + row * row_stride,
                score_ptr,
                value_ptr,
                source_ptr,
                c,
                C,
                K,
                stride_c,
                stride_k,
                value_c,
                value_k,
                ACC_DTYPE,
            )
            tl.store(saved_ptr + next_row * row_stride + c, alpha, mask=c < C)
            tl.store(saved_ptr + saved_mean_offset + next_row * row_stride + c, mean, mask=c < C)
    tl.debug_barrier()
    last_row = tl.full([], length, tl.int64)
    if not SAVE:
        last_row = last_row % 2
    maximum = tl.full([], -float("inf"), tl.float64)
    total = tl.zeros([BLOCK_C], ACC_DTYPE)
    mean = tl.zeros([BLOCK_C], tl.float64)
    for c0 in range(0, C, BLOCK_C):
        maximum = tl.maximum(
            maximum,
            tl.max(
                final_terms(
                    saved_ptr + last_row * row_stride,
                    final_ptr + n * final_n,
                    c0 + lane,
                    C,
                    final_c,
                ),
                axis=0,
            ),
        )
    shift = finite_shift(maximum)
    for c0 in range(0, C, BLOCK_C):
        c = c0 + lane
        weight = exp(
            (
                final_terms(
                    saved_ptr + last_row * row_stride, final_ptr + n * final_n, c, C, final_c
                )
                - shift
            ).to(ACC_DTYPE)
        )
        value = tl.load(
            saved_ptr + saved_mean_offset + last_row * row_stride + c, mask=c < C, other=0.0
        )
        value += tl.load(last_values_ptr + n * last_n + c * last_c, mask=c < C, other=0.0).to(
            tl.float64
        )
        total += weight
        mean += weighted(weight, value)
    sum_exp = tl.sum(total, axis=0)
    tl.store(
        mean_ptr + n,
        tl.where(sum_exp == 0.0, 0.0, tl.sum(mean, axis=0) / sum_exp.to(tl.float64)) + invalid,
    )
    tl.store(logz_ptr + n, shifted_log(shift, sum_exp) + invalid)
