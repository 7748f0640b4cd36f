"""Quantities of semi-Markov chains, computed by the registered ops.

Log Z and means stay in fp64, so that differences of them are formed before they are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.autograd import apply, needs_no_derivative, refuse_forward_mode, requires_grad
from ...runtime.backend import current_backend
from ...runtime.constants import scalar
from . import autograd
from .inputs import SemiMarkovTensors
from .paths import path_score


def log_partitions(chain: SemiMarkovTensors) -> tuple[Tensor, Tensor]:
    """Return log Z in fp64, of which differences may be formed, and in the dtype of results."""
    backend = current_backend()
    if needs_no_derivative(*chain[:5]):
        fp64, rounded, _ = autograd.logz(*chain, False, backend)
    else:
        save = torch.is_grad_enabled() and any(map(requires_grad, chain[:5]))
        fp64, rounded, _ = apply(autograd.LogZ, *chain, save, backend)
    return fp64, rounded


def marginals(chain: SemiMarkovTensors) -> tuple[Tensor, ...]:
    """Return the gradients of log Z of each sequence, which are differentiable.

    They are those in emissions, transitions `[N, C, C]`, durations `[N, D, C]`, start and end.
    """
    refuse_forward_mode(*chain)
    emissions, backend = chain.emissions, current_backend()
    ones = scalar(1.0, torch.float64, emissions.device).expand(emissions.shape[1])
    with torch.no_grad():
        fp64, _, saved = autograd.logz(*chain, True, backend)
    return autograd.differentiable_gradient(ones, *chain, fp64, saved, True, backend)


def segment_marginals(chain: SemiMarkovTensors) -> Tensor:
    """Return the posterior probabilities of segments, `[T, D, N, C]`, which are differentiable."""
    refuse_forward_mode(*chain)
    backend = current_backend()
    with torch.no_grad():
        fp64, _, saved = autograd.logz(*chain, True, backend)
    return autograd.differentiable_segments(*chain, fp64, saved, backend)


def _mean_score(posterior: Tensor, scores: Tensor) -> Tensor:
    """Return the sum of posteriors times scores, `[N]`; 0 times -inf is 0."""
    return (posterior * torch.where(posterior == 0, 0.0, scores)).flatten(1).sum(1)


def entropy(chain: SemiMarkovTensors) -> Tensor:
    """Return the entropy of the paths in nats, `[N]` fp64: log Z minus the mean score."""
    emissions, transitions, durations, start, end = (tensor.double() for tensor in chain[:5])
    chain = SemiMarkovTensors(emissions, transitions, durations, start, end, chain.lengths)
    logz = log_partitions(chain)[0]
    states, transitions, durations, first, last = marginals(chain)
    mean = _mean_score(states.transpose(0, 1), chain.emissions.transpose(0, 1))
    mean = mean + _mean_score(transitions, chain.transitions)
    mean = mean + _mean_score(durations, chain.durations)
    mean = mean + _mean_score(first, chain.start) + _mean_score(last, chain.end)
    return torch.where(logz == -torch.inf, 0.0, logz - mean)


def log_prob(chain: SemiMarkovTensors, states: Tensor, starts: Tensor) -> Tensor:
    """Return the log-probability of the paths `[..., T, N]`, `[..., N]` fp64."""
    logz = log_partitions(chain)[0]
    # A path that is given is not a path of a chain that has none.
    return torch.where(logz == -torch.inf, -torch.inf, path_score(chain, states, starts) - logz)
