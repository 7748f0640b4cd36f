"""Lengths of sequences: from what users give to int64 tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from . import checks

Lengths = Tensor | Sequence[int] | int


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy the tensor to a device. The host does not wait for a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)  # a copy to the CPU has to wait


def to_device_together(device: torch.device, *tensors: Tensor) -> Sequence[Tensor]:
    """Copy several 64-bit tensors `[N]` to a device, from the CPU to a GPU in one transfer."""
    if device.type != "cuda" or any(tensor.device.type != "cpu" for tensor in tensors):
        return [to_device(tensor, device) for tensor in tensors]
    N = len(tensors[0])
    if N % 2 == 0:
        return to_device(torch.stack(tensors), device).unbind()
    # Each row starts on 16 bytes, so that kernels are compiled for aligned pointers.
    padded = [torch.nn.functional.pad(tensor, (0, 1)) for tensor in tensors]
    return [row[:N] for row in to_device(torch.stack(padded), device).unbind()]


def as_lengths(name: str, value: Lengths, N: int) -> Tensor:
    """Return the lengths as int64 `[N]` on the device that they are on."""
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
    checks.shape(name, value.reshape(-1), [N], "[N]")
    return value.reshape(-1).long().contiguous()


def lengths_on_device(
    name: str, value: Lengths, N: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the lengths as int64 `[N]`, first where the user has them, then on the device."""
    lengths = as_lengths(name, value, N)
    return lengths, to_device(lengths, device)
