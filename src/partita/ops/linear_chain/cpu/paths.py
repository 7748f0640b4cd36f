"""Best paths and samples of dense linear chains, in parallel over the batch.

The best path follows back-pointers. Samples are drawn backwards from alpha.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, contiguous_row, run_over_sequences
from ....primitives.cpu.jit import ONE, ZERO, jit
from ....runtime.dtypes import acc_dtype
from ...chain.cpu.paths import cumulative_exp, draw_index, pointer_dtype
from .steps import BLOCK, chain_arrays, load_tokens, load_weights, log_of_sum, scan


@jit
def max_step(state: Any, weights: Any, best: Any, pointers: Any) -> None:
    """Write the best sum of a state and a weight into each state, and the lowest state it is from.

    A NaN is the best of all.
    """
    C = len(state)
    for j in range(C):
        best[j], pointers[j] = -INF, 0
    for i in range(C):
        a, row = state[i], weights[i]
        for j in range(C):
            value = a + row[j]
            better = (value > best[j]) | (value != value)
            best[j] = value if better else best[j]
            pointers[j] = i if better else pointers[j]


@jit(nogil=True)
def best_path_kernel(sequences: Any, chain: Any, pointers: Any, score: Any, states: Any) -> None:
    """Compute the best score of each sequence, `[N]`, and the states of its path, `[T, N]`.

    States that are on no path are not written. `pointers` is `[T, N, C]`.
    """
    C = chain.start.shape[1]
    buffer = np.empty(C, chain.emissions.numbers.dtype)
    alpha, best, origin = np.empty(C), np.empty(C), np.empty(C, np.int64)
    varying = np.empty((C, C) if chain.varies else (0, 0))
    for n in sequences:
        length = chain.lengths[n]
        weights = varying if chain.varies else chain.weights[0]
        row = contiguous_row(chain.emissions, ZERO, n, buffer)
        for c in range(C):
            alpha[c] = chain.start[n, c] + row[c]
        for t in range(1, length):
            if chain.varies:
                load_weights(chain.transitions, t - 1, n, ZERO, weights)
            max_step(alpha, weights, best, origin)
            row, target = contiguous_row(chain.emissions, t, n, buffer), pointers[t, n]
            for c in range(C):
                alpha[c] = best[c] + row[c]
                target[c] = origin[c]
        highest, state = -INF, 0
        for c in range(C):
            value = alpha[c] + chain.end[n, c]
            if (value > highest) | (value != value):
                highest, state = value, c
        score[n] = highest
        if highest > -INF:
            for t in range(length - 1, -1, -1):
                states[t, n] = state
                state = pointers[t, n, state] if t else 0


def linear_chain_viterbi(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the best score `[N]` and the states of the best path `[T, N]`."""
    chain, invalid = chain_arrays(emissions, transitions, start, end, lengths, log_domain=True)
    T, N, C = emissions.shape
    score = np.empty(N)
    states = torch.full((T, N), -1, device="cpu")
    pointers = np.empty((T, N, C), pointer_dtype(C))
    run_over_sequences(
        best_path_kernel, chain.lengths, C * C, chain, pointers, score, states.numpy()
    )
    states[:, invalid] = -1
    result = torch.from_numpy(score).masked_fill_(invalid, torch.nan)
    return result.to(acc_dtype(emissions.dtype), copy=True), states


@jit
def draw_previous(linear: bool, alpha: Any, weights: Any, uniform: float, terms: Any) -> int:
    """Draw a state with a probability proportional to the product of alpha and weights."""
    if not linear:
        for c in range(len(terms)):
            terms[c] = alpha[c] + weights[c]
        cumulative_exp(terms)
    else:
        total = 0.0
        for c in range(len(terms)):
            total += alpha[c] * weights[c]
            terms[c] = total
    return draw_index(terms, uniform)


@jit(nogil=True)
def sample_kernel(sequences: Any, chain: Any, uniforms: Any, states: Any) -> None:
    """Draw k paths of each sequence, `[k, T, N]`, with uniform numbers `[T, k, N]`.

    Entries that are on no path are not written.
    """
    C, width = chain.weights.shape[1:]
    samples, size = uniforms.shape[1], 1 if chain.varies else BLOCK
    scores, sums = np.empty((size, width)), np.empty((size, width))
    alpha = np.empty((len(states[0]) + 1 if samples else 0, width))
    terms, state = np.empty(C), np.empty(samples, np.int64)
    ones = np.full(width, 1.0 if chain.linear else 0.0)
    varying = np.zeros((C, width) if chain.varies else (0, 0))
    for n in sequences if samples else sequences[:0]:
        length = chain.lengths[n]
        weights = varying if chain.varies else chain.weights[0]
        scale = 0.0
        for t in range(0, length, size):
            K = min(size, length - t)
            scale += load_tokens(
                *(chain.emissions, chain.start, chain.end, length),
                *(t, ONE, n, chain.linear, scores[:K]),
            )
            if t and chain.varies:
                load_weights(chain.transitions, t - 1, n, ZERO, weights)
            scan(chain.linear, weights, scores[:K], sums[:K], alpha[t : t + K + 1], t == 0)
        total = scale + log_of_sum(chain.linear, alpha[length], ones)
        if not total > -INF:
            continue
        for s in range(samples):
            uniform = uniforms[length - 1, s, n]
            state[s] = draw_previous(chain.linear, alpha[length], ones, uniform, terms)
            states[s, length - 1, n] = state[s]
        weights = varying if chain.varies else chain.weights[1]
        for t in range(length - 2, -1, -1):
            if chain.varies:
                load_weights(chain.transitions, t, n, ONE, weights)
            for s in range(samples):
                row, uniform = weights[state[s]], uniforms[t, s, n]
                state[s] = draw_previous(chain.linear, alpha[t + 1], row, uniform, terms)
                states[s, t, n] = state[s]


def linear_chain_sample(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> Tensor:
    """Return the states `[k, T, N]` of k paths from the posterior."""
    chain, invalid = chain_arrays(emissions, transitions, start, end, lengths)
    T, N, C = emissions.shape
    states = torch.full((uniforms.shape[1], T, N), -1, device="cpu")
    run_over_sequences(
        sample_kernel, chain.lengths, C * C, chain, uniforms.contiguous().numpy(), states.numpy()
    )
    states[:, :, invalid] = -1
    return states
