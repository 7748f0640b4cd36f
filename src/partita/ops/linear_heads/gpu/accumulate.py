"""Kernels that compute the statistics of rows of logits, which come in chunks of classes.

The rows of a buffer start on 16 bytes and are padded to a multiple of 16 bytes, so that kernels
load and store whole vectors. Other rows are treated the same way if they happen to be aligned.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, apply_softcap, finite_shift, log_exact
from ....primitives.gpu.reduce import by_lane, lane_sum, online_softmax
from ...cross_entropy.gpu.token_stats import accumulate_stats


@triton.jit
def load_logits(
    row_ptr,
    v,
    classes,
    softcap,
    UNMASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    VEC: tl.constexpr,
):
    """Load and soft-cap the logits of the classes v, [1, BLOCK_V].

    Logits past the last class are -inf. Rows are padded to whole vectors, so the mask of a load may
    be constant over a vector.
    """
    if UNMASKED:
        return apply_softcap(tl.load(row_ptr + v).to(ACC_DTYPE), softcap, HAS_SOFTCAP)
    else:
        x = tl.load(row_ptr + v, mask=v // VEC * VEC < classes, other=0.0).to(ACC_DTYPE)
        return tl.where(v < classes, apply_softcap(x, softcap, HAS_SOFTCAP), -float("inf"))


@triton.jit
def accumulate_block(
    row_ptr,
    weight_ptr,
    block_start,
    classes,
    origin,
    softcap,
    log2_scale,
    maximum,
    sumexp,
    sum_x_exp,
    smoothing_sum,
    argmax_block,
    UNMASKED: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Add one block of classes to the statistics of the lanes, [1, LANES] each.

    The temperature is 1 without an entropy.
    """
    VECTOR: tl.constexpr = 1 if LANES == 1 else VEC
    v = (block_start + tl.arange(0, BLOCK_V))[None, :]
    x = load_logits(row_ptr, v, classes, softcap, UNMASKED, HAS_SOFTCAP, ACC_DTYPE, VEC)
    if HAS_ENTROPY:
        maximum, sumexp, sum_x_exp, argmax_block = accumulate_stats(
            maximum, sumexp, sum_x_exp, argmax_block, x, block_start, log2_scale, LANES, VECTOR
        )
    else:
        maximum, sumexp = online_softmax(maximum, sumexp, by_lane(x, LANES, VECTOR), False)
    if HAS_SMOOTHING:
        weight = tl.full([1, BLOCK_V], 1.0, ACC_DTYPE)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + v, mask=v < classes, other=0.0).to(ACC_DTYPE)
        terms = tl.where((v < classes) & (weight != 0.0), weight * (origin - x), 0.0)
        smoothing_sum += lane_sum(by_lane(terms, LANES, VECTOR), False)
    return maximum, sumexp, sum_x_exp, smoothing_sum, argmax_block


@triton.jit(do_not_specialize=["classes", "first"])
def linear_accumulate_kernel(
    logits_ptr,  # [rows, classes], the classes from `first` on
    target_ptr,  # [rows]
    weight_ptr,  # [classes] or None
    maximum_ptr,  # [rows]
    sumexp_ptr,  # [rows]
    label_ptr,  # [rows]
    origin_ptr,  # [rows] or None
    smoothing_sum_ptr,  # [rows] or None
    sum_x_exp_ptr,  # [rows] or None
    argmax_ptr,  # [rows] int64 or None
    classes,
    first,
    stride,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Update the state of one row with the classes of a chunk.

    The first chunk does not read the state. The temperature is 1 without an entropy.
    """
    softcap = tl.full([], softcap, ACC_DTYPE)
    log2_scale = tl.full([], LOG2E, ACC_DTYPE) / tl.full([], temperature, ACC_DTYPE)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    label = tl.load(target_ptr + row).to(tl.int64) - first
    old_maximum = tl.load(maximum_ptr + row)
    old_sumexp = tl.load(sumexp_ptr + row).to(tl.float64)
    old_maximum = tl.where(first == 0, -float("inf"), old_maximum)
    old_sumexp = tl.where(first == 0, 0.0, old_sumexp)
    inside = (label >= 0) & (label < classes)
    label_x = tl.load(row_ptr + label, mask=inside, other=0.0).to(ACC_DTYPE)
    label_x = apply_softcap(label_x, softcap, HAS_SOFTCAP)
    maximum = tl.full([1, LANES], -float("inf"), ACC_DTYPE)
    argmax_block = tl.zeros([1, LANES], tl.int32)
    sumexp = tl.zeros([1, LANES], tl.float64)
    sum_x_exp = tl.zeros([1, LANES], tl.float64)  # of e log2 e, unlike the state in memory
    smoothing_sum = tl.zeros([1, LANES], tl.float64)
    origin = tl.full([], 0.0, ACC_DTYPE)
    if smoothing_sum_ptr is not None:
        origin = finite_shift(apply_softcap(tl.load(row_ptr).to(ACC_DTYPE), softcap, HAS_SOFTCAP))
        origin = tl.where(first == 0, origin, tl.load(origin_ptr + row))
    unmasked_end = classes // BLOCK_V * BLOCK_V
    TAIL_BLOCK_V: tl.constexpr = BLOCK_V if LANES == 1 else LANES * VEC
    for block_start in range(0, unmasked_end, BLOCK_V):
        maximum, sumexp, sum_x_exp, smoothing_sum, argmax_block = accumulate_block(
            row_ptr,
            weight_ptr,
            block_start,
            classes,
            origin,
            softcap,
            log2_scale,
            maximum,
            sumexp,
            sum_x_exp,
            smoothing_sum,
            argmax_block,
            True,
            sum_x_exp_ptr is not None,
            smoothing_sum_ptr is not None,
            HAS_SOFTCAP,
            ACC_DTYPE,
            VEC,
            LANES,
            BLOCK_V,
        )
    for block_start in range(unmasked_end, classes, TAIL_BLOCK_V):
        maximum, sumexp, sum_x_exp, smoothing_sum, argmax_block = accumulate_block(
            row_ptr,
            weight_ptr,
            block_start,
            classes,
            origin,
            softcap,
            log2_scale,
            maximum,
            sumexp,
            sum_x_exp,
            smoothing_sum,
            argmax_block,
            False,
            sum_x_exp_ptr is not None,
            smoothing_sum_ptr is not None,
            HAS_SOFTCAP,
            ACC_DTYPE,
            VEC,
            LANES,
            TAIL_BLOCK_V,
        )
    chunk_maximum = tl.max(maximum)
    new_maximum = tl.maximum(old_maximum, chunk_maximum)
    shift = finite_shift(new_maximum)
    scale = tl.exp2((maximum - shift) * log2_scale).to(tl.float64)
    old_scale = tl.exp2((old_maximum - shift) * log2_scale).to(tl.float64)
    if sum_x_exp_ptr is not None:
        old_sum_x_exp = tl.where(first == 0, 0.0, tl.load(sum_x_exp_ptr + row).to(tl.float64))
        old_argmax = tl.load(argmax_ptr + row)
        increase = ((shift - finite_shift(maximum)) * log2_scale).to(tl.float64)
        sum_x_exp = tl.sum(scale * (sum_x_exp - sumexp * increase) * LN2)
        old_increase = ((shift - finite_shift(old_maximum)) * log2_scale).to(tl.float64)
        sum_x_exp += old_scale * (old_sum_x_exp - old_sumexp * old_increase * LN2)
        # The first block that holds the maximum is read once more to find the class.
        block_start = tl.min(tl.where(maximum == chunk_maximum, argmax_block, 0x3FFFFFFF))
        v = (block_start + tl.arange(0, BLOCK_V))[None, :]
        x = load_logits(row_ptr, v, classes, softcap, False, HAS_SOFTCAP, ACC_DTYPE, VEC)
        # Another copy of the code may round a hyperbolic tangent in another way.
        block_maximum = tl.max(x) if HAS_SOFTCAP else chunk_maximum
        argmax = tl.min(tl.where(x == block_maximum, v, 0x7FFFFFFF))
        tl.store(sum_x_exp_ptr + row, sum_x_exp.to(ACC_DTYPE))
        argmax_row_ptr = argmax_ptr + row
        is_higher = (first == 0) | (chunk_maximum > old_maximum)
        argmax = first + tl.minimum(argmax, classes - 1).to(tl.int64)
        tl.store(argmax_row_ptr, tl.where(is_higher, argmax, old_argmax))
    if smoothing_sum_ptr is not None:
        old_sum = tl.where(first == 0, 0.0, tl.load(smoothing_sum_ptr + row).to(tl.float64))
        tl.store(smoothing_sum_ptr + row, (old_sum + tl.sum(smoothing_sum)).to(ACC_DTYPE))
        tl.store(origin_ptr + row, origin)
    tl.store(maximum_ptr + row, new_maximum)
    tl.store(sumexp_ptr + row, (old_sumexp * old_scale + tl.sum(sumexp * scale)).to(ACC_DTYPE))
    tl.store(label_ptr + row, tl.where(inside, label_x, -float("inf")), mask=inside | (first == 0))


@triton.jit(do_not_specialize=["rows", "classes", "ignore_index"])
def linear_statistics_kernel(
    maximum_ptr,  # [rows]
    sumexp_ptr,  # [rows]
    label_ptr,  # [rows]
    origin_ptr,  # [rows] or None
    smoothing_sum_ptr,  # [rows] or None
    sum_x_exp_ptr,  # [rows] or None
    target_ptr,  # [rows]
    total_weight_ptr,  # [], the sum of the class weights; None if each weight is 1
    nll_ptr,  # [rows]
    logsumexp_ptr,  # [rows]
    smoothing_loss_ptr,  # [rows] or None
    entropy_ptr,  # [rows] or None
    rows,
    classes,
    ignore_index,
    temperature: tl.float64,
    ACC_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute the statistics of rows whose state has seen all classes."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < rows
    temperature = tl.full([], temperature, ACC_DTYPE)
    label = tl.load(target_ptr + row, mask=inside, other=0).to(tl.int64)
    valid = label != ignore_index
    invalid = valid & ((label < 0) | (label >= classes))
    nan_mask = tl.where(invalid, float("nan"), 0.0).to(ACC_DTYPE)
    shift = finite_shift(tl.load(maximum_ptr + row, mask=inside, other=0.0))
    sumexp = tl.load(sumexp_ptr + row, mask=inside, other=1.0)
    log_sumexp = log_exact(sumexp)
    nll = log_sumexp + (shift - tl.load(label_ptr + row, mask=inside, other=0.0)) / temperature
    tl.store(nll_ptr + row, tl.where(valid, nll, 0.0) + nan_mask, mask=inside)
    tl.store(logsumexp_ptr + row, shift / temperature + log_sumexp + nan_mask, mask=inside)
    if smoothing_sum_ptr is not None:
        weight = classes.to(ACC_DTYPE)
        if total_weight_ptr is not None:
            weight = tl.load(total_weight_ptr).to(ACC_DTYPE)
        origin = tl.load(origin_ptr + row, mask=inside, other=0.0)
        smoothing_sum = tl.load(smoothing_sum_ptr + row, mask=inside, other=0.0)
        loss_ptr = smoothing_loss_ptr + row
        smoothing_loss = weight * (log_sumexp + (shift - origin)) + smoothing_sum + nan_mask
        tl.store(loss_ptr, smoothing_loss, mask=inside)
    if sum_x_exp_ptr is not None:
        entropy_row_ptr = entropy_ptr + row
        sum_x_exp = tl.load(sum_x_exp_ptr + row, mask=inside, other=0.0)
        tl.store(entropy_row_ptr, log_sumexp - sum_x_exp / sumexp + nan_mask, mask=inside)
