"""Kernels that compute the statistics of rows of logits, which come in chunks of classes.

The rows of a buffer start on 16 bytes and are padded to a multiple of 16 bytes, so that kernels
load and store whole vectors. Other rows are treated the same way if they happen to be aligned.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, apply_softcap, finite_shift, log_exact
from ....primitives.gpu.reduce import by_lane, lane_sum, online_softmax
from ...cross_entropy.gpu.running_stats import RunningStats, accumulate_stats


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


class ChunkOptions(NamedTuple):
    """What the blocks of a row have in common.

    Fields:
        row_ptr: the first logit of the row.
        weight_ptr: class weights, [classes], or None.
        classes: the number of classes of the chunk.
        origin: what x is subtracted from in the smoothing sum.
        softcap: the bound of the logits.
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
def accumulate_block(
    state,
    block_start,
    options,
    UNMASKED: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Add one block of classes to the statistics of the lanes.

    The temperature is 1 without an entropy.
    """
    row_ptr, weight_ptr, classes, origin, softcap, log2_scale = options
    maximum, sumexp, sum_x_exp, smoothing_sum, argmax_block = state
    ACC_DTYPE: tl.constexpr = maximum.dtype
    LANES: tl.constexpr = maximum.shape[1]
    VECTOR: tl.constexpr = 1 if LANES == 1 else VEC
    v = (block_start + tl.arange(0, BLOCK_V))[None, :]
    x = load_logits(row_ptr, v, classes, softcap, UNMASKED, HAS_SOFTCAP, ACC_DTYPE, VEC)
    if HAS_ENTROPY:
        stats = RunningStats(maximum, sumexp, sum_x_exp, argmax_block)
        stats = accumulate_stats(stats, x, block_start, log2_scale, VECTOR)
        maximum, sumexp, sum_x_exp, argmax_block = stats
    else:
        maximum, sumexp = online_softmax(maximum, sumexp, by_lane(x, LANES, VECTOR), False)
    if HAS_SMOOTHING:
        weight = tl.full([1, BLOCK_V], 1.0, ACC_DTYPE)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + v, mask=v < classes, other=0.0).to(ACC_DTYPE)
        terms = tl.where((v < classes) & (weight != 0.0), weight * (origin - x), 0.0)
        smoothing_sum += lane_sum(by_lane(terms, LANES, VECTOR), False)
    return LaneState(maximum, sumexp, sum_x_exp, smoothing_sum, argmax_block)


@triton.jit
def scan_chunk(
    options,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Return the statistics of the lanes over the classes of a chunk."""
    state = LaneState(
        tl.full([1, LANES], -float("inf"), ACC_DTYPE),
        tl.zeros([1, LANES], tl.float64),
        tl.zeros([1, LANES], tl.float64),
        tl.zeros([1, LANES], tl.float64),
        tl.zeros([1, LANES], tl.int32),
    )
    unmasked_end = options.classes // BLOCK_V * BLOCK_V
    TAIL_BLOCK_V: tl.constexpr = BLOCK_V if LANES == 1 else LANES * VEC
    for start in range(0, unmasked_end, BLOCK_V):
        state = accumulate_block(
            state, start, options, True, HAS_ENTROPY, HAS_SMOOTHING, HAS_SOFTCAP, VEC, BLOCK_V
        )
    for start in range(unmasked_end, options.classes, TAIL_BLOCK_V):
        state = accumulate_block(
            state, start, options, False, HAS_ENTROPY, HAS_SMOOTHING, HAS_SOFTCAP, VEC, TAIL_BLOCK_V
        )
    return state


@triton.jit
def update_entropy(
    sum_x_exp_ptr,
    argmax_ptr,
    first,
    state,
    options,
    old,
    shift,
    HAS_SOFTCAP: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Update the argmax of a row, and the sum that its entropy needs, with the lanes of a chunk.

    `old` are the maximum and the sum of exponentials of the earlier chunks.
    """
    ACC_DTYPE: tl.constexpr = state.maximum.dtype
    old_maximum, old_sumexp = old
    log2_scale = options.log2_scale
    chunk_maximum = tl.max(state.maximum)
    scale = tl.exp2((state.maximum - shift) * log2_scale).to(tl.float64)
    old_scale = tl.exp2((old_maximum - shift) * log2_scale).to(tl.float64)
    old_sum_x_exp = tl.where(first == 0, 0.0, tl.load(sum_x_exp_ptr).to(tl.float64))
    old_argmax = tl.load(argmax_ptr)
    increase = ((shift - finite_shift(state.maximum)) * log2_scale).to(tl.float64)
    sum_x_exp = tl.sum(scale * (state.sum_x_exp - state.sumexp * increase) * LN2)
    old_increase = ((shift - finite_shift(old_maximum)) * log2_scale).to(tl.float64)
    sum_x_exp += old_scale * (old_sum_x_exp - old_sumexp * old_increase * LN2)
    # The first block that holds the maximum is read once more to find the class.
    block_start = tl.min(tl.where(state.maximum == chunk_maximum, state.argmax_block, 0x3FFFFFFF))
    v = (block_start + tl.arange(0, BLOCK_V))[None, :]
    x = load_logits(
        options.row_ptr, v, options.classes, options.softcap, False, HAS_SOFTCAP, ACC_DTYPE, VEC
    )
    # Another copy of the code may round a hyperbolic tangent in another way.
    block_maximum = tl.max(x) if HAS_SOFTCAP else chunk_maximum
    argmax = tl.min(tl.where(x == block_maximum, v, 0x7FFFFFFF))
    tl.store(sum_x_exp_ptr, sum_x_exp.to(ACC_DTYPE))
    is_higher = (first == 0) | (chunk_maximum > old_maximum)
    argmax = first + tl.minimum(argmax, options.classes - 1).to(tl.int64)
    tl.store(argmax_ptr, tl.where(is_higher, argmax, old_argmax))


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
    origin = tl.full([], 0.0, ACC_DTYPE)
    if smoothing_sum_ptr is not None:
        origin = finite_shift(apply_softcap(tl.load(row_ptr).to(ACC_DTYPE), softcap, HAS_SOFTCAP))
        origin = tl.where(first == 0, origin, tl.load(origin_ptr + row))
    options = ChunkOptions(row_ptr, weight_ptr, classes, origin, softcap, log2_scale)
    HAS_ENTROPY: tl.constexpr = sum_x_exp_ptr is not None
    HAS_SMOOTHING: tl.constexpr = smoothing_sum_ptr is not None
    state = scan_chunk(
        options, HAS_ENTROPY, HAS_SMOOTHING, HAS_SOFTCAP, ACC_DTYPE, VEC, LANES, BLOCK_V
    )
    new_maximum = tl.maximum(old_maximum, tl.max(state.maximum))
    shift = finite_shift(new_maximum)
    scale = tl.exp2((state.maximum - shift) * log2_scale).to(tl.float64)
    old_scale = tl.exp2((old_maximum - shift) * log2_scale).to(tl.float64)
    if HAS_ENTROPY:
        old, ptr = (old_maximum, old_sumexp), sum_x_exp_ptr + row
        update_entropy(
            ptr, argmax_ptr + row, first, state, options, old, shift, HAS_SOFTCAP, VEC, BLOCK_V
        )
    if HAS_SMOOTHING:
        old_sum = tl.where(first == 0, 0.0, tl.load(smoothing_sum_ptr + row).to(tl.float64))
        new_sum = old_sum + tl.sum(state.smoothing_sum)
        tl.store(smoothing_sum_ptr + row, new_sum.to(ACC_DTYPE))
        tl.store(origin_ptr + row, origin)
    tl.store(maximum_ptr + row, new_maximum)
    sumexp = old_sumexp * old_scale + tl.sum(state.sumexp * scale)
    tl.store(sumexp_ptr + row, sumexp.to(ACC_DTYPE))
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
