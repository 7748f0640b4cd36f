"""Greedy search: the most probable class of each step, then the collapse of each sequence."""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, finite_shift, log_exact
from ....primitives.gpu.memory import checked_length


@triton.jit(do_not_specialize=["T", "N", "C", "stride_t", "stride_n"])
def ctc_best_class_kernel(
    logits_ptr,  # [T, N, C]
    input_lengths_ptr,  # [N]
    classes_ptr,  # [N, T] int32
    scores_ptr,  # [N, T]
    T,
    N,
    C,
    stride_t,
    stride_n,
    stride_c,
    FROM_LOGITS: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    VEC: tl.constexpr,  # classes that are aligned together
    PIECES: tl.constexpr,  # blocks of classes that are loaded together
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Find the most probable class of some steps and its log-probability.

    The score is NaN where a class has NaN or +inf. Each lane keeps its own best class.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, n = (row // N).to(tl.int64), (row % N).to(tl.int64)
    mask = (t < T) & (t < tl.load(input_lengths_ptr + n))
    source_ptr = logits_ptr + tl.multiple_of(t * stride_t + n * stride_n, VEC)[:, None]
    lane = tl.arange(0, BLOCK_V)[None, :]
    best = tl.full([ROWS, BLOCK_V], -float("inf"), ACC_DTYPE)
    index = tl.zeros([ROWS, BLOCK_V], tl.int32) + lane
    total = tl.zeros([ROWS, BLOCK_V], ACC_DTYPE)
    invalid = tl.zeros([ROWS, BLOCK_V], tl.int32)
    for first in range(0, C, PIECES * BLOCK_V):
        pieces, previous = (), best
        for i in tl.static_range(PIECES):
            v = first + i * BLOCK_V + lane
            x = tl.load(
                source_ptr + v.to(tl.int64) * stride_c,
                mask=mask[:, None] & (v // VEC * VEC < C),
                other=-float("inf"),
            )
            pieces = pieces + (x.to(ACC_DTYPE),)
        for i in tl.static_range(PIECES):
            v = first + i * BLOCK_V + lane
            is_better = pieces[i] > best
            best, index = tl.where(is_better, pieces[i], best), tl.where(is_better, v, index)
            if not FROM_LOGITS:  # otherwise the sum of exponentials becomes NaN
                invalid = invalid | tl.where(pieces[i] < float("inf"), 0, 1)
        if FROM_LOGITS:
            shift = finite_shift(best)
            total = total * exp(previous - shift)
            for i in tl.static_range(PIECES):
                total += exp(pieces[i] - shift)
    maximum = tl.max(best, axis=1)
    chosen = tl.min(tl.where(best == maximum[:, None], index, C - 1), axis=1)
    score = maximum
    if FROM_LOGITS:
        shift = finite_shift(maximum)[:, None]
        score = -log_exact(tl.sum(total * exp(best - shift), axis=1))
        score = tl.where(maximum == -float("inf"), float("nan"), score)
    score = tl.where(tl.max(invalid, axis=1) > 0, float("nan"), score)
    tl.store(classes_ptr + n * T + t, chosen, mask=mask)
    tl.store(scores_ptr + n * T + t, score, mask=mask)


@triton.jit(do_not_specialize=["T", "blank"])
def ctc_collapse_kernel(
    classes_ptr,  # [N, T] int32
    class_scores_ptr,  # [N, T]
    input_lengths_ptr,  # [N]
    found,  # Hypotheses, with nbest = 1
    T,
    blank,
    BLOCK_T: tl.constexpr,
):
    """Write the classes of a sequence without repeats and blanks, and their steps."""
    n = tl.program_id(0).to(tl.int64)
    length, invalid = checked_length(input_lengths_ptr, n, T, 0, 0)
    row, lane = n * T, tl.arange(0, BLOCK_T)
    tokens_ptr, lengths_ptr, scores_ptr, steps_ptr = found
    num_tokens, total = length * 0, tl.zeros([BLOCK_T], tl.float64)
    for first in range(0, length, BLOCK_T):
        t = first + lane
        mask = t < length
        label = tl.load(classes_ptr + row + t, mask=mask, other=blank)
        before = tl.load(classes_ptr + row + t - 1, mask=mask & (t > 0), other=blank)
        total += tl.load(class_scores_ptr + row + t, mask=mask, other=0.0).to(tl.float64)
        emits = mask & (label != blank) & (label != before)
        position = num_tokens + tl.cumsum(emits.to(tl.int32), axis=0) - 1
        tl.store(tokens_ptr + row + position, label.to(tl.int64), mask=emits)
        tl.store(steps_ptr + row + position, t.to(tl.int64), mask=emits)
        num_tokens += tl.sum(emits.to(tl.int32), axis=0)
    score = tl.sum(total, axis=0)
    valid = ~invalid & (score == score)
    num_tokens = tl.where(valid, num_tokens, 0)
    tl.debug_barrier()  # the padding of an invalid sequence overwrites its tokens
    for first in range(num_tokens, T, BLOCK_T):
        position = first + lane
        padding = tl.full([BLOCK_T], -1, tl.int64)
        tl.store(tokens_ptr + row + position, padding, mask=position < T)
        tl.store(steps_ptr + row + position, padding, mask=position < T)
    tl.store(lengths_ptr + n, num_tokens.to(tl.int64))
    score = tl.where(valid, score, float("nan"))
    tl.store(scores_ptr + n, score.to(scores_ptr.dtype.element_ty))
