"""Means over the paths of sparse linear chains and their gradients, in parallel over the batch.

Forwards α goes with the mean of the values over the paths into each state; backwards the posterior goes with the mean over the paths from it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ....primitives.cpu.batch import (
    INF,
    LOWEST,
    as_array,
    as_steps,
    empty_batch,
    fill_nan,
    row_at,
    run_over_batch,
)
from ....primitives.cpu.math import FLAGS, exp, log
from .steps import (
    batch_of,
    behind,
    clear,
    edges_of,
    enter,
    leaving,
    log_sum,
    onward,
    posteriors,
    spread,
)


@njit(**FLAGS)
def average(terms: Any, most: Any, values: Any, total: Any, after: Any, mean: Any) -> None:
    """α after a step, and the mean of values `[K, C]` weighed by the exponentials of terms `[K, C]`; one whose weight is 0 counts 0."""
    for c in range(len(total)):
        total[c], mean[c] = 0.0, 0.0
    for k in range(len(terms)):
        for c in range(len(total)):
            weight = exp(terms[k, c] - most[c])
            total[c] += weight
            mean[c] += 0.0 if weight == 0.0 else weight * values[k, c]
    for c in range(len(total)):
        value = most[c] + log(total[c])
        after[c] = -INF if value == LOWEST else value
        mean[c] = 0.0 if total[c] == 0.0 else mean[c] / total[c]


@njit(**FLAGS)
def mean_of(alpha: Any, final: Any, mean: Any, last_values: Any, logz: float) -> float:
    """The mean over the last states, `[C]` each."""
    result = 0.0
    for c in range(len(alpha) if logz != -INF else 0):
        p = exp(alpha[c] + final[c] - logz)
        result += 0.0 if p == 0.0 else p * (mean[c] + last_values[c])
    return result


@njit(nogil=True, **FLAGS)
def forward_pairs(
    share: Any,
    batch: Any,
    scores: Any,
    initial: Any,
    final: Any,
    values: Any,
    first_values: Any,
    last_values: Any,
    kept: Any,
    keep: bool,
    logz: Any,
    mean: Any,
) -> None:
    """Means and log Z of each chain; α and the means into each state are kept in `[2, T + 1, N, C]`, or only for two steps."""
    states = initial.shape[1]
    for n in share:
        buffer = np.empty(states * batch.slots, scores.numbers.dtype)
        value_buffer = np.empty(states * batch.slots, values.numbers.dtype)
        terms, pairs = np.empty((batch.slots, states)), np.empty((batch.slots, states))
        most, total, unused = np.empty(states), np.empty(states), np.empty(states)
        for c in range(states):
            kept[0, 0, n, c], kept[1, 0, n, c] = initial[n, c], first_values[n, c]
        for t in range(batch.lengths[n]):
            here, after = (t, t + 1) if keep else (t % 2, (t + 1) % 2)
            row, value_row = (
                edges_of(scores, t, n, batch.slots, buffer),
                edges_of(values, t, n, batch.slots, value_buffer),
            )
            enter(row, batch.sources, kept[0, here, n], terms, most, row_at(scores, t + 1, n))
            enter(
                value_row,
                batch.sources,
                kept[1, here, n],
                pairs,
                unused,
                row_at(values, t + 1, n),
            )
            average(terms, most, pairs, total, kept[0, after, n], kept[1, after, n])
        last = batch.lengths[n] if keep else batch.lengths[n] % 2
        logz[n] = log_sum(kept[0, last, n], final[n])
        mean[n] = mean_of(kept[0, last, n], final[n], kept[1, last, n], last_values[n], logz[n])


@njit(inline="always", **FLAGS)
def covariance(posterior: float, difference: float) -> float:
    """0 where the posterior is, whatever the difference."""
    return 0.0 if posterior == 0.0 else posterior * difference


@njit(**FLAGS)
def covariances(edges: Any, onwards: Any, before: Any, factor: float, d_scores: Any) -> None:
    """The gradient of the scores of a step, `[C * K]`, from posteriors, and values from each edge on and before it; those from it on become products
    with the posterior."""
    for e in range(len(edges)):
        d_scores[e] = covariance(edges[e] * factor, before[e] + onwards[e])
        onwards[e] = covariance(edges[e], onwards[e])


@njit(**FLAGS)
def divide(summed: Any, here: Any) -> None:
    """Sums over what leaves each state become means, `[C]`."""
    for c in range(len(here)):
        summed[c] = 0.0 if here[c] == 0.0 else summed[c] / here[c]


@njit(nogil=True, **FLAGS)
def backward_pairs(
    share: Any,
    batch: Any,
    scores: Any,
    grad: Any,
    final: Any,
    values: Any,
    last_values: Any,
    mean: Any,
    logz: Any,
    kept: Any,
    d_scores: Any,
    d_values: Any,
    d_ends: Any,
    of_scores: bool,
    of_values: bool,
) -> None:
    """Gradients of scores and values of edges `[T, N, C * K]`, where they are wanted, and of initial, final, first and last values `[4, N, C]`."""
    states = final.shape[1]
    size = states * batch.slots
    for n in share:
        buffer, value_buffer = (
            np.empty(size, scores.numbers.dtype),
            np.empty(size, values.numbers.dtype),
        )
        d_score_row, d_value_row = np.empty(size, d_scores.dtype), np.empty(size, d_values.dtype)
        edges, onwards, before = np.empty(size), np.empty(size), np.empty(size)
        here, added, beyond, shift = (
            np.empty(states),
            np.empty(states),
            np.empty(states),
            np.full(states, -mean[n]),
        )
        length = batch.lengths[n]
        for c in range(states):
            here[c] = 0.0 if logz[n] == -INF else exp(kept[0, length, n, c] + final[n, c] - logz[n])
            beyond[c] = last_values[n, c]
            d_ends[1, n, c] = covariance(
                here[c] * grad[n], kept[1, length, n, c] + shift[c] + beyond[c]
            )
            d_ends[3, n, c] = here[c] * grad[n]
        for t in range(length - 1, -1, -1):
            row, value_row = (
                edges_of(scores, t, n, batch.slots, buffer),
                edges_of(values, t, n, batch.slots, value_buffer),
            )
            d_score_row = d_scores[t, n] if of_scores else d_score_row
            d_value_row = d_values[t, n] if of_values else d_value_row
            behind(here, kept[0, t + 1, n], added)
            spread(batch.sources, kept[0, t, n], added, edges, row, kept[0, max(t - 1, 0), n])
            posteriors(row, batch.sources, edges, grad[n], d_value_row)
            spread(
                batch.sources, kept[1, t, n], shift, before, value_row, kept[1, max(t - 1, 0), n]
            )
            onward(value_row, beyond, onwards)
            covariances(edges, onwards, before, grad[n], d_score_row)
            leaving(batch, edges, here)
            leaving(batch, onwards, beyond)
            divide(beyond, here)
        for c in range(states):
            d_ends[0, n, c] = covariance(here[c] * grad[n], kept[1, 0, n, c] + shift[c] + beyond[c])
            d_ends[2, n, c] = here[c] * grad[n]
        clear(d_scores, n, length)
        clear(d_values, n, length)


def chain_expectation(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    values: Tensor,
    first_values: Tensor,
    last_values: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, wrong = batch_of(scores, source, lengths)
    kept = empty_batch((2, scores.shape[0] + 1 if keep else 2, *scores.shape[1:3]))
    mean, logz = (torch.empty(len(initial), dtype=torch.float64, device="cpu") for _ in range(2))
    ends = [as_array(t) for t in (first_values, last_values)]
    inputs = batch, as_steps(scores), as_array(initial), as_array(final), as_steps(values), *ends
    run_over_batch(forward_pairs, *inputs, kept.numpy(), keep, logz.numpy(), mean.numpy())
    return (
        mean.masked_fill_(wrong, torch.nan),
        logz.masked_fill_(wrong, torch.nan),
        kept if keep else kept.new_empty(0),
    )


def chain_expectation_gradient(
    grad: Tensor,
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    values: Tensor,
    first_values: Tensor,
    last_values: Tensor,
    mean: Tensor,
    logz: Tensor,
    kept: Tensor,
    of_scores: bool,
    of_values: bool,
) -> tuple[Tensor, ...]:
    batch, spoilt = batch_of(scores, source, lengths)[0], logz.isnan()
    wide = [torch.promote_types(t.dtype, torch.float32) for t in (scores, values)]
    d_scores, d_values = (
        empty_batch(scores.shape if wanted else (0,) * 4, dtype)
        for wanted, dtype in zip((of_scores, of_values), wide, strict=True)
    )
    d_ends = torch.empty((4, *final.shape), dtype=torch.float64, device="cpu")
    factors = grad.double().masked_fill(spoilt, torch.nan).numpy()
    inputs = (
        batch,
        as_steps(scores),
        factors,
        as_array(final),
        as_steps(values),
        as_array(last_values),
        as_array(mean),
        as_array(logz),
        kept.numpy(),
    )
    rows = [t.flatten(2).numpy() for t in (d_scores, d_values)]
    run_over_batch(backward_pairs, *inputs, *rows, d_ends.numpy(), of_scores, of_values)
    for result in (d_scores, d_values):
        fill_nan(result, spoilt)
    d_initial, d_final, d_first, d_last = (
        end.clone() for end in d_ends
    )  # results of an op share no memory
    results = (d_scores, d_initial, d_final, d_values, d_first, d_last)
    wanted = (of_scores,) * 3 + (of_values,) * 3
    tensors = (scores, initial, final, values, first_values, last_values)
    return tuple(
        r.to(t.dtype) if w else t.new_empty(0)
        for r, t, w in zip(results, tensors, wanted, strict=True)
    )
