"""Sparse linear chains under Log, in parallel over the batch: α forwards in fp64, and the posterior backwards from it.

The posterior of a step is that of the states behind it, times the share that each edge had in the sum that entered its state. These shares are
divided by their own sum, so nothing adds up over the steps, and there is no β.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from .math import exp, log

INF = np.inf


@njit(fastmath={"contract"})
def enter(alpha: Any, scores: Any, sources: Any, terms: Any, most: Any) -> None:
    """Score plus α of each edge, `[K, C]`, and the greatest of each state as a finite shift, `[C]`."""
    slots, states = sources.shape
    for c in range(states):
        most[c] = -INF
    for k in range(slots):
        for c in range(states):
            s = sources[k, c]
            term = scores[c, k] + alpha[s] if s >= 0 else -INF
            terms[k, c] = term
            most[c] = term if term > most[c] else most[c]
    for c in range(states):
        most[c] = 0.0 if most[c] == -INF else most[c]


@njit(fastmath={"contract"})
def exponentials(terms: Any, most: Any, total: Any) -> None:
    """The terms become exp(terms - most), and `total` [C] their sums."""
    slots, states = terms.shape
    for c in range(states):
        total[c] = 0.0
    for k in range(slots):
        for c in range(states):
            e = exp(terms[k, c] - most[c])
            terms[k, c] = e
            total[c] += e


@njit(parallel=True, fastmath={"contract"})
def forward(scores: Any, sources: Any, initial: Any, final: Any, lengths: Any, kept: Any, keep: bool, logz: Any) -> None:
    """log Z of each chain; α is kept in `[T + 1, N, C]`, or only for two steps."""
    chains, states, slots = scores.shape[1:]
    for n in prange(chains):
        terms, most, total = np.empty((slots, states)), np.empty(states), np.empty(states)
        for c in range(states):
            kept[0, n, c] = initial[n, c]
        for t in range(lengths[n]):
            before, after = (t, t + 1) if keep else (t % 2, (t + 1) % 2)
            enter(kept[before, n], scores[t, n], sources, terms, most)
            exponentials(terms, most, total)
            for c in range(states):
                value = most[c] + log(total[c])
                kept[after, n, c] = -INF if total[c] == 0.0 else value
        last = lengths[n] if keep else lengths[n] % 2
        highest = -INF
        for c in range(states):
            value = kept[last, n, c] + final[n, c]
            highest = value if value > highest else highest
        shift, summed = 0.0 if highest == -INF else highest, 0.0
        for c in range(states):
            summed += exp(kept[last, n, c] + final[n, c] - shift)
        logz[n] = -INF if summed == 0.0 else shift + np.log(summed)


@njit(parallel=True, fastmath={"contract"})
def backward(
    grad: Any, scores: Any, sources: Any, final: Any, lengths: Any, kept: Any, logz: Any, d_scores: Any, d_initial: Any, d_final: Any
) -> None:
    """Posteriors of edges and of the first and last states, times the gradient of each chain; 0 past the lengths."""
    steps, chains, states, slots = scores.shape
    for n in prange(chains):
        terms, most, total = np.empty((slots, states)), np.empty(states), np.empty(states)
        here, there = np.empty(states), np.empty(states)
        for c in range(states):
            p = 0.0 if logz[n] == -INF else exp(kept[lengths[n], n, c] + final[n, c] - logz[n])
            here[c] = p
            d_final[n, c] = p * grad[n]
        for t in range(lengths[n] - 1, -1, -1):
            enter(kept[t, n], scores[t, n], sources, terms, most)
            exponentials(terms, most, total)
            for c in range(states):
                there[c] = 0.0
                here[c] = 0.0 if total[c] == 0.0 else here[c] / total[c]
            for k in range(slots):
                for c in range(states):
                    p = terms[k, c] * here[c]
                    d_scores[t, n, c, k] = p * grad[n]
                    if sources[k, c] >= 0:
                        there[sources[k, c]] += p
            here, there = there, here
        for c in range(states):
            d_initial[n, c] = here[c] * grad[n]
        for t in range(lengths[n], steps):
            d_scores[t, n] = 0.0


def _empty(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Memory from NumPy, which asks for large pages: PyTorch's takes several times as long to touch for the first time."""
    return torch.from_numpy(np.empty(tuple(shape), dtype=str(dtype).removeprefix("torch.")))


def _numbers(tensor: Tensor) -> Any:
    """As NumPy sees it, in its own memory; half types as fp32."""
    return (tensor.float() if tensor.element_size() == 2 else tensor).detach().numpy()


def _prepared(scores: Tensor, source: Tensor, lengths: Tensor | None) -> tuple[Any, Any, Tensor]:
    """Sources `[K, C]` and lengths that index nothing out of bounds, and which chains have no right answer."""
    steps, chains, states, _ = scores.shape
    counted = torch.full((chains,), steps) if lengths is None else lengths.long()
    wrong = (counted < 0) | (counted > steps) | ((source < -1) | (source >= states)).any()
    safe = source.long().masked_fill((source < 0) | (source >= states), -1)
    return safe.T.int().contiguous().numpy(), counted.masked_fill(wrong, 0).numpy(), wrong


def chain_logz(
    scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, lengths: Tensor | None, best: bool, keep: bool
) -> tuple[Tensor, Tensor]:
    if best:
        raise RuntimeError("the Max semiring has no kernel; it runs in PyTorch (backend 'reference')")
    steps, chains, states, _ = scores.shape
    sources, counted, wrong = _prepared(scores, source, lengths)
    kept = _empty((steps + 1 if keep else 2, chains, states))
    logz = torch.empty(chains, dtype=torch.float64)
    ends = _numbers(initial.double()), _numbers(final.double())
    forward(_numbers(scores), sources, *ends, counted, kept.numpy(), keep, logz.numpy())
    return logz.masked_fill_(wrong, torch.nan), kept if keep else kept.new_empty(0)


def chain_gradient(
    grad: Tensor, scores: Tensor, initial: Tensor, final: Tensor, source: Tensor, lengths: Tensor | None, logz: Tensor, kept: Tensor,
    best: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sources, counted, wrong = _prepared(scores, source, lengths)
    wide = torch.promote_types(dtype, torch.float32)
    d_scores = _empty(scores.shape, wide)
    d_initial, d_final = (torch.empty(t.shape, dtype=torch.float64) for t in (initial, final))
    results = [t.numpy() for t in (d_scores, d_initial, d_final)]
    factors = grad.double().masked_fill(wrong, torch.nan)
    numbers = _numbers(final.double()), counted, kept.numpy(), logz.contiguous().numpy()
    backward(factors.numpy(), _numbers(scores), sources, *numbers, *results)
    if bool(wrong.any()):
        d_scores[:, wrong.expand(len(grad))] = torch.nan
    return d_scores.to(dtype), d_initial.to(initial.dtype), d_final.to(final.dtype)
