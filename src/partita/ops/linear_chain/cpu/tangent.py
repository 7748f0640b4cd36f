"""Means over the paths of dense linear chains and their gradients, in parallel over the batch.

Alpha runs forwards with the mean of the values over the paths into each state, and beta backwards
with the mean over the rest of the paths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, as_array, as_steps, empty_batch, fill_nan
from ....primitives.cpu.half import load_row
from ....primitives.cpu.jit import MINUS_ONE, ONE, ZERO, jit
from ....primitives.cpu.math import exp
from .gradient import Gradients
from .steps import (
    Tokens,
    chain_arrays,
    copy_row,
    group_size,
    load_weights,
    log_of_sum,
    run,
    scan,
    scan_buffers,
)


class ValueArrays(NamedTuple):
    """The values whose sum over a path is averaged.

    Fields:
        emissions, transitions: `Steps` `[T, N, C]` and `[T - 1, N, C, C]`.
        ends: those of the first and last states, `[2, N, C]` fp64.
    """

    emissions: Any
    transitions: Any
    ends: Any


@jit
def mean_step(
    linear: bool, state: Any, weights: Any, sums: Any, means: Any, values: Any, result: Any
) -> None:
    """Write the mean over the paths into each state, from the means of the states before.

    A path of weight 0 adds 0, even if its value is infinite.
    """
    C = len(values)
    for j in range(C):
        result[j] = 0.0
    for i in range(C):
        a, mean, w, v = state[i], means[i], weights[i], values[i]
        if linear:
            for j in range(C):
                p = a * w[j]
                result[j] += p * (mean + v[j]) if p != 0.0 else 0.0
        else:
            for j in range(C):
                p = exp(a + w[j] - (sums[j] if sums[j] != -INF else 0.0))
                result[j] += p * (mean + v[j]) if p != 0.0 else 0.0
    if linear:
        for j in range(C):
            result[j] = result[j] / sums[j] if sums[j] != 0.0 else 0.0


@jit
def token_values(values: Any, t: int, n: int, result: Any) -> None:
    """Write the values of the states of a token."""
    strides = values.strides
    load_row(values, t * strides[0] + n * strides[1], strides[2], result)


@jit(nogil=True)
def tangent_kernel(
    sequences: Any, chain: Any, grad_output: Any, values: Any, means: Any, gradients: Any
) -> None:
    """Write the mean of each sequence, `[N]`, and its gradients times grad_output.

    The counts are `[T - 1 or 1, sequences, C, C]`; the gradients in transitions are added to them.
    """
    (T, _, C), counts, linear = gradients.emissions.shape, gradients.counts, chain.linear
    buffers, width = scan_buffers(chain), chain.weights.shape[2]
    alpha, into, states = np.empty((T + 1, width)), np.empty((T, C)), np.empty((2, width))
    step_values, token, entered = np.empty((C, C)), np.empty(C), np.empty(C)
    onwards, mean_from, sums = np.empty(C), np.empty(C), buffers.sums[0]
    for n in sequences:
        length, grad = chain.lengths[n], grad_output[n]
        for t in range(length):
            scan(chain, Tokens(n, length, t, ONE, ONE), buffers, alpha[t : t + 2], 0.0)
            token_values(values.emissions, t, n, token)
            if t:
                weights = buffers.weights if chain.varies else chain.weights[0]
                load_weights(values.transitions, t - 1, n, ZERO, step_values)
                mean_step(linear, alpha[t], weights, sums, into[t - 1], step_values, entered)
            else:
                copy_row(values.ends[0, n], entered)
            for c in range(C):
                into[t, c] = entered[c] + token[c]
        mean, weights = 0.0, buffers.weights if chain.varies else chain.weights[1]
        copy_row(values.ends[1, n], mean_from)
        for t in range(length - 1, -1, -1):
            a, is_last = alpha[t + 1], t == length - 1
            # sums is beta of this token without its emission, mean_from the mean after it.
            copy_row(states[1], states[0])
            scan(chain, Tokens(n, length, t, MINUS_ONE, ONE), buffers, states, 0.0)
            if not is_last:
                load_weights(values.transitions, t, n, ONE, step_values)
                token_values(values.emissions, t + 1, n, token)
                for c in range(C):
                    onwards[c] = token[c] + mean_from[c]
                mean_step(linear, states[0], weights, sums, onwards, step_values, mean_from)
            log_total = log_of_sum(linear, a, sums)
            total = np.exp(log_total) if linear else log_total
            possible = total != (0.0 if linear else -INF)
            for c in range(C):
                if linear:
                    p = a[c] * sums[c] / total if possible else 0.0
                else:
                    p = exp(a[c] + sums[c] - total) if possible else 0.0
                entered[c] = p
                if is_last:
                    mean += p * (into[t, c] + mean_from[c]) if p != 0.0 else 0.0
            for c in range(C):
                p, difference = entered[c], into[t, c] + mean_from[c] - mean
                token[c] = grad * p * difference if p != 0.0 else 0.0
            copy_row(token, gradients.emissions[t, n])
            if is_last:
                copy_row(token, gradients.ends[1, n])
            if t == 0:
                copy_row(token, gradients.ends[0, n])
            # The derivatives of the posteriors of the step to the next token.
            for j in range(C if possible and not is_last else 0):
                target = counts[t if chain.varies else 0, n % counts.shape[1]]
                w, v, b = weights[j], step_values[j], states[0, j]
                for i in range(C):
                    p = a[i] * w[i] * b / total if linear else exp(a[i] + w[i] + b - total)
                    difference = into[t, i] + v[i] + onwards[j] - mean
                    target[i, j] += grad * p * difference if p != 0.0 else 0.0
        means[n] = mean
        for t in range(length, T):
            for c in range(C):
                gradients.emissions[t, n, c] = 0.0


def linear_chain_tangent(
    grad_output: Tensor,
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    emission_values: Tensor,
    transition_values: Tensor,
    start_values: Tensor | None,
    end_values: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean of the values `[N]`, and its gradients weighted by grad_output, in fp64."""
    chain, invalid = chain_arrays(emissions, transitions, start, end, lengths)
    T, N, C = emissions.shape
    step_values = transition_values
    if transition_values.ndim == 3 and transitions.ndim == 3:
        step_values = transition_values.unsqueeze(1)
    zeros = torch.zeros(N, C, dtype=torch.float64, device="cpu")
    ends = np.stack([as_array(zeros if end is None else end) for end in (start_values, end_values)])
    steps = as_steps(step_values.expand(T - 1, N, C, C))
    values = ValueArrays(as_steps(emission_values), steps, ends)
    means, d_emissions = np.empty(N), empty_batch((T, N, C))
    d_ends = torch.empty((2, N, C), dtype=torch.float64, device="cpu")
    group, constant = group_size(transitions, 1, T, N), transitions.ndim == 2
    shape = (1 if constant else T - 1, N if transitions.ndim == 4 else 1, C, C)
    d_transitions = torch.zeros(shape, dtype=torch.float64, device="cpu")
    # Constant transitions have partial sums, one for each sequence of a group.
    counts = d_transitions.new_zeros(1, group, C, C) if constant else d_transitions
    gradients = Gradients(d_emissions.numpy(), d_ends.numpy(), counts.numpy())
    upstream = as_array(grad_output)
    for first in range(0, N, group):
        part = chain.lengths[first : first + group]
        run(tangent_kernel, part, chain, upstream, values, means, gradients, first=first)
        if constant:
            d_transitions += counts.sum(1, keepdim=True)
            counts.zero_()
    result = torch.from_numpy(means)
    result[invalid] = torch.nan
    failed = result.isnan()
    lengths_of_failed = torch.from_numpy(chain.lengths).masked_fill(invalid, T)
    fill_nan(d_emissions, failed, lengths_of_failed)
    d_ends[:, failed] = torch.nan
    if transitions.ndim > 2:
        of_sequences = d_transitions.expand(-1, N, -1, -1)
        fill_nan(of_sequences, failed, lengths_of_failed - 1)
    elif bool(failed.any()):
        d_transitions.fill_(torch.nan)
    return (
        result,
        d_emissions,
        d_transitions.reshape(transitions.shape),
        d_emissions.new_empty(0) if start is None else d_ends[0].clone(),
        d_emissions.new_empty(0) if end is None else d_ends[1].clone(),
    )
