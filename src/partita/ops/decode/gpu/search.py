"""The kernels of prefix beam search: the search itself, and the trace of its hypotheses."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .beam import (
    BEST_BLANK,
    BEST_LABEL,
    EVENT_BLANK,
    EVENT_LABEL,
    LENGTH,
    NEG_INF,
    TOTAL,
    Memory,
    Sizes,
    Step,
    enter,
    extend,
    integer,
    number,
    stay,
    store_prefixes,
)
from .greedy import load_length
from .select import Candidates, rank_candidates


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
def load_step(
    row_ptr,
    class_stride,
    row,
    rows,  # SortedRows
    size,
    blank,
    skipped,
    FROM_LOGITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the scores of a step, whether it is taken as a blank, and whether it is valid."""
    classes_ptr, sorted_ptr = rows.classes + row * size.K, rows.entries + row * size.K
    norm = tl.zeros([], tl.float64)
    valid = tl.load(sorted_ptr) < float("inf")  # the sort takes NaN as +inf
    if FROM_LOGITS:
        maximum = tl.load(rows.maximum + row).to(tl.float64)
        valid = valid & (maximum > NEG_INF)
        maximum = tl.where(valid, maximum, 0.0)
        norm = maximum + tl.log(tl.load(rows.sumexp + row).to(tl.float64))
    k = tl.arange(0, BLOCK_K)
    classes = tl.load(classes_ptr + k, mask=k < size.K, other=-1)
    blank_rank = tl.min(tl.where(classes == blank, k, size.K), axis=0)
    log_blank = tl.load(row_ptr + blank.to(tl.int64) * class_stride).to(tl.float64) - norm
    is_skipped = log_blank > skipped
    labels = tl.where(is_skipped, 0, size.labels)
    scores = (sorted_ptr, classes_ptr, norm, log_blank, blank_rank, labels)
    return Step(row_ptr, class_stride, *scores), is_skipped, valid


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
    length, valid = load_length(input_lengths_ptr, n, T)
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
    t, buffer = length * 0, length * 0
    while t < length:
        row = t.to(tl.int64) * row_t + n * row_n
        row_ptr = logits_ptr + t.to(tl.int64) * stride_t + n * stride_n
        step, is_skipped, step_valid = load_step(
            row_ptr, stride_c, row, rows, size, blank, skipped, FROM_LOGITS, BLOCK_K
        )
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
    size, none = Sizes(0, 0, 0, 0, width, 0), Candidates(0, 0, 0)
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
