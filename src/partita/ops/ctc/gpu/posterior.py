"""CTC's second scan: α and β each through the other's half, where posteriors are left."""

import triton
import triton.language as tl
from triton.experimental import gluon

from .state import (
    between,
    classes_of,
    entered,
    offered,
    over_lanes,
    running_sums,
    share_of,
    state_of,
)
from .steps import (
    SIZES,
    advanced,
    awaited,
    edge_at,
    factors_of,
    labels_of,
    lanes,
    place_of,
    rows_ahead,
    sizes_of,
    walk_of,
    words_ahead,
)


@triton.jit
def caught_up(
    blank,
    label,
    label_ptr,
    blank_ptr,
    walk,
    held,
    skips,
    limit,
    past_ptr,
    there,
    p,
    lane,
    FORWARD: tl.constexpr,
):
    """Wide states from those kept before a block of steps to a step in it, in a loop: unrolled, they would be long to compile."""
    for q in range(p // 8 * 8, p):
        rows, blank_row = rows_ahead(label_ptr, blank_ptr, walk, q, lane, FORWARD, 1, 0)
        factors, blank_factors = factors_of(rows, blank_row, held, q, 0, lane, limit, 1, True, 0)[
            :2
        ]
        edges = words_ahead(past_ptr, q, there, lane, 1, True)
        into_blank, into_label = entered(
            blank, label, skips, edge_at(edges, 0, lane, True), lane, FORWARD, True
        )
        blank, label = advanced(into_blank, into_label, factors, blank_factors, 0, lane, True)
    return blank, label


@triton.jit
def kept_ahead(
    label_ptr,
    blank_ptr,
    walk,
    kept_ptr,
    kept_row,
    past_ptr,
    there,
    p,
    lane,
    FORWARD: tl.constexpr,
    SPAN: tl.constexpr,
    WIDE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """What a block is recovered from: factors, the states before it, and what its chunk got across its edge."""
    rows, blank_row = rows_ahead(label_ptr, blank_ptr, walk, p, lane, FORWARD, SPAN, TABLE)
    at = kept_ptr + tl.maximum(p, 0) // 8 * kept_row + lane
    kept = (
        tl.load(at, mask=(lane >= 0) & (p >= 0), other=0),
        tl.load(at + 32, mask=(lane >= 0) & (p >= 0), other=0),
    )
    return rows, blank_row, kept, words_ahead(past_ptr, p, there & (p >= 0), lane, SPAN, WIDE)


@triton.jit
def put_shares(
    posterior_ptr,
    blanks_ptr,
    shares,
    blank_shares,
    order,
    bounds,
    classes,
    p,
    lead,
    lane,
    FORWARD: tl.constexpr,
    SPAN: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Posteriors of a block of steps, by label, or by class; and those of the blanks, a step every 32 / SPAN lanes."""
    sign: tl.constexpr = 1 if FORWARD else -1
    step = p - lead + lane * SPAN // 32
    total = over_lanes(blank_shares, lane).to(blanks_ptr.dtype.element_ty)
    tl.store(blanks_ptr + step * sign, total, mask=(lane % (32 // SPAN) == 0) & (step >= 0))
    row_ptr = posterior_ptr + (p - lead).to(tl.int64) * (sign * WIDTH) + lane
    if GROUPS == 0:
        for u in tl.static_range(SPAN):
            tl.store(
                row_ptr + u * sign * WIDTH,
                shares[u].to(posterior_ptr.dtype.element_ty),
                mask=p + u >= lead,
            )
    else:
        inside = ()
        for u in tl.static_range(SPAN):
            inside = inside + (tl.gather(shares[u], order, 0),)
        sums = running_sums(inside, lane)
        for g in tl.static_range(GROUPS):
            for u in tl.static_range(SPAN):
                real = (p + u >= lead) & (g * 32 + lane < classes)
                tl.store(
                    row_ptr + (u * sign * WIDTH + g * 32),
                    between(sums[u], bounds[g][0], bounds[g][1]),
                    mask=real,
                )


@triton.jit
def recovered(
    label_ptr,
    blank_ptr,
    walk,
    rows,
    blank_row,
    kept,
    past_ptr,
    there,
    held,
    skips,
    limit,
    p,
    lane,
    FORWARD: tl.constexpr,
    SPAN: tl.constexpr,
    WIDE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """A block's factors, and the states before it."""
    factors, blank_factors = factors_of(
        rows, blank_row, held, p, walk[3], lane, limit, SPAN, WIDE, TABLE
    )[:2]
    blank, label = state_of(kept[0], WIDE), state_of(kept[1], WIDE)
    if WIDE:
        blank, label = caught_up(
            blank,
            label,
            label_ptr,
            blank_ptr,
            walk,
            held,
            skips,
            limit,
            past_ptr,
            there,
            tl.maximum(p, 0),
            lane,
            FORWARD,
        )
    return factors, blank_factors, blank, label


@triton.jit
def other_half(
    label_ptr,
    blank_ptr,
    walk,
    order,
    bounds,
    classes,
    held,
    skips,
    limit,
    blank,
    label,
    kept_ptr,
    kept_row,
    past_ptr,
    past_there,
    own_ptr,
    edges_ptr,
    follows,
    there,
    posterior_ptr,
    blanks_ptr,
    exponent,
    lane,
    FORWARD: tl.constexpr,
    SPAN: tl.constexpr,
    WIDE: tl.constexpr,
    TABLE: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A chunk through the half of the other direction, whose states come back block by block from those kept before each: one block ahead, and step
    by step beside its own, for neither chain waits for the other."""
    count, giver, final = (
        walk[2],
        (lane == (31 if FORWARD else 0)) & follows,
        walk[2] + walk[3] - SPAN,
    )
    words = words_ahead(edges_ptr, final, there & (count > 0), lane, SPAN, WIDE)
    rows, blank_row, kept, past = kept_ahead(
        label_ptr,
        blank_ptr,
        walk,
        kept_ptr,
        kept_row,
        past_ptr,
        past_there,
        final,
        lane,
        not FORWARD,
        SPAN,
        WIDE,
        TABLE,
    )
    factors, blank_factors, other_blank, other_label = recovered(
        label_ptr,
        blank_ptr,
        walk,
        rows,
        blank_row,
        kept,
        past_ptr,
        past_there,
        held,
        skips,
        limit,
        final,
        lane,
        not FORWARD,
        SPAN,
        WIDE,
        TABLE,
    )
    every = ()
    for u in tl.static_range(SPAN):
        into_blank, into_label = entered(
            other_blank, other_label, skips, edge_at(past, u, lane, WIDE), lane, not FORWARD, WIDE
        )
        other_blank, other_label = advanced(
            into_blank, into_label, factors, blank_factors, u, lane, WIDE
        )
        every = every + ((other_blank, other_label),)
    rows, blank_row, kept, past = kept_ahead(
        label_ptr,
        blank_ptr,
        walk,
        kept_ptr,
        kept_row,
        past_ptr,
        past_there,
        final - SPAN,
        lane,
        not FORWARD,
        SPAN,
        WIDE,
        TABLE,
    )
    for p in range(final, -1, -SPAN):
        if not WIDE:
            words = awaited(words, edges_ptr, p, there, lane, SPAN, WIDE)
        edges, past_edges = words, past
        next_factors, next_blank_factors, other_blank, other_label = recovered(
            label_ptr,
            blank_ptr,
            walk,
            rows,
            blank_row,
            kept,
            past_ptr,
            past_there,
            held,
            skips,
            limit,
            p - SPAN,
            lane,
            not FORWARD,
            SPAN,
            WIDE,
            TABLE,
        )
        words = words_ahead(edges_ptr, p - SPAN, there & (p > 0), lane, SPAN, WIDE)
        rows, blank_row, kept, past = kept_ahead(
            label_ptr,
            blank_ptr,
            walk,
            kept_ptr,
            kept_row,
            past_ptr,
            past_there,
            p - 2 * SPAN,
            lane,
            not FORWARD,
            SPAN,
            WIDE,
            TABLE,
        )
        next_every, shares, blank_shares = (), (), ()
        for u in tl.static_range(SPAN):
            tl.store(
                own_ptr + p + (SPAN - 1 - u) + lane * 0,
                offered(blank, label, skips, FORWARD, WIDE),
                mask=giver,
            )
            into_blank, into_label = entered(
                blank, label, skips, edge_at(edges, SPAN - 1 - u, lane, WIDE), lane, FORWARD, WIDE
            )
            into_other, into_other_label = entered(
                other_blank,
                other_label,
                skips,
                edge_at(past_edges, u, lane, WIDE),
                lane,
                not FORWARD,
                WIDE,
            )
            shares = (share_of(into_label, every[SPAN - 1 - u][1], exponent, WIDE),) + shares
            blank_shares = (
                share_of(into_blank, every[SPAN - 1 - u][0], exponent, WIDE),
            ) + blank_shares
            blank, label = advanced(
                into_blank, into_label, factors, blank_factors, SPAN - 1 - u, lane, WIDE
            )
            other_blank, other_label = advanced(
                into_other, into_other_label, next_factors, next_blank_factors, u, lane, WIDE
            )
            next_every = next_every + ((other_blank, other_label),)
        put_shares(
            posterior_ptr,
            blanks_ptr,
            shares,
            blank_shares,
            order,
            bounds,
            classes,
            p,
            walk[3],
            lane,
            not FORWARD,
            SPAN,
            GROUPS,
            WIDTH,
        )
        factors, blank_factors, every = next_factors, next_blank_factors, next_every


@triton.jit(do_not_specialize=SIZES)
def ctc_posterior_kernel(
    source_ptr,  # [steps, count, classes], or factors as words, [count, 24 + steps + 24, TABLE]
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    input_lengths_ptr,  # [count]
    target_lengths_ptr,  # [count]
    kept_ptr,  # [2, blocks + 1, count, chunks, 2, 32] int64
    past_ptr,  # [2, chunks, count, reach] int64
    edges_ptr,  # [2, chunks, count, reach] int64, zero
    flags_ptr,  # [count] int64
    logz_ptr,  # [count] fp64
    posterior_ptr,  # [count, chunks, steps, WIDTH], by label, or, GROUPS, by class
    blanks_ptr,  # [count, chunks, steps]
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
    SPAN: tl.constexpr,
    WIDE: tl.constexpr,
    ALL: tl.constexpr,
    TABLE: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """α and β go on through each other's half, and leave the posteriors of labels and blanks, up to a factor in common at each step."""
    place, n, direction = place_of(ticket_ptr, count)
    flags, logz = tl.load(flags_ptr + n), tl.load(logz_ptr + n)
    length, labels, offset = sizes_of(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held
    )[:3]
    middle, last, begin, end = length // 2, labels // 32, place, tl.minimum(place, labels // 32) + 1
    if WIDE:
        end = last + 1
    end = tl.where(
        logz > -float("inf"), tl.where((ALL | (flags == 1)) if WIDE else (flags == 0), end, 0), 0
    )
    exponent = logz
    if not WIDE:
        exponent = tl.floor(tl.where(logz > -float("inf"), logz, 0.0)).to(tl.int32)
    lane = lanes(LAYOUT)
    row, across = (count.to(tl.int64) * chunks) * 64, count.to(tl.int64) * reach
    kept_ptr += n * chunks * 64
    past_ptr += n * reach
    edges_ptr += n * reach
    source_ptr += n * stride_n
    for c in range(begin, end):
        chunk = tl.where(direction == 0, c, last - c)
        chunk_ptr, own_ptr, edge_frame = (
            kept_ptr + chunk * 64,
            edges_ptr + (direction * chunks + chunk) * across,
            tl.maximum(length - 1, 0),
        )
        found, has, skips = labels_of(labels_ptr + offset, chunk * 32, labels, classes, lane)[:3]
        label_ptr, blank_ptr = (
            source_ptr + found.to(tl.int64) * stride_c,
            source_ptr + (n * 0 + blank) * stride_c,
        )
        order, bounds = classes_of(found, has, lane, GROUPS)
        out_blanks_ptr = blanks_ptr + (n * chunks + chunk) * steps
        out_ptr, ends_ptr = (
            posterior_ptr + (n * chunks + chunk) * steps * WIDTH,
            chunk_ptr + (blocks + direction * (blocks + 1)) * row,
        )
        ends_blank, ends_label = (
            state_of(tl.load(ends_ptr + lane), WIDE),
            state_of(tl.load(ends_ptr + 32 + lane), WIDE),
        )
        if direction == 0:
            other_half(
                label_ptr,
                blank_ptr,
                walk_of(edge_frame, length - middle, stride_t, False, SPAN),
                order,
                bounds,
                classes,
                has,
                skips,
                limit,
                ends_blank,
                ends_label,
                chunk_ptr + (blocks + 1) * row,
                row,
                past_ptr + (chunks + chunk + 1) * across,
                chunk < last,
                own_ptr,
                own_ptr - across,
                c < last,
                c > 0,
                out_ptr + edge_frame.to(tl.int64) * WIDTH,
                out_blanks_ptr + edge_frame,
                exponent,
                lane,
                True,
                SPAN,
                WIDE,
                TABLE,
                GROUPS,
                WIDTH,
            )
        else:
            other_half(
                label_ptr,
                blank_ptr,
                walk_of(length * 0, middle, stride_t, True, SPAN),
                order,
                bounds,
                classes,
                has,
                skips,
                limit,
                ends_blank,
                ends_label,
                chunk_ptr,
                row,
                past_ptr + (chunk - 1) * across,
                chunk > 0,
                own_ptr,
                own_ptr + across,
                c < last,
                c > 0,
                out_ptr,
                out_blanks_ptr,
                exponent,
                lane,
                False,
                SPAN,
                WIDE,
                TABLE,
                GROUPS,
                WIDTH,
            )
        if WIDE:
            tl.debug_barrier()


ctc_posterior_gluon_kernel = gluon.jit(ctc_posterior_kernel.fn, do_not_specialize=SIZES)
