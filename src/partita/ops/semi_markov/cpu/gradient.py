"""The gradient of log Z of semi-Markov chains, and the posteriors of segments.

Beta runs backwards over a ring of the segments that end at each of the next D steps. The terms of
its sums give the posteriors, so no exponential is computed for those alone. The posterior of a
state is a sum of those of the segments that cover its step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ....primitives.cpu.batch import INF, as_array, empty_batch, fill_nan, run_over_sequences
from ....primitives.cpu.jit import ONE, jit
from ....primitives.cpu.math import exp
from ....runtime.dtypes import acc_dtype
from .steps import add_durations, add_transitions, semi_markov_arrays, work_of


@jit
def add_segments(
    begin: Any, logz: float, maxima: Any, weights: Any, factor: Any, states: Any, counts: Any
) -> None:
    """Add the posteriors of the segments that start at a step.

    Args:
        begin: the scores of starting a segment at this step, `[C]`.
        maxima, weights: the terms exp(score - maximum) of all that follows, `[C]` and `[rows, C]`.
        factor: `[C]`, gets what makes posteriors of weights, and then the posterior of a start.
        states: the posteriors of states from this step on, `[rows, C]`.
        counts: the posteriors by number of steps minus 1, `[D, C]`.
    """
    rows, C = weights.shape
    for c in range(C):
        factor[c] = exp(maxima[c] + begin[c] - logz)
    for d in range(rows - 1, -1, -1):
        weight, by_size = weights[d], counts[d]
        for c in range(C):
            weight[c] *= factor[c]
        for c in range(C):
            by_size[c] += weight[c]
    for c in range(C):
        factor[c] = 0.0
    for d in range(rows - 1, -1, -1):
        # Segments of more than d steps cover step d.
        weight, state = weights[d], states[d]
        for c in range(C):
            factor[c] += weight[c]
        for c in range(C):
            state[c] += factor[c]


@jit
def add_pairs(alpha: Any, logz: float, maxima: Any, weights: Any, pairs: Any) -> None:
    """Add the posteriors of the transitions after a step to `pairs` `[C, C]`, from and to.

    `weights` `[C, C]` has the terms by the state that follows first.
    """
    C = len(alpha)
    for i in range(C):
        factor, row = exp(maxima[i] + alpha[i] - logz), pairs[i]
        for j in range(C):
            row[j] += factor * weights[j, i]


@jit
def normalize(states: Any) -> None:
    """Divide the posteriors of each step `[L, C]` by their sum.

    The sum is 1 but for the rounding errors of scores, which grow with log Z.
    """
    for t in range(len(states)):
        row, total = states[t], 0.0
        for c in range(len(row)):
            total += row[c]
        for c in range(len(row) if total > 0.0 else 0):
            row[c] /= total


@jit(nogil=True)
def gradient_kernel(
    sequences: Any,
    chain: Any,
    logz: Any,
    saved: Any,
    states: Any,
    pairs: Any,
    counts: Any,
    ends: Any,
    segments: Any,
) -> None:
    """Add up the posteriors of each sequence.

    Args:
        chain: the arrays of the batch.
        logz: `[N]`.
        saved: begin and alpha, `[2, T, N, C]`.
        states: `[N, T, C]`, zeros.
        pairs: `[N, C, C]`, zeros.
        counts: `[N, D, C]`, zeros.
        ends: the posteriors of the first and last states, `[2, N, C]`, zeros.
        segments: `[T, D, N, C]`, zeros, or without elements if they are not wanted.
    """
    D, C = chain.durations.shape
    ring, by_duration, by_state = np.empty((D, C)), np.empty((D, C)), np.empty((C, C))
    maxima, entered, factor = np.empty(C), np.empty(C), np.empty(C)
    for n in sequences:
        length, total = chain.lengths[n], logz[n]
        if total == -INF:
            continue
        for t in range(length - 1, -1, -1):
            newest = ring[t % D]
            if t == length - 1:
                for c in range(C):
                    newest[c] = chain.end[n, c]
                    ends[1, n, c] = exp(saved[1, t, n, c] + newest[c] - total)
            else:
                add_transitions(entered, chain.transitions[1], by_state, maxima, newest)
                add_pairs(saved[1, t, n], total, maxima, by_state, pairs[n])
            rows = min(length - t, D)
            add_durations(
                *(ring, t % D, ONE, rows, chain.emissions[n, t], chain.durations),
                *(by_duration, maxima, entered),
            )
            add_segments(
                *(saved[0, t, n], total, maxima, by_duration[:rows]),
                *(factor, states[n, t : t + rows], counts[n]),
            )
            for d in range(rows if len(segments) else 0):
                for c in range(C):
                    segments[t + d, d, n, c] = by_duration[d, c]
        for c in range(C):
            ends[0, n, c] = factor[c]
        normalize(states[n, :length])


def _posteriors(
    chain: tuple[Any, ...], logz: Tensor, saved: Tensor, wants_segments: bool
) -> tuple[Tensor, ...]:
    """Return the posteriors of states, transitions, durations and ends, and those of segments."""
    arrays, invalid = semi_markov_arrays(*chain)
    T, N, C = chain[0].shape
    D = len(chain[2])
    shapes = ((N, T, C), (N, C, C), (N, D, C), (2, N, C))
    found = [empty_batch(shape).zero_() for shape in shapes]
    segments = empty_batch((T if wants_segments else 0, D, N, C)).zero_()
    run_over_sequences(
        *(gradient_kernel, arrays.lengths, work_of(arrays), arrays, as_array(logz)),
        *(
            saved.reshape(2, T, N, C).numpy(),
            *(result.numpy() for result in found),
            segments.numpy(),
        ),
    )
    for result in (*found[:3], *found[3]):
        fill_nan(result[None], invalid)
    fill_nan(segments.transpose(1, 2), invalid)
    return (*found, segments)


def semi_markov_gradient(
    grad_output: Tensor,
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    logz: Tensor,
    saved: Tensor,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of sum(grad_output * log Z) in the dtypes of the arguments."""
    chain = (emissions, transitions, durations, start, end, lengths)
    states, pairs, counts, ends, _ = _posteriors(chain, logz, saved, False)
    scale = grad_output.double()[:, None]
    shared = [scale[:, :, None] * sums for sums in (pairs, counts)]
    if per_sequence:
        shared = [sums.to(acc_dtype(emissions.dtype)) for sums in shared]
    else:
        kinds = (transitions, durations)
        shared = [s.sum(0).to(kind.dtype) for s, kind in zip(shared, kinds, strict=True)]
    d_emissions = (states.transpose(0, 1) * scale).to(emissions.dtype).contiguous()
    d_start, d_end = (
        (scale * posterior).to(score.dtype)
        for posterior, score in zip(ends, (start, end), strict=True)
    )
    return d_emissions, shared[0], shared[1], d_start, d_end


def semi_markov_segments(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    logz: Tensor,
    saved: Tensor,
) -> Tensor:
    """Return the posteriors of segments, `[T, D, N, C]` in the dtype of results."""
    chain = (emissions, transitions, durations, start, end, lengths)
    return _posteriors(chain, logz, saved, True)[4].to(acc_dtype(emissions.dtype))
