"""Lengths as users give them, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import _checks

Lengths = Tensor | Sequence[int] | int


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without waiting for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def lengths_of(name: str, value: Lengths, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`[N]` int64 as it came, and on the device."""
    if isinstance(value, int):
        value = [value]
    if not isinstance(value, Tensor):
        value = torch.tensor(list(value), dtype=torch.int64)
    _checks.integer(name, value)
    _checks.shape(name, value.reshape(-1), [count], "[N]")
    value = value.reshape(-1).long()
    return value, moved(value, device)
