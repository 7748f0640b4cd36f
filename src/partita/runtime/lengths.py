"""Lengths as users give them, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from . import checks

Lengths = Tensor | Sequence[int] | int


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; a GPU is not waited for."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)  # to the CPU it has to wait


def to_device_together(device: torch.device, *tensors: Tensor) -> Sequence[Tensor]:
    """Several `[N]` of 64 bits on a device: in one copy where all have to go from the CPU to a GPU."""
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        return [to_device(tensor, device) for tensor in tensors]
    count = len(tensors[0])
    odd = (
        [torch.nn.functional.pad(tensor, (0, 1)) for tensor in tensors] if count % 2 else tensors
    )  # each starts on 16 bytes
    rows = to_device(torch.stack(tuple(odd)), device).unbind()
    return [row[:count] for row in rows] if count % 2 else rows


def as_lengths(name: str, value: Lengths, count: int) -> Tensor:
    """`[N]` int64, where it came from."""
    if isinstance(value, Integral):
        value = [int(value)]
    if not isinstance(value, Tensor):
        try:
            numbers = list(value)  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(
                f"{name}: expected a Tensor or a sequence of integers, got {type(value).__name__}"
            ) from None
        value = torch.tensor(numbers, dtype=None if numbers else torch.int64, device="cpu")
    checks.integer(name, value)
    checks.shape(name, value.reshape(-1), [count], "[N]")
    return value.reshape(-1).long().contiguous()


def lengths_on_device(
    name: str, value: Lengths, count: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """`[N]` int64 as it came, and on the device."""
    came = as_lengths(name, value, count)
    return came, to_device(came, device)
