"""The best path over a lattice with several kinds of arcs: its scan of maxima and the way back.

The chunks, rows, lanes, carries and kinds of arcs are those of `arc_rows.py`. Scores are logarithms
to base 2 in fp64. A lane remembers as many of its own last states, and of those of the lane that it
takes labels from, as the longest duration needs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon

from ....primitives.gpu.math import LN2
from ...ctc.gpu.lanes import LaneKernel
from .arc_rows import (
    MINUS_ZERO,
    await_arcs,
    chunk_of_program,
    flag_bad_labels,
    least_word,
    load_block_arcs,
    load_turn_carries,
    num_kinds,
    prepend,
    remembered_states,
    repeated,
    row_of,
    shift_lanes,
)
from .lattice import SIZES, lattice_sizes, load_sequence, node_offset


@triton.jit
def best_term(scores, own, other, lane, CODE: tl.constexpr):
    """Return the greatest term of a state and the kind of its arc, the first of equals.

    A term is the score of an arc plus the state at its other end. `own` has the lane's states of
    the last rows, latest first, and `other` those of its neighbor. NaN counts as the greatest.
    """
    best, kind = lane.to(tl.float64) * 0.0 - float("inf"), lane * 0
    for i in tl.static_range(num_kinds(CODE)):
        if (CODE >> (8 * i)) & 255:
            if (CODE >> (8 * i)) & 128:
                term = scores[i] + other[(CODE >> (8 * i)) & 127]
            else:
                term = scores[i] + own[((CODE >> (8 * i)) & 127) - 1]
            is_better = (term > best) | (term != term)
            best, kind = tl.where(is_better, term, best), tl.where(is_better, i, kind)
    return best, kind


@triton.jit(do_not_specialize=SIZES)
def rnnt_best_scan_kernel(
    scan,  # Scan of scores; its states are the kinds of the best arcs into the nodes, int8
    targets,  # Targets
    T,
    B,
    U1,
    V,
    num_chunks,
    blank,
    target_stride,
    BLOCK: tl.constexpr,  # rows that are loaded together
    CODE: tl.constexpr,  # the kinds of arcs; see `arc_rows.py`
    LAYOUT: tl.constexpr,
):
    """Scan the maxima of a chunk, store the best path's score, and flag bad labels."""
    DEPTH: tl.constexpr = remembered_states(CODE)
    sizes = lattice_sizes(T, B, U1, num_chunks)
    chunk, offset, b, exists = chunk_of_program(
        tl.program_id(0), scan, targets.lengths, sizes, 1, LAYOUT
    )
    if exists:
        flag_bad_labels(scan.flags, b, chunk, targets, blank, V, target_stride)
        lane, length, pointers_ptr = chunk.lane, chunk.sequence.length, scan.states + offset
        state = lane.to(tl.float64) * 0.0 - float("inf")
        final, own, other = state, repeated(state, DEPTH), repeated(state, DEPTH)
        # Turn 0 comes before the first row, whose arcs it awaits, and no path reaches its states.
        scores = ()
        for i in tl.static_range(num_kinds(CODE)):
            scores = scores + (state if (CODE >> (8 * i)) & 255 else lane,)
        words = load_turn_carries(chunk, 0, BLOCK)
        arcs = load_block_arcs(chunk, 1, False, BLOCK, CODE)
        least = least_word(1, words, arcs, False, CODE)
        for turn in range(0, chunk.end_row + 2, BLOCK):
            least, step_carries, next_arcs = await_arcs(
                least, words, arcs, chunk, turn, False, BLOCK, CODE
            )
            words = load_turn_carries(chunk, turn + BLOCK, BLOCK)
            arcs = load_block_arcs(chunk, turn + BLOCK + 1, False, BLOCK, CODE)
            for i in tl.static_range(BLOCK):
                row = row_of(chunk, turn + i)
                # Rows before the first one and after the last one may be those of other chunks.
                stored = (lane * 0 + turn + i > 0) & (turn + i < chunk.end_row + 2)
                carry = tl.gather(step_carries, lane * 0 + i, 0).to(tl.float64, bitcast=True)
                other = prepend(shift_lanes(chunk, own[0], carry), other, DEPTH)
                state, kind = best_term(scores, own, other, lane, CODE)
                tl.store(pointers_ptr + row * 32 + lane, kind.to(tl.int8), mask=stored)
                state = tl.where((row - lane == 0) & (chunk.u == 0), 0.0, state)
                final = tl.where(row - lane == length, state, final)
                # The state of the last lane goes to the next chunk.
                step = row - 31
                word = state.to(tl.int64, bitcast=True)
                word = tl.where(word == 0, MINUS_ZERO, word)
                sends = chunk.sends & (lane == 31) & (step >= 0) & (step < length)
                tl.store(chunk.sent_ptr + step + lane * 0, word, mask=sends)
                own = prepend(state, own, DEPTH)
                scores = next_arcs[i]
            least = least_word(least, words, arcs, False, CODE)
        best = tl.where(length > 0, final, -float("inf"))
        tl.store(scan.totals + b + lane * 0, best, mask=chunk.u == chunk.sequence.target_len)


rnnt_best_scan_gluon_kernel = gluon.jit(rnnt_best_scan_kernel.fn, do_not_specialize=SIZES)
BEST_SCAN = LaneKernel(rnnt_best_scan_kernel, rnnt_best_scan_gluon_kernel)


@triton.jit(do_not_specialize=SIZES)
def rnnt_backtrace_kernel(
    scan,  # Scan of the best path
    lengths,  # Lengths
    steps_ptr,  # [B, U] int64
    scores_ptr,  # [B, U]
    score_ptr,  # [B]
    T,
    B,
    U1,
    num_chunks,
    CODE: tl.constexpr,
    BLOCK_U: tl.constexpr,
):
    """Write the step and the score of each label on the best path of a sequence, and its score."""
    b, sizes = tl.program_id(0), lattice_sizes(T, B, U1, num_chunks)
    length, target_len, _ = load_sequence(b, lengths, T, U1)
    best = tl.load(scan.totals + b)
    is_nan = (tl.load(scan.flags + b) > 0) | (best != best)
    dtype: tl.constexpr = scores_ptr.dtype.element_ty
    tl.store(score_ptr + b, tl.where(is_nan, float("nan"), best * LN2).to(dtype))
    steps_ptr += b.to(tl.int64) * (U1 - 1)
    scores_ptr += b.to(tl.int64) * (U1 - 1)
    for first in range(0, U1 - 1, BLOCK_U):
        lane = first + tl.arange(0, BLOCK_U)
        tl.store(steps_ptr + lane, tl.full([BLOCK_U], -1, tl.int64), mask=lane < U1 - 1)
        nothing = tl.where(is_nan, float("nan"), lane * 0.0).to(dtype)
        tl.store(scores_ptr + lane, nothing, mask=lane < U1 - 1)
    # The path's values replace those that other threads have just stored.
    tl.debug_barrier()
    has_path = tl.where(is_nan, 0, tl.where(best > -float("inf"), 1, 0))
    t, u = length * has_path, target_len * has_path
    while t + u > 0:
        node = node_offset(b, t, u, sizes)
        pointer = tl.load(scan.states + node).to(tl.int32)
        duration, is_label = t * 0, t * 0
        for i in tl.static_range(num_kinds(CODE)):
            duration = tl.where(pointer == i, (CODE >> (8 * i)) & 127, duration)
            is_label = tl.where(pointer == i, (CODE >> (8 * i + 7)) & 1, is_label)
        t, u = t - duration, u - is_label
        source = node_offset(b, t, u, sizes)
        score = tl.load(scan.arcs + pointer * sizes.nodes + source, mask=is_label > 0, other=0.0)
        tl.store(steps_ptr + u, t.to(tl.int64), mask=is_label > 0)
        tl.store(scores_ptr + u, (score * LN2).to(dtype), mask=is_label > 0)
