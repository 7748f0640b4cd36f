"""The way of a warp through a half of the steps: its positions, the rows that it reads, and what it hands to its neighbours.

A program is one warp, with one position of the target a lane; longer targets are cut into chunks, a program each. A chunk waits for what its
neighbour hands over its edge, a block of steps ahead of it, through words in memory that are 0 until they are there. Programs take their places
from a ticket, so a chunk's neighbour always started before it. `WIDE` programs take the chunks of a sequence one after another instead.

Blocks of SPAN steps are whole: a half begins with padding, in which the blank is certain and labels are impossible, which leaves α and β as they
start. The other direction comes to the padding last, when nothing is left to do. A table of factors has rows of zeros before and behind its steps.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from .state import (
    NOTHING,
    NOTHING_WORD,
    WIDE_NOTHING_WORD,
    at_lane,
    factor_of,
    state_of,
    times,
    wide_factor_of,
    word_of,
)

EVERY = 8  # steps from one state kept to the next; kernels write the number
# A batch of another size is no reason to compile anew.
SIZES = [
    "steps",
    "count",
    "classes",
    "held",
    "most",
    "chunks",
    "blocks",
    "reach",
    "blank",
    "stride_t",
    "stride_n",
    "stride_c",
]
# Triton's pass that rearranges memory accesses takes minutes for kernels of such lanes, for nothing; Gluon has none. The interpreter and AMD know
# Triton alone, so each kernel is there in both.
LANES = gl.BlockedLayout([1], [32], [1], [0])


@triton.jit
def lanes(LAYOUT: tl.constexpr):
    """0 to 31, laid out as Triton likes, or as Gluon is told."""
    if LAYOUT is None:
        return tl.arange(0, 32)
    else:
        return gl.arange(0, 32, LAYOUT)


@triton.jit
def turn_of(ticket_ptr):
    """This program's number, in the order in which programs start where there is a ticket."""
    if ticket_ptr is None:
        return tl.program_id(0)
    else:
        return tl.atomic_add(ticket_ptr, 1, sem="relaxed")


@triton.jit
def place_of(ticket_ptr, count):
    """Chunk (in the direction's order), sequence and direction of this program."""
    place = turn_of(ticket_ptr)
    return place // (2 * count), (place // 2 % count).to(tl.int64), place % 2


@triton.jit
def target_of(n, target_lengths_ptr, offsets_ptr, most, held):
    """Labels of a sequence and where they start, as they came, and whether these are out of range."""
    labels, offset = tl.load(target_lengths_ptr + n), tl.load(offsets_ptr + n)
    return labels, offset, (labels < 0) | (labels > most) | (offset < 0) | (offset + labels > held)


@triton.jit
def sizes_of(n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held):
    """Steps and labels of a sequence, where its labels start, and whether it is wrong; 0 and 0 if so."""
    length = tl.load(input_lengths_ptr + n)
    labels, offset, wrong = target_of(n, target_lengths_ptr, offsets_ptr, most, held)
    wrong = wrong | (length < 0) | (length > steps)
    return (
        tl.where(wrong, 0, length).to(tl.int32),
        tl.where(wrong, 0, labels).to(tl.int32),
        tl.where(wrong, 0, offset),
        wrong,
    )


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
def rows_ahead(
    label_ptr,
    blank_ptr,
    walk,
    p,
    lane,
    FORWARD: tl.constexpr,
    SPAN: tl.constexpr,
    TABLE: tl.constexpr,
):
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
def factors_of(
    rows,
    blank_row,
    held,
    p,
    lead,
    lane,
    limit,
    SPAN: tl.constexpr,
    WIDE: tl.constexpr,
    TABLE: tl.constexpr,
):
    """These as factors, 0 where no label is held; and NaN in the lanes in which one is none."""
    factors, spoilt = (), lane.to(tl.float32) * 0.0
    for u in tl.static_range(SPAN):
        if WIDE:
            factors = factors + ((tl.where(held, wide_factor_of(rows[u])[0], -float("inf")),),)
        else:
            mantissa, exponent = state_of(rows[u], False) if TABLE else factor_of(rows[u], limit)
            real = held if TABLE else held & (p + u >= lead)
            factors, spoilt = (
                factors + ((mantissa, tl.where(real, exponent, NOTHING - 127)),),
                spoilt + mantissa * 0.0,
            )
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
def awaited(words, edges_ptr, p, there, lane, SPAN: tl.constexpr, WIDE: tl.constexpr):
    """These once all of them are there."""
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = words_ahead(edges_ptr, p, there, lane, SPAN, WIDE)
    return words


@triton.jit
def edge_at(words, u, lane, WIDE: tl.constexpr):
    """The state in lane u's word."""
    return state_of(tl.gather(words, lane * 0 + u, 0), WIDE)


@triton.jit
def advanced(into_blank, into_label, factors, blank_factors, u, lane, WIDE: tl.constexpr):
    """States behind a step from what enters them."""
    return times(into_blank, at_lane(blank_factors, lane, u, WIDE), WIDE), times(
        into_label, factors[u], WIDE
    )


@triton.jit
def put(kept_ptr, blank, label, lane, WIDE: tl.constexpr):
    """States of a chunk, `[2, 32]`."""
    tl.store(kept_ptr + lane, word_of(blank, WIDE))
    tl.store(kept_ptr + 32 + lane, word_of(label, WIDE))
