"""Kernels that run before the scans: the range of the transitions, and each token's maximum."""

import triton
import triton.language as tl


@triton.jit
def _store_range(
    transitions_ptr,
    range_ptr,
    part,
    C,
    trans_k,
    trans_c,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Store the greatest and the least transition from ROWS states."""
    k, c = part * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK_C)[None, :]
    at = k.to(tl.int64) * trans_k + c.to(tl.int64) * trans_c
    inside = (k < C) & (c < C)
    scores = tl.load(transitions_ptr + at, mask=inside, other=-float("inf")).to(tl.float64)
    tl.store(range_ptr + 2 * part, tl.max(tl.max(scores, axis=1), axis=0))
    scores = tl.where(inside, scores, float("inf"))
    tl.store(range_ptr + 2 * part + 1, tl.min(tl.min(scores, axis=1), axis=0))


@triton.jit
def linear_chain_prepare_kernel(
    emissions_ptr,  # [T, N, C]
    transitions_ptr,  # [C, C] if parts > 0
    start_ptr,  # [N, C] or None
    end_ptr,  # [N, C] or None
    lengths_ptr,  # [N] or None
    range_ptr,  # [parts, 2] fp64
    maxima_ptr,  # [T, N] fp64
    T,
    N,
    C,
    parts,
    stride_t,
    stride_n,
    stride_c,
    trans_k,
    trans_c,
    start_n,
    start_c,
    end_n,
    end_c,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Store the range of the transitions, or the greatest emission of each of TOKENS tokens.

    Emissions count with the start score of the first and the end score of the last token. Past a
    length the maximum is 0.
    """
    program = tl.program_id(0)
    if program < parts:
        _store_range(transitions_ptr, range_ptr, program, C, trans_k, trans_c, ROWS, BLOCK_C)
    else:
        row = (program - parts).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        row_inside = row < tl.full([], T, tl.int64) * N
        t, n = row // N, row % N
        c = tl.arange(0, BLOCK_C)[None, :]
        if lengths_ptr is None:
            tokens = tl.full([TOKENS], T, tl.int64)
        else:
            tokens = tl.load(lengths_ptr + n, mask=row_inside, other=0).to(tl.int64)
        inside = (row_inside & (t < tokens))[:, None] & (c < C)
        at = (t * stride_t + n * stride_n)[:, None] + c.to(tl.int64) * stride_c
        scores = tl.load(emissions_ptr + at, mask=inside, other=0.0).to(tl.float64)
        if start_ptr is not None:
            at = n[:, None] * start_n + c.to(tl.int64) * start_c
            first = inside & (t == 0)[:, None]
            scores += tl.load(start_ptr + at, mask=first, other=0.0).to(tl.float64)
        if end_ptr is not None:
            at = n[:, None] * end_n + c.to(tl.int64) * end_c
            last = inside & (t == tokens - 1)[:, None]
            scores += tl.load(end_ptr + at, mask=last, other=0.0).to(tl.float64)
        maximum = tl.max(tl.where(c < C, scores, -float("inf")), axis=1)
        tl.store(maxima_ptr + row, maximum, mask=row_inside)
