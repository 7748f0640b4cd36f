"""The best alignment of CTC's targets: a scan in fp64 that leaves pointers, and the way back through them."""

import triton
import triton.language as tl
from triton.experimental import gluon

from ....primitives.gpu.math import log_exact
from .state import chosen, neighbour, state, word_of
from .steps import (
    SIZES,
    awaited,
    edge_at,
    labels_of,
    lanes,
    rows_ahead,
    sizes_of,
    turn_of,
    walk_of,
    words_ahead,
)


@triton.jit
def better(most, slot, other, number):
    """The greater of two scores, and which it is; of equals the first."""
    more = other > most
    return tl.where(more, other, most), tl.where(more, number, slot)


@triton.jit(do_not_specialize=SIZES)
def ctc_best_kernel(
    logits_ptr,  # [steps, count, classes]
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    input_lengths_ptr,  # [count]
    target_lengths_ptr,  # [count]
    pointers_ptr,  # [count, chunks, blocks, 32] int32: of 8 steps, 2 bits for the blank and 2 for the label
    ends_ptr,  # [count, 2] fp64
    edges_ptr,  # [chunks, count, blocks * 8] int64, zero
    flags_ptr,  # [count] int64, zero
    ticket_ptr,  # [1] int64, zero, or None
    steps,
    count,
    classes,
    held,
    most,
    chunks,
    blocks,
    reach,
    blank,
    stride_t,
    stride_n,
    stride_c,
    SPAN: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """A chunk of a target through all steps: by how many states each came, 0, 1 or 2, and the scores of the last blank and label."""
    place = turn_of(ticket_ptr)
    chunk, n, lane = place // count, (place % count).to(tl.int64), lanes(LAYOUT)
    length, labels, offset, wrong = sizes_of(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held
    )
    found, has, skips, bad = labels_of(labels_ptr + offset, chunk * 32, labels, classes, lane)
    wrong = wrong | (tl.max(bad.to(tl.int32), axis=0) > 0)
    if wrong:
        tl.atomic_or(flags_ptr + n, 2, sem="relaxed")
    last, walk, padded = (
        labels // 32,
        walk_of(length * 0, length, stride_t, True, SPAN),
        tl.where(chunk > labels // 32, 0, length),
    )
    own_ptr = edges_ptr + (chunk * count.to(tl.int64) + n) * reach
    left_ptr, there = own_ptr - count.to(tl.int64) * reach, (chunk > 0) & (padded > 0)
    giver = (lane == 31) & (chunk < last)
    pointers_ptr += (n * chunks + chunk) * blocks * 32 + lane
    logits_ptr += n * stride_n
    label_ptr, blank_ptr = (
        logits_ptr + found.to(tl.int64) * stride_c,
        logits_ptr + (n * 0 + blank) * stride_c,
    )
    blank_score, score = (
        chosen(chunk * 32 + lane == 0, state(1, lane, True), state(0, lane, True), True)[0],
        state(0, lane, True)[0],
    )
    rows, blank_row = rows_ahead(label_ptr, blank_ptr, walk, 0, lane, True, SPAN, 0)
    words = words_ahead(left_ptr, 0, there, lane, SPAN, True)
    for p in range(0, tl.where(padded > 0, padded + walk[3], 0), SPAN):
        words = awaited(words, left_ptr, p, there, lane, SPAN, True)
        edges, blanks, pointers = (
            words,
            tl.where(p + lane % SPAN >= walk[3], blank_row, 0.0).to(tl.float64),
            lane * 0,
        )
        values = ()
        for u in tl.static_range(SPAN):
            values = values + (
                tl.where(has & (p + u >= walk[3]), rows[u].to(tl.float64), -float("inf")),
            )
        rows, blank_row = rows_ahead(label_ptr, blank_ptr, walk, p + SPAN, lane, True, SPAN, 0)
        words = words_ahead(
            left_ptr, p + SPAN, there & (p + SPAN < padded + walk[3]), lane, SPAN, True
        )
        for u in tl.static_range(SPAN):
            tl.store(own_ptr + p + u + lane * 0, word_of((score,), True), mask=giver)
            before = neighbour((score,), edge_at(edges, u, lane, True), lane, -1, True)[0]
            into_blank, blank_slot = better(blank_score, lane * 0, before, 1)
            into_label, slot = better(score, lane * 0, blank_score, 1)
            into_label, slot = better(into_label, slot, tl.where(skips, before, -float("inf")), 2)
            pointers = pointers | ((blank_slot | (slot << 2)) << (4 * u))
            blank_score, score = (
                into_blank + tl.gather(blanks, lane * 0 + u, 0),
                into_label + values[u],
            )
        tl.store(pointers_ptr + p // SPAN * 32, pointers)
    at = chunk * 32 + lane
    tl.store(ends_ptr + n * 2 + lane * 0, blank_score, mask=at == labels)
    tl.store(ends_ptr + n * 2 + 1 + lane * 0, score, mask=(at == labels - 1) & (labels > 0))


@triton.jit
def pointers_at(pointers_ptr, block, position, pitch, lane):
    """Pointers of a block of steps for a position and those before it, one a lane."""
    at = position - lane
    return tl.load(
        pointers_ptr + (at // 32).to(tl.int64) * pitch + block * 32 + at % 32,
        mask=(at >= 0) & (block >= 0),
        other=0,
    )


@triton.jit(do_not_specialize=["steps", "count", "held", "most", "chunks", "blocks"])
def ctc_trace_kernel(
    offsets_ptr,  # [count]
    input_lengths_ptr,  # [count]
    target_lengths_ptr,  # [count]
    pointers_ptr,  # [count, chunks, blocks, 32] int32
    ends_ptr,  # [count, 2] fp64
    flags_ptr,  # [count] int64
    states_ptr,  # [count, steps] int32
    steps,
    count,
    held,
    most,
    chunks,
    blocks,
    LAYOUT: tl.constexpr,
):
    """The state of each step: twice its position, and 1 more on the label; -1 for none. The pointers of 32 steps are read at once, for all the
    positions that these may come to."""
    n, lane = tl.program_id(0).to(tl.int64), lanes(LAYOUT)
    length, labels = sizes_of(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held
    )[:2]
    first, second = (
        tl.load(ends_ptr + 2 * n),
        tl.where(labels > 0, tl.load(ends_ptr + 2 * n + 1), -float("inf")),
    )
    there = tl.where(
        tl.load(flags_ptr + n) == 0,
        tl.where(first > -float("inf"), 1, tl.where(second > -float("inf"), 1, 0)),
        0,
    )
    pitch, lead = blocks.to(tl.int64) * 32, (8 - length % 8) % 8
    pointers_ptr += n * chunks * pitch
    states_ptr += n * steps
    for t in range(0, tl.where(there > 0, 0, length), 32):
        tl.store(states_ptr + t + lane, lane * 0 - 1, mask=t + lane < length)
    for t in range(length, steps, 32):
        tl.store(states_ptr + t + lane, lane * 0 - 1, mask=t + lane < steps)
    position, on_label = (
        tl.where(second >= first, labels - 1, labels) + lane * 0,
        tl.where(second >= first, 1, 0) + lane * 0,
    )
    last = tl.where(there > 0, (length + lead) // 8, 0) - 1
    for block in range(last, -1, -4):
        base, states, words = position, lane * 0, ()
        for b in tl.static_range(4):
            words = words + (pointers_at(pointers_ptr, block - b, position, pitch, lane),)
        for v in tl.static_range(32):
            states = tl.where(lane == v, 2 * position + on_label, states)
            word = tl.gather(words[v // 8], base - position, 0) >> (4 * (7 - v % 8))
            slot = tl.where(on_label == 1, word >> 2, word) & 3
            position -= tl.where(slot == 2 - (on_label == 0).to(tl.int32), 1, 0)
            on_label = tl.where(slot == 1, 1 - on_label, on_label)
        step = block * 8 + 7 - lane - lead
        tl.store(states_ptr + step, states, mask=step >= 0)


@triton.jit(do_not_specialize=["steps", "count", "blank", "stride_t", "stride_n"])
def ctc_spell_kernel(
    logits_ptr,  # [steps, count, classes]
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    maxima_ptr,  # [steps, count] or None
    sums_ptr,  # [steps, count] or None
    flags_ptr,  # [count] int64
    states_ptr,  # [count, steps] int32
    found_ptr,  # [count, steps] int64
    tokens_ptr,  # [count, steps] int64
    scores_ptr,  # [count, steps] fp64
    steps,
    count,
    blank,
    stride_t,
    stride_n,
    stride_c,
    BLOCK_T: tl.constexpr,
):
    """The label of each step, its place in the target, and its log-probability, from the states."""
    n = (tl.program_id(0) % count).to(tl.int64)
    t = (tl.program_id(0) // count).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < steps
    state = tl.load(states_ptr + n * steps + t, mask=inside, other=-1)
    there, token = state >= 0, tl.where(state % 2 == 1, state // 2, -1)
    label = tl.load(
        labels_ptr + tl.load(offsets_ptr + n) + token, mask=there & (token >= 0), other=blank
    ).to(tl.int64)
    score = tl.load(
        logits_ptr + t * stride_t + n * stride_n + label * stride_c, mask=there, other=0.0
    ).to(tl.float64)
    if maxima_ptr is not None:
        maximum, total = (
            tl.load(maxima_ptr + t * count + n, mask=there, other=0.0),
            tl.load(sums_ptr + t * count + n, mask=there, other=1.0),
        )
        score = (score - maximum.to(tl.float64)) - log_exact(total).to(tl.float64)
    wrong = tl.where(tl.load(flags_ptr + n) >= 2, float("nan"), 0.0).to(tl.float64)
    tl.store(found_ptr + n * steps + t, tl.where(there, label, -1), mask=inside)
    tl.store(tokens_ptr + n * steps + t, tl.where(there, token, -1).to(tl.int64), mask=inside)
    tl.store(scores_ptr + n * steps + t, tl.where(there, score, 0.0) + wrong, mask=inside)


ctc_best_gluon_kernel = gluon.jit(ctc_best_kernel.fn, do_not_specialize=SIZES)
ctc_trace_gluon_kernel = gluon.jit(
    ctc_trace_kernel.fn, do_not_specialize=["steps", "count", "held", "most", "chunks", "blocks"]
)
