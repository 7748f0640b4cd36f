"""The kernel that computes the statistics of the classes of each row that are no ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E, apply_softcap, finite_shift
from ....primitives.gpu.reduce import broadcast_lanes, by_lane, lane_max, lane_sum

NO_ID = tl.constexpr(0x7FFFFFFFFFFFFFFF)  # follows the last id of a row


class RestRow(NamedTuple):
    """A row of logits and its ids.

    Fields:
        row_ptr: the first logit.
        class_stride: the stride over classes.
        first, classes: the first class, and the number of classes.
        ids_ptr: the ids of the row in ascending order.
        K: the number of ids.
        softcap: the bound of the logits.
        slope: the factor of logits in exponents of 2.
    """

    row_ptr: Any
    class_stride: Any
    first: Any
    classes: Any
    ids_ptr: Any
    K: Any
    softcap: Any
    slope: Any


class RestState(NamedTuple):
    """The statistics of the lanes, [1, LANES], and the first id that is not reached yet.

    Fields:
        maximum: the maximum of the logits.
        total: the sum of exponentials, fp64.
        k: the index of the id.
        id: the id, or NO_ID.
    """

    maximum: Any
    total: Any
    k: Any
    id: Any


@triton.jit
def add_rest_block(
    state, row, start, UNMASKED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr
):
    """Add the classes of a block that are no ids to the statistics of the lanes."""
    ACC_DTYPE: tl.constexpr = state.maximum.dtype
    LANES: tl.constexpr = state.maximum.shape[1]
    VECTOR: tl.constexpr = (
        1 if LANES == 1 else 128 // row.row_ptr.dtype.element_ty.primitive_bitwidth
    )
    v = (start + tl.arange(0, BLOCK).to(tl.int64))[None, :]  # [1, BLOCK]
    if UNMASKED:
        x = tl.load(row.row_ptr + v * row.class_stride).to(ACC_DTYPE)
    else:
        x = tl.load(row.row_ptr + v * row.class_stride, mask=v < row.classes, other=0.0)
        x = x.to(ACC_DTYPE)
    x = apply_softcap(x, row.softcap, HAS_SOFTCAP)
    if not UNMASKED:
        x = tl.where(v < row.classes, x, -float("inf"))
    k, id = state.k, state.id
    while id < row.first + start + BLOCK:
        x = tl.where(v == id - row.first, -float("inf"), x)
        k += 1
        id = tl.load(row.ids_ptr + k, mask=k < row.K, other=NO_ID)
    x = by_lane(x, LANES, VECTOR)
    maximum = tl.maximum(state.maximum, lane_max(x))
    shift = finite_shift(maximum)
    total = state.total * tl.exp2((state.maximum - shift) * row.slope).to(tl.float64)
    total += lane_sum(tl.exp2((x - broadcast_lanes(shift)) * row.slope), False)
    return RestState(maximum, total, k, id)


@triton.jit(do_not_specialize=["K", "classes", "first"])
def logprobs_rest_kernel(
    logits,  # StridedRows, the classes from `first` on
    ids_ptr,  # [M, K] int64, ascending in each row
    rest_ptr,  # [M, 2] maximum and sum, updated in place
    K,
    classes,
    first,
    rows,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the statistics of the classes of one row that are no ids, with one read of them.

    The ids of a row are met in their order, so each of them is compared with one block of classes.
    """
    index = tl.program_id(0).to(tl.int64)
    slope = tl.full([], LOG2E, ACC_DTYPE) / tl.full([], temperature, ACC_DTYPE)
    row = RestRow(
        logits.ptr + (index // rows) * logits.batch + (index % rows) * logits.row,
        logits.column,
        first,
        classes,
        ids_ptr + index * K,
        K,
        tl.full([], softcap, ACC_DTYPE),
        slope,
    )
    nothing = tl.full([1, LANES], -float("inf"), ACC_DTYPE)
    id = tl.load(row.ids_ptr, mask=K > 0, other=NO_ID)
    state = RestState(nothing, tl.zeros([1, LANES], tl.float64), index * 0, id)
    unmasked_end = classes // BLOCK * BLOCK
    for start in range(0, unmasked_end, BLOCK):
        state = add_rest_block(state, row, start, True, HAS_SOFTCAP, BLOCK)
    if unmasked_end < classes:
        state = add_rest_block(state, row, unmasked_end, False, HAS_SOFTCAP, BLOCK)
    before = tl.load(rest_ptr + 2 * index)
    maximum = tl.maximum(before, tl.max(state.maximum))
    shift = finite_shift(maximum)
    total = tl.load(rest_ptr + 2 * index + 1).to(tl.float64)
    total *= tl.exp2((before - shift) * slope).to(tl.float64)
    total += tl.sum(state.total * tl.exp2((state.maximum - shift) * slope).to(tl.float64))
    tl.store(rest_ptr + 2 * index, maximum)
    tl.store(rest_ptr + 2 * index + 1, total.to(ACC_DTYPE))
