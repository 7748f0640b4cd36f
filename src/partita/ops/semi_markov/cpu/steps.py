"""Steps of semi-Markov chains for Numba kernels, in fp64 in the log domain.

The scores of open segments lie in a ring of D rows. A segment that starts at step t has row t mod D
as long as it can grow, so that a step adds its emissions to all rows and moves none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, LOWEST, as_array
from ....primitives.cpu.jit import MINUS_ONE, jit
from ....primitives.cpu.math import exp, log


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
    lengths = torch.full((N,), T, device="cpu") if lengths is None else lengths.long()
    invalid = (lengths < 1) | (lengths > T)
    matrix = transitions.detach()
    # One dtype and one layout compile once. The copy takes little beside D times as many steps.
    arrays = SemiMarkovArrays(
        lengths.clamp(1, T).contiguous().numpy(),
        as_array(emissions.transpose(0, 1)),
        as_array(torch.stack([matrix, matrix.T])),
        as_array(durations),
        as_array(start),
        as_array(end),
    )
    return arrays, invalid


def work_of(chain: SemiMarkovArrays) -> int:
    """Return the number of terms that a step adds up for one sequence."""
    D, C = chain.durations.shape
    return int(C * (C + D))


@jit
def add_transitions(state: Any, transitions: Any, weights: Any, maxima: Any, sums: Any) -> None:
    """Write the log-sum-exp of each column of state + transitions into `sums` `[C]`.

    `transitions` `[C, C]` has the state that is summed over first. `weights` `[C, C]` gets
    exp(terms - maxima), whose sum over the first dimension is exp(sums - maxima).
    """
    C = len(state)
    for j in range(C):
        maxima[j], sums[j] = LOWEST, 0.0
    for i in range(C):
        a, row = state[i], transitions[i]
        for j in range(C):
            maxima[j] = a + row[j] if a + row[j] > maxima[j] else maxima[j]
    for i in range(C):
        a, row, weight = state[i], transitions[i], weights[i]
        for j in range(C):
            weight[j] = exp(a + row[j] - maxima[j])
        for j in range(C):
            sums[j] += weight[j]
    log_of_sums(maxima, sums)


@jit
def add_durations(
    ring: Any,
    newest: int,
    by: int,
    rows: int,
    emission: Any,
    durations: Any,
    weights: Any,
    maxima: Any,
    sums: Any,
) -> None:
    """Add the emissions of a step to the open segments, and write their log-sum-exp into `sums`.

    Args:
        ring: the scores of the segments `[D, C]`, whose newest has row `newest`.
        by: 1 or -1, the direction of the row of the next newest segment.
        rows: the number of segments that are open.
        emission: `[C]`.
        durations: `[D, C]`.
        weights: `[D, C]`; gets exp(terms - maxima) by the number of steps minus 1.
        maxima, sums: `[C]`.
    """
    D, C = ring.shape
    for c in range(C):
        maxima[c], sums[c] = LOWEST, 0.0
    for d in range(rows):
        row, duration, weight = ring[(newest + d * by) % D], durations[d], weights[d]
        for c in range(C):
            row[c] += emission[c]
        for c in range(C):
            weight[c] = row[c] + duration[c]
        for c in range(C):
            maxima[c] = weight[c] if weight[c] > maxima[c] else maxima[c]
    for d in range(rows):
        weight = weights[d]
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
def scan_forward(chain: Any, n: int, begin: Any, alpha: Any) -> float:
    """Scan a sequence forwards, and return log Z.

    Write the scores of starting and of ending a segment at each step into `begin` and `alpha`,
    `[R, C]`, where step t has row t mod R, with R at least 2.
    """
    D, C = chain.durations.shape
    length = chain.lengths[n]
    emissions, transitions = chain.emissions[n], chain.transitions[0]
    ring, weights = np.empty((D, C)), np.empty((max(D, C), C))
    maxima = np.empty((1, C))[0]
    size = len(begin)
    for t in range(length):
        entered = begin[t % size]
        if t == 0:
            for c in range(C):
                entered[c] = chain.start[n, c]
        else:
            add_transitions(alpha[(t - 1) % size], transitions, weights, maxima, entered)
        newest = ring[t % D]
        for c in range(C):
            newest[c] = entered[c]
        rows, result = min(t + 1, D), alpha[t % size]
        add_durations(
            *(ring, t % D, MINUS_ONE, rows, emissions[t], chain.durations, weights, maxima, result)
        )
    last, highest, total = alpha[(length - 1) % size], LOWEST, 0.0
    for c in range(C):
        score = last[c] + chain.end[n, c]
        highest = score if score > highest else highest
    for c in range(C):
        total += exp(last[c] + chain.end[n, c] - highest)
    return -INF if total == 0.0 else highest + log(total)
