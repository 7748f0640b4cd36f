"""Means over the paths of dense linear chains and their gradients, in parallel over the batch.

Alpha runs forwards with the mean of the values over the paths into each state, and beta backwards
with the mean over the rest of the paths.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import (
    INF,
    as_array,
    as_steps,
    empty_batch,
    fill_nan,
    run_over_sequences,
)
from ....primitives.cpu.half import load_row
from ....primitives.cpu.jit import MINUS_ONE, ONE, ZERO, jit
from ....primitives.cpu.math import exp
from .steps import chain_arrays, copy_row, load_tokens, load_weights, log_of_sum, scan


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


@jit
def add_covariances(
    linear: bool,
    alpha: Any,
    weights: Any,
    beta: Any,
    into: Any,
    values: Any,
    onwards: Any,
    total: float,
    mean: float,
    grad_output: float,
    result: Any,
) -> None:
    """Add the derivatives of the posteriors of a step, times grad_output, to `[C, C]`.

    `weights` and `values` are transposed; `onwards` are means from the emission of the next token.
    """
    C = len(values)
    if total == (0.0 if linear else -INF):
        return
    for j in range(C):
        w, v = weights[j], values[j]
        for i in range(C):
            if linear:
                p = alpha[i] * w[i] * beta[j] / total
            else:
                p = exp(alpha[i] + w[i] + beta[j] - total)
            difference = into[i] + v[i] + onwards[j] - mean
            result[i, j] += grad_output * p * difference if p != 0.0 else 0.0


@jit(nogil=True)
def tangent_kernel(
    sequences: Any,
    chain: Any,
    grad_output: Any,
    emission_values: Any,
    step_values: Any,
    end_values: Any,
    means: Any,
    d_emissions: Any,
    d_ends: Any,
    counts: Any,
) -> None:
    """Write the mean of each sequence, and its gradients times grad_output.

    They are `[N]`, `[T, N, C]`, `[2, N, C]` and `[T - 1 or 1, sequences, C, C]`, to which the
    gradients in transitions are added.
    """
    T, (C, width) = len(d_emissions), chain.weights.shape[1:]
    linear, one = chain.linear, 1.0 if chain.linear else 0.0
    alpha, into = np.empty((T + 1, width)), np.empty((T, C))
    scores, sums, states = np.empty((1, width)), np.zeros((1, width)), np.empty((2, width))
    varying, values, token = np.zeros((C, width)), np.empty((C, C)), np.empty(C)
    onwards, mean_from, entered = np.empty(C), np.empty(C), np.empty(C)
    for n in sequences:
        length = chain.lengths[n]
        for t in range(length):
            load_tokens(chain.emissions, chain.start, chain.end, length, t, ONE, n, linear, scores)
            weights = varying if chain.varies else chain.weights[0]
            if t and chain.varies:
                load_weights(chain.transitions, t - 1, n, ZERO, weights)
            scan(linear, weights, scores, sums, alpha[t : t + 2], t == 0)
            token_values(emission_values, t, n, token)
            if t:
                load_weights(step_values, t - 1, n, ZERO, values)
                mean_step(linear, alpha[t], weights, sums[0], into[t - 1], values, entered)
            else:
                copy_row(end_values[0, n], entered)
            for c in range(C):
                into[t, c] = entered[c] + token[c]
        mean, has_mean = 0.0, False
        copy_row(end_values[1, n], mean_from)
        for t in range(length - 1, -1, -1):
            # sums is beta of this token without its emission, mean_from the mean after it.
            a, b, is_last = alpha[t + 1], sums[0], t == length - 1
            if is_last:
                for c in range(C):
                    b[c] = one
            else:
                load_weights(step_values, t, n, ONE, values)
                weights = varying if chain.varies else chain.weights[1]
                if chain.varies:
                    load_weights(chain.transitions, t, n, ONE, weights)
                token_values(emission_values, t + 1, n, token)
                for c in range(C):
                    onwards[c] = token[c] + mean_from[c]
                copy_row(states[1], states[0])
                load_tokens(
                    *(chain.emissions, chain.start, chain.end, length),
                    *(t, MINUS_ONE, n, linear, scores),
                )
                scan(linear, weights, scores, sums, states, is_last)
                mean_step(linear, states[0], weights, b, onwards, values, mean_from)
            log_total = log_of_sum(linear, a, b)
            total = np.exp(log_total) if linear else log_total
            for c in range(C):
                if linear:
                    p = a[c] * b[c] / total if total != 0.0 else 0.0
                else:
                    p = exp(a[c] + b[c] - total) if total != -INF else 0.0
                entered[c] = p
                if not has_mean:
                    mean += p * (into[t, c] + mean_from[c]) if p != 0.0 else 0.0
            has_mean = True
            for c in range(C):
                p, difference = entered[c], into[t, c] + mean_from[c] - mean
                token[c] = grad_output[n] * p * difference if p != 0.0 else 0.0
            copy_row(token, d_emissions[t, n])
            if is_last:
                copy_row(token, d_ends[1, n])
                load_tokens(
                    *(chain.emissions, chain.start, chain.end, length),
                    *(t, MINUS_ONE, n, linear, scores),
                )
                scan(linear, chain.weights[1], scores, sums, states, is_last)
            elif len(counts):
                index = counts[t if chain.varies else 0, n % counts.shape[1]]
                add_covariances(
                    *(linear, a, weights, states[0], into[t], values, onwards),
                    *(total, mean, grad_output[n], index),
                )
            if t == 0:
                copy_row(token, d_ends[0, n])
        means[n] = mean
        for t in range(length, T):
            for c in range(C):
                d_emissions[t, n, c] = 0.0


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
    means, d_emissions = np.empty(N), empty_batch((T, N, C))
    fp64: Any = {"dtype": torch.float64, "device": "cpu"}
    d_ends = torch.empty((2, N, C), **fp64)
    steps, sequences = (1 if transitions.ndim == 2 else T - 1), _group(transitions, T, N, C)
    rows = N if transitions.ndim == 4 else 1
    d_transitions = torch.zeros((steps, rows, C, C), **fp64)
    args = (
        chain,
        as_array(grad_output),
        as_steps(emission_values),
        as_steps(step_values.expand(T - 1, N, C, C)),
        ends,
        means,
        d_emissions.numpy(),
        d_ends.numpy(),
    )
    # Constant transitions have partial sums, one for each sequence of a group.
    counts = d_transitions if transitions.ndim > 2 else torch.zeros((1, sequences, C, C), **fp64)
    for first in range(0, N, sequences):
        if transitions.ndim == 2:
            counts.zero_()

        def kernel(part: Any, *args: Any, first: int = first) -> None:
            tangent_kernel(part + first, *args)

        part = chain.lengths[first : first + sequences]
        run_over_sequences(kernel, part, C * C, *args, counts.numpy())
        if transitions.ndim == 2:
            d_transitions += counts.sum(1, keepdim=True)
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


def _group(transitions: Tensor, T: int, N: int, C: int) -> int:
    """Return the number of sequences that run side by side.

    Sequences that add to the same steps run one after another. The partial sums of constant
    transitions take no more memory than the emissions.
    """
    if transitions.ndim == 3:
        return 1
    if transitions.ndim == 4:
        return max(N, 1)
    return max(1, min(N, T * N // C if C else N))
