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
from ....primitives.cpu.vectors import copy_numbers, pointer_to
from ....runtime.dtypes import acc_dtype
from .counts import store_counts
from .linear_steps import dot_of_rows, multiply_rows
from .steps import (
    BLOCK,
    chain_arrays,
    copy_row,
    halves_of,
    load_states,
    load_tokens,
    load_weights,
    log_of_sum,
    middle_of,
    scan,
)

NO_COUNTS = np.empty((0, 0, 0, 0))


@jit
def posteriors(
    linear: bool, others: Any, sums: Any, grad_output: float, totals: Any, weighted: Any
) -> None:
    """Write the posteriors of K tokens times grad_output, `[K, W]`, from the states of both scans.

    `totals` are grad_output divided by the sum of the products of alpha and beta, or the log of
    that sum in the log domain.
    """
    width, x, y, result = sums.shape[1], pointer_to(others), pointer_to(sums), pointer_to(weighted)
    for k in range(len(totals)):
        if linear:
            total = dot_of_rows(x, y, k * width, width)
            totals[k] = 0.0 if total == 0.0 else grad_output / total
            multiply_rows(x, y, k * width, width, totals[k], result)
        else:
            a, b, row = others[k], sums[k], weighted[k]
            totals[k] = log_of_sum(linear, a, b)
            for c in range(len(row)):
                row[c] = exp(a[c] + b[c] - totals[k]) * grad_output
            if totals[k] == -np.inf:
                for c in range(len(row)):
                    row[c] = 0.0


@jit
def write_gradient(
    weighted: Any, t: int, by: int, n: int, length: int, d_emissions: Any, d_ends: Any
) -> None:
    """Write the posteriors of tokens t, t + by, ... to the gradients."""
    (N, C), width = d_emissions.shape[1:], weighted.shape[1]
    source, target = pointer_to(weighted), pointer_to(d_emissions)
    for k in range(len(weighted)):
        token = t + k * by
        copy_numbers(source, k * width, target, (token * N + n) * C, C)
        if token == 0:
            copy_row(weighted[k], d_ends[0, n])
        if token == length - 1:
            copy_row(weighted[k], d_ends[1, n])


@jit(nogil=True)
def gradient_kernel(
    halves: Any,
    chain: Any,
    grad_output: Any,
    saved: Any,
    d_emissions: Any,
    d_ends: Any,
    counts: Any,
) -> None:
    """Write the gradients of half h % 2 of sequence h // 2.

    Beta continues backwards through the first half, and alpha forwards through the second. The
    gradients are those in emissions `[T, N, C]` and in the ends `[2, N, C]`, and the counts of
    `store_counts`, unless these are empty.
    """
    C, width = chain.weights.shape[1:]
    size = 1 if chain.varies else BLOCK
    scores, sums = np.empty((size, width)), np.empty((size, width))
    states, others = np.empty((size + 1, width)), np.zeros((size, width))
    weighted, totals = np.empty((size, width)), np.empty(size)
    buffer = np.zeros((C, width) if chain.varies else (0, 0))
    for half in halves:
        n, forward = half // 2, half % 2
        backward, length = 1 - forward, chain.lengths[n]
        middle = middle_of(length)
        weights = buffer if chain.varies else chain.weights[backward]
        first, by = (middle, 1) if forward else (middle - 1, -1)
        tokens = length - middle if forward else middle
        starts = first - by >= length  # a sequence of one token has no beta
        if not starts:
            load_states(saved, first - by, by, n, states[:1])
        for k in range(0, tokens, size):
            t, K = first + k * by, min(size, tokens - k)
            # The step at the middle is that of the first half, and the last token has none.
            skip = 1 if k == 0 and (forward or starts) else 0
            load_tokens(
                *(chain.emissions, chain.start, chain.end, length),
                *(t, by, n, chain.linear, scores[:K]),
            )
            if chain.varies and not starts:
                step = t - 1 if forward else t
                load_weights(chain.transitions, step, n, backward, weights)
            scan(chain.linear, weights, scores[:K], sums[:K], states[: K + 1], starts)
            load_states(saved, t, by, n, others[:K])
            posteriors(chain.linear, others, sums, grad_output[n], totals[:K], weighted)
            write_gradient(weighted[:K], t, by, n, length, d_emissions, d_ends)
            if len(counts):
                store_counts(
                    *(chain.linear, chain.varies, weights, states, others, totals[:K]),
                    *(t, by, n, skip, grad_output[n], counts),
                )
            copy_row(states[K], states[0])
        if forward:
            for t in range(length, len(d_emissions)):
                for c in range(C):
                    d_emissions[t, n, c] = 0.0


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
    chain, invalid = chain_arrays(emissions, transitions, start, end, lengths)
    failed = logz.isnan()
    steps = torch.from_numpy(chain.lengths).masked_fill(invalid, len(emissions))
    upstream = grad_output.detach().double().masked_fill(failed, torch.nan)
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
        run_over_sequences(gradient_kernel, *halves_of(chain), *args, NO_COUNTS)
    elif transitions.ndim > 2:
        d_transitions = step_gradients(args, transitions, dtype, failed, steps)
    else:
        d_transitions = constant_gradients(args, transitions, failed, per_sequence)
    fill_nan(d_emissions, failed, steps)
    d_ends[:, failed] = torch.nan
    # An op may not return one tensor as two results.
    d_start = d_emissions.new_empty(0) if start is None else d_ends[0].to(start.dtype, copy=True)
    d_end = d_emissions.new_empty(0) if end is None else d_ends[1].to(end.dtype, copy=True)
    return d_emissions.to(emissions.dtype), d_transitions, d_start, d_end


def constant_gradients(
    args: tuple[Any, ...], transitions: Tensor, failed: Tensor, per_sequence: bool
) -> Tensor:
    """Return the gradient in constant transitions, of each sequence or their sum.

    Sequences run in groups, so that the counts of a group take no more memory than the emissions.
    """
    chain = args[0]
    T, N, C = args[3].shape
    width = chain.weights.shape[2]
    lengths, edges = halves_of(chain)
    group = max(1, min(N, T * N // (2 * C) if C else N))
    counts = torch.zeros((2, group, width, width), dtype=torch.float64, device="cpu")
    result = torch.zeros((N if per_sequence else 1, C, C), dtype=torch.float64, device="cpu")
    for first in range(0, N, group):
        counts.zero_()
        part = lengths[2 * first : 2 * (first + group)]

        def kernel(halves: Any, *args: Any, first: int = first) -> None:
            gradient_kernel(halves + 2 * first, *args)

        run_over_sequences(kernel, part, edges, *args, counts.numpy())
        alpha, beta = counts[..., :C, :C]
        sums = alpha + beta.mT if chain.linear else alpha + beta
        if per_sequence:
            result[first : first + group] = sums.roll(-(first % group), 0)[: N - first]
        else:
            result[0] += sums.sum(0)
    if chain.linear:
        result *= torch.from_numpy(chain.weights[0, :, :C])
    if per_sequence:
        result[failed] = torch.nan
        return result.to(acc_dtype(transitions.dtype))
    if bool(failed.any()):
        result.fill_(torch.nan)
    return result[0].to(transitions.dtype)


def step_gradients(
    args: tuple[Any, ...],
    transitions: Tensor,
    dtype: torch.dtype,
    failed: Tensor,
    steps: Tensor,
) -> Tensor:
    """Return the gradient in transitions that vary, in their shape and dtype."""
    chain = args[0]
    T, N, C = args[3].shape
    lengths, edges = halves_of(chain)
    if transitions.ndim == 4:
        counts = torch.zeros(
            transitions.shape, dtype=torch.promote_types(transitions.dtype, dtype), device="cpu"
        )
        run_over_sequences(gradient_kernel, lengths, edges, *args, counts.numpy())
        fill_nan(counts, failed, steps - 1)
        return counts.to(transitions.dtype)
    # All sequences add to the same steps, so they run one after another.
    counts = torch.zeros((T - 1, 1, C, C), dtype=torch.float64, device="cpu")
    for n in range(N):

        def kernel(halves: Any, *args: Any, n: int = n) -> None:
            gradient_kernel(halves + 2 * n, *args)

        part = lengths[2 * n : 2 * n + 2]
        run_over_sequences(kernel, part, edges, *args, counts.numpy())
    fill_nan(counts.expand(-1, N, -1, -1), failed, steps - 1)
    return counts[:, 0].to(transitions.dtype)
