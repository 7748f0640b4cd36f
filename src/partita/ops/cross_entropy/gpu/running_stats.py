"""Steps of the token statistics of rows that are read in blocks.

With `slope` = log2(e) / temperature,
the exponentials are 2**u, u = slope (x - maximum).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import apply_softcap, finite_shift
from ....primitives.gpu.reduce import broadcast_lanes, by_lane, lane_max, lane_sum
from ....primitives.gpu.sync import arrives_last, load_partials, store_partial

EDGE_BLOCK = tl.constexpr(0x3FFFFFFF)  # stands for the classes outside of a row's aligned vectors
NO_COLUMN = tl.constexpr(0x7FFFFFFF)


class LogitRows(NamedTuple):
    """The rows of logits that a program reads.

    Fields:
        ptrs: the addresses of their aligned vectors, [ROWS, 1].
        stride: the stride over the classes.
        mask: which of the rows exist, [ROWS].
        body: the number of classes in the aligned vectors.
        softcap: the bound of the logits.
    """

    ptrs: Any
    stride: Any
    mask: Any
    body: Any
    softcap: Any


class RunningStats(NamedTuple):
    """The statistics of what was read, [ROWS, LANES] or merged [ROWS].

    Fields:
        maximum: the maximum of x.
        total: the sum of 2**u, fp64.
        sum_x_exp: the sum of u 2**u, fp64.
        argmax: the first block with the maximum; of merged rows, the lowest class with it.
    """

    maximum: Any
    total: Any
    sum_x_exp: Any
    argmax: Any


@triton.jit
def load_capped(pointers, mask, softcap, HAS_SOFTCAP: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Load soft-capped logits, -inf outside of the mask."""
    x = tl.load(pointers, mask=mask, other=-float("inf")).to(ACC_DTYPE)
    if HAS_SOFTCAP:
        x = tl.where(mask, apply_softcap(x, softcap, HAS_SOFTCAP), -float("inf"))
    return x


@triton.jit
def accumulate_stats(stats, x, block, slope, VECTOR: tl.constexpr):
    """Update the statistics of the lanes, `[ROWS, LANES]` each, with a block x, `[ROWS, BLOCK]`."""
    maximum, total, sum_x_exp, argmax_block = stats
    x = by_lane(x, maximum.shape[1], VECTOR)
    block_maximum = lane_max(x)
    argmax_block = tl.where(block_maximum > maximum, block, argmax_block).to(tl.int32)
    new_maximum = tl.maximum(maximum, block_maximum)
    shift = finite_shift(new_maximum)
    scale = tl.exp2((maximum - shift) * slope).to(tl.float64)
    moved_by = ((shift - finite_shift(maximum)) * slope).to(tl.float64)
    sum_x_exp = scale * (sum_x_exp - total * moved_by)
    exponent = (x - broadcast_lanes(shift)) * slope
    e = tl.exp2(exponent)
    # A class of probability 0 adds 0, even if its exponent is -inf.
    sum_x_exp += lane_sum(e * tl.maximum(exponent, -10000.0), False)
    total = total * scale + lane_sum(e, False)
    return RunningStats(new_maximum, total, sum_x_exp, argmax_block)


@triton.jit
def load_block(
    source, column, HAS_SOFTCAP: tl.constexpr, VEC: tl.constexpr, ACC_DTYPE: tl.constexpr
):
    """Load a block of the aligned vectors, -inf past them, for columns counted from `head`."""
    mask = source.mask[:, None] & (column // VEC * VEC < source.body)
    ptrs = source.ptrs + column * source.stride
    return load_capped(ptrs, mask, source.softcap, HAS_SOFTCAP, ACC_DTYPE)


@triton.jit
def first_column_of(x, column, maximum):
    """Return the lowest column at which x, `[ROWS, BLOCK]`, is its row's maximum, or NO_COLUMN."""
    return tl.min(tl.where(x == maximum[:, None], column, NO_COLUMN), axis=1)


@triton.jit
def merge_shared_stats(stats, slot_ptr, split, splits, slope, BLOCK_SPLITS: tl.constexpr):
    """Exchange the statistics of a row's programs, and return those of the row.

    They are complete only in the last program, and the second result says whether this is it.
    """
    second_slot = slot_ptr + splits + 1
    store_partial(
        second_slot,
        split,
        tl.sum(stats.sum_x_exp, axis=0),
        tl.sum(stats.argmax, axis=0).to(tl.float32, bitcast=True),
    )
    store_partial(slot_ptr, split, tl.sum(stats.maximum, axis=0), tl.sum(stats.total, axis=0))
    is_last = arrives_last(slot_ptr, splits)
    maxima, totals, mask = load_partials(slot_ptr, splits, BLOCK_SPLITS)
    sums_x_exp, columns, _ = load_partials(second_slot, splits, BLOCK_SPLITS)
    maximum = tl.max(tl.where(mask, maxima, -float("inf")), axis=0)
    shift = finite_shift(maximum)
    scales = tl.where(mask, tl.exp2((maxima - shift) * slope), 0.0)
    moved = scales * (sums_x_exp - totals * (shift - finite_shift(maxima)) * slope)
    moved = tl.where(mask, moved, 0.0)
    is_maximum = mask & (maxima == maximum)
    columns = tl.where(is_maximum, columns.to(tl.int32, bitcast=True), NO_COLUMN)
    argmax = tl.min(columns, axis=0)
    zero = tl.zeros_like(stats.maximum)  # [1], as rows that are shared have programs of their own
    merged = RunningStats(
        zero + maximum,
        zero + tl.sum(tl.where(mask, scales * totals, 0.0), axis=0),
        zero + tl.sum(moved, axis=0),
        tl.zeros_like(stats.argmax) + argmax,
    )
    return merged, is_last
