"""Losses over a sharded vocabulary in plain PyTorch.

Each rank computes a packed state of its classes. The ranks gather these states, and each merges
them into the statistics of its rows and the coefficients of its gradient.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...primitives.rows import finite_shift
from ..linear_heads.common import GradientCoefficients, RowState, RowStatistics
from ..linear_heads.reference import (
    accumulate_hidden,
    accumulate_logits,
    gradient_coefficients,
    logits_gradient,
    row_statistics,
)
from .common import (
    gradient_in_place,
    gradient_of_logits,
    integer_dtype,
    pack_hidden,
    pack_logits,
)

parallel_logits = functools.partial(
    pack_logits, accumulate_logits=accumulate_logits, overwrites_state=False
)
parallel_linear = functools.partial(
    pack_hidden,
    accumulate_hidden=accumulate_hidden,
    accumulate_logits=accumulate_logits,
    overwrites_state=False,
)
parallel_gradient = functools.partial(gradient_of_logits, logits_gradient=logits_gradient)
parallel_gradient_ = functools.partial(gradient_in_place, logits_gradient=logits_gradient)


def parallel_fields(
    gathered: Tensor,
    target: Tensor,
    classes: int,
    first_class: int,
    rank: int,
    temperature: float,
    ignore_index: int,
    smoothing: bool,
    entropy: bool,
) -> RowStatistics:
    """Return the `RowStatistics` of the packed states of all ranks, `[world, packed_size, M]`.

    They are NaN where the ranks have other numbers of classes than this rank expects.
    """
    maxima, sums, labels, sizes = gathered[:, :4].unbind(1)
    maximum = maxima.amax(0)
    shift = finite_shift(maximum)
    scale = ((maxima - shift) / temperature).exp()
    invalid = (sizes[:rank].sum(0) != first_class) | (sizes.sum(0) != classes)
    sumexp = torch.where(invalid, torch.nan, (sums * scale).sum(0))
    origin = smoothing_loss = weight = sum_x_exp = argmax = None
    if smoothing:
        origins, smoothing_losses, weights = gathered[:, 4:7].unbind(1)
        origin, weight = origins[0], weights.sum(0)[:1]
        smoothing_loss = (smoothing_losses + weights * (origin - origins)).sum(0)
    if entropy:
        sums_x_exp, indices = gathered[:, -2:].unbind(1)
        moved = sums * (shift - finite_shift(maxima)) / temperature
        sum_x_exp = (scale * (sums_x_exp - moved)).sum(0)
        indices = indices.contiguous().view(integer_dtype(gathered.dtype)).long()
        argmax = torch.where(maxima == maximum, indices, classes - 1).amin(0)
    state = RowState(maximum, sumexp, labels.amax(0), origin, smoothing_loss, sum_x_exp, argmax)
    return row_statistics(state, target, weight, classes, temperature, ignore_index)


def parallel_coefficients(
    target: Tensor,
    grad_nll: Tensor | None,
    grad_logsumexp: Tensor | None,
    grad_smoothing: Tensor | None,
    grad_entropy: Tensor | None,
    class_weight: Tensor | None,
    entropies: Tensor,
    smoothing: bool,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> GradientCoefficients:
    """Return the `GradientCoefficients`, each None as an empty tensor.

    `entropies` is the entropy of each row, or empty, and `smoothing` says whether the forward pass
    computed a smoothing loss.
    """
    grads = (grad_nll, grad_logsumexp, grad_smoothing, grad_entropy)
    like = next(grad for grad in grads if grad is not None)
    grads = (*grads[:2], grad_smoothing if smoothing else None, grad_entropy)
    if not entropies.numel():
        grads = (*grads[:3], None)
    empty = like.new_empty(0)
    # Only the size and the dtype of `maximum` matter here.
    statistics = RowStatistics(
        nll=empty,
        logsumexp=empty,
        smoothing_loss=empty,
        entropy=entropies,
        argmax=empty,
        maximum=torch.empty_like(like),
        sumexp=empty,
    )
    coefficients = gradient_coefficients(
        *grads, target, class_weight, statistics, classes, temperature, ignore_index
    )
    return GradientCoefficients(
        *(like.new_empty(0) if tensor is None else tensor for tensor in coefficients)
    )
