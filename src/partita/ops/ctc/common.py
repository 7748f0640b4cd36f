"""Packed targets, options of the scores, and reductions of CTC, which all backends share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.autograd import is_batched, is_traced
from ...runtime.sizes import decide


class PackedTargets(NamedTuple):
    """The targets of a batch, as slices of one tensor of labels.

    Fields:
        labels: all labels one after another, in any shape.
        offsets: index of each sequence's first label, `[N]`.
        lengths: number of labels of each sequence, `[N]`.
        max_target_len: an upper bound of all lengths; a lattice has 2 · max_target_len + 1 states.
    """

    labels: Tensor
    offsets: Tensor
    lengths: Tensor
    max_target_len: int


class ScoreOptions(NamedTuple):
    """What the score of a label has beside the log-probability of its class.

    Fields:
        label_priors: `[C]`, the log-priors of the classes; None for none.
        prior_scale: the factor with which they are subtracted from the log-probabilities.
        star: the label that stands for any class, with the score 0; None for none. Inside of the
            backends it is one more class, C.
    """

    label_priors: Tensor | None = None
    prior_scale: float = 1.0
    star: int | None = None


def padded_targets(targets: PackedTargets) -> tuple[Tensor, Tensor]:
    """Return the padded labels, `[N, max_target_len]`, and the mask of those within a length."""
    position = torch.arange(targets.max_target_len, device=targets.offsets.device)
    mask = position < targets.lengths[:, None]
    if not targets.labels.numel():
        return mask.long(), mask
    index = (targets.offsets[:, None] + position).clamp(0, targets.labels.numel() - 1)
    return targets.labels.reshape(-1)[index].long(), mask


def longest_target(lengths: Tensor, targets: Tensor) -> int:
    """Return the greatest target length, or a bound of it where the lengths cannot be read."""
    # The length of a tensor by `len` is a function in Python.
    size, N = targets.shape[-1], lengths.shape[0]
    if decide(N == 0, otherwise=False):
        return 0
    if not lengths.is_cpu or is_traced() or is_batched(lengths):
        return size
    # Python finds the greatest of a few numbers in less time than PyTorch.
    longest = max(lengths.tolist()) if N <= 64 else int(lengths.max())
    return max(min(longest, size), 0)


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
    grad = grad.double().expand(target_lengths.shape)
    return (
        grad / target_lengths.shape[0] / target_lengths.clamp(min=1)
        if reduction == "mean"
        else grad
    )
