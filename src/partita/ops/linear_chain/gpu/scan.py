"""Alpha and beta of dense linear chains: what runs before and after all scans, and the log domain.

One program scans alpha of a sequence, and another scans beta at the same time. A state x includes
the emission of its token, and y does not:

    y[t, c] = sum over k: x[t - 1, k] * exp(transitions[k, c]),   x[t, c] = y[t, c] * exp(e[t, c]).

Beta runs in the other direction over the transposed transitions. Alpha is stored as x and beta as
y, so their product is the posterior of a state times a factor of the token. The emissions e are
relative to each token's maximum, and the transitions to theirs.

Each step is scaled by a power of two that the state before it gives, so that finding it takes no
time between steps. The exponent is stored, see `gradient.py`.

For a gradient both scans take all steps, and all states are stored. For log Z alone each scan takes
half of the steps. It keeps the state of the middle token, where both meet: Z is the sum over states
of alpha * beta at any token.

In the log domain the transitions among few states are in registers, and so is the state. Those
among many do not fit there, so states pass from one step to the next through memory.

Source: Rabiner, A tutorial on hidden Markov models, 1989, with a power of two for the scale.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from ....primitives.gpu.memory import load_length
from .arguments import Batch
from .scores import (
    LN2_FP64,
    exp_sum_term,
    fold_ends,
    load_end,
    load_rows,
    scan_steps,
    state_offset,
    token_of_rows,
    token_scores,
    transition_range,
)


@triton.jit
def linear_chain_prepare_kernel(
    batch,  # Batch
    transitions,  # StridedSteps, if the span has parts
    span,  # Span, written
    maxima_ptr,  # [T, N] fp64
    ranges,  # programs that store ranges, one for each part of each set
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Store the range of the transitions from ROWS states, or TOKENS tokens' greatest emissions.

    Emissions count with the start score of the first and the end score of the last token. Past a
    length the maximum is 0.
    """
    batch = Batch(*batch)
    T, N, C = batch.T, batch.N, batch.C
    program, c = tl.program_id(0), tl.arange(0, BLOCK_C)
    if program < ranges:
        matrix_ptr = transitions.ptr + (program // span.parts).to(tl.int64) * transitions.n
        k = program % span.parts * ROWS + tl.arange(0, ROWS)[:, None]
        pair = k.to(tl.int64) * transitions.k + c.to(tl.int64)[None, :] * transitions.c
        is_pair = (k < C) & (c < C)[None, :]
        steps = tl.load(matrix_ptr + pair, mask=is_pair, other=-float("inf")).to(tl.float64)
        tl.store(span.ptr + 2 * program, tl.max(tl.max(steps, axis=1), axis=0))
        steps = tl.where(is_pair, steps, float("inf"))
        tl.store(span.ptr + 2 * program + 1, tl.min(tl.min(steps, axis=1), axis=0))
    else:
        row = (program - ranges).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        row_inside = row < tl.full([], T, tl.int64) * N
        t, n, tokens, _ = token_of_rows(batch.lengths, row, row_inside, T, N)
        inside = (row_inside & (t < tokens))[:, None] & (c < C)[None, :]
        scores = token_scores(batch, t, n, tokens, c, inside, 0.0)
        maximum = tl.max(tl.where((c < C)[None, :], scores, -float("inf")), axis=1)
        tl.store(maxima_ptr + row, maximum, mask=row_inside)


@triton.jit
def linear_chain_table_kernel(
    transitions,  # StridedSteps
    span,  # Span, or None for the transitions as they are
    table_ptr,  # [sets, C, C], or [sets, 2, C, C] with the same transposed
    C,
    number,  # of elements of the table of a set
    sets,  # of transitions: N, or 1 if sequences share them
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Store transitions side by side, or exp of them relative to the greatest.

    Nothing is stored if the transitions need the log domain.
    """
    blocks = tl.cdiv(number, BLOCK)
    n = (tl.program_id(0) // blocks % sets).to(tl.int64)
    serves, shift = transition_range(span, n, BLOCK_PARTS, span is None)
    if serves:
        at = (tl.program_id(0) - n * blocks) * BLOCK + tl.arange(0, BLOCK)
        pairs = tl.full([], C, tl.int64) * C
        mask, pair = at < number, at % pairs
        k = tl.where(at < pairs, pair // C, pair % C)
        c = tl.where(at < pairs, pair % C, pair // C)
        matrix_ptr = transitions.ptr + n * transitions.n
        scores = tl.load(matrix_ptr + k * transitions.k + c * transitions.c, mask=mask)
        if span is not None:
            scores = tl.exp(scores.to(tl.float64) - shift)
        tl.store(table_ptr + n * number + at, scores.to(table_ptr.dtype.element_ty), mask=mask)


@triton.jit
def linear_chain_total_kernel(
    lengths_ptr,  # [N] or None
    saved,  # Saved
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results
    T,
    N,
    C,
    SAVE: tl.constexpr,
    PARALLEL: tl.constexpr,  # whether linear scans are parallel in time, which compute log Z
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Compute log Z of a sequence from alpha and beta at a token and the scales of all tokens."""
    n = tl.program_id(0).to(tl.int64)
    is_linear, shift = transition_range(saved.span, n, BLOCK_PARTS)
    serves = True
    if PARALLEL:
        serves = not is_linear
    if serves:
        tokens, invalid = load_length(lengths_ptr, n, T, 1, 1)
        maxima, scales = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
        for first in range(0, tokens, BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            at, inside = t.to(tl.int64) * N + n, t < tokens
            maxima += tl.sum(tl.load(saved.maxima + at, mask=inside, other=0.0), axis=0)
            entered = inside & (t > 0)
            scales += tl.sum(tl.load(saved.scales + at, mask=entered, other=0.0), axis=0)
        c, other = tl.arange(0, BLOCK_C), tl.where(is_linear, 0.0, -float("inf"))
        row, rows = n, tl.full([], N, tl.int64)
        if SAVE:
            row, rows = n + (tokens - 1) * rows, rows * T
        alpha = tl.load(saved.states + row * C + c, mask=c < C, other=other)
        beta = tl.load(saved.states + (rows + row) * C + c, mask=c < C, other=other)
        if is_linear:
            log_sum = tl.log(tl.sum(alpha * beta, axis=0))
            log_sum += scales * LN2_FP64 + shift * (tokens - 1)
        else:
            maximum = finite_shift(tl.max(alpha + beta, axis=0))
            log_sum = tl.log(tl.sum(tl.exp(alpha + beta - maximum), axis=0))
            log_sum += scales + maximum
        logz = maxima + log_sum + invalid
        tl.store(logz_ptr + n, logz)
        tl.store(rounded_ptr + n, logz.to(rounded_ptr.dtype.element_ty))


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
    T, N, C, emissions = batch.T, batch.N, batch.C, batch.emissions
    direction, n = tl.program_id(0) % 2, (tl.program_id(0) // 2).to(tl.int64)
    if not transition_range(saved.span, n, BLOCK_PARTS)[0]:
        is_alpha, c = direction == 0, tl.arange(0, BLOCK_C)
        tokens, _ = load_length(batch.lengths, n, T, 1, 1)
        num_steps = scan_steps(tokens, is_alpha, SAVE)
        start, end = load_end(batch.start, n, c, C), load_end(batch.end, n, c, C)
        t = tl.where(is_alpha, 0, tokens - 1).to(tl.int64)
        dt = tl.where(is_alpha, 1, -1).to(tl.int64)
        score_ptr = emissions.ptr + n * emissions.n + t * emissions.t
        inputs = (score_ptr + c.to(tl.int64) * emissions.c, saved.maxima + t * N + n)
        strides = (dt * emissions.t, dt * N, c, C)
        scores, maxima = load_rows(*inputs, 0, num_steps, *strides, 1)
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
        scores, maxima = load_rows(*inputs, 1, num_steps, *strides, AHEAD)
        for first in range(1, num_steps + 1, AHEAD):
            following = load_rows(*inputs, first + AHEAD, num_steps, *strides, AHEAD)
            for j in tl.static_range(AHEAD):
                active = first + j <= num_steps
                token = t + (first + j) * dt
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
            scores, maxima = following


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
    direction, n = tl.program_id(0) % 2, (tl.program_id(0) // 2).to(tl.int64)
    if not transition_range(saved.span, n, BLOCK_PARTS)[0]:
        is_alpha, row = direction == 0, tl.full([], N, tl.int64) * C
        tokens, _ = load_length(batch.lengths, n, T, 1, 1)
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
