"""Rows of a chunk, their arcs and carries, in scans over a lattice with several kinds of arcs.

An arc leads from (t, u) to (t + d, u) by a blank, or to (t + d, u + 1) by a label. The number
`CODE` encodes the kinds of arcs that a kernel is compiled for: byte i has the duration d of kind i,
plus 128 for a label. The first half of the kinds are blanks and the second half labels. RNN-T has a
blank of duration 1 and a label of duration 0. Each duration of a TDT makes one kind of both. There
are no blanks of duration 0, so a byte of 0 is a kind that no arc has.

Each program scans one chunk of 32 values of u, one per lane of a warp, along the chunk's rows (see
`plan.py`). At each row a lane has one node. Labels enter the first lane (of α) from the last lane
of the previous chunk, through words in memory, one for each step. A word of 0 means that the carry
is not written yet. Programs take their chunks from a counter in the order in which they start, so
the neighbor that a chunk waits for always started before it.

Here are the parts that the two scans of `scan.py` share, of sums over paths and of the best path.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import UNFUSED
from ...ctc.gpu.lanes import lane_index
from .arc_words import halves
from .lattice import load_sequence

# The flags of a sequence with a length or a label out of range, and of one with NaN.
INVALID, HAS_NAN = tl.constexpr(1), tl.constexpr(2)
NO_CARRY = tl.constexpr(-(2**52))  # the bits of -inf
MINUS_ZERO = tl.constexpr(-(2**63))  # the bits of -0.0, which stand for those of 0.0 in carries


class Scan(NamedTuple):
    """The memory that a scan reads and writes.

    Fields:
        arcs: the arcs of each kind, `[kinds, B, num_chunks, rows, 32]`: words, or scores in fp64.
        states: α and β, `[2, B, num_chunks, rows, 32]`, or None for the loss alone. The scan of a
            best path stores the kind of the best arc into each node, `[B, num_chunks, rows, 32]`.
        flags: `[B]` int64, zero before: which sequences are invalid or have NaN.
        totals: the sums over all paths, `[2, B]` int64: the bits of their significands, and biased
            exponents. The scores of the best paths are `[B]` fp64.
        carries: what chunks hand to their neighbors, `[directions, num_chunks, B, carry_steps]`
            int64, zero before; None for one chunk.
        counter: `[1]`, zero before, counts the programs that have started; None for one chunk.
    """

    arcs: tl.tensor
    states: tl.tensor
    flags: tl.tensor
    totals: tl.tensor
    carries: tl.tensor
    counter: tl.tensor


class ArcChunk(NamedTuple):
    """The chunk that a program scans, by α or β.

    Turn 0 of a scan is the row before the first one: turn p of α is row p - 1, and that of β is row
    `end_row` + 1 - p.

    Fields:
        sequence: the sizes of the sequence.
        lane, u: the lanes, and the value of u of each, `[32]`.
        end_row: the row of the virtual step T at the last value of u in the chunk.
        forward: 1 for α, 0 for β.
        first_row, step: the row of turn 0, and 1 or -1.
        arcs_ptr: the arcs of the first kind, `[rows, 32]`.
        nodes: offset from the arcs of a kind to those of the next kind.
        label_offset: offset from a row to the arcs of labels of duration 0 into (α) or out of (β)
            each lane, `[32]`. Those into the first lane are in the previous chunk.
        duration_offset: offset from the arcs of a duration to those of one step less.
        sent_ptr, received_ptr: the carries that the chunk sends and receives, one for each step.
        sends, receives: whether there is a next and a previous chunk in the direction of the scan.
    """

    sequence: tl.tensor
    lane: tl.tensor
    u: tl.tensor
    end_row: tl.tensor
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


@triton.constexpr_function
def num_kinds(code):
    """Return the number of kinds of arcs, half of which are labels."""
    return 2 * (code & int("80" * 16, 16)).bit_count()


@triton.constexpr_function
def remembered_states(code):
    """Return how many states of earlier rows a lane needs, given the kinds of arcs."""
    kinds = code.to_bytes(16, "little")
    return max(1, *((kind & 127) + (kind >> 7) for kind in kinds))


@triton.jit
def flag_bad_labels(flags_ptr, b, chunk, targets, blank, V, target_stride):
    """Flag a sequence if its lengths are invalid or a label of this chunk is out of range."""
    labels_ptr = targets.labels + b * target_stride
    has_label = chunk.u < chunk.sequence.target_len
    label = tl.load(labels_ptr + chunk.u, mask=has_label, other=-1)
    is_bad = has_label & ((label < 0) | (label >= V) | (label == blank))
    if (tl.max(is_bad.to(tl.int32), axis=0) > 0) | chunk.sequence.invalid:
        tl.atomic_or(flags_ptr + b, INVALID, sem="relaxed")


@triton.jit
def chunk_of_program(index, scan, lengths, sizes, DIRECTIONS: tl.constexpr, LAYOUT: tl.constexpr):
    """Return the chunk of a program, its offset in arrays over the nodes, and its sequence.

    With these comes whether the sequence has the chunk. The chunks of all sequences are counted in
    the order in which they wait for each other.
    """
    if scan.counter is not None:
        # Indices of rows and steps of 64 bits would take many more instructions.
        index = tl.atomic_add(scan.counter, 1, sem="relaxed").to(tl.int32)
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
    lanes = (sequence, lane, u, end_row)
    turns = (forward, tl.where(forward > 0, -1, end_row + 1), 2 * forward - 1)
    label_offset = tl.where(forward > 0, before, lane)
    arcs = (scan.arcs + offset, sizes.nodes, label_offset, 32 * forward)
    sent_ptr, received_ptr = scan.flags, scan.flags  # any addresses serve one chunk
    if scan.carries is not None:
        steps = sizes.carry_steps
        stride = B.to(tl.int64) * steps
        sent_ptr = scan.carries + (direction * sizes.num_chunks + c) * stride + b * steps
        received_ptr = sent_ptr - stride
    chunk = ArcChunk(*lanes, *turns, *arcs, sent_ptr, received_ptr, c < last, c > 0)
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
    return chunk.first_row + chunk.step * turn


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
def load_block_arcs(chunk, turn, WAIT: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr):
    """Return the arcs into (α) or out of (β) the nodes of BLOCK turns, a tuple for each row.

    Words are two halves. With WAIT, those that are not written yet are 0. Each arc that leaves the
    lattice has the probability 0 in memory.
    """
    lane, rows = chunk.lane, ()
    for j in tl.static_range(BLOCK):
        row, arcs = row_of(chunk, turn + j), ()
        for i in tl.static_range(num_kinds(CODE)):
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
            else:
                arcs = arcs + (tl.load(ptr),)
        rows = rows + (arcs,)
    return rows


@triton.jit
def load_turn_carries(chunk, turn, BLOCK: tl.constexpr):
    """Load the carries of the turns from a turn on, one per lane; those not written yet are 0."""
    step = row_of(chunk, turn + chunk.lane) - 31 * (1 - chunk.forward)
    length = chunk.sequence.length
    mask = chunk.receives & (chunk.lane < BLOCK) & (step >= 0) & (step < length)
    return tl.load(chunk.received_ptr + step, mask=mask, other=NO_CARRY, volatile=True)


@triton.jit
def least_word(before, words, rows, WAIT: tl.constexpr, CODE: tl.constexpr):
    """Return 0 if a carry, or with WAIT an arc of some rows, is not written yet.

    Such a word is 0, and the upper half of the word of an arc that is written is not. `before` is
    what this function returned for the words before these, which is not 0.
    """
    lower, upper = halves(words)
    least = lower | upper
    if WAIT:
        for i in tl.static_range(len(rows)):
            for j in tl.static_range(num_kinds(CODE)):
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
):
    """Return the carries of BLOCK turns and the arcs of the turns after each, once all are written.

    `least` is the `least_word` of those that have been loaded. It comes first in the result, for
    the words that have been awaited.
    """
    while least == 0:
        words = load_turn_carries(chunk, turn, BLOCK)
        if WAIT:
            rows = load_block_arcs(chunk, turn + 1, True, BLOCK, CODE)
        least = least_word(1, words, rows, WAIT, CODE)
    return least, words, rows


@triton.jit
def shift_lanes(chunk, values, carry):
    """Return the value of the lane before (α) or after (β) each lane.

    The lane without such a neighbor gets the carry.
    """
    lane, forward = chunk.lane, chunk.forward
    values = tl.where(lane == 31 * forward, carry, values)
    return tl.gather(values, (lane + 1 + 30 * forward) & 31, 0)
