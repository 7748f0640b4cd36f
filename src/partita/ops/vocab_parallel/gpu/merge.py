"""Kernels that merge the packed states of all ranks, and that compute gradient coefficients."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E, finite_shift, log_exact


@triton.jit(do_not_specialize=["M", "world", "V", "first_class", "rank", "ignore_index"])
def parallel_fields_kernel(
    # [world, PACKED, M]: maximum, sumexp, label logit, number of classes; with HAS_SMOOTHING
    # origin, smoothing loss and sum of the class weights; with ENTROPY sum_x_exp and argmax
    gathered_ptr,
    target_ptr,  # [M]
    nll_ptr,  # [M]
    logsumexp_ptr,  # [M]
    smoothing_loss_ptr,  # [M] or None
    entropy_ptr,  # [M] or None
    argmax_ptr,  # [M] int64 or None
    maximum_ptr,  # [M]
    sumexp_ptr,  # [M]
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
    slope = tl.full([], LOG2E, ACC_DTYPE) / temperature
    stride = tl.cast(M, tl.int64)
    PACKED: tl.constexpr = 4 + 3 * HAS_SMOOTHING + 2 * ENTROPY
    maximum = tl.full([BLOCK], -float("inf"), ACC_DTYPE)
    for r in range(world):
        maximum = tl.maximum(
            maximum, tl.load(gathered_ptr + r * PACKED * stride + row, mask=mask, other=0.0)
        )
    shift = finite_shift(maximum)
    sumexp = tl.zeros([BLOCK], ACC_DTYPE)
    label_logit = tl.full([BLOCK], -float("inf"), ACC_DTYPE)
    classes_before = tl.zeros([BLOCK], ACC_DTYPE)
    classes_total = tl.zeros([BLOCK], ACC_DTYPE)
    smoothing_loss = tl.zeros([BLOCK], ACC_DTYPE)
    weights = tl.zeros([BLOCK], ACC_DTYPE)
    sum_x_exp = tl.zeros([BLOCK], ACC_DTYPE)
    argmax = tl.zeros([BLOCK], tl.int64) + V
    for r in range(world):
        state_ptr = gathered_ptr + r * PACKED * stride + row
        rank_maximum = tl.load(state_ptr, mask=mask, other=0.0)
        rank_sumexp = tl.load(state_ptr + stride, mask=mask, other=0.0)
        rank_classes = tl.load(state_ptr + 3 * stride, mask=mask, other=0.0)
        scale = tl.exp2((rank_maximum - shift) * slope)
        sumexp += rank_sumexp * scale
        label_logit = tl.maximum(label_logit, tl.load(state_ptr + 2 * stride, mask=mask, other=0.0))
        classes_before += tl.where(r < rank, rank_classes, 0.0)
        classes_total += rank_classes
        if HAS_SMOOTHING:
            weight = tl.load(state_ptr + 6 * stride, mask=mask, other=0.0)
            origin_difference = tl.load(
                gathered_ptr + 4 * stride + row, mask=mask, other=0.0
            ) - tl.load(state_ptr + 4 * stride, mask=mask, other=0.0)
            smoothing_loss += (
                tl.load(state_ptr + 5 * stride, mask=mask, other=0.0) + weight * origin_difference
            )
            weights += weight
        if ENTROPY:
            moved = rank_sumexp * (shift - finite_shift(rank_maximum)) / temperature
            sum_x_exp += scale * (
                tl.load(state_ptr + (PACKED - 2) * stride, mask=mask, other=0.0) - moved
            )
            index = (
                tl.load(state_ptr + (PACKED - 1) * stride, mask=mask, other=0.0)
                .to(tl.int64 if ACC_DTYPE == tl.float64 else tl.int32, bitcast=True)
                .to(tl.int64)
            )
            argmax = tl.minimum(argmax, tl.where(rank_maximum == maximum, index, V))
    target = tl.load(target_ptr + row, mask=mask, other=0).to(tl.int64)
    counts = target != ignore_index
    invalid = (
        (counts & ((target < 0) | (target >= V)))
        | (classes_before != first_class)
        | (classes_total != V)
    )
    nan_if_invalid = tl.where(invalid, float("nan"), 0.0).to(ACC_DTYPE)
    log_sumexp = log_exact(sumexp)
    tl.store(
        nll_ptr + row,
        tl.where(counts, log_sumexp + (shift - label_logit) / temperature, 0.0) + nan_if_invalid,
        mask=mask,
    )
    tl.store(logsumexp_ptr + row, shift / temperature + log_sumexp + nan_if_invalid, mask=mask)
    tl.store(maximum_ptr + row, maximum, mask=mask)
    tl.store(sumexp_ptr + row, sumexp, mask=mask)
    if HAS_SMOOTHING:
        origin = tl.load(gathered_ptr + 4 * stride + row, mask=mask, other=0.0)
        tl.store(
            smoothing_loss_ptr + row,
            weights * (log_sumexp + (shift - origin)) + smoothing_loss + nan_if_invalid,
            mask=mask,
        )
    if ENTROPY:
        tl.store(entropy_ptr + row, log_sumexp - sum_x_exp / sumexp + nan_if_invalid, mask=mask)
        # A maximum of NaN equals no rank's maximum, so the index stays V.
        tl.store(argmax_ptr + row, tl.minimum(argmax, V - 1), mask=mask)


@triton.jit(do_not_specialize=["M", "V", "ignore_index"])
def parallel_coefficients_kernel(
    target_ptr,  # [M]
    grad_nll_ptr,  # [M] or None
    grad_logsumexp_ptr,  # [M] or None
    grad_smoothing_ptr,  # [M] or None
    grad_entropy_ptr,  # [M] or None
    entropy_ptr,  # [M] or None
    total_weight_ptr,  # [] sum of the class weights, or None for their number
    dlogits_coef_ptr,  # [M]
    label_coef_ptr,  # [M]
    log_coef_ptr,  # [M] or None
    smoothing_coef_ptr,  # [M] or None
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
    if smoothing_coef_ptr is not None:
        grad_smoothing = tl.load(grad_smoothing_ptr + row, mask=mask, other=0.0)
        weight = V.to(ACC_DTYPE)
        if total_weight_ptr is not None:
            weight = tl.load(total_weight_ptr).to(ACC_DTYPE)
        dlogits_coef += grad_smoothing * weight
        tl.store(smoothing_coef_ptr + row, -grad_smoothing / temperature, mask=mask)
    if log_coef_ptr is not None:
        grad_entropy = tl.load(grad_entropy_ptr + row, mask=mask, other=0.0)
        dlogits_coef -= grad_entropy * tl.load(entropy_ptr + row, mask=mask, other=0.0)
        tl.store(log_coef_ptr + row, -grad_entropy / temperature, mask=mask)
    tl.store(dlogits_coef_ptr + row, dlogits_coef / temperature, mask=mask)
    tl.store(label_coef_ptr + row, label_coef / temperature, mask=mask)
