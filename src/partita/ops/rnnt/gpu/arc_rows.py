"""Rows of a chunk, their arcs and carries, in scans over a lattice with several kinds of arcs.

An arc leads from (t, u) to (t + d, u) by a blank, or to (t + d, u + 1) by a label. The number
`CODE` encodes the kinds of arcs that a kernel is compiled for: byte i has the duration d of kind i,
plus 128 for a label. There are no blanks of duration 0, so a byte of 0 is a kind that no arc has.

The chunks, rows, lanes and carries are those of `scan.py`. Here are the parts that the sums over
paths (`scan_tdt.py`) and the best paths (`scan_best.py`) share.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import UNFUSED
from ...ctc.gpu.lanes import lane_index
from .arc_words import halves
from .lattice import load_sequence
from .scan import Neighbors, carry_pointers, load_carries


class Turns(NamedTuple):
    """The order in which a scan takes the rows of a chunk.

    Turn 0 is the row before the first one: turn p of α is row p - 1, and that of β is row
    `end_row` + 1 - p.

    Fields:
        forward: 1 for α, 0 for β.
        first_row, step: the row of turn 0, and 1 or -1.
    """

    forward: tl.tensor
    first_row: tl.tensor
    step: tl.tensor


class ChunkArcs(NamedTuple):
    """The arcs of a chunk.

    Fields:
        ptr: the first kind, `[rows, 32]`: scores in fp64, or words of probabilities; see
            `arc_words.py`.
        nodes: offset from the arcs of a kind to those of the next kind.
        label_offset: offset from a row to the arcs of labels of duration 0 into (α) or out of (β)
            each lane, `[32]`. Those into the first lane are in the previous chunk.
        duration_offset: offset from the arcs of a duration to those of one step less.
    """

    ptr: tl.tensor
    nodes: tl.tensor
    label_offset: tl.tensor
    duration_offset: tl.tensor


class ArcChunk(NamedTuple):
    """The chunk that a program scans, by α or β; see `Turns`, `ChunkArcs` and `scan.ScanChunk`."""

    turns: tl.tensor
    arcs: tl.tensor
    neighbors: tl.tensor
    sequence: tl.tensor
    lane: tl.tensor
    u: tl.tensor
    end_row: tl.tensor


@triton.jit
def chunk_of_program(
    index, scan, carries, lengths, sizes, DIRECTIONS: tl.constexpr, LAYOUT: tl.constexpr
):
    """Return the chunk of a program, its offset in arrays over the nodes, and its sequence.

    With these comes whether the sequence has the chunk. The chunks of all sequences are counted in
    the order in which they wait for each other.
    """
    if carries is not None:
        # Indices of rows and steps of 64 bits would take many more instructions.
        index = tl.atomic_add(carries.counter, 1, sem="relaxed").to(tl.int32)
    lane, B, rows = lane_index(LAYOUT), sizes.B, sizes.rows
    b, direction = (index // DIRECTIONS % B).to(tl.int64), index % DIRECTIONS
    c, forward = index // (DIRECTIONS * B), 1 - direction
    sequence = load_sequence(b, lengths, sizes.T, sizes.U1)
    target_len = sequence.target_len
    last = target_len // 32
    c_u = tl.where(direction == 0, c, last - c)
    u, end_row = c_u * 32 + lane, sequence.length + tl.minimum(31, target_len - c_u * 32)
    offset = (b * sizes.num_chunks + c_u) * rows * 32
    # The first lane of all has no lane before it. It reads its own arcs, by which no path enters.
    before_first = tl.where(c_u > 0, 32 * 32 + 31 - rows * 32, 0)
    before = tl.where(lane > 0, lane - 1, before_first) - 32
    turns = Turns(forward, tl.where(forward > 0, -1, end_row + 1), 2 * forward - 1)
    label_offset = tl.where(forward > 0, before, lane)
    arcs = ChunkArcs(scan.arcs + offset, sizes.nodes, label_offset, 32 * forward)
    sent_ptr, received_ptr = carry_pointers(carries, scan.flags, sizes, b, direction, c)
    neighbors = Neighbors(sent_ptr, received_ptr, c < last, c > 0)
    chunk = ArcChunk(turns, arcs, neighbors, sequence, lane, u, end_row)
    return chunk, offset, b, c <= last


@triton.jit
def repeated(value, SIZE: tl.constexpr):
    """Return a tuple of SIZE equal values."""
    result = ()
    for _ in tl.static_range(SIZE):
        result = result + (value,)
    return result


@triton.jit
def prepend(value, values, SIZE: tl.constexpr):
    """Return the tuple with a value before it and without its last one."""
    result = (value,)
    for i in tl.static_range(SIZE - 1):
        result = result + (values[i],)
    return result


@triton.jit
def row_of(chunk, turn):
    """Return the row of a turn of the scan."""
    return chunk.turns.first_row + chunk.turns.step * turn


@triton.jit
def entering_mask(chunk, row, duration, LABEL: tl.constexpr):
    """Return whether arcs of a duration that enter the nodes of a row stay in the lattice.

    A label leads to a node of a step; a blank also to the end of the path.
    """
    length, target_len = chunk.sequence.length, chunk.sequence.target_len
    before, after = row - chunk.lane - duration, row - chunk.lane
    mask = (before >= 0) & (chunk.u <= target_len)
    if LABEL:
        return mask & (after < length) & (chunk.u > 0)
    else:
        is_end = (after == length) & (chunk.u == target_len)
        return mask & (before < length) & ((after < length) | is_end)


@triton.jit
def load_volatile_halves(ptr):
    """Load the halves of words that other multiprocessors may have written meanwhile.

    Triton's pass that rearranges memory accesses takes seconds for as many loads as a scan has.
    """
    if UNFUSED:
        return halves(tl.load(ptr, volatile=True))
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 word; ld.volatile.global.b64 word, [$2]; mov.b64 {$0, $1}, word; }",
            "=r,=r,l",
            [ptr.to(tl.int64)],
            dtype=(tl.uint32, tl.uint32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_block_arcs(
    chunk,
    turn,
    FILLED: tl.constexpr,
    WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return the arcs into (α) or out of (β) the nodes of BLOCK turns, a tuple for each row.

    Words are two halves. With WAIT, those that are not written yet are 0. With FILLED, each arc
    that leaves the lattice has the probability 0 in memory, as it does if the arcs are words.
    """
    lane, rows = chunk.lane, ()
    for j in tl.static_range(BLOCK):
        row, arcs = row_of(chunk, turn + j), ()
        for i in tl.static_range(ARCS):
            d = (CODE >> (8 * i)) & 127
            # The sum in brackets is the same in all turns, and the one after it for all kinds.
            ptr = chunk.arcs.ptr + (i * chunk.arcs.nodes - d * chunk.arcs.duration_offset)
            if (CODE >> (8 * i)) & 128:
                ptr = ptr + (row * 32 + chunk.arcs.label_offset)
            else:
                ptr = ptr + (row * 32 + lane)
            if ((CODE >> (8 * i)) & 255) == 0:  # Nothing reads the kind that no arc has.
                arcs = arcs + (lane,)
            elif WAIT:
                arcs = arcs + (load_volatile_halves(ptr),)
            elif ptr.dtype.element_ty == tl.int64:
                arcs = arcs + (halves(tl.load(ptr)),)
            elif FILLED:
                arcs = arcs + (tl.load(ptr),)
            else:
                mask = entering_mask(chunk, row, d, ((CODE >> (8 * i)) & 128) > 0)
                arcs = arcs + (tl.load(ptr, mask=mask, other=-float("inf")),)
        rows = rows + (arcs,)
    return rows


@triton.jit
def load_turn_carries(chunk, turn, BLOCK: tl.constexpr):
    """Load the carries of the turns from a turn on, one per lane; those not written yet are 0."""
    step = row_of(chunk, turn + chunk.lane) - 31 * (1 - chunk.turns.forward)
    return load_carries(chunk, step, BLOCK)


@triton.jit
def least_word(before, words, rows, WAIT: tl.constexpr, CODE: tl.constexpr, ARCS: tl.constexpr):
    """Return 0 if a carry, or with WAIT an arc of some rows, is not written yet.

    Such a word is 0, and the upper half of the word of an arc that is written is not. `before` is
    what this function returned for the words before these, which is not 0.
    """
    lower, upper = halves(words)
    least = lower | upper
    if WAIT:
        for i in tl.static_range(len(rows)):
            for j in tl.static_range(ARCS):
                if (CODE >> (8 * j)) & 255:
                    least = tl.minimum(least, rows[i][j][1])
    # Triton 3.6 fails where a result of a loop is not used.
    return tl.min(tl.minimum(least, before), axis=0)


@triton.jit
def await_arcs(
    least,
    words,
    rows,
    chunk,
    turn,
    WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return the carries of BLOCK turns and the arcs of the turns after each, once all are written.

    `least` is the `least_word` of those that have been loaded. It comes first in the result, for
    the words that have been awaited.
    """
    while least == 0:
        words = load_turn_carries(chunk, turn, BLOCK)
        if WAIT:
            rows = load_block_arcs(chunk, turn + 1, True, True, BLOCK, CODE, ARCS)
        least = least_word(1, words, rows, WAIT, CODE, ARCS)
    return least, words, rows


@triton.jit
def shift_lanes(chunk, values, carry):
    """Return the value of the lane before (α) or after (β) each lane.

    The lane without such a neighbor gets the carry.
    """
    lane, forward = chunk.lane, chunk.turns.forward
    values = tl.where(lane == 31 * forward, carry, values)
    return tl.gather(values, (lane + 1 + 30 * forward) & 31, 0)
