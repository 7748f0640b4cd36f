"""Checks of arguments, and what they say."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(value).__name__}")


def floating(name: str, value: Any) -> None:
    tensor(name, value)
    if not value.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {value.dtype}")


def integer(name: str, value: Any) -> None:
    tensor(name, value)
    if value.dtype not in INTEGERS:
        raise TypeError(f"{name}: expected an integer dtype, got {value.dtype}")


def shape(name: str, value: Tensor, expected: Sequence[int], meaning: str) -> None:
    if tuple(value.shape) != tuple(expected):
        raise ValueError(
            f"{name}: expected shape {meaning} = {list(expected)}, got {list(value.shape)}"
        )


def device(name: str, value: Tensor, other: Tensor, other_name: str) -> None:
    if value.device != other.device:
        raise ValueError(
            f"{name}: expected the device of {other_name}, {other.device}, got {value.device}"
        )


def python_int(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")


def dimension(name: str, dim: Any, ndim: int) -> int:
    """`dim` counted from the front."""
    python_int(name, dim)
    size = max(ndim, 1)
    if not -size <= dim < size:
        raise IndexError(f"{name}: expected a dimension from {-size} to {size - 1}, got {dim}")
    return dim % size


def choice(name: str, value: Any, among: Sequence[str]) -> None:
    if value not in among:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, among))}, got {value!r}")


def number(
    name: str, value: Any, *, low: float, high: float = float("inf"), open_low: bool = False
) -> None:
    """A finite number from `low` to `high`, `low` itself left out where `open_low`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    inside = (low < value if open_low else low <= value) and value <= high and value != float("inf")
    if not inside:
        bounds = f"above {low}" if open_low else f"of at least {low}"
        raise ValueError(
            f"{name}: expected a number {bounds}{'' if high == float('inf') else f' and at most {high}'}, got {value}"
        )


def should_check_values(where: torch.device) -> bool:
    """Whether the values inside tensors on this device are checked: see `PARTITA_CHECK`. A compiler cannot look at them; the op that it calls does."""
    if torch.compiler.is_compiling():
        return False
    setting = os.environ.get("PARTITA_CHECK", "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"PARTITA_CHECK: expected 0, 1 or nothing, got {setting!r}")
    if setting == "1" and where.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "PARTITA_CHECK=1 reads tensors on the host, which a CUDA graph capture does not allow: unset it to capture"
        )
    return where.type == "cpu" if setting == "" else setting == "1"


def first_index(bad: Tensor) -> tuple[int, ...] | None:
    """Where the first of them is, or None where there is none; waits for the device."""
    return tuple(bad.nonzero()[0].tolist()) if bool(bad.any()) else None


def labels(name: str, value: Tensor, classes: int, ignore_index: int) -> None:
    """Every label is a class or `ignore_index`; else `IndexError` names the first that is not, and its place."""
    if value.is_meta or not should_check_values(value.device):
        return
    value = value.long()  # a narrow type would wrap the bounds
    bad = ((value < 0) | (value >= classes)) & (value != ignore_index)
    if (place := first_index(bad)) is not None:
        raise IndexError(
            f"{name}: expected labels from 0 to {classes - 1} (or ignore_index {ignore_index}), got {int(value[place])} at {list(place)}"
        )


def within(name: str, value: Tensor, low: int, high: int, meaning: str) -> None:
    """Every number is in range; else `ValueError` names the first that is not, and its place."""
    if value.is_meta or not should_check_values(value.device):
        return
    value = value.long()  # a narrow type would wrap the bounds
    if (place := first_index((value < low) | (value > high))) is not None:
        raise ValueError(
            f"{name}: expected {meaning} from {low} to {high}, got {int(value[place])} at {list(place)}"
        )


def blank(value: object, classes: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or not 0 <= value < classes:  # type: ignore[operator]
        raise ValueError(f"blank: expected a class from 0 to {classes - 1}, got {value!r}")


REDUCTIONS = ("none", "mean", "sum")
