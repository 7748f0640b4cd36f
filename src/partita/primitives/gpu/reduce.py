"""The rows of a program, and the running statistics of rows that are read in blocks.

The bits of a row depend on its width and dtype alone. Its classes are dealt to lanes, vector after
vector, from the first class on. A lane has statistics of its own, so no thread waits for another
inside the loop. They start anew in each segment of the classes, and are then added to those of the
row, by the program that has the whole row, or, segment after segment, by the last one of those that
share it. The lanes are merged at the end.

With `slope` = log2(e) / temperature, the exponentials are 2**u, u = slope (x - maximum).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .math import capped_logits, finite_shift
from .memory import load_vectors
from .sync import arrives_last

LOADED_SEGMENTS = tl.constexpr(8)  # whose loads do not wait for one another
NOT_FOUND = tl.constexpr(0x7FFFFFFF)  # the class where no logit equals the maximum, which is NaN


class ProgramRows(NamedTuple):
    """The rows that a program reads.

    Fields:
        index: the rows among those of all batches, [ROWS].
        mask: which of them exist, [ROWS].
        batch: their batch.
        row: the rows in the batch, [ROWS].
        ptrs: the addresses of the rows, [ROWS].
        classes: the classes of a row.
        split: the index of the program among those that share its rows.
    """

    index: Any
    mask: Any
    batch: Any
    row: Any
    ptrs: Any
    classes: Any
    split: Any


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
        total: the sum of 2**u.
        sum_x_exp: the sum of u 2**u, or 0 if it is not wanted.
        argmax: the first block with the maximum.
        weight: the sum of the weights q of the classes, or 0 without weights.
        loss: the sum of q (maximum - x), or 0 without weights.
    """

    maximum: Any
    total: Any
    sum_x_exp: Any
    argmax: Any
    weight: Any
    loss: Any


@triton.jit
def program_rows(x, rows, classes, segments, ROWS: tl.constexpr):
    """Return which rows of `StridedRows` this program reads."""
    split = tl.program_id(0) % segments.programs
    block = tl.program_id(0) // segments.programs
    batch = (block // tl.cdiv(rows, ROWS)).to(tl.int64)
    row = (block % tl.cdiv(rows, ROWS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    ptrs = x.ptr + batch * x.batch + row * x.row
    return ProgramRows(batch * rows + row, row < rows, batch, row, ptrs, classes, split)


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
def of_lanes(value):
    """Reshape a value of each lane, [ROWS, LANES], to broadcast with a block of classes."""
    return value[None, None]


@triton.jit
def max_of_lanes(x):
    """Return the maximum of each lane, [ROWS, LANES], of a block [VEC, ., ROWS, LANES]."""
    return tl.max(tl.max(x, axis=0), axis=0)


@triton.jit
def sum_of_lanes(x, dtype: tl.constexpr):
    """Return the sum of each lane, [ROWS, LANES], of a block [VEC, ., ROWS, LANES]."""
    return tl.sum(tl.sum(x, axis=0), axis=0).to(dtype)


@triton.jit
def empty_state(
    ROWS: tl.constexpr, LANES: tl.constexpr, ACC_DTYPE: tl.constexpr, SUM_DTYPE: tl.constexpr
):
    """Return the statistics of no classes, with sums of a dtype."""
    zeros = tl.zeros([ROWS, LANES], SUM_DTYPE)
    maximum = tl.full([ROWS, LANES], -float("inf"), ACC_DTYPE)
    return RunningState(maximum, zeros, zeros, tl.zeros([ROWS, LANES], tl.int32), zeros, zeros)


@triton.jit
def rescaled(state, maximum, slope):
    """Return a state relative to a maximum that is at least its own."""
    dtype: tl.constexpr = state.total.dtype
    shift, old_shift = finite_shift(maximum), finite_shift(state.maximum)
    scale = tl.exp2((state.maximum - shift) * slope).to(dtype)
    moved_by = shift - old_shift
    sum_x_exp = scale * (state.sum_x_exp - state.total * (moved_by * slope).to(dtype))
    loss = state.loss + state.weight * moved_by.to(dtype)
    return RunningState(maximum, state.total * scale, sum_x_exp, state.argmax, state.weight, loss)


@triton.jit
def add_block(state, x, block, q, slope, ENTROPY: tl.constexpr):
    """Add a block of classes, [VEC, ., ROWS, LANES], and their weights q or None, to the lanes.

    No thread waits for another here, so the loads follow one another.
    """
    dtype: tl.constexpr = state.total.dtype
    block_maximum = max_of_lanes(x)
    argmax = tl.where(block_maximum > state.maximum, block, state.argmax).to(tl.int32)
    moved = rescaled(state, tl.maximum(state.maximum, block_maximum), slope)
    shift = of_lanes(finite_shift(moved.maximum))
    u = (x - shift) * slope
    e = tl.exp2(u)
    total = moved.total + sum_of_lanes(e, dtype)
    sum_x_exp, weight, loss = state.sum_x_exp, state.weight, state.loss
    if ENTROPY:  # A class of probability 0 adds 0, even if its exponent is -inf.
        sum_x_exp = moved.sum_x_exp + sum_of_lanes(e * tl.maximum(u, -10000.0), dtype)
    if q is not None:  # A class of weight 0 adds 0, even if its logit is infinite.
        q = q.to(x.dtype)
        loss = moved.loss + sum_of_lanes(tl.where(q == 0.0, 0.0, q * (shift - x)), dtype)
        weight += sum_of_lanes(q, dtype)
    return RunningState(moved.maximum, total, sum_x_exp, argmax, weight, loss)


@triton.jit
def add_segment(state, found, slope):
    """Add the statistics of later classes, in any dtype, to those of the lanes in fp64."""
    maximum = tl.maximum(state.maximum, found.maximum)
    moved, found_moved = rescaled(state, maximum, slope), rescaled(found, maximum, slope)
    return RunningState(
        maximum,
        moved.total + found_moved.total.to(tl.float64),
        moved.sum_x_exp + found_moved.sum_x_exp.to(tl.float64),
        tl.where(found.maximum > state.maximum, found.argmax, state.argmax),
        moved.weight + found_moved.weight.to(tl.float64),
        moved.loss + found_moved.loss.to(tl.float64),
    )


@triton.jit
def merge_lanes(state, slope):
    """Return the statistics of rows, [ROWS], with sums in fp64, from those of their lanes."""
    maximum = tl.max(state.maximum, axis=1)
    moved = rescaled(state, maximum[:, None], slope)
    is_maximum = state.maximum == maximum[:, None]
    return RunningState(
        maximum,
        tl.sum(moved.total.to(tl.float64), axis=1),
        tl.sum(moved.sum_x_exp.to(tl.float64), axis=1),
        tl.min(tl.where(is_maximum, state.argmax, NOT_FOUND), axis=1),
        tl.sum(moved.weight.to(tl.float64), axis=1),
        tl.sum(moved.loss.to(tl.float64), axis=1),
    )


@triton.jit
def load_capped(pointers, mask, softcap, ACC_DTYPE: tl.constexpr):
    """Load logits, soft-capped if there is a soft-cap, -inf outside of the mask."""
    logits = tl.load(pointers, mask=mask, other=-float("inf"))
    return capped_logits(logits, mask, softcap, ACC_DTYPE)


@triton.jit
def add_classes(
    state,
    x,
    at,
    first,
    last,
    slope,
    softcap,
    options,
    weigh: tl.constexpr,
    MASKED: tl.constexpr,
    ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Load a block of classes, with their weights, and add it to the state of the lanes."""
    where = (at.ptrs, x.column, first, last, at.mask)
    logits, column, mask = load_vectors(*where, MASKED, "", TILE.block, TILE)
    logits = capped_logits(logits, mask, softcap, slope.dtype)
    q = None if weigh is None else weigh(options, at, column, mask)
    return add_block(state, logits, first // TILE.block, q, slope, ENTROPY)


@triton.jit
def scan_segment(
    x,
    at,
    first,
    last,
    slope,
    softcap,
    options,
    weigh: tl.constexpr,
    ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the statistics of the lanes of a program over one segment of the classes."""
    # A lane that has a whole row adds up more numbers than fp32 is exact enough for.
    SUM_DTYPE: tl.constexpr = tl.float64 if TILE.lanes == 1 else slope.dtype
    state = empty_state(TILE.rows, TILE.lanes, slope.dtype, SUM_DTYPE)
    args = (slope, softcap, options)
    if TILE.rows == 1:
        unmasked = first + (last - first) // TILE.block * TILE.block
        for start in range(first, unmasked, TILE.block):
            state = add_classes(state, x, at, start, last, *args, weigh, False, ENTROPY, TILE)
        if unmasked < last:
            state = add_classes(state, x, at, unmasked, last, *args, weigh, True, ENTROPY, TILE)
    else:  # Blocks of several rows always need a mask.
        for start in range(first, last, TILE.block):
            state = add_classes(state, x, at, start, last, *args, weigh, True, ENTROPY, TILE)
    return state


@triton.jit
def segment_slots(segments, row, segment, LANES: tl.constexpr, WORDS: tl.constexpr):
    """Return the addresses of the first words of the lanes, [1, LANES], for a segment of a row."""
    first = segments.slots + (row * segments.number + segment) * (WORDS * LANES)
    return first + tl.arange(0, LANES)[None, :]


@triton.jit
def store_segment(values, segments, row, segment, KEPT: tl.constexpr):
    """Store those values of the lanes, [1, LANES], over a segment of a row that are to be kept."""
    LANES: tl.constexpr = values[0].shape[1]
    ptrs = segment_slots(segments, row, segment, LANES, len(values))
    for i in tl.static_range(len(values)):
        if KEPT[i]:
            tl.store(ptrs + i * LANES, values[i].to(ptrs.dtype.element_ty))


@triton.jit
def load_segment(empty, segments, row, segment, KEPT: tl.constexpr):
    """Load what `store_segment` has stored; `empty` has the values of no classes."""
    LANES: tl.constexpr = empty[0].shape[1]
    ptrs = segment_slots(segments, row, segment, LANES, len(empty))
    found = ()
    for i in tl.static_range(len(empty)):
        value = empty[i]
        if KEPT[i]:
            exists = segment < segments.number
            loaded = tl.load(ptrs + i * LANES, mask=exists, other=0.0, cache_modifier=".cg")
            value = tl.where(exists, loaded.to(value.dtype), value)
        found = found + (value,)
    return found


@triton.jit
def is_last_program(segments, row):
    """Return whether all other programs of a row have stored their segments."""
    tl.debug_barrier()
    return arrives_last(segments.counters + row, segments.programs)


@triton.jit
def scan_rows(
    x,
    at,
    segments,
    slope,
    softcap,
    options,
    weigh: tl.constexpr,
    ENTROPY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the statistics of the rows of a program, [ROWS], and the mask of those that it stores.

    The program that arrives last at a shared row stores it. Where there are weights,
    `weigh(options, at, column, mask)` returns those of a block of classes.
    """
    args = (slope, softcap, options)
    if not TILE.has_segments:
        found = scan_segment(x, at, 0, at.classes, *args, weigh, ENTROPY, TILE)
        return merge_lanes(found, slope), at.mask
    else:
        WEIGHTS: tl.constexpr = weigh is not None
        KEPT: tl.constexpr = (True, True, ENTROPY, ENTROPY, WEIGHTS, WEIGHTS)
        mask, row = at.mask, tl.sum(at.index, axis=0)
        state = empty_state(1, TILE.lanes, slope.dtype, tl.float64)
        first = at.split.to(tl.int64) * segments.share
        for s in range(first, tl.minimum(first + segments.share, segments.number)):
            start = s * segments.size
            last = tl.minimum(start + segments.size, at.classes)
            found = scan_segment(x, at, start, last, *args, weigh, ENTROPY, TILE)
            if segments.slots is None:
                state = add_segment(state, found, slope)
            else:
                store_segment(found, segments, row, s, KEPT)
        if segments.slots is not None:
            is_last = is_last_program(segments, row)
            empty = empty_state(1, TILE.lanes, slope.dtype, slope.dtype)
            for s in range(0, tl.where(is_last, segments.number, 0), LOADED_SEGMENTS):
                for i in tl.static_range(LOADED_SEGMENTS):
                    found = load_segment(empty, segments, row, s + i, KEPT)
                    state = add_segment(state, RunningState(*found), slope)
            mask = mask & is_last
        return merge_lanes(state, slope), mask
