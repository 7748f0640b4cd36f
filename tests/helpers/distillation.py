"""Distillation losses in plain PyTorch, term by term."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHTS = {"hard": 0.3, "kl": 0.2, "reverse_kl": 0.7, "jsd": 0.4, "tv": 0.6}


def terms(
    logits: Tensor,
    teacher: Tensor,
    target: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> dict[str, Tensor]:
    """Return the terms of each row from sums over its classes, in fp64."""
    x, t = (
        each if softcap is None else softcap * torch.tanh(each / softcap)
        for each in (logits.double(), teacher.detach().double())
    )
    p, q = (x / temperature).softmax(-1), (t / temperature).softmax(-1)
    m = beta * q + (1 - beta) * p

    def kl(first: Tensor, second: Tensor) -> Tensor:
        return (first * (first / second).log()).sum(-1)

    return {
        "hard": F.cross_entropy(x, target.long(), reduction="none"),
        "kl": kl(q, p),
        "reverse_kl": kl(p, q),
        "jsd": beta * kl(q, m) + (1 - beta) * kl(p, m),
        "tv": (p - q).abs().sum(-1) / 2,
    }


def mean_loss(
    logits: Tensor, teacher: Tensor, target: Tensor, weights: Any = None, **options: Any
) -> Tensor:
    """Return the weighted sum of the means over rows whose label is not ignored."""
    counts = target != -100
    found = terms(logits[counts], teacher[counts], target[counts], **options)
    loss: Any = sum(weight * found[name].mean() for name, weight in (weights or WEIGHTS).items())
    return loss
