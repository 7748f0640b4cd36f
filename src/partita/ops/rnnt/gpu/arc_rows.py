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
from ....primitives.gpu.memory import prefetch_line
from .arc_words import halves
from .lattice import load_sequence
from .scan import carry_pointers, load_carries_of


class ArcChunk(NamedTuple):
    """The chunk that a program scans, by α or β.

    The rows are counted in the order of the scan, and turn 0 is the row before the first one:
    turn p of α is row p - 1, and that of β is row `end_row` + 1 - p.

    Fields:
        forward: 1 for α, 0 for β.
        first_row, step: the row of turn 0, and 1 or -1.
        arcs_ptr: the first kind of arcs of the chunk, `[rows, 32]`: scores in fp64, or words of
            probabilities; see `arc_words.py`.
        nodes: offset from the arcs of a kind to those of the next kind.
        label_offset: offset from a row to the arcs of labels of duration 0 into (α) or out of (β)
            each lane, `[32]`. Those into the first lane are in the previous chunk.
        duration_offset: offset from the arcs of a duration to those of one step less.
        sent_ptr, received_ptr, sends, receives: the carries; see `scan.ScanChunk`.
        length: number of steps.
        u: the value of u of each lane, `[32]`.
        target_len: number of labels.
        end_row: the row of the virtual step T at the last value of u in the chunk.
    """

    forward: tl.tensor
    first_row: tl.tensor
    step: tl.tensor
    arcs_ptr: tl.tensor
    nodes: tl.tensor
    label_offset: tl.tensor
    duration_offset: tl.tensor
    sent_ptr: tl.tensor
    received_ptr: tl.tensor
    sends: tl.tensor
    receives: tl.tensor
    length: tl.tensor
    u: tl.tensor
    target_len: tl.tensor
    end_row: tl.tensor


@triton.jit
def chunk_of_program(index, tensors, sizes, lane, DIRECTIONS: tl.constexpr):
    """Return the chunk of a program, its offset in arrays over the nodes, and its sequence.

    With these come whether the sequence has the chunk, and whether a length is invalid. The chunks
    of all sequences are counted in the order in which they wait for each other.
    """
    B, num_chunks, rows = sizes.B, sizes.num_chunks, sizes.rows
    b, direction = (index // DIRECTIONS % B).to(tl.int64), index % DIRECTIONS
    c, forward = index // (DIRECTIONS * B), 1 - direction
    length, target_len, invalid = load_sequence(
        b, tensors.logit_lengths_ptr, tensors.target_lengths_ptr, sizes.T, sizes.U1
    )
    last = target_len // 32
    c_u = tl.where(direction == 0, c, last - c)
    u, end_row = c_u * 32 + lane, length + tl.minimum(31, target_len - c_u * 32)
    offset = (b * num_chunks + c_u) * rows * 32
    # The first lane of all has no lane before it. It reads its own arcs, by which no path enters.
    before_first = tl.where(c_u > 0, 32 * 32 + 31 - rows * 32, 0)
    before = tl.where(lane > 0, lane - 1, before_first) - 32
    first_row, step = tl.where(forward > 0, -1, end_row + 1), 2 * forward - 1
    label_offset = tl.where(forward > 0, before, lane)
    arcs = (tensors.arcs_ptr + offset, sizes.nodes, label_offset, 32 * forward)
    sent_ptr, received_ptr = carry_pointers(tensors, sizes, b, direction, c)
    carries = (sent_ptr, received_ptr, c < last, c > 0)
    chunk = ArcChunk(forward, first_row, step, *arcs, *carries, length, u, target_len, end_row)
    return chunk, offset, b, c <= last, invalid


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
    return chunk.first_row + chunk.step * turn


@triton.jit
def entering_mask(chunk, row, lane, duration, LABEL: tl.constexpr):
    """Return whether arcs of a duration that enter the nodes of a row stay in the lattice.

    A label leads to a node of a step; a blank also to the end of the path.
    """
    before, after = row - lane - duration, row - lane
    mask = (before >= 0) & (chunk.u <= chunk.target_len)
    if LABEL:
        return mask & (after < chunk.length) & (chunk.u > 0)
    else:
        is_end = (after == chunk.length) & (chunk.u == chunk.target_len)
        return mask & (before < chunk.length) & ((after < chunk.length) | is_end)


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
def load_row_arcs(
    chunk,
    row,
    lane,
    FILLED: tl.constexpr,
    WAIT: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return the arcs into (α) or out of (β) the nodes of a row.

    Words are two halves. With WAIT, those that are not written yet are 0. With FILLED, each arc
    that leaves the lattice has the probability 0 in memory, as it does if the arcs are words.
    """
    arcs = ()
    for i in tl.static_range(ARCS):
        d = (CODE >> (8 * i)) & 127
        # The sum in brackets is the same in all turns, and the one after it for all kinds.
        ptr = chunk.arcs_ptr + (i * chunk.nodes - d * chunk.duration_offset)
        if (CODE >> (8 * i)) & 128:
            ptr = ptr + (row * 32 + chunk.label_offset)
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
            mask = entering_mask(chunk, row, lane, d, ((CODE >> (8 * i)) & 128) > 0)
            arcs = arcs + (tl.load(ptr, mask=mask, other=-float("inf")),)
    return arcs


@triton.jit
def load_block_arcs(
    chunk,
    turn,
    lane,
    FILLED: tl.constexpr,
    WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return the arcs of BLOCK turns from a turn on, a tuple for each row."""
    rows = ()
    for i in tl.static_range(BLOCK):
        row = row_of(chunk, turn + i)
        rows = rows + (load_row_arcs(chunk, row, lane, FILLED, WAIT, CODE, ARCS),)
    return rows


@triton.jit
def load_turn_carries(chunk, turn, lane, BLOCK: tl.constexpr):
    """Load the carries of the turns from a turn on, one per lane; those not written yet are 0."""
    step = row_of(chunk, turn + lane) - 31 * (1 - chunk.forward)
    return load_carries_of(chunk, step, lane, BLOCK)


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
    lane,
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
        words = load_turn_carries(chunk, turn, lane, BLOCK)
        if WAIT:
            rows = load_block_arcs(chunk, turn + 1, lane, True, True, BLOCK, CODE, ARCS)
        least = least_word(1, words, rows, WAIT, CODE, ARCS)
    return least, words, rows


@triton.jit
def prefetch_turn_arcs(chunk, turn, lane, BLOCK: tl.constexpr, ARCS: tl.constexpr):
    """Ask for the arcs of BLOCK turns, as `scan.prefetch_arcs` does for two kinds."""
    for i in tl.static_range(0, 2 * BLOCK * ARCS, 32):
        line = i + lane
        kind = tl.minimum(line // (2 * BLOCK), ARCS - 1)
        row = tl.maximum(row_of(chunk, turn + (line >> 1) % BLOCK), 0)
        offset = tl.minimum(row, chunk.end_row) * 32 + (line & 1) * 16
        prefetch_line(chunk.arcs_ptr + kind * chunk.nodes + offset)


@triton.jit
def shift_lanes(chunk, values, carry, lane):
    """Return the value of the lane before (α) or after (β) each lane.

    The lane without such a neighbor gets the carry.
    """
    values = tl.where(lane == 31 * chunk.forward, carry, values)
    return tl.gather(values, (lane + 1 + 30 * chunk.forward) & 31, 0)


@triton.jit
def send_word(chunk, row, word, lane):
    """Hand the word of the state of the last (α) or the first (β) lane to the next chunk."""
    edge = 31 * chunk.forward
    step = row - edge
    is_step = step.to(tl.uint32, bitcast=True) < chunk.length.to(tl.uint32, bitcast=True)
    mask = chunk.sends & (lane == edge) & is_step
    tl.store(chunk.sent_ptr + step + lane * 0, word, mask=mask)
