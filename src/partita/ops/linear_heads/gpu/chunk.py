"""Kernels of the statistics and the gradient of rows of logits, which come in chunks of classes.

The rows of a buffer start on 16 bytes and are padded to a multiple of 16 bytes, so that gradients
are stored in whole vectors. Other rows are treated the same way if they happen to be aligned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    LN2,
    LOG2E,
    apply_softcap,
    finite_shift,
    log_exact,
    reciprocal,
    through_softcap,
)
from ....primitives.gpu.reduce import (
    RunningState,
    load_capped,
    program_rows,
    rescaled,
    scan_rows,
)
from ...cross_entropy.gpu.token_stats import lowest_argmax


@triton.jit
def class_weights(weight_ptr, at, column, mask):
    """Return the weights of a block of classes, 1 for each if there are none."""
    if weight_ptr is None:
        return tl.where(mask, 1.0, 0.0)
    else:
        return tl.load(weight_ptr + column, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["classes", "first"])
def linear_accumulate_kernel(
    logits,  # StridedRows of one batch, from the class `first` on
    target_ptr,  # [rows]
    weight_ptr,  # [classes] or None
    state,  # RowState [rows]
    segments,  # Segments
    rows,
    classes,
    first,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Update the state of rows with the classes of a chunk.

    The first chunk does not read the state. The temperature is 1 without an entropy.
    """
    ENTROPY: tl.constexpr = state.sum_x_exp is not None
    SMOOTHING: tl.constexpr = state.smoothing_loss is not None
    weigh: tl.constexpr = class_weights if SMOOTHING else None
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    slope = tl.full([], LOG2E, ACC_DTYPE) / tl.full([], temperature, ACC_DTYPE)
    at = program_rows(logits, rows, classes, segments, TILE.rows)
    row, mask = at.index, at.mask
    label = tl.load(target_ptr + row, mask=mask, other=0).to(tl.int64) - first
    inside = mask & (label >= 0) & (label < classes)
    label_x = load_capped(at.ptrs + label * logits.column, inside, softcap, ACC_DTYPE)
    chunk, mask = scan_rows(logits, at, segments, slope, softcap, weight_ptr, weigh, ENTROPY, TILE)
    ROWS: tl.constexpr = TILE.rows
    seen, zeros = mask & (first > 0), tl.zeros([ROWS], tl.float64)
    old_maximum = tl.load(state.maximum + row, mask=seen, other=-float("inf"))
    total = tl.load(state.sumexp + row, mask=seen, other=0.0).to(tl.float64)
    sum_x_exp = zeros
    if ENTROPY:
        sum_x_exp += tl.load(state.sum_x_exp + row, mask=seen, other=0.0) * LOG2E
    before = RunningState(old_maximum, total, sum_x_exp, tl.zeros([ROWS], tl.int32), zeros, zeros)
    maximum = tl.maximum(old_maximum, chunk.maximum)
    before, moved = rescaled(before, maximum, slope), rescaled(chunk, maximum, slope)
    tl.store(state.maximum + row, maximum, mask=mask)
    tl.store(state.sumexp + row, (before.total + moved.total).to(ACC_DTYPE), mask=mask)
    label_mask = mask & (inside | (first == 0))
    tl.store(state.label + row, tl.where(inside, label_x, -float("inf")), mask=label_mask)
    if ENTROPY:
        sum_x_exp = (before.sum_x_exp + moved.sum_x_exp) * LN2
        tl.store(state.sum_x_exp + row, sum_x_exp.to(ACC_DTYPE), mask=mask)
        is_higher = mask & ((first == 0) | (chunk.maximum > old_maximum))
        argmax = lowest_argmax(logits, at, chunk, softcap, is_higher, TILE.block)
        tl.store(state.argmax + row, first + argmax, mask=is_higher)
    if SMOOTHING:
        origin = finite_shift(load_capped(at.ptrs, mask, softcap, ACC_DTYPE))
        origin = tl.where(first == 0, origin, tl.load(state.origin + row, mask=seen, other=0.0))
        moved_by = (origin - finite_shift(chunk.maximum)).to(tl.float64)
        loss = tl.load(state.smoothing_loss + row, mask=seen, other=0.0).to(tl.float64)
        loss += chunk.loss + chunk.weight * moved_by
        tl.store(state.smoothing_loss + row, loss.to(ACC_DTYPE), mask=mask)
        tl.store(state.origin + row, origin, mask=mask)


@triton.jit(do_not_specialize=["rows", "classes", "ignore_index"])
def linear_statistics_kernel(
    state,  # RowState [rows]
    target_ptr,  # [rows]
    total_weight_ptr,  # [], the sum of the class weights; None if each weight is 1
    statistics,  # RowStatistics [rows], of which the first four are written
    rows,
    classes,
    ignore_index,
    temperature: tl.float64,
    BLOCK_M: tl.constexpr,
):
    """Compute the statistics of rows whose state has seen all classes."""
    ACC_DTYPE: tl.constexpr = state.maximum.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < rows
    temperature = tl.full([], temperature, ACC_DTYPE)
    label = tl.load(target_ptr + row, mask=inside, other=0).to(tl.int64)
    valid = label != ignore_index
    invalid = valid & ((label < 0) | (label >= classes))
    nan_mask = tl.where(invalid, float("nan"), 0.0).to(ACC_DTYPE)
    shift = finite_shift(tl.load(state.maximum + row, mask=inside, other=0.0))
    sumexp = tl.load(state.sumexp + row, mask=inside, other=1.0)
    log_sumexp = log_exact(sumexp)
    nll = log_sumexp + (shift - tl.load(state.label + row, mask=inside, other=0.0)) / temperature
    tl.store(statistics.nll + row, tl.where(valid, nll, 0.0) + nan_mask, mask=inside)
    tl.store(statistics.logsumexp + row, shift / temperature + log_sumexp + nan_mask, mask=inside)
    if state.smoothing_loss is not None:
        weight = classes.to(ACC_DTYPE)
        if total_weight_ptr is not None:
            weight = tl.load(total_weight_ptr).to(ACC_DTYPE)
        origin = tl.load(state.origin + row, mask=inside, other=0.0)
        smoothing_sum = tl.load(state.smoothing_loss + row, mask=inside, other=0.0)
        loss_ptr = statistics.smoothing_loss + row
        smoothing_loss = weight * (log_sumexp + (shift - origin)) + smoothing_sum + nan_mask
        tl.store(loss_ptr, smoothing_loss, mask=inside)
    if state.sum_x_exp is not None:
        entropy_ptr = statistics.entropy + row
        sum_x_exp = tl.load(state.sum_x_exp + row, mask=inside, other=0.0)
        tl.store(entropy_ptr, log_sumexp - sum_x_exp / sumexp + nan_mask, mask=inside)


@triton.jit(do_not_specialize=["classes", "first"])
def linear_gradient_kernel(
    logits,  # StridedRows of one batch, of adjacent classes, from the class `first` on
    target_ptr,  # [rows]
    weight_ptr,  # [classes] or None
    coefficients,  # GradientCoefficients [rows]
    maximum_ptr,  # [rows]
    sumexp_ptr,  # [rows]
    result,  # StridedRows of one batch, which may be the logits
    classes,
    first,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the gradient of one block of a row from the coefficients of the row."""
    ACC_DTYPE: tl.constexpr = maximum_ptr.dtype.element_ty
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    log2_scale = tl.full([], LOG2E, ACC_DTYPE) / tl.full([], temperature, ACC_DTYPE)
    blocks = tl.cdiv(classes, BLOCK_V)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    v = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v // VEC * VEC < classes
    x = tl.load(logits.ptr + row * logits.row + v, mask=inside, other=0.0).to(ACC_DTYPE)
    x = apply_softcap(x, softcap)
    label = tl.load(target_ptr + row).to(tl.int64) - first
    dlogits_coef = tl.load(coefficients.dlogits_coef + row)
    label_coef = tl.load(coefficients.label_coef + row)
    sumexp = tl.load(sumexp_ptr + row)
    exponent = (x - finite_shift(tl.load(maximum_ptr + row))) * log2_scale
    p = tl.exp2(exponent) * reciprocal(sumexp)
    grad = dlogits_coef * p
    active = tl.abs(dlogits_coef) + tl.abs(label_coef)  # 0 if all coefficients are
    if coefficients.log_coef is not None:
        log_coef = tl.load(coefficients.log_coef + row)
        # The bound keeps the logarithm finite, so that p log p is 0 where p is.
        grad += log_coef * p * (LN2 * tl.maximum(exponent, -10000.0) - log_exact(sumexp))
        active += tl.abs(log_coef)
    if coefficients.smoothing_coef is not None:
        smoothing_coef = tl.load(coefficients.smoothing_coef + row)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + v, mask=v < classes, other=0.0).to(ACC_DTYPE)
            grad += smoothing_coef * weight
        else:
            grad += smoothing_coef
        active += tl.abs(smoothing_coef)
    grad += tl.where(v == label, label_coef, 0.0)
    grad = tl.where(active == 0.0, 0.0, through_softcap(grad, x, softcap))
    pointers = result.ptr + row * result.row + v
    tl.store(pointers, grad.to(result.ptr.dtype.element_ty), mask=inside)
