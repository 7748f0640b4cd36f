"""What surrounds the steps of dense linear chains of many states; see `gluon_steps.py`.

A step loads the emissions of a block of sequences and of the states
that it enters, and stores both alpha and beta. Alpha is stored with the emission of its token and
beta without it, and the next step reads both from a workspace where they have it. See `scan.py` for
the recursion.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .scores import exp_split, scan_steps, state_offset


class Step(NamedTuple):
    """A step of alpha or beta for a block of sequences and of the states that it enters.

    Fields:
        i: the number of the step.
        direction: 0 for alpha, 1 for beta.
        t: `[BLOCK_N]`, the tokens that it enters.
        n: `[BLOCK_N]`, the sequences.
        tokens: `[BLOCK_N]`, their lengths.
        c: `[BLOCK_C]`, the states.
    """

    i: tl.tensor
    direction: tl.tensor
    t: tl.tensor
    n: tl.tensor
    tokens: tl.tensor
    c: tl.tensor


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
    """Load emissions, start and end scores `[BLOCK_N, BLOCK_C]`, and maxima if there are some.

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
    maximum = t
    if maxima_ptr is not None:
        maximum = tl.load(maxima_ptr + t * N + n, mask=n < N, other=0.0)
    return score, at_start, at_end, maximum


@triton.jit
def summed_scores(batch, scores):
    """Return the sums of emissions, start and end scores of `load_scores`."""
    score = scores[0].to(tl.float64)
    if batch.start.ptr is not None:
        score += scores[1].to(tl.float64)
    if batch.end.ptr is not None:
        score += scores[2].to(tl.float64)
    return score


@triton.jit
def relative_scores(batch, scores, EXACT: tl.constexpr):
    """Return exp of the summed scores relative to the maxima."""
    return exp_split(summed_scores(batch, scores) - finite_shift(scores[3])[:, None], EXACT)


@triton.jit
def save_states(
    saved,  # Saved: states and scales are written
    batch,  # Batch
    step,  # Step
    x,  # [BLOCK_N, BLOCK_C], the states with emissions
    y,  # [BLOCK_N, BLOCK_C], the same without
    scale,  # [BLOCK_N]
    SAVE: tl.constexpr,
):
    """Store alpha with the emissions of its tokens or beta without, and the scales.

    The scale of a step is stored at the later one of its tokens.
    """
    T, N, C, t, n, c = batch.T, batch.N, batch.C, step.t, step.n, step.c
    is_alpha = step.direction == 0
    active = (n < N) & (step.i <= scan_steps(step.tokens, is_alpha, SAVE))
    at, _ = state_offset(step.direction, t, n, T, N, C, SAVE)
    mask = active[:, None] & (c < C)[None, :]
    tl.store(saved.states + at[:, None] + c[None, :], tl.where(is_alpha, x, y), mask=mask)
    is_first = tl.sum((c == 0).to(tl.int32), axis=0) > 0
    active = active & is_first & (step.i > 0) & (is_alpha | (not SAVE))
    tl.store(saved.scales + (t + step.direction) * N + n, scale, mask=active)
