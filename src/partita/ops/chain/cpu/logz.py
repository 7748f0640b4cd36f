"""Sparse linear chains in parallel over the batch: α forwards in fp64, and the posterior backwards from it; scans under Log and Max.

The posterior of a step is that of the states behind it, times the share that each edge had in the sum that entered its state. The posterior of
every step is divided by its own sum, so nothing adds up over the steps, and there is no β.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ....primitives.cpu.batch import (
    INF,
    as_array,
    as_steps,
    empty_batch,
    fill_nan,
    row_at,
    run_over_batch,
)
from ....primitives.cpu.math import FLAGS, exp
from .steps import (
    advance,
    batch_of,
    behind,
    choose,
    clear,
    edges_of,
    enter,
    leaving,
    log_sum,
    posteriors,
    retreat,
    spread,
    stay,
)


@njit(nogil=True, **FLAGS)
def forward(
    share: Any, batch: Any, scores: Any, initial: Any, final: Any, kept: Any, keep: bool, logz: Any
) -> None:
    """log Z of each chain; α is kept in `[T + 1, N, C]`, where it stays as it is past the length, or only for two steps."""
    states = initial.shape[1]
    for n in share:
        buffer = np.empty(states * batch.slots, scores.numbers.dtype)
        terms, most, total = np.empty((batch.slots, states)), np.empty(states), np.empty(states)
        for c in range(states):  # a slice that is assigned to a slice takes seconds to compile
            kept[0, n, c] = initial[n, c]
        for t in range(batch.lengths[n]):
            here, after = (t, t + 1) if keep else (t % 2, (t + 1) % 2)
            row, ahead = edges_of(scores, t, n, batch.slots, buffer), row_at(scores, t + 1, n)
            advance(row, batch.sources, kept[here, n], terms, most, total, kept[after, n], ahead)
        logz[n] = log_sum(kept[batch.lengths[n] if keep else batch.lengths[n] % 2, n], final[n])
        if keep:
            stay(kept, n, batch.lengths[n])


@njit(nogil=True, **FLAGS)
def backward(
    share: Any,
    batch: Any,
    scores: Any,
    grad: Any,
    final: Any,
    kept: Any,
    logz: Any,
    d_scores: Any,
    d_initial: Any,
    d_final: Any,
) -> None:
    """Posteriors of edges `[T, N, C * K]` and of the first and last states, times the gradient of each chain; 0 past the lengths."""
    states = final.shape[1]
    for n in share:
        buffer, edges = (
            np.empty(states * batch.slots, scores.numbers.dtype),
            np.empty(states * batch.slots),
        )
        here, added = np.empty(states), np.empty(states)
        for c in range(states):
            p = (
                0.0
                if logz[n] == -INF
                else exp(kept[batch.lengths[n], n, c] + final[n, c] - logz[n])
            )
            here[c] = p
            d_final[n, c] = p * grad[n]
        for t in range(batch.lengths[n] - 1, -1, -1):
            row = edges_of(scores, t, n, batch.slots, buffer)
            behind(here, kept[t + 1, n], added)
            spread(batch.sources, kept[t, n], added, edges, row, kept[max(t - 1, 0), n])
            posteriors(row, batch.sources, edges, grad[n], d_scores[t, n])
            leaving(batch, edges, here)
        for c in range(states):
            d_initial[n, c] = here[c] * grad[n]
        clear(d_scores, n, batch.lengths[n])


@njit(**FLAGS)
def follow(
    pointers: Any,
    sources: Any,
    slots: int,
    n: int,
    length: int,
    state: int,
    states: Any,
    edges: Any,
) -> None:
    """Writes the path of a chain that ends in a state, last step first."""
    states[length, n] = state
    for t in range(length - 1, -1, -1):
        edge = state * slots + pointers[t, n, state]
        state = sources[edge]
        edges[t, n], states[t, n] = edge, state


@njit(nogil=True, **FLAGS)
def best_paths(
    share: Any,
    batch: Any,
    scores: Any,
    initial: Any,
    final: Any,
    kept: Any,
    keep: bool,
    pointers: Any,
    score: Any,
    states: Any,
    edges: Any,
    trace: bool,
) -> None:
    """The best score of each chain, and its path, where what is no part of one is left as it is; α as in `forward`, under Max. Pointers are those of
    every step `[T, N, C]`, or of one."""
    count = initial.shape[1]
    for n in share:
        buffer = np.empty(count * batch.slots, scores.numbers.dtype)
        terms, most = np.empty((batch.slots, count)), np.empty(count)
        for c in range(count):
            kept[0, n, c] = initial[n, c]
        for t in range(batch.lengths[n]):
            here, after = (t, t + 1) if keep else (t % 2, (t + 1) % 2)
            row, ahead = edges_of(scores, t, n, batch.slots, buffer), row_at(scores, t + 1, n)
            enter(row, batch.sources, kept[here, n], terms, most, ahead)
            choose(terms, kept[after, n], pointers[t if trace else 0, n])
        alpha = kept[batch.lengths[n] if keep else batch.lengths[n] % 2, n]
        best, last = -INF, 0
        for c in range(count):
            value = alpha[c] + final[n, c]
            if (value > best) | (value != value):
                best, last = value, c
        score[n] = best
        if keep:
            stay(kept, n, batch.lengths[n])
        if trace and best > -INF:
            follow(pointers, batch.sources, batch.slots, n, batch.lengths[n], last, states, edges)


@njit(nogil=True, **FLAGS)
def scan_back(share: Any, batch: Any, scores: Any, final: Any, best: bool, result: Any) -> None:
    """β of every step under Max or Log, `[T + 1, N, C]`; from the length on it is the final scores."""
    states = final.shape[1]
    for n in share:
        buffer, edges = (
            np.empty(states * batch.slots, scores.numbers.dtype),
            np.empty(states * batch.slots),
        )
        ordered, most, total = np.empty(len(batch.order)), np.empty(states), np.empty(states)
        for t in range(batch.lengths[n], len(result)):
            for c in range(states):
                result[t, n, c] = final[n, c]
        for t in range(batch.lengths[n] - 1, -1, -1):
            row = edges_of(scores, t, n, batch.slots, buffer)
            retreat(row, batch, result[t + 1, n], edges, ordered, most, total, best, result[t, n])


def smallest(slots: int) -> Any:
    """The smallest integer type for a slot."""
    return np.min_scalar_type(max(slots - 1, 0))


def chain_logz(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    batch, wrong = batch_of(scores, source, lengths)
    kept = empty_batch((scores.shape[0] + 1 if keep else 2, *scores.shape[1:3]))
    logz = torch.empty(len(initial), dtype=torch.float64, device="cpu")
    run_over_batch(
        forward,
        batch,
        as_steps(scores),
        as_array(initial),
        as_array(final),
        kept.numpy(),
        keep,
        logz.numpy(),
    )
    return logz.masked_fill_(wrong, torch.nan), kept if keep else kept.new_empty(0)


def chain_gradient(
    grad: Tensor,
    scores: Tensor,
    initial: Tensor,
    final: Tensor,
    source: Tensor,
    lengths: Tensor | None,
    logz: Tensor,
    kept: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, spoilt = batch_of(scores, source, lengths)[0], logz.isnan()
    d_scores = empty_batch(scores.shape, torch.promote_types(dtype, torch.float32))
    d_initial, d_final = (
        torch.empty(t.shape, dtype=torch.float64, device="cpu") for t in (initial, final)
    )
    results = [t.numpy() for t in (d_scores.flatten(2), d_initial, d_final)]
    factors = grad.double().masked_fill(spoilt, torch.nan)
    run_over_batch(
        backward,
        batch,
        as_steps(scores),
        factors.numpy(),
        as_array(final),
        kept.numpy(),
        logz.contiguous().numpy(),
        *results,
    )
    fill_nan(d_scores, spoilt)
    return d_scores.to(dtype), d_initial.to(initial.dtype), d_final.to(final.dtype)


def chain_scan(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    best: bool,
    reverse: bool,
) -> Tensor:
    batch, wrong = batch_of(scores, source, lengths)
    result = empty_batch((scores.shape[0] + 1, *scores.shape[1:3]))
    where, first, last, score = (
        as_steps(scores),
        as_array(initial),
        as_array(final),
        np.empty(scores.shape[1]),
    )
    if reverse:
        run_over_batch(scan_back, batch, where, last, best, result.numpy())
    elif best:
        pointers, nowhere = (
            np.empty((1, *initial.shape), smallest(batch.slots)),
            np.empty((0, 0), np.int64),
        )
        run_over_batch(
            best_paths,
            batch,
            where,
            first,
            last,
            result.numpy(),
            True,
            pointers,
            score,
            nowhere,
            nowhere,
            False,
        )
    else:
        run_over_batch(forward, batch, where, first, last, result.numpy(), True, score)
    fill_nan(result, wrong)
    return result
