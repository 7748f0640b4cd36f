"""Steps of semi-Markov chains for Numba kernels, in fp64 in the log domain.

The scores of open segments lie in a ring of D rows. A segment that starts at step t has row t mod D
as long as it can grow, so that a step adds its emissions to all rows and moves none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, LOWEST, as_array, run_over_sequences
from ....primitives.cpu.jit import MINUS_ONE, jit
from ....primitives.cpu.math import exp, log
from ...chain.cpu.steps import lengths_of, logz_at_end


class SemiMarkovArrays(NamedTuple):
    """A batch of semi-Markov chains as contiguous fp64 arrays.

    Fields:
        lengths: `[N]` int64, in range even where a length is invalid.
        emissions: `[N, T, C]`.
        transitions: `[2, C, C]`: from and to, then to and from.
        durations: `[D, C]`.
        start, end: `[N, C]`.
    """

    lengths: Any
    emissions: Any
    transitions: Any
    durations: Any
    start: Any
    end: Any


class ScanBuffers(NamedTuple):
    """The results of one step of a scan, for the next one or for posteriors.

    Fields:
        ring: the scores of the open segments, `[D, C]`.
        by_state: the terms exp(score - maximum) of the last sums over transitions, `[C, C]`, with
            the state that is summed over first.
        by_duration: those of the last sums over segments, `[D, C]`, by their steps minus 1.
        maxima: the maxima of the last sums, `[C]`.
    """

    ring: Any
    by_state: Any
    by_duration: Any
    maxima: Any


def semi_markov_arrays(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
) -> tuple[SemiMarkovArrays, Tensor]:
    """Return the arrays of a batch and the mask of sequences with an invalid length, `[N]`."""
    T, N, _ = emissions.shape
    tokens, invalid = lengths_of(lengths, 1, T, N)
    matrix = transitions.detach()
    # One dtype and one layout compile once. The copy takes little beside D times as many steps.
    arrays = SemiMarkovArrays(
        tokens.numpy(),
        as_array(emissions.transpose(0, 1)),
        as_array(torch.stack([matrix, matrix.T])),
        as_array(durations),
        as_array(start),
        as_array(end),
    )
    return arrays, invalid


def run(kernel: Callable[..., Any], chain: SemiMarkovArrays, *args: Any) -> None:
    """Run `kernel(sequences, chain, *args)` for all sequences, as `run_over_sequences` does."""
    D, C = chain.durations.shape
    run_over_sequences(kernel, chain.lengths, C * (C + D), chain, *args)


@jit
def scan_buffers(chain: Any) -> Any:
    """Return uninitialized buffers."""
    D, C = chain.durations.shape
    return ScanBuffers(np.empty((D, C)), np.empty((C, C)), np.empty((D, C)), np.empty(C))


@jit
def add_transitions(buffers: Any, state: Any, transitions: Any, sums: Any) -> None:
    """Write the log-sum-exp of each column of state + transitions into `sums` `[C]`."""
    C, maxima = len(state), buffers.maxima
    for j in range(C):
        maxima[j], sums[j] = LOWEST, 0.0
    for i in range(C):
        a, row = state[i], transitions[i]
        for j in range(C):
            maxima[j] = a + row[j] if a + row[j] > maxima[j] else maxima[j]
    for i in range(C):
        a, row, weight = state[i], transitions[i], buffers.by_state[i]
        for j in range(C):
            weight[j] = exp(a + row[j] - maxima[j])
        for j in range(C):
            sums[j] += weight[j]
    log_of_sums(maxima, sums)


@jit
def add_durations(buffers: Any, chain: Any, n: int, t: int, by: int, rows: int, sums: Any) -> None:
    """Add the emissions of step t to the open segments, and write their log-sum-exp into `sums`.

    There are `rows` of them. The newest started at step t, and the others at t + by and so on.
    """
    ring, maxima, emission = buffers.ring, buffers.maxima, chain.emissions[n, t]
    D, C = ring.shape
    for c in range(C):
        maxima[c], sums[c] = LOWEST, 0.0
    for d in range(rows):
        row, duration = ring[(t + d * by) % D], chain.durations[d]
        weight = buffers.by_duration[d]
        for c in range(C):
            row[c] += emission[c]
        for c in range(C):
            weight[c] = row[c] + duration[c]
        for c in range(C):
            maxima[c] = weight[c] if weight[c] > maxima[c] else maxima[c]
    for d in range(rows):
        weight = buffers.by_duration[d]
        for c in range(C):
            weight[c] = exp(weight[c] - maxima[c])
        for c in range(C):
            sums[c] += weight[c]
    log_of_sums(maxima, sums)


@jit
def log_of_sums(maxima: Any, sums: Any) -> None:
    """Turn sums of exp(terms - maxima) into log-sum-exps; -inf where there is no term."""
    for c in range(len(sums)):
        total = sums[c]
        sums[c] = -INF if total == 0.0 else maxima[c] + log(total)


@jit
def scan_forward(chain: Any, n: int, buffers: Any, begin: Any, alpha: Any) -> float:
    """Scan a sequence forwards, and return log Z.

    Write the scores of starting and of ending a segment at each step into `begin` and `alpha`,
    `[R, C]`, where step t has row t mod R, with R at least 2.
    """
    D, C = chain.durations.shape
    length, size = chain.lengths[n], len(begin)
    for t in range(length):
        entered, newest = begin[t % size], buffers.ring[t % D]
        if t == 0:
            for c in range(C):
                entered[c] = chain.start[n, c]
        else:
            add_transitions(buffers, alpha[(t - 1) % size], chain.transitions[0], entered)
        for c in range(C):
            newest[c] = entered[c]
        add_durations(buffers, chain, n, t, MINUS_ONE, min(t + 1, D), alpha[t % size])
    return logz_at_end(alpha[(length - 1) % size], chain.end[n])
