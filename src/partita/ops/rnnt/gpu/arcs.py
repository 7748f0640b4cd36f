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
from .arc_rows import ArcChunk, await_arcs, load_block_arcs, prefetch_row_arcs
from .arc_sums import add_late, arc_terms, best_term, next_row
from .lattice import SIZES, load_sequence
from .scan import (
    INVALID,
    PREFETCHED_ROWS,
    ScanSizes,
    ScanTensors,
    load_carries,
    send_carry,
    shift_scores,
)


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
def scan_arcs_forward(
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
    """Scan α of a chunk, by maxima with MAX; returns α at the virtual step after the last one."""
    state = lane.to(tl.float64) * 0.0 - float("inf")
    final, own, other = state, repeated(state, DEPTH), repeated(state, DEPTH)
    words = load_carries(chunk, 0, lane, BLOCK)
    arcs = load_block_arcs(chunk, 0, lane, True, FILLED, WAIT, 1, CODE, ARCS)
    words, arcs = await_arcs(
        words, arcs, chunk, 0, 0, lane, True, FILLED, WAIT, BLOCK, 1, CODE, ARCS
    )
    row = next_row(arcs[0], own, other, lane, CODE, ARCS, MAX, FP64)
    arcs = load_block_arcs(chunk, 1, lane, True, FILLED, WAIT, BLOCK, CODE, ARCS)
    for first in range(0, chunk.end_row + 1, BLOCK):
        carries, next_arcs = await_arcs(
            words, arcs, chunk, first, first + 1, lane, True, FILLED, WAIT, BLOCK, BLOCK, CODE, ARCS
        )
        after = first + BLOCK
        words = load_carries(chunk, after, lane, BLOCK)
        arcs = load_block_arcs(chunk, after + 1, lane, True, FILLED, WAIT, BLOCK, CODE, ARCS)
        if WAIT and not UNFUSED:
            prefetch_row_arcs(chunk, first + PREFETCHED_ROWS, lane, BLOCK, ARCS)
        for i in tl.static_range(BLOCK):
            other = prepend(shift_scores(own[0], carries, i, lane, True), other, DEPTH)
            if MAX:
                terms = arc_terms(row, own, other, lane, CODE, ARCS)
                alpha, pointer = best_term(terms, lane, ARCS)
                row_ptr = chunk.pointers_ptr + (first + i) * 32 + lane
                tl.store(row_ptr, pointer.to(tl.int8))
            else:
                alpha = add_late(row, own, other, CODE, ARCS, FP64)
            t = first + i - lane
            alpha = tl.where((t == 0) & (chunk.u == 0), 0.0, alpha)
            final = tl.where(t == chunk.length, alpha, final)
            if chunk.states_ptr is not None:
                tl.store(chunk.states_ptr + (first + i) * 32 + lane, alpha)
            send_carry(chunk, first + i - 31, alpha, lane, 31)
            own = prepend(alpha, own, DEPTH)
            shifted = prepend(state, other, DEPTH)
            row = next_row(next_arcs[i], own, shifted, lane, CODE, ARCS, MAX, FP64)
    return final


@triton.jit
def scan_arcs_backward(
    chunk,
    lane,
    FILLED: tl.constexpr,
    WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
    DEPTH: tl.constexpr,
    FP64: tl.constexpr,
):
    """Scan β of a chunk; all of it is stored."""
    state = lane.to(tl.float64) * 0.0 - float("inf")
    own, other = repeated(state, DEPTH), repeated(state, DEPTH)
    last = chunk.end_row // BLOCK * BLOCK
    words, top = load_carries(chunk, last - 31, lane, BLOCK), last + BLOCK - 1
    arcs = load_block_arcs(chunk, top, lane, False, FILLED, WAIT, 1, CODE, ARCS)
    words, arcs = await_arcs(
        words, arcs, chunk, last - 31, top, lane, False, FILLED, WAIT, BLOCK, 1, CODE, ARCS
    )
    row = next_row(arcs[0], own, other, lane, CODE, ARCS, False, FP64)
    arcs = load_block_arcs(chunk, last - 1, lane, False, FILLED, WAIT, BLOCK, CODE, ARCS)
    for p in range(0, chunk.end_row + 1, BLOCK):
        first = last - p
        step, below = first - 31, first - 1
        carries, next_arcs = await_arcs(
            words, arcs, chunk, step, below, lane, False, FILLED, WAIT, BLOCK, BLOCK, CODE, ARCS
        )
        before = first - BLOCK
        words = load_carries(chunk, before - 31, lane, BLOCK)
        arcs = load_block_arcs(chunk, before - 1, lane, False, FILLED, WAIT, BLOCK, CODE, ARCS)
        if WAIT and not UNFUSED:
            prefetch_row_arcs(chunk, first - PREFETCHED_ROWS, lane, BLOCK, ARCS)
        for i in tl.static_range(BLOCK - 1, -1, -1):
            other = prepend(shift_scores(own[0], carries, i, lane, False), other, DEPTH)
            beta = add_late(row, own, other, CODE, ARCS, FP64)
            t = first + i - lane
            beta = tl.where((t == chunk.length) & (chunk.u == chunk.target_len), 0.0, beta)
            tl.store(chunk.states_ptr + (first + i) * 32 + lane, beta)
            send_carry(chunk, first + i, beta, lane, 0)
            own = prepend(beta, own, DEPTH)
            shifted = prepend(state, other, DEPTH)
            row = next_row(next_arcs[i], own, shifted, lane, CODE, ARCS, False, FP64)


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
        offset = (b * num_chunks + c_u) * rows * 32
        # The first lane of all has no lane before it; it reads its own arcs, and adds -inf to them.
        before_first = tl.where(c_u > 0, 32 * 32 + 31 - rows * 32, 0)
        before = tl.where(lane > 0, lane - 1, before_first)
        states, flags_ptr, logz_ptr = tensors.states_ptr, tensors.flags_ptr, tensors.logz_ptr
        states = None if states is None else states + direction * sizes.nodes + offset
        pointers = None if pointers_ptr is None else pointers_ptr + offset
        sent_ptr, received_ptr = flags_ptr, flags_ptr
        if tensors.carries_ptr is not None:
            stride = B.to(tl.int64) * sizes.carry_steps
            sent_ptr = tensors.carries_ptr + (direction * num_chunks + c) * stride
            sent_ptr += b * sizes.carry_steps
            received_ptr = sent_ptr - stride
        links = (sent_ptr, received_ptr, c < last, c > 0)
        arcs = (tensors.arcs_ptr + offset, sizes.nodes, before)
        chunk = ArcChunk(*arcs, states, pointers, *links, length, u, target_len, end_row)
        if direction == 0:
            labels_ptr = tensors.targets_ptr + b * target_stride
            label = tl.load(labels_ptr + u, mask=u < target_len, other=-1)
            is_bad = (u < target_len) & ((label < 0) | (label >= sizes.V) | (label == blank))
            if (tl.max(is_bad.to(tl.int32), axis=0) > 0) | invalid:
                tl.atomic_or(flags_ptr + b, INVALID, sem="relaxed")
            alpha = scan_arcs_forward(
                chunk, lane, FILLED, WAIT, BLOCK, CODE, ARCS, DEPTH, MAX, FP64
            )
            alpha = tl.where(length > 0, alpha, -float("inf"))
            tl.store(logz_ptr + b + lane * 0, alpha, mask=u == target_len)
        elif DIRECTIONS == 2:
            scan_arcs_backward(chunk, lane, FILLED, WAIT, BLOCK, CODE, ARCS, DEPTH, FP64)


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
        index = tl.atomic_add(tile_counter_ptr, 1, sem="relaxed")
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
