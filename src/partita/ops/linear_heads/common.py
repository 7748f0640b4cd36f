"""What losses from hidden states share on one device and on several."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import autocast_dtype, plain_eager
from ..cross_entropy.reference import mean_denominators
from .plan import MemoryPlan


def cast_to_autocast(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """As a linear layer sees them: under autocast in its dtype."""
    dtype = autocast_dtype(next(tensor for tensor in tensors if tensor is not None).device)
    if dtype is None:
        return tensors
    return tuple(
        tensor.to(dtype)
        if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16, torch.float32)
        else tensor
        for tensor in tensors
    )


def chunk_and_save(plan: MemoryPlan, classes: int) -> tuple[int, bool]:
    """Classes at a time where the gradient comes in the backward pass, and whether that finds the logits kept."""
    fast = plan.name == "fast"
    return classes if fast else plan.chunk, fast and plain_eager()


def checked_options(
    ignore_index: int, label_smoothing: float, softcap: float | None, z_loss: float
) -> tuple[int, float, float, float]:
    """The numbers, checked, as the ops take them."""
    checks.python_int("ignore_index", ignore_index)
    checks.number("label_smoothing", label_smoothing, low=0.0, high=1.0)
    checks.number("z_loss", z_loss, low=0.0)
    if softcap is not None:
        checks.number("softcap", softcap, low=0.0, open_low=True)
    return ignore_index, float(label_smoothing), float(softcap or 0.0), float(z_loss)


def reduce_losses(
    loss: Tensor,
    z: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """The losses of the rows and their z-losses, together."""
    if reduction != "mean":
        loss = loss if z is None else loss + z
        return loss if reduction == "none" else loss.sum()
    total, count = loss_denominators(target, weight, classes, ignore_index)
    return loss.sum() / total if z is None else loss.sum() / total + z.sum() / count


def loss_terms(
    nll: Tensor,
    logsumexp: Tensor,
    spread: Tensor,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor | None]:
    """The loss of each row, and its z-loss where there is one."""
    ignore_index, smoothing, _, z_loss = options
    counts, loss = target != ignore_index, nll
    if weight is not None:
        loss = (
            loss
            * weight.to(nll.dtype)[
                torch.where(counts & (target >= 0) & (target < classes), target, 0).long()
            ]
        )
    if smoothing > 0:
        loss = (1 - smoothing) * loss + smoothing / classes * torch.where(counts, spread, 0.0)
    return loss, z_loss * torch.where(counts, logsumexp, 0.0).square() if z_loss else None


def loss_denominators(
    target: Tensor, weight: Tensor | None, classes: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """What a mean divides the loss and the z-loss by."""
    count = (target != ignore_index).sum()
    return count if weight is None else mean_denominators(target, weight, ignore_index, classes)[
        0
    ], count


class RowState(NamedTuple):
    """What is known of each row after some of its classes; `x` are the logits, soft-capped.

    RowStatistics:
        maximum: `[M]` of x.
        sumexp: `[M]`, sum of exp((x - maximum) / temperature).
        label: `[M]`, x at the target; -inf before it was met.
        origin: `[M]`, x of the first class, or 0 for -inf; None where no spread is wanted.
        spread: `[M]`, sum of the class weights times (origin - x); None likewise.
        surprise: `[M]`, sum of e log e, where e are the terms of `sumexp`; None where no entropy is wanted.
        argmax: `[M]` int64, the lowest class at which the maximum is; None likewise.
    """

    maximum: Tensor
    sumexp: Tensor
    label: Tensor
    origin: Tensor | None
    smoothing_loss: Tensor | None
    sum_x_exp: Tensor | None
    argmax: Tensor | None


class RowStatistics(NamedTuple):
    """Statistics of each row of logits / temperature, in nats, `[M]`; NaN where the target is wrong.

    RowStatistics:
        nll: minus the log-probability of the target, 0 where that is ignored.
        logsumexp: their log Z.
        spread: sum of the class weights times minus each class's log-probability; empty where not wanted.
        entropy: empty where not wanted.
        argmax: int64, likewise.
        maximum, sumexp: of `State`, for the gradient.
    """

    nll: Tensor
    logsumexp: Tensor
    smoothing_loss: Tensor
    entropy: Tensor
    argmax: Tensor
    maximum: Tensor
    sumexp: Tensor


class GradientCoefficients(NamedTuple):
    """Of each row, `[M]`: its gradient is pull · p + log_pull · p log p + at_label at the target + by_class · class weights, p being its softmax.

    A row of which all are 0 has the gradient 0, whatever its logits.
    """

    dlogits_coef: Tensor
    label_coef: Tensor
    log_coef: Tensor | None
    smoothing_coef: Tensor | None


class HeadGradients(NamedTuple):
    """Of hidden states, matrix and bias; empty where not wanted."""

    input: Tensor
    weight: Tensor
    bias: Tensor
