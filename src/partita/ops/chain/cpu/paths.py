"""Best paths, samples, and alpha and beta under Log and Max, in parallel over the batch.

The best path follows back-pointers. Samples are drawn backwards from alpha.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, LOWEST, empty_batch, fill_nan, row_at
from ....primitives.cpu.jit import ZERO, jit
from ....primitives.cpu.math import exp, exp_floor, log
from ....runtime.dtypes import acc_dtype
from .logz import chain_forward_kernel
from .steps import (
    add_target_values,
    chain_batch,
    edge_terms,
    load_edges,
    repeat_past_length,
    run,
)


class BestPaths(NamedTuple):
    """The best path of each chain. Entries that are on no path are not written.

    Fields:
        pointers: to the best edges, `[T, N, C]`, or `[1, N, C]` without paths.
        score: `[N]`.
        states, edges: `[T + 1, N]` and `[T, N]`, or empty without paths.
    """

    pointers: Any
    score: Any
    states: Any
    edges: Any


@jit
def max_over_edges(terms: Any, best: Any, best_k: Any) -> None:
    """Compute the greatest term of each state, `[C]`, or NaN, and the first k that has it."""
    for c in range(len(best)):
        best[c] = -INF
        best_k[c] = 0
    for k in range(len(terms)):
        for c in range(len(best)):
            term = terms[k, c]
            better = (term > best[c]) | (term != term)
            best[c] = term if better else best[c]
            best_k[c] = k if better else best_k[c]


@jit(nogil=True)
def chain_best_path_kernel(chains: Any, batch: Any, alpha: Any, paths: Any) -> None:
    """Find the best path of each chain. Alpha under Max is as in `chain_forward_kernel`."""
    K, C, rows = batch.edges.K, batch.initial.shape[1], len(alpha)
    scores, sources = batch.scores, batch.edges.sources
    for n in chains:
        buffer, length = np.empty(C * K, scores.numbers.dtype), batch.lengths[n]
        terms, max_term = np.empty((K, C)), np.empty(C)
        for c in range(C):
            alpha[0, n, c] = batch.initial[n, c]
        for t in range(length):
            now, after = (t, t + 1) if rows > 2 else (t % 2, (t + 1) % 2)
            row, next_row = load_edges(scores, t, n, K, buffer), row_at(scores, t + 1, n)
            edge_terms(row, sources, alpha[now, n], terms, max_term, next_row)
            pointers = paths.pointers[t if len(paths.states) else 0, n]
            max_over_edges(terms, alpha[after, n], pointers)
        score, state = -INF, ZERO
        for c in range(C):
            value = alpha[length % rows, n, c] + batch.final[n, c]
            if (value > score) | (value != value):
                score, state = value, c
        paths.score[n] = score
        repeat_past_length(alpha, n, length)
        if len(paths.states) and score > -INF:
            paths.states[length, n] = state
            for t in range(length - 1, -1, -1):
                edge = state * K + paths.pointers[t, n, state]
                state = sources[edge]
                paths.edges[t, n], paths.states[t, n] = edge, state


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
    chains: Any, batch: Any, alpha: Any, logz: Any, uniforms: Any, states: Any, edges: Any
) -> None:
    """Draw S paths of each chain with uniform numbers `[T + 1, S, N]` and alpha `[T + 1, N, C]`.

    Entries that are on no path are not written.
    """
    K, C, samples = batch.edges.K, batch.final.shape[1], uniforms.shape[1]
    for n in chains:
        buffer = np.empty(C * K, batch.scores.numbers.dtype)
        ends, terms, state = np.empty(C), np.empty(K), np.empty(samples, np.int64)
        for c in range(C):
            ends[c] = alpha[batch.lengths[n], n, c] + batch.final[n, c]
        cumulative_exp(ends)
        for s in range(samples if logz[n] > -INF else 0):
            state[s] = draw_index(ends, uniforms[-1, s, n])
            states[s, batch.lengths[n], n] = state[s]
        for t in range(batch.lengths[n] - 1 if logz[n] > -INF else -1, -1, -1):
            row = load_edges(batch.scores, t, n, K, buffer)
            for s in range(samples):
                for k in range(K):
                    edge = state[s] * K + k
                    left = batch.edges.sources[edge]
                    terms[k] = row[edge] + alpha[t, n, left] if left >= 0 else -INF
                cumulative_exp(terms)
                edge = state[s] * K + draw_index(terms, uniforms[t, s, n])
                state[s] = batch.edges.sources[edge]
                edges[s, t, n], states[s, t, n] = edge, state[s]


@jit(nogil=True)
def chain_backward_scan_kernel(chains: Any, batch: Any, use_max: bool, beta: Any) -> None:
    """Compute beta of every step under Log or Max, `[T + 1, N, C]`; `final` from a length on.

    A state that no edge leaves has -inf.
    """
    edges, C = batch.edges, batch.final.shape[1]
    starts = edges.outgoing_start
    for n in chains:
        buffer = np.empty(C * edges.K, batch.scores.numbers.dtype)
        edge_values, terms = np.empty(C * edges.K), np.empty(len(edges.outgoing))
        max_term, sum_exp = np.empty(C), np.empty(C)
        for t in range(batch.lengths[n], len(beta)):
            for c in range(C):
                beta[t, n, c] = batch.final[n, c]
        for t in range(batch.lengths[n] - 1, -1, -1):
            row, before = load_edges(batch.scores, t, n, edges.K, buffer), beta[t, n]
            add_target_values(row, beta[t + 1, n], edge_values)
            for c in range(C):
                highest, greatest = LOWEST, -INF
                for i in range(starts[c], starts[c + 1]):
                    term = edge_values[edges.outgoing[i]]
                    terms[i] = term
                    highest = term if term > highest else highest
                    greatest = term if (term > greatest) | (term != term) else greatest
                max_term[c], before[c] = highest, greatest
            if use_max:
                continue
            for c in range(C):
                for i in range(starts[c], starts[c + 1]):
                    terms[i] -= max_term[c]
            for i in range(len(terms)):
                terms[i] = exp_floor(terms[i])
            for c in range(C):
                sum_exp[c] = 0.0
                for i in range(starts[c], starts[c + 1]):
                    sum_exp[c] += terms[i]
            for c in range(C):
                value = max_term[c] + log(sum_exp[c])
                before[c] = -INF if value == LOWEST else value


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
    batch, invalid = chain_batch(scores, source, initial, final, lengths)
    T, N, C, K = scores.shape
    states = torch.full((T + 1, N) if trace else (0, N), -1, device="cpu")
    edges = torch.full((T, N) if trace else (0, N), -1, device="cpu")
    score = torch.empty(N, dtype=torch.float64, device="cpu")
    pointers = np.empty((T if trace else 1, N, C), pointer_dtype(K))
    paths = BestPaths(pointers, score.numpy(), states.numpy(), edges.numpy())
    run(chain_best_path_kernel, batch, np.empty((2, N, C)), paths)
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
    batch, invalid = chain_batch(scores, source, initial, final, lengths)
    T, N, C, _ = scores.shape
    samples = uniforms.shape[1]
    alpha, logz, numbers = np.empty((T + 1, N, C)), np.empty(N), uniforms.contiguous().numpy()
    states = torch.full((samples, T + 1, N), -1, device="cpu")
    edges = torch.full((samples, T, N), -1, device="cpu")
    run(chain_forward_kernel, batch, alpha, logz)
    run(chain_sample_kernel, batch, alpha, logz, numbers, states.numpy(), edges.numpy())
    return states.masked_fill_(invalid, -1), edges


def chain_scan(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    use_max: bool,
    reverse: bool,
) -> Tensor:
    """Return alpha, or beta if `reverse`, under Log or Max, `[T + 1, N, C]` fp64."""
    batch, invalid = chain_batch(scores, source, initial, final, lengths)
    T, N, C, K = scores.shape
    result, unused = empty_batch((T + 1, N, C)), np.empty(N)
    if reverse:
        run(chain_backward_scan_kernel, batch, use_max, result.numpy())
    elif use_max:
        no_paths = np.empty((0, 0), np.int64)
        pointers = np.empty((1, N, C), pointer_dtype(K))
        paths = BestPaths(pointers, unused, no_paths, no_paths)
        run(chain_best_path_kernel, batch, result.numpy(), paths)
    else:
        run(chain_forward_kernel, batch, result.numpy(), unused)
    fill_nan(result, invalid)
    return result
