"""Scans over a lattice with several kinds of arcs, as that of token-and-duration transducers.

An arc leads from (t, u) to (t + d, u) by a blank, or to (t + d, u + 1) by a label. The number
`CODE` encodes the kinds of arcs that a kernel is compiled for: byte i has the duration d of kind i,
plus 128 for a label. There are no blanks of duration 0, so a byte of 0 is a kind that no arc has.

The chunks, rows, lanes and carries are those of `scan.py`. A lane remembers as many of its own last
states, and of those of the lane that it takes labels from, as the longest duration needs.

Only two arcs of a row depend on the row before it, the blank of duration 1 and the label of
duration 0. The others are summed one row ahead, so that these sums do not delay the scan.

As in `scan.py`, a scan may run while other programs still compute the arcs (see `overlap_tdt.py`).
Then the arcs are words, and those that are not written yet are 0. Arcs that leave the lattice have
the score -inf from the start, so each word that a scan waits for is written by some program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon

from ....primitives.gpu.math import UNFUSED
from ...ctc.gpu.lanes import LaneKernel, lane_index
from .arc_rows import (
    ArcChunk,
    await_arcs,
    first_words,
    load_block_arcs,
    load_turn_carries,
    prefetch_turn_arcs,
    row_of,
    send_state,
    shift_states,
    words_written,
)
from .arc_sums import add_late, arc_terms, best_term, first_turn, next_row
from .lattice import SIZES, load_sequence
from .scan import PREFETCHED_ROWS, ScanSizes, ScanTensors, carry_pointers, flag_bad_labels


@triton.jit
def repeated(value, SIZE: tl.constexpr):
    """Return a tuple of SIZE equal tensors."""
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
def scan_arcs(
    chunk,
    lane,
    FILLED: tl.constexpr,
    WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
    DEPTH: tl.constexpr,
    MAX: tl.constexpr,
    FP64: tl.constexpr,
):
    """Scan α or β of a chunk, by maxima with MAX; returns α at the virtual step after the last one.

    Both directions share their code, as the time of Triton's compiler grows with its square.
    """
    state = lane.to(tl.float64) * 0.0 - float("inf")
    final, own, other = state, repeated(state, DEPTH), repeated(state, DEPTH)
    start_t = tl.where(chunk.forward > 0, 0, chunk.length)
    start_u = tl.where(chunk.forward > 0, 0, chunk.target_len)
    # Turn 0 comes before the first row, whose arcs it awaits, and leaves all states at -inf.
    ahead = first_turn(lane, CODE, ARCS, MAX, FP64)
    words, arcs = first_words(chunk, lane, FILLED, WAIT, BLOCK, CODE, ARCS)
    written = words_written(1, words, arcs, WAIT, BLOCK, CODE, ARCS)
    for turn in range(0, chunk.end_row + 2, BLOCK):
        after = turn + BLOCK
        written, carries, next_arcs = await_arcs(
            written, words, arcs, chunk, turn, lane, FILLED, WAIT, BLOCK, CODE, ARCS
        )
        words = load_turn_carries(chunk, after, lane, BLOCK)
        arcs = load_block_arcs(chunk, after + 1, lane, FILLED, WAIT, BLOCK, CODE, ARCS)
        if WAIT and not UNFUSED:
            prefetch_turn_arcs(chunk, turn + PREFETCHED_ROWS, lane, BLOCK, ARCS)
        for i in tl.static_range(BLOCK):
            row = row_of(chunk, turn + i)
            # Rows before the first one and after the last one may be those of other chunks.
            stored = (lane * 0 + turn + i > 0) & (turn + i < chunk.end_row + 2)
            other = prepend(shift_states(chunk, own[0], carries, i, lane), other, DEPTH)
            if MAX:
                terms = arc_terms(ahead, own, other, lane, CODE, ARCS)
                state, pointer = best_term(terms, lane, ARCS)
                tl.store(chunk.pointers_ptr + row * 32 + lane, pointer.to(tl.int8), mask=stored)
            else:
                state = add_late(ahead, own, other, CODE, ARCS, FP64)
            state = tl.where((row - lane == start_t) & (chunk.u == start_u), 0.0, state)
            final = tl.where(row - lane == chunk.length, state, final)
            if chunk.states_ptr is not None:
                tl.store(chunk.states_ptr + row * 32 + lane, state, mask=stored)
            send_state(chunk, row, state, lane)
            own = prepend(state, own, DEPTH)
            shifted = prepend(state, other, DEPTH)
            ahead = next_row(next_arcs[i], own, shifted, lane, CODE, ARCS, MAX, FP64)
        written = words_written(written, words, arcs, WAIT, BLOCK, CODE, ARCS)
    return final


@triton.jit
def arc_scan_program(
    index,
    tensors,
    pointers_ptr,
    sizes,
    blank,
    target_stride,
    DIRECTIONS: tl.constexpr,
    FILLED: tl.constexpr,
    WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
    DEPTH: tl.constexpr,
    MAX: tl.constexpr,
    FP64: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Scan α or β of a chunk. α also stores its value at the end and flags bad labels.

    The chunks of all sequences are counted in the order in which they wait for each other. With
    WAIT, the arcs are words that other programs still write.
    """
    B, num_chunks, rows = sizes.B, sizes.num_chunks, sizes.rows
    b, direction = (index // DIRECTIONS % B).to(tl.int64), index % DIRECTIONS
    lane, c = lane_index(LAYOUT), index // (DIRECTIONS * B)
    length, target_len, invalid = load_sequence(
        b, tensors.logit_lengths_ptr, tensors.target_lengths_ptr, sizes.T, sizes.U1
    )
    last = target_len // 32
    c_u = tl.where(direction == 0, c, last - c)
    u, end_row = c_u * 32 + lane, length + tl.minimum(31, target_len - c_u * 32)
    if c <= last:
        forward = 1 - direction
        offset = (b * num_chunks + c_u) * rows * 32
        # The first lane of all has no lane before it; it reads its own arcs, and adds -inf to them.
        before_first = tl.where(c_u > 0, 32 * 32 + 31 - rows * 32, 0)
        before = tl.where(lane > 0, lane - 1, before_first) - 32
        states = tensors.states_ptr
        states = None if states is None else states + direction * sizes.nodes + offset
        pointers = None if pointers_ptr is None else pointers_ptr + offset
        sent_ptr, received_ptr = carry_pointers(tensors, sizes, b, direction, c)
        chunk = ArcChunk(
            forward,
            tl.where(forward > 0, -1, end_row + 1),
            2 * forward - 1,
            tensors.arcs_ptr + offset,
            sizes.nodes,
            tl.where(forward > 0, before, lane),
            32 * forward,
            states,
            pointers,
            sent_ptr,
            received_ptr,
            c < last,
            c > 0,
            length,
            u,
            target_len,
            end_row,
        )
        if direction == 0:
            flag_bad_labels(tensors, b, u, target_len, invalid, sizes.V, blank, target_stride)
        state = scan_arcs(chunk, lane, FILLED, WAIT, BLOCK, CODE, ARCS, DEPTH, MAX, FP64)
        state = tl.where(length > 0, state, -float("inf"))
        tl.store(tensors.logz_ptr + b + lane * 0, state, mask=(u == target_len) & (direction == 0))


@triton.jit(do_not_specialize=SIZES)
def rnnt_arc_scan_kernel(
    arcs_ptr,  # [ARCS, B, num_chunks, rows, 32] fp64
    targets_ptr,  # [B, U]
    logit_lengths_ptr,  # [B]
    target_lengths_ptr,  # [B]
    states_ptr,  # [2, B, num_chunks, rows, 32] fp64: α and β, or None for log Z alone
    pointers_ptr,  # [B, num_chunks, rows, 32] int8 with MAX, or None
    carries_ptr,  # [DIRECTIONS, num_chunks, B, carry_steps] int64, zero; or None for one chunk
    flags_ptr,  # [B] int64, zero
    logz_ptr,  # [B] fp64
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
    DIRECTIONS: tl.constexpr,  # 1 for α alone
    FILLED: tl.constexpr,  # whether arcs that leave the lattice have the score -inf
    BLOCK: tl.constexpr,  # rows that are loaded together
    CODE: tl.constexpr,
    ARCS: tl.constexpr,  # kinds of arcs
    DEPTH: tl.constexpr,  # states that a lane remembers
    MAX: tl.constexpr,  # whether to take maxima for sums
    FP64: tl.constexpr,  # whether all arithmetic is fp64
    LAYOUT: tl.constexpr,
):
    """Scan α or β of a chunk. α also stores its value at the end and flags bad labels."""
    index = tl.program_id(0)
    if tile_counter_ptr is not None:
        index = tl.atomic_add(tile_counter_ptr, 1, sem="relaxed").to(tl.int32)
    lengths, written = (logit_lengths_ptr, target_lengths_ptr), (states_ptr, carries_ptr)
    tensors = ScanTensors(arcs_ptr, targets_ptr, *lengths, *written, flags_ptr, logz_ptr)
    sizes = ScanSizes(T, B, U1, V, num_chunks, rows, carry_steps, nodes)
    arc_scan_program(
        index,
        tensors,
        pointers_ptr,
        sizes,
        blank,
        target_stride,
        DIRECTIONS,
        FILLED,
        False,
        BLOCK,
        CODE,
        ARCS,
        DEPTH,
        MAX,
        FP64,
        LAYOUT,
    )


rnnt_arc_scan_gluon_kernel = gluon.jit(rnnt_arc_scan_kernel.fn, do_not_specialize=SIZES)
ARC_SCAN = LaneKernel(rnnt_arc_scan_kernel, rnnt_arc_scan_gluon_kernel)
