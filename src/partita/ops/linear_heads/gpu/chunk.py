"""Kernels of the statistics and the gradient of rows of logits, which come in chunks of classes.

The rows of a buffer start on 16 bytes and are padded to a multiple of 16 bytes, so that kernels
load and store whole vectors. Other rows are treated the same way if they happen to be aligned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, apply_softcap, finite_shift, log_exact, reciprocal
from ....primitives.gpu.reduce import by_lane, lane_sum, online_softmax
from ...cross_entropy.gpu.token_stats import RunningStats, accumulate_stats


class ChunkOptions(NamedTuple):
    """The numbers that the blocks of a row have in common.

    Fields:
        row_ptr: the first logit of the row.
        weight_ptr: class weights, [classes], or None.
        classes: the number of classes of the chunk.
        origin: what x is subtracted from in the smoothing sum; None without that sum.
        softcap: the bound of the logits, or None.
        log2_scale: the factor of x in the exponents of 2.
    """

    row_ptr: Any
    weight_ptr: Any
    classes: Any
    origin: Any
    softcap: Any
    log2_scale: Any


class LaneState(NamedTuple):
    """The statistics of the lanes of a row, [1, LANES] each.

    Fields:
        maximum: the maximum of x.
        sumexp: the sum of exponentials.
        sum_x_exp: the sum of e log2(e) over the exponentials e.
        smoothing_sum: the sum of weight * (origin - x).
        argmax_block: the first class of the first block with the maximum.
    """

    maximum: Any
    sumexp: Any
    sum_x_exp: Any
    smoothing_sum: Any
    argmax_block: Any


@triton.jit
def load_logits(options, v, UNMASKED: tl.constexpr, VEC: tl.constexpr):
    """Load and soft-cap the logits of the classes v, [1, BLOCK_V].

    Logits past the last class are -inf. Rows are padded to whole vectors, so the mask of a load may
    be constant over a vector.
    """
    ACC_DTYPE: tl.constexpr = options.log2_scale.dtype
    classes, softcap = options.classes, options.softcap
    HAS_SOFTCAP: tl.constexpr = softcap is not None
    if UNMASKED:
        return apply_softcap(tl.load(options.row_ptr + v).to(ACC_DTYPE), softcap, HAS_SOFTCAP)
    else:
        x = tl.load(options.row_ptr + v, mask=v // VEC * VEC < classes, other=0.0).to(ACC_DTYPE)
        return tl.where(v < classes, apply_softcap(x, softcap, HAS_SOFTCAP), -float("inf"))


@triton.jit
def accumulate_block(
    state,
    block_start,
    options,
    UNMASKED: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Add one block of classes to the statistics of the lanes.

    The temperature is 1 without an entropy.
    """
    maximum, sumexp, sum_x_exp, smoothing_sum, argmax_block = state
    LANES: tl.constexpr = maximum.shape[1]
    VECTOR: tl.constexpr = 1 if LANES == 1 else VEC
    v = (block_start + tl.arange(0, BLOCK_V))[None, :]
    x = load_logits(options, v, UNMASKED, VEC)
    if HAS_ENTROPY:
        stats = RunningStats(maximum, sumexp, sum_x_exp, argmax_block)
        stats = accumulate_stats(stats, x, block_start, options.log2_scale, VECTOR)
        maximum, sumexp, sum_x_exp, argmax_block = stats
    else:
        maximum, sumexp = online_softmax(maximum, sumexp, by_lane(x, LANES, VECTOR), False)
    if options.origin is not None:
        weight = tl.full([1, BLOCK_V], 1.0, maximum.dtype)
        if options.weight_ptr is not None:
            weight = tl.load(options.weight_ptr + v, mask=v < options.classes, other=0.0)
            weight = weight.to(maximum.dtype)
        counts = (v < options.classes) & (weight != 0.0)
        terms = tl.where(counts, weight * (options.origin - x), 0.0)
        smoothing_sum += lane_sum(by_lane(terms, LANES, VECTOR), False)
    return LaneState(maximum, sumexp, sum_x_exp, smoothing_sum, argmax_block)


@triton.jit(do_not_specialize=["classes", "first"])
def linear_accumulate_kernel(
    logits,  # StridedRows [rows, classes] of adjacent classes, from the class `first` on
    target_ptr,  # [rows]
    weight_ptr,  # [classes] or None
    state,  # RowState [rows]
    classes,
    first,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Update the state of one row with the classes of a chunk.

    The first chunk does not read the state. The temperature is 1 without an entropy.
    """
    ACC_DTYPE: tl.constexpr = state.maximum.dtype.element_ty
    HAS_ENTROPY: tl.constexpr = state.sum_x_exp is not None
    HAS_SMOOTHING: tl.constexpr = state.smoothing_loss is not None
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    log2_scale = tl.full([], LOG2E, ACC_DTYPE) / tl.full([], temperature, ACC_DTYPE)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits.ptr + row * logits.m
    label = tl.load(target_ptr + row).to(tl.int64) - first
    old_maximum = tl.load(state.maximum + row)
    old_sumexp = tl.load(state.sumexp + row).to(tl.float64)
    old_maximum = tl.where(first == 0, -float("inf"), old_maximum)
    old_sumexp = tl.where(first == 0, 0.0, old_sumexp)
    inside = (label >= 0) & (label < classes)
    label_x = tl.load(row_ptr + label, mask=inside, other=0.0).to(ACC_DTYPE)
    label_x = apply_softcap(label_x, softcap, HAS_SOFTCAP)
    origin = None
    if HAS_SMOOTHING:
        origin = finite_shift(apply_softcap(tl.load(row_ptr).to(ACC_DTYPE), softcap, HAS_SOFTCAP))
        origin = tl.where(first == 0, origin, tl.load(state.origin + row))
    options = ChunkOptions(row_ptr, weight_ptr, classes, origin, softcap, log2_scale)
    zero = tl.zeros([1, LANES], tl.float64)
    lanes = LaneState(
        tl.full([1, LANES], -float("inf"), ACC_DTYPE),
        zero,
        zero,
        zero,
        tl.zeros([1, LANES], tl.int32),
    )
    unmasked_end = classes // BLOCK_V * BLOCK_V
    TAIL: tl.constexpr = BLOCK_V if LANES == 1 else LANES * VEC
    for start in range(0, unmasked_end, BLOCK_V):
        lanes = accumulate_block(lanes, start, options, True, HAS_ENTROPY, VEC, BLOCK_V)
    for start in range(unmasked_end, classes, TAIL):
        lanes = accumulate_block(lanes, start, options, False, HAS_ENTROPY, VEC, TAIL)
    chunk_maximum = tl.max(lanes.maximum)
    maximum = tl.maximum(old_maximum, chunk_maximum)
    shift = finite_shift(maximum)
    scale = tl.exp2((lanes.maximum - shift) * log2_scale).to(tl.float64)
    old_scale = tl.exp2((old_maximum - shift) * log2_scale).to(tl.float64)
    if HAS_ENTROPY:
        sum_ptr, argmax_ptr = state.sum_x_exp + row, state.argmax + row
        old_sum = tl.where(first == 0, 0.0, tl.load(sum_ptr).to(tl.float64))
        old_argmax = tl.load(argmax_ptr)
        increase = ((shift - finite_shift(lanes.maximum)) * log2_scale).to(tl.float64)
        sum_x_exp = tl.sum(scale * (lanes.sum_x_exp - lanes.sumexp * increase) * LN2)
        old_increase = ((shift - finite_shift(old_maximum)) * log2_scale).to(tl.float64)
        sum_x_exp += old_scale * (old_sum - old_sumexp * old_increase * LN2)
        # The first block that holds the maximum is read once more to find the class.
        is_highest = lanes.maximum == chunk_maximum
        block_start = tl.min(tl.where(is_highest, lanes.argmax_block, 0x3FFFFFFF))
        v = (block_start + tl.arange(0, BLOCK_V))[None, :]
        x = load_logits(options, v, False, VEC)
        # Another copy of the code may round a hyperbolic tangent in another way.
        block_maximum = tl.max(x) if HAS_SOFTCAP else chunk_maximum
        argmax = tl.min(tl.where(x == block_maximum, v, 0x7FFFFFFF))
        tl.store(sum_ptr, sum_x_exp.to(ACC_DTYPE))
        is_higher = (first == 0) | (chunk_maximum > old_maximum)
        argmax = first + tl.minimum(argmax, classes - 1).to(tl.int64)
        tl.store(argmax_ptr, tl.where(is_higher, argmax, old_argmax))
    if HAS_SMOOTHING:
        old_sum = tl.load(state.smoothing_loss + row).to(tl.float64)
        smoothing_sum = tl.where(first == 0, 0.0, old_sum) + tl.sum(lanes.smoothing_sum)
        tl.store(state.smoothing_loss + row, smoothing_sum.to(ACC_DTYPE))
        tl.store(state.origin + row, origin)
    tl.store(state.maximum + row, maximum)
    sumexp = old_sumexp * old_scale + tl.sum(lanes.sumexp * scale)
    tl.store(state.sumexp + row, sumexp.to(ACC_DTYPE))
    is_known = inside | (first == 0)
    tl.store(state.label + row, tl.where(inside, label_x, -float("inf")), mask=is_known)


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
    logits,  # StridedRows [rows, classes] of adjacent classes, from the class `first` on
    target_ptr,  # [rows]
    weight_ptr,  # [classes] or None
    coefficients,  # GradientCoefficients [rows]
    maximum_ptr,  # [rows]
    sumexp_ptr,  # [rows]
    result,  # StridedRows [rows, classes], which may be the logits
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
    softcap = tl.full([], softcap, ACC_DTYPE)
    log2_scale = tl.full([], LOG2E, ACC_DTYPE) / tl.full([], temperature, ACC_DTYPE)
    blocks = tl.cdiv(classes, BLOCK_V)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    v = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v // VEC * VEC < classes
    x = tl.load(logits.ptr + row * logits.m + v, mask=inside, other=0.0).to(ACC_DTYPE)
    x = apply_softcap(x, softcap, HAS_SOFTCAP)
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
    if HAS_SOFTCAP:
        grad *= 1.0 - (x / softcap) * (x / softcap)
    pointers = result.ptr + row * result.m + v
    grad = tl.where(active == 0.0, 0.0, grad)
    tl.store(pointers, grad.to(result.ptr.dtype.element_ty), mask=inside)
