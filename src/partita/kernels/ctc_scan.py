"""CTC's scans: α through the first half of the steps and β through the second, then each through the other's half, where posteriors are left.

A program is one warp, with one position of the target a lane; longer targets are cut into chunks, a program each. A chunk waits for what its
neighbour hands over its edge, a block of steps ahead of it, through words in memory that are 0 until they are there. Programs take their places
from a ticket, so a chunk's neighbour always started before it. `WIDE` programs take the chunks of a sequence one after another instead.

Blocks of SPAN steps are whole: a half begins with padding, in which the blank is certain and labels are impossible, which leaves α and β as they
start. The other direction comes to the padding last, when nothing is left to do. A table of factors has rows of zeros before and behind its steps.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .ctc_steps import (
    NOTHING,
    NOTHING_WORD,
    WIDE_NOTHING_WORD,
    at_lane,
    between,
    chosen,
    classes_of,
    entered,
    factor_of,
    offered,
    over_lanes,
    running_sums,
    share_of,
    state,
    state_of,
    times,
    wide_factor_of,
    word_of,
)

EVERY = 8  # steps from one state kept to the next; kernels write the number
# A batch of another size is no reason to compile anew.
SIZES = ["steps", "count", "classes", "held", "most", "chunks", "blocks", "reach", "blank", "stride_t", "stride_n", "stride_c"]


@triton.jit
def lanes(LAYOUT: tl.constexpr):
    """0 to 31, laid out as Triton likes, or as Gluon is told."""
    if LAYOUT is None:
        return tl.arange(0, 32)
    else:
        return gl.arange(0, 32, LAYOUT)


@triton.jit
def place_of(ticket_ptr, count):
    """Chunk (in the direction's order), sequence and direction of this program."""
    place = tl.program_id(0)
    if ticket_ptr is not None:
        place = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    return place // (2 * count), (place // 2 % count).to(tl.int64), place % 2


@triton.jit
def sizes_of(n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held):
    """Steps and labels of a sequence, where its labels start, and whether it is wrong; 0 and 0 if so."""
    length, labels, offset = tl.load(input_lengths_ptr + n), tl.load(target_lengths_ptr + n), tl.load(offsets_ptr + n)
    wrong = (length < 0) | (length > steps) | (labels < 0) | (labels > most) | (offset < 0) | (offset + labels > held)
    return tl.where(wrong, 0, length).to(tl.int32), tl.where(wrong, 0, labels).to(tl.int32), tl.where(wrong, 0, offset), wrong


@triton.jit
def labels_of(labels_ptr, first, labels, classes, lane):
    """Of the positions of a chunk: their labels, which have one, which may be entered from the label before; and whether one is out of range."""
    at = first + lane
    label = tl.load(labels_ptr + at, mask=at < labels, other=0)
    before = tl.load(labels_ptr + at - 1, mask=(at > 0) & (at < labels), other=-1)
    inside = (label >= 0) & (label < classes)
    return tl.where(inside, label, 0), at < labels, (at > 0) & (label != before), ~inside


@triton.jit
def walk_of(frame, count, stride_t, FORWARD: tl.constexpr, SPAN: tl.constexpr):
    """How a half is walked: its first row and the way to the next, its steps and the padding before them."""
    jump = stride_t.to(tl.int64)
    return frame * jump, jump if FORWARD else -jump, count, (SPAN - count % SPAN) % SPAN


@triton.jit
def row_at(walk, p):
    """Offset of the row of a step of a padded half; of padding, and of what lies behind the half, any."""
    start, jump, count, lead = walk
    return start + tl.minimum(tl.maximum(p - lead, 0), tl.maximum(count - 1, 0)) * jump


@triton.jit
def rows_ahead(label_ptr, blank_ptr, walk, p, lane, FORWARD: tl.constexpr, SPAN: tl.constexpr, TABLE: tl.constexpr):
    """Logits, or factors, of the labels for a block of steps; and those of the blank, a step a lane."""
    rows = ()
    if TABLE:
        step: tl.constexpr = TABLE if FORWARD else -TABLE
        at = walk[0] + (p - walk[3]) * step
        for u in tl.static_range(SPAN):
            rows = rows + (tl.load((label_ptr + at) + u * step),)
        return rows, tl.load(blank_ptr + at + lane % SPAN * step)
    else:
        for u in tl.static_range(SPAN):
            rows = rows + (tl.load(label_ptr + row_at(walk, p + u)),)
        return rows, tl.load(blank_ptr + row_at(walk, p + lane % SPAN))


@triton.jit
def factors_of(rows, blank_row, held, p, lead, lane, limit, SPAN: tl.constexpr, WIDE: tl.constexpr, TABLE: tl.constexpr):
    """These as factors, 0 where no label is held; and NaN in the lanes in which one is none."""
    factors, spoilt = (), lane.to(tl.float32) * 0.0
    for u in tl.static_range(SPAN):
        if WIDE:
            factors = factors + ((tl.where(held, wide_factor_of(rows[u])[0], -float("inf")),),)
        else:
            mantissa, exponent = state_of(rows[u], False) if TABLE else factor_of(rows[u], limit)
            real = held if TABLE else held & (p + u >= lead)
            factors, spoilt = factors + ((mantissa, tl.where(real, exponent, NOTHING - 127)),), spoilt + mantissa * 0.0
    if WIDE:
        return factors, wide_factor_of(blank_row), spoilt
    else:
        mantissa, exponent = state_of(blank_row, False) if TABLE else factor_of(blank_row, limit)
        spoilt += mantissa * 0.0
        real = p + lane % SPAN >= lead
        mantissa, exponent = tl.where(real, mantissa, 1.0), tl.where(real, exponent, -127)
        return factors, (mantissa, exponent), spoilt


@triton.jit
def words_ahead(edges_ptr, p, there, lane, SPAN: tl.constexpr, WIDE: tl.constexpr):
    """Words of a block of steps, a step a lane, as far as they are there."""
    nothing = WIDE_NOTHING_WORD if WIDE else NOTHING_WORD
    return tl.load(edges_ptr + p + lane, mask=there & (lane < SPAN), other=nothing, volatile=True)


@triton.jit
def edge_at(words, u, lane, WIDE: tl.constexpr):
    """The state in lane u's word."""
    return state_of(tl.gather(words, lane * 0 + u, 0), WIDE)


@triton.jit
def advanced(into_blank, into_label, factors, blank_factors, u, lane, WIDE: tl.constexpr):
    """States behind a step from what enters them."""
    return times(into_blank, at_lane(blank_factors, lane, u, WIDE), WIDE), times(into_label, factors[u], WIDE)


@triton.jit
def put(kept_ptr, blank, label, lane, WIDE: tl.constexpr):
    """States of a chunk, `[2, 32]`."""
    tl.store(kept_ptr + lane, word_of(blank, WIDE))
    tl.store(kept_ptr + 32 + lane, word_of(label, WIDE))


@triton.jit
def half(
    label_ptr, blank_ptr, walk, held, skips, limit, blank, label, kept_ptr, kept_row, own_ptr, edges_ptr, follows, there, lane,
    FORWARD: tl.constexpr, KEEP: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """A chunk through its direction's half; and NaN in the lanes in which a logit has no factor."""
    count, lead = walk[2], walk[3]
    giver, spoilt = (lane == (31 if FORWARD else 0)) & follows, lane.to(tl.float32) * 0.0
    rows, blank_row = rows_ahead(label_ptr, blank_ptr, walk, 0, lane, FORWARD, SPAN, TABLE)
    words = words_ahead(edges_ptr, 0, there & (count > 0), lane, SPAN, WIDE)
    for p in range(0, count + lead, SPAN):
        if not WIDE:
            while tl.min((words != 0).to(tl.int32), axis=0) == 0:
                words = words_ahead(edges_ptr, p, there, lane, SPAN, WIDE)
        factors, blank_factors, bad = factors_of(rows, blank_row, held, p, lead, lane, limit, SPAN, WIDE, TABLE)
        edges, spoilt = words, spoilt + bad
        rows, blank_row = rows_ahead(label_ptr, blank_ptr, walk, p + SPAN, lane, FORWARD, SPAN, TABLE)
        words = words_ahead(edges_ptr, p + SPAN, there & (p + SPAN < count + lead), lane, SPAN, WIDE)
        if KEEP and p % 8 == 0:
            put(kept_ptr + p // 8 * kept_row, blank, label, lane, WIDE)
        for u in tl.static_range(SPAN):
            tl.store(own_ptr + p + u + lane * 0, offered(blank, label, skips, FORWARD, WIDE), mask=giver)
            into_blank, into_label = entered(blank, label, skips, edge_at(edges, u, lane, WIDE), lane, FORWARD, WIDE)
            blank, label = advanced(into_blank, into_label, factors, blank_factors, u, lane, WIDE)
    return blank, label, spoilt


@triton.jit
def caught_up(blank, label, label_ptr, blank_ptr, walk, held, skips, limit, past_ptr, there, p, lane, FORWARD: tl.constexpr):
    """Wide states from those kept before a block of steps to a step in it, in a loop: unrolled, they would be long to compile."""
    for q in range(p // 8 * 8, p):
        rows, blank_row = rows_ahead(label_ptr, blank_ptr, walk, q, lane, FORWARD, 1, 0)
        factors, blank_factors, bad = factors_of(rows, blank_row, held, q, 0, lane, limit, 1, True, 0)
        edges = words_ahead(past_ptr, q, there, lane, 1, True)
        into_blank, into_label = entered(blank, label, skips, edge_at(edges, 0, lane, True), lane, FORWARD, True)
        blank, label = advanced(into_blank, into_label, factors, blank_factors, 0, lane, True)
    return blank, label


@triton.jit
def kept_ahead(label_ptr, blank_ptr, walk, kept_ptr, kept_row, past_ptr, there, p, lane, FORWARD: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, TABLE: tl.constexpr):
    """What a block is recovered from: factors, the states before it, and what its chunk got across its edge."""
    rows, blank_row = rows_ahead(label_ptr, blank_ptr, walk, p, lane, FORWARD, SPAN, TABLE)
    at = kept_ptr + tl.maximum(p, 0) // 8 * kept_row + lane
    kept = (tl.load(at, mask=(lane >= 0) & (p >= 0), other=0), tl.load(at + 32, mask=(lane >= 0) & (p >= 0), other=0))
    return rows, blank_row, kept, words_ahead(past_ptr, p, there & (p >= 0), lane, SPAN, WIDE)


@triton.jit
def put_shares(
    posterior_ptr, blanks_ptr, shares, blank_shares, order, bounds, classes, p, lead, lane,
    FORWARD: tl.constexpr, SPAN: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Posteriors of a block of steps, by label, or by class; and those of the blanks, a step every 32 / SPAN lanes."""
    sign: tl.constexpr = 1 if FORWARD else -1
    step = p - lead + lane * SPAN // 32
    total = over_lanes(blank_shares, lane).to(blanks_ptr.dtype.element_ty)
    tl.store(blanks_ptr + step * sign, total, mask=(lane % (32 // SPAN) == 0) & (step >= 0))
    row_ptr = posterior_ptr + (p - lead).to(tl.int64) * (sign * WIDTH) + lane
    if GROUPS == 0:
        for u in tl.static_range(SPAN):
            tl.store(row_ptr + u * sign * WIDTH, shares[u].to(posterior_ptr.dtype.element_ty), mask=p + u >= lead)
    else:
        inside = ()
        for u in tl.static_range(SPAN):
            inside = inside + (tl.gather(shares[u], order, 0),)
        sums = running_sums(inside, lane)
        for g in tl.static_range(GROUPS):
            for u in tl.static_range(SPAN):
                real = (p + u >= lead) & (g * 32 + lane < classes)
                tl.store(row_ptr + (u * sign * WIDTH + g * 32), between(sums[u], bounds[g][0], bounds[g][1]), mask=real)


@triton.jit
def recovered(
    label_ptr, blank_ptr, walk, rows, blank_row, kept, past_ptr, there, held, skips, limit, p, lane,
    FORWARD: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """A block's factors, and the states before it."""
    factors, blank_factors, bad = factors_of(rows, blank_row, held, p, walk[3], lane, limit, SPAN, WIDE, TABLE)
    blank, label = state_of(kept[0], WIDE), state_of(kept[1], WIDE)
    if WIDE:
        blank, label = caught_up(blank, label, label_ptr, blank_ptr, walk, held, skips, limit, past_ptr, there, tl.maximum(p, 0), lane, FORWARD)
    return factors, blank_factors, blank, label


@triton.jit
def other_half(
    label_ptr, blank_ptr, walk, order, bounds, classes, held, skips, limit, blank, label, kept_ptr, kept_row, past_ptr, past_there, own_ptr, edges_ptr,
    follows, there, posterior_ptr, blanks_ptr, exponent, lane,
    FORWARD: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, TABLE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A chunk through the half of the other direction, whose states come back block by block from those kept before each: one block ahead, and step
    by step beside its own, for neither chain waits for the other."""
    count, giver, final = walk[2], (lane == (31 if FORWARD else 0)) & follows, walk[2] + walk[3] - SPAN
    words = words_ahead(edges_ptr, final, there & (count > 0), lane, SPAN, WIDE)
    rows, blank_row, kept, past = kept_ahead(label_ptr, blank_ptr, walk, kept_ptr, kept_row, past_ptr, past_there, final, lane, not FORWARD, SPAN, WIDE, TABLE)
    factors, blank_factors, other_blank, other_label = recovered(
        label_ptr, blank_ptr, walk, rows, blank_row, kept, past_ptr, past_there, held, skips, limit, final, lane, not FORWARD, SPAN, WIDE, TABLE
    )
    every = ()
    for u in tl.static_range(SPAN):
        into_blank, into_label = entered(other_blank, other_label, skips, edge_at(past, u, lane, WIDE), lane, not FORWARD, WIDE)
        other_blank, other_label = advanced(into_blank, into_label, factors, blank_factors, u, lane, WIDE)
        every = every + ((other_blank, other_label),)
    rows, blank_row, kept, past = kept_ahead(
        label_ptr, blank_ptr, walk, kept_ptr, kept_row, past_ptr, past_there, final - SPAN, lane, not FORWARD, SPAN, WIDE, TABLE
    )  # fmt: skip
    for p in range(final, -1, -SPAN):
        if not WIDE:
            while tl.min((words != 0).to(tl.int32), axis=0) == 0:
                words = words_ahead(edges_ptr, p, there, lane, SPAN, WIDE)
        edges, past_edges = words, past
        next_factors, next_blank_factors, other_blank, other_label = recovered(
            label_ptr, blank_ptr, walk, rows, blank_row, kept, past_ptr, past_there, held, skips, limit, p - SPAN, lane, not FORWARD, SPAN, WIDE, TABLE
        )
        words = words_ahead(edges_ptr, p - SPAN, there & (p > 0), lane, SPAN, WIDE)
        rows, blank_row, kept, past = kept_ahead(
            label_ptr, blank_ptr, walk, kept_ptr, kept_row, past_ptr, past_there, p - 2 * SPAN, lane, not FORWARD, SPAN, WIDE, TABLE
        )  # fmt: skip
        next_every, shares, blank_shares = (), (), ()
        for u in tl.static_range(SPAN):
            tl.store(own_ptr + p + (SPAN - 1 - u) + lane * 0, offered(blank, label, skips, FORWARD, WIDE), mask=giver)
            into_blank, into_label = entered(blank, label, skips, edge_at(edges, SPAN - 1 - u, lane, WIDE), lane, FORWARD, WIDE)
            into_other, into_other_label = entered(other_blank, other_label, skips, edge_at(past_edges, u, lane, WIDE), lane, not FORWARD, WIDE)
            there_states = every[SPAN - 1 - u]
            shares = (share_of(into_label, there_states[1], exponent, WIDE),) + shares
            blank_shares = (share_of(into_blank, there_states[0], exponent, WIDE),) + blank_shares
            blank, label = advanced(into_blank, into_label, factors, blank_factors, SPAN - 1 - u, lane, WIDE)
            other_blank, other_label = advanced(into_other, into_other_label, next_factors, next_blank_factors, u, lane, WIDE)
            next_every = next_every + ((other_blank, other_label),)
        put_shares(
            posterior_ptr, blanks_ptr, shares, blank_shares, order, bounds, classes, p, walk[3], lane, not FORWARD, SPAN, GROUPS, WIDTH
        )  # fmt: skip
        factors, blank_factors, every = next_factors, next_blank_factors, next_every


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
    length, labels, offset, wrong = sizes_of(n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held)
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
        chunk_ptr, own_ptr, nothing = kept_ptr + chunk * 64, edges_ptr + chunk * across, state(0, lane, WIDE)
        found, has, skips, bad = labels_of(labels_ptr + offset, chunk * 32, labels, classes, lane)
        label_ptr, blank_ptr = source_ptr + found * stride_c, source_ptr + blank * stride_c
        start = chosen(chunk * 32 + lane == tl.where(direction == 0, 0, labels), state(1, lane, WIDE), nothing, WIDE)
        if direction == 0:
            ends_blank, ends_label, spoilt = half(
                label_ptr, blank_ptr, walk_of(length * 0, middle, stride_t, True, SPAN), has, skips, limit, start, nothing, chunk_ptr, row,
                own_ptr, own_ptr - across, c < last, c > 0, lane, True, KEEP, SPAN, WIDE, TABLE,
            )  # fmt: skip
        else:
            ends_blank, ends_label, spoilt = half(
                label_ptr, blank_ptr, walk_of(tl.maximum(length - 1, 0), length - middle, stride_t, False, SPAN), has, skips, limit, start, nothing,
                chunk_ptr, row, own_ptr, own_ptr + across, c < last, c > 0, lane, False, KEEP, SPAN, WIDE, TABLE,
            )  # fmt: skip
        put(chunk_ptr + blocks * row, ends_blank, ends_label, lane, WIDE)
        found_bad = tl.max(tl.where(spoilt == spoilt, 0, 1) | tl.where(bad, 2, 0), axis=0)
        if found_bad > 0:
            tl.atomic_or(flags_ptr + n, found_bad, sem="relaxed")
        if WIDE:
            tl.debug_barrier()


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
    length, labels, offset, wrong = sizes_of(n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held)
    middle, last, begin, end = length // 2, labels // 32, place, tl.minimum(place, labels // 32) + 1
    if WIDE:
        end = last + 1
    end = tl.where(logz > -float("inf"), tl.where((ALL | (flags == 1)) if WIDE else (flags == 0), end, 0), 0)
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
        chunk_ptr, own_ptr, edge_frame = kept_ptr + chunk * 64, edges_ptr + (direction * chunks + chunk) * across, tl.maximum(length - 1, 0)
        found, has, skips, bad = labels_of(labels_ptr + offset, chunk * 32, labels, classes, lane)
        label_ptr, blank_ptr = source_ptr + found * stride_c, source_ptr + blank * stride_c
        order, bounds = classes_of(found, has, lane, GROUPS)
        out_blanks_ptr = blanks_ptr + (n * chunks + chunk) * steps
        out_ptr, ends_ptr = posterior_ptr + (n * chunks + chunk) * steps * WIDTH, chunk_ptr + (blocks + direction * (blocks + 1)) * row
        ends_blank, ends_label = state_of(tl.load(ends_ptr + lane), WIDE), state_of(tl.load(ends_ptr + 32 + lane), WIDE)
        if direction == 0:
            other_half(
                label_ptr, blank_ptr, walk_of(edge_frame, length - middle, stride_t, False, SPAN), order, bounds, classes, has, skips, limit,
                ends_blank, ends_label, chunk_ptr + (blocks + 1) * row, row, past_ptr + (chunks + chunk + 1) * across, chunk < last, own_ptr, own_ptr - across,
                c < last, c > 0, out_ptr + edge_frame.to(tl.int64) * WIDTH, out_blanks_ptr + edge_frame, exponent, lane, True, SPAN, WIDE, TABLE, GROUPS, WIDTH,
            )  # fmt: skip
        else:
            other_half(
                label_ptr, blank_ptr, walk_of(length * 0, middle, stride_t, True, SPAN), order, bounds, classes, has, skips, limit,
                ends_blank, ends_label, chunk_ptr, row, past_ptr + (chunk - 1) * across, chunk > 0, own_ptr, own_ptr + across,
                c < last, c > 0, out_ptr, out_blanks_ptr, exponent, lane, False, SPAN, WIDE, TABLE, GROUPS, WIDTH,
            )  # fmt: skip
        if WIDE:
            tl.debug_barrier()


# Triton's pass that rearranges memory accesses takes minutes for these kernels, for nothing: Gluon has none. The interpreter and AMD know Triton's alone.
ctc_halves_gluon_kernel = gluon.jit(ctc_halves_kernel.fn, do_not_specialize=SIZES)
ctc_posterior_gluon_kernel = gluon.jit(ctc_posterior_kernel.fn, do_not_specialize=SIZES)
LANES = gl.BlockedLayout([1], [32], [1], [0])
