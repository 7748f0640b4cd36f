"""CTC's scans: α through the first half of the steps and β through the second, then each through the other's half, where posteriors are left.

A program is one warp, with PARTS positions of the target a lane; longer targets are cut into chunks, a program each. A chunk waits for what its
neighbour hands over its edge, a block of steps ahead of it, through words in memory that are 0 until they are there. Programs take their places
from a ticket, so a chunk's neighbour always started before it. `WIDE` programs take the chunks of a sequence one after another instead.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .ctc_steps import chosen, emission_of, entered, offered, share_of, state, state_of, times, word_of

EVERY = 8  # steps from one state kept to the next; kernels write the number
# A batch of another size is no reason to compile anew.
SIZES = ["steps", "count", "classes", "held", "most", "chunks", "blocks", "blank", "stride_t", "stride_n", "stride_c"]


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
def labels_of(labels_ptr, first, labels, classes, lane, PARTS: tl.constexpr):
    """Of the positions of each lane: classes, which of them count, which may be entered from the label before; and whether one is out of range."""
    found, held, skips, wrong = (), (), (), lane < 0
    for k in tl.static_range(PARTS):
        at = first + lane * PARTS + k
        label = tl.load(labels_ptr + at, mask=at < labels, other=0)
        before = tl.load(labels_ptr + at - 1, mask=(at > 0) & (at < labels), other=-1)
        inside = (label >= 0) & (label < classes)
        found, held, skips = found + (tl.where(inside, label, 0),), held + (at < labels,), skips + ((at > 0) & (label != before),)
        wrong = wrong | ~inside
    return found, held, skips, wrong


@triton.jit
def rows_ahead(row_ptr, jump, stride_c, found, held, blank, left, lane, PARTS: tl.constexpr, SPAN: tl.constexpr):
    """Logits of the labels for some steps, step by step, and of the blank, a step a lane; as far as there are steps left."""
    rows = ()
    for u in tl.static_range(SPAN):
        for k in tl.static_range(PARTS):
            rows = rows + (tl.load(row_ptr + u * jump + found[k] * stride_c, mask=held[k] & (u < left), other=0.0),)
    return rows, tl.load(row_ptr + lane * jump + blank * stride_c, mask=(lane < SPAN) & (lane < left), other=0.0)


@triton.jit
def emissions_of(rows, blank_row, held, lane, limit, PARTS: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr):
    """These as factors, and in which lanes one has none."""
    factors, spoilt = (), lane < 0
    for i in tl.static_range(SPAN * PARTS):
        factor = emission_of(rows[i], held[i % PARTS], limit, WIDE)
        factors, spoilt = factors + (factor,), spoilt | (factor[0] != factor[0])
    blanks = emission_of(blank_row, lane < SPAN, limit, WIDE)
    return factors, blanks, spoilt | (blanks[0] != blanks[0])


@triton.jit
def at_lane(a, lane, u, WIDE: tl.constexpr):
    """What lane u holds, in every lane."""
    at = lane * 0 + u
    if WIDE:
        return (tl.gather(a[0], at, 0),)
    else:
        return (tl.gather(a[0], at, 0), tl.gather(a[1], at, 0))


@triton.jit
def words_ahead(edges_ptr, jump, left, lane, there, nothing, SPAN: tl.constexpr):
    """Words of some steps, a step a lane, as far as they are there."""
    return tl.load(edges_ptr + lane * jump, mask=there & (lane < SPAN) & (lane < left), other=nothing, volatile=True)


@triton.jit
def after_step(blanks, labels, into_blanks, into_labels, factors, u, blank_factor, live, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """States behind a step from what enters them, as they were where the step does not count."""
    new_blanks, new_labels = (), ()
    for k in tl.static_range(PARTS):
        new_blanks = new_blanks + (chosen(live, times(into_blanks[k], blank_factor, WIDE), blanks[k], WIDE),)
        new_labels = new_labels + (chosen(live, times(into_labels[k], factors[u * PARTS + k], WIDE), labels[k], WIDE),)
    return new_blanks, new_labels


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
    row_ptr, jump, stride_c, labels_ptr, labels, classes, blank, limit, count, first, kept_ptr, kept_row, own_ptr, edges_ptr, follows, there, lane,
    FORWARD: tl.constexpr, KEEP: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A chunk through its direction's half: 1 where an emission has no factor, and 2 where a label is out of range."""
    found, held, skips, wrong = labels_of(labels_ptr, first, labels, classes, lane, PARTS)
    nothing = word_of(state(0, lane, WIDE), WIDE)
    blanks, states = start_of(first, labels, lane, FORWARD, PARTS, WIDE)
    giver, spoilt = (lane == (31 if FORWARD else 0)) & follows, lane < 0
    rows, blank_row = rows_ahead(row_ptr, jump, stride_c, found, held, blank, count, lane, PARTS, SPAN)
    words = words_ahead(edges_ptr, 1, count, lane, there, nothing, SPAN)
    for i in range(0, count, SPAN):
        if not WIDE:
            while tl.min((words != 0).to(tl.int32), axis=0) == 0:
                words = words_ahead(edges_ptr, 1, count - i, lane, there, nothing, SPAN)
        factors, blank_factors, bad = emissions_of(rows, blank_row, held, lane, limit, PARTS, SPAN, WIDE)
        edges, spoilt = words, spoilt | bad
        row_ptr += SPAN * jump
        edges_ptr += SPAN
        rows, blank_row = rows_ahead(row_ptr, jump, stride_c, found, held, blank, count - i - SPAN, lane, PARTS, SPAN)
        words = words_ahead(edges_ptr, 1, count - i - SPAN, lane, there, nothing, SPAN)
        if KEEP and i % 8 == 0:
            put(kept_ptr + i // 8 * kept_row, blanks, states, lane, PARTS, WIDE)
        for u in tl.static_range(SPAN):
            tl.store(own_ptr + lane * 0 + u, offered(blanks, states, skips, FORWARD, PARTS, WIDE), mask=giver & (i + u < count))
            edge = state_of(tl.gather(edges, lane * 0 + u, 0), WIDE)
            into_blanks, into_states = entered(blanks, states, skips, edge, lane, FORWARD, PARTS, WIDE)
            blank_factor = at_lane(blank_factors, lane, u, WIDE)
            blanks, states = after_step(blanks, states, into_blanks, into_states, factors, u, blank_factor, i + u < count, PARTS, WIDE)
        own_ptr += SPAN
    return blanks, states, tl.max(spoilt.to(tl.int32) | (wrong.to(tl.int32) * 2), axis=0)


@triton.jit
def leave_shares(posterior_ptr, blank_ptr, into_blanks, into_states, blanks, states, inverse, exponent, lane, live, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """Posteriors of the labels at a step, and of the chunk's blanks together."""
    together = share_of(into_blanks[0], blanks[0], inverse, exponent, WIDE)
    for k in tl.static_range(PARTS):
        if k > 0:
            together += share_of(into_blanks[k], blanks[k], inverse, exponent, WIDE)
        share = share_of(into_states[k], states[k], inverse, exponent, WIDE)
        tl.store(posterior_ptr + lane * PARTS + k, share.to(posterior_ptr.dtype.element_ty), mask=live)
    tl.store(blank_ptr, tl.sum(together, axis=0).to(blank_ptr.dtype.element_ty), mask=live)


@triton.jit
def advanced(blanks, states, skips, edges, factors, blank_factors, u, lane, FORWARD: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr):
    """States a step on."""
    edge = state_of(tl.gather(edges, lane * 0 + u, 0), WIDE)
    into_blanks, into_states = entered(blanks, states, skips, edge, lane, FORWARD, PARTS, WIDE)
    return after_step(blanks, states, into_blanks, into_states, factors, u, at_lane(blank_factors, lane, u, WIDE), lane >= 0, PARTS, WIDE)


@triton.jit
def caught_up(
    blanks, states, row_ptr, jump, stride_c, found, held, skips, blank, limit, past_ptr, past_there, nothing, at, lane,
    FORWARD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Wide states from those kept before a block of steps to a step in it, in a loop: unrolled, they would be long to compile."""
    for t in range(at // 8 * 8, at):
        rows, blank_row = rows_ahead(row_ptr + t * jump, jump, stride_c, found, held, blank, 1, lane, PARTS, 1)
        factors, blank_factors, bad = emissions_of(rows, blank_row, held, lane, limit, PARTS, 1, True)
        edges = words_ahead(past_ptr + t, 1, 1, lane, past_there, nothing, 1)
        blanks, states = advanced(blanks, states, skips, edges, factors, blank_factors, 0, lane, FORWARD, PARTS, True)
    return blanks, states


@triton.jit
def other_half(
    row_ptr, jump, stride_c, labels_ptr, labels, classes, blank, limit, count, first, blanks, states, kept_ptr, kept_row, past_ptr, past_there,
    own_ptr, edges_ptr, follows, there, posterior_ptr, blank_ptr, posterior_jump, blank_jump, inverse, exponent, lane,
    FORWARD: tl.constexpr, PARTS: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A chunk through the half of the other direction, whose states come back block by block from those kept before each."""
    found, held, skips, wrong = labels_of(labels_ptr, first, labels, classes, lane, PARTS)
    nothing = word_of(state(0, lane, WIDE), WIDE)
    giver = (lane == (31 if FORWARD else 0)) & follows
    block = (count + SPAN - 1) // SPAN - 1
    at = block.to(tl.int64) * SPAN
    left = count - block * SPAN
    rows, blank_row = rows_ahead(row_ptr + at * jump, jump, stride_c, found, held, blank, left, lane, PARTS, SPAN)
    kept = words_of(kept_ptr + at // 8 * kept_row, lane, (lane >= 0) & (block >= 0), PARTS)
    past = words_ahead(past_ptr + at, 1, left, lane, past_there, nothing, SPAN)
    words = words_ahead(edges_ptr + (count - 1 - at), -1, left, lane, there, nothing, SPAN)
    for i in range(block, -1, -1):
        if not WIDE:
            while tl.min((words != 0).to(tl.int32), axis=0) == 0:
                words = words_ahead(edges_ptr + (count - 1 - at), -1, left, lane, there, nothing, SPAN)
        factors, blank_factors, bad = emissions_of(rows, blank_row, held, lane, limit, PARTS, SPAN, WIDE)
        edges, past_edges, here, here_at = words, past, left, at
        other_blanks, other_states = states_of(kept, PARTS, WIDE)
        at -= SPAN
        left = tl.where(i > 0, SPAN, 0)
        rows, blank_row = rows_ahead(row_ptr + at * jump, jump, stride_c, found, held, blank, left, lane, PARTS, SPAN)
        kept = words_of(kept_ptr + at // 8 * kept_row, lane, (lane >= 0) & (i > 0), PARTS)
        past = words_ahead(past_ptr + at, 1, left, lane, past_there, nothing, SPAN)
        words = words_ahead(edges_ptr + (count - 1 - at), -1, left, lane, there, nothing, SPAN)
        if WIDE:
            other_blanks, other_states = caught_up(
                other_blanks, other_states, row_ptr, jump, stride_c, found, held, skips, blank, limit, past_ptr, past_there, nothing, here_at, lane,
                not FORWARD, PARTS,
            )  # fmt: skip
        every = ()
        for u in tl.static_range(SPAN):
            other_blanks, other_states = advanced(
                other_blanks, other_states, skips, past_edges, factors, blank_factors, u, lane, not FORWARD, PARTS, WIDE
            )
            every = every + ((other_blanks, other_states),)
        for v in tl.static_range(SPAN):
            live, step = SPAN - 1 - v < here, here_at + (SPAN - 1 - v)
            tl.store(own_ptr + lane * 0 + (count - 1 - step), offered(blanks, states, skips, FORWARD, PARTS, WIDE), mask=giver & live)
            edge = state_of(tl.gather(edges, lane * 0 + (SPAN - 1 - v), 0), WIDE)
            into_blanks, into_states = entered(blanks, states, skips, edge, lane, FORWARD, PARTS, WIDE)
            others = every[SPAN - 1 - v]
            leave_shares(
                posterior_ptr + step * posterior_jump, blank_ptr + step * blank_jump, into_blanks, into_states, others[0], others[1], inverse, exponent,
                lane, live, PARTS, WIDE,
            )  # fmt: skip
            blank_factor = at_lane(blank_factors, lane, SPAN - 1 - v, WIDE)
            blanks, states = after_step(blanks, states, into_blanks, into_states, factors, SPAN - 1 - v, blank_factor, live, PARTS, WIDE)


@triton.jit(do_not_specialize=SIZES)
def ctc_halves_kernel(
    logits_ptr,  # [steps, count, classes]
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    input_lengths_ptr,  # [count]
    target_lengths_ptr,  # [count]
    kept_ptr,  # [2, blocks + 1, count, chunks, 2, PARTS, 32] int64
    edges_ptr,  # [2, chunks, count, (steps + 1) // 2] int64, zero
    flags_ptr,  # [count] int64, zero
    ticket_ptr,  # [1] int64, zero, or None
    steps,
    count,
    classes,
    held,
    most,
    chunks,
    blocks,
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
    labels_ptr += offset
    logits_ptr += n * stride_n
    row = (count.to(tl.int64) * chunks) * (64 * PARTS)
    kept_ptr += (direction * (blocks + 1)) * row + n * chunks * (64 * PARTS)
    across = count.to(tl.int64) * ((steps + 1) // 2)
    edges_ptr += direction * chunks * across + n * ((steps + 1) // 2)
    for c in range(begin, tl.minimum(end, last + 1)):
        chunk = tl.where(direction == 0, c, last - c)
        chunk_ptr = kept_ptr + chunk * (64 * PARTS)
        own_ptr = edges_ptr + chunk * across
        if direction == 0:
            blanks, states, found = half(
                logits_ptr, stride_t, stride_c, labels_ptr, labels, classes, blank, limit, middle, chunk * (32 * PARTS), chunk_ptr, row, own_ptr,
                own_ptr - across, c < last, c > 0, lane, True, KEEP, PARTS, SPAN, WIDE,
            )  # fmt: skip
            put(chunk_ptr + blocks * row, blanks, states, lane, PARTS, WIDE)
        else:
            blanks, states, found = half(
                logits_ptr + (length - 1) * stride_t, -stride_t, stride_c, labels_ptr, labels, classes, blank, limit, length - middle,
                chunk * (32 * PARTS), chunk_ptr, row, own_ptr, own_ptr + across, c < last, c > 0, lane, False, KEEP, PARTS, SPAN, WIDE,
            )  # fmt: skip
            put(chunk_ptr + blocks * row, blanks, states, lane, PARTS, WIDE)
        if (found > 0) & ((found > 1) | (not WIDE)):
            tl.atomic_or(flags_ptr + n, found, sem="relaxed")
        if WIDE:
            tl.debug_barrier()


@triton.jit(do_not_specialize=SIZES)
def ctc_posterior_kernel(
    logits_ptr,  # [steps, count, classes]
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    input_lengths_ptr,  # [count]
    target_lengths_ptr,  # [count]
    kept_ptr,  # [2, blocks + 1, count, chunks, 2, PARTS, 32] int64
    past_ptr,  # [2, chunks, count, (steps + 1) // 2] int64
    edges_ptr,  # [2, chunks, count, (steps + 1) // 2] int64, zero
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
    blank,
    limit,
    stride_t,
    stride_n,
    stride_c,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    WIDE: tl.constexpr,
    ALL: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """α and β go on through each other's half, and leave the posteriors of blanks and labels, up to a factor near 1 in common at each step."""
    place, n, direction = place_of(ticket_ptr, count)
    flags, logz = tl.load(flags_ptr + n), tl.load(logz_ptr + n)
    length, labels, offset, _ = sizes_of(n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held)
    middle, last = length // 2, labels // (32 * PARTS)
    begin, end = place, tl.minimum(place, last) + 1
    if WIDE:
        end = last + 1
    mine = (ALL | (flags == 1)) if WIDE else (flags == 0)
    end = tl.where(logz > -float("inf"), tl.where(mine, end, 0), 0)
    if WIDE:
        inverse, exponent = 1.0, logz
    else:
        whole = tl.floor(tl.where(logz > -float("inf"), logz, 0.0))
        inverse, exponent = tl.exp2(whole - logz).to(tl.float32), whole.to(tl.int32)
    lane = lanes(LAYOUT)
    labels_ptr += offset
    logits_ptr += n * stride_n
    row = (count.to(tl.int64) * chunks) * (64 * PARTS)
    kept_ptr += n * chunks * (64 * PARTS)
    across = count.to(tl.int64) * ((steps + 1) // 2)
    past_ptr += n * ((steps + 1) // 2)
    edges_ptr += n * ((steps + 1) // 2)
    width = count.to(tl.int64) * chunks
    for c in range(begin, end):
        chunk = tl.where(direction == 0, c, last - c)
        chunk_ptr = kept_ptr + chunk * (64 * PARTS)
        out_ptr, out_blank_ptr = posterior_ptr + (n * chunks + chunk) * (32 * PARTS), blank_ptr + n * chunks + chunk
        if direction == 0:
            blanks, states = states_of(words_of(chunk_ptr + blocks * row, lane, lane >= 0, PARTS), PARTS, WIDE)
            own_ptr, final = edges_ptr + chunk * across, (length - 1).to(tl.int64)
            other_half(
                logits_ptr + final * stride_t, -stride_t, stride_c, labels_ptr, labels, classes, blank, limit, length - middle, chunk * (32 * PARTS),
                blanks, states, chunk_ptr + (blocks + 1) * row, row, past_ptr + (chunks + chunk + 1) * across, chunk < last, own_ptr, own_ptr - across,
                c < last, c > 0, out_ptr + final * (width * (32 * PARTS)), out_blank_ptr + final * width, -width * (32 * PARTS), -width,
                inverse, exponent, lane, True, PARTS, SPAN, WIDE,
            )  # fmt: skip
        else:
            blanks, states = states_of(words_of(chunk_ptr + (2 * blocks + 1) * row, lane, lane >= 0, PARTS), PARTS, WIDE)
            own_ptr = edges_ptr + (chunks + chunk) * across
            other_half(
                logits_ptr, stride_t.to(tl.int64), stride_c, labels_ptr, labels, classes, blank, limit, middle, chunk * (32 * PARTS),
                blanks, states, chunk_ptr, row, past_ptr + (chunk - 1) * across, chunk > 0, own_ptr, own_ptr + across,
                c < last, c > 0, out_ptr, out_blank_ptr, width * (32 * PARTS), width, inverse, exponent, lane, False, PARTS, SPAN, WIDE,
            )  # fmt: skip
        if WIDE:
            tl.debug_barrier()


# Triton's pass that rearranges memory accesses takes minutes for these kernels, for nothing: Gluon has none. The interpreter and AMD know Triton's alone.
ctc_halves_gluon_kernel = gluon.jit(ctc_halves_kernel.fn, do_not_specialize=SIZES)
ctc_posterior_gluon_kernel = gluon.jit(ctc_posterior_kernel.fn, do_not_specialize=SIZES)
LANES = gl.BlockedLayout([1], [32], [1], [0])
