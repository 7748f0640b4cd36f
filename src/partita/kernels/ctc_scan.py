"""CTC's scans: α through the first half of the steps and β through the second, then each through the other's half, where posteriors are left.

A program is one warp, with PARTS positions of the target a lane; longer targets are cut into chunks, a program each. A chunk waits for what its
neighbour hands over its edge, a block of steps ahead of it, through words in memory that are 0 until they are there. Programs take their places
from a ticket, so a chunk's neighbour always started before it. `WIDE` programs take the chunks of a sequence one after another instead.

Blocks of SPAN steps are whole: a half begins with padding, in which the blank is certain and labels are impossible, which leaves α and β as they
start. The other direction comes to the padding last, when nothing is left to do. A table of factors has such rows before and behind its steps.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .ctc_steps import (
    NOTHING,
    at_lane,
    chosen,
    entered,
    factor_of,
    offered,
    over_lanes,
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
def labels_of(labels_ptr, first, labels, classes, stride_c, lane, PARTS: tl.constexpr, TABLE: tl.constexpr):
    """Of the positions of each lane: where their labels stand in a row, which have one, which may be entered from the label before; and whether
    one is out of range. A table has a factor of 0 behind its classes, for positions without a label."""
    found, held, skips, wrong = (), (), (), lane < 0
    for k in tl.static_range(PARTS):
        at = first + lane * PARTS + k
        label = tl.load(labels_ptr + at, mask=at < labels, other=0)
        before = tl.load(labels_ptr + at - 1, mask=(at > 0) & (at < labels), other=-1)
        inside = (label >= 0) & (label < classes)
        label = tl.where(inside, label, 0)
        found = found + (tl.where(at < labels, label, classes if TABLE else 0) * stride_c,)
        held, skips, wrong = held + (at < labels,), skips + ((at > 0) & (label != before),), wrong | ~inside
    return found, held, skips, wrong


@triton.jit
def row_at(walk, p):
    """Offset of the row of a step of a padded half; of padding, and of what lies behind the half, any."""
    start, jump, count, lead = walk
    return start + tl.minimum(tl.maximum(p - lead, 0), tl.maximum(count - 1, 0)) * jump


@triton.jit
def rows_ahead(
    source_ptr, walk, found, blank_at, p, lane, FORWARD: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, TABLE: tl.constexpr
):  # fmt: skip
    """Logits, or factors, of the labels for a block of steps, step by step, and of the blank, a step a lane."""
    rows = ()
    if TABLE:
        step: tl.constexpr = TABLE if FORWARD else -TABLE
        row_ptr = source_ptr + walk[0] + (p - walk[3]) * step
        for u in tl.static_range(SPAN):
            for k in tl.static_range(PARTS):
                rows = rows + (tl.load((row_ptr + found[k]) + u * step),)
        return rows, tl.load((row_ptr + blank_at) + lane % SPAN * step)
    else:
        for u in tl.static_range(SPAN):
            row_ptr = source_ptr + row_at(walk, p + u)
            for k in tl.static_range(PARTS):
                rows = rows + (tl.load(row_ptr + found[k]),)
        return rows, tl.load(source_ptr + row_at(walk, p + lane % SPAN) + blank_at)


@triton.jit
def factors_of(rows, blank_row, held, p, lead, lane, limit, PARTS: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, TABLE: tl.constexpr):
    """These as factors, and NaN in the lanes in which one is none."""
    factors, spoilt = (), lane.to(tl.float32) * 0.0
    for i in tl.static_range(SPAN * PARTS):
        if TABLE:
            factor = state_of(rows[i], False)
        elif WIDE:
            factor = (tl.where(held[i % PARTS], wide_factor_of(rows[i])[0], -float("inf")),)
        else:
            mantissa, exponent = factor_of(rows[i], limit)
            factor = (mantissa, tl.where(held[i % PARTS] & (p + i // PARTS >= lead), exponent, NOTHING - 127))
        if not WIDE:
            spoilt += factor[0] * 0.0
        factors = factors + (factor,)
    if TABLE:
        return factors, state_of(blank_row, False), spoilt + state_of(blank_row, False)[0] * 0.0
    elif WIDE:
        return factors, wide_factor_of(blank_row), spoilt
    else:
        mantissa, exponent = factor_of(blank_row, limit)
        real = p + lane % SPAN >= lead
        return factors, (tl.where(real, mantissa, 1.0), tl.where(real, exponent, -127)), spoilt + mantissa * 0.0


@triton.jit
def words_ahead(edges_ptr, p, there, lane, nothing, SPAN: tl.constexpr):
    """Words of a block of steps, a step a lane, as far as they are there."""
    return tl.load(edges_ptr + p + lane, mask=there & (lane < SPAN), other=nothing, volatile=True)


@triton.jit
def advanced(into_blanks, into_states, factors, blank_factors, u, lane, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """States behind a step from what enters them."""
    blank_factor = at_lane(blank_factors, lane, u, WIDE)
    blanks, states = (), ()
    for k in tl.static_range(PARTS):
        blanks = blanks + (times(into_blanks[k], blank_factor, WIDE),)
        states = states + (times(into_states[k], factors[u * PARTS + k], WIDE),)
    return blanks, states


@triton.jit
def put(kept_ptr, blanks, labels, lane, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """States of a chunk, `[2, PARTS, 32]`."""
    for k in tl.static_range(PARTS):
        tl.store(kept_ptr + k * 32 + lane, word_of(blanks[k], WIDE))
        tl.store(kept_ptr + (PARTS + k) * 32 + lane, word_of(labels[k], WIDE))


@triton.jit
def words_of(kept_ptr, lane, mask, PARTS: tl.constexpr):
    """These as words; 0 where they are masked."""
    words = ()
    for k in tl.static_range(2 * PARTS):
        words = words + (tl.load(kept_ptr + k * 32 + lane, mask=mask, other=0),)
    return words


@triton.jit
def states_of(words, PARTS: tl.constexpr, WIDE: tl.constexpr):
    blanks, labels = (), ()
    for k in tl.static_range(PARTS):
        blanks, labels = blanks + (state_of(words[k], WIDE),), labels + (state_of(words[PARTS + k], WIDE),)
    return blanks, labels


@triton.jit
def start_of(first, labels, lane, FORWARD: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """States before any step: α stands on the first blank, β on the last."""
    blanks, states = (), ()
    for k in tl.static_range(PARTS):
        alone = first + lane * PARTS + k == (0 if FORWARD else labels)
        blanks = blanks + (chosen(alone, state(1, lane, WIDE), state(0, lane, WIDE), WIDE),)
        states = states + (state(0, lane, WIDE),)
    return blanks, states


@triton.jit
def half(
    source_ptr, walk, found, held, skips, blank_at, limit, blanks, states, kept_ptr, kept_row, own_ptr, edges_ptr, follows, there, lane,
    FORWARD: tl.constexpr, KEEP: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """A chunk through its direction's half; and NaN in the lanes in which a logit has no factor."""
    count, lead = walk[2], walk[3]
    nothing = word_of(state(0, lane, WIDE), WIDE)
    giver, spoilt = (lane == (31 if FORWARD else 0)) & follows, lane.to(tl.float32) * 0.0
    rows, blank_row = rows_ahead(source_ptr, walk, found, blank_at, 0, lane, FORWARD, PARTS, SPAN, TABLE)
    words = words_ahead(edges_ptr, 0, there & (count > 0), lane, nothing, SPAN)
    for p in range(0, count + lead, SPAN):
        if not WIDE:
            while tl.min((words != 0).to(tl.int32), axis=0) == 0:
                words = words_ahead(edges_ptr, p, there, lane, nothing, SPAN)
        factors, blank_factors, bad = factors_of(rows, blank_row, held, p, lead, lane, limit, PARTS, SPAN, WIDE, TABLE)
        edges, spoilt = words, spoilt + bad
        rows, blank_row = rows_ahead(source_ptr, walk, found, blank_at, p + SPAN, lane, FORWARD, PARTS, SPAN, TABLE)
        words = words_ahead(edges_ptr, p + SPAN, there & (p + SPAN < count + lead), lane, nothing, SPAN)
        if KEEP and p % 8 == 0:
            put(kept_ptr + p // 8 * kept_row, blanks, states, lane, PARTS, WIDE)
        for u in tl.static_range(SPAN):
            tl.store(own_ptr + p + u + lane * 0, offered(blanks, states, skips, FORWARD, PARTS, WIDE), mask=giver)
            edge = state_of(tl.gather(edges, lane * 0 + u, 0), WIDE)
            into_blanks, into_states = entered(blanks, states, skips, edge, lane, FORWARD, PARTS, WIDE)
            blanks, states = advanced(into_blanks, into_states, factors, blank_factors, u, lane, PARTS, WIDE)
    return blanks, states, spoilt


@triton.jit
def caught_up(
    blanks, states, source_ptr, walk, found, held, skips, blank_at, limit, past_ptr, there, nothing, p, lane, FORWARD: tl.constexpr, PARTS: tl.constexpr
):
    """Wide states from those kept before a block of steps to a step in it, in a loop: unrolled, they would be long to compile."""
    for q in range(p // 8 * 8, p):
        rows, blank_row = rows_ahead(source_ptr, walk, found, blank_at, q, lane, FORWARD, PARTS, 1, 0)
        factors, blank_factors, bad = factors_of(rows, blank_row, held, q, 0, lane, limit, PARTS, 1, True, 0)
        edge = state_of(tl.gather(words_ahead(past_ptr, q, there, lane, nothing, 1), lane * 0, 0), True)
        into_blanks, into_states = entered(blanks, states, skips, edge, lane, FORWARD, PARTS, True)
        blanks, states = advanced(into_blanks, into_states, factors, blank_factors, 0, lane, PARTS, True)
    return blanks, states


@triton.jit
def put_shares(posterior_ptr, into_states, states, exponent, lane, real, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """Posteriors of the labels at a step."""
    if PARTS == 2 and not WIDE:  # a pair is one word
        first = share_of(into_states[0], states[0], exponent, WIDE).to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
        second = share_of(into_states[1], states[1], exponent, WIDE).to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(posterior_ptr.to(tl.pointer_type(tl.int64), bitcast=True) + lane, (second << 32) | first, mask=real)
    else:
        for k in tl.static_range(PARTS):
            share = share_of(into_states[k], states[k], exponent, WIDE)
            tl.store(posterior_ptr + lane * PARTS + k, share.to(posterior_ptr.dtype.element_ty), mask=real)


@triton.jit
def blank_share(into_blanks, blanks, exponent, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """The posterior of the blanks of each lane at a step."""
    total = share_of(into_blanks[0], blanks[0], exponent, WIDE)
    for k in tl.static_range(1, PARTS):
        total += share_of(into_blanks[k], blanks[k], exponent, WIDE)
    return total


@triton.jit
def other_half(
    source_ptr, walk, found, held, skips, blank_at, limit, blanks, states, kept_ptr, kept_row, past_ptr, past_there, own_ptr, edges_ptr, follows, there,
    posterior_ptr, posterior_jump, blank_ptr, blank_jump, exponent, lane,
    FORWARD: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr, TABLE: tl.constexpr,
):  # fmt: skip
    """A chunk through the half of the other direction, whose states come back block by block from those kept before each."""
    count, lead = walk[2], walk[3]
    nothing = word_of(state(0, lane, WIDE), WIDE)
    giver, final = (lane == (31 if FORWARD else 0)) & follows, count + lead - SPAN
    rows, blank_row = rows_ahead(source_ptr, walk, found, blank_at, final, lane, not FORWARD, PARTS, SPAN, TABLE)
    kept = words_of(kept_ptr + final // 8 * kept_row, lane, (lane >= 0) & (count > 0), PARTS)
    past = words_ahead(past_ptr, final, past_there & (count > 0), lane, nothing, SPAN)
    words = words_ahead(edges_ptr, final, there & (count > 0), lane, nothing, SPAN)
    for p in range(final, -1, -SPAN):
        if not WIDE:
            while tl.min((words != 0).to(tl.int32), axis=0) == 0:
                words = words_ahead(edges_ptr, p, there, lane, nothing, SPAN)
        factors, blank_factors, bad = factors_of(rows, blank_row, held, p, lead, lane, limit, PARTS, SPAN, WIDE, TABLE)
        edges, past_edges = words, past
        others = states_of(kept, PARTS, WIDE)
        if WIDE:
            others = caught_up(
                others[0], others[1], source_ptr, walk, found, held, skips, blank_at, limit, past_ptr, past_there, nothing, p, lane, not FORWARD, PARTS
            )
        every = ()
        for u in tl.static_range(SPAN):
            edge = state_of(tl.gather(past_edges, lane * 0 + u, 0), WIDE)
            into_blanks, into_states = entered(others[0], others[1], skips, edge, lane, not FORWARD, PARTS, WIDE)
            others = advanced(into_blanks, into_states, factors, blank_factors, u, lane, PARTS, WIDE)
            every = every + (others,)
        rows, blank_row = rows_ahead(source_ptr, walk, found, blank_at, p - SPAN, lane, not FORWARD, PARTS, SPAN, TABLE)
        kept = words_of(kept_ptr + (p - SPAN) // 8 * kept_row, lane, (lane >= 0) & (p > 0), PARTS)
        past = words_ahead(past_ptr, p - SPAN, past_there & (p > 0), lane, nothing, SPAN)
        words = words_ahead(edges_ptr, p - SPAN, there & (p > 0), lane, nothing, SPAN)
        shares = ()
        for v in tl.static_range(SPAN):
            tl.store(own_ptr + p + (SPAN - 1 - v) + lane * 0, offered(blanks, states, skips, FORWARD, PARTS, WIDE), mask=giver)
            edge = state_of(tl.gather(edges, lane * 0 + (SPAN - 1 - v), 0), WIDE)
            into_blanks, into_states = entered(blanks, states, skips, edge, lane, FORWARD, PARTS, WIDE)
            there_states = every[SPAN - 1 - v]
            step = p + (SPAN - 1 - v) - lead
            put_shares(posterior_ptr + step * posterior_jump, into_states, there_states[1], exponent, lane, step >= 0, PARTS, WIDE)
            shares = (blank_share(into_blanks, there_states[0], exponent, PARTS, WIDE),) + shares
            blanks, states = advanced(into_blanks, into_states, factors, blank_factors, SPAN - 1 - v, lane, PARTS, WIDE)
        step = p - lead + lane * SPAN // 32
        total = over_lanes(shares, lane).to(blank_ptr.dtype.element_ty)
        tl.store(blank_ptr + step * blank_jump, total, mask=(lane % (32 // SPAN) == 0) & (step >= 0))


@triton.jit
def walk_of(frame, count, stride_t, FORWARD: tl.constexpr, SPAN: tl.constexpr):
    """How a half is walked: its first row and the way to the next, its steps and the padding before them."""
    jump = stride_t.to(tl.int64)
    return frame * jump, jump if FORWARD else -jump, count, (SPAN - count % SPAN) % SPAN


@triton.jit(do_not_specialize=SIZES)
def ctc_halves_kernel(
    source_ptr,  # [steps, count, classes], or factors as words, [count, 16 + steps + 16, TABLE]
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    input_lengths_ptr,  # [count]
    target_lengths_ptr,  # [count]
    kept_ptr,  # [2, blocks + 1, count, chunks, 2, PARTS, 32] int64
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
    PARTS: tl.constexpr,
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
    middle, last = length // 2, labels // (32 * PARTS)
    begin, end = place, place + 1
    if WIDE:
        end = tl.where(ALL | (flags == 1), last + 1, 0)
    lane = lanes(LAYOUT)
    row, across = (count.to(tl.int64) * chunks) * (64 * PARTS), count.to(tl.int64) * reach
    kept_ptr += (direction * (blocks + 1)) * row + n * chunks * (64 * PARTS)
    edges_ptr += direction * chunks * across + n * reach
    source_ptr += n * stride_n
    for c in range(begin, tl.minimum(end, last + 1)):
        chunk = tl.where(direction == 0, c, last - c)
        first, chunk_ptr, own_ptr = chunk * (32 * PARTS), kept_ptr + chunk * (64 * PARTS), edges_ptr + chunk * across
        found, has, skips, bad = labels_of(labels_ptr + offset, first, labels, classes, stride_c, lane, PARTS, TABLE)
        if direction == 0:
            blanks, states = start_of(first, labels, lane, True, PARTS, WIDE)
            blanks, states, spoilt = half(
                source_ptr, walk_of(length * 0, middle, stride_t, True, SPAN), found, has, skips, blank * stride_c, limit, blanks, states,
                chunk_ptr, row, own_ptr, own_ptr - across, c < last, c > 0, lane, True, KEEP, PARTS, SPAN, WIDE, TABLE,
            )  # fmt: skip
            put(chunk_ptr + blocks * row, blanks, states, lane, PARTS, WIDE)
        else:
            blanks, states = start_of(first, labels, lane, False, PARTS, WIDE)
            blanks, states, spoilt = half(
                source_ptr, walk_of(tl.maximum(length - 1, 0), length - middle, stride_t, False, SPAN), found, has, skips, blank * stride_c, limit,
                blanks, states, chunk_ptr, row, own_ptr, own_ptr + across, c < last, c > 0, lane, False, KEEP, PARTS, SPAN, WIDE, TABLE,
            )  # fmt: skip
            put(chunk_ptr + blocks * row, blanks, states, lane, PARTS, WIDE)
        found_bad = tl.max(tl.where(spoilt == spoilt, 0, 1) | tl.where(bad, 2, 0), axis=0)
        if found_bad > 0:
            tl.atomic_or(flags_ptr + n, found_bad, sem="relaxed")
        if WIDE:
            tl.debug_barrier()


@triton.jit(do_not_specialize=SIZES)
def ctc_posterior_kernel(
    source_ptr,  # [steps, count, classes], or factors as words, [count, 16 + steps + 16, TABLE]
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    input_lengths_ptr,  # [count]
    target_lengths_ptr,  # [count]
    kept_ptr,  # [2, blocks + 1, count, chunks, 2, PARTS, 32] int64
    past_ptr,  # [2, chunks, count, reach] int64
    edges_ptr,  # [2, chunks, count, reach] int64, zero
    flags_ptr,  # [count] int64
    logz_ptr,  # [count] fp64
    posterior_ptr,  # [steps, count, chunks, 32 * PARTS]
    blank_ptr,  # [steps, count, chunks]
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
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDE: tl.constexpr,
    ALL: tl.constexpr,
    TABLE: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """α and β go on through each other's half, and leave the posteriors of labels and blanks, up to a factor in common at each step."""
    place, n, direction = place_of(ticket_ptr, count)
    flags, logz = tl.load(flags_ptr + n), tl.load(logz_ptr + n)
    length, labels, offset, wrong = sizes_of(n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held)
    middle, last = length // 2, labels // (32 * PARTS)
    begin, end = place, tl.minimum(place, last) + 1
    if WIDE:
        end = last + 1
    end = tl.where(logz > -float("inf"), tl.where((ALL | (flags == 1)) if WIDE else (flags == 0), end, 0), 0)
    exponent = logz
    if not WIDE:
        exponent = tl.floor(tl.where(logz > -float("inf"), logz, 0.0)).to(tl.int32)
    lane = lanes(LAYOUT)
    row, across, width = (count.to(tl.int64) * chunks) * (64 * PARTS), count.to(tl.int64) * reach, count.to(tl.int64) * chunks
    kept_ptr += n * chunks * (64 * PARTS)
    past_ptr += n * reach
    edges_ptr += n * reach
    source_ptr += n * stride_n
    for c in range(begin, end):
        chunk = tl.where(direction == 0, c, last - c)
        first, chunk_ptr, own_ptr = chunk * (32 * PARTS), kept_ptr + chunk * (64 * PARTS), edges_ptr + (direction * chunks + chunk) * across
        found, has, skips, bad = labels_of(labels_ptr + offset, first, labels, classes, stride_c, lane, PARTS, TABLE)
        out_ptr, out_blank_ptr, edge_frame = posterior_ptr + (n * chunks + chunk) * (32 * PARTS), blank_ptr + n * chunks + chunk, tl.maximum(length - 1, 0)
        if direction == 0:
            blanks, states = states_of(words_of(chunk_ptr + blocks * row, lane, lane >= 0, PARTS), PARTS, WIDE)
            other_half(
                source_ptr, walk_of(edge_frame, length - middle, stride_t, False, SPAN), found, has, skips, blank * stride_c, limit,
                blanks, states, chunk_ptr + (blocks + 1) * row, row, past_ptr + (chunks + chunk + 1) * across, chunk < last, own_ptr, own_ptr - across,
                c < last, c > 0, out_ptr + edge_frame * (width * (32 * PARTS)), -width * (32 * PARTS), out_blank_ptr + edge_frame * width, -width,
                exponent, lane, True, PARTS, SPAN, WIDE, TABLE,
            )  # fmt: skip
        else:
            blanks, states = states_of(words_of(chunk_ptr + (2 * blocks + 1) * row, lane, lane >= 0, PARTS), PARTS, WIDE)
            other_half(
                source_ptr, walk_of(length * 0, middle, stride_t, True, SPAN), found, has, skips, blank * stride_c, limit,
                blanks, states, chunk_ptr, row, past_ptr + (chunk - 1) * across, chunk > 0, own_ptr, own_ptr + across,
                c < last, c > 0, out_ptr, width * (32 * PARTS), out_blank_ptr, width, exponent, lane, False, PARTS, SPAN, WIDE, TABLE,
            )  # fmt: skip
        if WIDE:
            tl.debug_barrier()


# Triton's pass that rearranges memory accesses takes minutes for these kernels, for nothing: Gluon has none. The interpreter and AMD know Triton's alone.
ctc_halves_gluon_kernel = gluon.jit(ctc_halves_kernel.fn, do_not_specialize=SIZES)
ctc_posterior_gluon_kernel = gluon.jit(ctc_posterior_kernel.fn, do_not_specialize=SIZES)
LANES = gl.BlockedLayout([1], [32], [1], [0])
