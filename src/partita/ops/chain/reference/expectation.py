"""Means over the paths of sparse linear chains, and their gradients, in plain PyTorch.

A value belongs to each edge, first state and last state, and a path has the sum of its values. The
scan carries pairs: alpha, and the mean of the values over the paths into each state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....primitives.semiring import Log, log_dsum
from .logz import ChainInputs, chain_inputs, edge_terms, log_partition, sum_by_source


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return Σ weights · values over the last dimension, with 0 · (±inf) = 0."""
    return (weights * values.masked_fill(weights == 0, 0.0)).sum(-1)


def _forward_means(
    x: ChainInputs, values: Tensor, first_values: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Return alpha and the mean over the paths into each state, after 0 to T steps, `[N, C]`."""
    alpha, mean = [x.initial], [first_values.double()]
    for t in range(len(x.scores)):
        active, terms = x.active[t, :, None], edge_terms(x, t, alpha[t], Log)
        # Other values may be NaN, which a second derivative would carry into its result.
        valid = active[..., None] & ~x.missing
        valid_values = values[t].double().masked_fill(~valid, 0.0)
        entered = _weighted_sum(log_dsum(terms, -1), valid_values + mean[t][:, x.source])
        alpha.append(torch.where(active, Log.sum(terms, -1), alpha[t]))
        mean.append(torch.where(active, entered, mean[t]))
    return alpha, mean


def expected_value(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    values: Tensor,
    first_values: Tensor,
    last_values: Tensor,
) -> Tensor:
    """Return the posterior mean of the sum of values along a path, `[N]` fp64.

    The edges have the values `[T, N, C, K]`, the first and the last states the values `[N, C]`.
    """
    x = chain_inputs(scores, source, initial, final, lengths, Log)
    alpha, mean = _forward_means(x, values, first_values)
    posterior = log_dsum(alpha[-1] + x.final, -1)
    return _weighted_sum(posterior, mean[-1] + last_values.double())


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
    """Return the mean, log Z and an empty tensor: the reference saves nothing."""
    mean = expected_value(
        scores, source, initial, final, lengths, values, first_values, last_values
    )
    x = chain_inputs(scores, source, initial, final, lengths, Log)
    return mean, log_partition(x, Log), scores.new_empty(0, dtype=torch.float64)


class ExpectationGradients(NamedTuple):
    """The gradients in the tensors of these names."""

    scores: Tensor
    initial: Tensor
    final: Tensor
    values: Tensor
    first_values: Tensor
    last_values: Tensor


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
) -> ExpectationGradients:
    """Return the gradients of the expectation.

    The gradient in a value is the posterior of its edge or state. The gradient in a score is that
    posterior times the difference between the mean over the paths through the edge or state and
    the mean over all paths. A gradient that is not needed is empty.
    """
    x = chain_inputs(scores, source, initial, final, lengths, Log)
    alpha, mean_into = _forward_means(x, values, first_values)
    grad_output, mean = grad_output.double()[:, None], mean[:, None]
    # d_state is grad_output times the posterior of each state. mean_from is the mean over the
    # rest of the paths from each state. Both are [N, C].
    d_state = grad_output * log_dsum(alpha[-1] + x.final, -1)
    mean_from = last_values.double()

    def covariance(posterior: Tensor, value: Tensor) -> Tensor:
        return torch.where(posterior == 0, 0.0, posterior * value)

    unused = x.unused[:, None, None]
    d_last, d_final = d_state, covariance(d_state, mean_into[-1] + mean_from - mean)
    d_scores, d_values = [torch.empty_like(x.scores[:0])], [torch.empty_like(x.scores[:0])]
    for t in reversed(range(len(x.scores))):
        active = x.active[t, :, None]
        d_edge = d_state[..., None] * log_dsum(edge_terms(x, t, alpha[t], Log), -1)
        edge_mean_from = values[t].double() + mean_from[..., None]
        edge_mean = mean_into[t][:, x.source] + edge_mean_from
        d_score = covariance(d_edge, edge_mean - mean[..., None])
        d_scores.insert(0, torch.where(active[..., None], d_score, unused)[None])
        d_values.insert(0, torch.where(active[..., None], d_edge, unused)[None])
        d_previous = sum_by_source(x, d_edge)
        weighted = sum_by_source(x, covariance(d_edge, edge_mean_from))
        previous_mean = torch.where(d_previous == 0, 0.0, weighted / d_previous)
        mean_from = torch.where(active, previous_mean, mean_from)
        d_state = torch.where(active, d_previous, d_state)
    d_first, d_initial = d_state, covariance(d_state, mean_into[0] + mean_from - mean)
    grads = (torch.cat(d_scores), d_initial, d_final, torch.cat(d_values), d_first, d_last)
    needed = (need_score_grads,) * 3 + (need_value_grads,) * 3
    tensors = (scores, initial, final, values, first_values, last_values)
    return ExpectationGradients(
        *(
            grad.to(tensor.dtype) if need else tensor.new_empty(0)
            for grad, tensor, need in zip(grads, tensors, needed, strict=True)
        )
    )
