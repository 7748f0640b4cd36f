"""Paths through sparse linear chains, in parallel over the batch: the best one by back-pointers, and samples from the posterior by α."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ....primitives.cpu.batch import INF, as_array, as_steps, run_over_batch
from ....primitives.cpu.math import FLAGS, exp
from .logz import best_paths, forward, smallest
from .steps import batch_of, edges_of


@njit(**FLAGS)
def cumulate(terms: Any) -> None:
    """The terms become their exponentials, relative to the greatest, added up."""
    highest, total = -INF, 0.0
    for i in range(len(terms)):
        highest = terms[i] if terms[i] > highest else highest
    for i in range(len(terms)):
        total += exp(terms[i] - highest) if terms[i] > -INF else 0.0
        terms[i] = total


@njit(**FLAGS)
def drawn(cumulated: Any, uniform: float) -> int:
    """The first place whose sum is beyond the share, or the last that adds to the sum: a product may round up to the whole."""
    last = len(cumulated) - 1
    place = np.searchsorted(cumulated, uniform * cumulated[last], side="right")
    return min(place, np.searchsorted(cumulated, cumulated[last]))


@njit(nogil=True, **FLAGS)
def sampled_paths(
    share: Any,
    batch: Any,
    scores: Any,
    final: Any,
    kept: Any,
    logz: Any,
    uniforms: Any,
    states: Any,
    edges: Any,
) -> None:
    """Paths by uniform numbers `[T + 1, S, N]` and α `[T + 1, N, C]`; what is no part of one is left as it is."""
    count = final.shape[1]
    samples, slots = uniforms.shape[1], batch.slots
    for n in share:
        buffer = np.empty(count * slots, scores.numbers.dtype)
        ends, terms, state = np.empty(count), np.empty(slots), np.empty(samples, np.int64)
        for c in range(count):
            ends[c] = kept[batch.lengths[n], n, c] + final[n, c]
        cumulate(ends)
        for s in range(samples if logz[n] > -INF else 0):
            state[s] = drawn(ends, uniforms[-1, s, n])
            states[s, batch.lengths[n], n] = state[s]
        for t in range(batch.lengths[n] - 1 if logz[n] > -INF else -1, -1, -1):
            row = edges_of(scores, t, n, slots, buffer)
            for s in range(samples):
                for k in range(slots):
                    edge = state[s] * slots + k
                    left = batch.sources[edge]
                    terms[k] = row[edge] + kept[t, n, left] if left >= 0 else -INF
                cumulate(terms)
                edge = state[s] * slots + drawn(terms, uniforms[t, s, n])
                state[s] = batch.sources[edge]
                edges[s, t, n], states[s, t, n] = edge, state[s]


def chain_viterbi(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    trace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, wrong = batch_of(scores, source, lengths)
    span, chains, _, slots = scores.shape
    score = torch.empty(chains, dtype=torch.float64, device="cpu")
    states, edges = (
        torch.full((length, chains) if trace else (0, chains), -1, device="cpu")
        for length in (span + 1, span)
    )
    kept, pointers = (
        np.empty((2, *initial.shape)),
        np.empty((span if trace else 1, *initial.shape), smallest(slots)),
    )
    inputs = batch, as_steps(scores), as_array(initial), as_array(final)
    run_over_batch(
        best_paths,
        *inputs,
        kept,
        False,
        pointers,
        score.numpy(),
        states.numpy(),
        edges.numpy(),
        trace,
    )
    score.masked_fill_(wrong, torch.nan)
    if not trace:
        return score, states.new_empty(0), edges.new_empty(0)
    return score, states.masked_fill_(wrong, -1), edges


def chain_sample(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    batch, wrong = batch_of(scores, source, lengths)
    span, chains = scores.shape[:2]
    samples = uniforms.shape[1]
    kept, logz = np.empty((span + 1, *scores.shape[1:3])), np.empty(chains)
    states, edges = (
        torch.full((samples, span + 1, chains), -1, device="cpu"),
        torch.full((samples, span, chains), -1, device="cpu"),
    )
    where, ends = as_steps(scores), as_array(final)
    run_over_batch(forward, batch, where, as_array(initial), ends, kept, True, logz)
    run_over_batch(
        sampled_paths,
        batch,
        where,
        ends,
        kept,
        logz,
        uniforms.contiguous().numpy(),
        states.numpy(),
        edges.numpy(),
    )
    return states.masked_fill_(wrong, -1), edges
