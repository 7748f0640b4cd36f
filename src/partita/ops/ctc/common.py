"""Packed targets and reductions of CTC, which the reference and every backend share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class PackedTargets(NamedTuple):
    """The targets of a batch, as slices of one tensor of labels.

    Fields:
        labels: all labels, `[num_labels]`.
        offsets: index of each sequence's first label, `[N]`.
        lengths: number of labels of each sequence, `[N]`.
        max_target_len: an upper bound of all lengths; a lattice has 2 · max_target_len + 1 states.
    """

    labels: Tensor
    offsets: Tensor
    lengths: Tensor
    max_target_len: int


def padded_targets(targets: PackedTargets) -> tuple[Tensor, Tensor]:
    """Return the padded labels, `[N, max_target_len]`, and the mask of those within a length."""
    position = torch.arange(targets.max_target_len, device=targets.offsets.device)
    mask = position < targets.lengths[:, None]
    if not targets.labels.numel():
        return mask.long(), mask
    index = (targets.offsets[:, None] + position).clamp(0, targets.labels.numel() - 1)
    return targets.labels[index].long(), mask


def reduce_over_lengths(losses: Tensor, target_lengths: Tensor, reduction: str) -> Tensor:
    """Return the mean of loss / target length, the sum of the losses, or the losses themselves."""
    if reduction == "mean":
        return (losses / target_lengths.clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses


def reduce_losses(
    losses: Tensor, target_lengths: Tensor, reduction: str, zero_infinity: bool
) -> Tensor:
    """Reduce the losses, after setting infinite ones to 0 under `zero_infinity`."""
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    return reduce_over_lengths(losses, target_lengths, reduction)


def gradient_per_sequence(grad: Tensor, target_lengths: Tensor, reduction: str) -> Tensor:
    """Return the gradient of each sequence's loss, `[N]` fp64, from that of the reduced loss.

    Its value for an infinite loss is arbitrary: the gradient of such a sequence is 0 in any case.
    """
    grad = grad.double().expand(len(target_lengths))
    return grad / len(target_lengths) / target_lengths.clamp(min=1) if reduction == "mean" else grad
