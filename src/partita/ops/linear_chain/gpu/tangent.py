"""Means over the paths of dense linear chains, and their derivatives.

Alpha and beta of log Z give the posterior of each state. With them a scan forwards carries the mean
of the values over the paths into each state, and one backwards the mean over the rest of the paths
from each state. The derivatives are then those of all tokens at the same time: the derivative in a
score is the posterior of what it scores times the difference between the mean over the paths
through it and that over all paths, see `reference.py`. Alpha is in the log domain here,
relative to any number of its token.

Source: Li and Eisner, First- and second-order expectation semirings, 2009.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .arguments import Batch
from .counts import split_tokens
from .marginals import state_posteriors, store_end_gradient
from .scores import exp_sum_term, load_tokens, token_of_rows, transition_range


@triton.jit
def weighted(weights, values):
    """Return weights * values, with 0 for a weight of 0 and any value."""
    return tl.where(weights == 0.0, 0.0, weights * values)


@triton.jit
def load_values(ptr, at, mask):
    """Return values in fp64; zeros if there are none."""
    if ptr is None:
        return tl.where(mask, 0.0, 0.0).to(tl.float64)
    else:
        return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float64)


@triton.jit
def linear_chain_posteriors_kernel(
    states_ptr,  # [2, T, N, C] fp64
    lengths_ptr,  # [N] or None
    span,  # Span
    logs_ptr,  # [T, N, C] fp64, the logarithms of alpha
    posteriors_ptr,  # [T, N, C] fp64, NaN for an invalid length
    T,
    N,
    C,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Store alpha in the log domain and the posteriors of ROWS tokens."""
    is_linear, _ = transition_range(span, BLOCK_PARTS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = tl.full([], T, tl.int64) * N
    _, _, tokens, inside = token_of_rows(lengths_ptr, row, row < rows, T, N)
    valid = (tokens >= 1) & (tokens <= T)
    c = tl.arange(0, BLOCK_C)[None, :]
    at, mask = row[:, None] * C + c, (inside & valid)[:, None] & (c < C)
    other = tl.where(is_linear, 0.0, -float("inf"))
    alpha = tl.load(states_ptr + at, mask=mask, other=other)
    beta = tl.load(states_ptr + rows * C + at, mask=mask, other=other)
    posterior, _, _ = state_posteriors(alpha, beta, is_linear)
    if is_linear:
        alpha = tl.log(alpha)
    posterior = tl.where(valid[:, None], posterior, float("nan"))
    mask = (row < rows)[:, None] & (c < C)
    tl.store(logs_ptr + at, alpha, mask=mask)
    tl.store(posteriors_ptr + at, posterior, mask=mask)


@triton.jit
def mean_into(
    logs_ptr,  # [C] of the token before
    means_ptr,  # [C] of the token before
    scores_ptr,  # of the transitions of the step
    transitions,  # StridedSteps
    values_ptr,  # of the values of the step
    transition_values,  # StridedSteps
    c,
    C,
    EXACT: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the log-sum-exp that enters the states c, and the mean of the values before them."""
    maximum = tl.full(c.shape, -float("inf"), tl.float64)
    total, sums = tl.zeros(c.shape, tl.float64), tl.zeros(c.shape, tl.float64)
    for k0 in range(0, C, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        state = tl.load(logs_ptr + k, mask=k < C, other=-float("inf"))
        mean = tl.load(means_ptr + k, mask=k < C, other=0.0)
        mask = (k < C)[:, None] & (c < C)[None, :]
        at = k.to(tl.int64)[:, None] * transitions.k + c.to(tl.int64)[None, :] * transitions.c
        scores = tl.load(scores_ptr + at, mask=mask, other=-float("inf")).to(tl.float64)
        at = k.to(tl.int64)[:, None] * transition_values.k
        at += c.to(tl.int64)[None, :] * transition_values.c
        values = tl.load(values_ptr + at, mask=mask, other=0.0).to(tl.float64)
        terms = scores + state[:, None]
        larger = tl.maximum(maximum, tl.max(terms, axis=0))
        shift = finite_shift(larger)
        decay = tl.exp(maximum - shift)
        weights = exp_sum_term(terms - shift[None, :], EXACT)
        total = total * decay + tl.sum(weights, axis=0)
        sums = weighted(decay, sums) + tl.sum(weighted(weights, mean[:, None] + values), axis=0)
        maximum = larger
    mean = tl.where(total == 0.0, 0.0, sums / total)
    return tl.log(total) + finite_shift(maximum), mean


@triton.jit
def linear_chain_means_kernel(
    transitions,  # StridedSteps
    transition_values,  # StridedSteps
    values,  # Batch
    logs_ptr,  # [T, N, C] fp64
    posteriors_ptr,  # [T, N, C] fp64
    sums_ptr,  # [T, N, C] fp64, the log-sum-exp that enters each state
    means_ptr,  # [T, N, C] fp64, the mean over the paths into each state
    mean_ptr,  # [N] fp64
    EXACT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Scan the means over the paths into each state, and compute that over all paths."""
    values = Batch(*values)
    C, emissions, start, end = values.C, values.emissions, values.start, values.end
    n, row = tl.program_id(0).to(tl.int64), tl.full([], values.N, tl.int64) * C
    tokens, invalid = load_tokens(values.lengths, n, values.T)
    total = tl.full([], 0.0, tl.float64)
    for i in range(0, tokens):
        t = tl.full([], i, tl.int64)
        at = t * row + n * C
        before = (logs_ptr + at - row, means_ptr + at - row)
        scores_ptr = transitions.ptr + (t - 1) * transitions.t + n * transitions.n
        values_ptr = transition_values.ptr + (t - 1) * transition_values.t
        values_ptr += n * transition_values.n
        steps = (scores_ptr, transitions, values_ptr, transition_values)
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            value = t * emissions.t + n * emissions.n + c.to(tl.int64) * emissions.c
            mean = load_values(emissions.ptr, value, c < C)
            if i > 0:
                log_sum, entered = mean_into(*before, *steps, c, C, EXACT, BLOCK_K)
                tl.store(sums_ptr + at + c, log_sum, mask=c < C)
                mean += entered
            else:
                value = n * start.n + c.to(tl.int64) * start.c
                mean += load_values(start.ptr, value, c < C)
            tl.store(means_ptr + at + c, mean, mask=c < C)
            if i == tokens - 1:
                value = n * end.n + c.to(tl.int64) * end.c
                mean += load_values(end.ptr, value, c < C)
                weights = tl.load(posteriors_ptr + at + c, mask=c < C, other=0.0)
                total += tl.sum(weighted(weights, mean), axis=0)
        # The next token reads what other threads have stored.
        tl.debug_barrier()
    tl.store(mean_ptr + n, total + invalid)


@triton.jit
def linear_chain_rests_kernel(
    transitions,  # StridedSteps
    transition_values,  # StridedSteps
    values,  # Batch, without start
    logs_ptr,  # [T, N, C] fp64
    posteriors_ptr,  # [T, N, C] fp64
    sums_ptr,  # [T, N, C] fp64
    rests_ptr,  # [T, N, C] fp64, the mean over the rest of the paths with the token's emission
    EXACT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Scan the means over the rest of the paths from each state."""
    values = Batch(*values)
    C, emissions, end = values.C, values.emissions, values.end
    n, row = tl.program_id(0).to(tl.int64), tl.full([], values.N, tl.int64) * C
    tokens, _ = load_tokens(values.lengths, n, values.T)
    for i in range(0, tokens):
        t = tl.full([], 1, tl.int64) * (tokens - 1 - i)
        at = t * row + n * C
        for k0 in range(0, C, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            value = t * emissions.t + n * emissions.n + k.to(tl.int64) * emissions.c
            rest = load_values(emissions.ptr, value, k < C)
            if i == 0:
                value = n * end.n + k.to(tl.int64) * end.c
                rest += load_values(end.ptr, value, k < C)
            else:
                total, sums = tl.zeros([BLOCK_K], tl.float64), tl.zeros([BLOCK_K], tl.float64)
                state = tl.load(logs_ptr + at + k, mask=k < C, other=-float("inf"))
                for c0 in range(0, C, BLOCK_C):
                    c = c0 + tl.arange(0, BLOCK_C)
                    after = at + row + c
                    weights = tl.load(posteriors_ptr + after, mask=c < C, other=0.0)
                    shift = tl.load(sums_ptr + after, mask=c < C, other=0.0)
                    mean = tl.load(rests_ptr + after, mask=c < C, other=0.0)
                    mask = (c < C)[:, None] & (k < C)[None, :]
                    to, before = c.to(tl.int64)[:, None], k.to(tl.int64)[None, :]
                    pair = to * transitions.c + before * transitions.k
                    pair += t * transitions.t + n * transitions.n
                    terms = tl.load(transitions.ptr + pair, mask=mask, other=-float("inf"))
                    terms = terms.to(tl.float64) + (state[None, :] - finite_shift(shift)[:, None])
                    shares = exp_sum_term(terms, EXACT) * weights[:, None]
                    pair = to * transition_values.c + before * transition_values.k
                    pair += t * transition_values.t + n * transition_values.n
                    steps = load_values(transition_values.ptr, pair, mask)
                    total += tl.sum(shares, axis=0)
                    sums += tl.sum(weighted(shares, mean[:, None] + steps), axis=0)
                rest += tl.where(total == 0.0, 0.0, sums / total)
            tl.store(rests_ptr + at + k, rest, mask=k < C)
        # The token before reads what other threads have stored.
        tl.debug_barrier()


@triton.jit
def linear_chain_state_covariances_kernel(
    grad_ptr,  # [N]
    grad_n,
    values,  # Batch, without start and end
    posteriors_ptr,  # [T, N, C] fp64
    means_ptr,  # [T, N, C] fp64
    rests_ptr,  # [T, N, C] fp64
    mean_ptr,  # [N] fp64
    gradients,  # Gradients in fp64
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the derivatives in the emissions, start and end of ROWS tokens."""
    values = Batch(*values)
    T, N, C, emissions = values.T, values.N, values.C, values.emissions
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = tl.full([], T, tl.int64) * N
    t, n, tokens, inside = token_of_rows(values.lengths, row, row < rows, T, N)
    valid = (tokens >= 1) & (tokens <= T)
    c = tl.arange(0, BLOCK_C)[None, :]
    at, mask = row[:, None] * C + c, (inside & valid)[:, None] & (c < C)
    value = (t * emissions.t + n * emissions.n)[:, None] + c.to(tl.int64) * emissions.c
    # Both means have the value of the emission.
    difference = tl.load(means_ptr + at, mask=mask, other=0.0)
    difference -= load_values(emissions.ptr, value, mask)
    difference += tl.load(rests_ptr + at, mask=mask, other=0.0)
    difference -= tl.load(mean_ptr + n, mask=row < rows, other=0.0)[:, None]
    grad = tl.load(grad_ptr + n * grad_n, mask=row < rows, other=0.0).to(tl.float64)
    posterior = tl.load(posteriors_ptr + at, mask=mask, other=0.0) * grad[:, None]
    result = tl.where(valid[:, None], weighted(posterior, difference), float("nan"))
    tl.store(gradients.emissions + at, result, mask=(row < rows)[:, None] & (c < C))
    store_end_gradient(gradients.start, result, n, c, C, (row < rows) & (t == 0))
    is_last = t == tl.where(valid, tokens - 1, 0)
    store_end_gradient(gradients.end, result, n, c, C, (row < rows) & is_last)


@triton.jit
def linear_chain_pair_covariances_kernel(
    grad_ptr,  # [N]
    grad_n,
    transitions,  # StridedSteps
    transition_values,  # StridedSteps
    lengths_ptr,  # [N] or None
    logs_ptr,  # [T, N, C] fp64
    posteriors_ptr,  # [T, N, C] fp64
    sums_ptr,  # [T, N, C] fp64
    means_ptr,  # [T, N, C] fp64
    rests_ptr,  # [T, N, C] fp64
    mean_ptr,  # [N] fp64
    result_ptr,  # [groups, splits, C, C] fp64
    T,
    N,
    C,
    groups,  # CountGroups
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the derivatives in the transitions of a split of tokens, for one tile of them."""
    tiles = tl.cdiv(C, BLOCK)
    tile, part = tl.program_id(0) % (tiles * tiles), tl.program_id(0) // (tiles * tiles)
    split, group = part % groups.splits, part.to(tl.int64) // groups.splits
    k = (tile // tiles * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    c = (tile % tiles * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    base, num_tokens = split_tokens(group, split, groups, N)
    pairs = (k < C) & (c < C)
    sums = tl.zeros([BLOCK, BLOCK], tl.float64)
    for i in range(0, num_tokens):
        row = base + tl.full([1, 1], i, tl.int64) * groups.stride
        t, n, tokens, inside = token_of_rows(lengths_ptr, row, row >= 0, T, N)
        valid = (tokens >= 1) & (tokens <= T)
        mask, at = inside & valid & (k < C), (row - N) * C + k
        state = tl.load(logs_ptr + at, mask=mask, other=-float("inf"))
        before = tl.load(means_ptr + at, mask=mask, other=0.0)
        mask, at = inside & valid & (c < C), row * C + c
        shift = finite_shift(tl.load(sums_ptr + at, mask=mask, other=0.0))
        after = tl.load(rests_ptr + at, mask=mask, other=0.0)
        after -= tl.load(mean_ptr + n, mask=inside, other=0.0)
        weights = tl.load(posteriors_ptr + at, mask=mask, other=0.0)
        weights *= tl.load(grad_ptr + n * grad_n, mask=inside, other=0.0).to(tl.float64)
        mask, at = pairs & inside & valid, k * transitions.k + c * transitions.c
        at += (t - 1) * transitions.t + n * transitions.n
        scores = tl.load(transitions.ptr + at, mask=mask, other=-float("inf")).to(tl.float64)
        at = k * transition_values.k + c * transition_values.c
        at = at + (t - 1) * transition_values.t + n * transition_values.n
        values = load_values(transition_values.ptr, at, mask) + before + after
        shares = exp_sum_term(scores + state - shift, EXACT) * weights
        sums += tl.where(valid, weighted(shares, values), float("nan"))
    at = part.to(tl.int64) * C * C + k * C + c
    tl.store(result_ptr + at, sums, mask=pairs)
