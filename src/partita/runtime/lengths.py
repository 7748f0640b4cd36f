"""Lengths of sequences: from what users give to int64 tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from . import checks
from .sizes import holds, same_sizes

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
    copied = copy_together(on_host, device, pinned)
    if len(copied) == len(rows):
        return copied
    copies = iter(copied)
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


def steps_first(emissions: Any, batch_first: bool) -> Tensor:
    """Return emissions as `[T, N, C]`, or raise for a wrong dtype or shape."""
    checks.floating("emissions", emissions)
    if emissions.ndim != 3 or not holds(emissions.shape[1 if batch_first else 0] >= 1):
        raise ValueError(
            f"emissions: expected shape {_layout(batch_first)} with T of at least 1,"
            f" got {list(emissions.shape)}"
        )
    return emissions.transpose(0, 1) if batch_first else emissions


def end_of_chains(name: str, end: Tensor, emissions: Tensor) -> Tensor:
    """Return numbers of the first or last states, `[C]` or `[N, C]`, as `[N, C]`.

    A wrong dtype, shape or device raises.
    """
    checks.floating(name, end)
    checks.device(name, end, emissions, "emissions")
    N, C = emissions.shape[1:]
    if not same_sizes(end.shape, (C,) if end.ndim == 1 else (N, C)):
        raise ValueError(
            f"{name}: expected shape [C] or [N, C] with [N, C] = {[N, C]}, got {list(end.shape)}"
        )
    return end.expand(N, C)


def lengths_of_chains(
    emissions: Tensor, lengths: Lengths | None, mask: Tensor | None, batch_first: bool, unit: str
) -> Tensor | None:
    """Return the lengths of sequences, `[N]` on the device of the emissions; None for T of each.

    Args:
        emissions: `[T, N, C]`.
        lengths: `[N]`, 1 to T, or None.
        mask: `[T, N]` bool instead of lengths, True for a prefix of each sequence; or None.
        batch_first: whether the mask is `[N, T]`, as the user's emissions are `[N, T, C]`.
        unit: what a sequence consists of, in messages.
    """
    T, N, _ = emissions.shape
    if mask is None:
        if lengths is None:
            return None
        try:
            found = lengths_on_device("lengths", lengths, N, emissions.device)[1]
        except ValueError as error:
            is_other = T != N and isinstance(lengths, Sized) and len(lengths) == T
            raise ValueError(f"{error}{_other_layout(batch_first, is_other)}") from None
        checks.within("lengths", found, 1, T, f"{unit}s")
        return found
    if lengths is not None:
        raise TypeError("mask: expected either lengths or a mask, got both")
    checks.tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask: expected dtype torch.bool, got {mask.dtype}")
    shape, meaning = ((N, T), "[N, T]") if batch_first else ((T, N), "[T, N]")
    try:
        checks.shape("mask", mask, shape, f"{meaning} of emissions")
    except ValueError as error:
        is_other = tuple(mask.shape) == shape[::-1]
        raise ValueError(f"{error}{_other_layout(batch_first, is_other)}") from None
    checks.device("mask", mask, emissions, "emissions")
    steps = mask.mT if batch_first else mask
    hole = steps[1:] & ~steps[:-1]
    if checks.can_check_values(mask):
        if (index := checks.first_index(hole.mT)) is not None:
            n, t = index[0], index[1] + 1
            is_other = bool(steps[:, 0].all()) and not bool((steps[:, 1:] & ~steps[:, :-1]).any())
            raise ValueError(
                f"mask: expected a prefix of each sequence, got a {unit} at"
                f" {[n, t] if batch_first else [t, n]} after one that is left out"
                f"{_other_layout(batch_first, is_other)}"
            )
        if (index := checks.first_index(~steps[0])) is not None:
            raise ValueError(
                f"mask: expected at least one {unit} in each sequence, got none in {index[0]}"
            )
    return torch.where(hole.any(0), -1, steps.sum(0))


def _layout(batch_first: bool) -> str:
    return "[N, T, C]" if batch_first else "[T, N, C]"


def _other_layout(batch_first: bool, is_meant: bool) -> str:
    """Return the end of a message to a user who seems to mean the other layout, or nothing."""
    if not is_meant:
        return ""
    return (
        f"; emissions is {_layout(batch_first)}, and batch_first={not batch_first} takes"
        f" {_layout(not batch_first)}"
    )
