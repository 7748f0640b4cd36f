"""Alpha and beta of dense linear chains in the log domain; see `scan.py`.

The transitions among few states are in registers, and so is the state. Those among many do not fit
there, so states pass from one step to the next through memory.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .arguments import Batch
from .scores import (
    exp_sum_term,
    fold_ends,
    load_end,
    load_tokens,
    scan_steps,
    state_offset,
    transition_range,
)


@triton.jit
def load_matrix(ptr, C, stride_r, stride_o, BLOCK_C: tl.constexpr):
    """Return the transitions of a scan, or with strides exchanged, the transposed ones.

    The states that a step leaves are along axis FROM. Triton does not know which of the strides is
    1, and divides axis 0 among the threads of a warp. So a thread enters one state, and few threads
    share the sum over those that it leaves. The smallest matrices have no more elements than
    threads, so this order does not matter to them, but with the other one their sums have the
    layout of vectors.
    """
    FROM: tl.constexpr = 1 if BLOCK_C > 4 else 0
    r = tl.expand_dims(tl.arange(0, BLOCK_C), 1 - FROM)
    o = tl.expand_dims(tl.arange(0, BLOCK_C), FROM)
    at = r.to(tl.int64) * stride_r + o.to(tl.int64) * stride_o
    return tl.load(ptr + at, mask=(r < C) & (o < C), other=-float("inf"))


@triton.jit
def matrix_step(matrix, x, EXACT: tl.constexpr):
    """Take a state through the transitions, and return it with the offset removed, and that."""
    FROM: tl.constexpr = 1 if x.shape[0] > 4 else 0  # as in `load_matrix`
    terms = matrix.to(tl.float64) + tl.expand_dims(x, 1 - FROM)
    maximum = finite_shift(tl.max(terms, axis=FROM))
    total = tl.sum(exp_sum_term(terms - tl.expand_dims(maximum, FROM), EXACT), axis=FROM)
    offset = finite_shift(tl.max(x, axis=0))
    return tl.log(total) + (maximum - offset), offset


@triton.jit
def load_ahead(
    batch, score_ptr, maxima_ptr, t, dt, i, num_steps, AHEAD: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Load the emissions and maxima of the AHEAD steps from step i, before the first is used.

    The addresses are those of a sequence.
    """
    c = tl.arange(0, BLOCK_C)
    scores, maxima = (), ()
    for j in tl.static_range(AHEAD):
        row = tl.full([], t, tl.int64) + (i + j) * dt
        inside = i + j <= num_steps
        at = row * batch.emissions.t + c.to(tl.int64) * batch.emissions.c
        mask = (c < batch.C) & inside
        scores += (tl.load(score_ptr + at, mask=mask, other=-float("inf")),)
        maxima += (tl.load(maxima_ptr + row * batch.N, mask=inside, other=0.0),)
    return scores, maxima


@triton.jit
def linear_chain_scan_kernel(
    batch,  # Batch
    transitions,  # StridedSteps
    saved,  # Saved: states and scales are written
    CONSTANT: tl.constexpr,  # whether the transitions are the same at all steps
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Scan alpha of a sequence, or in every other program beta, if the transitions need it."""
    batch = Batch(*batch)
    T, N, C = batch.T, batch.N, batch.C
    if not transition_range(saved.span, BLOCK_PARTS)[0]:
        direction, n = tl.program_id(0) % 2, (tl.program_id(0) // 2).to(tl.int64)
        is_alpha, c = direction == 0, tl.arange(0, BLOCK_C)
        tokens, _ = load_tokens(batch.lengths, n, T)
        num_steps = scan_steps(tokens, is_alpha, SAVE)
        start, end = load_end(batch.start, n, c, C), load_end(batch.end, n, c, C)
        inputs = (batch, batch.emissions.ptr + n * batch.emissions.n, saved.maxima + n)
        t, dt = tl.where(is_alpha, 0, tokens - 1), tl.where(is_alpha, 1, -1)
        scores, maxima = load_ahead(*inputs, t, dt, 0, num_steps, 1, BLOCK_C)
        y = tl.zeros([BLOCK_C], tl.float64)
        x = y + (fold_ends(scores[0], t, tokens, start, end) - finite_shift(maxima[0]))
        at, next_row = state_offset(direction, t, n, T, N, C, SAVE)
        states_ptr = saved.states + at + c
        tl.store(states_ptr, tl.where(is_alpha, x, y), mask=c < C)
        # The scale of a step is stored at the later one of its tokens.
        scale_ptr = saved.scales + n + tl.where(is_alpha, 0, N)
        stride_r = tl.where(is_alpha, transitions.k, transitions.c)
        stride_o = tl.where(is_alpha, transitions.c, transitions.k)
        transitions_ptr = transitions.ptr + n * transitions.n
        if CONSTANT:
            matrix = load_matrix(transitions_ptr, C, stride_r, stride_o, BLOCK_C)
        scores, maxima = load_ahead(*inputs, t, dt, 1, num_steps, AHEAD, BLOCK_C)
        for first in range(1, num_steps + 1, AHEAD):
            left = first + AHEAD
            next_scores, next_maxima = load_ahead(*inputs, t, dt, left, num_steps, AHEAD, BLOCK_C)
            for j in tl.static_range(AHEAD):
                active = first + j <= num_steps
                token = tl.full([], t, tl.int64) + (first + j) * dt
                if not CONSTANT:
                    entered = tl.where(active, tl.where(is_alpha, token - 1, token), 0)
                    step_ptr = transitions_ptr + entered * transitions.t
                    matrix = load_matrix(step_ptr, C, stride_r, stride_o, BLOCK_C)
                y, scale = matrix_step(matrix, x, EXACT)
                emission = fold_ends(scores[j], token, tokens, start, end)
                x = tl.where(active, y + (emission - finite_shift(maxima[j])), x)
                state_ptr = states_ptr + (first + j) * dt * next_row
                tl.store(state_ptr, tl.where(is_alpha, x, y), mask=(c < C) & active)
                mask = active & (is_alpha | (not SAVE))
                tl.store(scale_ptr + token * N, scale, mask=mask)
            scores, maxima = next_scores, next_maxima


@triton.jit
def log_step(
    state_ptr, transitions_ptr, c, C, stride_r, stride_o, EXACT: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return the log-sum-exp of state and transitions for the states c, and the offset removed."""
    maximum = tl.full(c.shape, -float("inf"), tl.float64)
    total, greatest = tl.zeros(c.shape, tl.float64), tl.full([], -float("inf"), tl.float64)
    for k0 in range(0, C, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x = tl.load(state_ptr + k, mask=k < C, other=-float("inf"))
        at = k.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_o
        mask = (k < C)[:, None] & (c < C)[None, :]
        scores = tl.load(transitions_ptr + at, mask=mask, other=-float("inf"))
        terms = scores.to(tl.float64) + x[:, None]
        larger = tl.maximum(maximum, tl.max(terms, axis=0))
        shift = finite_shift(larger)
        total *= exp_sum_term(maximum - shift, EXACT)
        total += tl.sum(exp_sum_term(terms - shift[None, :], EXACT), axis=0)
        maximum, greatest = larger, tl.maximum(greatest, tl.max(x, axis=0))
    offset = finite_shift(greatest)
    return tl.log(total) + (finite_shift(maximum) - offset), offset


@triton.jit
def linear_chain_log_scan_kernel(
    batch,  # Batch
    transitions,  # StridedSteps
    saved,  # Saved: states and scales are written
    recent_ptr,  # [2, 2, N, C] fp64: the last two states of alpha and beta, with emissions
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Scan alpha of a sequence, or in every other program beta, if the transitions need it."""
    batch = Batch(*batch)
    T, N, C = batch.T, batch.N, batch.C
    emissions = batch.emissions
    if not transition_range(saved.span, BLOCK_PARTS)[0]:
        direction, n = tl.program_id(0) % 2, (tl.program_id(0) // 2).to(tl.int64)
        is_alpha, row = direction == 0, tl.full([], N, tl.int64) * C
        tokens, _ = load_tokens(batch.lengths, n, T)
        recent_ptr += direction * 2 * row + n * C
        stride_r = tl.where(is_alpha, transitions.k, transitions.c)
        stride_o = tl.where(is_alpha, transitions.c, transitions.k)
        for i in range(0, scan_steps(tokens, is_alpha, SAVE) + 1):
            t = tl.where(is_alpha, tl.full([], i, tl.int64), tokens - 1 - i)
            maximum = finite_shift(tl.load(saved.maxima + t * N + n))
            step_ptr = transitions.ptr + tl.where(is_alpha, t - 1, t) * transitions.t
            step_ptr += n * transitions.n
            states_ptr = saved.states + state_offset(direction, t, n, T, N, C, SAVE)[0]
            offset = maximum * 0.0
            for c0 in range(0, C, BLOCK_C):
                c = c0 + tl.arange(0, BLOCK_C)
                y = tl.zeros([BLOCK_C], tl.float64)
                if i > 0:
                    before_ptr = recent_ptr + (i + 1) % 2 * row
                    y, offset = log_step(
                        before_ptr, step_ptr, c, C, stride_r, stride_o, EXACT, BLOCK_K
                    )
                at = t * emissions.t + n * emissions.n + c.to(tl.int64) * emissions.c
                score = tl.load(emissions.ptr + at, mask=c < C, other=-float("inf"))
                start = load_end(batch.start, n, c, C)
                end = load_end(batch.end, n, c, C)
                x = y + (fold_ends(score, t, tokens, start, end) - maximum)
                tl.store(recent_ptr + i % 2 * row + c, x, mask=c < C)
                tl.store(states_ptr + c, tl.where(is_alpha, x, y), mask=c < C)
            # The scale of a step is stored at the later one of its tokens.
            scale_ptr = saved.scales + (t + direction) * N + n
            tl.store(scale_ptr, offset, mask=(i > 0) & (is_alpha | (not SAVE)))
            # The next step reads what other threads have stored.
            tl.debug_barrier()
