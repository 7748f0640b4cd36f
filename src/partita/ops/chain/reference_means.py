"""Means over the paths of linear chains, and their gradients, in plain PyTorch.

A value belongs to each edge, first state and last state, and a path has the sum of its values. The
scan carries pairs: alpha, and the mean of the values over the paths into each state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.semiring import Log, log_dsum
from .common import ChainPotentials, ChainValues
from .reference import (
    ChainInputs,
    chain_inputs,
    edge_terms,
    log_partition,
    stacked,
    sum_by_source,
)


class Values(NamedTuple):
    """Values of the edges and of the ends of paths.

    Fields:
        edges: takes a step and returns the values of its edges, `[N, C, K]` fp64.
        first, last: the values of the first and of the last states, `[N, C]` fp64.
    """

    edges: Callable[[int], Tensor]
    first: Tensor
    last: Tensor


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """Return Σ weights · values over the last dimension, with 0 · (±inf) = 0."""
    return (weights * values.masked_fill(weights == 0, 0.0)).sum(-1)


def _forward_means(x: ChainInputs, values: Values) -> tuple[list[Tensor], list[Tensor]]:
    """Return alpha and the mean over the paths into each state, after 0 to T steps, `[N, C]`."""
    alpha, mean = [x.initial], [values.first]
    for t in range(len(x.active)):
        active, terms = x.active[t, :, None], edge_terms(x, t, alpha[t], Log)
        # Other values may be NaN, which a second derivative would carry into its result.
        valid = active[..., None] & ~x.missing
        valid_values = values.edges(t).masked_fill(~valid, 0.0)
        entered = _weighted_sum(log_dsum(terms, -1), valid_values + mean[t][:, x.source])
        alpha.append(torch.where(active, Log.sum(terms, -1), alpha[t]))
        mean.append(torch.where(active, entered, mean[t]))
    return alpha, mean


def mean_value(x: ChainInputs, values: Values) -> Tensor:
    """Return the posterior mean of the sum of values along a path, `[N]` fp64."""
    alpha, mean = _forward_means(x, values)
    return _weighted_sum(log_dsum(alpha[-1] + x.final, -1), mean[-1] + values.last)


def covariances(x: ChainInputs, values: Values, grad_output: Tensor) -> Iterator[Tensor]:
    """Yield the gradients of the mean times grad_output `[N]`, in the order of `posteriors`.

    Each is a posterior times the difference between the mean over the paths through a state or edge
    and the mean over all paths.
    """
    alpha, mean_into = _forward_means(x, values)
    posterior = log_dsum(alpha[-1] + x.final, -1)
    mean = _weighted_sum(posterior, mean_into[-1] + values.last)[:, None]
    # d_state is grad_output times the posterior of each state. mean_from is the mean over the
    # rest of the paths from each state. Both are [N, C].
    d_state, mean_from = grad_output.double()[:, None] * posterior, values.last

    def weighted(posterior: Tensor, value: Tensor) -> Tensor:
        return torch.where(posterior == 0, 0.0, posterior * value)

    yield weighted(d_state, mean_into[-1] + mean_from - mean)
    for t in reversed(range(len(x.active))):
        active = x.active[t, :, None]
        d_edge = d_state[..., None] * log_dsum(edge_terms(x, t, alpha[t], Log), -1)
        edge_mean_from = values.edges(t) + mean_from[..., None]
        edge_mean = mean_into[t][:, x.source] + edge_mean_from
        d_score = weighted(d_edge, edge_mean - mean[..., None])
        yield torch.where(active[..., None], d_score, x.unused[:, None, None])
        d_previous = sum_by_source(x, d_edge)
        previous_mean = sum_by_source(x, weighted(d_edge, edge_mean_from)) / d_previous
        previous_mean = torch.where(d_previous == 0, 0.0, previous_mean)
        mean_from = torch.where(active, previous_mean, mean_from)
        d_state = torch.where(active, d_previous, d_state)
    yield weighted(d_state, mean_into[0] + mean_from - mean)


def as_values(values: ChainValues) -> Values:
    """Return the values as the scans take them."""
    return Values(lambda t: values[0][t].double(), *(ends.double() for ends in values[1:]))


def chain_expectation(
    chain: ChainPotentials, values: ChainValues, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean, log Z and an empty tensor: the reference saves nothing."""
    x = chain_inputs(chain, Log)
    mean = mean_value(x, as_values(values))
    return mean, log_partition(x, Log), mean.new_empty(0)


def chain_expectation_gradient(
    grad_output: Tensor,
    chain: ChainPotentials,
    values: ChainValues,
    mean: Tensor,
    logz: Tensor,
    saved: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the mean in scores, initial and final."""
    x = chain_inputs(chain, Log)
    return stacked(covariances(x, as_values(values), grad_output), chain, chain.scores.dtype)
