"""Log Z of semi-Markov chains, its gradient, and the posteriors of segments.

The gradient's beta runs backwards over a ring of the segments that end at each of the next D steps.
The terms of its sums give the posteriors, so no exponential is computed for those alone. The
posterior of a state is a sum of those of the segments that cover its step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF, as_array, empty_batch, fill_nan
from ....primitives.cpu.jit import ONE, jit
from ....primitives.cpu.math import exp
from ....runtime.dtypes import acc_dtype
from .steps import (
    add_durations,
    add_transitions,
    run,
    scan_buffers,
    scan_forward,
    semi_markov_arrays,
)


@jit(nogil=True)
def logz_kernel(sequences: Any, chain: Any, saved: Any, logz: Any) -> None:
    """Compute log Z of each sequence, and write begin and alpha to `[2, R, N, C]`.

    R is the number of steps, or 2 if nothing is saved.
    """
    buffers = scan_buffers(chain)
    for n in sequences:
        logz[n] = scan_forward(chain, n, buffers, saved[0, :, n], saved[1, :, n])


def semi_markov_logz(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and with `save` begin and alpha."""
    chain, invalid = semi_markov_arrays(emissions, transitions, durations, start, end, lengths)
    T, N, C = emissions.shape
    saved, logz = empty_batch((2, T if save else 2, N, C)), np.empty(N)
    run(logz_kernel, chain, saved.numpy(), logz)
    result = torch.from_numpy(logz).masked_fill_(invalid, torch.nan)
    rounded = result.to(acc_dtype(emissions.dtype), copy=True)
    return result, rounded, saved if save else saved.new_empty(0)


class Posteriors(NamedTuple):
    """The posteriors of each sequence, which start at 0.

    Fields:
        states: `[N, T, C]`.
        pairs: those of transitions, `[N, C, C]`, from and to.
        counts: those of durations, `[N, D, C]`.
        ends: those of the first and last states, `[2, N, C]`.
        segments: `[T, D, N, C]`, without elements if they are not wanted.
    """

    states: Any
    pairs: Any
    counts: Any
    ends: Any
    segments: Any


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


@jit(nogil=True)
def gradient_kernel(sequences: Any, chain: Any, logz: Any, saved: Any, found: Any) -> None:
    """Add up the posteriors of each sequence, given log Z `[N]`, begin and alpha `[2, T, N, C]`."""
    D, C = chain.durations.shape
    buffers, entered, starting = scan_buffers(chain), np.empty(C), np.empty(C)
    ring, maxima = buffers.ring, buffers.maxima
    for n in sequences:
        length, total = chain.lengths[n], logz[n]
        if total == -INF:
            continue
        for t in range(length - 1, -1, -1):
            begin, alpha, newest = saved[0, t, n], saved[1, t, n], ring[t % D]
            if t == length - 1:
                for c in range(C):
                    newest[c] = chain.end[n, c]
                    found.ends[1, n, c] = exp(alpha[c] + newest[c] - total)
            else:
                add_transitions(buffers, entered, chain.transitions[1], newest)
                for i in range(C):
                    factor, row = exp(maxima[i] + alpha[i] - total), found.pairs[n, i]
                    for j in range(C):
                        row[j] += factor * buffers.by_state[j, i]
            rows = min(length - t, D)
            add_durations(buffers, chain, n, t, ONE, rows, entered)
            by_duration, states = buffers.by_duration[:rows], found.states[n, t : t + rows]
            add_segments(begin, total, maxima, by_duration, starting, states, found.counts[n])
            for d in range(rows if len(found.segments) else 0):
                for c in range(C):
                    found.segments[t + d, d, n, c] = by_duration[d, c]
        for c in range(C):
            found.ends[0, n, c] = starting[c]
        for t in range(length):
            # The sum is 1 but for the rounding errors of scores, which grow with log Z.
            row, total = found.states[n, t], 0.0
            for c in range(C):
                total += row[c]
            for c in range(C if total > 0.0 else 0):
                row[c] /= total


def _posteriors(
    chain: tuple[Any, ...], logz: Tensor, saved: Tensor, wants_segments: bool
) -> Posteriors:
    arrays, invalid = semi_markov_arrays(*chain)
    T, N, C = chain[0].shape
    D = len(chain[2])
    shapes = ((N, T, C), (N, C, C), (N, D, C), (2, N, C), (T if wants_segments else 0, D, N, C))
    found = Posteriors(*(empty_batch(shape).zero_() for shape in shapes))
    written = Posteriors(*(each.numpy() for each in found))
    run(gradient_kernel, arrays, as_array(logz), saved.reshape(2, T, N, C).numpy(), written)
    for result in (*found[:3], *found.ends):
        fill_nan(result[None], invalid)
    fill_nan(found.segments.transpose(1, 2), invalid)
    return found


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
    found, scale = _posteriors(chain, logz, saved, False), grad_output.double()[:, None]

    def shared(posteriors: Tensor, dtype: torch.dtype) -> Tensor:
        sums = scale[:, :, None] * posteriors
        return sums.to(acc_dtype(emissions.dtype)) if per_sequence else sums.sum(0).to(dtype)

    return (
        (found.states.transpose(0, 1) * scale).to(emissions.dtype).contiguous(),
        shared(found.pairs, transitions.dtype),
        shared(found.counts, durations.dtype),
        (scale * found.ends[0]).to(start.dtype),
        (scale * found.ends[1]).to(end.dtype),
    )


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
    return _posteriors(chain, logz, saved, True).segments.to(acc_dtype(emissions.dtype))
