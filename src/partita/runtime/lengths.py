"""Lengths of sequences: from what users give to int64 tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor

from . import checks

Lengths = Tensor | Sequence[int] | int

# CUDA takes up to 64 KB from ordinary memory without waiting for the copy. Pinned memory costs more
# host time.
UNPINNED_WORDS = 4096


def on_device(device: torch.device, *rows: Tensor) -> list[Tensor]:
    """Return 64-bit tensors `[N]` on a device, copied from the CPU to a GPU in one transfer.

    The host does not wait for a GPU.
    """
    on_host = [row for row in rows if row.is_cpu]
    if device.type != "cuda" or not on_host:
        return [row.to(device) for row in rows]  # a copy to the CPU has to wait
    words = len(on_host) * rows[0].shape[0]
    pinned = words > UNPINNED_WORDS or torch.cuda.is_current_stream_capturing()
    copies = iter(copy_together(on_host, device, pinned))
    return [next(copies) if row.is_cpu else row.to(device) for row in rows]


def copy_together(rows: Sequence[Tensor], device: torch.device, pinned: bool) -> list[Tensor]:
    """Copy 64-bit tensors `[N]` from the CPU to a device in one transfer.

    Each copy starts on 16 bytes, so that kernels are compiled for aligned pointers.
    """
    N = len(rows[0])
    # One more word follows an odd number of them; nothing reads it.
    words = torch.cat([part for row in rows for part in (row, row[:1])] if N % 2 else list(rows))
    if pinned:
        words = words.pin_memory()
    words = words.to(device, non_blocking=True)
    return [words.narrow(0, i * (N + N % 2), N) for i in range(len(rows))]


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
        try:
            value = torch.tensor(numbers, dtype=None if numbers else torch.int64, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name}: expected integers, got {numbers!r:.60}") from None
    checks.integer(name, value)
    checks.shape(name, value.reshape(-1), [N], "[N]")
    return value.reshape(-1).long().contiguous()


def lengths_on_device(
    name: str, value: Lengths, N: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the lengths as int64 `[N]`, first where the user has them, then on the device."""
    lengths = as_lengths(name, value, N)
    return lengths, on_device(device, lengths)[0]
