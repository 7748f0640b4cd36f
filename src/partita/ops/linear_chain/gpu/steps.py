"""Alpha and beta of dense linear chains of many states: one launch for each step.

The programs of a launch share the states that a step enters, and take a block of sequences at a
time. A product of states and exp(transitions) in fp64 serves all sequences of the block. Alpha is
read where the launch before has stored it. Beta is stored without the emission of its token, and
the next launch reads it from a workspace where it has that emission. See `scan.py` for the
recursion.
"""

import triton
import triton.language as tl

from .scan import log_sum
from .scores import (
    LN2_FP64,
    exponent_of,
    load_tokens,
    power_of_2,
    relative_emission,
    transition_range,
)


@triton.jit
def linear_chain_weights_kernel(
    transitions_ptr,  # [C, C]
    range_ptr,  # [parts, 2] fp64
    weights_ptr,  # [2, C, C] fp64
    C,
    parts,
    trans_k,
    trans_c,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Store exp(transitions) relative to the greatest, and the same transposed."""
    is_linear, shift = transition_range(range_ptr, parts, BLOCK_PARTS)
    if is_linear:
        blocks = tl.cdiv(C, BLOCK)
        k = tl.program_id(0) // blocks * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[:, None]
        c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK).to(tl.int64)[None, :]
        mask = (k < C) & (c < C)
        scores = tl.load(transitions_ptr + k * trans_k + c * trans_c, mask=mask, other=0.0)
        weights = tl.exp(scores.to(tl.float64) - shift)
        tl.store(weights_ptr + k * C + c, weights, mask=mask)
        tl.store(weights_ptr + tl.full([], C, tl.int64) * C + c * C + k, weights, mask=mask)


@triton.jit
def product_step(state_ptr, weights_ptr, n, c, N, C, SPLITS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return states times weights `[BLOCK_N, BLOCK_C]`, and the exponents removed.

    The sum is split over warps as a batch of products.
    """
    lane = tl.arange(0, SPLITS)[:, None, None] * BLOCK_K
    total = tl.zeros([SPLITS, n.shape[0], c.shape[0]], tl.float64)
    maximum = tl.zeros([n.shape[0]], tl.float64)
    for k0 in range(0, C, SPLITS * BLOCK_K):
        k = k0 + lane + tl.arange(0, BLOCK_K)[None, None, :]
        mask = (n < N)[None, :, None] & (k < C)
        x = tl.load(state_ptr + n[None, :, None] * C + k, mask=mask, other=0.0)
        k = k0 + lane + tl.arange(0, BLOCK_K)[None, :, None]
        mask = (k < C) & (c < C)[None, None, :]
        weights_at = k.to(tl.int64) * C + c[None, None, :]
        weights = tl.load(weights_ptr + weights_at, mask=mask, other=0.0)
        total = tl.dot(x, weights, total, out_dtype=tl.float64)
        maximum = tl.maximum(maximum, tl.max(tl.max(x, axis=2), axis=0))
    exponent = exponent_of(maximum)
    return tl.sum(total, axis=0) * power_of_2(-exponent)[:, None], exponent.to(tl.float64)


@triton.jit
def load_tokens_of(lengths_ptr, n, N, T):
    """Return the number of tokens of the sequences n, at least 1."""
    if lengths_ptr is None:
        return n * 0 + T
    else:
        tokens = tl.load(lengths_ptr + n, mask=n < N, other=1).to(tl.int64)
        return tl.where((tokens >= 1) & (tokens <= T), tokens, 1)


@triton.jit
def load_scores(addresses, token, c, sizes, strides):
    """Load emissions, start and end scores `[BLOCK_N, BLOCK_C]` and maxima of tokens.

    Nothing is computed with them yet, so a kernel need not wait for them here.
    """
    emissions_ptr, start_ptr, end_ptr, maxima_ptr = addresses
    t, n, tokens = token
    N, C = sizes
    stride_t, stride_n, stride_c, start_n, start_c, end_n, end_c = strides
    mask, c = (n < N)[:, None] & (c < C)[None, :], c.to(tl.int64)[None, :]
    at = (t * stride_t + n * stride_n)[:, None] + c * stride_c
    score = tl.load(emissions_ptr + at, mask=mask, other=-float("inf"))
    start, end = score, score
    if start_ptr is not None:
        at, first = (n * start_n)[:, None] + c * start_c, mask & (t == 0)[:, None]
        start = tl.load(start_ptr + at, mask=first, other=0.0)
    if end_ptr is not None:
        at, last = (n * end_n)[:, None] + c * end_c, mask & (t == tokens - 1)[:, None]
        end = tl.load(end_ptr + at, mask=last, other=0.0)
    return score, start, end, tl.load(maxima_ptr + t * N + n, mask=n < N, other=0.0)


@triton.jit
def relative_scores(scores, addresses, EXACT: tl.constexpr):
    """Return emissions with start and end scores, relative to the maxima."""
    score, start, end, maximum = scores
    _, start_ptr, end_ptr, _ = addresses
    score = score.to(tl.float64)
    if start_ptr is not None:
        score += start.to(tl.float64)
    if end_ptr is not None:
        score += end.to(tl.float64)
    return relative_emission(score, maximum[:, None], EXACT, False)


@triton.jit
def save_states(
    results,  # (states, scales)
    step,  # (number of the step, whether it is one of alpha)
    sizes,  # (N, C)
    x,  # [BLOCK_N, BLOCK_C], the states with emissions
    y,  # [BLOCK_N, BLOCK_C], the same without
    scale,  # [BLOCK_N]
    token,  # (t, n, tokens) [BLOCK_N]
    c,  # [BLOCK_C]
    SAVE: tl.constexpr,
):
    """Store alpha with the emissions of its tokens or beta without, and the scales of alpha."""
    states_ptr, scales_ptr = results
    i, is_alpha = step
    t, n, tokens = token
    N, C = sizes
    active = (n < N) & (i < tokens)
    if SAVE:
        at = (t * N * C + n * C)[:, None] + c[None, :]
        mask = active[:, None] & (c < C)[None, :]
        tl.store(states_ptr + at, tl.where(is_alpha, x, y), mask=mask)
    is_first = tl.sum((c == 0).to(tl.int32), axis=0) > 0
    tl.store(scales_ptr + t * N + n, scale, mask=active & is_alpha & is_first)


@triton.jit
def enter_tokens(
    results,  # (recent states before and after the step, states, scales)
    step,  # (number of the step, whether it is one of alpha)
    sizes,  # (N, C)
    y,  # [BLOCK_N, BLOCK_C], the states without emissions
    emission,  # [BLOCK_N, BLOCK_C]
    scale,  # [BLOCK_N]
    token,  # (t, n, tokens) [BLOCK_N]
    c,  # [BLOCK_C]
    SAVE: tl.constexpr,
):
    """Multiply the states that a step has reached by their emissions, and store them.

    Past its last step a sequence keeps its state.
    """
    before_ptr, after_ptr, states_ptr, scales_ptr = results
    _, n, tokens = token
    i, _ = step
    N, C = sizes
    x = y * emission
    save_states((states_ptr, scales_ptr), step, sizes, x, y, scale, token, c, SAVE)
    mask = (n < N)[:, None] & (c < C)[None, :]
    at = n[:, None] * C + c[None, :]
    before = tl.load(before_ptr + at, mask=mask & (i > 0), other=0.0)
    tl.store(after_ptr + at, tl.where((i < tokens)[:, None], x, before), mask=mask)


@triton.jit(do_not_specialize=["i"])
def linear_chain_step_kernel(
    emissions_ptr,  # [T, N, C]
    weights_ptr,  # [2, C, C] fp64
    start_ptr,  # [N, C] or None
    end_ptr,  # [N, C] or None
    lengths_ptr,  # [N] or None
    range_ptr,  # [parts, 2] fp64
    maxima_ptr,  # [T, N] fp64
    states_ptr,  # [2, T, N, C] fp64 if SAVE
    scales_ptr,  # [T, N] fp64
    recent_ptr,  # [2, 2, N, C] fp64: the last two states of alpha and beta, with emissions
    i,
    T,
    N,
    C,
    parts,
    stride_t,
    stride_n,
    stride_c,
    start_n,
    start_c,
    end_n,
    end_c,
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Take step i of alpha, and of beta with SAVE, for a block of sequences and of states."""
    if transition_range(range_ptr, parts, BLOCK_PARTS)[0]:
        blocks_c = tl.cdiv(C, BLOCK_C)
        c = tl.program_id(0) % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)
        rest = tl.program_id(0) // blocks_c
        direction = rest % 2 if SAVE else rest * 0
        n0 = (rest // 2 if SAVE else rest) * BLOCK_N
        is_alpha = direction == 0
        row = tl.full([], N, tl.int64) * C
        before_ptr = recent_ptr + (direction * 2 + (i + 1) % 2) * row
        after_ptr = recent_ptr + (direction * 2 + i % 2) * row
        results = (before_ptr, after_ptr, states_ptr + direction * row * T, scales_ptr)
        addresses = (emissions_ptr, start_ptr, end_ptr, maxima_ptr)
        strides = (stride_t, stride_n, stride_c, start_n, start_c, end_n, end_c)
        step, sizes = (i, is_alpha), (N, C)
        n = n0 + tl.arange(0, BLOCK_N).to(tl.int64)
        tokens = load_tokens_of(lengths_ptr, n, N, T)
        t = tl.minimum(tl.maximum(tl.where(is_alpha, i, tokens - 1 - i), 0), T - 1)
        token = (t, n, tokens)
        scores = load_scores(addresses, token, c, sizes, strides)
        y, scale = tl.full([BLOCK_N, BLOCK_C], 1.0, tl.float64), tl.zeros([BLOCK_N], tl.float64)
        if i > 0:
            side_ptr = weights_ptr + direction * tl.full([], C, tl.int64) * C
            y, scale = product_step(before_ptr, side_ptr, n, c, N, C, SPLITS, BLOCK_K)
        emission = relative_scores(scores, addresses, EXACT)
        enter_tokens(results, step, sizes, y, emission, scale, token, c, SAVE)


@triton.jit
def linear_chain_total_kernel(
    range_ptr,  # [parts, 2] fp64
    lengths_ptr,  # [N] or None
    maxima_ptr,  # [T, N] fp64
    scales_ptr,  # [T, N] fp64
    alpha_ptr,  # [N, C] fp64, whose sign bits do not count
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results
    T,
    N,
    C,
    parts,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Compute log Z of a sequence from its last alpha and the scales of all tokens."""
    is_linear, shift = transition_range(range_ptr, parts, BLOCK_PARTS)
    if is_linear:
        n = tl.program_id(0).to(tl.int64)
        tokens, invalid = load_tokens(lengths_ptr, n, T)
        total = tl.full([], 0.0, tl.float64)
        for first in range(0, tokens, BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            at = t.to(tl.int64) * N + n
            terms = tl.load(scales_ptr + at, mask=t < tokens, other=0.0) * LN2_FP64
            terms += tl.load(maxima_ptr + at, mask=t < tokens, other=0.0)
            total += tl.sum(terms, axis=0)
        c = tl.arange(0, BLOCK_C)
        alpha = tl.load(alpha_ptr + n * C + c, mask=c < C, other=0.0)
        logz = total + shift * (tokens - 1) + log_sum(tl.abs(alpha), False) + invalid
        tl.store(logz_ptr + n, logz)
        tl.store(rounded_ptr + n, logz.to(rounded_ptr.dtype.element_ty))
