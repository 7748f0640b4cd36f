"""The gradient of log Z of dense linear chains, in parallel over the batch and in time.

Alpha and beta, which met in the middle of each sequence, each continue through the other half. The
posteriors of each token are divided by their sum, so no error adds up over the tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import empty_batch, fill_nan, run_over_sequences
from ....primitives.cpu.jit import jit
from ....primitives.cpu.math import exp
from ....runtime.dtypes import acc_dtype
from .steps import (
    BLOCK,
    chain_arrays,
    copy_row,
    dot,
    halves_of,
    load_tokens,
    load_weights,
    log_of_sum,
    middle_of,
    scan,
)

NO_FACTORS = np.empty((0, 0, 0, 0))
NO_COUNTS = np.empty((0, 0, 0, 0))


@jit
def posteriors(
    linear: bool,
    saved: Any,
    sums: Any,
    t: int,
    by: int,
    n: int,
    grad_output: float,
    totals: Any,
    weighted: Any,
) -> None:
    """Write the posteriors of tokens t, t + by, ... times grad_output, `[K, C]`.

    `totals` are grad_output divided by the sum of the products of alpha and beta, or the log of
    that sum in the log domain.
    """
    for k in range(len(sums)):
        a, b, row = saved[t + k * by, n], sums[k], weighted[k]
        if linear:
            total = dot(a, b)
            totals[k] = 0.0 if total == 0.0 else grad_output / total
            for c in range(len(row)):
                row[c] = a[c] * b[c] * totals[k]
        else:
            totals[k] = log_of_sum(linear, a, b)
            for c in range(len(row)):
                row[c] = exp(a[c] + b[c] - totals[k]) * grad_output
            if totals[k] == -np.inf:
                for c in range(len(row)):
                    row[c] = 0.0


@jit
def add_counts(
    linear: bool,
    alpha: Any,
    beta: Any,
    weights: Any,
    transposed: int,
    total: float,
    grad_output: float,
    line: Any,
    counts: Any,
) -> None:
    """Add the posteriors of the transitions of a step, times grad_output, to `[C, C]`.

    The weights may be transposed, the counts are not.
    """
    C = len(alpha)
    if not linear and total == -np.inf:
        return
    rows, columns = (beta, alpha) if transposed else (alpha, beta)
    for i in range(C):
        w = weights[i]
        if linear:
            value = rows[i] * total
            for j in range(C):
                line[j] = value * w[j] * columns[j]
        else:
            value = rows[i] - total
            for j in range(C):
                line[j] = exp(value + w[j] + columns[j]) * grad_output
        if transposed:
            for j in range(C):
                counts[j, i] += line[j]
        else:
            row = counts[i]
            for j in range(C):
                row[j] += line[j]


@jit
def store_factors(
    states: Any,
    saved: Any,
    totals: Any,
    t: int,
    by: int,
    n: int,
    skip: int,
    length: int,
    factors: Any,
) -> None:
    """Write the factors of the counts of the steps at tokens t, t + by, ..., `[2, T - 1, N, C]`.

    They are alpha divided by the sum of the token, and beta of the next token. `states` are those
    of the scan before each token; the first `skip` tokens are left out.
    """
    C = states.shape[1]
    for k in range(skip, len(totals)):
        token = t + k * by
        step = token - 1 if by > 0 else token
        if step >= length - 1:
            continue
        left, right = factors[0, step, n], factors[1, step, n]
        alpha, beta = states[k], saved[token, n]
        if by < 0:
            alpha, beta = beta, alpha
        for c in range(C):
            left[c] = alpha[c] * totals[k]
            right[c] = beta[c]


@jit
def store_counts(
    linear: bool,
    varies: bool,
    weights: Any,
    states: Any,
    saved: Any,
    totals: Any,
    t: int,
    by: int,
    n: int,
    skip: int,
    length: int,
    grad_output: float,
    counts: Any,
) -> None:
    """Add the counts of the steps at tokens t, t + by, ..., to `[T - 1 or 2, sequences, C, C]`.

    The arguments are those of `store_factors`.
    """
    line = np.empty(states.shape[1])
    for k in range(skip, len(totals)):
        token = t + k * by
        step, backward = token - 1 if by > 0 else token, 1 if by < 0 else 0
        if step >= length - 1:
            continue
        alpha, beta = states[k], saved[token, n]
        if backward:
            alpha, beta = beta, alpha
        index = counts[step if varies else backward, n % counts.shape[1]]
        add_counts(linear, alpha, beta, weights, backward, totals[k], grad_output, line, index)


@jit
def write_gradient(
    weighted: Any, t: int, by: int, n: int, length: int, d_emissions: Any, d_ends: Any
) -> None:
    """Write the posteriors of tokens t, t + by, ... to the gradients."""
    for k in range(len(weighted)):
        token, row = t + k * by, weighted[k]
        result = d_emissions[token, n]
        for c in range(len(row)):
            result[c] = row[c]
        if token == 0:
            copy_row(row, d_ends[0, n])
        if token == length - 1:
            copy_row(row, d_ends[1, n])


@jit
def zero_past_length(n: int, length: int, d_emissions: Any, factors: Any) -> None:
    """Write zeros to the gradients of what is past a length."""
    for t in range(length, len(d_emissions)):
        for c in range(d_emissions.shape[2]):
            d_emissions[t, n, c] = 0.0
    for t in range(length - 1, factors.shape[1]):
        for c in range(d_emissions.shape[2]):
            factors[0, t, n, c], factors[1, t, n, c] = 0.0, 0.0


@jit(nogil=True)
def gradient_kernel(
    halves: Any,
    chain: Any,
    grad_output: Any,
    saved: Any,
    d_emissions: Any,
    d_ends: Any,
    factors: Any,
    counts: Any,
) -> None:
    """Write the gradients of half h % 2 of sequence h // 2.

    Beta continues backwards through the first half, and alpha forwards through the second. The
    gradients are those in emissions `[T, N, C]` and in the ends `[2, N, C]`. For constant
    transitions in linear arithmetic the factors of their counts are written, `[2, T - 1, N, C]`,
    and otherwise the counts, unless these are empty.
    """
    C = chain.start.shape[1]
    size = 1 if chain.varies else BLOCK
    scores, sums, states = np.empty((size, C)), np.empty((size, C)), np.empty((size + 1, C))
    weighted, totals = np.empty((size, C)), np.empty(size)
    buffer = np.empty((C, C) if chain.varies else (0, 0))
    for half in halves:
        n, forward = half // 2, half % 2
        backward, length = 1 - forward, chain.lengths[n]
        middle = middle_of(length)
        weights = buffer if chain.varies else chain.weights[backward]
        first, by = (middle, 1) if forward else (middle - 1, -1)
        tokens = length - middle if forward else middle
        starts = first - by >= length  # a sequence of one token has no beta
        if not starts:
            copy_row(saved[first - by, n], states[0])
        for k in range(0, tokens, size):
            t, K = first + k * by, min(size, tokens - k)
            skip = 1 if forward and k == 0 else 0  # the step at the middle is the first half's
            load_tokens(
                *(chain.emissions, chain.start, chain.end, length),
                *(t, by, n, chain.linear, scores[:K]),
            )
            if chain.varies and not starts:
                step = t - 1 if forward else t
                load_weights(chain.transitions, step, n, backward, chain.linear, weights)
            scan(chain.linear, weights, scores[:K], sums[:K], states[: K + 1], starts)
            posteriors(
                *(chain.linear, saved, sums[:K], t, by, n, grad_output[n]),
                *(totals[:K], weighted[:K]),
            )
            write_gradient(weighted[:K], t, by, n, length, d_emissions, d_ends)
            if len(factors):
                store_factors(states[:K], saved, totals[:K], t, by, n, skip, length, factors)
            elif len(counts):
                store_counts(
                    *(chain.linear, chain.varies, weights, states[:K], saved, totals[:K]),
                    *(t, by, n, skip, length, grad_output[n], counts),
                )
            copy_row(states[K], states[0])
        if forward:
            zero_past_length(n, length, d_emissions, factors)


def linear_chain_gradient(
    grad_output: Tensor,
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    logz: Tensor,
    saved: Tensor,
    need_transitions: bool,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of sum(grad_output * log Z) in the dtypes of the arguments."""
    chain = chain_arrays(emissions, transitions, start, end, lengths)[0]
    invalid = logz.isnan()
    upstream = grad_output.detach().double().masked_fill(invalid, torch.nan)
    upstream = upstream.masked_fill(logz == -torch.inf, 0.0)
    dtype = torch.promote_types(emissions.dtype, torch.float32)
    d_emissions = empty_batch(emissions.shape, dtype)
    d_ends = torch.empty((2, *emissions.shape[1:]), dtype=torch.float64, device="cpu")
    args = (
        chain,
        upstream.contiguous().numpy(),
        # The reference, which serves empty batches, saves nothing.
        (saved if saved.numel() else saved.new_empty(emissions.shape)).detach().numpy(),
        d_emissions.numpy(),
        d_ends.numpy(),
    )
    d_transitions = transitions.new_empty(0)
    if not need_transitions:
        run_over_sequences(gradient_kernel, *halves_of(chain), *args, NO_FACTORS, NO_COUNTS)
    elif transitions.ndim > 2:
        d_transitions = step_gradients(args, transitions, dtype, invalid)
    else:
        d_transitions = constant_gradients(args, transitions, invalid, per_sequence)
    fill_nan(d_emissions, invalid)
    d_ends[:, invalid] = torch.nan
    # An op may not return one tensor as two results.
    d_start = d_emissions.new_empty(0) if start is None else d_ends[0].to(start.dtype, copy=True)
    d_end = d_emissions.new_empty(0) if end is None else d_ends[1].to(end.dtype, copy=True)
    return d_emissions.to(emissions.dtype), d_transitions, d_start, d_end


def constant_gradients(
    args: tuple[Any, ...], transitions: Tensor, invalid: Tensor, per_sequence: bool
) -> Tensor:
    """Return the gradient in constant transitions, of each sequence or their sum."""
    chain = args[0]
    T, N, C = args[3].shape
    lengths, edges = halves_of(chain)
    if chain.linear:
        factors = np.empty((2, T - 1, N, C))
        run_over_sequences(gradient_kernel, lengths, edges, *args, factors, NO_COUNTS)
        left, right = torch.from_numpy(factors)
        if per_sequence:
            counts = left.permute(1, 2, 0) @ right.transpose(0, 1)
        else:
            counts = left.flatten(0, 1).T @ right.flatten(0, 1)
        counts *= torch.from_numpy(chain.weights[0])
    else:
        counts = log_domain_counts(args, per_sequence)
    if per_sequence:
        counts[invalid] = torch.nan
        return counts.to(acc_dtype(transitions.dtype))
    if bool(invalid.any()):
        counts.fill_(torch.nan)
    return counts.to(transitions.dtype)


def log_domain_counts(args: tuple[Any, ...], per_sequence: bool) -> Tensor:
    """Return the expected constant transitions, `[N, C, C]` or their sum.

    Sequences run in groups, so that the counts of a group take no more memory than the emissions.
    """
    chain = args[0]
    T, N, C = args[3].shape
    lengths, edges = halves_of(chain)
    group = max(1, min(N, T * N // (2 * C) if C else N))
    counts = np.zeros((2, group, C, C))
    result = torch.zeros((N if per_sequence else 1, C, C), dtype=torch.float64, device="cpu")
    for first in range(0, N, group):
        counts.fill(0.0)
        part = lengths[2 * first : 2 * (first + group)]

        def kernel(halves: Any, *args: Any, first: int = first) -> None:
            gradient_kernel(halves + 2 * first, *args)

        run_over_sequences(kernel, part, edges, *args, NO_FACTORS, counts)
        sums = torch.from_numpy(counts.sum(0))
        if per_sequence:
            result[first : first + group] = sums.roll(-(first % group), 0)[: N - first]
        else:
            result[0] += sums.sum(0)
    return result if per_sequence else result[0]


def step_gradients(
    args: tuple[Any, ...], transitions: Tensor, dtype: torch.dtype, invalid: Tensor
) -> Tensor:
    """Return the gradient in transitions that vary, in their shape and dtype."""
    chain = args[0]
    T, N, C = args[3].shape
    lengths, edges = halves_of(chain)
    if transitions.ndim == 4:
        counts = torch.zeros(
            transitions.shape, dtype=torch.promote_types(transitions.dtype, dtype), device="cpu"
        )
        run_over_sequences(gradient_kernel, lengths, edges, *args, NO_FACTORS, counts.numpy())
        counts[:, invalid] = torch.nan
        return counts.to(transitions.dtype)
    # All sequences add to the same steps, so they run one after another.
    counts = torch.zeros((T - 1, 1, C, C), dtype=torch.float64, device="cpu")
    for n in range(N):

        def kernel(halves: Any, *args: Any, n: int = n) -> None:
            gradient_kernel(halves + 2 * n, *args)

        part = lengths[2 * n : 2 * n + 2]
        run_over_sequences(kernel, part, edges, *args, NO_FACTORS, counts.numpy())
    if bool(invalid.any()):
        counts.fill_(torch.nan)
    return counts[:, 0].to(transitions.dtype)
