"""Means over the paths of dense linear chains, and their derivatives, in plain PyTorch.

Each emission, transition, start and end has a value, and a path has the sum of its values. The
derivative of log Z in the direction of the values is their posterior mean. The scan carries pairs:
alpha, and the mean of the values over the paths into each state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.semiring import Log, log_dsum
from .reference import (
    LinearChainInputs,
    StepSum,
    as_steps,
    end_gradients,
    forward_scores,
    linear_chain_inputs,
)


def weighted_sum(weights: Tensor, values: Tensor, dim: int) -> Tensor:
    """Return the sum of weights · values over a dimension, with 0 · (±inf) = 0."""
    return (weights * values.masked_fill(weights == 0, 0.0)).sum(dim)


def _values_of(
    x: LinearChainInputs,
    emission_values: Tensor,
    transition_values: Tensor,
    start_values: Tensor | None,
    end_values: Tensor | None,
    per_sequence: bool,
) -> LinearChainInputs:
    """Return the values in the form of the inputs of a scan.

    With `per_sequence` the transition values are `[N, C, C]`, the same for all steps.
    """
    zeros = torch.zeros_like(x.end)
    T, N, C = x.emissions.shape
    if per_sequence:
        step_values = transition_values.double().expand(T - 1, N, C, C)
    else:
        step_values = as_steps(transition_values, T)
    return LinearChainInputs(
        torch.where(x.active[..., None], emission_values.double(), 0.0),
        step_values,
        zeros if start_values is None else start_values.double(),
        zeros if end_values is None else end_values.double(),
        x.active,
        x.unused,
    )


def _forward_means(
    x: LinearChainInputs, alpha: list[Tensor], values: LinearChainInputs
) -> list[Tensor]:
    """Return the mean over the paths into each state of each token, `[N, C]` each."""
    mean = [values.start + values.emissions[0]]
    for t in range(1, len(x.emissions)):
        share = log_dsum(alpha[t - 1][:, :, None] + x.step(t), 1)
        entered = weighted_sum(share, mean[-1][:, :, None] + values.step(t), 1)
        entered = entered + values.emissions[t]
        mean.append(torch.where(x.active[t, :, None], entered, mean[-1]))
    return mean


def expected_value(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    emission_values: Tensor,
    transition_values: Tensor,
    start_values: Tensor | None,
    end_values: Tensor | None,
) -> Tensor:
    """Return the posterior mean of the sum of values along a path, `[N]` fp64."""
    x = linear_chain_inputs(emissions, transitions, start, end, lengths)
    per_sequence = transition_values.ndim == 3 and transitions.ndim == 2
    values = _values_of(
        x, emission_values, transition_values, start_values, end_values, per_sequence
    )
    alpha = forward_scores(x, Log)
    posterior = log_dsum(alpha[-1] + x.end, -1)
    return weighted_sum(posterior, _forward_means(x, alpha, values)[-1] + values.end, -1)


def _covariance(posterior: Tensor, difference: Tensor) -> Tensor:
    return torch.where(posterior == 0, 0.0, posterior * difference)


def linear_chain_tangent(
    grad_output: Tensor,
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    emission_values: Tensor,
    transition_values: Tensor,
    start_values: Tensor | None,
    end_values: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the mean of the values `[N]`, and its gradients weighted by grad_output, in fp64.

    The values have the shapes of their arguments. For constant transitions they may also be
    `[N, C, C]`. The gradient in a score is its posterior times the difference between the mean over
    the paths through it and the mean over all paths.
    """
    x = linear_chain_inputs(emissions, transitions, start, end, lengths)
    per_sequence = transition_values.ndim == 3 and transitions.ndim == 2
    values = _values_of(
        x, emission_values, transition_values, start_values, end_values, per_sequence
    )
    alpha = forward_scores(x, Log)
    mean_into = _forward_means(x, alpha, values)
    posterior = log_dsum(alpha[-1] + x.end, -1)
    mean = weighted_sum(posterior, mean_into[-1] + values.end, -1)
    # d_state is grad_output times the posterior. mean_from is the mean over the rest of the paths.
    d_state = grad_output.double()[:, None] * posterior
    mean_from = values.end
    d_end = _covariance(d_state, mean_into[-1] + mean_from - mean[:, None])
    d_emissions: list[Tensor] = []
    d_steps, unused = StepSum(transitions, d_state), x.unused[:, None]
    for t in reversed(range(1, len(x.emissions))):
        active = x.active[t, :, None]
        d_token = _covariance(d_state, mean_into[t] + mean_from - mean[:, None])
        d_emissions.insert(0, torch.where(active, d_token, unused))
        posterior_step = d_state[:, None] * log_dsum(alpha[t - 1][:, :, None] + x.step(t), 1)
        step_mean_from = values.step(t) + (values.emissions[t] + mean_from)[:, None]
        difference = mean_into[t - 1][:, :, None] + step_mean_from - mean[:, None, None]
        d_step = _covariance(posterior_step, difference)
        d_steps.add(torch.where(active[..., None], d_step, unused[..., None]))
        d_previous = posterior_step.sum(2)
        weighted = _covariance(posterior_step, step_mean_from).sum(2)
        previous_mean = torch.where(d_previous == 0, 0.0, weighted / d_previous)
        mean_from = torch.where(active, previous_mean, mean_from)
        d_state = torch.where(active, d_previous, d_state)
    d_first = _covariance(d_state, mean_into[0] + mean_from - mean[:, None])
    return (
        mean,
        torch.stack([d_first, *d_emissions]),
        d_steps.result(per_sequence=False),
        *end_gradients(emissions, start, end, d_first, d_end, torch.float64),
    )
