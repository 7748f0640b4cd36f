"""What the reference and the kernels of CTC agree on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Targets(NamedTuple):
    """Targets of a batch, wherever they lie.

    Fields:
        labels: one after another, `[M]`.
        offsets: where each sequence's begin, `[N]`.
        lengths: `[N]`.
        most: no length is greater; the lattice has 2 · most + 1 states.
    """

    labels: Tensor
    offsets: Tensor
    lengths: Tensor
    most: int


def reduce_over_lengths(losses: Tensor, target_lengths: Tensor, reduction: str) -> Tensor:
    """The mean of loss / target length, the sum, or each."""
    if reduction == "mean":
        return (losses / target_lengths.clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses


def reduce_losses(
    losses: Tensor, target_lengths: Tensor, reduction: str, zero_infinity: bool
) -> Tensor:
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    return reduce_over_lengths(losses, target_lengths, reduction)


def gradient_per_sequence(grad: Tensor, target_lengths: Tensor, reduction: str) -> Tensor:
    """The gradient of each loss, `[N]` fp64, from that of what they were reduced to: of an infinite one any will do, as it has none."""
    grad = grad.double().expand(len(target_lengths))
    return grad / len(target_lengths) / target_lengths.clamp(min=1) if reduction == "mean" else grad
