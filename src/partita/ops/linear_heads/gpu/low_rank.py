"""Kernels of the gradients of both factors of low rank, from one read of the logits' gradient.

Two products would read it twice, and it is far larger than their other factors and results.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["tokens"])
def low_rank_gradients_kernel(
    dlogits,  # [tokens, classes], a half type
    dlogits_stride,
    partials,  # the same memory in fp32
    partials_stride,
    states,  # [tokens, rank], contiguous, in the dtype of dlogits
    factor,  # [classes, rank], likewise
    dfactor,  # [classes, rank] fp32, contiguous, added to
    tokens,
    classes,  # a multiple of 16, so that rows are read in vectors
    rank,
    step,  # classes of a program, a multiple of 16 of at most BLOCK_C
    BLOCK_M: tl.constexpr,  # tokens of a tile
    BLOCK_C: tl.constexpr,
    RANK: tl.constexpr,
):
    """Add dlogits^T states to dfactor for the classes of a program, over all tokens.

    The partial sums of dlogits factor over these classes are written to the first `rank` words that
    the program has of each token. It has read them before: the products take a tile from shared
    memory, behind a barrier of all threads.
    """
    first = tl.program_id(0).to(tl.int64) * step
    column, k = tl.arange(0, BLOCK_C), tl.arange(0, RANK)
    inside = (column < step) & (first + column < classes)
    of_class = (first + column)[:, None] * rank + k[None, :]
    in_factor = inside[:, None] & (k < rank)[None, :]
    b = tl.load(factor + of_class, mask=in_factor, other=0.0)
    total = tl.zeros([BLOCK_C, RANK], tl.float32)
    for start in tl.range(0, tokens, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M).to(tl.int64)
        is_token = (row < tokens)[:, None]
        at = row[:, None] * dlogits_stride + (first + column)[None, :]
        gradient = tl.load(dlogits + at, mask=is_token & inside[None, :], other=0.0)
        in_states = is_token & (k < rank)[None, :]
        x = tl.load(states + row[:, None] * rank + k[None, :], mask=in_states, other=0.0)
        total = tl.dot(tl.trans(gradient), x, total)
        partial = tl.dot(gradient, b)
        at = row[:, None] * partials_stride + first // 2 + k[None, :]
        tl.store(partials + at, partial, mask=in_states)
    total += tl.load(dfactor + of_class, mask=in_factor, other=0.0)
    tl.store(dfactor + of_class, total, mask=in_factor)


@triton.jit(do_not_specialize=["parts"])
def low_rank_sums_kernel(
    partials,  # [tokens, ...] fp32, whose parts are `step` apart
    partials_stride,
    dstates,  # [tokens, rank] fp32, contiguous, added to
    parts,
    rank,
    step,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
):
    """Add the partial sums of a token, in an order that depends on their number alone."""
    token = tl.program_id(0).to(tl.int64)
    part, k = tl.arange(0, PARTS)[:, None], tl.arange(0, RANK)
    at, mask = part * step + k[None, :], (part < parts) & (k < rank)[None, :]
    found = tl.load(partials + token * partials_stride + at, mask=mask, other=0.0)
    at = dstates + token * rank + k
    old = tl.load(at, mask=k < rank, other=0.0)
    tl.store(at, old + tl.sum(found, 0), mask=k < rank)
