"""The inputs of the ops of CTC, and reductions of its losses, which all backends share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...runtime.autograd import is_batched, is_traced
from ...runtime.sizes import decide


class CTCInputs(NamedTuple):
    """A batch of targets and the scores of their labels, in the order of arguments of the ops.

    Fields:
        logits: `[T, N, C]`, or log-probabilities.
        labels: the labels of all targets one after another, in any shape.
        offsets: `[N]`, the index of each target's first label.
        input_lengths, target_lengths: `[N]` int64, on the device of the logits.
        max_target_len: an upper bound of the target lengths; a lattice has 2 · max_target_len + 1
            states.
        blank: the class of the blank.
        from_logits: whether the score of a class is its log-softmax.
        label_priors: `[C]`, the log-priors of the classes; None for none.
        prior_scale: the factor with which they are subtracted from the log-probabilities.
        star: the label that stands for any class, with the score 0; None for none. Inside of the
            backends it is one more class, C.
    """

    logits: Tensor
    labels: Tensor
    offsets: Tensor
    input_lengths: Tensor
    target_lengths: Tensor
    max_target_len: int
    blank: int
    from_logits: bool
    label_priors: Tensor | None = None
    prior_scale: float = 1.0
    star: int | None = None


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


def reduce_losses(losses: Tensor, target_lengths: Tensor, reduction: str) -> Tensor:
    """Reduce the losses of the sequences, `[N]`.

    `mean` is the mean of loss / target length, `mean_batch` the mean of the losses, and
    `mean_volume` the sum of the losses over the sum of the target lengths.
    """
    if reduction == "none":
        return losses
    if reduction == "mean":
        return (losses / target_lengths.clamp(min=1)).mean()
    if reduction == "mean_batch":
        return losses.mean()
    total = losses.sum()
    return total if reduction == "sum" else total / target_lengths.sum().clamp(min=1)


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
