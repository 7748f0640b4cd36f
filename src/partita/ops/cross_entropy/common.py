"""What the reference and the kernels of cross-entropy agree on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class OnePass(NamedTuple):
    loss: Tensor  # []
    grad: Tensor  # [N, C, ...]


class RowLosses(NamedTuple):
    loss: Tensor  # [N, ...], at least fp32, 0 where ignored
    logsumexp: Tensor  # [N, ...], 0 where ignored
    maximum: Tensor  # [N, ...]
    sumexp: Tensor  # [N, ...], sum of exp(logits - maximum)
    total_weight: Tensor  # [N, ...], sum of q, 0 where ignored


def valid_targets(target: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Labels that are safe to index with, and where they are kept (not ignored) and where they are wrong."""
    target = target.long()  # a narrow type would wrap the bounds
    inside = (target >= 0) & (target < classes)
    kept = target != ignore_index
    return torch.where(inside & kept, target, 0), kept, kept & ~inside
