"""Best paths, samples, and alpha and beta under Log and Max, in parallel over the batch.

Best paths follow back-pointers. Samples are drawn backwards from alpha.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, LOWEST, empty_batch, fill_nan, row_at
from ....primitives.cpu.jit import jit
from ....primitives.cpu.math import exp, exp_floor, log
from ....runtime.dtypes import acc_dtype
from ..common import ChainPotentials
from .logz import chain_forward_kernel
from .steps import (
    ChainBatch,
    add_emissions,
    add_target_values,
    chain_batch,
    edge_into,
    edge_terms,
    load_edges,
    run,
    scale_states,
)


class BestPaths(NamedTuple):
    """The R best paths of each chain, from the best on. Entries on no path are not written.

    Fields:
        pointers: to the edge into each state and the rank of the path before it, as edge * R +
            rank, `[T, N, C * R]`, or `[1, N, C * R]` without paths.
        score: `[R, N]`.
        states, edges: `[R, T + 1, N]` and `[R, T, N]`, or empty without paths.
    """

    pointers: Any
    score: Any
    states: Any
    edges: Any


@jit
def max_over_edges(terms: Any, values: Any, best: Any, pointers: Any) -> None:
    """Compute the greatest term + value of each state, or NaN, and the first k that has it.

    The terms are `[K * C]`, and the values `[K]`.
    """
    C = len(best)
    for c in range(C):
        best[c] = -INF
        pointers[c] = 0
    for k in range(len(values)):
        value, into = values[k], terms[k * C : (k + 1) * C]
        for c in range(C):
            term = into[c] + value
            better = (term > best[c]) | (term != term)
            best[c] = term if better else best[c]
            pointers[c] = k if better else pointers[c]


@jit
def insert(term: float, pointer: int, best: Any, pointers: Any, first: int, last: int) -> None:
    """Insert a term into a descending part of a list, behind its equals; NaN comes first."""
    i = last
    while i > first and (term > best[i - 1] or (term != term and best[i - 1] == best[i - 1])):
        if i < last:
            best[i], pointers[i] = best[i - 1], pointers[i - 1]
        i -= 1
    if i < last:
        best[i], pointers[i] = term, pointer


@jit
def best_over_edges(row: Any, edges: Any, alpha: Any, R: int, best: Any, pointers: Any) -> None:
    """Compute the R best paths into each state, `[C * R]`, from those into the states before."""
    C = len(best) // R
    for i in range(C * R):
        best[i], pointers[i] = -INF, 0
    for c in range(C):
        for k in range(edges.K):
            e = edge_into(edges, C, c, k)
            s = edges.sources[e]
            for r in range(R if s >= 0 else 0):
                term = row[e] + alpha[s * R + r]
                insert(term, k * R + r, best, pointers, c * R, (c + 1) * R)


@jit(nogil=True)
def chain_best_path_kernel(chains: Any, batch: Any, alpha: Any, paths: Any) -> None:
    """Find the R best paths of each chain.

    Alpha under Max, `[T + 1, N, C]`, is as in `chain_forward_kernel`; it may be empty.

    Source: Schwartz and Chow, The N-best algorithm, 1990.
    """
    edges, C, R = batch.edges, batch.initial.shape[1], len(paths.score)
    for n in chains:
        buffer, length = np.empty(C * edges.K, batch.scores.numbers.dtype), batch.lengths[n]
        flat_terms, zeros, max_term = np.empty(C * edges.K), np.zeros(edges.K), np.empty(C)
        terms, emitted = flat_terms.reshape(edges.K, C), np.empty(C)
        score, slots = np.full(R, -INF), np.zeros(R, np.int64)
        # The R best paths into each state.
        state, next_state = np.full(C * R, -INF), np.empty(C * R)
        for c in range(C):
            state[c * R] = batch.initial[n, c]
        for t in range(length):
            if len(alpha):
                scale_states(state, 1.0, alpha[t, n])
            row = load_edges(batch.scores, t, n, edges.K, buffer)
            pointers = paths.pointers[t if len(paths.states) else 0, n]
            if R > 1:
                best_over_edges(row, edges, state, R, next_state, pointers)
                if edges.dense:
                    scale_states(zeros, 0.0, emitted)
                    add_emissions(batch.emissions, t, n, emitted)
                    for i in range(C * R):
                        next_state[i] += emitted[i // R]
            elif edges.dense:
                max_over_edges(row, state, next_state, pointers)
                add_emissions(batch.emissions, t, n, next_state)
            else:
                next_row = row_at(batch.scores, t + 1, n)
                edge_terms(row, edges.dense, edges.sources, state, terms, max_term, next_row)
                max_over_edges(flat_terms, zeros, next_state, pointers)
            state, next_state = next_state, state
        for c in range(C):
            for r in range(R):
                insert(state[c * R + r] + batch.final[n, c], c * R + r, score, slots, 0, R)
        for t in range(length, len(alpha)):
            scale_states(state, 1.0, alpha[t, n])
        for r in range(R):
            paths.score[r, n] = score[r]
            if len(paths.states) and score[r] > -INF:
                trace_back(batch, paths, n, r, slots[r])


@jit
def trace_back(batch: Any, paths: Any, n: int, r: int, slot: int) -> None:
    """Write a path that ends in a state with a rank, `slot` = state * R + rank."""
    edges, C, R = batch.edges, batch.initial.shape[1], len(paths.score)
    length = batch.lengths[n]
    state, rank = slot // R, slot % R
    paths.states[r, length, n] = state
    for t in range(length - 1, -1, -1):
        way = paths.pointers[t, n, state * R + rank]
        k, rank = (way // R, way % R) if R > 1 else (way, 0)
        edge = edge_into(edges, C, state, k)
        state = edges.sources[edge]
        paths.edges[r, t, n], paths.states[r, t, n] = edge, state


@jit
def cumulative_exp(terms: Any) -> None:
    """Replace the terms by the cumulative sums of exp(terms - max)."""
    highest, total = LOWEST, 0.0
    for i in range(len(terms)):
        highest = terms[i] if terms[i] > highest else highest
    for i in range(len(terms)):
        terms[i] = exp(terms[i] - highest)
    for i in range(len(terms)):
        total += terms[i]
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
        last = batch.lengths[n] if batch.edges.dense else len(uniforms) - 1
        for s in range(samples if logz[n] > -INF else 0):
            state[s] = draw_index(ends, uniforms[last, s, n])
            states[s, batch.lengths[n], n] = state[s]
        for t in range(batch.lengths[n] - 1 if logz[n] > -INF else -1, -1, -1):
            row = load_edges(batch.scores, t, n, K, buffer)
            for s in range(samples):
                for k in range(K):
                    edge = edge_into(batch.edges, C, state[s], k)
                    left = batch.edges.sources[edge]
                    terms[k] = row[edge] + alpha[t, n, left] if left >= 0 else -INF
                cumulative_exp(terms)
                edge = edge_into(batch.edges, C, state[s], draw_index(terms, uniforms[t, s, n]))
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
            add_target_values(edges, row, beta[t + 1, n], edge_values)
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


def best_paths(batch: ChainBatch, T: int, k: int, trace: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores `[k, N]`, states `[k, T + 1, N]` and edges `[k, T, N]` of the best paths.

    States and edges are -1 where a path has none, and empty without `trace`.
    """
    (N, C), K = batch.initial.shape, batch.edges.K
    states = torch.full((k, T + 1, N) if trace else (0, 0, N), -1, device="cpu")
    edges = torch.full((k, T, N) if trace else (0, 0, N), -1, device="cpu")
    score = torch.empty((k, N), dtype=torch.float64, device="cpu")
    pointers = np.empty((T if trace else 1, N, C * k), np.min_scalar_type(max(K * k - 1, 0)))
    paths = BestPaths(pointers, score.numpy(), states.numpy(), edges.numpy())
    run(chain_best_path_kernel, batch, np.empty((0, N, C)), paths)
    return score, states, edges


def chain_viterbi(chain: ChainPotentials, trace: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best score of each chain, and the states and edges of its path."""
    batch, invalid = chain_batch(chain)
    score, states, edges = best_paths(batch, len(chain.scores), 1, trace)
    score = score[0].masked_fill(invalid, torch.nan).to(acc_dtype(chain.scores.dtype))
    if not trace:
        return score, states.new_empty(0), edges.new_empty(0)
    return score, states[0].masked_fill_(invalid, -1), edges[0]


def chain_nbest(chain: ChainPotentials, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of the k best paths of each chain, their states and their edges."""
    batch, invalid = chain_batch(chain)
    score, states, edges = best_paths(batch, len(chain.scores), k, True)
    return score.masked_fill_(invalid, torch.nan), states.masked_fill_(invalid, -1), edges


def chain_sample(chain: ChainPotentials, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states and edges of paths from the posterior."""
    batch, invalid = chain_batch(chain)
    T, N, C, _ = chain.scores.shape
    samples = uniforms.shape[1]
    alpha, logz, numbers = np.empty((T + 1, N, C)), np.empty(N), uniforms.contiguous().numpy()
    states = torch.full((samples, T + 1, N), -1, device="cpu")
    edges = torch.full((samples, T, N), -1, device="cpu")
    run(chain_forward_kernel, batch, alpha, logz)
    run(chain_sample_kernel, batch, alpha, logz, numbers, states.numpy(), edges.numpy())
    return states.masked_fill_(invalid, -1), edges


def chain_scan(chain: ChainPotentials, use_max: bool, reverse: bool) -> Tensor:
    """Return alpha, or beta if `reverse`, at each time."""
    batch, invalid = chain_batch(chain)
    T, N, C, K = chain.scores.shape
    result, unused = empty_batch((T + 1, N, C)), np.empty(N)
    if reverse:
        run(chain_backward_scan_kernel, batch, use_max, result.numpy())
    elif use_max:
        no_paths = np.empty((0, 0, N), np.int64)
        pointers = np.empty((1, N, C), np.min_scalar_type(max(K - 1, 0)))
        paths = BestPaths(pointers, unused[None], no_paths, no_paths)
        run(chain_best_path_kernel, batch, result.numpy(), paths)
    else:
        run(chain_forward_kernel, batch, result.numpy(), unused)
    fill_nan(result, invalid)
    return result
