"""Distillation losses in plain PyTorch and fp64, term by term."""

from typing import Any

from torch import Tensor

from partita.testing.samples import in_torch
from partita.testing.samples.rows import TERMS as WEIGHTS


def terms(logits: Tensor, teacher: Tensor, target: Tensor, **options: Any) -> dict[str, Tensor]:
    """Return the terms of each row."""
    options = {"weights": WEIGHTS, "reduction": "none", **options}
    _, *found = in_torch.distillation(logits.double(), teacher.double(), target, **options)
    return dict(zip(WEIGHTS, found, strict=True))


def mean_loss(
    logits: Tensor, teacher: Tensor, target: Tensor, weights: Any = WEIGHTS, **options: Any
) -> Tensor:
    """Return the weighted sum of the means over rows whose label is not ignored."""
    options = {"weights": weights, **options}
    (loss,) = in_torch.distillation(logits.double(), teacher.double(), target, **options)
    return loss
