"""One step of linear chains for the Numba kernels, which sparse and dense chains share.

A step is read and written as a whole in rows of edges: `[C * K]` of sparse chains, and `[K * C]` of
dense ones, in which an edge leads from each of K = C states to each state. Terms are `[K, C]` where
loops over states become vector code. Loops that look states up stay scalar code. Loops with a small
K are compiled for each K, which removes most of the cost of an inner loop.
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
from ..common import ChainPotentials

SMALLEST = np.finfo(np.float64).tiny
NO_COUNTS = np.empty((0, 0, 0))


class Edges(NamedTuple):
    """The edges of a step.

    Fields:
        K: the number of edges into each state.
        dense: whether an edge leads from each state to each state.
        sources: the state that each edge leaves, `[C * K]` int32; -1 for a missing edge.
        outgoing: the edges, ordered by the state that they leave, then by their index. The dtype is
            uint32, because an index that may be negative costs time.
        outgoing_start: the index in `outgoing` of each state's first edge, and the number of edges
            last, `[C + 1]` int32.
        out_degree: the number of edges that leave each state; 0 if the states differ in it.
    """

    K: int
    dense: bool
    sources: Any
    outgoing: Any
    outgoing_start: Any
    out_degree: int


class ChainBatch(NamedTuple):
    """A batch of chains.

    Fields:
        lengths: the number of steps of each chain, `[N]`; 0 for an invalid chain.
        edges: those of every step.
        scores: `Steps` `[T, N, C, K]`, or `[T, N, K, C]` of dense chains.
        emissions: `Steps` `[T + 1, N, C]` of dense chains, whose row t + 1 is added to the scores
            of the edges of step t.
        initial, final: `[N, C]` fp64.
    """

    lengths: Any
    edges: Edges
    scores: Steps
    emissions: Steps
    initial: Any
    final: Any


class Gradients(NamedTuple):
    """A backward scan writes these arrays.

    Fields:
        states: the gradients in states after 0 to T steps of dense chains, `[T + 1, N, C]`, and of
            sparse ones in the first and last states, `[2, N, C]`.
        counts: sums of the gradients in the edges of dense chains, `[T, G, C * C]`, or
            `[1, G, C * C]` over the steps, or empty. Sequence n adds to group n % G.
    """

    states: Any
    counts: Any


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


@jit
def add_emissions(emissions: Any, t: int, n: int, states: Any) -> None:
    """Add the emissions after step t to the states `[C]` of a dense chain."""
    first, stride = start_of(emissions, t + 1, n), emissions.strides[2]
    for c in range(len(states)):
        states[c] += number_at(emissions, first + c * stride)


@jit
def edge_into(edges: Any, C: int, state: int, k: int) -> int:
    """Return the index of edge k into a state."""
    return k * C + state if edges.dense else state * edges.K + k


@jit
def dense_terms(row: Any, alpha: Any, terms: Any, max_term: Any) -> None:
    """Compute what `edge_terms` does, for dense chains."""
    K, C = terms.shape
    for c in range(C):
        max_term[c] = LOWEST
    for k in range(K):
        value, scores, into = alpha[k], row[k * C : (k + 1) * C], terms[k]
        for c in range(C):
            term = scores[c] + value
            into[c] = term
            max_term[c] = term if term > max_term[c] else max_term[c]


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
    row: Any,
    dense: bool,
    sources: Any,
    alpha: Any,
    terms: Any,
    max_term: Any,
    next_row: Any,
) -> None:
    """Compute row + alpha of each edge, `[K, C]`, and the greatest term of each state, `[C]`.

    The row that is read next is prefetched.
    """
    K = len(terms)
    if dense:
        dense_terms(row, alpha, terms, max_term)
    elif K == 2:
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
def add_target_values(edges: Any, row: Any, state_values: Any, edge_values: Any) -> None:
    """Compute the row plus the value `[C]` of the state that each edge enters."""
    K, C = edges.K, len(state_values)
    if edges.dense:
        for k in range(K):
            for c in range(C):
                edge_values[k * C + c] = row[k * C + c] + state_values[c]
    else:
        for c in range(C):
            for k in range(K):
                edge_values[c * K + k] = row[c * K + k] + state_values[c]


@jit(inline="always")
def _add_source_values(
    sources: Any,
    at_source: Any,
    at_target: Any,
    sums: Any,
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
            sums[c * K + k] = (at_source[s] if s >= 0 else 0.0) + target_value


@jit
def add_source_values(
    edges: Any, at_source: Any, at_target: Any, sums: Any, next_row: Any, next_states: Any
) -> None:
    """Compute the value of each edge's source state plus that of its target state.

    The rows of edges and of states that are read next are prefetched.
    """
    K, C, sources = edges.K, len(at_target), edges.sources
    if edges.dense:
        for k in range(K):
            source_value, row = at_source[k], sums[k * C : (k + 1) * C]
            for c in range(C):
                row[c] = source_value + at_target[c]
    elif K == 2:
        _add_source_values(sources, at_source, at_target, sums, next_row, next_states, 2)
    elif K == 3:
        _add_source_values(sources, at_source, at_target, sums, next_row, next_states, 3)
    elif K == 4:
        _add_source_values(sources, at_source, at_target, sums, next_row, next_states, 4)
    elif K == 5:
        _add_source_values(sources, at_source, at_target, sums, next_row, next_states, 5)
    else:
        _add_source_values(sources, at_source, at_target, sums, next_row, next_states, K)


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
    """Replace `edges` by exp(row + edges), the posteriors, and write them times a factor.

    Missing edges have the posterior 0.
    """
    for e in range(len(edges)):
        x = row[e] + edges[e]
        # Scores may be so large that the sum has no correct digit: a posterior is 1 at most.
        p = exp(0.0 if x > 0.0 else x)
        p = p if sources[e] >= 0 else 0.0
        edges[e] = p
        scaled[e] = p * factor


@jit
def share_of_one(posterior: Any) -> float:
    """Return the factor of the posteriors of a step: 1, unless their sum is clearly another number.

    Beside a score as -1e30 the others have no digit, and each of many equal paths seems certain.
    """
    total = sum_in_any_order(posterior)
    return 1.0 / total if total > 0.0 and abs(total - 1.0) > 1e-6 else 1.0


@jit(inline="always")
def _sum_by_source(outgoing: Any, edge_values: Any, result: Any, out_degree: int) -> None:
    for c in range(len(result)):
        total = 0.0
        for i in range(out_degree):
            total += edge_values[outgoing[c * out_degree + i]]
        result[c] = total


@jit
def sum_by_source(edges: Any, edge_values: Any, result: Any) -> None:
    """Compute the sum of the edge values over the edges that leave each state, `[C]`."""
    C = len(result)
    if edges.dense:
        for c in range(C):
            result[c] = sum_in_any_order(edge_values[c * C : (c + 1) * C])
    elif edges.out_degree == 2:
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
def add_scaled(values: Any, factor: float, result: Any) -> None:
    """Add values times a factor."""
    for i in range(len(values)):
        result[i] += values[i] * factor


@jit
def scale_states(values: Any, factor: float, result: Any) -> None:
    """Write the values of the states, `[C]`, times a factor."""
    for c in range(len(values)):
        result[c] = values[c] * factor


@jit
def zero_rows(rows: Any, n: int, first: int) -> None:
    """Write zeros into rows `first` and later ones of a sequence, `[T, N, M]`."""
    for t in range(first, len(rows)):
        for i in range(rows.shape[2]):
            rows[t, n, i] = 0.0


@jit
def sequences_of(groups: Any, count: int, N: int) -> Any:
    """Return the sequences n whose n % count is one of the groups; those of a group in order."""
    result, size = np.empty(N, np.int64), 0
    for group in groups:
        for n in range(group, N, count):
            result[size] = n
            size += 1
    return result[:size]


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


def lengths_of(lengths: Tensor | None, lowest: int, T: int, N: int) -> tuple[Tensor, Tensor]:
    """Return the lengths `[N]`, `lowest` for those out of range, and the mask of the latter."""
    steps = torch.full((N,), T, device="cpu") if lengths is None else resolved(lengths).long()
    invalid = (steps < lowest) | (steps > T)
    return steps.masked_fill(invalid, lowest), invalid


def chain_batch(chain: ChainPotentials) -> tuple[ChainBatch, Tensor]:
    """Return the batch for the kernels, and the mask of invalid chains, `[N]`.

    No index of the batch is out of bounds. A length out of range makes its chain invalid. A source
    out of range makes all chains invalid.
    """
    scores = chain.scores
    T, N, C, K = scores.shape
    steps, invalid = lengths_of(chain.lengths, 0, T, N)
    source = resolved(chain.source).long()  # a narrow type would wrap the bounds
    out_of_range = (source < -1) | (source >= C)
    invalid = invalid | out_of_range.any()
    sources = source.masked_fill(out_of_range, -1).int().flatten().numpy()
    degrees = np.bincount(sources[sources >= 0], minlength=C)
    start = np.concatenate([[0], degrees.cumsum()]).astype(np.int32)
    outgoing = sources.argsort(kind="stable")[len(sources) - start[-1] :].astype(np.uint32)
    mean_degree = int(start[-1]) // max(C, 1)
    out_degree = mean_degree if bool((degrees == mean_degree).all()) else 0
    edges = Edges(K, False, sources, outgoing, start, out_degree)
    ends = as_array(chain.initial), as_array(chain.final)
    safe_lengths = steps.masked_fill(invalid, 0).numpy()
    return ChainBatch(safe_lengths, edges, as_steps(scores), no_emissions(scores), *ends), invalid


def no_emissions(scores: Tensor) -> Steps:
    """Return the emissions of a sparse chain, in the type of those of a dense one."""
    return as_steps(scores[:0].flatten())._replace(strides=np.empty(0, np.int64))


def run(kernel: Callable[..., Any], batch: ChainBatch, *args: Any, counts: Any = NO_COUNTS) -> None:
    """Run `kernel(chains, batch, *args)` for all chains, as `run_over_sequences` does.

    Where the kernel adds to counts, `[S, G, C * C]`, it gets the indices of groups instead.
    """
    lengths = batch.lengths
    if len(counts):
        lengths = lengths_of_groups(lengths, counts.shape[1])
    run_over_sequences(kernel, lengths, len(batch.edges.sources), batch, *args)


def lengths_of_groups(lengths: Any, count: int) -> Any:
    """Return the sum of the lengths in each group n % count."""
    return np.bincount(np.arange(len(lengths)) % count, lengths, count).astype(np.int64)
