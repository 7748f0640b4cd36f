"""Results and conventions that the reference and the kernels of cross-entropy share."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime import checks
from ...runtime.checks import REDUCTIONS
from ...runtime.dtypes import acc_dtype

NOT_READ = -(2**62)  # as `ignore_index` of token statistics: rows with this label are not read


class LossOptions(NamedTuple):
    """The checked options of a loss over labels; see `checked_options`."""

    ignore_index: int  # the ignored label
    label_smoothing: float  # the share of the target that all classes have evenly
    softcap: float  # the soft-cap, or 0 for none
    z_loss: float  # the factor of the z-loss
    reduction: str  # `none`, `mean` or `sum`

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments of `cross_entropy`."""
        return {**self._asdict(), "softcap": self.softcap or None}

    def has_logz_term(self) -> bool:
        """Return whether the loss has a term that depends on log Z alone, which is the z-loss."""
        return self.z_loss != 0.0


def logsumexp_term(options: LossOptions, logsumexp: Tensor) -> Tensor | None:
    """Return the term of rows' losses that depends on log Z alone, or None without one."""
    return options.z_loss * logsumexp.square() if options.has_logz_term() else None


def checked_options(
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,
) -> LossOptions:
    """Return the options of a loss over labels that a user gave; raise for bad ones."""
    if type(ignore_index) is not int:
        checks.python_int("ignore_index", ignore_index)
    if reduction not in REDUCTIONS:
        checks.choice("reduction", reduction, REDUCTIONS)
    if type(label_smoothing) is not float or label_smoothing != 0.0:
        checks.number("label_smoothing", label_smoothing, low=0.0, high=1.0)
    if type(z_loss) is not float or z_loss != 0.0:
        checks.number("z_loss", z_loss, low=0.0)
    if softcap is not None:
        checks.number("softcap", softcap, low=0.0, open_low=True)
    numbers = float(label_smoothing), float(softcap or 0.0), float(z_loss)
    return LossOptions(ignore_index, *numbers, reduction)


def check_logits(logits: Tensor, target: Tensor | None = None) -> None:
    """Raise unless these are logits `[..., C]` and labels `[...]`."""
    checks.floating("logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"logits: expected shape [..., C] with at least one class, got {list(logits.shape)}"
        )
    if target is not None:
        checks.integer("target", target)
        checks.shape("target", target, logits.shape[:-1], "logits.shape[:-1]")
        checks.device("target", target, logits, "logits")


class RowLosses(NamedTuple):
    """The loss and the statistics of each row, fp32 (fp64 for fp64)."""

    loss: Tensor  # the loss without the z-loss, 0 where the row is ignored, [N, ...]
    logsumexp: Tensor  # log-sum-exp of the soft-capped logits, 0 where the row is ignored, [N, ...]
    maximum: Tensor  # maximum of the soft-capped logits, [N, ...]
    sumexp: Tensor  # sum of exp(logits - maximum), [N, ...]
    total_weight: Tensor  # sum of the target weights q, 0 where the row is ignored, [N, ...]


class TokenStatsRows(NamedTuple):
    """The token statistics of each row, fp32 (fp64 for fp64), and what their gradient needs."""

    logprob: Tensor  # log-probability of the target, 0 where it is ignored, [...]
    logsumexp: Tensor  # log-sum-exp of the soft-capped logits over the temperature, [...]
    entropy: Tensor  # entropy of the distribution, [...]
    argmax: Tensor  # the most probable class, int64, [...]
    maximum: Tensor  # maximum of the soft-capped logits, [...]
    sumexp: Tensor  # sum of exp((logits - maximum) / temperature), [...]


def valid_targets(target: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return labels that are safe to index with, and masks of the rows.

    Returns:
        The labels, 0 where the given label is no class or is ignored; where labels are not ignored;
        and where they are neither a class nor ignored.
    """
    target = target.long()  # The bounds would wrap in a narrow dtype.
    is_class = (target >= 0) & (target < classes)
    not_ignored = target != ignore_index
    return torch.where(is_class & not_ignored, target, 0), not_ignored, not_ignored & ~is_class


def mean_denominators(
    target: Tensor, weight: Tensor | None, classes: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the denominators of the mean loss and of the mean z-loss over labels, `[]` each.

    These are the sum of the class weights of the labels that are not ignored, and the number of
    these labels.
    """
    num_labels = (target.long() != ignore_index).sum()
    if weight is None or classes == 0:
        return num_labels, num_labels
    labels, not_ignored, _ = valid_targets(target, classes, ignore_index)
    label_weights = torch.where(not_ignored, weight[labels], 0)
    return label_weights.sum(dtype=acc_dtype(weight.dtype)), num_labels


def reduce_losses(
    loss: Tensor,
    z: Tensor | None,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """Reduce the losses of the rows and their z-losses `z` to one result."""
    if reduction != "mean":
        loss = loss if z is None else loss + z
        return loss if reduction == "none" else loss.sum()
    divisors: tuple[Tensor | int, Tensor | int] = (loss.numel(), loss.numel())
    if not target.is_floating_point():
        divisors = mean_denominators(target, weight, classes, ignore_index)
    mean = loss.sum() / divisors[0]
    return mean if z is None else mean + z.sum() / divisors[1]


def torch_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    all_labels: Tensor,
) -> Tensor:
    """Return the loss by PyTorch's function; an error names the place among all labels."""
    try:
        return F.cross_entropy(
            logits,
            labels,
            weight,
            ignore_index=options.ignore_index,
            reduction=options.reduction,
            label_smoothing=options.label_smoothing,
        )
    except IndexError:
        checks.labels("target", all_labels, logits.shape[1], options.ignore_index)
        raise


def mean_shares(
    target: Tensor,
    class_weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    classes: int,
    mean: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Return the denominators of a loss and of its z-loss, `[2]`.

    They are ones for a sum, or the denominator `[]` that the caller gives.
    """
    if denominator is not None:
        return denominator.to(dtype).expand(2)
    if not mean:
        return torch.ones(2, dtype=dtype, device=target.device)
    if target.is_floating_point():
        num_rows = math.prod((target.shape[0], *target.shape[2:]))
        return torch.full((2,), num_rows, dtype=dtype, device=target.device)
    divisors = mean_denominators(target, class_weight, classes, ignore_index)
    return torch.stack([each.to(dtype) for each in divisors])
