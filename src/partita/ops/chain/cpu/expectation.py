"""Means over the paths of sparse linear chains and their gradients, in parallel over the batch.

Forwards, alpha is scanned together with the mean of the values over the paths into each state.
Backwards, the posterior is scanned together with the mean over the rest of the paths from each
state.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
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
from ....primitives.cpu.jit import jit
from ....primitives.cpu.math import exp, log
from ....runtime.register import resolved
from .steps import (
    add_source_values,
    add_target_values,
    chain_batch,
    edge_posteriors,
    edge_terms,
    load_edges,
    logz_at_end,
    posterior_offsets,
    sum_by_source,
    zero_past_length,
)


@jit
def alpha_and_mean_step(
    terms: Any, max_term: Any, values: Any, sum_exp: Any, next_alpha: Any, next_mean: Any
) -> None:
    """Compute alpha after a step, and the mean of the values weighted by exp(terms), `[C]` both.

    Terms and values are `[K, C]`. A value whose weight is 0 adds 0.
    """
    for c in range(len(sum_exp)):
        sum_exp[c], next_mean[c] = 0.0, 0.0
    for k in range(len(terms)):
        for c in range(len(sum_exp)):
            weight = exp(terms[k, c] - max_term[c])
            sum_exp[c] += weight
            next_mean[c] += 0.0 if weight == 0.0 else weight * values[k, c]
    for c in range(len(sum_exp)):
        value = max_term[c] + log(sum_exp[c])
        next_alpha[c] = -INF if value == LOWEST else value
        next_mean[c] = 0.0 if sum_exp[c] == 0.0 else next_mean[c] / sum_exp[c]


@jit
def mean_at_end(alpha: Any, final: Any, mean: Any, last_values: Any, logz: float) -> float:
    """Return the mean over all paths from the means into the last states, `[C]`."""
    result = 0.0
    for c in range(len(alpha) if logz != -INF else 0):
        p = exp(alpha[c] + final[c] - logz)
        result += 0.0 if p == 0.0 else p * (mean[c] + last_values[c])
    return result


@jit(nogil=True)
def chain_expectation_forward_kernel(
    chains: Any,
    batch: Any,
    scores: Any,
    initial: Any,
    final: Any,
    values: Any,
    first_values: Any,
    last_values: Any,
    saved: Any,
    save: bool,
    logz: Any,
    mean: Any,
) -> None:
    """Compute the mean and log Z of each chain, and alpha and the mean into each state.

    The last two are `saved[0]` and `saved[1]`. With `save`, `saved` is `[2, T + 1, N, C]`.
    Otherwise it is `[2, 2, N, C]`, for two steps in turn.
    """
    C = initial.shape[1]
    for n in chains:
        buffer = np.empty(C * batch.K, scores.numbers.dtype)
        value_buffer = np.empty(C * batch.K, values.numbers.dtype)
        terms, value_terms = np.empty((batch.K, C)), np.empty((batch.K, C))
        max_term, sum_exp, unused = np.empty(C), np.empty(C), np.empty(C)
        for c in range(C):
            saved[0, 0, n, c], saved[1, 0, n, c] = initial[n, c], first_values[n, c]
        for t in range(batch.lengths[n]):
            now, after = (t, t + 1) if save else (t % 2, (t + 1) % 2)
            row = load_edges(scores, t, n, batch.K, buffer)
            value_row = load_edges(values, t, n, batch.K, value_buffer)
            next_row, next_value_row = row_at(scores, t + 1, n), row_at(values, t + 1, n)
            edge_terms(row, batch.sources, saved[0, now, n], terms, max_term, next_row)
            edge_terms(
                value_row, batch.sources, saved[1, now, n], value_terms, unused, next_value_row
            )
            alpha_and_mean_step(
                terms, max_term, value_terms, sum_exp, saved[0, after, n], saved[1, after, n]
            )
        last = batch.lengths[n] if save else batch.lengths[n] % 2
        logz[n] = logz_at_end(saved[0, last, n], final[n])
        mean[n] = mean_at_end(
            saved[0, last, n], final[n], saved[1, last, n], last_values[n], logz[n]
        )


@jit(inline="always")
def covariance(posterior: float, difference: float) -> float:
    """Return the product, which is 0 where the posterior is 0 for any difference."""
    return 0.0 if posterior == 0.0 else posterior * difference


@jit
def edge_covariances(
    posterior: Any, mean_from: Any, mean_into: Any, factor: float, d_scores: Any
) -> None:
    """Compute the gradients in the scores of a step, `[C * K]`.

    Args:
        posterior: the posterior of each edge.
        mean_from: the mean over the paths from each edge on; replaced by its product with the
            posterior.
        mean_into: the mean over the paths into each edge, minus the mean over all paths.
        factor: the factor of the gradients.
        d_scores: the gradients, written.
    """
    for e in range(len(posterior)):
        d_scores[e] = covariance(posterior[e] * factor, mean_into[e] + mean_from[e])
        mean_from[e] = covariance(posterior[e], mean_from[e])


@jit
def divide_by_posterior(weighted: Any, posterior: Any) -> None:
    """Divide the weighted sums by the posteriors of the states, `[C]`; 0 / 0 is 0."""
    for c in range(len(posterior)):
        weighted[c] = 0.0 if posterior[c] == 0.0 else weighted[c] / posterior[c]


@jit(nogil=True)
def chain_expectation_backward_kernel(
    chains: Any,
    batch: Any,
    scores: Any,
    grad_output: Any,
    final: Any,
    values: Any,
    last_values: Any,
    mean: Any,
    logz: Any,
    saved: Any,
    d_scores: Any,
    d_values: Any,
    d_ends: Any,
    need_score_grads: bool,
    need_value_grads: bool,
) -> None:
    """Compute the gradients in scores and values `[T, N, C * K]`, if needed, and in the ends.

    The gradients in initial, final, first_values and last_values are `d_ends`, `[4, N, C]`.
    """
    C = final.shape[1]
    size = C * batch.K
    for n in chains:
        buffer = np.empty(size, scores.numbers.dtype)
        value_buffer = np.empty(size, values.numbers.dtype)
        d_score_row, d_value_row = np.empty(size, d_scores.dtype), np.empty(size, d_values.dtype)
        edges, edge_mean_from, edge_mean_into = np.empty(size), np.empty(size), np.empty(size)
        posterior, offset, mean_from = np.empty(C), np.empty(C), np.empty(C)
        shift = np.full(C, -mean[n])
        length = batch.lengths[n]
        for c in range(C):
            posterior[c] = (
                0.0 if logz[n] == -INF else exp(saved[0, length, n, c] + final[n, c] - logz[n])
            )
            mean_from[c] = last_values[n, c]
            d_ends[1, n, c] = covariance(
                posterior[c] * grad_output[n], saved[1, length, n, c] + shift[c] + mean_from[c]
            )
            d_ends[3, n, c] = posterior[c] * grad_output[n]
        for t in range(length - 1, -1, -1):
            row = load_edges(scores, t, n, batch.K, buffer)
            value_row = load_edges(values, t, n, batch.K, value_buffer)
            d_score_row = d_scores[t, n] if need_score_grads else d_score_row
            d_value_row = d_values[t, n] if need_value_grads else d_value_row
            next_t = max(t - 1, 0)
            posterior_offsets(posterior, saved[0, t + 1, n], offset)
            add_source_values(
                batch.sources, saved[0, t, n], offset, edges, row, saved[0, next_t, n]
            )
            edge_posteriors(row, batch.sources, edges, grad_output[n], d_value_row)
            add_source_values(
                batch.sources,
                saved[1, t, n],
                shift,
                edge_mean_into,
                value_row,
                saved[1, next_t, n],
            )
            add_target_values(value_row, mean_from, edge_mean_from)
            edge_covariances(edges, edge_mean_from, edge_mean_into, grad_output[n], d_score_row)
            sum_by_source(batch, edges, posterior)
            sum_by_source(batch, edge_mean_from, mean_from)
            divide_by_posterior(mean_from, posterior)
        for c in range(C):
            d_ends[0, n, c] = covariance(
                posterior[c] * grad_output[n], saved[1, 0, n, c] + shift[c] + mean_from[c]
            )
            d_ends[2, n, c] = posterior[c] * grad_output[n]
        zero_past_length(d_scores, n, length)
        zero_past_length(d_values, n, length)


def chain_expectation(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    values: Tensor,
    first_values: Tensor,
    last_values: Tensor,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean and log Z, `[N]` fp64, and what the gradient needs, empty without `save`.

    The last is alpha and the mean into each state, `[2, T + 1, N, C]`.
    """
    batch, invalid = chain_batch(scores, source, lengths)
    T, N, C, _ = scores.shape
    saved = empty_batch((2, T + 1 if save else 2, N, C))
    mean, logz = (torch.empty(len(initial), dtype=torch.float64, device="cpu") for _ in range(2))
    run_over_batch(
        chain_expectation_forward_kernel,
        batch,
        as_steps(scores),
        as_array(initial),
        as_array(final),
        as_steps(values),
        as_array(first_values),
        as_array(last_values),
        saved.numpy(),
        save,
        logz.numpy(),
        mean.numpy(),
    )
    return (
        mean.masked_fill_(invalid, torch.nan),
        logz.masked_fill_(invalid, torch.nan),
        saved if save else saved.new_empty(0),
    )


def chain_expectation_gradient(
    grad_output: Tensor,
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
    saved: Tensor,
    need_score_grads: bool,
    need_value_grads: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients in scores, initial, final, values, first_values and last_values.

    A gradient that is not needed is empty.
    """
    (batch, invalid), failed = chain_batch(scores, source, lengths), logz.isnan()
    steps = torch.from_numpy(batch.lengths).masked_fill(invalid, len(scores))
    d_scores, d_values = (
        empty_batch(t.shape if need else (0,) * 4, torch.promote_types(t.dtype, torch.float32))
        for t, need in ((scores, need_score_grads), (values, need_value_grads))
    )
    d_ends = torch.empty((4, *final.shape), dtype=torch.float64, device="cpu")
    run_over_batch(
        chain_expectation_backward_kernel,
        batch,
        as_steps(scores),
        resolved(grad_output).double().masked_fill(failed, torch.nan).numpy(),
        as_array(final),
        as_steps(values),
        as_array(last_values),
        as_array(mean),
        as_array(logz),
        saved.numpy(),
        d_scores.flatten(2).numpy(),
        d_values.flatten(2).numpy(),
        d_ends.numpy(),
        need_score_grads,
        need_value_grads,
    )
    for gradient in (d_scores, d_values):
        fill_nan(gradient, failed, steps)
    # Results of an op may not share memory.
    d_initial, d_final, d_first, d_last = (end.clone() for end in d_ends)
    grads = (d_scores, d_initial, d_final, d_values, d_first, d_last)
    needed = (need_score_grads,) * 3 + (need_value_grads,) * 3
    tensors = (scores, initial, final, values, first_values, last_values)
    return tuple(
        grad.to(tensor.dtype) if need else tensor.new_empty(0)
        for grad, tensor, need in zip(grads, tensors, needed, strict=True)
    )
