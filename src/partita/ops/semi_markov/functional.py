"""Quantities of semi-Markov chains, computed by the registered ops.

Log Z stays in fp64, so that differences are formed before they are rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...paths.autograd import ones
from ...runtime.autograd import refuse_forward_mode
from ...runtime.backend import current_backend
from . import autograd
from .inputs import SemiMarkovPotentials


def marginals(chain: SemiMarkovPotentials) -> tuple[Tensor, ...]:
    """Return the gradients of log Z of each sequence, which are differentiable.

    They are those in emissions, transitions `[N, C, C]`, durations `[N, D, C]`, start and end.
    """
    args, backend = _posterior_arguments(chain), current_backend()
    return autograd.differentiable_gradient(ones(chain.emissions), *args, True, backend)


def segment_marginals(chain: SemiMarkovPotentials) -> Tensor:
    """Return the posterior probabilities of segments, `[T, D, N, C]`, which are differentiable."""
    return autograd.differentiable_segments(*_posterior_arguments(chain), current_backend())


def _posterior_arguments(chain: SemiMarkovPotentials) -> tuple[Tensor | None, ...]:
    """Return the chain, its log Z, and what that saves for posteriors."""
    refuse_forward_mode(*chain)
    with torch.no_grad():
        fp64, _, saved = autograd.logz(*chain, True, current_backend())
    return *chain, fp64, saved


def expectation(chain: SemiMarkovPotentials, values: tuple[Tensor, ...]) -> Tensor:
    """Return the mean of the sum of values along a path, `[N]` fp64; 0 times ±inf is 0."""
    emissions, *counts = marginals(chain)
    posteriors = (emissions.transpose(0, 1), *counts)  # [N, ...]
    values = (values[0].transpose(0, 1), *values[1:])
    means = (
        (posterior * torch.where(posterior == 0, 0.0, value)).flatten(1).sum(1)
        for posterior, value in zip(posteriors, values, strict=True)
    )
    return torch.stack([*means]).sum(0)
