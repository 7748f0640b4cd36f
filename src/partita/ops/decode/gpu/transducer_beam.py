"""A round of beam search of a transducer, apart from the user's predictor and joint network."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, finite_shift, log_exact
from .select import ranks_in_order

NEG_INF = tl.constexpr(-float("inf"))
# The integers of a hypothesis, and its numbers, in the order of the fields of `Beam`.
NODE, KEY, FRAME, COUNT, SYMBOLS, EVENT = (tl.constexpr(i) for i in range(6))
INTEGERS = tl.constexpr(6)


class Top(NamedTuple):
    """The most probable classes of each hypothesis, as `topk_of_rows` finds them.

    Fields:
        indices: `[B * W, KT]` int64, the best first.
        entries: `[B * W, KT]`, their logits.
        maximum, sumexp: `[B * W]`, of all classes.
    """

    indices: Any
    entries: Any
    maximum: Any
    sumexp: Any


class Scratch(NamedTuple):
    """Memory of a sequence, `[BLOCK_C]` for those of its extensions that were selected.

    Fields:
        scores: `[BLOCK_E]` fp64, of all of its extensions.
        token_scores: fp64.
        order, origins, tokens, moves: int64.
    """

    scores: Any
    token_scores: Any
    order: Any
    origins: Any
    tokens: Any
    moves: Any


class Sizes(NamedTuple):
    """Sizes of a search.

    Fields:
        D, V: the features of a frame, and the classes.
        W: the width of the beam.
        KT: the number of classes of each hypothesis in `Top`.
        ND: the number of durations, 1 for RNN-T.
        row: the number of logits of a hypothesis, those of durations included.
    """

    D: Any
    V: Any
    W: Any
    KT: Any
    ND: Any
    row: Any


@triton.jit
def duration_score(logits_ptr, chosen, number, mask, ACC_DTYPE: tl.constexpr):
    """Return the log-probability of a duration of each row, fp64."""
    maximum = tl.load(logits_ptr, mask=mask, other=0.0).to(ACC_DTYPE)
    for d in tl.range(1, number, loop_unroll_factor=1):
        x = tl.load(logits_ptr + d, mask=mask, other=0.0).to(ACC_DTYPE)
        maximum = tl.where((x > maximum) | (x != x), x, maximum)
    total = tl.zeros_like(maximum)
    shift = finite_shift(maximum)
    for d in tl.range(0, number, loop_unroll_factor=1):
        total += exp(tl.load(logits_ptr + d, mask=mask, other=0.0).to(ACC_DTYPE) - shift)
    x = tl.load(logits_ptr + chosen, mask=mask, other=0.0).to(ACC_DTYPE)
    return (x - maximum - log_exact(total)).to(tl.float64)


@triton.jit
def extensions(
    e,
    b,
    top,
    logits_ptr,
    moves_ptr,
    integers_ptr,
    numbers_ptr,
    length,
    size,
    blank,
    S,
    max_symbols,
    HAS_DURATIONS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Return the score, best, token, frame, move and token score of the extensions e.

    They are numbered by hypothesis, then by token, the blank and the best ones, then by duration.
    The score is -inf for an extension that is none.
    """
    arcs = size.ND * (size.KT + 1)
    w, k, d = e // arcs, e // size.ND % (size.KT + 1), e % size.ND
    mask = w < size.W
    r = b * size.W + w
    last = r * size.KT + size.KT - 1
    logits_ptr += r * size.row
    is_blank, rank = k == 0, r * size.KT + tl.maximum(k - 1, 0)
    of_blank = tl.load(logits_ptr + blank, mask=mask, other=0.0).to(ACC_DTYPE)
    token = tl.where(is_blank, blank, tl.load(top.indices + rank, mask=mask, other=0))
    logit = tl.load(top.entries + rank, mask=mask, other=0.0)
    logit = tl.where(is_blank, of_blank, logit)
    sumexp = tl.load(top.sumexp + r, mask=mask, other=1.0)
    gain = logit - tl.load(top.maximum + r, mask=mask, other=0.0) - log_exact(sumexp)
    gain = gain.to(tl.float64)
    # No more than W labels are extensions, with or without the blank among the best.
    last_logit = tl.load(top.entries + last, mask=mask, other=0.0)
    last_class = tl.load(top.indices + last, mask=mask, other=0)
    has_blank = (of_blank > last_logit) | ((of_blank == last_logit) & (blank <= last_class))
    hypothesis = integers_ptr + w
    frame = tl.load(hypothesis + FRAME * 2 * size.W, mask=mask, other=0)
    count = tl.load(hypothesis + COUNT * 2 * size.W, mask=mask, other=0)
    symbols = tl.load(hypothesis + SYMBOLS * 2 * size.W, mask=mask, other=0)
    is_label = (token != blank) & (count < S) & (symbols < max_symbols)
    is_label = is_label & ((k < size.KT) | has_blank)
    score = tl.load(numbers_ptr + w, mask=mask, other=NEG_INF)
    best = tl.load(numbers_ptr + 2 * size.W + w, mask=mask, other=NEG_INF)
    possible = mask & (is_blank | is_label) & (score != NEG_INF) & (gain != NEG_INF)
    if HAS_DURATIONS:
        gain += duration_score(logits_ptr + size.V, d, size.ND, mask, ACC_DTYPE)
    move = tl.load(moves_ptr + tl.where(is_blank, d, size.ND + d), mask=mask, other=-1)
    frame += move
    possible = possible & (move >= 0) & ((frame < length) | (is_blank & (frame == length)))
    score, best = (
        tl.where(possible, score + gain, NEG_INF),
        tl.where(possible, best + gain, NEG_INF),
    )
    return score, best, token, frame, move, gain


@triton.jit(
    do_not_specialize=["blank", "S", "steps", "max_symbols", "look", "stride_b", "stride_t"]
)
def transducer_beam_kernel(
    logits_ptr,  # [B * W, V + number of durations]
    top,  # Top
    encoder_ptr,  # [B, T, D]
    lengths_ptr,  # [B] int64
    moves_ptr,  # [2, ND] int64
    progress,  # Progress
    scratch,  # Scratch
    size,  # Sizes
    blank,
    S,
    steps,  # that there is room for
    max_symbols,
    look,  # the most frames by which an arc moves on, where more may come; otherwise 0
    stride_b,
    stride_t,
    stride_d,
    HAS_DURATIONS: tl.constexpr,
    BLOCK_E: tl.constexpr,  # extensions
    BLOCK_C: tl.constexpr,  # those that are selected, and complete hypotheses
    CANDIDATES: tl.constexpr,  # those that are selected, for each place of the beam
    NODE_BITS: tl.constexpr,  # below a node in a key are those of the token
    BLOCK_W: tl.constexpr,
    BLOCK_N: tl.constexpr,  # nodes that are compared together
    BLOCK_D: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Let each hypothesis of a sequence take an arc, and keep the best ones.

    See `advance` of the reference, whose steps these are. NaN in a probability ends the sequence.
    """
    b, W = tl.program_id(0).to(tl.int64), size.W
    integers_ptr, numbers_ptr, known_ptr = progress.integers, progress.numbers, progress.known
    rows_ptr, tokens_ptr, emits_ptr = progress.rows, progress.tokens, progress.emits
    w = tl.arange(0, BLOCK_W).to(tl.int64)
    is_place, place = w < W, b * W + w
    goes_on = tl.load(progress.is_open + b)
    tl.store(rows_ptr + place, place, mask=is_place)
    tl.store(tokens_ptr + place, tl.zeros_like(w) + blank, mask=is_place)
    tl.store(emits_ptr + place, w < 0, mask=is_place)
    if goes_on:
        length, step = tl.load(lengths_ptr + b), tl.load(progress.step + b)
        integers_ptr += b * INTEGERS * 2 * W
        numbers_ptr += b * 4 * W
        known_ptr += b * (1 + steps * W)
        at = b * BLOCK_C
        scores_ptr, arcs_ptr = scratch.scores + b * BLOCK_E, scratch.token_scores + at
        order_ptr, origins_ptr = scratch.order + at, scratch.origins + at
        labels_ptr, moved_ptr = scratch.tokens + at, scratch.moves + at

        # The best extensions, the best first, and of equal ones the first.
        e = tl.arange(0, BLOCK_E).to(tl.int64)
        score, best, token, frame, move, gain = extensions(
            e, b, top, logits_ptr, moves_ptr, integers_ptr, numbers_ptr, length, size, blank,
            S, max_symbols, HAS_DURATIONS, ACC_DTYPE,
        )  # fmt: skip
        is_nan = tl.max((score != score).to(tl.int32), axis=0) > 0
        passes = score > NEG_INF  # which NaN is not either
        number = tl.minimum(tl.sum(passes.to(tl.int32), axis=0), CANDIDATES * W)
        i = tl.arange(0, BLOCK_E)
        tl.store(scores_ptr + i, score)
        tl.debug_barrier()
        rank = ranks_in_order(scores_ptr, BLOCK_E, BLOCK_E, 16)
        tl.store(order_ptr + rank, e, mask=passes & (rank < number))
        tl.debug_barrier()
        i = tl.arange(0, BLOCK_C)
        exists = i < number
        e = tl.load(order_ptr + i, mask=exists, other=BLOCK_E * 2)
        score, best, token, frame, move, gain = extensions(
            e, b, top, logits_ptr, moves_ptr, integers_ptr, numbers_ptr, length, size, blank,
            S, max_symbols, HAS_DURATIONS, ACC_DTYPE,
        )  # fmt: skip
        origin = e // (size.ND * (size.KT + 1))
        node = tl.load(integers_ptr + origin, mask=exists, other=0)
        key = tl.load(integers_ptr + KEY * 2 * W + origin, mask=exists, other=-1)
        key = tl.where(token == blank, key, (node << NODE_BITS) + token)

        # Complete hypotheses take no arc, and merge with those that become complete.
        c = (i - CANDIDATES * W).to(tl.int64)
        is_complete = (c >= 0) & (c < W)
        origin = tl.where(is_complete, W + c, tl.where(exists, origin, 0))
        score = tl.where(
            exists, score, tl.load(numbers_ptr + origin, mask=is_complete, other=NEG_INF)
        )
        best = tl.where(
            exists, best, tl.load(numbers_ptr + 2 * W + origin, mask=is_complete, other=NEG_INF)
        )
        key_of_complete = tl.load(integers_ptr + KEY * 2 * W + origin, mask=is_complete, other=-1)
        key = tl.where(exists, key, key_of_complete)
        token = tl.where(exists, token, blank)
        frame, move = tl.where(exists, frame, length), tl.where(exists, move, 0)
        gain = tl.where(exists, gain, 0.0)
        tl.store(origins_ptr + i, origin)
        tl.store(labels_ptr + i, token)
        tl.store(moved_ptr + i, move)
        tl.store(arcs_ptr + i, gain)
        alive = score != NEG_INF
        same = alive[:, None] & alive[None, :]  # [BLOCK_C, BLOCK_C]
        same = same & (key[:, None] == key[None, :]) & (frame[:, None] == frame[None, :])
        others = tl.where(same, score[None, :], NEG_INF)
        shift = finite_shift(tl.max(others, axis=1))
        total = tl.sum(tl.exp(others - shift[:, None]), axis=1)
        repeats = tl.sum((same & (i[None, :] < i[:, None])).to(tl.int32), axis=1) > 0
        score = tl.where(alive & (repeats == 0), shift + tl.log(total), NEG_INF)
        bests = tl.where(same, best[None, :], NEG_INF)
        best = tl.max(bests, axis=1)
        is_best = same & (bests == best[:, None])
        chosen = tl.min(tl.where(is_best, i[None, :], BLOCK_C - 1), axis=1)

        # The places of those that stay: W for each kind.
        alive, is_end = score != NEG_INF, frame == length
        precedes = (score[None, :] == score[:, None]) & (i[None, :] < i[:, None])
        precedes = (precedes | (score[None, :] > score[:, None])) & alive[None, :]
        precedes = precedes & (is_end[None, :] == is_end[:, None])
        rank = tl.sum(precedes.to(tl.int32), axis=1)
        least = tl.max(tl.where(alive & is_end & (rank == W - 1), score, NEG_INF), axis=0)
        # But for boosts, a hypothesis only loses, and cannot overtake the W best complete ones.
        stays = alive & (rank < W) & (is_end | (score >= least))
        tl.debug_barrier()
        origin, token = tl.load(origins_ptr + chosen), tl.load(labels_ptr + chosen)
        move, gain = tl.load(moved_ptr + chosen), tl.load(arcs_ptr + chosen)
        field = integers_ptr + origin
        node, from_frame = tl.load(field), tl.load(field + FRAME * 2 * W)
        count, symbols = tl.load(field + COUNT * 2 * W), tl.load(field + SYMBOLS * 2 * W)
        event = tl.load(field + EVENT * 2 * W)
        emits = stays & (token != blank)
        count, symbols = count + emits.to(tl.int64), symbols + emits.to(tl.int64)
        symbols = tl.where(frame == from_frame, symbols, 0)
        room = b * steps * W + step * W + rank
        is_open = stays & (is_end == 0)
        before_ptr, labels_of_ptr, steps_ptr, durations_ptr, label_scores_ptr = progress.events
        tl.store(before_ptr + room, event, mask=emits)
        tl.store(labels_of_ptr + room, token, mask=emits)
        tl.store(steps_ptr + room, from_frame, mask=emits)
        tl.store(durations_ptr + room, move, mask=emits)
        tl.store(label_scores_ptr + room, gain, mask=emits)
        event = tl.where(emits, step * W + rank, event)
        tl.debug_barrier()  # all hypotheses of the step before are in registers
        for kind in tl.static_range(2):
            tl.store(
                numbers_ptr + kind * W + w, tl.full([BLOCK_W], NEG_INF, tl.float64), mask=is_place
            )
        tl.debug_barrier()
        slot = tl.where(is_end, W, 0) + rank
        field = integers_ptr + slot
        tl.store(field, node, mask=stays)
        tl.store(field + KEY * 2 * W, key, mask=stays)
        tl.store(field + FRAME * 2 * W, frame, mask=stays)
        tl.store(field + COUNT * 2 * W, count, mask=stays)
        tl.store(field + SYMBOLS * 2 * W, symbols, mask=stays)
        tl.store(field + EVENT * 2 * W, event, mask=stays)
        tl.store(numbers_ptr + slot, score, mask=stays)
        tl.store(numbers_ptr + 2 * W + slot, best, mask=stays)
        tl.store(rows_ptr + b * W + rank, b * W + origin, mask=is_open)
        tl.store(tokens_ptr + b * W + rank, token, mask=is_open)
        tl.store(emits_ptr + b * W + rank, emits, mask=is_open)
        tl.debug_barrier()

        # The nodes of new tokens: those of equal keys, or new ones.
        emits = tl.load(emits_ptr + place, mask=is_place, other=0) != 0
        key = tl.load(integers_ptr + KEY * 2 * W + w, mask=is_place, other=-1)
        used, node = 1 + step * W, tl.full([BLOCK_W], 0x7FFFFFFF, tl.int64)
        for first in range(0, used, BLOCK_N):
            n = first + tl.arange(0, BLOCK_N)
            entry = tl.load(known_ptr + n, mask=n < used, other=-2)
            equal = entry[None, :] == key[:, None]  # [BLOCK_W, BLOCK_N]
            found = tl.min(tl.where(equal, n.to(tl.int64)[None, :], 0x7FFFFFFF), axis=1)
            node = tl.minimum(node, found)
        same = (key[:, None] == key[None, :]) & emits[None, :]
        first = tl.min(tl.where(same, w[None, :], BLOCK_W), axis=1)
        is_known = node != 0x7FFFFFFF
        node = tl.where(is_known, node, used + first)
        tl.store(integers_ptr + w, node, mask=emits)
        enters = emits & (is_known == 0) & (first == w)
        tl.store(known_ptr + used + w, tl.where(enters, key, -2), mask=is_place)

        score = tl.load(numbers_ptr + w, mask=is_place, other=NEG_INF)
        frame = tl.load(integers_ptr + FRAME * 2 * W + w, mask=is_place, other=0)
        last = tl.max(tl.where(score > NEG_INF, frame, -1), axis=0)
        goes_on = (last >= 0) & (last + look < length) & (is_nan == 0)
        tl.store(progress.is_open + b, goes_on)
        tl.store(progress.step + b, step + 1)
        shown = tl.maximum(tl.minimum(frame, length - 1), 0)[:, None]
        for first in range(0, size.D, BLOCK_D):
            d = (first + tl.arange(0, BLOCK_D))[None, :]
            source_ptr = encoder_ptr + b * stride_b + shown * stride_t + d.to(tl.int64) * stride_d
            within = is_place[:, None] & (d < size.D)
            x = tl.load(source_ptr, mask=within)
            tl.store(progress.frames + place[:, None] * size.D + d, x, mask=within)
        tl.debug_barrier()
        if is_nan:
            tl.store(emits_ptr + place, w < 0, mask=is_place)
            nothing = tl.zeros_like(w)
            tl.store(integers_ptr + COUNT * 2 * W + W + w, nothing, mask=is_place)
            invalid = tl.full([BLOCK_W], float("nan"), tl.float64)
            tl.store(numbers_ptr + W + w, invalid, mask=is_place)


@triton.jit(do_not_specialize=["nbest", "room", "S"])
def transducer_trace_kernel(
    ends,  # events and counts of the complete hypotheses, [B, nbest] int64
    events,  # Event
    written,  # tokens, steps, durations [B, nbest, S + 1] int64, scores fp64
    nbest,
    room,  # the number of events of a sequence
    S,
):
    """Write the labels of a hypothesis, from the last one back."""
    row = tl.program_id(0).to(tl.int64)
    before_ptr = events[0] + row // nbest * room
    event, count = tl.load(ends[0] + row), tl.load(ends[1] + row)
    for i in range(0, count):
        place = row * (S + 1) + count - 1 - i
        for field in tl.static_range(4):
            value = tl.load(events[field + 1] + row // nbest * room + event)
            tl.store(written[field] + place, value)
        event = tl.load(before_ptr + event)
