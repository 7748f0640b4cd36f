"""CTC's first scan: α through the first half of the steps and β through the second."""

import triton
import triton.language as tl
from triton.experimental import gluon

from .state import chosen, entered, offered, state
from .steps import (
    SIZES,
    advanced,
    awaited,
    edge_at,
    factors_of,
    labels_of,
    lanes,
    place_of,
    put,
    rows_ahead,
    sizes_of,
    walk_of,
    words_ahead,
)


@triton.jit
def half(
    label_ptr,
    blank_ptr,
    walk,
    held,
    skips,
    limit,
    blank,
    label,
    kept_ptr,
    kept_row,
    own_ptr,
    edges_ptr,
    follows,
    there,
    lane,
    FORWARD: tl.constexpr,
    KEEP: tl.constexpr,
    SPAN: tl.constexpr,
    WIDE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """A chunk through its direction's half; and NaN in the lanes in which a logit has no factor."""
    count, lead = walk[2], walk[3]
    giver, spoilt = (lane == (31 if FORWARD else 0)) & follows, lane.to(tl.float32) * 0.0
    rows, blank_row = rows_ahead(label_ptr, blank_ptr, walk, 0, lane, FORWARD, SPAN, TABLE)
    words = words_ahead(edges_ptr, 0, there & (count > 0), lane, SPAN, WIDE)
    for p in range(0, count + lead, SPAN):
        if not WIDE:
            words = awaited(words, edges_ptr, p, there, lane, SPAN, WIDE)
        factors, blank_factors, bad = factors_of(
            rows, blank_row, held, p, lead, lane, limit, SPAN, WIDE, TABLE
        )
        edges, spoilt = words, spoilt + bad
        rows, blank_row = rows_ahead(
            label_ptr, blank_ptr, walk, p + SPAN, lane, FORWARD, SPAN, TABLE
        )
        words = words_ahead(
            edges_ptr, p + SPAN, there & (p + SPAN < count + lead), lane, SPAN, WIDE
        )
        if KEEP and p % 8 == 0:
            put(kept_ptr + p // 8 * kept_row, blank, label, lane, WIDE)
        for u in tl.static_range(SPAN):
            tl.store(
                own_ptr + p + u + lane * 0, offered(blank, label, skips, FORWARD, WIDE), mask=giver
            )
            into_blank, into_label = entered(
                blank, label, skips, edge_at(edges, u, lane, WIDE), lane, FORWARD, WIDE
            )
            blank, label = advanced(into_blank, into_label, factors, blank_factors, u, lane, WIDE)
    return blank, label, spoilt


@triton.jit(do_not_specialize=SIZES)
def ctc_halves_kernel(
    source_ptr,  # [steps, count, classes], or factors as words, [count, 24 + steps + 24, TABLE]
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    input_lengths_ptr,  # [count]
    target_lengths_ptr,  # [count]
    kept_ptr,  # [2, blocks + 1, count, chunks, 2, 32] int64
    edges_ptr,  # [2, chunks, count, reach] int64, zero
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
    limit,
    stride_t,
    stride_n,
    stride_c,
    KEEP: tl.constexpr,
    SPAN: tl.constexpr,
    WIDE: tl.constexpr,
    ALL: tl.constexpr,
    TABLE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """α up to the middle and β down to it: the states before each block of steps (KEEP), and those at the middle in the place behind them."""
    place, n, direction = place_of(ticket_ptr, count)
    flags = tl.load(flags_ptr + n)
    length, labels, offset, wrong = sizes_of(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held
    )
    if wrong:
        tl.atomic_or(flags_ptr + n, 2, sem="relaxed")
    middle, last, begin, end = length // 2, labels // 32, place, place + 1
    if WIDE:
        end = tl.where(ALL | (flags == 1), last + 1, 0)
    lane = lanes(LAYOUT)
    row, across = (count.to(tl.int64) * chunks) * 64, count.to(tl.int64) * reach
    kept_ptr += (direction * (blocks + 1)) * row + n * chunks * 64
    edges_ptr += direction * chunks * across + n * reach
    source_ptr += n * stride_n
    for c in range(begin, tl.minimum(end, last + 1)):
        chunk = tl.where(direction == 0, c, last - c)
        chunk_ptr, own_ptr, nothing = (
            kept_ptr + chunk * 64,
            edges_ptr + chunk * across,
            state(0, lane, WIDE),
        )
        found, has, skips, bad = labels_of(labels_ptr + offset, chunk * 32, labels, classes, lane)
        label_ptr, blank_ptr = (
            source_ptr + found.to(tl.int64) * stride_c,
            source_ptr + (n * 0 + blank) * stride_c,
        )
        start = chosen(
            chunk * 32 + lane == tl.where(direction == 0, 0, labels),
            state(1, lane, WIDE),
            nothing,
            WIDE,
        )
        if direction == 0:
            ends_blank, ends_label, spoilt = half(
                label_ptr,
                blank_ptr,
                walk_of(length * 0, middle, stride_t, True, SPAN),
                has,
                skips,
                limit,
                start,
                nothing,
                chunk_ptr,
                row,
                own_ptr,
                own_ptr - across,
                c < last,
                c > 0,
                lane,
                True,
                KEEP,
                SPAN,
                WIDE,
                TABLE,
            )
        else:
            ends_blank, ends_label, spoilt = half(
                label_ptr,
                blank_ptr,
                walk_of(tl.maximum(length - 1, 0), length - middle, stride_t, False, SPAN),
                has,
                skips,
                limit,
                start,
                nothing,
                chunk_ptr,
                row,
                own_ptr,
                own_ptr + across,
                c < last,
                c > 0,
                lane,
                False,
                KEEP,
                SPAN,
                WIDE,
                TABLE,
            )
        put(chunk_ptr + blocks * row, ends_blank, ends_label, lane, WIDE)
        found_bad = tl.max(tl.where(spoilt == spoilt, 0, 1) | tl.where(bad, 2, 0), axis=0)
        if found_bad > 0:
            tl.atomic_or(flags_ptr + n, found_bad, sem="relaxed")
        if WIDE:
            tl.debug_barrier()


ctc_halves_gluon_kernel = gluon.jit(ctc_halves_kernel.fn, do_not_specialize=SIZES)
