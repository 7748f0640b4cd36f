"""Means over the paths of dense linear chains, and their derivatives.

Alpha and beta of log Z give the posterior of each state. With alpha a scan forwards carries the
mean of the values over the paths into each state, and with beta one backwards the mean over the
rest of the paths from each state. The derivatives are then those of all tokens at the same time:
the derivative in a score is the posterior of what it scores times the difference between the mean
over the paths through it and that over all paths, see `reference.py`. Alpha and beta are in the log
domain here, relative to any number of their token.

Source: Li and Eisner, First- and second-order expectation semirings, 2009.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift, weighted
from ....primitives.gpu.memory import load_length
from .arguments import Batch
from .gradient import store_end_gradient, tile_of_program
from .scores import exp_sum_term, token_of_rows, token_scores, transition_range


@triton.jit
def load_values(ptr, at, mask):
    """Return values in fp64; zeros if there are none."""
    if ptr is None:
        return tl.where(mask, 0.0, 0.0).to(tl.float64)
    else:
        return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float64)


@triton.jit
def mean_into(
    logs_ptr,  # [C] of the token that the step leaves
    means_ptr,  # [C] of that token
    step,
    n,
    c,
    C,
    transitions,  # StridedSteps
    transition_values,  # StridedSteps
    FORWARD: tl.constexpr,  # whether the step enters the later one of its tokens
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the log-sum-exp that enters the states c, and the mean of the values before them."""
    AXIS: tl.constexpr = 0 if FORWARD else 1  # of the states that the step leaves
    maximum = tl.full(c.shape, -float("inf"), tl.float64)
    total, sums = tl.zeros(c.shape, tl.float64), tl.zeros(c.shape, tl.float64)
    scores_ptr = transitions.ptr + step * transitions.t + n * transitions.n
    values_ptr = transition_values.ptr + step * transition_values.t + n * transition_values.n
    for k0 in range(0, C, BLOCK):
        k = k0 + tl.arange(0, BLOCK)
        state = tl.load(logs_ptr + k, mask=k < C, other=-float("inf"))
        mean = tl.load(means_ptr + k, mask=k < C, other=0.0)
        earlier, later = (k, c) if FORWARD else (c, k)
        earlier, later = earlier.to(tl.int64)[:, None], later.to(tl.int64)[None, :]
        mask = (earlier < C) & (later < C)
        at = scores_ptr + earlier * transitions.k + later * transitions.c
        scores = tl.load(at, mask=mask, other=-float("inf")).to(tl.float64)
        at = earlier * transition_values.k + later * transition_values.c
        values = load_values(values_ptr, at, mask) + tl.expand_dims(mean, 1 - AXIS)
        terms = scores + tl.expand_dims(state, 1 - AXIS)
        larger = tl.maximum(maximum, tl.max(terms, axis=AXIS))
        shift = finite_shift(larger)
        decay = tl.exp(maximum - shift)
        weights = exp_sum_term(terms - tl.expand_dims(shift, AXIS), EXACT)
        total = total * decay + tl.sum(weights, axis=AXIS)
        sums = weighted(decay, sums) + tl.sum(weighted(weights, values), axis=AXIS)
        maximum = larger
    mean = tl.where(total == 0.0, 0.0, sums / total)
    return tl.log(total) + finite_shift(maximum), mean


@triton.jit
def linear_chain_means_kernel(
    batch,  # Batch, without start
    transitions,  # StridedSteps
    span,  # Span
    states_ptr,  # [2, T, N, C] fp64: alpha and beta, replaced by their logarithms with emissions
    values,  # Batch
    transition_values,  # StridedSteps
    posteriors_ptr,  # [T, N, C] fp64
    sums_ptr,  # [T, N, C] fp64, the log-sum-exp that enters each state
    means_ptr,  # [2, T, N, C] fp64, the means over the paths into each state and from it on
    mean_ptr,  # [N] fp64
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Scan the means over the paths into each state, or in every other program from it on.

    Both have the value of the state's emission. The first scan gives the mean over all paths.
    """
    batch, values = Batch(*batch), Batch(*values)
    is_linear = transition_range(span, 0, BLOCK_PARTS)[0]
    direction, n = tl.program_id(0) % 2, (tl.program_id(0) // 2).to(tl.int64)
    is_alpha, C, row = direction == 0, batch.C, tl.full([], batch.N, tl.int64) * batch.C
    tokens, invalid = load_length(batch.lengths, n, batch.T, 1, 1)
    scan = direction * batch.T * row + n * C
    for first in range(0, tokens, BLOCK):
        t = first + tl.arange(0, BLOCK).to(tl.int64)
        for c0 in range(0, C, BLOCK):
            c = c0 + tl.arange(0, BLOCK)
            mask = (t < tokens)[:, None] & (c < C)[None, :]
            state_ptr = states_ptr + scan + (t * row)[:, None] + c[None, :]
            state = tl.load(state_ptr, mask=mask, other=0.0)
            if is_linear:
                state = tl.log(state)
            # Alpha has the emissions already.
            of_beta = mask & (direction == 1)
            state += token_scores(batch, t, t * 0 + n, tokens, c, of_beta, 0.0)
            tl.store(state_ptr, state, mask=mask)
    tl.debug_barrier()
    emissions, start, end = values.emissions, values.start, values.end
    total = tl.full([], 0.0, tl.float64)
    for i in range(0, tokens):
        t = tl.where(is_alpha, tl.full([], i, tl.int64), tokens - 1 - i)
        at, step = scan + t * row, tl.where(is_alpha, t - 1, t)
        before = scan + tl.where(is_alpha, t - 1, t + 1) * row
        left = (states_ptr + before, means_ptr + before, step, n)
        for c0 in range(0, C, BLOCK):
            c = c0 + tl.arange(0, BLOCK)
            c_64, mask = c.to(tl.int64), c < C
            value = t * emissions.t + n * emissions.n + c_64 * emissions.c
            mean = load_values(emissions.ptr, value, mask)
            if i > 0:
                # The compiler knows which stride is 1 in either direction.
                if is_alpha:
                    log_sum, entered = mean_into(
                        *left, c, C, transitions, transition_values, True, EXACT, BLOCK
                    )
                else:
                    log_sum, entered = mean_into(
                        *left, c, C, transitions, transition_values, False, EXACT, BLOCK
                    )
                tl.store(sums_ptr + at + c, log_sum, mask=mask & is_alpha)
                mean += entered
            elif is_alpha:
                mean += load_values(start.ptr, n * start.n + c_64 * start.c, mask)
            else:
                mean += load_values(end.ptr, n * end.n + c_64 * end.c, mask)
            tl.store(means_ptr + at + c, mean, mask=mask)
            if i == tokens - 1:
                mean += load_values(end.ptr, n * end.n + c_64 * end.c, mask)
                weights = tl.load(posteriors_ptr + t * row + n * C + c, mask=mask, other=0.0)
                total += tl.sum(weighted(weights, mean), axis=0)
        # The next token reads what other threads have stored.
        tl.debug_barrier()
    tl.store(mean_ptr + n, total + invalid, mask=is_alpha)


@triton.jit
def linear_chain_state_covariances_kernel(
    grad_ptr,  # [N]
    grad_n,
    values,  # Batch, without start and end
    posteriors_ptr,  # [T, N, C] fp64
    means_ptr,  # [2, T, N, C] fp64
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
    difference += tl.load(means_ptr + rows * C + at, mask=mask, other=0.0)
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
    states_ptr,  # [2, T, N, C] fp64, logarithms
    posteriors_ptr,  # [T, N, C] fp64
    sums_ptr,  # [T, N, C] fp64
    means_ptr,  # [2, T, N, C] fp64
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
    k, c, part, base, num_tokens = tile_of_program(groups, N, C, BLOCK)
    k, c = k.to(tl.int64)[:, None], c.to(tl.int64)[None, :]
    pairs, rests_ptr = (k < C) & (c < C), means_ptr + tl.full([], T, tl.int64) * N * C
    sums = tl.zeros([BLOCK, BLOCK], tl.float64)
    for i in range(0, num_tokens):
        row = base + tl.full([1, 1], i, tl.int64) * groups.stride
        t, n, tokens, inside = token_of_rows(lengths_ptr, row, row >= 0, T, N)
        valid = (tokens >= 1) & (tokens <= T)
        mask, at = inside & valid & (k < C), (row - N) * C + k
        state = tl.load(states_ptr + at, mask=mask, other=-float("inf"))
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
    at = part * C * C + k * C + c
    tl.store(result_ptr + at, sums, mask=pairs)
