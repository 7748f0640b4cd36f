"""Log Z of dense linear chains and its gradient, in parallel over the batch and in time.

Each sequence is cut in the middle. Alpha runs over the first half and beta over the second, on two
threads, and log Z is formed where they meet. For the gradient each one continues through the other
half. The posteriors of each token are divided by their sum, so no error adds up over the tokens.
Beta includes the emission of its token here, as alpha does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ....primitives.cpu.batch import empty_batch, fill_nan, run_over_sequences
from ....primitives.cpu.math import FLAGS, exp
from ....runtime.dtypes import acc_dtype
from .steps import (
    ChainArrays,
    chain_arrays,
    load_token,
    load_weights,
    log_of_sum,
    middle_of,
    multiply_and_scale,
    one_of,
    prefetch_token,
    step,
    weight_buffer,
)


@njit(nogil=True, **FLAGS)
def forward_kernel(
    halves: Any, chain: Any, save: bool, saved: Any, meeting: Any, log_scale: Any
) -> None:
    """Scan half h % 2 of sequence h // 2: alpha forwards over the first, beta backwards.

    Write the state at the middle, `meeting` `[2N, C]`, the log of its scale, `[2N]`, and with
    `save` all states, `[T, N, C]`.
    """
    C = chain.start.shape[1]
    buffer = np.empty(C, chain.emissions.numbers.dtype)
    scores, sums, maxima, state = np.empty(C), np.empty(C), np.empty(C), np.empty(C)
    for half in halves:
        n, backward = half // 2, half % 2
        length = chain.lengths[n]
        middle = middle_of(length)
        weights = weight_buffer(chain, backward)
        first, last, by = (length - 1, middle - 1, -1) if backward else (0, middle, 1)
        for c in range(C):
            state[c] = one_of(chain)
        offset = 0.0
        for t in range(first, last, by):
            prefetch_token(chain, t + 2 * by, n)
            offset += load_token(chain, t, n, buffer, scores)
            if t == first:
                for c in range(C):
                    sums[c] = one_of(chain)
            else:
                offset += load_weights(chain, t if backward else t - 1, n, backward, weights)
                step(chain, state, weights, maxima, sums)
            offset += multiply_and_scale(chain, sums, scores, state)
            if save:
                row = saved[t, n]
                for c in range(C):
                    row[c] = state[c]
        log_scale[half] = offset
        for c in range(C):
            meeting[half, c] = state[c]


@njit(nogil=True, **FLAGS)
def join_kernel(sequences: Any, chain: Any, meeting: Any, log_scale: Any, logz: Any) -> None:
    """Compute log Z where alpha and beta meet."""
    C = chain.start.shape[1]
    sums, maxima = np.empty(C), np.empty(C)
    for n in sequences:
        middle = middle_of(chain.lengths[n])
        offset = log_scale[2 * n]
        if middle < chain.lengths[n]:
            weights = weight_buffer(chain, 1)
            offset += log_scale[2 * n + 1] + load_weights(chain, middle - 1, n, 1, weights)
            step(chain, meeting[2 * n + 1], weights, maxima, sums)
        else:
            for c in range(C):
                sums[c] = one_of(chain)
        logz[n] = offset + log_of_sum(chain, meeting[2 * n], sums)


@njit(**FLAGS)
def posterior(chain: Any, a: Any, b: Any, grad_output: float, result: Any, weighted: Any) -> float:
    """Write the posterior of each state times grad_output, for the result and in fp64.

    Return grad_output divided by the sum of the products, or the log of that sum in the log domain.
    """
    C, total = len(a), 0.0
    if chain.linear:
        for c in range(C):
            weighted[c] = a[c] * b[c]
            total += weighted[c]
        factor = 0.0 if total == 0.0 else grad_output / total
        for c in range(C):
            weighted[c] *= factor
            result[c] = weighted[c]
        return factor
    total = log_of_sum(chain, a, b)
    for c in range(C):
        weighted[c] = 0.0 if total == -np.inf else exp(a[c] + b[c] - total) * grad_output
        result[c] = weighted[c]
    return total


@njit(**FLAGS)
def add_counts(
    chain: Any,
    alpha: Any,
    beta: Any,
    weights: Any,
    transposed: int,
    factor: float,
    grad_output: float,
    line: Any,
    counts: Any,
) -> None:
    """Add the posteriors of the transitions of a step, times grad_output, to `[C, C]`.

    The weights may be transposed, the counts are not.
    """
    C = len(alpha)
    if not chain.linear and factor == -np.inf:
        return
    for i in range(C):
        w, rows, columns = weights[i], beta if transposed else alpha, alpha if transposed else beta
        if chain.linear:
            value = rows[i] * factor
            for j in range(C):
                line[j] = value * w[j] * columns[j]
        else:
            value = rows[i] - factor
            for j in range(C):
                line[j] = exp(value + w[j] + columns[j]) * grad_output
        if transposed:
            for j in range(C):
                counts[j, i] += line[j]
        else:
            row = counts[i]
            for j in range(C):
                row[j] += line[j]


@njit(**FLAGS)
def store_counts(
    chain: Any,
    t: int,
    n: int,
    transposed: int,
    alpha: Any,
    beta: Any,
    weights: Any,
    factor: float,
    grad_output: float,
    line: Any,
    factors: Any,
    counts: Any,
) -> None:
    """Store what the gradient of the step from token t to t + 1 needs.

    For constant transitions in linear arithmetic these are the factors of the counts, `[2, T - 1,
    N, C]`. Otherwise the counts are added to `[T - 1 or 2, sequences, C, C]`. What is empty is not
    needed.
    """
    if len(factors):
        left, right = factors[0, t, n], factors[1, t, n]
        for c in range(len(alpha)):
            left[c], right[c] = alpha[c] * factor, beta[c]
    elif len(counts):
        index = counts[t if chain.varies else transposed, n % counts.shape[1]]
        add_counts(chain, alpha, beta, weights, transposed, factor, grad_output, line, index)


@njit(nogil=True, **FLAGS)
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
    gradients are those in emissions `[T, N, C]`, in the ends `[2, N, C]`, and what
    `store_counts` stores.
    """
    C = chain.start.shape[1]
    buffer = np.empty(C, chain.emissions.numbers.dtype)
    scores, sums, maxima, state = np.empty(C), np.empty(C), np.empty(C), np.empty(C)
    weighted, line = np.empty(C), np.empty(C)
    for half in halves:
        n, forward = half // 2, half % 2
        backward, length = 1 - forward, chain.lengths[n]
        middle = middle_of(length)
        weights = weight_buffer(chain, backward)
        first, last, by = (middle, length, 1) if forward else (middle - 1, -1, -1)
        before = first - by  # the token whose state was saved last by this direction
        for c in range(C):
            state[c] = saved[before, n, c] if before < length else one_of(chain)
        for t in range(first, last, by):
            prefetch_token(chain, t + 2 * by, n)
            from_token = t - 1 if forward else t
            if from_token == length - 1:
                for c in range(C):
                    sums[c] = one_of(chain)
            else:
                load_weights(chain, from_token, n, backward, weights)
                step(chain, state, weights, maxima, sums)
            factor = posterior(
                chain, saved[t, n], sums, grad_output[n], d_emissions[t, n], weighted
            )
            if t == 0 or t == length - 1:
                for c in range(C):
                    d_ends[0 if t == 0 else 1, n, c] = weighted[c]
            # The step at the middle belongs to the first half.
            if from_token < length - 1 and (backward or t > first):
                alpha, beta = (state, saved[t, n]) if forward else (saved[t, n], state)
                store_counts(
                    chain,
                    from_token,
                    n,
                    backward,
                    alpha,
                    beta,
                    weights,
                    factor,
                    grad_output[n],
                    line,
                    factors,
                    counts,
                )
            load_token(chain, t, n, buffer, scores)
            multiply_and_scale(chain, sums, scores, state)
        if length == 1 and backward:
            for c in range(C):
                d_ends[1, n, c] = d_ends[0, n, c]
        if forward:
            for t in range(length, len(d_emissions)):
                for c in range(C):
                    d_emissions[t, n, c] = 0.0
            for t in range(length - 1, factors.shape[1] if len(factors) else 0):
                for c in range(C):
                    factors[0, t, n, c], factors[1, t, n, c] = 0.0, 0.0


def _halves(chain: ChainArrays) -> tuple[Any, int]:
    """Return the numbers of tokens of the halves of all sequences, and the edges of a step."""
    return chain.lengths.repeat(2) // 2, chain.start.shape[1] ** 2


def linear_chain_logz(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and the states of both halves."""
    chain, invalid = chain_arrays(emissions, transitions, start, end, lengths)
    T, N, C = emissions.shape
    saved = empty_batch((T if save else 0, N, C))
    meeting, log_scale, logz = np.empty((2 * N, C)), np.empty(2 * N), np.empty(N)
    halves, edges = _halves(chain)
    run_over_sequences(
        forward_kernel, halves, edges, chain, save, saved.numpy(), meeting, log_scale
    )
    run_over_sequences(join_kernel, np.ones(N, np.int64), edges, chain, meeting, log_scale, logz)
    result = torch.from_numpy(logz).masked_fill_(invalid, torch.nan)
    rounded = result.to(acc_dtype(emissions.dtype), copy=True)
    return result, rounded, saved if save else saved.new_empty(0)


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
        saved.detach().numpy(),
        d_emissions.numpy(),
        d_ends.numpy(),
    )
    d_transitions = transitions.new_empty(0)
    if not need_transitions:
        run_over_sequences(gradient_kernel, *_halves(chain), *args, NO_FACTORS, NO_COUNTS)
    elif transitions.ndim > 2:
        d_transitions = step_gradients(args, transitions, dtype, invalid)
    else:
        d_transitions = constant_gradients(args, transitions, invalid, per_sequence)
    fill_nan(d_emissions, invalid)
    d_ends[:, invalid] = torch.nan
    return (
        d_emissions.to(emissions.dtype),
        d_transitions,
        *(
            d_emissions.new_empty(0) if end is None else d_end.to(end.dtype, copy=True)
            for end, d_end in zip((start, end), d_ends, strict=True)
        ),
    )


NO_FACTORS = np.empty((0, 0, 0, 0))
NO_COUNTS = np.empty((0, 0, 0, 0))


def constant_gradients(
    args: tuple[Any, ...], transitions: Tensor, invalid: Tensor, per_sequence: bool
) -> Tensor:
    """Return the gradient in constant transitions, of each sequence or their sum."""
    chain = args[0]
    T, N, C = args[3].shape
    lengths, edges = _halves(chain)
    if chain.linear:
        factors = np.empty((2, T - 1, N, C))
        run_over_sequences(gradient_kernel, lengths, edges, *args, factors, NO_COUNTS)
        left, right = torch.from_numpy(factors)
        if per_sequence:
            counts = left.permute(1, 2, 0) @ right.transpose(0, 1)
        else:
            counts = left.reshape(-1, C).T @ right.reshape(-1, C)
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
    chain, upstream, *rest = args
    T, N, C = args[3].shape
    lengths, edges = _halves(chain)
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
    lengths, edges = _halves(chain)
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
