"""What surrounds the steps of dense linear chains of many states; see `gluon_steps.py`.

A table has exp(transitions). A step loads the emissions of a block of sequences and of the states
that it enters, and stores both alpha and beta. Alpha is stored with the emission of its token and
beta without it, and the next step reads both from a workspace where they have it. Log Z follows
from the last alpha. See `scan.py` for the recursion.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .scan import log_sum
from .scores import (
    LN2_FP64,
    load_tokens,
    relative_emission,
    transition_range,
)


class Step(NamedTuple):
    """A step of alpha or beta for a block of sequences and of the states that it enters.

    Fields:
        i: the number of the step.
        is_alpha: its direction.
        t: `[BLOCK_N]`, the tokens that it enters.
        n: `[BLOCK_N]`, the sequences.
        tokens: `[BLOCK_N]`, their lengths.
        c: `[BLOCK_C]`, the states.
    """

    i: tl.tensor
    is_alpha: tl.tensor
    t: tl.tensor
    n: tl.tensor
    tokens: tl.tensor
    c: tl.tensor


@triton.jit
def linear_chain_weights_kernel(
    transitions,  # StridedPairs
    span,  # Span
    weights_ptr,  # [2, C, C] fp64
    C,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Store exp(transitions) relative to the greatest, and the same transposed."""
    is_linear, shift = transition_range(span, BLOCK_PARTS)
    if is_linear:
        blocks = tl.cdiv(C, BLOCK)
        k = tl.program_id(0) // blocks * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[:, None]
        c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[None, :]
        mask = (k < C) & (c < C)
        score_ptr = transitions.ptr + k * transitions.k + c * transitions.c
        scores = tl.load(score_ptr, mask=mask, other=0.0)
        weights = tl.exp(scores.to(tl.float64) - shift)
        tl.store(weights_ptr + k * C + c, weights, mask=mask)
        tl.store(weights_ptr + tl.full([], C, tl.int64) * C + c * C + k, weights, mask=mask)


@triton.jit
def load_tokens_of(lengths_ptr, n, N, T):
    """Return the number of tokens of the sequences n, at least 1."""
    if lengths_ptr is None:
        return n * 0 + T
    else:
        tokens = tl.load(lengths_ptr + n, mask=n < N, other=1).to(tl.int64)
        return tl.where((tokens >= 1) & (tokens <= T), tokens, 1)


@triton.jit
def load_scores(batch, maxima_ptr, step):
    """Load emissions, start and end scores `[BLOCK_N, BLOCK_C]` and maxima of tokens.

    Nothing is computed with them yet, so a kernel need not wait for them here.
    """
    N, emissions, start, end = batch.N, batch.emissions, batch.start, batch.end
    t, n, tokens, c = step.t, step.n, step.tokens, step.c
    mask, c = (n < N)[:, None] & (c < batch.C)[None, :], c.to(tl.int64)[None, :]
    at = (t * emissions.t + n * emissions.n)[:, None] + c * emissions.c
    score = tl.load(emissions.ptr + at, mask=mask, other=-float("inf"))
    at_start, at_end = score, score
    if start.ptr is not None:
        at, first = (n * start.n)[:, None] + c * start.c, mask & (t == 0)[:, None]
        at_start = tl.load(start.ptr + at, mask=first, other=0.0)
    if end.ptr is not None:
        at, last = (n * end.n)[:, None] + c * end.c, mask & (t == tokens - 1)[:, None]
        at_end = tl.load(end.ptr + at, mask=last, other=0.0)
    return score, at_start, at_end, tl.load(maxima_ptr + t * N + n, mask=n < N, other=0.0)


@triton.jit
def relative_scores(batch, scores, EXACT: tl.constexpr):
    """Return emissions with start and end scores, relative to the maxima, of `load_scores`."""
    score, start, end, maximum = scores
    score = score.to(tl.float64)
    if batch.start.ptr is not None:
        score += start.to(tl.float64)
    if batch.end.ptr is not None:
        score += end.to(tl.float64)
    return relative_emission(score, maximum[:, None], EXACT, False)


@triton.jit
def save_states(
    states_ptr,  # [T, N, C] of the direction
    scales_ptr,  # [T, N]
    batch,  # Batch
    step,  # Step
    x,  # [BLOCK_N, BLOCK_C], the states with emissions
    y,  # [BLOCK_N, BLOCK_C], the same without
    scale,  # [BLOCK_N]
    SAVE: tl.constexpr,
):
    """Store alpha with the emissions of its tokens or beta without, and the scales of alpha."""
    N, C, t, n, c = batch.N, batch.C, step.t, step.n, step.c
    active = (n < N) & (step.i < step.tokens)
    if SAVE:
        at = (t * N * C + n * C)[:, None] + c[None, :]
        mask = active[:, None] & (c < C)[None, :]
        tl.store(states_ptr + at, tl.where(step.is_alpha, x, y), mask=mask)
    is_first = tl.sum((c == 0).to(tl.int32), axis=0) > 0
    tl.store(scales_ptr + t * N + n, scale, mask=active & step.is_alpha & is_first)


@triton.jit
def enter_tokens(
    before_ptr,  # [N, C], the states before the step
    after_ptr,  # [N, C], those after it
    states_ptr,  # [T, N, C] of the direction
    scales_ptr,  # [T, N]
    batch,  # Batch
    step,  # Step
    y,  # [BLOCK_N, BLOCK_C], the states without emissions
    emission,  # [BLOCK_N, BLOCK_C]
    scale,  # [BLOCK_N]
    SAVE: tl.constexpr,
):
    """Multiply the states that a step has reached by their emissions, and store them.

    Past its last step a sequence keeps its state.
    """
    x = y * emission
    save_states(states_ptr, scales_ptr, batch, step, x, y, scale, SAVE)
    mask = (step.n < batch.N)[:, None] & (step.c < batch.C)[None, :]
    at = step.n[:, None] * batch.C + step.c[None, :]
    before = tl.load(before_ptr + at, mask=mask & (step.i > 0), other=0.0)
    tl.store(after_ptr + at, tl.where((step.i < step.tokens)[:, None], x, before), mask=mask)


@triton.jit
def linear_chain_total_kernel(
    lengths_ptr,  # [N] or None
    saved,  # Saved, without states
    alpha_ptr,  # [N, C] fp64, whose sign bits do not count
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results
    T,
    N,
    C,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Compute log Z of a sequence from its last alpha and the scales of all tokens."""
    is_linear, shift = transition_range(saved.span, BLOCK_PARTS)
    if is_linear:
        n = tl.program_id(0).to(tl.int64)
        tokens, invalid = load_tokens(lengths_ptr, n, T)
        total = tl.full([], 0.0, tl.float64)
        for first in range(0, tokens, BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            at = t.to(tl.int64) * N + n
            terms = tl.load(saved.scales + at, mask=t < tokens, other=0.0) * LN2_FP64
            terms += tl.load(saved.maxima + at, mask=t < tokens, other=0.0)
            total += tl.sum(terms, axis=0)
        c = tl.arange(0, BLOCK_C)
        alpha = tl.load(alpha_ptr + n * C + c, mask=c < C, other=0.0)
        logz = total + shift * (tokens - 1) + log_sum(tl.abs(alpha), False) + invalid
        tl.store(logz_ptr + n, logz)
        tl.store(rounded_ptr + n, logz.to(rounded_ptr.dtype.element_ty))
