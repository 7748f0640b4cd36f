"""Transducers' scan: α from the first node and β from the last one, in separate programs.

α(t, u) sums over the paths from (0, 0) to the node, and β(t, u) over those from the node to the end
at the virtual node (T, U). Each program scans one chunk of 32 values of u, one per lane of a warp,
along the chunk's rows (see `plan.py`). At each row a lane has one node: α enters it by a blank from
the lane's own previous node, and by a label from that of the lane before it; β goes the other way.
The first lane takes what enters it from the last lane of the previous chunk, through words in
memory, one for each step. A word of 0 means that the carry is not written yet.

Beyond the lengths, the blank's arc has probability 1 and the label's has 0. This leaves α and β as
they are, so α ends with log Z at (T, U), and β starts there with 1.

Programs take their chunks from a counter in the order in which they start, so the neighbor that a
chunk waits for always started before it.

A scan may also run while other programs still compute the arcs (see `overlap.py`). Then it waits
for these as well: all words of arcs are 0 before, and the upper half of a word that is written is
not 0.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon

from ....primitives.gpu.math import UNFUSED
from ....primitives.gpu.memory import prefetch_line
from ...ctc.gpu.lanes import LaneKernel, lane_index
from .lattice import MINUS_ZERO, SIZES, load_sequence, log2_add

# The flags of a sequence with a length or a label out of range, and of one with NaN.
INVALID, HAS_NAN = tl.constexpr(1), tl.constexpr(2)
NO_CARRY = tl.constexpr(-(2**52))  # the bits of -inf
PREFETCHED_ROWS = tl.constexpr(16)  # rows between a scan and the arcs that it brings into the cache


class Scan(NamedTuple):
    """The memory that a scan reads and writes.

    Fields:
        arcs: the arcs of each kind, `[kinds, B, num_chunks, rows, 32]`: scores in fp64, or words.
        states: α and β, `[2, B, num_chunks, rows, 32]`, or None for the loss alone. The scan of a
            best path stores the kind of the best arc into each node, `[B, num_chunks, rows, 32]`.
        flags: `[B]` int64, zero before: which sequences are invalid or have NaN.
        totals: `[B]` fp64, log2 of the sums over all paths or the score of the best one. The sums
            of words are `[2, B]` int64: the bits of their significands, and biased exponents.
    """

    arcs: tl.tensor
    states: tl.tensor
    flags: tl.tensor
    totals: tl.tensor


class Carries(NamedTuple):
    """The memory that programs which wait for each other share; all of it is zero before.

    Fields:
        words: what chunks hand to their neighbors, `[directions, num_chunks, B, carry_steps]`.
        counter: `[1]`, counts the programs that have started.
    """

    words: tl.tensor
    counter: tl.tensor


class ScanSizes(NamedTuple):
    """The sizes of a batch and of arrays over its nodes; see `plan.LatticePlan`."""

    T: tl.tensor
    B: tl.tensor
    U1: tl.tensor
    V: tl.tensor
    num_chunks: tl.tensor
    rows: tl.tensor
    carry_steps: tl.tensor
    nodes: tl.tensor


class Neighbors(NamedTuple):
    """The carries between a chunk and its neighbors, one for each step.

    Fields:
        sent_ptr, received_ptr: the carries that the chunk sends and receives.
        sends, receives: whether there is a next and a previous chunk in the direction of the scan.
    """

    sent_ptr: tl.tensor
    received_ptr: tl.tensor
    sends: tl.tensor
    receives: tl.tensor


class ScanChunk(NamedTuple):
    """The chunk that a program scans.

    Fields:
        blank_ptr, label_ptr: scores of the arcs of the chunk, `[rows, 32]`. If the scan waits for
            them, they are int64 words.
        states_ptr: the chunk's α or β, `[rows, 32]`, or None.
        neighbors: see `Neighbors`.
        sequence: the sizes of the sequence.
        lane, u: the lanes, and the value of u of each, `[32]`.
        end_row: the row of the virtual step T at the last value of u in the chunk.
    """

    blank_ptr: tl.tensor
    label_ptr: tl.tensor
    states_ptr: tl.tensor
    neighbors: tl.tensor
    sequence: tl.tensor
    lane: tl.tensor
    u: tl.tensor
    end_row: tl.tensor


@triton.jit
def load_arcs(chunk, first, BLOCK: tl.constexpr, WAIT: tl.constexpr):
    """Return the scores of the arcs in BLOCK rows from `first` on, as two tuples.

    With WAIT they are words, and those that are not written yet are 0.
    """
    length, target_len = chunk.sequence.length, chunk.sequence.target_len
    lane, blanks, labels = chunk.lane, (), ()
    if WAIT:  # Volatile loads find what other multiprocessors have written.
        blank_ptr = chunk.blank_ptr + (first * 32 + lane)
        label_ptr = chunk.label_ptr + (first * 32 + lane)
        blank_length = tl.where(chunk.u <= target_len, length, 0).to(tl.uint32)
        label_length = tl.where(chunk.u < target_len, length, 0).to(tl.uint32)
        for i in tl.static_range(BLOCK):
            t = (first + i - lane).to(tl.uint32)  # beyond all lengths if it is below 0
            mask, has_label = t < blank_length, t < label_length
            blank = tl.load(blank_ptr + i * 32, mask=mask, other=MINUS_ZERO, volatile=True)
            label = tl.load(label_ptr + i * 32, mask=has_label, other=NO_CARRY, volatile=True)
            blanks, labels = blanks + (blank,), labels + (label,)
    else:
        for i in tl.static_range(BLOCK):
            t = first + i - lane
            mask = (t >= 0) & (t < length) & (chunk.u <= target_len)
            has_label = mask & (chunk.u < target_len)
            offset = (first + i) * 32 + lane
            blanks = blanks + (tl.load(chunk.blank_ptr + offset, mask=mask, other=0.0),)
            label = tl.load(chunk.label_ptr + offset, mask=has_label, other=-float("inf"))
            labels = labels + (label,)
    return blanks, labels


@triton.jit
def prefetch_arcs(chunk, row, BLOCK: tl.constexpr):
    """Ask for the arcs of BLOCK rows from `row` on, which may have left the cache since a write.

    A row has two cache lines of each kind of arcs, and each lane asks for one line.
    """
    lane = chunk.lane
    row = tl.minimum(tl.maximum(row + (lane >> 2) % BLOCK, 0), chunk.end_row)
    offset = row * 32 + (lane & 1) * 16
    prefetch_line(tl.where((lane & 2) > 0, chunk.label_ptr + offset, chunk.blank_ptr + offset))


@triton.jit
def load_carries(chunk, step, BLOCK: tl.constexpr):
    """Load the carries of BLOCK steps, one per lane; those not written yet are 0."""
    neighbors, length = chunk.neighbors, chunk.sequence.length
    mask = neighbors.receives & (chunk.lane < BLOCK) & (step >= 0) & (step < length)
    return tl.load(neighbors.received_ptr + step, mask=mask, other=NO_CARRY, volatile=True)


@triton.jit
def all_written(words, blanks, labels, BLOCK: tl.constexpr):
    """Return 0 if a word of the carries, or the upper half of one of the arcs, is 0."""
    least = (words >> 32).to(tl.uint32) | words.to(tl.uint32)
    for i in tl.static_range(BLOCK):
        blank, label = (blanks[i] >> 32).to(tl.uint32), (labels[i] >> 32).to(tl.uint32)
        least = tl.minimum(least, tl.minimum(blank, label))
    return tl.min(least, axis=0)


@triton.jit
def scores_of(words, BLOCK: tl.constexpr):
    """Return the scores that words of arcs are the bits of."""
    scores = ()
    for i in tl.static_range(BLOCK):
        scores = scores + (words[i].to(tl.float64, bitcast=True),)
    return scores


@triton.jit
def await_block(words, blanks, labels, chunk, step, row, BLOCK: tl.constexpr, WAIT: tl.constexpr):
    """Return the carries from `step` on and the arcs from `row` on, once all are written."""
    if WAIT:
        while all_written(words, blanks, labels, BLOCK) == 0:
            words = load_carries(chunk, step + chunk.lane, BLOCK)
            blanks, labels = load_arcs(chunk, row, BLOCK, WAIT)
        return words, scores_of(blanks, BLOCK), scores_of(labels, BLOCK)
    else:
        while tl.min((words != 0).to(tl.int32), axis=0) == 0:
            words = load_carries(chunk, step + chunk.lane, BLOCK)
        return words, blanks, labels


@triton.jit
def send_carry(chunk, step, score, edge):
    """Hand the score of the lane at the edge to the next chunk, as the carry of a step."""
    word = score.to(tl.int64, bitcast=True)
    word = tl.where(word == 0, MINUS_ZERO, word)
    neighbors, length = chunk.neighbors, chunk.sequence.length
    mask = neighbors.sends & (chunk.lane == edge) & (step >= 0) & (step < length)
    tl.store(neighbors.sent_ptr + step + chunk.lane * 0, word, mask=mask)


@triton.jit
def shift_scores(score, words, i, lane, FORWARD: tl.constexpr):
    """Return the score of the lane before (α) or after (β) each lane.

    The lane without such a neighbor gets carry i of the words.
    """
    carry = tl.gather(words, lane * 0 + i, 0).to(tl.float64, bitcast=True)
    if FORWARD:
        return tl.gather(tl.where(lane == 31, carry, score), (lane + 31) & 31, 0)
    else:
        return tl.gather(tl.where(lane == 0, carry, score), (lane + 1) & 31, 0)


@triton.jit
def scan_forward(chunk, BLOCK: tl.constexpr, WAIT: tl.constexpr, FP64: tl.constexpr):
    """Scan α of a chunk; returns α of the virtual step after the last one."""
    lane = chunk.lane
    minus_infinity = lane.to(tl.float64) * 0.0 - float("inf")
    staying = tl.where(chunk.u == 0, 0.0, minus_infinity)
    leaving = minus_infinity
    blanks, labels = load_arcs(chunk, 0, BLOCK, WAIT)
    words = load_carries(chunk, 0 + lane, BLOCK)
    for first in range(0, chunk.end_row + 1, BLOCK):
        carries, block_blanks, block_labels = await_block(
            words, blanks, labels, chunk, first, first, BLOCK, WAIT
        )
        blanks, labels = load_arcs(chunk, first + BLOCK, BLOCK, WAIT)
        words = load_carries(chunk, first + BLOCK + lane, BLOCK)
        if WAIT and not UNFUSED:
            prefetch_arcs(chunk, first + PREFETCHED_ROWS, BLOCK)
        for i in tl.static_range(BLOCK):
            entering = shift_scores(leaving, carries, i, lane, True)
            alpha = log2_add(staying, entering, FP64)
            if chunk.states_ptr is not None:
                tl.store(chunk.states_ptr + (first + i) * 32 + lane, alpha)
            staying = alpha + block_blanks[i]
            leaving = alpha + block_labels[i]
            send_carry(chunk, first + i - 31, leaving, 31)
    return staying


@triton.jit
def scan_backward(chunk, BLOCK: tl.constexpr, WAIT: tl.constexpr, FP64: tl.constexpr):
    """Scan β of a chunk; all of it is stored."""
    lane = chunk.lane
    minus_infinity = lane.to(tl.float64) * 0.0 - float("inf")
    beta = tl.where(chunk.u == chunk.sequence.target_len, 0.0, minus_infinity)
    last = chunk.end_row // BLOCK * BLOCK
    blanks, labels = load_arcs(chunk, last, BLOCK, WAIT)
    words = load_carries(chunk, last - 31 + lane, BLOCK)
    for p in range(0, chunk.end_row + 1, BLOCK):
        first = last - p
        carries, block_blanks, block_labels = await_block(
            words, blanks, labels, chunk, first - 31, first, BLOCK, WAIT
        )
        blanks, labels = load_arcs(chunk, first - BLOCK, BLOCK, WAIT)
        words = load_carries(chunk, first - BLOCK - 31 + lane, BLOCK)
        if WAIT and not UNFUSED:
            prefetch_arcs(chunk, first - PREFETCHED_ROWS, BLOCK)
        for i in tl.static_range(BLOCK - 1, -1, -1):
            after_label = shift_scores(beta, carries, i, lane, False)
            beta = log2_add(beta + block_blanks[i], after_label + block_labels[i], FP64)
            tl.store(chunk.states_ptr + (first + i) * 32 + lane, beta)
            send_carry(chunk, first + i, beta, 0)


@triton.jit
def carry_pointers(carries, flags_ptr, sizes, b, direction, c):
    """Return the addresses of the carries that chunk c of a scan sends and receives.

    With one chunk there are none, and any addresses serve.
    """
    if carries is None:
        return flags_ptr, flags_ptr
    else:
        steps = sizes.carry_steps
        stride = sizes.B.to(tl.int64) * steps
        sent_ptr = carries.words + (direction * sizes.num_chunks + c) * stride + b * steps
        return sent_ptr, sent_ptr - stride


@triton.jit
def flag_bad_labels(flags_ptr, b, chunk, labels_ptr, target_stride, blank, V):
    """Flag a sequence if its lengths are invalid or a label of this chunk is out of range."""
    labels_ptr += b * target_stride
    has_label = chunk.u < chunk.sequence.target_len
    label = tl.load(labels_ptr + chunk.u, mask=has_label, other=-1)
    is_bad = has_label & ((label < 0) | (label >= V) | (label == blank))
    if (tl.max(is_bad.to(tl.int32), axis=0) > 0) | chunk.sequence.invalid:
        tl.atomic_or(flags_ptr + b, INVALID, sem="relaxed")


@triton.jit
def scan_program(
    index,
    scan,
    carries,
    targets,
    target_stride,
    blank,
    sizes,
    DIRECTIONS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAIT: tl.constexpr,
    FP64: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Scan α or β of a chunk. α also stores log2 of the partition function and flags bad labels.

    The chunks of all sequences are counted in the order in which they wait for each other. With
    WAIT, the arcs are words that other programs still write.
    """
    if carries is not None:
        index = tl.atomic_add(carries.counter, 1, sem="relaxed")
    B, nodes = sizes.B, sizes.nodes
    b, direction = (index // DIRECTIONS % B).to(tl.int64), index % DIRECTIONS
    lane, c = lane_index(LAYOUT), index // (DIRECTIONS * B)
    sequence = load_sequence(b, targets.lengths, sizes.T, sizes.U1)
    length, target_len = sequence.length, sequence.target_len
    last = target_len // 32
    c_u = tl.where(direction == 0, c, last - c)
    u, end_row = c_u * 32 + lane, length + tl.minimum(31, target_len - c_u * 32)
    if c <= last:
        offset = (b * sizes.num_chunks + c_u) * sizes.rows * 32
        states_ptr = None if scan.states is None else scan.states + direction * nodes + offset
        sent_ptr, received_ptr = carry_pointers(carries, scan.flags, sizes, b, direction, c)
        blank_ptr, label_ptr = scan.arcs + offset, scan.arcs + nodes + offset
        neighbors = Neighbors(sent_ptr, received_ptr, c < last, c > 0)
        chunk = ScanChunk(blank_ptr, label_ptr, states_ptr, neighbors, sequence, lane, u, end_row)
        if direction == 0:
            flag_bad_labels(scan.flags, b, chunk, targets.labels, target_stride, blank, sizes.V)
            alpha = scan_forward(chunk, BLOCK, WAIT, FP64)
            is_end = u == target_len
            tl.store(scan.totals + b + lane * 0, alpha, mask=is_end & (length > 0))
            tl.store(scan.totals + b + lane * 0, -float("inf"), mask=is_end & (length == 0))
        elif DIRECTIONS == 2:
            scan_backward(chunk, BLOCK, WAIT, FP64)


@triton.jit(do_not_specialize=SIZES)
def rnnt_scan_kernel(
    scan,  # Scan of scores
    carries,  # Carries, or None for one chunk
    targets,  # Targets
    T,
    B,
    U1,
    V,
    num_chunks,
    rows,
    carry_steps,
    nodes: tl.int64,  # elements of an array over all nodes
    blank,
    target_stride,
    DIRECTIONS: tl.constexpr,  # 1 for α alone
    BLOCK: tl.constexpr,  # rows that are loaded together
    FP64: tl.constexpr,  # whether all arithmetic is fp64
    LAYOUT: tl.constexpr,
):
    """Scan α or β of a chunk. α also stores log2 of the partition function and flags bad labels."""
    sizes = ScanSizes(T, B, U1, V, num_chunks, rows, carry_steps, nodes)
    inputs = (scan, carries, targets, target_stride, blank, sizes)
    scan_program(tl.program_id(0), *inputs, DIRECTIONS, BLOCK, False, FP64, LAYOUT)


rnnt_scan_gluon_kernel = gluon.jit(rnnt_scan_kernel.fn, do_not_specialize=SIZES)
SCAN = LaneKernel(rnnt_scan_kernel, rnnt_scan_gluon_kernel)
