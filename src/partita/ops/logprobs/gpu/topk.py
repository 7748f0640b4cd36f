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
from ....primitives.gpu.memory import load_vectors
from ....primitives.gpu.reduce import NOT_FOUND, add_block, empty_state, rescaled


class TopKRow(NamedTuple):
    """A row and what the kernel knows of it.

    Fields:
        ptr: its first logit.
        class_stride: the stride over classes.
        classes: the number of classes.
        cap: the soft-cap, or None.
        log2_scale: the factor of logits in exponents of 2.
    """

    ptr: Any
    class_stride: Any
    classes: Any
    cap: Any
    log2_scale: Any


@triton.jit
def ordered_logits(x, mask, row):
    """Return the soft-capped logits x, -inf outside of the mask; NaN is infinite."""
    x = apply_softcap(x.to(row.log2_scale.dtype), row.cap)
    return tl.where(mask, tl.where(x == x, x, float("inf")), -float("inf"))


@triton.jit
def load_some(row, v):
    """Load the logits of the classes v, as `ordered_logits`."""
    mask = v < row.classes
    x = tl.load(row.ptr + v.to(tl.int64) * row.class_stride, mask=mask, other=0.0)
    return ordered_logits(x, mask, row)


@triton.jit
def next_leader(row, value, index, TILE: tl.constexpr, LANE_BLOCK: tl.constexpr):
    """Return the logit and the class that follow those of a lane's leader."""
    VEC: tl.constexpr = TILE.vector
    LANES: tl.constexpr = TILE.lanes
    lane = index // VEC % LANES
    found = tl.full([], -float("inf"), value.dtype)
    found_index = tl.full([], NOT_FOUND, tl.int32)
    for start in range(0, tl.cdiv(row.classes, LANES * VEC) * VEC, LANE_BLOCK):
        i = start + tl.arange(0, LANE_BLOCK)
        v = i // VEC * (LANES * VEC) + lane * VEC + i % VEC
        x = load_some(row, v)
        follows = (v < row.classes) & ((x < value) | ((x == value) & (v > index)))
        x = tl.where(follows, x, -float("inf"))
        block_value = tl.max(x)
        block_index = tl.min(tl.where(follows & (x == block_value), v, NOT_FOUND))
        # Later blocks have higher classes, so they need a larger logit.
        is_next = (block_value > found) | (found_index == NOT_FOUND)
        found_index = tl.where(is_next, block_index, found_index)
        found = tl.where(is_next, block_value, found)
    return found, found_index


@triton.jit
def topk_logprobs_kernel(
    logits,  # StridedRows of one batch
    found,  # TopKRows, [M, K] and [M]
    classes,
    K,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
    LANE_BLOCK: tl.constexpr,
):
    """Compute the K most probable classes of one row, which is read once, and parts of it again."""
    VEC: tl.constexpr = TILE.vector
    LANES: tl.constexpr = TILE.lanes
    program = tl.program_id(0).to(tl.int64)
    temperature = tl.full([], temperature, ACC_DTYPE)
    row = TopKRow(
        logits.ptr + program * logits.row,
        logits.column,
        classes,
        tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None,
        tl.full([], LOG2E, ACC_DTYPE) / temperature,
    )
    # Each lane finds its maximum, its sum of exponentials and the first block with the maximum.
    state = empty_state(1, LANES, ACC_DTYPE, tl.float64)
    row_ptrs, exists = row.ptr + tl.arange(0, 1), tl.full([1], True, tl.int1)
    for start in range(0, classes, TILE.block):
        x, _, mask = load_vectors(
            row_ptrs, row.class_stride, start, classes, exists, True, "", TILE.block, TILE
        )
        x = ordered_logits(x, mask, row)
        state = add_block(state, x, start, None, row.log2_scale, False)
    maximum = tl.max(state.maximum)
    shift = finite_shift(maximum)
    total = tl.sum(rescaled(state, maximum, row.log2_scale).total).to(ACC_DTYPE)
    log_total = log_exact(total)
    tl.store(found.logsumexp + program, divide(shift, temperature) + log_total)
    tl.store(found.maximum + program, maximum)
    tl.store(found.sumexp + program, total)
    # The leader of a lane is its largest logit and the lowest class that has it.
    lane = tl.arange(0, LANES)[None, :]
    values, indices = state.maximum, tl.full([1, LANES], NOT_FOUND, tl.int32)
    for i in range(0, TILE.block // LANES):
        v = state.argmax + i // VEC * (LANES * VEC) + lane * VEC + i % VEC
        x = load_some(row, v)
        indices = tl.minimum(indices, tl.where((x == values) & (v < classes), v, NOT_FOUND))
    for k in range(0, K):
        value = tl.max(values)
        index = tl.min(tl.where(values == value, indices, NOT_FOUND))
        entry = program * K + k
        tl.store(found.entries + entry, value)
        tl.store(found.indices + entry, index.to(tl.int64))
        tl.store(found.logprobs + entry, divide(value - shift, temperature) - log_total)
        following = next_leader(row, value, index, TILE, LANE_BLOCK)
        is_lane = lane == index // VEC % LANES
        values = tl.where(is_lane, following[0], values)
        indices = tl.where(is_lane, following[1], indices)
