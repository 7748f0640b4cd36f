"""Prefix beam search, and the trace of its hypotheses.

One program goes through the steps of a sequence.

The beam is in memory, ordered by score. A step has four phases with a barrier between them: the
prefixes that stay, the extensions by labels, the choice of the best (`select.py`), and the next
beam. A prefix is a slot of a table with open addressing, whose key is the slot of its parent with
its last label. A stamp of the slot says where the prefix is in the beam.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.memory import checked_length
from .select import UNROLL, Candidates, rank_candidates

NEG_INF = tl.constexpr(-float("inf"))
# The numbers of a prefix, fp64: log-probabilities of the alignments that end in a blank and in a
# label, of the best of each, and of all.
BLANK, LABEL, BEST_BLANK = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
BEST_LABEL, TOTAL, NUMBERS = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5)
# Its integers: the last events of the best alignments, its slot in the table and its parent's, its
# last label, and its length.
EVENT_BLANK, EVENT_LABEL, NODE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
PARENT, LAST, LENGTH, INTEGERS = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)


class Sizes(NamedTuple):
    """The sizes of a search.

    Fields:
        K: classes that are sorted for each step, with the blank.
        labels: labels that may extend a prefix at a step.
        pairs: extensions that are formed.
        width: prefixes in the beam.
        table_size: slots of the table, a power of 2.
    """

    K: Any
    labels: Any
    pairs: Any
    width: Any
    table_size: Any


class Memory(NamedTuple):
    """The memory of one sequence; the host's has N of each.

    Fields:
        numbers: `[3, 5, width]` fp64: the beam of even and of odd steps, and the prefixes that
            stay.
        integers: `[3, 6, width]` int32, likewise.
        children: `[BLOCK_W]` int64, the slot of the parent in the beam with the last label, or -1.
        candidates: those of a step.
        chosen: `[width]` int32.
        keys: `[table_size + BLOCK_W]` int64; the last ones stay 0.
        stamps: `[table_size + 1]` int32; the last one is of the empty prefix.
        events: `[T, width]` int64, the event before each event and its label.
    """

    numbers: Any
    integers: Any
    children: Any
    candidates: Candidates
    chosen: Any
    keys: Any
    stamps: Any
    events: Any


class Step(NamedTuple):
    """The scores of one step.

    Fields:
        row_ptr, class_stride: the scores of all classes.
        sorted_ptr, classes_ptr: the scores and the classes of the K most probable ones.
        norm: what is subtracted from scores.
        log_blank: the log-probability of the blank.
        blank_rank: the rank of the blank among the sorted classes, or K.
        labels: the number of labels that may extend a prefix; 0 if the step is taken as a blank.
    """

    row_ptr: Any
    class_stride: Any
    sorted_ptr: Any
    classes_ptr: Any
    norm: Any
    log_blank: Any
    blank_rank: Any
    labels: Any


class SortedRows(NamedTuple):
    """The K most probable classes of each row of logits.

    Fields:
        classes, entries: `[rows, K]`, int64, and their logits.
        maximum, sumexp: `[rows]`, of all classes.
    """

    classes: Any
    entries: Any
    maximum: Any
    sumexp: Any


@triton.jit
def log_add(a, b):
    """Return log(exp(a) + exp(b)) in fp64."""
    high, low = tl.maximum(a, b), tl.minimum(a, b)
    shift = tl.where(high == NEG_INF, 0.0, high)
    return tl.where(high == NEG_INF, high, high + tl.log(1.0 + tl.exp(low - shift)))


@triton.jit
def number(memory, size, buffer, field, i, mask):
    """Load a number of prefixes in one of the three buffers."""
    pointer = memory.numbers + (buffer * NUMBERS + field) * size.width + i
    return tl.load(pointer, mask=mask, other=NEG_INF)


@triton.jit
def integer(memory, size, buffer, field, i, mask):
    """Load an integer of prefixes in one of the three buffers."""
    pointer = memory.integers + (buffer * INTEGERS + field) * size.width + i
    return tl.load(pointer, mask=mask, other=-1)


@triton.jit
def store_prefixes(memory, size, buffer, i, numbers, integers):
    """Store the numbers and integers of prefixes in one of the three buffers."""
    mask = i < size.width
    for field in tl.static_range(len(numbers)):
        pointer = memory.numbers + (buffer * NUMBERS + field) * size.width + i
        tl.store(pointer, numbers[field], mask=mask)
    for field in tl.static_range(len(integers)):
        pointer = memory.integers + (buffer * INTEGERS + field) * size.width + i
        tl.store(pointer, integers[field], mask=mask)


@triton.jit
def label_inflow(memory, size, buffer, i, last, mask):
    """Return what the prefixes i give to their extension by the labels `last`.

    The results are the log-probability before the label, that of the best alignment, and its event.
    """
    repeats = integer(memory, size, buffer, LAST, i, mask) == last
    total = number(memory, size, buffer, TOTAL, i, mask)
    score = tl.where(repeats, number(memory, size, buffer, BLANK, i, mask), total)
    by_blank = number(memory, size, buffer, BEST_BLANK, i, mask)
    by_label = number(memory, size, buffer, BEST_LABEL, i, mask)
    through_label = (repeats == 0) & (by_label > by_blank)
    event = tl.where(
        through_label,
        integer(memory, size, buffer, EVENT_LABEL, i, mask),
        integer(memory, size, buffer, EVENT_BLANK, i, mask),
    )
    return score, tl.where(through_label, by_label, by_blank), event


@triton.jit
def stay(memory, size, step, is_skipped, buffer, t, i):
    """Compute the prefixes that get no label, merged with the extensions of their parents.

    An event that the step adds is coded as -3 minus the event before it.
    """
    mask = i < size.width
    total = number(memory, size, buffer, TOTAL, i, mask)
    alive = mask & (total > NEG_INF)
    last = integer(memory, size, buffer, LAST, i, alive)
    emits = alive & (last >= 0) & (is_skipped == 0)
    emitted = tl.load(step.row_ptr + last.to(tl.int64) * step.class_stride, mask=emits, other=0.0)
    emitted = tl.where(emits, emitted.to(tl.float64) - step.norm, NEG_INF)
    parent = integer(memory, size, buffer, PARENT, i, alive)
    stamp = tl.load(memory.stamps + parent, mask=alive & (parent >= 0), other=0)
    p = stamp - 1 - t * size.width
    has_parent = alive & (p >= 0)
    tl.store(
        memory.children + i,
        tl.where(has_parent, (p.to(tl.int64) << 32) | last.to(tl.int64), -1),
    )
    inflow, best_inflow, event = label_inflow(memory, size, buffer, p, last, has_parent)
    label = log_add(number(memory, size, buffer, LABEL, i, alive) + emitted, inflow + emitted)
    by_blank = number(memory, size, buffer, BEST_BLANK, i, alive)
    by_label = number(memory, size, buffer, BEST_LABEL, i, alive)
    event_blank = integer(memory, size, buffer, EVENT_BLANK, i, alive)
    event_label = integer(memory, size, buffer, EVENT_LABEL, i, alive)
    from_label = by_label > by_blank
    best_blank = tl.where(from_label, by_label, by_blank) + step.log_blank
    from_parent = best_inflow + emitted > by_label + emitted
    best_label = tl.where(from_parent, best_inflow + emitted, by_label + emitted)
    blank = total + step.log_blank
    new_total = log_add(blank, label)
    numbers = (blank, label, best_blank, best_label, new_total)
    events = (
        tl.where(from_label, event_label, event_blank),
        tl.where(from_parent, -3 - event, event_label),
    )
    store_prefixes(memory, size, 2, i, numbers, events)
    tl.store(memory.candidates.scores + i, new_total, mask=mask)
    tl.store(memory.candidates.ties + i, ((last + 1).to(tl.int64) << 16) | i, mask=mask)
    tl.store(memory.chosen + i, i * 0 - 1, mask=mask)


@triton.jit
def pair_of(pairs_ptr, step, j, mask):
    """Return the prefix, the label and its log-probability of extensions; and a mask of them."""
    pair = tl.load(pairs_ptr + j, mask=mask, other=0)
    i, k = pair >> 16, pair & 0xFFFF
    mask = mask & (k < step.labels)
    k += (k >= step.blank_rank).to(tl.int32)
    label = tl.load(step.classes_ptr + k, mask=mask, other=0).to(tl.int32)
    value = tl.load(step.sorted_ptr + k, mask=mask, other=0.0).to(tl.float64) - step.norm
    return i, label, value, mask


@triton.jit
def extend(memory, size, step, pairs_ptr, buffer, BLOCK_P: tl.constexpr):
    """Compute the candidates that extend a prefix by a label and are not in the beam."""
    lane = tl.arange(0, BLOCK_P)
    j = lane - size.width
    i, label, value, mask = pair_of(pairs_ptr, step, j, (j >= 0) & (j < size.pairs))
    last = integer(memory, size, buffer, LAST, i, mask)
    total = number(memory, size, buffer, TOTAL, i, mask)
    score = tl.where(last == label, number(memory, size, buffer, BLANK, i, mask), total) + value
    key = (i.to(tl.int64) << 32) | label.to(tl.int64)
    for first in range(0, size.width, UNROLL):
        for u in tl.static_range(UNROLL):
            mask = mask & (key != tl.load(memory.children + first + u))
    score = tl.where(mask, score, NEG_INF)
    tl.store(memory.candidates.scores + lane, score, mask=j >= 0)
    tie = ((label + 1).to(tl.int64) << 16) | 0x8000 | i
    tl.store(memory.candidates.ties + lane, tie, mask=j >= 0)


@triton.jit
def enter(memory, size, step, pairs_ptr, buffer, t, BLOCK_W: tl.constexpr):
    """Make the next beam of the chosen candidates."""
    lane = tl.arange(0, BLOCK_W)
    chosen = tl.load(memory.chosen + lane, mask=lane < size.width, other=-1)
    alive, is_new = chosen >= 0, chosen >= size.width
    i, label, value, is_new = pair_of(pairs_ptr, step, chosen - size.width, is_new)
    stays = alive & (chosen < size.width)
    i = tl.where(is_new, i, chosen)
    inflow, best_inflow, event = label_inflow(memory, size, buffer, i, label, is_new)
    parent = tl.where(is_new, integer(memory, size, buffer, NODE, i, is_new), -1)
    key = ((parent + 2).to(tl.int64) << 32) | label.to(tl.int64)
    # Find the keys in the table, and enter those that are not there.
    table_mask = size.table_size - 1
    mixed = key * -7046029254386353131  # an odd number, whose products have well mixed high bits
    slot = ((mixed ^ (mixed >> 29)) >> 20).to(tl.int32) & table_mask
    node, pending, empty = lane * 0 - 1, is_new, key * 0
    while tl.max(pending.to(tl.int32), axis=0) > 0:
        # The others compare a word that stays 0.
        pointer = memory.keys + tl.where(pending, slot, size.table_size + lane)
        found = tl.atomic_cas(pointer, empty, tl.where(pending, key, 0), sem="relaxed")
        done = pending & ((found == 0) | (found == key))
        node = tl.where(done, slot, node)
        pending = pending & (done == 0)
        slot = (slot + 1) & table_mask
    new_label = tl.where(is_new, inflow + value, NEG_INF)
    coded = tl.where(is_new, -3 - event, integer(memory, size, 2, EVENT_LABEL, i, stays))
    last = tl.where(is_new, label, integer(memory, size, buffer, LAST, i, stays))
    length = integer(memory, size, buffer, LENGTH, i, alive) + is_new.to(tl.int32)
    node = tl.where(is_new, node, integer(memory, size, buffer, NODE, i, stays))
    parent = tl.where(is_new, parent, integer(memory, size, buffer, PARENT, i, stays))
    adds = alive & (coded <= -2)
    new_event = t * size.width + lane
    word = ((-3 - coded).to(tl.int64) << 32) | last.to(tl.int64)
    tl.store(memory.events + t.to(tl.int64) * size.width + lane, word, mask=adds)
    numbers = (
        number(memory, size, 2, BLANK, i, stays),
        tl.where(is_new, new_label, number(memory, size, 2, LABEL, i, stays)),
        number(memory, size, 2, BEST_BLANK, i, stays),
        tl.where(is_new, best_inflow + value, number(memory, size, 2, BEST_LABEL, i, stays)),
        tl.where(is_new, new_label, number(memory, size, 2, TOTAL, i, stays)),
    )
    events = (
        integer(memory, size, 2, EVENT_BLANK, i, stays),
        tl.where(adds, new_event, coded),
    )
    store_prefixes(memory, size, 1 - buffer, lane, numbers, events + (node, parent, last, length))
    tl.store(memory.stamps + node, (t + 1) * size.width + lane + 1, mask=alive)


@triton.jit(
    do_not_specialize=["T", "N", "blank", "skipped", "row_t", "row_n", "stride_t", "stride_n"]
)
def ctc_beam_search_kernel(
    logits_ptr,  # [T, N, C]
    input_lengths_ptr,  # [N]
    rows,  # SortedRows
    pairs_ptr,  # [pairs] int32
    batch,  # Memory of all sequences
    ends_ptr,  # [N] int32
    T,
    N,
    size,  # Sizes
    blank,
    skipped: tl.float64,  # the log-probability of the blank above which a step is taken as one
    row_t,
    row_n,
    stride_t,
    stride_n,
    stride_c,
    FROM_LOGITS: tl.constexpr,
    FILTER: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Search the prefixes of one sequence, and write how its hypotheses end.

    That is the buffer of the last beam, or -1 for an invalid sequence.
    """
    n = tl.program_id(0).to(tl.int64)
    length, invalid = checked_length(input_lengths_ptr, n, T, 0, 0)
    pairs, width, table_size = size.pairs, size.width, size.table_size
    scores_ptr, ties_ptr, order_ptr = batch.candidates
    memory = Memory(
        batch.numbers + n * 15 * width,
        batch.integers + n * 18 * width,
        batch.children + n * BLOCK_W,
        Candidates(scores_ptr + n * BLOCK_P, ties_ptr + n * BLOCK_P, order_ptr + n * BLOCK_P),
        batch.chosen + n * width,
        batch.keys + n * (table_size + BLOCK_W),
        batch.stamps + n * (table_size + 1),
        batch.events + n * T * width,
    )
    # The empty prefix is in the beam, and the candidates are padded.
    lane = tl.arange(0, BLOCK_W)
    impossible = tl.full([BLOCK_W], -float("inf"), tl.float64)
    one, missing = tl.where(lane == 0, 0.0, impossible), lane * 0 - 1
    numbers = (one, impossible, one, impossible, one)
    integers = (missing, missing, lane * 0 + table_size, missing, missing, lane * 0)
    store_prefixes(memory, size, 0, lane, numbers, integers)
    tl.store(memory.stamps + table_size + lane, lane + 1, mask=lane == 0)
    padding = tl.full([BLOCK_P], NEG_INF, tl.float64)
    tl.store(memory.candidates.scores + tl.arange(0, BLOCK_P), padding)
    tl.debug_barrier()
    t, buffer, valid = length * 0, length * 0, ~invalid
    while t < length:
        row = t.to(tl.int64) * row_t + n * row_n
        row_ptr = logits_ptr + t.to(tl.int64) * stride_t + n * stride_n
        # The scores of the step; one whose blank is certain enough is taken as a blank.
        classes_ptr, sorted_ptr = rows.classes + row * size.K, rows.entries + row * size.K
        norm = tl.zeros([], tl.float64)
        step_valid = tl.load(sorted_ptr) < float("inf")  # the sort takes NaN as +inf
        if FROM_LOGITS:
            maximum = tl.load(rows.maximum + row).to(tl.float64)
            step_valid = step_valid & (maximum > NEG_INF)
            maximum = tl.where(step_valid, maximum, 0.0)
            norm = maximum + tl.log(tl.load(rows.sumexp + row).to(tl.float64))
        k = tl.arange(0, BLOCK_K)
        classes = tl.load(classes_ptr + k, mask=k < size.K, other=-1)
        blank_rank = tl.min(tl.where(classes == blank, k, size.K), axis=0)
        log_blank = tl.load(row_ptr + blank.to(tl.int64) * stride_c).to(tl.float64) - norm
        is_skipped = log_blank > skipped
        labels = tl.where(is_skipped, 0, size.labels)
        step = Step(row_ptr, stride_c, sorted_ptr, classes_ptr, norm, log_blank, blank_rank, labels)
        stay(memory, size, step, is_skipped, buffer, t, tl.arange(0, BLOCK_W))
        tl.debug_barrier()
        extend(memory, size, step, pairs_ptr, buffer, BLOCK_P)
        tl.debug_barrier()
        rank_candidates(
            memory.candidates, memory.chosen, width + pairs, width, FILTER, BLOCK_P, BLOCK_I
        )
        tl.debug_barrier()
        enter(memory, size, step, pairs_ptr, buffer, t, BLOCK_W)
        tl.debug_barrier()
        valid = valid & step_valid
        t, buffer = tl.where(step_valid, t + 1, length), 1 - buffer
    tl.store(ends_ptr + n, tl.where(valid, buffer, -1))


@triton.jit(do_not_specialize=["T", "nbest"])
def ctc_beam_trace_kernel(
    numbers_ptr,  # [N, 3, 5, width] fp64
    integers_ptr,  # [N, 3, 6, width] int32
    events_ptr,  # [N, T, width] int64
    ends_ptr,  # [N] int32
    found,  # Hypotheses
    T,
    nbest,
    width,
    BLOCK_T: tl.constexpr,
):
    """Write the tokens, steps and score of one hypothesis, from its last event to its first."""
    program = tl.program_id(0).to(tl.int64)
    n, i = program // nbest, (program % nbest).to(tl.int32)
    end = tl.load(ends_ptr + n)
    buffer = tl.maximum(end, 0)
    tokens_ptr, lengths_ptr, scores_ptr, steps_ptr = found
    size, none = Sizes(0, 0, 0, width, 0), Candidates(0, 0, 0)
    memory = Memory(
        numbers_ptr + n * 15 * width, integers_ptr + n * 18 * width, 0, none, 0, 0, 0, 0
    )
    score = number(memory, size, buffer, TOTAL, i, True)
    exists = (end >= 0) & (score > NEG_INF)
    by_blank = number(memory, size, buffer, BEST_BLANK, i, True)
    by_label = number(memory, size, buffer, BEST_LABEL, i, True)
    event = tl.where(
        by_label >= by_blank,
        integer(memory, size, buffer, EVENT_LABEL, i, True),
        integer(memory, size, buffer, EVENT_BLANK, i, True),
    )
    length = tl.where(exists, integer(memory, size, buffer, LENGTH, i, True), 0)
    tokens_ptr += program * T
    steps_ptr += program * T
    for first in range(length, T, BLOCK_T):
        position = first + tl.arange(0, BLOCK_T)
        padding = tl.full([BLOCK_T], -1, tl.int64)
        tl.store(tokens_ptr + position, padding, mask=position < T)
        tl.store(steps_ptr + position, padding, mask=position < T)
    for k in range(length - 1, -1, -1):
        word = tl.load(events_ptr + n * T * width + event)
        tl.store(tokens_ptr + k, word & 0xFFFFFFFF)
        tl.store(steps_ptr + k, (event // width).to(tl.int64))
        event = (word >> 32).to(tl.int32)
    score = tl.where(end >= 0, score, float("nan"))
    tl.store(lengths_ptr + program, length.to(tl.int64))
    tl.store(scores_ptr + program, score.to(scores_ptr.dtype.element_ty))
