"""Losses over a sharded vocabulary in plain PyTorch.

Each rank computes a packed state of its classes. The ranks gather these states, and each merges
them into the statistics of its rows and the coefficients of its gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.rows import finite_shift
from ...runtime.dtypes import integer_dtype
from ..linear_heads.common import (
    GradientCoefficients,
    RowOptions,
    RowState,
    RowStatistics,
    StatisticsGrads,
)
from ..linear_heads.reference import KERNELS, gradient_coefficients, row_statistics
from .common import RankKernels
from .shard import sum_in_rank_order

RANK_KERNELS = RankKernels(KERNELS)


def parallel_fields(
    gathered: Tensor,
    target: Tensor,
    classes: int,
    first_class: int,
    rank: int,
    options: RowOptions,
) -> RowStatistics:
    """Return the `RowStatistics` of the packed states of all ranks, `[world, packed_size, M]`.

    They are NaN where the ranks have other numbers of classes than this rank expects.
    """
    temperature = options.temperature
    maxima, sums, labels, sizes = gathered[:, :4].unbind(1)
    maximum = maxima.amax(0)
    shift = finite_shift(maximum)
    scale = ((maxima - shift) / temperature).exp()
    invalid = (sizes[:rank].sum(0) != first_class) | (sizes.sum(0) != classes)
    sumexp = torch.where(invalid, torch.nan, sum_in_rank_order(sums * scale))
    origin = smoothing_loss = weight = sum_x_exp = argmax = None
    if options.needs_smoothing:
        origins, smoothing_losses, weights = gathered[:, 4:7].unbind(1)
        origin, weight = origins[0], sum_in_rank_order(weights[..., :1])
        smoothing_loss = sum_in_rank_order(smoothing_losses + weights * (origin - origins))
    if options.needs_entropy:
        sums_x_exp, indices = gathered[:, -2:].unbind(1)
        moved = sums * (shift - finite_shift(maxima)) / temperature
        sum_x_exp = sum_in_rank_order(scale * (sums_x_exp - moved))
        indices = indices.contiguous().view(integer_dtype(gathered.dtype)).long()
        argmax = torch.where(maxima == maximum, indices, classes - 1).amin(0)
    state = RowState(maximum, sumexp, labels.amax(0), origin, smoothing_loss, sum_x_exp, argmax)
    return row_statistics(state, target, weight, classes, temperature, options.ignore_index)


def parallel_coefficients(
    target: Tensor,
    grads: StatisticsGrads,
    class_weight: Tensor | None,
    entropies: Tensor,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> GradientCoefficients:
    """Return the `GradientCoefficients`, each None as an empty tensor.

    At least one of the gradients is given. `entropies` is read for that of the entropy.
    """
    like = next(grad for grad in grads if grad is not None)
    of_rows = (target, class_weight, entropies)
    coefficients = gradient_coefficients(grads, *of_rows, classes, temperature, ignore_index)
    return GradientCoefficients(
        *(like.new_empty(0) if tensor is None else tensor for tensor in coefficients)
    )
