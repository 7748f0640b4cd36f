"""One step of sparse linear chains for the Numba kernels.

A step is read and written as a whole in rows `[C * K]`. Terms are `[K, C]` where loops over states
become vector code. Loops that look states up stay scalar code. Loops with a small K are compiled
for each K, which removes most of the cost of an inner loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import (
    INF,
    LOWEST,
    Steps,
    as_array,
    as_steps,
    run_over_sequences,
    start_of,
)
from ....primitives.cpu.half import load_row, number_at
from ....primitives.cpu.jit import jit
from ....primitives.cpu.math import exp, exp_floor, log, prefetch
from ....runtime.register import resolved

SMALLEST = np.finfo(np.float64).tiny


class Edges(NamedTuple):
    """The edges of a step.

    Fields:
        K: the number of edges into each state.
        sources: the state that each edge leaves, `[C * K]` int32; -1 for a missing edge.
        outgoing: the edges, ordered by the state that they leave, then by their index. The dtype is
            uint32, because an index that may be negative costs time.
        outgoing_start: the index in `outgoing` of each state's first edge, and the number of edges
            last, `[C + 1]` int32.
        out_degree: the number of edges that leave each state; 0 if the states differ in it.
    """

    K: int
    sources: Any
    outgoing: Any
    outgoing_start: Any
    out_degree: int


class ChainBatch(NamedTuple):
    """A batch of chains.

    Fields:
        lengths: the number of steps of each chain, `[N]`; 0 for an invalid chain.
        edges: those of every step.
        scores: `Steps` `[T, N, C, K]`.
        initial, final: `[N, C]` fp64.
    """

    lengths: Any
    edges: Edges
    scores: Steps
    initial: Any
    final: Any


@jit
def load_edges(steps: Any, t: int, n: int, K: int, buffer: Any) -> Any:
    """Return the numbers of a step's edges, `[C * K]`.

    The result is a view where they are contiguous, and otherwise a copy in the buffer.
    """
    first, stride_c, stride_k = start_of(steps, t, n), steps.strides[2], steps.strides[3]
    if stride_k == 1 and stride_c == K:
        if not len(steps.words):
            return steps.numbers[first : first + len(buffer)]
        load_row(steps, first, stride_k, buffer)
    else:
        for c in range(len(buffer) // max(K, 1)):
            for k in range(K):
                buffer[c * K + k] = number_at(steps, first + c * stride_c + k * stride_k)
    return buffer


@jit(inline="always")
def _edge_terms(
    row: Any, sources: Any, alpha: Any, terms: Any, max_term: Any, next_row: Any, K: int
) -> None:
    for c in range(len(max_term)):
        prefetch(next_row, c * K)
        highest = LOWEST
        for k in range(K):
            s = sources[c * K + k]
            term = row[c * K + k] + alpha[s] if s >= 0 else -INF
            terms[k, c] = term
            highest = term if term > highest else highest
        max_term[c] = highest


@jit
def edge_terms(
    row: Any, sources: Any, alpha: Any, terms: Any, max_term: Any, next_row: Any
) -> None:
    """Compute row + alpha of each edge, `[K, C]`, and the greatest term of each state, `[C]`.

    The row that is read next is prefetched.
    """
    K = len(terms)
    if K == 2:
        _edge_terms(row, sources, alpha, terms, max_term, next_row, 2)
    elif K == 3:
        _edge_terms(row, sources, alpha, terms, max_term, next_row, 3)
    elif K == 4:
        _edge_terms(row, sources, alpha, terms, max_term, next_row, 4)
    elif K == 5:
        _edge_terms(row, sources, alpha, terms, max_term, next_row, 5)
    else:
        _edge_terms(row, sources, alpha, terms, max_term, next_row, K)


@jit
def add_target_values(row: Any, state_values: Any, edge_values: Any) -> None:
    """Compute the row `[C * K]` plus the value `[C]` of the state that each edge enters."""
    K = len(edge_values) // max(len(state_values), 1)
    for c in range(len(state_values)):
        for k in range(K):
            edge_values[c * K + k] = row[c * K + k] + state_values[c]


@jit(inline="always")
def _add_source_values(
    sources: Any,
    at_source: Any,
    at_target: Any,
    edges: Any,
    next_row: Any,
    next_states: Any,
    K: int,
) -> None:
    for c in range(len(at_target)):
        prefetch(next_row, c * K)
        prefetch(next_states, c)
        target_value = at_target[c]
        for k in range(K):
            s = sources[c * K + k]
            edges[c * K + k] = (at_source[s] if s >= 0 else 0.0) + target_value


@jit
def add_source_values(
    sources: Any, at_source: Any, at_target: Any, edges: Any, next_row: Any, next_states: Any
) -> None:
    """Compute the value of each edge's source state plus that of its target state, `[C * K]`.

    The rows of edges and of states that are read next are prefetched.
    """
    K = len(sources) // max(len(at_target), 1)
    if K == 2:
        _add_source_values(sources, at_source, at_target, edges, next_row, next_states, 2)
    elif K == 3:
        _add_source_values(sources, at_source, at_target, edges, next_row, next_states, 3)
    elif K == 4:
        _add_source_values(sources, at_source, at_target, edges, next_row, next_states, 4)
    elif K == 5:
        _add_source_values(sources, at_source, at_target, edges, next_row, next_states, 5)
    else:
        _add_source_values(sources, at_source, at_target, edges, next_row, next_states, K)


@jit(fastmath={"contract", "reassoc"})
def sum_in_any_order(numbers: Any) -> float:
    """Return the sum of the numbers; the compiler may reorder it."""
    total = 0.0
    for i in range(len(numbers)):
        total += numbers[i]
    return total


@jit
def posterior_offsets(posterior: Any, alpha: Any, offset: Any) -> None:
    """Compute the log of each state's posterior minus its alpha, `[C]`.

    The score of an edge, plus alpha of its source, plus the offset of its target is the log of the
    edge's posterior. The posteriors of the states are divided by their sum.
    """
    scale = 1.0 / sum_in_any_order(posterior)
    for c in range(len(posterior)):
        value = log(posterior[c] * scale) - alpha[c]
        offset[c] = -INF if posterior[c] < SMALLEST else value


@jit
def edge_posteriors(row: Any, sources: Any, edges: Any, factor: float, scaled: Any) -> None:
    """Replace `edges` by exp(row + edges), the posteriors `[C * K]`, and write them times a factor.

    Missing edges have the posterior 0.
    """
    for e in range(len(edges)):
        x = row[e] + edges[e]
        # Scores may be so large that the sum has no correct digit: a posterior is 1 at most.
        p = exp(0.0 if x > 0.0 else x)
        p = p if sources[e] >= 0 else 0.0
        edges[e] = p
        scaled[e] = p * factor


@jit(inline="always")
def _sum_by_source(outgoing: Any, edge_values: Any, result: Any, out_degree: int) -> None:
    for c in range(len(result)):
        total = 0.0
        for i in range(out_degree):
            total += edge_values[outgoing[c * out_degree + i]]
        result[c] = total


@jit
def sum_by_source(edges: Any, edge_values: Any, result: Any) -> None:
    """Compute the sum of the edge values `[C * K]` over the edges that leave each state, `[C]`."""
    if edges.out_degree == 2:
        _sum_by_source(edges.outgoing, edge_values, result, 2)
    elif edges.out_degree == 3:
        _sum_by_source(edges.outgoing, edge_values, result, 3)
    elif edges.out_degree == 4:
        _sum_by_source(edges.outgoing, edge_values, result, 4)
    elif edges.out_degree == 5:
        _sum_by_source(edges.outgoing, edge_values, result, 5)
    else:
        for c in range(len(result)):
            result[c] = 0.0
        for e in range(len(edge_values)):
            if edges.sources[e] >= 0:
                result[edges.sources[e]] += edge_values[e]


@jit
def repeat_past_length(alpha: Any, n: int, length: int) -> None:
    """Copy the row of alpha at the length of a chain to all later rows of `[T + 1, N, C]`."""
    for t in range(length + 1, len(alpha)):
        for c in range(alpha.shape[2]):
            alpha[t, n, c] = alpha[length, n, c]


@jit
def logz_at_end(alpha: Any, final: Any) -> float:
    """Return log Σ exp(alpha + final) over the states `[C]`."""
    highest = LOWEST
    for c in range(len(alpha)):
        value = alpha[c] + final[c]
        highest = value if value > highest else highest
    total = 0.0
    for c in range(len(alpha)):
        total += exp_floor(alpha[c] + final[c] - highest)
    value = highest + np.log(total)
    return -INF if value == LOWEST else value


def chain_batch(
    scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, lengths: Tensor | None
) -> tuple[ChainBatch, Tensor]:
    """Return the batch for the kernels, and the mask of invalid chains, `[N]`.

    No index of the batch is out of bounds. A length out of range makes its chain invalid. A source
    out of range makes all chains invalid.
    """
    T, N, C, K = scores.shape
    steps = torch.full((N,), T, device="cpu") if lengths is None else resolved(lengths).long()
    source = resolved(source).long()  # a narrow type would wrap the bounds
    out_of_range = (source < -1) | (source >= C)
    invalid = (steps < 0) | (steps > T) | out_of_range.any()
    sources = source.masked_fill(out_of_range, -1).int().flatten().numpy()
    degrees = np.bincount(sources[sources >= 0], minlength=C)
    start = np.concatenate([[0], degrees.cumsum()]).astype(np.int32)
    outgoing = sources.argsort(kind="stable")[len(sources) - start[-1] :].astype(np.uint32)
    mean_degree = int(start[-1]) // max(C, 1)
    out_degree = mean_degree if bool((degrees == mean_degree).all()) else 0
    edges = Edges(K, sources, outgoing, start, out_degree)
    safe_lengths = steps.masked_fill(invalid, 0).numpy()
    ends = as_array(initial), as_array(final)
    return ChainBatch(safe_lengths, edges, as_steps(scores), *ends), invalid


def run(kernel: Callable[..., Any], batch: ChainBatch, *args: Any) -> None:
    """Run `kernel(chains, batch, *args)` for all chains, as `run_over_sequences` does."""
    run_over_sequences(kernel, batch.lengths, len(batch.edges.sources), batch, *args)
