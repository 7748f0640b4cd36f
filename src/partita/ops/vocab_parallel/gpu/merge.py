"""Kernels that merge the packed states of all ranks, and that compute gradient coefficients.

For 8 ranks and 8,192 rows on an H100 they take 4 and 2 µs of the GPU and 25 and 19 µs of the host.
In plain PyTorch it is 63 and 26 µs of the GPU, and 450 and 240 µs of the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E, finite_shift, log_exact


@triton.jit
def load_field(state_ptr, field, stride, mask):
    """Load one field of the state of a rank."""
    return tl.load(state_ptr + field * stride, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["M", "world", "V", "first_class", "rank", "ignore_index"])
def parallel_fields_kernel(
    # [world, PACKED, M]: maximum, sumexp, label logit, number of classes; with HAS_SMOOTHING
    # origin, smoothing loss and sum of the class weights; with ENTROPY sum_x_exp and argmax
    gathered_ptr,
    target_ptr,  # [M]
    results,  # RowStatistics [M]
    M,
    world,
    V,  # classes of all ranks
    first_class,  # of this rank
    rank,
    ignore_index,
    temperature: tl.float64,
    HAS_SMOOTHING: tl.constexpr,
    ENTROPY: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the states of all ranks in rank order into the statistics of the rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = row < M
    temperature = tl.full([], temperature, ACC_DTYPE)
    stride = tl.cast(M, tl.int64)
    PACKED: tl.constexpr = 4 + 3 * HAS_SMOOTHING + 2 * ENTROPY
    maximum = tl.full([BLOCK], -float("inf"), ACC_DTYPE)
    for r in range(world):
        maximum = tl.maximum(
            maximum, load_field(gathered_ptr + r * PACKED * stride + row, 0, stride, mask)
        )
    slope = tl.full([], LOG2E, ACC_DTYPE) / temperature
    shift = finite_shift(maximum)
    zeros = tl.zeros([BLOCK], ACC_DTYPE)
    label_logit = tl.full([BLOCK], -float("inf"), ACC_DTYPE)
    sumexp, classes_before, classes_total, weights = zeros, zeros, zeros, zeros
    smoothing_loss, sum_x_exp, argmax = zeros, zeros, tl.zeros([BLOCK], tl.int64) + V
    for r in range(world):
        state_ptr = gathered_ptr + r * PACKED * stride + row
        rank_maximum = load_field(state_ptr, 0, stride, mask)
        rank_sumexp = load_field(state_ptr, 1, stride, mask)
        rank_classes = load_field(state_ptr, 3, stride, mask)
        scale = tl.exp2((rank_maximum - shift) * slope)
        sumexp += rank_sumexp * scale
        label_logit = tl.maximum(label_logit, load_field(state_ptr, 2, stride, mask))
        classes_before += tl.where(r < rank, rank_classes, 0.0)
        classes_total += rank_classes
        if HAS_SMOOTHING:  # The losses are moved to the origin of the first rank.
            weight = load_field(state_ptr, 6, stride, mask)
            origin = load_field(gathered_ptr + row, 4, stride, mask)
            origin_difference = origin - load_field(state_ptr, 4, stride, mask)
            smoothing_loss += load_field(state_ptr, 5, stride, mask) + weight * origin_difference
            weights += weight
        if ENTROPY:
            moved = rank_sumexp * (shift - finite_shift(rank_maximum)) / temperature
            sum_x_exp += scale * (load_field(state_ptr, PACKED - 2, stride, mask) - moved)
            index = load_field(state_ptr, PACKED - 1, stride, mask)
            index = index.to(tl.int64 if ACC_DTYPE == tl.float64 else tl.int32, bitcast=True)
            argmax = tl.minimum(argmax, tl.where(rank_maximum == maximum, index.to(tl.int64), V))
    target = tl.load(target_ptr + row, mask=mask, other=0).to(tl.int64)
    not_ignored = target != ignore_index
    no_class = not_ignored & ((target < 0) | (target >= V))
    disagree = classes_before != first_class
    invalid = no_class | disagree | (classes_total != V)
    nan_if_invalid = tl.where(invalid, float("nan"), 0.0).to(ACC_DTYPE)
    shift, log_sumexp = finite_shift(maximum), log_exact(sumexp)
    nll = tl.where(not_ignored, log_sumexp + (shift - label_logit) / temperature, 0.0)
    tl.store(results.nll + row, nll + nan_if_invalid, mask=mask)
    logsumexp_ptrs = results.logsumexp + row
    tl.store(logsumexp_ptrs, shift / temperature + log_sumexp + nan_if_invalid, mask=mask)
    tl.store(results.maximum + row, maximum, mask=mask)
    tl.store(results.sumexp + row, sumexp, mask=mask)
    if HAS_SMOOTHING:
        first_origin = load_field(gathered_ptr + row, 4, stride, mask)
        loss = weights * (log_sumexp + (shift - first_origin)) + smoothing_loss
        tl.store(results.smoothing_loss + row, loss + nan_if_invalid, mask=mask)
    if ENTROPY:
        entropy = log_sumexp - sum_x_exp / sumexp
        tl.store(results.entropy + row, entropy + nan_if_invalid, mask=mask)
        # A maximum of NaN equals no rank's maximum, so the index stays V.
        tl.store(results.argmax + row, tl.minimum(argmax, V - 1), mask=mask)


@triton.jit(do_not_specialize=["M", "V", "ignore_index"])
def parallel_coefficients_kernel(
    target_ptr,  # [M]
    grad_nll_ptr,  # [M] or None
    grad_logsumexp_ptr,  # [M] or None
    grad_smoothing_ptr,  # [M] or None
    grad_entropy_ptr,  # [M] or None
    entropy_ptr,  # [M] or None
    total_weight_ptr,  # [] sum of the class weights, or None for their number
    coefficients,  # GradientCoefficients
    M,
    V,  # classes of all ranks
    ignore_index,
    temperature: tl.float64,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the coefficients of each row's gradient from the gradients of its statistics."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = row < M
    temperature = tl.full([], temperature, ACC_DTYPE)
    target = tl.load(target_ptr + row, mask=mask, other=0).to(tl.int64)
    counts = target != ignore_index
    invalid = counts & ((target < 0) | (target >= V))
    dlogits_coef = tl.where(invalid, float("nan"), 0.0).to(ACC_DTYPE)
    label_coef = tl.zeros([BLOCK], ACC_DTYPE)
    if grad_nll_ptr is not None:
        label_coef = -tl.where(counts, tl.load(grad_nll_ptr + row, mask=mask, other=0.0), 0.0)
        dlogits_coef -= label_coef
    if grad_logsumexp_ptr is not None:
        dlogits_coef += tl.load(grad_logsumexp_ptr + row, mask=mask, other=0.0)
    if coefficients.smoothing_coef is not None:
        grad_smoothing = tl.load(grad_smoothing_ptr + row, mask=mask, other=0.0)
        weight = V.to(ACC_DTYPE)
        if total_weight_ptr is not None:
            weight = tl.load(total_weight_ptr).to(ACC_DTYPE)
        dlogits_coef += grad_smoothing * weight
        smoothing_ptrs = coefficients.smoothing_coef + row
        tl.store(smoothing_ptrs, -grad_smoothing / temperature, mask=mask)
    if coefficients.log_coef is not None:
        grad_entropy = tl.load(grad_entropy_ptr + row, mask=mask, other=0.0)
        # A row without a gradient has the coefficient 0, whatever its entropy is.
        of_row = grad_entropy * tl.load(entropy_ptr + row, mask=mask, other=0.0)
        dlogits_coef -= tl.where(grad_entropy == 0.0, 0.0, of_row)
        tl.store(coefficients.log_coef + row, -grad_entropy / temperature, mask=mask)
    tl.store(coefficients.dlogits_coef + row, dlogits_coef / temperature, mask=mask)
    tl.store(coefficients.label_coef + row, label_coef / temperature, mask=mask)
