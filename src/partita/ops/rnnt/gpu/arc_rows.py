"""Arcs of the rows of a chunk in scans over a lattice with several kinds of arcs; see `arcs.py`."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .scan import load_carries_of, prefetch_line, send_carry, upper_half


class ArcChunk(NamedTuple):
    """The chunk that a program scans, by α or β.

    The rows are counted in the order of the scan, and turn 0 is the row before the first one:
    turn p of α is row p - 1, and that of β is row `end_row` + 1 - p.

    Fields:
        forward: 1 for α, 0 for β.
        first_row, step: the row of turn 0, and 1 or -1.
        arcs_ptr: scores of the first kind of arcs of the chunk, `[rows, 32]`. If the scan waits
            for them, they are int64 words.
        nodes: offset from the scores of a kind to those of the next kind.
        label_offset: offset from a row to the arcs of labels of duration 0 into (α) or out of (β)
            each lane, `[32]`. Those into the first lane are in the previous chunk.
        duration_offset: offset from the arcs of a duration to those of one step less.
        states_ptr: the chunk's α or β, `[rows, 32]`, or None.
        pointers_ptr: the kind of the best arc into each node, `[rows, 32]`, or None.
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
    states_ptr: tl.tensor
    pointers_ptr: tl.tensor
    sent_ptr: tl.tensor
    received_ptr: tl.tensor
    sends: tl.tensor
    receives: tl.tensor
    length: tl.tensor
    u: tl.tensor
    target_len: tl.tensor
    end_row: tl.tensor


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
def load_row_arcs(
    chunk,
    row,
    lane,
    FILLED: tl.constexpr,
    WAIT: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return the scores of the arcs into (α) or out of (β) the nodes of a row.

    With FILLED, the score of each arc that leaves the lattice is -inf in memory; β needs it. With
    WAIT they are words, and those that are not written yet are 0.
    """
    scores = ()
    for i in tl.static_range(ARCS):
        d = (CODE >> (8 * i)) & 127
        # The sum in brackets is the same in all turns, and the one after it for all kinds.
        ptr = chunk.arcs_ptr + (i * chunk.nodes - d * chunk.duration_offset)
        if (CODE >> (8 * i)) & 128:
            ptr = ptr + (row * 32 + chunk.label_offset)
        else:
            ptr = ptr + (row * 32 + lane)
        if ((CODE >> (8 * i)) & 255) == 0:  # Nothing reads the kind that no arc has.
            scores = scores + (lane,)
        elif WAIT:  # Volatile loads find what other multiprocessors have written.
            scores = scores + (tl.load(ptr, volatile=True),)
        elif FILLED:
            scores = scores + (tl.load(ptr),)
        else:
            mask = entering_mask(chunk, row, lane, d, ((CODE >> (8 * i)) & 128) > 0)
            scores = scores + (tl.load(ptr, mask=mask, other=-float("inf")),)
    return scores


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
    """Return the scores of the arcs of BLOCK turns from a turn on, a tuple for each row."""
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
def words_written(
    before,
    words,
    rows,
    WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return 0 if a carry, or with WAIT the score of an arc, has not been written yet.

    Such a word is 0, and the upper half of a score that has been written is not. `before` is what
    this function returned for the words before these, which is not 0.
    """
    if WAIT:
        least = upper_half(words) | words.to(tl.uint32)
        for i in tl.static_range(BLOCK):
            for j in tl.static_range(ARCS):
                if (CODE >> (8 * j)) & 255:
                    least = tl.minimum(least, upper_half(rows[i][j]))
    else:
        least = (words != 0).to(tl.uint32)
    # Triton 3.6 fails where a result of a loop is not used.
    return tl.min(tl.minimum(least, before), axis=0)


@triton.jit
def row_scores(words, CODE: tl.constexpr, ARCS: tl.constexpr):
    """Return the scores that words of a row's arcs are the bits of."""
    scores = ()
    for j in tl.static_range(ARCS):
        if (CODE >> (8 * j)) & 255:
            scores = scores + (words[j].to(tl.float64, bitcast=True),)
        else:
            scores = scores + (words[j],)
    return scores


@triton.jit
def first_words(
    chunk,
    lane,
    FILLED: tl.constexpr,
    WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return the carries of the turns from 0 on and the arcs of those from 1 on.

    With WAIT, none is loaded yet, and all words are 0.
    """
    if WAIT:
        row, rows = (), ()
        for i in tl.static_range(ARCS):
            if (CODE >> (8 * i)) & 255:
                row = row + (lane.to(tl.int64) * 0,)
            else:
                row = row + (lane,)
        for _ in tl.static_range(BLOCK):
            rows = rows + (row,)
        return lane.to(tl.int64) * 0, rows
    else:
        arcs = load_block_arcs(chunk, 1, lane, FILLED, WAIT, BLOCK, CODE, ARCS)
        return load_turn_carries(chunk, 0, lane, BLOCK), arcs


@triton.jit
def await_arcs(
    written,
    words,
    rows,
    chunk,
    turn,
    lane,
    FILLED: tl.constexpr,
    WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return the carries of BLOCK turns and the arcs of the turns after each, once all are written.

    `written` is what `words_written` returned for the words that have been loaded. It comes first
    in the result, for the words that have been awaited.
    """
    while written == 0:
        words = load_turn_carries(chunk, turn, lane, BLOCK)
        if WAIT:
            rows = load_block_arcs(chunk, turn + 1, lane, FILLED, WAIT, BLOCK, CODE, ARCS)
        written = words_written(1, words, rows, WAIT, BLOCK, CODE, ARCS)
    if WAIT:
        scores = ()
        for i in tl.static_range(BLOCK):
            scores = scores + (row_scores(rows[i], CODE, ARCS),)
        return written, words, scores
    else:
        return written, words, rows


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
def shift_states(chunk, state, words, i, lane):
    """Return the state of the lane before (α) or after (β) each lane.

    The lane without such a neighbor gets carry i of the words.
    """
    carry = tl.gather(words, lane * 0 + i, 0).to(tl.float64, bitcast=True)
    state = tl.where(lane == 31 * chunk.forward, carry, state)
    return tl.gather(state, (lane + 1 + 30 * chunk.forward) & 31, 0)


@triton.jit
def send_state(chunk, row, state, lane):
    """Hand the state of the last (α) or the first (β) lane to the next chunk, as a carry."""
    edge = 31 * chunk.forward
    send_carry(chunk, row - edge, state, lane, edge)
