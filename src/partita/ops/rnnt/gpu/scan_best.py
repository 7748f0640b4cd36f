"""The best path over a lattice with several kinds of arcs: the scan of its maxima.

The chunks, rows, lanes and carries are those of `scan.py`, and the kinds of arcs those of
`arc_rows.py`. Scores are logarithms to base 2 in fp64. A lane remembers as many of its own last
states, and of those of the lane that it takes labels from, as the longest duration needs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon

from ...ctc.gpu.lanes import LaneKernel, lane_index
from .arc_rows import (
    await_arcs,
    chunk_of_program,
    least_word,
    load_block_arcs,
    load_turn_carries,
    prepend,
    repeated,
    row_of,
    shift_lanes,
)
from .lattice import SIZES
from .scan import ScanSizes, ScanTensors, flag_bad_labels, send_carry


@triton.jit
def best_term(scores, own, other, lane, CODE: tl.constexpr, ARCS: tl.constexpr):
    """Return the greatest term of a state and the kind of its arc, the first of equals.

    A term is the score of an arc plus the state at its other end. `own` has the lane's states of
    the last rows, latest first, and `other` those of its neighbor. NaN counts as the greatest.
    """
    best, kind = lane.to(tl.float64) * 0.0 - float("inf"), lane * 0
    for i in tl.static_range(ARCS):
        if (CODE >> (8 * i)) & 255:
            if (CODE >> (8 * i)) & 128:
                term = scores[i] + other[(CODE >> (8 * i)) & 127]
            else:
                term = scores[i] + own[((CODE >> (8 * i)) & 127) - 1]
            is_better = (term > best) | (term != term)
            best, kind = tl.where(is_better, term, best), tl.where(is_better, i, kind)
    return best, kind


@triton.jit
def scan_maxima(
    chunk,
    pointers_ptr,
    lane,
    FILLED: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Scan the maxima of a chunk; returns that of the virtual step after the last one."""
    state = lane.to(tl.float64) * 0.0 - float("inf")
    final, own, other = state, repeated(state, DEPTH), repeated(state, DEPTH)
    # Turn 0 comes before the first row, whose arcs it awaits, and no path reaches its states.
    scores = ()
    for i in tl.static_range(ARCS):
        scores = scores + (state if (CODE >> (8 * i)) & 255 else lane,)
    words = load_turn_carries(chunk, 0, lane, BLOCK)
    arcs = load_block_arcs(chunk, 1, lane, FILLED, False, BLOCK, CODE, ARCS)
    least = least_word(1, words, arcs, False, CODE, ARCS)
    for turn in range(0, chunk.end_row + 2, BLOCK):
        waiting = (least, words, arcs, chunk, turn, lane)
        least, carries, next_arcs = await_arcs(*waiting, False, BLOCK, CODE, ARCS)
        words = load_turn_carries(chunk, turn + BLOCK, lane, BLOCK)
        arcs = load_block_arcs(chunk, turn + BLOCK + 1, lane, FILLED, False, BLOCK, CODE, ARCS)
        for i in tl.static_range(BLOCK):
            row = row_of(chunk, turn + i)
            # Rows before the first one and after the last one may be those of other chunks.
            stored = (lane * 0 + turn + i > 0) & (turn + i < chunk.end_row + 2)
            carry = tl.gather(carries, lane * 0 + i, 0).to(tl.float64, bitcast=True)
            other = prepend(shift_lanes(chunk, own[0], carry, lane), other, DEPTH)
            state, kind = best_term(scores, own, other, lane, CODE, ARCS)
            tl.store(pointers_ptr + row * 32 + lane, kind.to(tl.int8), mask=stored)
            state = tl.where((row - lane == 0) & (chunk.u == 0), 0.0, state)
            final = tl.where(row - lane == chunk.length, state, final)
            send_carry(chunk, row - 31, state, lane, 31)
            own = prepend(state, own, DEPTH)
            scores = next_arcs[i]
        least = least_word(least, words, arcs, False, CODE, ARCS)
    return final


@triton.jit(do_not_specialize=SIZES)
def rnnt_best_scan_kernel(
    arcs_ptr,  # [ARCS, B, num_chunks, rows, 32] fp64: scores
    targets_ptr,  # [B, U]
    logit_lengths_ptr,  # [B]
    target_lengths_ptr,  # [B]
    pointers_ptr,  # [B, num_chunks, rows, 32] int8: the kind of the best arc into each node
    carries_ptr,  # [num_chunks, B, carry_steps] int64, zero; or None for one chunk
    flags_ptr,  # [B] int64, zero
    best_ptr,  # [B] fp64: the score of the best path
    tile_counter_ptr,  # [1] int64, zero; or None for one chunk
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
    FILLED: tl.constexpr,  # whether arcs that leave the lattice have the score -inf
    BLOCK: tl.constexpr,  # rows that are loaded together
    CODE: tl.constexpr,
    ARCS: tl.constexpr,  # kinds of arcs
    DEPTH: tl.constexpr,  # states that a lane remembers
    LAYOUT: tl.constexpr,
):
    """Scan the maxima of a chunk, store the best path's score, and flag bad labels."""
    index = tl.program_id(0)
    if tile_counter_ptr is not None:
        index = tl.atomic_add(tile_counter_ptr, 1, sem="relaxed").to(tl.int32)
    lengths, written = (logit_lengths_ptr, target_lengths_ptr), (None, carries_ptr)
    tensors = ScanTensors(arcs_ptr, targets_ptr, *lengths, *written, flags_ptr, best_ptr)
    sizes = ScanSizes(T, B, U1, V, num_chunks, rows, carry_steps, nodes)
    lane = lane_index(LAYOUT)
    chunk, offset, b, exists, invalid = chunk_of_program(index, tensors, sizes, lane, 1)
    if exists:
        flag_bad_labels(tensors, b, chunk.u, chunk.target_len, invalid, V, blank, target_stride)
        best = scan_maxima(chunk, pointers_ptr + offset, lane, FILLED, BLOCK, CODE, ARCS, DEPTH)
        best = tl.where(chunk.length > 0, best, -float("inf"))
        tl.store(best_ptr + b + lane * 0, best, mask=chunk.u == chunk.target_len)


rnnt_best_scan_gluon_kernel = gluon.jit(rnnt_best_scan_kernel.fn, do_not_specialize=SIZES)
BEST_SCAN = LaneKernel(rnnt_best_scan_kernel, rnnt_best_scan_gluon_kernel)
