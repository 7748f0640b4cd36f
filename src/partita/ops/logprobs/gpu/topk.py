"""The kernel that finds the most probable classes of a row.

A tournament of two levels finds them in order. The classes of a row are dealt to lanes, vector
after vector, and the leader of a lane is its largest logit. The largest leader is the next class of
the result; only the lane that it comes from is read again, for its next leader.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E, apply_softcap, divide, finite_shift, log_exact
from ....primitives.gpu.reduce import broadcast_lanes, by_lane, lane_max, lane_sum

NO_CLASS = tl.constexpr(0x7FFFFFFF)


class TopKRow(NamedTuple):
    """A row and what the kernel knows of it.

    Fields:
        ptr: its first logit.
        class_stride: the stride over classes.
        classes: the number of classes.
        cap: the soft-cap.
        log2_scale: the factor of logits in exponents of 2.
    """

    ptr: Any
    class_stride: Any
    classes: Any
    cap: Any
    log2_scale: Any


class Leaders(NamedTuple):
    """The largest logit of each lane, `[1, LANES]`, and its class, the lowest of equal ones.

    Fields:
        value: the soft-capped logit, -inf if the lane has no class left.
        index: the class, NO_CLASS if the lane has none left.
    """

    value: Any
    index: Any


@triton.jit
def load_some(row, v, HAS_SOFTCAP: tl.constexpr, ACC_DTYPE: tl.constexpr, VEC: tl.constexpr):
    """Load the soft-capped logits of the classes v, -inf past the last class; NaN is infinite."""
    pointers = row.ptr + v.to(tl.int64) * row.class_stride
    x = tl.load(pointers, mask=v // VEC * VEC < row.classes, other=0.0).to(ACC_DTYPE)
    x = tl.where(x == x, apply_softcap(x, row.cap, HAS_SOFTCAP), float("inf"))
    return tl.where(v < row.classes, x, -float("inf"))


@triton.jit
def scan_lanes(
    row,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return maximum, sum of exponentials and first block with the maximum of each lane."""
    maximum = tl.full([1, LANES], -float("inf"), ACC_DTYPE)
    total = tl.zeros([1, LANES], tl.float64)
    first_block = tl.zeros([1, LANES], tl.int32)
    for start in range(0, row.classes, BLOCK):
        v = (start + tl.arange(0, BLOCK))[None, :]
        x = by_lane(load_some(row, v, HAS_SOFTCAP, ACC_DTYPE, VEC), LANES, VEC)
        block_maximum = lane_max(x)
        first_block = tl.where(block_maximum > maximum, start, first_block)
        higher = tl.maximum(maximum, block_maximum)
        shift = finite_shift(higher)
        total *= tl.exp2((maximum - shift) * row.log2_scale).to(tl.float64)
        total += lane_sum(tl.exp2((x - broadcast_lanes(shift)) * row.log2_scale), False)
        maximum = higher
    return maximum, total, first_block


@triton.jit
def first_leaders(
    row,
    maximum,
    first_block,
    HAS_SOFTCAP: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the leaders of the lanes, whose classes are among those of a block."""
    LANES: tl.constexpr = maximum.shape[1]
    lane = tl.arange(0, LANES)[None, :]
    index = tl.full([1, LANES], NO_CLASS, tl.int32)
    for i in range(0, BLOCK // LANES):
        v = first_block + i // VEC * (LANES * VEC) + lane * VEC + i % VEC
        x = load_some(row, v, HAS_SOFTCAP, maximum.dtype, 1)
        index = tl.minimum(index, tl.where((x == maximum) & (v < row.classes), v, NO_CLASS))
    return Leaders(maximum, index)


@triton.jit
def next_leader(
    row,
    value,
    index,
    HAS_SOFTCAP: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    LANE_BLOCK: tl.constexpr,
):
    """Return the logit and the class that follow those of a lane's leader."""
    lane = index // VEC % LANES
    found = tl.full([], -float("inf"), value.dtype)
    found_index = tl.full([], NO_CLASS, tl.int32)
    for start in range(0, tl.cdiv(row.classes, LANES * VEC) * VEC, LANE_BLOCK):
        i = start + tl.arange(0, LANE_BLOCK)
        v = i // VEC * (LANES * VEC) + lane * VEC + i % VEC
        x = load_some(row, v, HAS_SOFTCAP, value.dtype, 1)
        follows = (v < row.classes) & ((x < value) | ((x == value) & (v > index)))
        x = tl.where(follows, x, -float("inf"))
        block_value = tl.max(x)
        block_index = tl.min(tl.where(follows & (x == block_value), v, NO_CLASS))
        # Later blocks have higher classes, so they need a larger logit.
        is_next = (block_value > found) | (found_index == NO_CLASS)
        found_index = tl.where(is_next, block_index, found_index)
        found = tl.where(is_next, block_value, found)
    return found, found_index


@triton.jit
def topk_logprobs_kernel(
    logits_ptr,  # [M, C]
    logprobs_ptr,  # [M, K]
    indices_ptr,  # [M, K] int64
    logsumexp_ptr,  # [M]
    entries_ptr,  # [M, K]
    maximum_ptr,  # [M]
    sumexp_ptr,  # [M]
    classes,
    K,
    row_stride,
    class_stride,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANE_BLOCK: tl.constexpr,
):
    """Compute the K most probable classes of one row, which is read once, and parts of it again."""
    program = tl.program_id(0).to(tl.int64)
    temperature = tl.full([], temperature, ACC_DTYPE)
    row = TopKRow(
        logits_ptr + program * row_stride,
        class_stride,
        classes,
        tl.full([], softcap, ACC_DTYPE),
        tl.full([], LOG2E, ACC_DTYPE) / temperature,
    )
    maxima, totals, first_block = scan_lanes(row, HAS_SOFTCAP, ACC_DTYPE, VEC, LANES, BLOCK)
    maximum = tl.max(maxima)
    shift = finite_shift(maximum)
    total = tl.sum(totals * tl.exp2((maxima - shift) * row.log2_scale).to(tl.float64))
    total = total.to(ACC_DTYPE)
    log_total = log_exact(total)
    tl.store(logsumexp_ptr + program, divide(shift, temperature) + log_total)
    tl.store(maximum_ptr + program, maximum)
    tl.store(sumexp_ptr + program, total)
    leaders = first_leaders(row, maxima, first_block, HAS_SOFTCAP, VEC, BLOCK)
    values, indices = leaders.value, leaders.index
    lane = tl.arange(0, LANES)[None, :]
    for k in range(0, K):
        value = tl.max(values)
        index = tl.min(tl.where(values == value, indices, NO_CLASS))
        entry = program * K + k
        tl.store(entries_ptr + entry, value)
        tl.store(indices_ptr + entry, index.to(tl.int64))
        tl.store(logprobs_ptr + entry, divide(value - shift, temperature) - log_total)
        following = next_leader(row, value, index, HAS_SOFTCAP, VEC, LANES, LANE_BLOCK)
        is_lane = lane == index // VEC % LANES
        values = tl.where(is_lane, following[0], values)
        indices = tl.where(is_lane, following[1], indices)
