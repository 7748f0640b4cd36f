"""Best paths and samples of sparse linear chains, in parallel over the batch.

The best path follows back-pointers. Samples are drawn backwards from alpha.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, as_array, as_steps, row_at, run_over_batch
from ....primitives.cpu.jit import ZERO, jit
from ....primitives.cpu.math import exp
from ....runtime.dtypes import acc_dtype
from .logz import chain_forward_kernel
from .steps import chain_batch, edge_terms, load_edges, max_over_edges, repeat_past_length


@jit
def trace_path(
    pointers: Any,
    sources: Any,
    K: int,
    n: int,
    length: int,
    state: int,
    states: Any,
    edges: Any,
) -> None:
    """Write the path of a chain that ends in a state, from its last step to its first."""
    states[length, n] = state
    for t in range(length - 1, -1, -1):
        edge = state * K + pointers[t, n, state]
        state = sources[edge]
        edges[t, n], states[t, n] = edge, state


@jit(nogil=True)
def chain_best_path_kernel(
    chains: Any,
    batch: Any,
    scores: Any,
    initial: Any,
    final: Any,
    alpha: Any,
    save: bool,
    pointers: Any,
    score: Any,
    states: Any,
    edges: Any,
    trace: bool,
) -> None:
    """Compute the best score of each chain, and with `trace` the states and edges of its path.

    Entries that are on no path are not written. Alpha under Max is as in `chain_forward_kernel`.
    The pointers to the best edges are `[T, N, C]` with `trace`, and `[1, N, C]` otherwise.
    """
    C = initial.shape[1]
    for n in chains:
        buffer = np.empty(C * batch.K, scores.numbers.dtype)
        terms, max_term = np.empty((batch.K, C)), np.empty(C)
        for c in range(C):
            alpha[0, n, c] = initial[n, c]
        for t in range(batch.lengths[n]):
            now, after = (t, t + 1) if save else (t % 2, (t + 1) % 2)
            row, next_row = load_edges(scores, t, n, batch.K, buffer), row_at(scores, t + 1, n)
            edge_terms(row, batch.sources, alpha[now, n], terms, max_term, next_row)
            max_over_edges(terms, alpha[after, n], pointers[t if trace else 0, n])
        last_alpha = alpha[batch.lengths[n] if save else batch.lengths[n] % 2, n]
        best, last_state = -INF, ZERO
        for c in range(C):
            value = last_alpha[c] + final[n, c]
            if (value > best) | (value != value):
                best, last_state = value, c
        score[n] = best
        if save:
            repeat_past_length(alpha, n, batch.lengths[n])
        if trace and best > -INF:
            trace_path(
                pointers, batch.sources, batch.K, n, batch.lengths[n], last_state, states, edges
            )


@jit
def cumulative_exp(terms: Any) -> None:
    """Replace the terms by the cumulative sums of exp(terms - max)."""
    highest, total = -INF, 0.0
    for i in range(len(terms)):
        highest = terms[i] if terms[i] > highest else highest
    for i in range(len(terms)):
        total += exp(terms[i] - highest) if terms[i] > -INF else 0.0
        terms[i] = total


@jit
def draw_index(cumulative: Any, uniform: float) -> int:
    """Return the first index whose cumulative sum exceeds uniform times the total.

    The product may round up to the total. The result is then the last index that adds to the sum.
    """
    last = len(cumulative) - 1
    index = np.searchsorted(cumulative, uniform * cumulative[last], side="right")
    return min(index, np.searchsorted(cumulative, cumulative[last]))


@jit(nogil=True)
def chain_sample_kernel(
    chains: Any,
    batch: Any,
    scores: Any,
    final: Any,
    alpha: Any,
    logz: Any,
    uniforms: Any,
    states: Any,
    edges: Any,
) -> None:
    """Draw S paths of each chain with uniform numbers `[T + 1, S, N]` and alpha `[T + 1, N, C]`.

    Entries that are on no path are not written.
    """
    C, K, samples = final.shape[1], batch.K, uniforms.shape[1]
    for n in chains:
        buffer = np.empty(C * K, scores.numbers.dtype)
        ends, terms, state = np.empty(C), np.empty(K), np.empty(samples, np.int64)
        for c in range(C):
            ends[c] = alpha[batch.lengths[n], n, c] + final[n, c]
        cumulative_exp(ends)
        for s in range(samples if logz[n] > -INF else 0):
            state[s] = draw_index(ends, uniforms[-1, s, n])
            states[s, batch.lengths[n], n] = state[s]
        for t in range(batch.lengths[n] - 1 if logz[n] > -INF else -1, -1, -1):
            row = load_edges(scores, t, n, K, buffer)
            for s in range(samples):
                for k in range(K):
                    edge = state[s] * K + k
                    left = batch.sources[edge]
                    terms[k] = row[edge] + alpha[t, n, left] if left >= 0 else -INF
                cumulative_exp(terms)
                edge = state[s] * K + draw_index(terms, uniforms[t, s, n])
                state[s] = batch.sources[edge]
                edges[s, t, n], states[s, t, n] = edge, state[s]


def pointer_dtype(K: int) -> Any:
    """Return the smallest integer type for a pointer to one of K edges."""
    return np.min_scalar_type(max(K - 1, 0))


def chain_viterbi(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    trace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best score `[N]`, and the states `[T + 1, N]` and edges `[T, N]` of its path.

    The score is fp64 for fp64 scores and otherwise fp32. States and edges are -1 where the path has
    none, and empty without `trace`.
    """
    batch, invalid = chain_batch(scores, source, lengths)
    T, N, C, K = scores.shape
    score = torch.empty(N, dtype=torch.float64, device="cpu")
    states = torch.full((T + 1, N) if trace else (0, N), -1, device="cpu")
    edges = torch.full((T, N) if trace else (0, N), -1, device="cpu")
    alpha, save = np.empty((2, N, C)), False
    pointers = np.empty((T if trace else 1, N, C), pointer_dtype(K))
    run_over_batch(
        chain_best_path_kernel,
        batch,
        as_steps(scores),
        as_array(initial),
        as_array(final),
        alpha,
        save,
        pointers,
        score.numpy(),
        states.numpy(),
        edges.numpy(),
        trace,
    )
    score = score.masked_fill_(invalid, torch.nan).to(acc_dtype(scores.dtype))
    if not trace:
        return score, states.new_empty(0), edges.new_empty(0)
    return score, states.masked_fill_(invalid, -1), edges


def chain_sample(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the states `[S, T + 1, N]` and edges `[S, T, N]` of S paths from the posterior."""
    batch, invalid = chain_batch(scores, source, lengths)
    T, N, C, _ = scores.shape
    samples = uniforms.shape[1]
    alpha, logz, save = np.empty((T + 1, N, C)), np.empty(N), True
    states = torch.full((samples, T + 1, N), -1, device="cpu")
    edges = torch.full((samples, T, N), -1, device="cpu")
    steps, last = as_steps(scores), as_array(final)
    run_over_batch(chain_forward_kernel, batch, steps, as_array(initial), last, alpha, save, logz)
    run_over_batch(
        chain_sample_kernel,
        batch,
        steps,
        last,
        alpha,
        logz,
        uniforms.contiguous().numpy(),
        states.numpy(),
        edges.numpy(),
    )
    return states.masked_fill_(invalid, -1), edges
