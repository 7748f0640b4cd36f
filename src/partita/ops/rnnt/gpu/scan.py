"""Transducers' scans: α from the first node and β from the last one, and the best path.

α(t, u) sums over the paths from (0, 0) to the node, and β(t, u) over those from the node to the end
at the virtual node (T, U), where α ends with the sum over all paths. The chunks, rows, lanes,
carries and kinds of arcs are those of `arc_rows.py`.

A state is a significand and a biased exponent of 2, and an arc is the halves of its word; see
`arc_words.py`. So a row takes products and integer operations, and no exponential or logarithm,
whose errors would add up from row to row.

A lane remembers as many of its own last states, and of those of the lane that it takes labels from,
as the longest duration needs. Only two arcs of a row depend on the row before it, the blank of
duration 1 and the label of duration 0. The others are summed one row ahead, so that these sums do
not delay the scan.

The scan of the best path takes maxima of scores, which are logarithms to base 2 in fp64, and stores
the arcs by which the path is traced back.

A scan may also run while other programs still compute the arcs (see `overlap.py`). Then those that
are not written yet are 0. Arcs that leave the lattice have the probability 0 from the start, so
each word that a scan waits for is written by some program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon

from ....primitives.gpu.math import LN2, UNFUSED
from ....primitives.gpu.memory import prefetch_line
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
from .arc_words import (
    ARC_BIAS,
    IMPOSSIBLE_ARC,
    NO_TERM,
    STATE_BIAS,
    UNREACHED,
    add_exponent,
    add_product,
    arc_exponent,
    halves,
    normalized,
    state_of_word,
    state_word,
)
from .lattice import SIZES, lattice_sizes, load_sequence, node_offset

PREFETCHED_ROWS = tl.constexpr(16)  # rows between a scan and the arcs that it brings into the cache


@triton.jit
def source_state(own, other, i: tl.constexpr, CODE: tl.constexpr):
    """Return the state at the other end of an arc of kind i.

    `own` has the lane's states of the last rows, latest first, and `other` those of its neighbor.
    """
    if (CODE >> (8 * i)) & 128:
        return other[(CODE >> (8 * i)) & 127]
    else:
        return own[((CODE >> (8 * i)) & 127) - 1]


@triton.jit
def add_terms(total, exponent, terms, PRECISE: tl.constexpr):
    """Return total plus the sum of some terms, in units of 2**exponent.

    Terms have an arc, the significand of a state, and their exponent.
    """
    for i in tl.static_range(len(terms)):
        field = terms[i][2] + (1023 - exponent)
        total = add_product(total, *terms[i][0], terms[i][1], field, PRECISE)
    return total


@triton.jit
def sum_ahead(words, own, other, lane, CODE: tl.constexpr, PRECISE: tl.constexpr):
    """Return what a row needs once the row before it is known.

    These are the sum of the terms that do not depend on that row, as a number from 1 to 32 and an
    exponent, and the other arcs. The first states of `own` and `other` are not read.
    """
    late, terms, exponent = (), (), lane * 0 + NO_TERM
    for i in tl.static_range(num_kinds(CODE)):
        if ((CODE >> (8 * i)) & 255) == 1 or ((CODE >> (8 * i)) & 255) == 128:
            late = late + (words[i],)
        elif (CODE >> (8 * i)) & 255:
            state = source_state(own, other, i, CODE)
            term = arc_exponent(words[i][1], PRECISE) + state[1]
            exponent, terms = tl.maximum(exponent, term), terms + ((words[i], state[0], term),)
    total = lane.to(tl.float64) * 0.0 + (0.0 if len(terms) else 1.0)
    return (add_terms(total, exponent, terms, PRECISE), exponent) + late


@triton.jit
def add_late(row, own, other, CODE: tl.constexpr, PRECISE: tl.constexpr):
    """Return the state of all terms of a row; see `sum_ahead`."""
    exponent, late = row[1], ()
    # Labels come last, because they come from the neighbor.
    for i in tl.static_range(num_kinds(CODE)):
        if ((CODE >> (8 * i)) & 255) == 1 or ((CODE >> (8 * i)) & 255) == 128:
            word, state = row[2 + len(late)], source_state(own, other, i, CODE)
            term = arc_exponent(word[1], PRECISE) + state[1]
            exponent, late = tl.maximum(exponent, term), late + ((word, state[0], term),)
    # A sum of 1 to 32 stays a normal number.
    total = add_exponent(row[0], tl.maximum(row[1] - exponent, -1000))
    return normalized(add_terms(total, exponent, late, PRECISE), exponent)


@triton.jit
def scan_program(
    index,
    scan,
    targets,
    target_stride,
    blank,
    V,
    sizes,
    DIRECTIONS: tl.constexpr,
    WAIT: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    PRECISE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Scan α or β of a chunk. α also stores the sum over all paths and flags bad labels.

    With WAIT, other programs still write the arcs. Both directions share their code, as the time of
    Triton's compiler grows with its square.
    """
    chunk, offset, b, exists = chunk_of_program(
        index, scan, targets.lengths, sizes, DIRECTIONS, LAYOUT
    )
    if exists:
        lane, forward, end_row = chunk.lane, chunk.forward, chunk.end_row
        length, target_len = chunk.sequence.length, chunk.sequence.target_len
        states_ptr = scan.states
        if states_ptr is not None:
            states_ptr = states_ptr + (1 - forward) * sizes.nodes + offset
        if forward > 0:
            flag_bad_labels(scan.flags, b, chunk, targets, blank, V, target_stride)
        total_ptr = scan.totals + b
        unreached = (lane.to(tl.float64) * 0.0 + 1.0, lane * 0 + UNREACHED)
        ARCS: tl.constexpr = num_kinds(CODE)
        DEPTH: tl.constexpr = remembered_states(CODE)
        HISTORY: tl.constexpr = DEPTH if DEPTH > BLOCK else BLOCK
        own, other = repeated(unreached, HISTORY), repeated(unreached, DEPTH)
        starts = chunk.u == tl.where(forward > 0, 0, target_len)
        # Turn 0 comes before the first row, whose arcs it awaits, and no path reaches its states.
        ahead = (lane.to(tl.float64) * 0.0 + 1.0, lane * 0 + NO_TERM)
        for i in tl.static_range(num_kinds(CODE)):
            if ((CODE >> (8 * i)) & 255) == 1 or ((CODE >> (8 * i)) & 255) == 128:
                ahead = ahead + (halves(lane.to(tl.int64) * 0 + IMPOSSIBLE_ARC),)
        words = load_turn_carries(chunk, 0, BLOCK)
        arcs = load_block_arcs(chunk, 1, WAIT, BLOCK, CODE)
        least = least_word(1, words, arcs, WAIT, CODE)
        for turn in range(0, end_row + 2, BLOCK):
            least, step_carries, next_arcs = await_arcs(
                least, words, arcs, chunk, turn, WAIT, BLOCK, CODE
            )
            if WAIT and not UNFUSED:  # Ask for arcs, which may have left the cache since a write.
                for i in tl.static_range(0, 2 * BLOCK * ARCS, 32):
                    line = i + lane
                    kind = tl.minimum(line // (2 * BLOCK), ARCS - 1)
                    row = row_of(chunk, turn + PREFETCHED_ROWS + (line >> 1) % BLOCK)
                    row = tl.minimum(tl.maximum(row, 0), end_row)
                    line_offset = row * 32 + (line & 1) * 16
                    prefetch_line(chunk.arcs_ptr + kind * chunk.nodes + line_offset)
            after = turn + BLOCK
            words = load_turn_carries(chunk, after, BLOCK)
            arcs = load_block_arcs(chunk, after + 1, WAIT, BLOCK, CODE)
            for i in tl.static_range(BLOCK):
                row = row_of(chunk, turn + i)
                carry = state_of_word(tl.gather(step_carries, lane * 0 + i, 0))
                entering = (
                    shift_lanes(chunk, own[0][0], carry[0]),
                    shift_lanes(chunk, own[0][1], carry[1]),
                )
                other = prepend(entering, other, DEPTH)
                state = add_late(ahead, own, other, CODE, PRECISE)
                word = state_word(*state)
                if states_ptr is not None:
                    # Rows before the first one and after the last one may be of other chunks.
                    past = (lane * 0 + turn + i - 1).to(tl.uint32, bitcast=True)
                    stored = past < (end_row + 1).to(tl.uint32, bitcast=True)
                    tl.store(states_ptr + row * 32 + lane, word, mask=stored)
                # The state of the last (α) or the first (β) lane goes to the next chunk.
                edge = 31 * forward
                step = row - edge
                is_step = step.to(tl.uint32, bitcast=True) < length.to(tl.uint32, bitcast=True)
                sends = chunk.sends & (lane == edge) & is_step
                tl.store(chunk.sent_ptr + step + lane * 0, word, mask=sends)
                own = prepend(state, own, HISTORY)
                shifted = prepend(state, other, DEPTH)
                ahead = sum_ahead(next_arcs[i], own, shifted, lane, CODE, PRECISE)
                if i == 0:  # The first row has the start of all paths, which no arc enters.
                    is_start = starts & (lane * 0 + turn == 0)
                    total = tl.where(is_start, 1.0, ahead[0])
                    exponent = tl.where(is_start, STATE_BIAS + ARC_BIAS, ahead[1])
                    ahead = (total, exponent) + ahead[2:]
            least = least_word(least, words, arcs, WAIT, CODE)
        # The end of all paths is in the last row, which is one of the last BLOCK turns.
        total, exponent = own[0]
        for i in tl.static_range(1, BLOCK):
            is_last = (end_row + 1) % BLOCK == BLOCK - 1 - i
            total = tl.where(is_last, own[i][0], total)
            exponent = tl.where(is_last, own[i][1], exponent)
        ends = (forward > 0) & (chunk.u == target_len)
        tl.store(total_ptr + lane * 0, total.to(tl.int64, bitcast=True), mask=ends)
        tl.store(total_ptr + sizes.B + lane * 0, exponent.to(tl.int64), mask=ends)


@triton.jit(do_not_specialize=SIZES)
def rnnt_scan_kernel(
    scan,  # Scan of words
    targets,  # Targets
    T,
    B,
    U1,
    V,
    num_chunks,
    blank,
    target_stride,
    DIRECTIONS: tl.constexpr,  # 1 for α alone
    BLOCK: tl.constexpr,  # rows that are loaded together
    CODE: tl.constexpr,  # the kinds of arcs; see `arc_rows.py`
    PRECISE: tl.constexpr,  # whether the words of arcs have 40 bits of a fraction
    LAYOUT: tl.constexpr,
):
    """Scan α or β of a chunk. α also stores the sum over all paths and flags bad labels."""
    inputs = (scan, targets, target_stride, blank, V, lattice_sizes(T, B, U1, num_chunks))
    scan_program(tl.program_id(0), *inputs, DIRECTIONS, False, BLOCK, CODE, PRECISE, LAYOUT)


rnnt_scan_gluon_kernel = gluon.jit(rnnt_scan_kernel.fn, do_not_specialize=SIZES)
SCAN = LaneKernel(rnnt_scan_kernel, rnnt_scan_gluon_kernel)


@triton.jit
def best_term(scores, own, other, lane, CODE: tl.constexpr):
    """Return the greatest term of a state and the kind of its arc, the first of equals.

    A term is the score of an arc plus the state at its other end. NaN counts as the greatest.
    """
    best, kind = lane.to(tl.float64) * 0.0 - float("inf"), lane * 0
    for i in tl.static_range(num_kinds(CODE)):
        if (CODE >> (8 * i)) & 255:
            term = scores[i] + source_state(own, other, i, CODE)
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
