"""Alpha and beta of dense linear chains of few states, and what runs before all scans.

Short sequences are scanned here in linear arithmetic or in the log domain, and others in the log
domain; `resident.py` has their linear scan. One program scans alpha of a sequence, and another
scans beta at the same time. A state x of alpha includes the emission of its token, and y does not:

    y[t, c] = sum over k: x[t - 1, k] * exp(transitions[k, c]),   x[t, c] = y[t, c] * exp(e[t, c]).

Beta runs in the other direction over the transposed transitions. Alpha is stored as x and beta as
y, so their product is the posterior of a state times a factor of the token. The emissions e are
relative to each token's maximum, and the transitions to theirs.

Each step is scaled by a power of two that the state before it gives, so that finding it takes no
time between steps. The exponent is stored for the gradient: see `marginals.py`.

Source: Rabiner, A tutorial on hidden Markov models, 1989, with a power of two for the scale.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .arguments import Batch
from .scores import (
    LN2_FP64,
    exp_sum_term,
    exponent_of,
    fold_ends,
    load_end,
    load_tokens,
    power_of_2,
    relative_emission,
    transition_range,
)


@triton.jit
def load_matrix(ptr, C, stride_r, stride_o, shift, IS_LOG: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the transitions of a scan, or with strides exchanged, the transposed ones.

    A linear scan gets exp(transitions - shift) in fp64. The states that a step leaves are along
    axis FROM. Triton does not know which of the strides is 1, and divides axis 0 among the threads
    of a warp. So a thread enters one state, and few threads share the sum over those that it
    leaves. The smallest matrices have no more elements than threads, so this order does not matter
    to them, but with the other one their sums have the layout of vectors.
    """
    FROM: tl.constexpr = 1 if BLOCK_C > 4 else 0
    r = tl.expand_dims(tl.arange(0, BLOCK_C), 1 - FROM)
    o = tl.expand_dims(tl.arange(0, BLOCK_C), FROM)
    at = r.to(tl.int64) * stride_r + o.to(tl.int64) * stride_o
    scores = tl.load(ptr + at, mask=(r < C) & (o < C), other=-float("inf"))
    if IS_LOG:
        return scores
    else:
        return tl.exp(scores.to(tl.float64) - shift)


@triton.jit
def chain_step(matrix, x, EXACT: tl.constexpr, IS_LOG: tl.constexpr):
    """Take a state through the transitions, and return it with the exponent or offset removed."""
    FROM: tl.constexpr = 1 if x.shape[0] > 4 else 0  # as in `load_matrix`
    if IS_LOG:
        terms = matrix.to(tl.float64) + tl.expand_dims(x, 1 - FROM)
        maximum = finite_shift(tl.max(terms, axis=FROM))
        total = tl.sum(exp_sum_term(terms - tl.expand_dims(maximum, FROM), EXACT), axis=FROM)
        offset = finite_shift(tl.max(x, axis=0))
        return tl.log(total) + (maximum - offset), offset
    else:
        exponent = exponent_of(tl.max(x, axis=0))
        y = tl.sum(matrix * tl.expand_dims(x, 1 - FROM), axis=FROM)
        return y * power_of_2(-exponent), exponent.to(tl.float64)


@triton.jit
def log_sum(x, IS_LOG: tl.constexpr):
    """Return the logarithm of the sum over states."""
    if IS_LOG:
        maximum = finite_shift(tl.max(x, axis=0))
        return tl.log(tl.sum(tl.exp(x - maximum), axis=0)) + maximum
    else:
        return tl.log(tl.sum(x, axis=0))


@triton.jit
def load_ahead(
    batch, score_ptr, maxima_ptr, t, dt, i, num_steps, AHEAD: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Load the emissions and maxima of the AHEAD steps from step i, before the first is used.

    The addresses are those of a sequence. Without one of the maxima these are 0.
    """
    c = tl.arange(0, BLOCK_C)
    scores, maxima = (), ()
    for j in tl.static_range(AHEAD):
        row = tl.full([], t, tl.int64) + (i + j) * dt
        inside = i + j <= num_steps
        at = row * batch.emissions.t + c.to(tl.int64) * batch.emissions.c
        mask = (c < batch.C) & inside
        scores += (tl.load(score_ptr + at, mask=mask, other=-float("inf")),)
        if maxima_ptr is None:
            maxima += (tl.full([], 0.0, tl.float64),)
        else:
            maxima += (tl.load(maxima_ptr + row * batch.N, mask=inside, other=0.0),)
    return scores, maxima


@triton.jit
def maximum_of_token(maxima_ptr, loaded, score, active):
    """Return the maximum of a token, which was loaded unless there is no address of the maxima."""
    if maxima_ptr is None:
        return tl.where(active, tl.max(score, axis=0), 0.0)
    else:
        return loaded


@triton.jit
def scan_sequence(
    batch,  # Batch
    transitions,  # StridedSteps
    saved,  # Saved: states and scales are written if SAVE
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results
    maxima_ptr,  # [T, N] fp64, or None if they are computed here, and saved
    shift,  # the greatest transition
    IS_LOG: tl.constexpr,
    CONSTANT: tl.constexpr,
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Scan alpha of a sequence and compute log Z, or with SAVE in every other program scan beta."""
    T, N, C = batch.T, batch.N, batch.C
    is_alpha = tl.program_id(0) % 2 == 0 if SAVE else tl.program_id(0) >= 0
    n = (tl.program_id(0) // 2 if SAVE else tl.program_id(0)).to(tl.int64)
    c, rows = tl.arange(0, BLOCK_C), tl.full([], T, tl.int64) * N
    tokens, invalid = load_tokens(batch.lengths, n, T)
    start = load_end(batch.start, n, c, C)
    end = load_end(batch.end, n, c, C)
    if maxima_ptr is not None:
        maxima_ptr += n
    score_ptr = batch.emissions.ptr + n * batch.emissions.n
    t = tl.where(is_alpha, 0, tokens - 1)
    loaded, loaded_maxima = load_ahead(batch, score_ptr, maxima_ptr, t, 0, 0, 0, 1, BLOCK_C)
    first_score = fold_ends(loaded[0], t, tokens, start, end)
    first_maximum = maximum_of_token(maxima_ptr, loaded_maxima[0], first_score, True)
    y0 = tl.full([BLOCK_C], 0.0 if IS_LOG else 1.0, tl.float64)
    emission = relative_emission(first_score, first_maximum, EXACT, IS_LOG)
    x = y0 + emission if IS_LOG else y0 * emission
    if SAVE:
        states_ptr = saved.states + tl.where(is_alpha, n, rows + n) * C
        scales_ptr = saved.scales + n
        first_ptr = states_ptr + tl.full([], t, tl.int64) * N * C + c
        tl.store(first_ptr, tl.where(is_alpha, x, y0), mask=c < C)
        if maxima_ptr is None:
            tl.store(saved.maxima + n, first_maximum, mask=is_alpha)
    stride_r = tl.where(is_alpha, transitions.k, transitions.c)
    stride_o = tl.where(is_alpha, transitions.c, transitions.k)
    transitions_ptr = transitions.ptr + n * transitions.n
    dt, num_steps = tl.where(is_alpha, 1, -1), tokens - 1
    if CONSTANT:
        matrix = load_matrix(transitions_ptr, C, stride_r, stride_o, shift, IS_LOG, BLOCK_C)
    total, scale_sum = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    scores, maxima = load_ahead(batch, score_ptr, maxima_ptr, t, dt, 1, num_steps, AHEAD, BLOCK_C)
    for first in range(1, num_steps + 1, AHEAD):
        next_scores, next_maxima = load_ahead(
            batch, score_ptr, maxima_ptr, t, dt, first + AHEAD, num_steps, AHEAD, BLOCK_C
        )
        for j in tl.static_range(AHEAD):
            active = first + j <= num_steps
            row = tl.full([], t, tl.int64) + (first + j) * dt
            score = fold_ends(scores[j], row, tokens, start, end)
            maximum = maximum_of_token(maxima_ptr, maxima[j], score, active)
            emission = relative_emission(score, maximum, EXACT, IS_LOG)
            if not CONSTANT:
                entered = tl.where(active, tl.where(dt > 0, row - 1, row), 0)
                step_ptr = transitions_ptr + entered * transitions.t
                matrix = load_matrix(step_ptr, C, stride_r, stride_o, shift, IS_LOG, BLOCK_C)
            y, scale = chain_step(matrix, x, EXACT, IS_LOG)
            x = tl.where(active, y + emission if IS_LOG else y * emission, x)
            total += maximum
            scale_sum += tl.where(active, scale, 0.0)
            if SAVE:
                state = tl.where(dt > 0, x, y)
                tl.store(states_ptr + row * N * C + c, state, mask=(c < C) & active)
                tl.store(scales_ptr + row * N, scale, mask=active & (dt > 0))
                if maxima_ptr is None:
                    at = saved.maxima + n + row * N
                    tl.store(at, maximum, mask=active & (dt > 0))
        scores, maxima = next_scores, next_maxima
    if is_alpha:
        if not IS_LOG:
            scale_sum = scale_sum * LN2_FP64 + shift * (tokens - 1)
        logz = first_maximum + total + scale_sum + log_sum(x, IS_LOG) + invalid
        tl.store(logz_ptr + n, logz)
        tl.store(rounded_ptr + n, logz.to(rounded_ptr.dtype.element_ty))


@triton.jit
def linear_chain_scan_kernel(
    batch,  # Batch
    transitions,  # StridedSteps
    saved,  # Saved: states and scales are written if SAVE
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results
    CONSTANT: tl.constexpr,  # whether the transitions are the same at all steps
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Scan a sequence in one direction in the log domain, if the transitions need it."""
    batch = Batch(*batch)
    is_linear, shift = transition_range(saved.span, BLOCK_PARTS)
    if not is_linear:
        data = (batch, transitions, saved, logz_ptr, rounded_ptr, saved.maxima, shift)
        scan_sequence(*data, True, CONSTANT, SAVE, EXACT, AHEAD, BLOCK_C)


@triton.jit
def linear_chain_prepare_kernel(
    batch,  # Batch
    transitions,  # StridedPairs, if the span has parts
    span,  # Span, written
    maxima_ptr,  # [T, N] fp64
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
    program = tl.program_id(0)
    if program < span.parts:
        k, c = program * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
        pair = k.to(tl.int64) * transitions.k + c.to(tl.int64) * transitions.c
        is_pair = (k < C) & (c < C)
        steps = tl.load(transitions.ptr + pair, mask=is_pair, other=-float("inf")).to(tl.float64)
        tl.store(span.ptr + 2 * program, tl.max(tl.max(steps, axis=1), axis=0))
        steps = tl.where(is_pair, steps, float("inf"))
        tl.store(span.ptr + 2 * program + 1, tl.min(tl.min(steps, axis=1), axis=0))
    else:
        row = (program - span.parts).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        row_inside = row < tl.full([], T, tl.int64) * N
        t, n = row // N, row % N
        c = tl.arange(0, BLOCK_C)[None, :]
        if batch.lengths is None:
            tokens = tl.full([TOKENS], T, tl.int64)
        else:
            tokens = tl.load(batch.lengths + n, mask=row_inside, other=0).to(tl.int64)
        inside = (row_inside & (t < tokens))[:, None] & (c < C)
        at = (t * batch.emissions.t + n * batch.emissions.n)[:, None]
        at += c.to(tl.int64) * batch.emissions.c
        scores = tl.load(batch.emissions.ptr + at, mask=inside, other=0.0).to(tl.float64)
        if batch.start.ptr is not None:
            at = n[:, None] * batch.start.n + c.to(tl.int64) * batch.start.c
            first = inside & (t == 0)[:, None]
            scores += tl.load(batch.start.ptr + at, mask=first, other=0.0).to(tl.float64)
        if batch.end.ptr is not None:
            at = n[:, None] * batch.end.n + c.to(tl.int64) * batch.end.c
            last = inside & (t == tokens - 1)[:, None]
            scores += tl.load(batch.end.ptr + at, mask=last, other=0.0).to(tl.float64)
        maximum = tl.max(tl.where(c < C, scores, -float("inf")), axis=1)
        tl.store(maxima_ptr + row, maximum, mask=row_inside)
