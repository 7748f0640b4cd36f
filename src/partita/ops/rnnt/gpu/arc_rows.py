"""Arcs of the rows of a chunk in scans over a lattice with several kinds of arcs; see `arcs.py`."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .scan import await_carries, load_carries, prefetch_line, upper_half


class ArcChunk(NamedTuple):
    """The chunk that a program scans.

    Fields:
        arcs_ptr: scores of the first kind of arcs of the chunk, `[rows, 32]`. If the scan waits
            for them, they are int64 words.
        nodes: offset from the scores of a kind to those of the next kind.
        before: offset in a row to the lane before each lane, `[32]`; the first lane's is in the
            previous chunk.
        states_ptr: the chunk's α or β, `[rows, 32]`, or None.
        pointers_ptr: the kind of the best arc into each node, `[rows, 32]`, or None.
        sent_ptr, received_ptr, sends, receives: the carries; see `scan.ScanChunk`.
        length: number of steps.
        u: the value of u of each lane, `[32]`.
        target_len: number of labels.
        end_row: the row of the virtual step T at the last value of u in the chunk.
    """

    arcs_ptr: tl.tensor
    nodes: tl.tensor
    before: tl.tensor
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
def arc_mask(chunk, t, duration, LABEL: tl.constexpr):
    """Return whether arcs of a duration that leave step t at each lane's u stay in the lattice.

    A label leads to a node of a step; a blank also to the end of the path.
    """
    after = t + duration
    in_lattice = (t >= 0) & (t < chunk.length) & (chunk.u <= chunk.target_len)
    if LABEL:
        return in_lattice & (after < chunk.length) & (chunk.u < chunk.target_len)
    else:
        is_end = (after == chunk.length) & (chunk.u == chunk.target_len)
        return in_lattice & ((after < chunk.length) | is_end)


@triton.jit
def load_row_arcs(
    chunk,
    row,
    lane,
    FORWARD: tl.constexpr,
    FILLED: tl.constexpr,
    WAIT: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return the scores of the arcs into (α) or out of (β) the nodes of a row.

    With FILLED, the score of each arc that leaves the lattice is -inf in memory. With WAIT, which
    needs FILLED, they are words, and those that are not written yet are 0.
    """
    scores = ()
    for i in tl.static_range(ARCS):
        ptr, mask = chunk.arcs_ptr + i * chunk.nodes, chunk.u < 0
        d = (CODE >> (8 * i)) & 127
        if FORWARD:
            if (CODE >> (8 * i)) & 128:
                t = row - lane - d
                mask = (t >= 0) & (t + d < chunk.length)
                mask = mask & (chunk.u > 0) & (chunk.u <= chunk.target_len)
                ptr = ptr + (row - 1 - d) * 32 + chunk.before
            else:
                mask = arc_mask(chunk, row - lane - d, d, False)
                ptr = ptr + (row - d) * 32 + lane
        else:
            mask = arc_mask(chunk, row - lane, d, ((CODE >> (8 * i)) & 128) > 0)
            ptr = ptr + row * 32 + lane
        if ((CODE >> (8 * i)) & 255) == 0:  # Nothing reads the kind that no arc has.
            scores = scores + (lane,)
        elif WAIT:  # Volatile loads find what other multiprocessors have written.
            scores = scores + (tl.load(ptr, volatile=True),)
        elif FILLED:
            scores = scores + (tl.load(ptr),)
        else:
            scores = scores + (tl.load(ptr, mask=mask, other=-float("inf")),)
    return scores


@triton.jit
def load_block_arcs(
    chunk,
    first,
    lane,
    FORWARD: tl.constexpr,
    FILLED: tl.constexpr,
    WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return the scores of the arcs of BLOCK rows from `first` on, a tuple for each row."""
    rows = ()
    for i in tl.static_range(BLOCK):
        rows = rows + (load_row_arcs(chunk, first + i, lane, FORWARD, FILLED, WAIT, CODE, ARCS),)
    return rows


@triton.jit
def arcs_written(words, rows, BLOCK: tl.constexpr, CODE: tl.constexpr, ARCS: tl.constexpr):
    """Return 0 if a word of the carries, or the upper half of one of the arcs, is 0."""
    least = upper_half(words) | words.to(tl.uint32)
    for i in tl.static_range(BLOCK):
        for j in tl.static_range(ARCS):
            if (CODE >> (8 * j)) & 255:
                least = tl.minimum(least, upper_half(rows[i][j]))
    return tl.min(least, axis=0)


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
def await_arcs(
    words,
    rows,
    chunk,
    step,
    row,
    lane,
    FORWARD: tl.constexpr,
    FILLED: tl.constexpr,
    WAIT: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return the carries of STEPS steps and the arcs of BLOCK rows, once all are written.

    Triton 3.6 fails where one of these results is not used.
    """
    if WAIT:
        while arcs_written(words, rows, BLOCK, CODE, ARCS) == 0:
            words = load_carries(chunk, step, lane, STEPS)
            rows = load_block_arcs(chunk, row, lane, FORWARD, FILLED, WAIT, BLOCK, CODE, ARCS)
        scores = ()
        for i in tl.static_range(BLOCK):
            scores = scores + (row_scores(rows[i], CODE, ARCS),)
        return words, scores
    else:
        return await_carries(words, chunk, step, lane, STEPS), rows


@triton.jit
def prefetch_row_arcs(chunk, row, lane, BLOCK: tl.constexpr, ARCS: tl.constexpr):
    """Ask for the arcs of BLOCK rows from `row` on, as `scan.prefetch_arcs` does for two kinds."""
    for i in tl.static_range(0, 2 * BLOCK * ARCS, 32):
        line = i + lane
        kind = tl.minimum(line // (2 * BLOCK), ARCS - 1)
        line_row = tl.minimum(tl.maximum(row + (line >> 1) % BLOCK, 0), chunk.end_row)
        ptr = chunk.arcs_ptr + kind * chunk.nodes + (line_row * 32 + (line & 1) * 16)
        prefetch_line(ptr)
