"""Lengths as users give them, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from . import _checks

Lengths = Tensor | Sequence[int] | int


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; a GPU is not waited for."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)  # to the CPU it has to wait


def lengths_of(name: str, value: Lengths, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`[N]` int64 as it came, and on the device."""
    if isinstance(value, Integral):
        value = [int(value)]
    if not isinstance(value, Tensor):
        try:
            numbers = list(value)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"{name}: expected a Tensor or a sequence of integers, got {type(value).__name__}") from None
        value = torch.tensor(numbers, dtype=None if numbers else torch.int64, device="cpu")
    _checks.integer(name, value)
    _checks.shape(name, value.reshape(-1), [count], "[N]")
    value = value.reshape(-1).long().contiguous()
    return value, moved(value, device)
