"""The best path of semi-Markov chains and samples of paths, in parallel over the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import INF
from ....primitives.cpu.jit import jit
from ....runtime.dtypes import acc_dtype
from ...chain.cpu.paths import cumulative_exp, draw_index, max_over_edges
from .steps import run, scan_buffers, scan_forward, semi_markov_arrays


@jit
def best_scores(chain: Any, n: int, previous: Any, sizes: Any, alpha: Any) -> None:
    """Scan the best scores of a sequence; `alpha` `[C]` gets those of ending with its last step.

    Write the state before a segment that starts at each step, and the number of steps minus 1 of
    one that ends there, `[T, C]` each.
    """
    D, C = chain.durations.shape
    ring, scores, zeros = np.empty((D, C)), np.empty(D * C), np.zeros(D)
    transitions = chain.transitions[0].ravel()
    for t in range(chain.lengths[n]):
        emission, newest, rows = chain.emissions[n, t], ring[t % D], min(t + 1, D)
        if t == 0:
            for c in range(C):
                newest[c], previous[t, c] = chain.start[n, c], 0
        else:
            max_over_edges(transitions, alpha, newest, previous[t])
        for d in range(rows):
            row, duration = ring[(t - d) % D], chain.durations[d]
            score = scores[d * C : (d + 1) * C]
            for c in range(C):
                row[c] += emission[c]
            for c in range(C):
                score[c] = row[c] + duration[c]
        max_over_edges(scores, zeros[:rows], alpha, sizes[t])


@jit(nogil=True)
def viterbi_kernel(sequences: Any, chain: Any, score: Any, states: Any, starts: Any) -> None:
    """Find the best path of each sequence.

    Entries of `states` and `starts` `[T, N]` that are on no path are not written.
    """
    C = chain.durations.shape[1]
    T = chain.emissions.shape[1]
    previous, sizes = np.empty((T, C), np.int32), np.empty((T, C), np.int32)
    alpha = np.empty(C)
    for n in sequences:
        best_scores(chain, n, previous, sizes, alpha)
        best, state = -INF, 0
        for c in range(C):
            total = alpha[c] + chain.end[n, c]
            if total > best or total != total:
                best, state = total, c
        score[n] = best
        t = chain.lengths[n] - 1
        while t >= 0 and best > -INF:
            first = t - sizes[t, state]
            for s in range(first, t + 1):
                states[s, n], starts[s, n] = state, s == first
            t, state = first - 1, previous[first, state]


@jit(nogil=True)
def sample_kernel(sequences: Any, chain: Any, uniforms: Any, states: Any, starts: Any) -> None:
    """Draw k paths of each sequence, `[k, T, N]`, with uniform numbers `[T, 2, k, N]`.

    Entries of `states` and `starts` that are on no path are not written.
    """
    D, C = chain.durations.shape
    T, buffers = max(chain.emissions.shape[1], 2), scan_buffers(chain)
    begin, alpha, terms = np.empty((T, C)), np.empty((T, C)), np.empty(max(D, C))
    for n in sequences:
        logz = scan_forward(chain, n, buffers, begin, alpha)
        for k in range(len(states) if logz > -INF else 0):
            t, state = chain.lengths[n] - 1, -1
            while t >= 0:
                for c in range(C):
                    follows = chain.end[n, c] if state < 0 else chain.transitions[0, c, state]
                    terms[c] = alpha[t, c] + follows
                cumulative_exp(terms[:C])
                state = draw_index(terms[:C], uniforms[t, 0, k, n])
                rows, emitted = min(t + 1, D), 0.0
                for d in range(rows):
                    emitted += chain.emissions[n, t - d, state]
                    terms[d] = begin[t - d, state] + emitted + chain.durations[d, state]
                cumulative_exp(terms[:rows])
                first = t - draw_index(terms[:rows], uniforms[t, 1, k, n])
                for s in range(first, t + 1):
                    states[k, s, n], starts[k, s, n] = state, s == first
                t = first - 1


def _no_paths(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.full(shape, -1, device="cpu"), torch.zeros(shape, dtype=torch.bool, device="cpu")


def semi_markov_viterbi(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best score `[N]`, and the states and starts of the best path `[T, N]`."""
    chain, invalid = semi_markov_arrays(emissions, transitions, durations, start, end, lengths)
    T, N, _ = emissions.shape
    score, (states, starts) = np.empty(N), _no_paths(T, N)
    run(viterbi_kernel, chain, score, states.numpy(), starts.numpy())
    states[:, invalid], starts[:, invalid] = -1, False
    found = torch.from_numpy(score).masked_fill_(invalid, torch.nan)
    return found.to(acc_dtype(emissions.dtype)), states, starts


def semi_markov_sample(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the states and starts `[k, T, N]` of k paths from the posterior."""
    chain, invalid = semi_markov_arrays(emissions, transitions, durations, start, end, lengths)
    states, starts = _no_paths(uniforms.shape[2], *emissions.shape[:2])
    run(sample_kernel, chain, uniforms.contiguous().numpy(), states.numpy(), starts.numpy())
    states[:, :, invalid], starts[:, :, invalid] = -1, False
    return states, starts
