"""Token statistics of rows that are read in blocks, from the first block to those of the row.

Each lane accumulates the blocks of the aligned vectors, then the classes around them. The lanes of
a row are merged, and at last the programs that share the row. With `slope` = log2(e) / temperature,
the exponentials are 2**u, u = slope (x - maximum).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import apply_softcap, finite_shift
from ....primitives.gpu.memory import edge_columns
from ....primitives.gpu.reduce import broadcast_lanes, by_lane, lane_max, lane_sum, unmasked_end
from ....primitives.gpu.sync import arrives_last, load_partials, store_partial
from .reduction import load_labels

EDGE_BLOCK = tl.constexpr(0x3FFFFFFF)  # stands for the classes outside of a row's aligned vectors
NO_COLUMN = tl.constexpr(0x7FFFFFFF)


class LogitRows(NamedTuple):
    """The rows of logits that a program reads.

    Fields:
        ptrs: the addresses of their aligned vectors, [ROWS, 1].
        stride: the stride over the classes.
        mask: which of the rows exist, [ROWS].
        head: the number of classes before the aligned vectors.
        body: the number of classes in the aligned vectors.
        softcap: the bound of the logits.
    """

    ptrs: Any
    stride: Any
    mask: Any
    head: Any
    body: Any
    softcap: Any


class RowEdges(NamedTuple):
    """The classes around the aligned vectors of a row.

    Fields:
        column: the classes, [LANES].
        mask: which of them this program has, [LANES].
        x: their soft-capped logits, [1, LANES].
    """

    column: Any
    mask: Any
    x: Any


class StatsLabel(NamedTuple):
    """The labels of the rows, [ROWS].

    Fields:
        not_ignored: whether the label is not `ignore_index`.
        in_range: whether it also is a class.
        x: the soft-capped logit at the label.
    """

    not_ignored: Any
    in_range: Any
    x: Any


class RunningStats(NamedTuple):
    """The statistics of what was read, [ROWS, LANES] or merged [ROWS].

    Fields:
        maximum: the maximum of x.
        total: the sum of 2**u, fp64.
        sum_x_exp: the sum of u 2**u, fp64.
        argmax_block: the first block in which the maximum occurs.
    """

    maximum: Any
    total: Any
    sum_x_exp: Any
    argmax_block: Any


class RowStats(NamedTuple):
    """The statistics of the rows, [ROWS].

    Fields:
        maximum: the maximum of x.
        total: the sum of 2**u.
        sum_x_exp: the sum of u 2**u.
        argmax: the lowest class with the maximum.
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
def load_stats_label(
    target_ptr,
    index,
    row_ptrs,
    source,
    classes,
    ignore_index,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Load the labels at `index`, [ROWS], and the logits of the rows at `row_ptrs`.

    Without targets, the labels stand for the arg-max, whose logit is known later.
    """
    if target_ptr is not None:
        label = load_labels(target_ptr, index, source.mask, ignore_index)
    else:
        label = index * 0  # any class; the maximum replaces its logit
    not_ignored = label != ignore_index
    in_range = not_ignored & (label >= 0) & (label < classes)
    label_ptrs = row_ptrs + label * source.stride
    x = tl.load(label_ptrs, mask=in_range & source.mask, other=0.0).to(ACC_DTYPE)
    return StatsLabel(not_ignored, in_range, apply_softcap(x, source.softcap, HAS_SOFTCAP))


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
def scan_blocks(
    source,
    begin,
    end,
    slope,
    HAS_SOFTCAP: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Return the lanes' statistics of the aligned vectors from class `begin` to `end`."""
    VECTOR: tl.constexpr = (
        1 if LANES == 1 else 128 // source.ptrs.dtype.element_ty.primitive_bitwidth
    )
    stats = RunningStats(
        tl.full([ROWS, LANES], -float("inf"), ACC_DTYPE),
        tl.zeros([ROWS, LANES], tl.float64),
        tl.zeros([ROWS, LANES], tl.float64),
        tl.zeros([ROWS, LANES], tl.int32),
    )
    unmasked = unmasked_end(begin, end, source.body, BLOCK_V, LANES)
    for first in range(begin, unmasked, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        x = tl.load(source.ptrs + column * source.stride).to(ACC_DTYPE)
        x = apply_softcap(x, source.softcap, HAS_SOFTCAP)
        stats = accumulate_stats(stats, x, first // BLOCK_V, slope, VECTOR)
    for first in range(unmasked, end, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        x = load_block(source, column, HAS_SOFTCAP, VEC, ACC_DTYPE)
        stats = accumulate_stats(stats, x, first // BLOCK_V, slope, VECTOR)
    return stats


@triton.jit
def add_edges(
    stats, source, row_ptr, split, classes, slope, HAS_SOFTCAP: tl.constexpr, VEC: tl.constexpr
):
    """Add the classes around the aligned vectors of the row, which belong to the first program."""
    if VEC == 1:
        return stats, RowEdges(0, False, 0.0)
    else:
        ACC_DTYPE: tl.constexpr = stats.maximum.dtype
        column, mask = edge_columns(
            source.head, source.body, classes, VEC, stats.maximum.shape[1]
        )  # [LANES]
        x_mask = (mask & (split == 0))[None, :]
        x = load_capped(row_ptr + column[None, :], x_mask, source.softcap, HAS_SOFTCAP, ACC_DTYPE)
        return accumulate_stats(stats, x, EDGE_BLOCK, slope, 1), RowEdges(column, mask, x)


@triton.jit
def merge_lane_stats(stats, slope):
    """Merge the statistics of the lanes, [ROWS, LANES], to those of the rows, [ROWS]."""
    maximum = tl.max(stats.maximum, axis=1)
    shift = finite_shift(maximum)
    scale = tl.exp2((stats.maximum - shift[:, None]) * slope).to(tl.float64)
    moved_by = ((shift[:, None] - finite_shift(stats.maximum)) * slope).to(tl.float64)
    sum_x_exp = tl.sum(scale * (stats.sum_x_exp - stats.total * moved_by), axis=1)
    total = tl.sum(stats.total * scale, axis=1)
    is_maximum = stats.maximum == maximum[:, None]
    argmax_block = tl.min(tl.where(is_maximum, stats.argmax_block, EDGE_BLOCK), axis=1)
    return RunningStats(maximum, total, sum_x_exp, argmax_block)


@triton.jit
def first_column_of(x, column, maximum):
    """Return the lowest column at which x, `[ROWS, BLOCK]`, is its row's maximum, or NO_COLUMN."""
    return tl.min(tl.where(x == maximum[:, None], column, NO_COLUMN), axis=1)


@triton.jit
def find_argmax(
    stats, source, edges, HAS_SOFTCAP: tl.constexpr, VEC: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Return the statistics of the rows with their arg-max, [ROWS].

    The first block that has the maximum is read once more, to find the column in it.
    """
    ACC_DTYPE: tl.constexpr = stats.maximum.dtype
    block = stats.argmax_block
    block = tl.sum(block, axis=0) if block.shape[0] == 1 else block[:, None]
    column = block.to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]  # [ROWS, BLOCK_V]
    x = load_block(source, column, HAS_SOFTCAP, VEC, ACC_DTYPE)
    sought = stats.maximum
    if HAS_SOFTCAP:  # Another copy of the code may round a hyperbolic tangent in another way.
        sought = tl.max(x, axis=1)
        if VEC > 1:
            sought = tl.maximum(sought, tl.max(edges.x, axis=1))
    argmax = first_column_of(x, (source.head + column).to(tl.int32), sought)
    if VEC > 1:
        edge = tl.where(edges.mask, edges.column, NO_COLUMN).to(tl.int32)[None, :]
        argmax = tl.minimum(argmax, first_column_of(edges.x, edge, sought))
    return RowStats(stats.maximum, stats.total.to(ACC_DTYPE), stats.sum_x_exp.to(ACC_DTYPE), argmax)


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
    merged = RowStats(
        zero + maximum,
        zero + tl.sum(tl.where(mask, scales * totals, 0.0), axis=0),
        zero + tl.sum(moved, axis=0),
        tl.zeros_like(stats.argmax) + argmax,
    )
    return merged, is_last
