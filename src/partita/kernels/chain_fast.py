"""Sparse linear chains under Log, for tables of up to 1,024 states with few edges into and out of each: one state a thread.

α and β run by one and the same code, one up and one down. A state is a pair of fp32 numbers, high and low, in one 64-bit word: about 48 bits,
at a fraction of the cost of fp64. Where edges come from, and their scores for some steps to come, wait in registers.
"""

import triton
import triton.language as tl

from .chain_steps import length_of, slot_of
from .math import LOG2E, log_of, pack, unpack


@triton.jit
def two_sum(a, b):
    """a + b, rounded, and what that lost; nothing where it is infinite."""
    total = a + b
    part = total - a
    lost = (a - (total - part)) + (b - part)
    return total, tl.where(tl.abs(total) < float("inf"), lost, 0.0)


@triton.jit
def edges_of(direction, source_ptr, first_ptr, edges_ptr, c, states, slots, stride_c, stride_k, WIDTH: tl.constexpr):
    """Of the edges into states c, or out of them: the states at their other ends (-1: none), where their scores and gradients stand in a step,
    and NaN where the table is wrong."""
    others, scores_at, grads_at, wrong = (), (), (), tl.zeros(c.shape, tl.float32)
    start = tl.load(first_ptr + c, mask=c < states, other=0)
    degree = tl.load(first_ptr + c + 1, mask=c < states, other=0) - start
    for k in tl.static_range(WIDTH):
        up = (direction == 0) & (k < slots) & (c < states)
        left = tl.load(source_ptr + c * slots + k, mask=up, other=-1)
        wrong += tl.where((left < -1) | (left >= states), float("nan"), 0.0)
        down = (direction == 1) & (k < degree)
        edge = tl.where(direction == 0, c * slots + k, tl.load(edges_ptr + start + k, mask=down, other=0))
        held = down | (up & (left >= 0) & (left < states))
        others = others + (tl.where(held, tl.where(direction == 0, left, edge // slots), -1),)
        scores_at = scores_at + (edge // slots * stride_c + edge % slots * stride_k,)
        grads_at = grads_at + (tl.where(up | down, edge, -1),)
    return others, scores_at, grads_at, wrong


@triton.jit
def scores_ahead(scores_ptr, others, scores_at, t, step, left, stride_t, WIDTH: tl.constexpr, AHEAD: tl.constexpr):
    """Scores of steps t, t + step, ..., as far as there are steps left."""
    scores = ()
    for u in tl.static_range(AHEAD):
        step_ptr = scores_ptr + tl.full([], t + u * step, tl.int64) * stride_t
        for k in tl.static_range(WIDTH):
            scores = scores + (tl.load(step_ptr + scores_at[k], mask=(others[k] >= 0) & (u < left), other=-float("inf")),)
    return scores


@triton.jit
def partners_ahead(kept_ptr, c, p, step, left, row, states, AHEAD: tl.constexpr):
    """What the other direction left at positions p + step, p + 2 step, ..."""
    words = ()
    for u in tl.static_range(AHEAD):
        at = tl.full([], p + (u + 1) * step, tl.int64)
        words = words + (tl.load(kept_ptr + at * row + c, mask=(c < states) & (u < left), other=0),)
    return words


@triton.jit
def terms_of(state_ptr, others, scores, wrong, u: tl.constexpr, WIDTH: tl.constexpr):
    """State at the other end plus score, for each edge, as pairs; and the greatest, as a finite shift."""
    highs, lows = (), ()
    most = tl.full(wrong.shape, -float("inf"), tl.float32)
    for k in tl.static_range(WIDTH):
        high, low = unpack(tl.load(state_ptr + others[k], mask=others[k] >= 0, other=0))
        high, lost = two_sum(high, scores[u * WIDTH + k].to(tl.float32) + wrong)
        highs, lows = highs + (high,), lows + (low + lost,)
        most = tl.maximum(most, high)
    return highs, lows, tl.where(most == -float("inf"), 0.0, most)


@triton.jit
def state_after(highs, lows, shift, WIDTH: tl.constexpr):
    """The log-sum-exp of the terms, as one word."""
    total = tl.zeros(shift.shape, tl.float32)
    for k in tl.static_range(WIDTH):
        total += tl.exp2(((highs[k] - shift) + lows[k]) * LOG2E)
    high, low = two_sum(shift, log_of(total))
    return pack(high, low)


@triton.jit
def less(word, high, low):
    """A state less a number, as a pair."""
    first, second = unpack(word)
    difference, lost = two_sum(first, -high)
    return difference, lost + (second - low)


@triton.jit
def ends_word(ends_ptr, c, stride_c, states, wrong):
    """Initial or final scores as words."""
    value = tl.load(ends_ptr + c * stride_c, mask=c < states, other=-float("inf")).to(tl.float64) + wrong
    high = value.to(tl.float32)
    return pack(high, tl.where(tl.abs(high) < float("inf"), (value - high.to(tl.float64)).to(tl.float32), 0.0))


@triton.jit
def chain_fast_halves_kernel(
    scores_ptr,  # [steps, chains, states, slots]
    source_ptr,  # [states, slots] int32
    first_ptr,  # [states + 1] int32
    edges_ptr,  # [states * slots] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    kept_ptr,  # [steps + 1, chains, states] int64, or [4, chains, states]
    steps,
    chains,
    states,
    slots,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    initial_n,
    initial_c,
    final_n,
    final_c,
    KEEP: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """α up to the middle, or β down to behind it: what stands before the middle step, and behind it."""
    n = (tl.program_id(0) // 2).to(tl.int64)
    direction = tl.program_id(0) % 2
    length, bad = length_of(lengths_ptr, n, steps)
    middle = tl.maximum(length - 1, 0) // 2
    step = 1 - 2 * direction
    p = tl.where(direction == 0, 0, length)
    count = tl.where(direction == 0, middle, tl.maximum(length - 1 - middle, 0))
    row = tl.full([], chains, tl.int64) * states
    kept_ptr += n * states
    scores_ptr += n * stride_n
    c = tl.arange(0, BLOCK_C)
    others, scores_at, _, wrong = edges_of(direction, source_ptr, first_ptr, edges_ptr, c, states, slots, stride_c, stride_k, WIDTH)
    if direction == 0:
        tl.store(kept_ptr + slot_of(0, 0, KEEP) * row + c, ends_word(initial_ptr + n * initial_n, c, initial_c, states, bad), mask=c < states)
    elif length > 0:
        tl.store(kept_ptr + slot_of(length, 1, KEEP) * row + c, ends_word(final_ptr + n * final_n, c, final_c, states, 0.0), mask=c < states)
    ahead = scores_ahead(scores_ptr, others, scores_at, p - direction, step, count, stride_t, WIDTH, AHEAD)
    for i in range(0, count, AHEAD):
        scores = ahead
        ahead = scores_ahead(scores_ptr, others, scores_at, p - direction + AHEAD * step, step, count - i - AHEAD, stride_t, WIDTH, AHEAD)
        for u in tl.static_range(AHEAD):
            tl.debug_barrier()
            highs, lows, shift = terms_of(kept_ptr + slot_of(p, direction, KEEP) * row, others, scores, wrong, u, WIDTH)
            p += step
            word = state_after(highs, lows, shift, WIDTH)
            tl.store(kept_ptr + slot_of(p, direction, KEEP) * row + c, word, mask=(c < states) & (i + u < count))


@triton.jit
def chain_fast_logz_kernel(
    scores_ptr,  # [steps, chains, states, slots]
    source_ptr,  # [states, slots] int32
    first_ptr,  # [states + 1] int32
    edges_ptr,  # [states * slots] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    kept_ptr,  # [steps + 1, chains, states] int64, or [4, chains, states]
    logz_ptr,  # [chains] fp64
    steps,
    chains,
    states,
    slots,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    initial_n,
    initial_c,
    final_n,
    final_c,
    KEEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """log Z of a chain from α before its middle step and β behind it."""
    n = tl.program_id(0).to(tl.int64)
    length, bad = length_of(lengths_ptr, n, steps)
    middle = tl.maximum(length - 1, 0) // 2
    row = tl.full([], chains, tl.int64) * states
    kept_ptr += n * states
    c = tl.arange(0, BLOCK_C)
    first, last = ends_word(initial_ptr + n * initial_n, c, initial_c, states, bad), ends_word(final_ptr + n * final_n, c, final_c, states, 0.0)
    if length > 0:
        others, scores_at, _, wrong = edges_of(0, source_ptr, first_ptr, edges_ptr, c, states, slots, stride_c, stride_k, WIDTH)
        scores = scores_ahead(scores_ptr + n * stride_n, others, scores_at, middle, 1, 1, stride_t, WIDTH, 1)
        highs, lows, shift = terms_of(kept_ptr + slot_of(middle, 0, KEEP) * row, others, scores, wrong, 0, WIDTH)
        first = state_after(highs, lows, shift, WIDTH)
        last = tl.load(kept_ptr + slot_of(middle + 1, 1, KEEP) * row + c, mask=c < states, other=0)
    high, low = unpack(first)
    other_high, other_low = unpack(last)
    value = (high.to(tl.float64) + low.to(tl.float64)) + (other_high.to(tl.float64) + other_low.to(tl.float64))
    value = tl.where(c < states, value, -float("inf"))
    most = tl.max(value, axis=0)
    shift = tl.where(most == -float("inf"), 0.0, most)
    total = tl.sum(tl.exp2((value - shift).to(tl.float32) * LOG2E), axis=0)
    tl.store(logz_ptr + n, shift + log_of(total).to(tl.float64) + bad)


@triton.jit
def total_anew(one, other, high, low, held):
    """log Z, as a pair, from α and β at one position: by it marginals are divided, so that what α and β lost does not add up."""
    a, a_low = less(one, high, low)
    b, b_low = unpack(other)
    difference, lost = two_sum(a, b)
    total = tl.sum(tl.where(held, tl.exp2((difference + (lost + (a_low + b_low))) * LOG2E), 0.0), axis=0)
    anew, lost = two_sum(high, tl.where(total > 0.0, log_of(total), 0.0))
    return anew, low + lost


@triton.jit
def put_end_gradient(result_ptr, one, other, high, low, grad, held):
    """Gradient of initial or final scores: the probabilities of the first or last states."""
    a, a_low = less(one, high, low)
    b, b_low = unpack(other)
    difference, lost = two_sum(a, b)
    p = tl.exp2((difference + (lost + (a_low + b_low))) * LOG2E) * grad
    tl.store(result_ptr, p.to(result_ptr.dtype.element_ty), mask=held)


@triton.jit
def chain_fast_gradient_kernel(
    grad_ptr,  # [chains] fp64
    scores_ptr,  # [steps, chains, states, slots]
    source_ptr,  # [states, slots] int32
    first_ptr,  # [states + 1] int32
    edges_ptr,  # [states * slots] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    logz_ptr,  # [chains] fp64
    kept_ptr,  # [steps + 1, chains, states] int64
    work_ptr,  # [4, chains, states] int64
    d_scores_ptr,  # [steps, chains, states, slots]
    d_initial_ptr,  # [chains, states]
    d_final_ptr,  # [chains, states]
    steps,
    chains,
    states,
    slots,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    initial_n,
    initial_c,
    final_n,
    final_c,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """α and β go on through each other's half and leave the marginals behind them."""
    n = (tl.program_id(0) // 2).to(tl.int64)
    direction = tl.program_id(0) % 2
    length, bad = length_of(lengths_ptr, n, steps)
    middle = tl.maximum(length - 1, 0) // 2
    step = 1 - 2 * direction
    p = tl.where(direction == 0, middle, middle + 1)
    count = tl.where(length == 0, 0, tl.where(direction == 0, length - middle, middle + 1))
    row = tl.full([], chains, tl.int64) * states
    kept_ptr += n * states
    work_ptr += n * states
    scores_ptr += n * stride_n
    d_scores_ptr += n * states * slots
    c = tl.arange(0, BLOCK_C)
    grad = tl.load(grad_ptr + n).to(tl.float32)
    logz = tl.load(logz_ptr + n)
    logz = tl.where(logz == -float("inf"), float("inf"), logz)  # a chain without a path has no marginals
    high = logz.to(tl.float32)
    low = tl.where(tl.abs(high) < float("inf"), (logz - high.to(tl.float64)).to(tl.float32), 0.0)
    others, scores_at, grads_at, wrong = edges_of(direction, source_ptr, first_ptr, edges_ptr, c, states, slots, stride_c, stride_k, WIDTH)
    own = tl.load(kept_ptr + tl.full([], p, tl.int64) * row + c, mask=(c < states) & (count > 0), other=0)
    tl.store(work_ptr + slot_of(p, direction, False) * row + c, own, mask=c < states)
    ahead = scores_ahead(scores_ptr, others, scores_at, p - direction, step, count, stride_t, WIDTH, AHEAD)
    partners = partners_ahead(kept_ptr, c, p, step, count, row, states, AHEAD)
    for i in range(0, count, AHEAD):
        scores, words = ahead, partners
        ahead = scores_ahead(scores_ptr, others, scores_at, p - direction + AHEAD * step, step, count - i - AHEAD, stride_t, WIDTH, AHEAD)
        partners = partners_ahead(kept_ptr, c, p + AHEAD * step, step, count - i - AHEAD, row, states, AHEAD)
        if (i > 0) & (i % 8 == 0):
            mine = tl.load(work_ptr + slot_of(p, direction, False) * row + c, mask=c < states, other=0)
            theirs = tl.load(kept_ptr + tl.full([], p, tl.int64) * row + c, mask=c < states, other=0)
            high, low = total_anew(mine, theirs, high, low, c < states)
        for u in tl.static_range(AHEAD):
            tl.debug_barrier()
            highs, lows, shift = terms_of(work_ptr + slot_of(p, direction, False) * row, others, scores, wrong, u, WIDTH)
            at = tl.full([], p - direction, tl.int64)
            p += step
            word = state_after(highs, lows, shift, WIDTH)
            tl.store(work_ptr + slot_of(p, direction, False) * row + c, word, mask=(c < states) & (i + u < count))
            difference, rest = less(words[u], high, low)
            counts = (i + u < count) & ((direction == 0) | (i + u > 0))  # the middle step is α's
            for k in tl.static_range(WIDTH):
                q = tl.exp2(((highs[k] + difference) + (lows[k] + rest)) * LOG2E) * grad
                tl.store(d_scores_ptr + at * row * slots + grads_at[k], q.to(d_scores_ptr.dtype.element_ty), mask=(grads_at[k] >= 0) & counts)
    ends(
        d_scores_ptr, d_initial_ptr + n * states, d_final_ptr + n * states, work_ptr, initial_ptr + n * initial_n, final_ptr + n * final_n,
        direction, length, steps, high, low, grad, bad, row, states, slots, initial_c, final_c, BLOCK_C,
    )  # fmt: skip


@triton.jit
def ends(
    d_scores_ptr, d_initial_ptr, d_final_ptr, work_ptr, initial_ptr, final_ptr, direction, length, steps, high, low, grad, bad, row, states, slots,
    initial_c, final_c, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients of the end that a direction reaches, and of the scores past the length: 0, or NaN where the length is wrong."""
    c = tl.arange(0, BLOCK_C)
    tl.debug_barrier()
    first, last = ends_word(initial_ptr, c, initial_c, states, bad), ends_word(final_ptr, c, final_c, states, 0.0)
    if direction == 0:
        reached = tl.load(work_ptr + slot_of(length, 0, False) * row + c, mask=(c < states) & (length > 0), other=0)
        put_end_gradient(d_final_ptr + c, last, tl.where(length > 0, reached, first), high, low, grad, c < states)
        for t in range(length, steps):
            for e0 in range(0, states * slots, BLOCK_C):
                place = d_scores_ptr + tl.full([], t, tl.int64) * row * slots + e0 + c
                values = tl.full([BLOCK_C], bad, tl.float32).to(d_scores_ptr.dtype.element_ty)
                tl.store(place, values, mask=e0 + c < states * slots)
    else:
        reached = tl.load(work_ptr + slot_of(0, 1, False) * row + c, mask=(c < states) & (length > 0), other=0)
        put_end_gradient(d_initial_ptr + c, first, tl.where(length > 0, reached, last), high, low, grad, c < states)
