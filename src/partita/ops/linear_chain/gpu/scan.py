"""Kernels that run before and after all scans of alpha and beta of dense linear chains.

One program scans alpha of a sequence, and another scans beta at the same time. A state x includes
the emission of its token, and y does not:

    y[t, c] = sum over k: x[t - 1, k] * exp(transitions[k, c]),   x[t, c] = y[t, c] * exp(e[t, c]).

Beta runs in the other direction over the transposed transitions. Alpha is stored as x and beta as
y, so their product is the posterior of a state times a factor of the token. The emissions e are
relative to each token's maximum, and the transitions to theirs.

Each step is scaled by a power of two that the state before it gives, so that finding it takes no
time between steps. The exponent is stored, see `marginals.py`.

For a gradient both scans take all steps, and all states are stored. For log Z alone each scan takes
half of the steps. It keeps the state of the middle token, where both meet: Z is the sum over states
of alpha * beta at any token.

Source: Rabiner, A tutorial on hidden Markov models, 1989, with a power of two for the scale.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .arguments import Batch
from .scores import (
    LN2_FP64,
    load_tokens,
    serving_range,
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
    if program < span.parts:
        k = program * ROWS + tl.arange(0, ROWS)[:, None]
        pair = k.to(tl.int64) * transitions.k + c.to(tl.int64)[None, :] * transitions.c
        is_pair = (k < C) & (c < C)[None, :]
        steps = tl.load(transitions.ptr + pair, mask=is_pair, other=-float("inf")).to(tl.float64)
        tl.store(span.ptr + 2 * program, tl.max(tl.max(steps, axis=1), axis=0))
        steps = tl.where(is_pair, steps, float("inf"))
        tl.store(span.ptr + 2 * program + 1, tl.min(tl.min(steps, axis=1), axis=0))
    else:
        row = (program - span.parts).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
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
    table_ptr,  # [C, C], or [2, C, C] with the same transposed
    C,
    number,  # of elements of the table
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Store transitions side by side, or exp of them relative to the greatest.

    Nothing is stored if the transitions need the log domain.
    """
    serves, shift = serving_range(span, span is None, BLOCK_PARTS)
    if serves:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        pairs = tl.full([], C, tl.int64) * C
        mask, pair = at < number, at % pairs
        k = tl.where(at < pairs, pair // C, pair % C)
        c = tl.where(at < pairs, pair % C, pair // C)
        scores = tl.load(transitions.ptr + k * transitions.k + c * transitions.c, mask=mask)
        if span is not None:
            scores = tl.exp(scores.to(tl.float64) - shift)
        tl.store(table_ptr + at, scores.to(table_ptr.dtype.element_ty), mask=mask)


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
    is_linear, shift = transition_range(saved.span, BLOCK_PARTS)
    serves = True
    if PARALLEL:
        serves = not is_linear
    if serves:
        n = tl.program_id(0).to(tl.int64)
        tokens, invalid = load_tokens(lengths_ptr, n, T)
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
