"""Kernels that run before the scans: the range of the transitions, and each token's maximum."""

import triton
import triton.language as tl

from .arguments import Batch


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
