"""The gradient of log Z of dense linear chains, in parallel over the batch and in time.

Alpha and beta, which met in the middle of each sequence, each continue through the other half. The
posteriors of each token are divided by their sum, so no error adds up over the tokens.
In linear arithmetic the counts of constant transitions are exp(transitions) times a product of the
states of both scans over time, which each half of a sequence adds up block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import empty_batch, fill_nan
from ....primitives.cpu.jit import ONE, ZERO, jit
from ....primitives.cpu.math import exp
from ....primitives.cpu.vectors import copy_numbers, pointer_to
from ....runtime.dtypes import acc_dtype
from .linear_steps import add_outer_products, dot_of_rows, multiply_rows, scale_row
from .steps import (
    ChainArrays,
    Tokens,
    chain_arrays,
    copy_row,
    group_size,
    halves_of,
    load_states,
    log_of_sum,
    middle_of,
    run,
    scan,
    scan_buffers,
)


class Gradients(NamedTuple):
    """The gradients of a batch.

    Fields:
        emissions: `[T, N, C]`.
        ends: those in the scores of the first and last states, `[2, N, C]`.
        counts: sums of the posteriors of transitions, which start at 0, or empty. Those that vary
            have `[T - 1, sequences, C, C]`. Of constant ones each direction of time has partial
            sums, `[2, sequences, C, C]` in the log domain, and `[2, sequences, W, W]` in linear
            arithmetic: without the factor exp(transitions), and transposed if time runs backwards.
    """

    emissions: Any
    ends: Any
    counts: Any


@jit
def write_posteriors(
    chain: Any,
    tokens: Any,
    buffers: Any,
    others: Any,
    totals: Any,
    grad_output: float,
    gradients: Any,
) -> None:
    """Write the posteriors of tokens times grad_output to the gradients, by way of the scores.

    `others` are the states of the other scan at each token. `totals` get grad_output divided by the
    sum of the products of alpha and beta, or the log of that sum in the log domain.
    """
    (N, C), width = gradients.emissions.shape[1:], others.shape[1]
    x, y, result = pointer_to(others), pointer_to(buffers.sums), pointer_to(buffers.scores)
    for k in range(tokens.count):
        weighted = buffers.scores[k]
        if chain.linear:
            total = dot_of_rows(x, y, k * width, width)
            totals[k] = 0.0 if total == 0.0 else grad_output / total
            multiply_rows(x, y, k * width, width, totals[k], result)
        else:
            a, b = others[k], buffers.sums[k]
            totals[k] = log_of_sum(chain.linear, a, b)
            for c in range(C):
                weighted[c] = exp(a[c] + b[c] - totals[k]) * grad_output
            for c in range(C if totals[k] == -np.inf else 0):
                weighted[c] = 0.0
        t = tokens.first + k * tokens.by
        at = (t * N + tokens.n) * C
        copy_numbers(result, k * width, pointer_to(gradients.emissions), at, C)
        if t == 0:
            copy_row(weighted, gradients.ends[0, tokens.n])
        if t == tokens.length - 1:
            copy_row(weighted, gradients.ends[1, tokens.n])


@jit
def add_counts(
    chain: Any,
    tokens: Any,
    varying: Any,
    states: Any,
    others: Any,
    totals: Any,
    grad_output: float,
    counts: Any,
) -> None:
    """Add the posteriors of the steps that enter tokens, times grad_output, to the counts.

    Args:
        varying: the weights of these steps if transitions vary.
        states: the states of this scan before each token; in linear arithmetic they are scaled.
        others, totals: those of `write_posteriors`.
    """
    backward, index = ONE if tokens.by < 0 else ZERO, tokens.n % counts.shape[1]
    # The step at the middle is that of the first half, and no step follows the last token.
    left_out = tokens.length - 1 if backward else middle_of(tokens.length)
    skip = 1 if tokens.first == left_out else 0
    if chain.linear:
        width, rows = states.shape[1], pointer_to(states)
        for k in range(skip, tokens.count):
            scale_row(rows, k * width, width, totals[k])
        add_outer_products(states, others, skip, tokens.count, counts[backward, index])
        return
    weights = varying if chain.varies else chain.weights[backward]
    C, line = len(weights), np.empty(len(weights))
    for k in range(skip, tokens.count):
        step = tokens.first + k * tokens.by - 1 + backward
        target = counts[step if chain.varies else backward, index]
        for i in range(C if totals[k] != -np.inf else 0):
            value, w, other = states[k, i] - totals[k], weights[i], others[k]
            for j in range(C):
                line[j] = exp(value + w[j] + other[j]) * grad_output
            if backward:
                for j in range(C):
                    target[j, i] += line[j]
            else:
                row = target[i]
                for j in range(C):
                    row[j] += line[j]


@jit(nogil=True)
def gradient_kernel(halves: Any, chain: Any, grad_output: Any, saved: Any, gradients: Any) -> None:
    """Write the gradients of half h % 2 of sequence h // 2.

    Beta continues backwards through the first half, and alpha forwards through the second.
    """
    buffers, (T, _, C) = scan_buffers(chain), gradients.emissions.shape
    size, width = buffers.scores.shape
    states, others = np.empty((size + 1, width)), np.zeros((size, width))
    totals = np.empty(size)
    for half in halves:
        n, forward = half // 2, half % 2
        length = chain.lengths[n]
        middle = middle_of(length)
        first, by = (middle, 1) if forward else (middle - 1, -1)
        steps = length - middle if forward else middle
        if first - by < length:  # a sequence of one token has no beta
            load_states(saved, Tokens(n, length, first - by, by, ONE), states)
        for k in range(0, steps, size):
            tokens = Tokens(n, length, first + k * by, by, min(size, steps - k))
            scan(chain, tokens, buffers, states, 0.0)
            load_states(saved, tokens, others)
            write_posteriors(chain, tokens, buffers, others, totals, grad_output[n], gradients)
            if len(gradients.counts):
                add_counts(
                    *(chain, tokens, buffers.weights, states, others, totals),
                    *(grad_output[n], gradients.counts),
                )
            copy_row(states[tokens.count], states[0])
        if forward:
            for t in range(length, T):
                for c in range(C):
                    gradients.emissions[t, n, c] = 0.0


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
    T, N, C = emissions.shape
    failed = logz.isnan()
    steps = torch.from_numpy(chain.lengths).masked_fill(invalid, T)
    upstream = grad_output.detach().double().masked_fill(failed, torch.nan)
    upstream = upstream.masked_fill(logz == -torch.inf, 0.0)
    dtype = torch.promote_types(emissions.dtype, torch.float32)
    d_emissions = empty_batch(emissions.shape, dtype)
    d_ends = torch.empty((2, N, C), dtype=torch.float64, device="cpu")
    inputs = (
        upstream.contiguous().numpy(),
        # The reference, which serves empty batches, saves nothing.
        (saved if saved.numel() else saved.new_empty(emissions.shape)).detach().numpy(),
    )
    halves, group = halves_of(chain), group_size(transitions, 2, T, N)

    def add_gradients(counts: Tensor, first: int = 0, size: int = N) -> None:
        """Write the gradients of sequences from `first` on."""
        gradients = Gradients(d_emissions.numpy(), d_ends.numpy(), counts.numpy())
        part = halves[2 * first : 2 * (first + size)]
        run(gradient_kernel, part, chain, *inputs, gradients, first=2 * first)

    if not need_transitions:
        add_gradients(torch.empty((0, 0, 0, 0), dtype=torch.float64, device="cpu"))
        d_transitions = transitions.new_empty(0)
    elif transitions.ndim == 2:
        sums = constant_gradients(chain, add_gradients, group, failed, per_sequence)
        d_transitions = sums.to(acc_dtype(transitions.dtype) if per_sequence else transitions.dtype)
    else:
        # A sum over sequences is formed in fp64.
        shape, kind = transitions.shape, torch.promote_types(transitions.dtype, dtype)
        if transitions.ndim == 3:
            shape, kind = (T - 1, 1, C, C), torch.float64
        counts = torch.zeros(shape, dtype=kind, device="cpu")
        for first in range(0, N, group):
            add_gradients(counts, first, group)
        fill_nan(counts.expand(-1, N, -1, -1), failed, steps - 1)
        d_transitions = counts.to(transitions.dtype).reshape(transitions.shape)
    fill_nan(d_emissions, failed, steps)
    d_ends[:, failed] = torch.nan
    # An op may not return one tensor as two results.
    d_start = d_emissions.new_empty(0) if start is None else d_ends[0].to(start.dtype, copy=True)
    d_end = d_emissions.new_empty(0) if end is None else d_ends[1].to(end.dtype, copy=True)
    return d_emissions.to(emissions.dtype), d_transitions, d_start, d_end


def constant_gradients(
    chain: ChainArrays,
    add_gradients: Callable[[Tensor, int, int], None],
    group: int,
    failed: Tensor,
    per_sequence: bool,
) -> Tensor:
    """Return the gradient in constant transitions, of each sequence or their sum."""
    N, (C, width) = len(failed), chain.weights.shape[1:]
    counts = torch.zeros((2, group, width, width), dtype=torch.float64, device="cpu")
    result = torch.zeros((N if per_sequence else 1, C, C), dtype=torch.float64, device="cpu")
    for first in range(0, N, group):
        add_gradients(counts.zero_(), first, group)
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
        return result
    if bool(failed.any()):
        result.fill_(torch.nan)
    return result[0]
