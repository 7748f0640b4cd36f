"""Means over the paths of sparse linear chains in plain PyTorch: a scan over pairs, differentiable throughout."""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.semiring import Log, log_dsum
from .reference import ChainInputs, chain_inputs, edge_terms, leaving, log_partition


def _weighed(weights: Tensor, values: Tensor) -> Tensor:
    """Σ weights · values over the last dimension, with 0 · (±inf) = 0."""
    return (weights * values.masked_fill(weights == 0, 0.0)).sum(-1)


def _pairs(
    x: ChainInputs, values: Tensor, first_values: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """α after each step, and the mean of the values over the paths into each state, `[N, C]` each."""
    alpha, mean = [x.initial], [first_values.double()]
    for t in range(len(x.scores)):
        active, terms = x.active[t, :, None], edge_terms(x, t, alpha[t], Log)
        looked_at = (
            values[t].double().masked_fill(~(active[..., None] & ~x.missing), 0.0)
        )  # others may be NaN, which a second derivative would spread
        through = _weighed(log_dsum(terms, -1), looked_at + mean[t][:, x.source])
        alpha.append(torch.where(active, Log.sum(terms, -1), alpha[t]))
        mean.append(torch.where(active, through, mean[t]))
    return alpha, mean


def mean_of(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    values: Tensor,
    first_values: Tensor,
    last_values: Tensor,
) -> Tensor:
    """The mean of the sum of values along a path, `[N]` fp64: values of edges `[T, N, C, K]`, of first and of last states `[N, C]`."""
    x = chain_inputs(scores, source, initial, final, lengths, Log)
    alpha, mean = _pairs(x, values, first_values)
    return _weighed(log_dsum(alpha[-1] + x.final, -1), mean[-1] + last_values.double())


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
    """That mean, log Z, and what the gradient may use again: nothing, for the reference starts anew."""
    mean = mean_of(scores, source, initial, final, lengths, values, first_values, last_values)
    return (
        mean,
        log_partition(chain_inputs(scores, source, initial, final, lengths, Log), Log),
        scores.new_empty(0, dtype=torch.float64),
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
    """Gradients of scores, initial, final, values, first and last values: the posterior of each edge and state for the values, and for the scores
    that times how far the mean over the paths through it lies from the mean over all."""
    x = chain_inputs(scores, source, initial, final, lengths, Log)
    alpha, before = _pairs(x, values, first_values)
    grad, mean = grad.double()[:, None], mean[:, None]
    here, behind = grad * log_dsum(alpha[-1] + x.final, -1), last_values.double()

    def covariance(posterior: Tensor, value: Tensor) -> Tensor:
        return torch.where(posterior == 0, 0.0, posterior * value)

    last = here, covariance(here, before[-1] + behind - mean)
    d_scores, d_values = [torch.empty_like(x.scores[:0])], [torch.empty_like(x.scores[:0])]
    for t in reversed(range(len(x.scores))):
        active = x.active[t, :, None]
        share = here[..., None] * log_dsum(edge_terms(x, t, alpha[t], Log), -1)
        onwards = values[t].double() + behind[..., None]
        nothing = 0.0 * here[..., None]
        edge = covariance(share, before[t][:, x.source] + onwards - mean[..., None])
        d_scores.insert(0, torch.where(active[..., None], edge, nothing)[None])
        d_values.insert(0, torch.where(active[..., None], share, nothing)[None])
        there, summed = leaving(x, share), leaving(x, covariance(share, onwards))
        behind = torch.where(active, torch.where(there == 0, 0.0, summed / there), behind)
        here = torch.where(active, there, here)
    first = here, covariance(here, before[0] + behind - mean)
    results = (torch.cat(d_scores), first[1], last[1], torch.cat(d_values), first[0], last[0])
    wanted = (of_scores,) * 3 + (of_values,) * 3
    tensors = (scores, initial, final, values, first_values, last_values)
    return tuple(
        r.to(t.dtype) if w else t.new_empty(0)
        for r, t, w in zip(results, tensors, wanted, strict=True)
    )
