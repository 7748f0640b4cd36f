"""Scans over a lattice with several kinds of arcs, as that of token-and-duration transducers.

An arc leads from (t, u) to (t + d, u) by a blank, or to (t + d, u + 1) by a label. The number
`CODE` encodes the kinds of arcs that a kernel is compiled for: byte i has the duration d of kind i,
plus 128 for a label. There are no blanks of duration 0, so a byte of 0 is a kind that no arc has.

The chunks, rows, lanes and carries are those of `scan.py`. A lane remembers as many of its own last
states, and of those of the lane that it takes labels from, as the longest duration needs.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon

from ....primitives.gpu.math import finite_shift
from ...ctc.gpu.lanes import LaneKernel, lane_index
from .lattice import SIZES, load_sequence, log2_1p
from .scan import INVALID, await_carries, load_carries, send_carry, shift_scores


class ArcChunk(NamedTuple):
    """The chunk that a program scans.

    Fields:
        arcs_ptr: scores of the first kind of arcs of the chunk, `[rows, 32]`.
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
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return the scores of the arcs into (α) or out of (β) the nodes of a row.

    With FILLED, the score of each arc that leaves the lattice is -inf in memory.
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
            elif (CODE >> (8 * i)) & 127:
                mask = arc_mask(chunk, row - lane - d, d, False)
                ptr = ptr + (row - d) * 32 + lane
            else:
                ptr = ptr + lane
        else:
            mask = arc_mask(chunk, row - lane, d, ((CODE >> (8 * i)) & 128) > 0)
            ptr = ptr + row * 32 + lane
        if FILLED and (CODE >> (8 * i)) & 255:
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
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    ARCS: tl.constexpr,
):
    """Return the scores of the arcs of BLOCK rows from `first` on, a tuple for each row."""
    rows = ()
    for i in tl.static_range(BLOCK):
        rows = rows + (load_row_arcs(chunk, first + i, lane, FORWARD, FILLED, CODE, ARCS),)
    return rows


@triton.jit
def arc_terms(scores, own, other, lane, CODE: tl.constexpr, ARCS: tl.constexpr):
    """Return the terms of a state: those of arcs plus the states where they come from or lead to.

    `own` has the lane's states of the last rows, latest first, and `other` those of its neighbor.
    """
    terms = ()
    for i in tl.static_range(ARCS):
        if (CODE >> (8 * i)) & 128:
            terms = terms + (scores[i] + other[(CODE >> (8 * i)) & 127],)
        elif ((CODE >> (8 * i)) & 127) == 0:
            terms = terms + (lane.to(tl.float64) * 0.0 - float("inf"),)
        else:
            terms = terms + (scores[i] + own[((CODE >> (8 * i)) & 127) - 1],)
    return terms


@triton.jit
def greatest(terms):
    """Return the greatest of some terms, which are compared in pairs."""
    if len(terms) == 1:
        return terms[0]
    else:
        winners = ()
        for i in tl.static_range(len(terms) // 2):
            first, second = terms[2 * i], terms[2 * i + 1]
            winners = winners + (tl.where(first > second, first, second),)
        if len(terms) % 2:
            winners = winners + (terms[len(terms) - 1],)
        return greatest(winners)


@triton.jit
def log2_sum(terms, FP64: tl.constexpr):
    """Return log2 of the sum of 2**term; exponentials and logarithm are fp32 unless FP64."""
    shift = finite_shift(greatest(terms))
    if FP64:
        total = tl.exp2(terms[0] - shift)
        for i in tl.static_range(1, len(terms)):
            total += tl.exp2(terms[i] - shift)
        return shift + tl.log2(total)
    else:
        total = tl.exp2((terms[0] - shift).to(tl.float32))
        for i in tl.static_range(1, len(terms)):
            total += tl.exp2((terms[i] - shift).to(tl.float32))
        # The sum is NaN, 0 or at least 1, up to rounding; its exponent is split off.
        bits = total.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - 127
        fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
        result = shift + (exponent.to(tl.float64) + log2_1p(fraction).to(tl.float64))
        return tl.where(total > 0.5, result, tl.where(total == 0.0, -float("inf"), total))


@triton.jit
def sum_terms(terms, CODE: tl.constexpr, ARCS: tl.constexpr, FP64: tl.constexpr):
    """Return log2 of the sum of 2**term.

    The terms that depend on the last row are added to the sum of the others, which the scheduler
    computes while that row is on its way.
    """
    late, early = (), ()
    for i in tl.static_range(ARCS):
        if ((CODE >> (8 * i)) & 255) == 1 or ((CODE >> (8 * i)) & 255) == 128:
            late = late + (terms[i],)
        elif (CODE >> (8 * i)) & 255:
            early = early + (terms[i],)
    if len(late) and len(early):
        return log2_sum(late + (log2_sum(early, FP64),), FP64)
    else:
        return log2_sum(late + early, FP64)


@triton.jit
def best_term(terms, lane, ARCS: tl.constexpr):
    """Return the greatest term and its index, the first of equals; NaN counts as the greatest."""
    best, index = terms[0], lane * 0
    for i in tl.static_range(1, ARCS):
        is_better = (terms[i] > best) | (terms[i] != terms[i])
        best, index = tl.where(is_better, terms[i], best), tl.where(is_better, i, index)
    return best, index


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
    arcs = load_block_arcs(chunk, 0, lane, True, FILLED, BLOCK, CODE, ARCS)
    words = load_carries(chunk, 0, lane, BLOCK)
    for first in range(0, chunk.end_row + 1, BLOCK):
        words = await_carries(words, chunk, first, lane, BLOCK)
        carries, block_arcs = words, arcs
        arcs = load_block_arcs(chunk, first + BLOCK, lane, True, FILLED, BLOCK, CODE, ARCS)
        words = load_carries(chunk, first + BLOCK, lane, BLOCK)
        for i in tl.static_range(BLOCK):
            other = prepend(shift_scores(own[0], carries, i, lane, True), other, DEPTH)
            terms = arc_terms(block_arcs[i], own, other, lane, CODE, ARCS)
            if MAX:
                alpha, pointer = best_term(terms, lane, ARCS)
                row_ptr = chunk.pointers_ptr + (first + i) * 32 + lane
                tl.store(row_ptr, pointer.to(tl.int8))
            else:
                alpha = sum_terms(terms, CODE, ARCS, FP64)
            t = first + i - lane
            alpha = tl.where((t == 0) & (chunk.u == 0), 0.0, alpha)
            final = tl.where(t == chunk.length, alpha, final)
            if chunk.states_ptr is not None:
                tl.store(chunk.states_ptr + (first + i) * 32 + lane, alpha)
            send_carry(chunk, first + i - 31, alpha, lane, 31)
            own = prepend(alpha, own, DEPTH)
    return final


@triton.jit
def scan_arcs_backward(
    chunk,
    lane,
    FILLED: tl.constexpr,
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
    arcs = load_block_arcs(chunk, last, lane, False, FILLED, BLOCK, CODE, ARCS)
    words = load_carries(chunk, last - 31, lane, BLOCK)
    for p in range(0, chunk.end_row + 1, BLOCK):
        first = last - p
        words = await_carries(words, chunk, first - 31, lane, BLOCK)
        carries, block_arcs = words, arcs
        arcs = load_block_arcs(chunk, first - BLOCK, lane, False, FILLED, BLOCK, CODE, ARCS)
        words = load_carries(chunk, first - BLOCK - 31, lane, BLOCK)
        for i in tl.static_range(BLOCK - 1, -1, -1):
            other = prepend(shift_scores(own[0], carries, i, lane, False), other, DEPTH)
            terms = arc_terms(block_arcs[i], own, other, lane, CODE, ARCS)
            beta = sum_terms(terms, CODE, ARCS, FP64)
            t = first + i - lane
            beta = tl.where((t == chunk.length) & (chunk.u == chunk.target_len), 0.0, beta)
            tl.store(chunk.states_ptr + (first + i) * 32 + lane, beta)
            send_carry(chunk, first + i, beta, lane, 0)
            own = prepend(beta, own, DEPTH)


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
    b, direction = (index // DIRECTIONS % B).to(tl.int64), index % DIRECTIONS
    lane, c = lane_index(LAYOUT), index // (DIRECTIONS * B)
    length, target_len, invalid = load_sequence(b, logit_lengths_ptr, target_lengths_ptr, T, U1)
    last = target_len // 32
    c_u = tl.where(direction == 0, c, last - c)
    u, end_row = c_u * 32 + lane, length + tl.minimum(31, target_len - c_u * 32)
    if c <= last:
        offset = (b * num_chunks + c_u) * rows * 32
        # The first lane of all has no lane before it; it reads its own arcs, and adds -inf to them.
        before_first = tl.where(c_u > 0, 32 * 32 + 31 - rows * 32, 0)
        before = tl.where(lane > 0, lane - 1, before_first)
        states = None if states_ptr is None else states_ptr + direction * nodes + offset
        pointers = None if pointers_ptr is None else pointers_ptr + offset
        sent_ptr, received_ptr = flags_ptr, flags_ptr
        if carries_ptr is not None:
            stride = B.to(tl.int64) * carry_steps
            sent_ptr = carries_ptr + (direction * num_chunks + c) * stride + b * carry_steps
            received_ptr = sent_ptr - stride
        links = (sent_ptr, received_ptr, c < last, c > 0)
        sizes = (length, u, target_len, end_row)
        chunk = ArcChunk(arcs_ptr + offset, nodes, before, states, pointers, *links, *sizes)
        if direction == 0:
            label = tl.load(targets_ptr + b * target_stride + u, mask=u < target_len, other=-1)
            is_bad = (u < target_len) & ((label < 0) | (label >= V) | (label == blank))
            if (tl.max(is_bad.to(tl.int32), axis=0) > 0) | invalid:
                tl.atomic_or(flags_ptr + b, INVALID, sem="relaxed")
            alpha = scan_arcs_forward(chunk, lane, FILLED, BLOCK, CODE, ARCS, DEPTH, MAX, FP64)
            alpha = tl.where(length > 0, alpha, -float("inf"))
            tl.store(logz_ptr + b + lane * 0, alpha, mask=u == target_len)
        elif DIRECTIONS == 2:
            scan_arcs_backward(chunk, lane, FILLED, BLOCK, CODE, ARCS, DEPTH, FP64)


rnnt_arc_scan_gluon_kernel = gluon.jit(rnnt_arc_scan_kernel.fn, do_not_specialize=SIZES)
ARC_SCAN = LaneKernel(rnnt_arc_scan_kernel, rnnt_arc_scan_gluon_kernel)
