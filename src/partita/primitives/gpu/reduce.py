"""The rows of a program, and the running statistics of rows that are read in blocks.

There is one of each statistic for each lane. A lane is a thread, if `RowPlan.lanes` says that each
thread reads its own vectors of a row. Then no thread waits for another inside the loop, and the
lanes are merged once after it. If there is one lane, it stands for the whole row.

With `slope` = log2(e) / temperature, the exponentials are 2**u, u = slope (x - maximum).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .math import capped_logits, finite_shift
from .memory import aligned_start, edge_columns, row_span
from .sync import arrives_last, load_pairs, store_pair

EDGE_BLOCK = tl.constexpr(0x3FFFFFFF)  # stands for the classes outside of a row's aligned vectors
NOT_FOUND = tl.constexpr(0x7FFFFFFF)  # the class where no logit equals the maximum, which is NaN


class ProgramRows(NamedTuple):
    """The rows that a program reads, and its part of their classes.

    Fields:
        index: the rows among those of all batches, [ROWS].
        mask: which of them exist, [ROWS].
        batch: their batch.
        row: the rows in the batch, [ROWS].
        ptrs: the addresses of the rows, [ROWS].
        vectors: the addresses of their aligned vectors, [ROWS, 1].
        classes: the classes of a row.
        head, body: the number of classes before the aligned vectors, and inside them.
        split: the index of the program among those that share its rows.
        first, last: its part of the classes, counted from `head`.
    """

    index: Any
    mask: Any
    batch: Any
    row: Any
    ptrs: Any
    vectors: Any
    classes: Any
    head: Any
    body: Any
    split: Any
    first: Any
    last: Any


class RowTile(NamedTuple):
    """The rows and classes that a program reads at once.

    Fields:
        batch: the batch.
        span: the index of the block of classes.
        row: the rows, [ROWS].
        column: the classes, [1, BLOCK_V].
        index: the rows among those of all batches, [ROWS].
        row_mask: which of the rows exist, [ROWS].
        mask: which of the logits exist, [ROWS, BLOCK_V].
    """

    batch: Any
    span: Any
    row: Any
    column: Any
    index: Any
    row_mask: Any
    mask: Any


class RunningState(NamedTuple):
    """The statistics of the classes that were read: of lanes, [ROWS, LANES], or of rows, [ROWS].

    Fields:
        maximum: the maximum of x.
        total: the sum of 2**u, in fp64.
        sum_x_exp: the sum of u 2**u, in fp64, or 0 if it is not wanted.
        argmax: the first block with the maximum.
        weight: the sum of the weights q of the classes, in fp64, or 0 without weights.
        loss: the sum of q (maximum - x), in fp64, or 0 without weights.
    """

    maximum: Any
    total: Any
    sum_x_exp: Any
    argmax: Any
    weight: Any
    loss: Any


@triton.jit
def program_rows(x, rows, classes, splits, span, VEC: tl.constexpr, ROWS: tl.constexpr):
    """Return which part of `StridedRows` this program reads, if programs read `span` classes."""
    split = (tl.program_id(0) % splits).to(tl.int64)
    block = tl.program_id(0) // splits
    batch = (block // tl.cdiv(rows, ROWS)).to(tl.int64)
    first_row = (block % tl.cdiv(rows, ROWS)).to(tl.int64) * ROWS
    start = batch * x.batch + first_row * x.row
    head, body = row_span(start, classes, VEC)
    row = first_row + tl.arange(0, ROWS)
    ptrs = x.ptr + batch * x.batch + row * x.row
    steps = tl.arange(0, ROWS).to(tl.int64)[:, None] * x.row
    vectors = x.ptr + aligned_start(start, VEC) + steps
    first, last = split * span, tl.minimum((split + 1) * span, classes)
    index, mask = batch * rows + row, row < rows
    return ProgramRows(
        index, mask, batch, row, ptrs, vectors, classes, head, body, split, first, last
    )


@triton.jit
def locate_tile(rows, classes, spans, ROWS: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the tile of this program, if the classes are cut into `spans` blocks."""
    block, span = tl.program_id(0) // spans, tl.program_id(0) % spans
    batch = (block // tl.cdiv(rows, ROWS)).to(tl.int64)
    row = (block % tl.cdiv(rows, ROWS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (span.to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V))[None, :]
    mask = (row < rows)[:, None] & (column < classes)
    return RowTile(batch, span, row, column, batch * rows + row, row < rows, mask)


@triton.jit
def tile_ptrs(x, tile):
    """Return the addresses of the classes of a tile in `StridedRows`, [ROWS, BLOCK_V]."""
    return x.ptr + tile.batch * x.batch + tile.row[:, None] * x.row + tile.column * x.column


@triton.jit
def by_lane(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Reshape a block [ROWS, BLOCK] to [ROWS, ., LANES, VECTOR].

    Axes 1 and 3 then have what one thread loads of a row. If there is one lane, the block stays as
    it is.
    """
    if LANES == 1:
        return x
    else:
        return tl.reshape(x, [x.shape[0], x.shape[1] // (LANES * VECTOR), LANES, VECTOR])


@triton.jit
def broadcast_lanes(value):
    """Reshape a value of each lane, [ROWS, LANES], to broadcast with a block of `by_lane`."""
    if value.shape[1] == 1:
        return value
    else:
        return value[:, None, :, None]


@triton.jit
def lane_max(x):
    """Return the maximum of each lane, [ROWS, LANES], of a block of `by_lane`."""
    if len(x.shape) == 2:
        return tl.max(x, axis=1)[:, None]
    else:
        return tl.max(tl.max(x, axis=3), axis=1)


@triton.jit
def lane_sum(x, EXACT: tl.constexpr):
    """Return the sum of each lane in fp64, [ROWS, LANES], of a block of `by_lane`.

    EXACT adds all terms in fp64. A result in fp32 needs that if one lane has the whole row.
    """
    if EXACT:
        x = x.to(tl.float64)
    if len(x.shape) == 2:
        return tl.sum(x, axis=1)[:, None].to(tl.float64)
    else:
        return tl.sum(tl.sum(x, axis=3), axis=1).to(tl.float64)


@triton.jit
def empty_state(ROWS: tl.constexpr, LANES: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Return the statistics of no classes."""
    zeros = tl.zeros([ROWS, LANES], tl.float64)
    maximum = tl.full([ROWS, LANES], -float("inf"), ACC_DTYPE)
    return RunningState(maximum, zeros, zeros, tl.zeros([ROWS, LANES], tl.int32), zeros, zeros)


@triton.jit
def rescaled(state, maximum, slope):
    """Return a state relative to a maximum that is at least its own."""
    shift, old_shift = finite_shift(maximum), finite_shift(state.maximum)
    scale = tl.exp2((state.maximum - shift) * slope).to(tl.float64)
    moved_by = shift - old_shift
    sum_x_exp = scale * (state.sum_x_exp - state.total * (moved_by * slope).to(tl.float64))
    loss = state.loss + state.weight * moved_by.to(tl.float64)
    return RunningState(maximum, state.total * scale, sum_x_exp, state.argmax, state.weight, loss)


@triton.jit
def add_block(
    state, x, block, q, slope, ENTROPY: tl.constexpr, EXACT: tl.constexpr, VECTOR: tl.constexpr
):
    """Add a block of classes, [ROWS, BLOCK], and their weights q or None, to a state of lanes.

    No thread waits for another here, so the loads follow one another. The sums are in fp64, since
    thousands of blocks would accumulate the rounding errors of fp32.
    """
    LANES: tl.constexpr = state.maximum.shape[1]
    x = by_lane(x, LANES, VECTOR)
    block_maximum = lane_max(x)
    argmax = tl.where(block_maximum > state.maximum, block, state.argmax).to(tl.int32)
    moved = rescaled(state, tl.maximum(state.maximum, block_maximum), slope)
    shift = broadcast_lanes(finite_shift(moved.maximum))
    u = (x - shift) * slope
    e = tl.exp2(u)
    total = moved.total + lane_sum(e, EXACT)
    sum_x_exp, weight, loss = state.sum_x_exp, state.weight, state.loss
    if ENTROPY:  # A class of probability 0 adds 0, even if its exponent is -inf.
        sum_x_exp = moved.sum_x_exp + lane_sum(e * tl.maximum(u, -10000.0), False)
    if q is not None:  # A class of weight 0 adds 0, even if its logit is infinite.
        q = by_lane(q.to(x.dtype), LANES, VECTOR)
        loss = moved.loss + lane_sum(tl.where(q == 0.0, 0.0, q * (shift - x)), EXACT)
        weight += lane_sum(q, EXACT)
    return RunningState(moved.maximum, total, sum_x_exp, argmax, weight, loss)


@triton.jit
def merge_lanes(state, slope):
    """Return the statistics of rows, [ROWS], from those of their lanes, [ROWS, LANES]."""
    maximum = tl.max(state.maximum, axis=1)
    moved = rescaled(state, maximum[:, None], slope)
    is_maximum = state.maximum == maximum[:, None]
    return RunningState(
        maximum,
        tl.sum(moved.total, axis=1),
        tl.sum(moved.sum_x_exp, axis=1),
        tl.min(tl.where(is_maximum, state.argmax, NOT_FOUND), axis=1),
        tl.sum(moved.weight, axis=1),
        tl.sum(moved.loss, axis=1),
    )


@triton.jit
def merge_programs(
    state,
    at,
    slots_ptr,
    splits,
    slope,
    ENTROPY: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Return the statistics of rows, and the mask of the rows that this program stores.

    Where there are slots, programs share a row, and the one that arrives last merges its parts.
    Each row has a counter and, for each program, a slot for maximum and total, one for entropy and
    arg-max and one for the weights, if these are wanted.
    """
    if slots_ptr is None:
        return state, at.mask
    else:
        SLOTS: tl.constexpr = 1 + ENTROPY + WEIGHTS
        slots_ptr += tl.sum(at.index, axis=0) * (1 + SLOTS * splits)
        counter_ptr, slots_ptr, split = slots_ptr, slots_ptr + 1, at.split
        weights_ptr = slots_ptr + (SLOTS - 1) * splits
        if ENTROPY:
            argmax = tl.sum(state.argmax, axis=0).to(tl.float32, bitcast=True)
            sum_x_exp = tl.sum(state.sum_x_exp, axis=0).to(tl.float32)
            store_pair(slots_ptr + splits, split, sum_x_exp, argmax)
        if WEIGHTS:
            loss = tl.sum(state.loss, axis=0).to(tl.float32)
            store_pair(weights_ptr, split, tl.sum(state.weight, axis=0).to(tl.float32), loss)
        maximum, total = tl.sum(state.maximum, axis=0), tl.sum(state.total, axis=0).to(tl.float32)
        store_pair(slots_ptr, split, maximum, total)
        is_last = arrives_last(counter_ptr, splits)
        # The parts are merged as lanes are, [1, BLOCK_SPLITS].
        valid = tl.arange(0, BLOCK_SPLITS)[None, :] < splits
        maxima, totals = load_pairs(slots_ptr, splits, BLOCK_SPLITS)
        zeros = tl.zeros([BLOCK_SPLITS], tl.float32)
        sums_x_exp, argmaxima, weights, losses = zeros, zeros, zeros, zeros
        if ENTROPY:
            sums_x_exp, argmaxima = load_pairs(slots_ptr + splits, splits, BLOCK_SPLITS)
        if WEIGHTS:
            weights, losses = load_pairs(weights_ptr, splits, BLOCK_SPLITS)
        parts = RunningState(
            tl.where(valid, maxima, -float("inf")),
            tl.where(valid, totals, 0.0).to(tl.float64),
            tl.where(valid, sums_x_exp, 0.0).to(tl.float64),
            tl.where(valid, argmaxima.to(tl.int32, bitcast=True), NOT_FOUND),
            tl.where(valid, weights, 0.0).to(tl.float64),
            tl.where(valid, losses, 0.0).to(tl.float64),
        )
        return merge_lanes(parts, slope), at.mask & is_last


@triton.jit
def load_capped(pointers, mask, softcap, ACC_DTYPE: tl.constexpr):
    """Load logits, soft-capped if there is a soft-cap, -inf outside of the mask."""
    logits = tl.load(pointers, mask=mask, other=-float("inf"))
    return capped_logits(logits, mask, softcap, ACC_DTYPE)


@triton.jit
def add_classes(
    state,
    x_ptrs,
    column,
    mask,
    block,
    at,
    slope,
    softcap,
    options,
    weigh: tl.constexpr,
    ENTROPY: tl.constexpr,
    EXACT: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Load a block of classes, with their weights, and add it to the state of the lanes."""
    x = load_capped(x_ptrs, mask, softcap, state.maximum.dtype)
    q = None if weigh is None else weigh(options, at, column, mask)
    return add_block(state, x, block, q, slope, ENTROPY, EXACT, VECTOR)


@triton.jit
def scan_rows(
    x,
    at,
    slope,
    softcap,
    options,
    weigh: tl.constexpr,
    ENTROPY: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Return the statistics of the rows of a program, [ROWS], over its part of their classes.

    The program of the first part also reads the classes around the aligned vectors. Where there are
    weights, `weigh(options, at, column, mask)` returns those of a block of classes.
    """
    BITS: tl.constexpr = x.ptr.dtype.element_ty.primitive_bitwidth
    VECTOR: tl.constexpr = 1 if LANES == 1 else 128 // BITS
    EXACT: tl.constexpr = LANES == 1 and x.ptr.dtype.element_ty == tl.float32
    state = empty_state(ROWS, LANES, slope.dtype)
    args = (at, slope, softcap, options)
    unmasked = at.first
    if LANES > 1:  # Blocks of several rows always need a mask.
        whole = tl.maximum(tl.minimum(at.last, at.body) - at.first, 0) // BLOCK_V
        unmasked += whole * BLOCK_V
    for first in range(at.first, unmasked, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        ptrs, column = at.vectors + column * x.column, at.head + column
        mask, block = tl.full([ROWS, BLOCK_V], True, tl.int1), first // BLOCK_V
        state = add_classes(state, ptrs, column, mask, block, *args, weigh, ENTROPY, EXACT, VECTOR)
    for first in range(unmasked, at.last, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        mask = at.mask[:, None] & (column // VEC * VEC < at.body)
        ptrs, column = at.vectors + column * x.column, at.head + column
        block = first // BLOCK_V
        state = add_classes(state, ptrs, column, mask, block, *args, weigh, ENTROPY, EXACT, VECTOR)
    if VEC > 1:
        column, mask = edge_columns(at.head, at.body, at.classes, VEC, LANES)  # [LANES]
        column, mask = column[None, :], (mask & (at.split == 0))[None, :]
        ptrs, block = at.ptrs[:, None] + column, EDGE_BLOCK
        state = add_classes(state, ptrs, column, mask, block, *args, weigh, ENTROPY, EXACT, 1)
    return merge_lanes(state, slope)
