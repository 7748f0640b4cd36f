"""Checks of arguments, whose messages name the argument, what was expected and what was given."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .autograd import is_batched, is_traced
from .sizes import same_sizes

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
REDUCTIONS = ("none", "mean", "sum")
NOTHING_IGNORED = -(2**63)  # the lowest number of int64, a label that nobody gives


def tensor(name: str, value: Any) -> None:
    """Raise `TypeError` unless the value is a dense tensor of one device."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(value).__name__}")
    if value.is_nested or value.layout is not torch.strided:
        raise TypeError(
            f"{name}: expected a dense Tensor, got a nested one"
            if value.is_nested
            else f"{name}: expected a dense Tensor, got one of layout {value.layout}"
        )
    if type(value) in (Tensor, torch.nn.Parameter):
        return
    if isinstance(value, torch.masked.MaskedTensor):
        raise TypeError(f"{name}: expected a dense Tensor, got a MaskedTensor")
    if hasattr(value, "device_mesh"):
        raise TypeError(
            f"{name}: expected a plain Tensor, got a DTensor; functions of partita.parallel take a"
            " vocabulary that lies on several ranks"
        )


def floating(name: str, value: Any) -> None:
    """Raise `TypeError` unless the value is a dense tensor of a dtype in `FLOATING`."""
    tensor(name, value)
    if value.dtype not in FLOATING:
        expected = "float16, bfloat16, float32 or float64" if value.is_floating_point() else ""
        raise TypeError(f"{name}: expected {expected or 'a floating dtype'}, got {value.dtype}")


def integer(name: str, value: Any) -> None:
    """Raise `TypeError` unless the value is a dense tensor of an integer dtype."""
    tensor(name, value)
    if value.dtype not in INTEGERS:
        raise TypeError(f"{name}: expected an integer dtype, got {value.dtype}")


def shape(name: str, value: Tensor, expected: Sequence[int], meaning: str) -> None:
    """Raise `ValueError` unless the tensor has the expected shape, named by `meaning`."""
    if not same_sizes(value.shape, expected):
        raise ValueError(
            f"{name}: expected shape {meaning} = {list(expected)}, got {list(value.shape)}"
        )


def last_sizes(name: str, value: Tensor, expected: Sequence[int], meaning: str) -> None:
    """Raise `ValueError` unless the last sizes of the tensor are as expected."""
    if not same_sizes(value.shape[-len(expected) :], expected):
        raise ValueError(
            f"{name}: expected shape [..., {meaning}] with [{meaning}] = {list(expected)},"
            f" got {list(value.shape)}"
        )


def device(name: str, value: Tensor, other: Tensor, other_name: str) -> None:
    """Raise `ValueError` unless the tensor is on the device of the other tensor."""
    if value.device != other.device:
        raise ValueError(
            f"{name}: expected the device of {other_name}, {other.device}, got {value.device}"
        )


def python_int(name: str, value: Any) -> None:
    """Raise `TypeError` unless the value is an integer; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")


def python_ints(name: str, values: Any) -> Sequence[int]:
    """Return a sequence of integers, or raise `TypeError`; a tensor becomes a list."""
    if isinstance(values, Tensor):
        values = values.tolist()
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name}: expected a sequence of integers, got {type(values).__name__}")
    for value in values:
        python_int(name, value)
    return values


def dimension(name: str, dim: Any, ndim: int) -> int:
    """Return the index of a dimension counted from the front, or raise `IndexError`."""
    python_int(name, dim)
    size = max(ndim, 1)
    if not -size <= dim < size:
        raise IndexError(f"{name}: expected a dimension from {-size} to {size - 1}, got {dim}")
    return dim % size


def choice(name: str, value: Any, among: Sequence[str]) -> None:
    """Raise `ValueError` unless the value is one of the names."""
    if value not in among:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, among))}, got {value!r}")


def number(
    name: str, value: Any, *, low: float, high: float = float("inf"), open_low: bool = False
) -> None:
    """Raise unless the value is a finite number from `low` to `high`.

    With `open_low` the bound `low` itself is excluded.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    inside = (low < value if open_low else low <= value) and value <= high and value != float("inf")
    if not inside:
        lower = f"above {low}" if open_low else f"of at least {low}"
        upper = "" if high == float("inf") else f" and at most {high}"
        raise ValueError(f"{name}: expected a number {lower}{upper}, got {value}")


def at_least(name: str, value: Any, least: int) -> None:
    """Raise unless the value is an integer of at least this size."""
    python_int(name, value)
    if value < least:
        raise ValueError(f"{name}: expected a number of at least {least}, got {value}")


def temperature_and_softcap(temperature: Any, softcap: Any) -> tuple[float, float]:
    """Return the numbers as the ops take them, no soft-capping as 0; raise for bad ones."""
    number("temperature", temperature, low=0.0, open_low=True)
    if softcap is not None:
        number("softcap", softcap, low=0.0, open_low=True)
    return float(temperature), float(softcap or 0.0)


def generator(name: str, value: Any, where: torch.device) -> None:
    """Raise unless the value is None or a generator of random numbers on a device of this type."""
    if value is None:
        return
    if not isinstance(value, torch.Generator):
        raise TypeError(f"{name}: expected a torch.Generator or None, got {type(value).__name__}")
    if value.device.type != where.type:
        raise ValueError(f"{name}: expected a generator on {where}, got one on {value.device}")


def variable(name: str) -> bool | None:
    """Return whether a variable of the environment is 1, None where it is not set, or raise."""
    setting = os.environ.get(name, "")
    if setting not in ("", "0", "1"):
        raise ValueError(f"{name}: expected 0, 1 or nothing, got {setting!r}")
    return None if setting == "" else setting == "1"


def should_check_values(where: torch.device) -> bool:
    """Return whether the values inside tensors on this device are checked.

    The variable `PARTITA_CHECK` decides; without it only values on the CPU are checked. A compiler
    cannot look at values while it traces a call, so then the op checks them when it runs.
    """
    if is_traced():
        return False
    setting = variable("PARTITA_CHECK")
    if setting and where.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "PARTITA_CHECK=1 reads tensors on the host, which a CUDA graph capture does not allow:"
            " unset it to capture"
        )
    return where.type == "cpu" if setting is None else setting


def can_check_values(value: Tensor) -> bool:
    """Return whether the values of this tensor are checked here.

    A meta tensor has none. One that `vmap` batches has them where the op runs, which checks them.
    """
    return not value.is_meta and not is_batched(value) and should_check_values(value.device)


def first_index(mask: Tensor) -> tuple[int, ...] | None:
    """Return the index of the first true element, or None if there is none.

    The call waits for the device.
    """
    return tuple(mask.nonzero()[0].tolist()) if bool(mask.any()) else None


def values(
    name: str,
    value: Tensor,
    # low, high: the range, with its ends
    low: int,
    high: int,
    # Tells the range in words. A compiler that traced a text would fix its sizes.
    expected: Callable[[], str],
    *,
    also: int | None = None,  # one more number that is allowed
    never: int | None = None,  # a number of the range that is not allowed
    counts: Tensor | None = None,  # the mask of the numbers that count; all if None
    error: type[Exception] = ValueError,
) -> None:
    """Raise with the first number that is out of its range, where values are checked."""
    if not can_check_values(value) or not value.numel():
        return
    value = value.long()  # a narrow type would wrap the bounds
    if never is None:
        least, greatest = value.aminmax()
        if low <= int(least) and int(greatest) <= high:
            return
    invalid = (value < low) | (value > high)
    if also is not None:
        invalid &= value != also
    if never is not None:
        invalid |= value == never
    if counts is not None:
        invalid &= counts
    if (index := first_index(invalid)) is not None:
        raise error(f"{name}: expected {expected()}, got {int(value[index])} at {list(index)}")


def labels(name: str, value: Tensor, classes: int, ignore_index: int) -> None:
    """Raise `IndexError` with the first label that is neither a class nor `ignore_index`."""

    def expected() -> str:
        if ignore_index == NOTHING_IGNORED:
            return f"classes from 0 to {classes - 1}"
        if classes:
            return f"labels from 0 to {classes - 1} (or ignore_index {ignore_index})"
        return f"no label but ignore_index {ignore_index}, as there are 0 classes"

    values(name, value, 0, classes - 1, expected, also=ignore_index, error=IndexError)


def within(name: str, value: Tensor, low: int, high: int, meaning: str) -> None:
    """Raise `ValueError` with the first number that is not from `low` to `high`."""
    values(name, value, low, high, lambda: f"{meaning} from {low} to {high}")


def target_labels(
    targets: Tensor,  # [N, S], or all labels one after another
    target_lengths: Tensor,  # [N]
    # low, high: the range of labels, with its ends
    low: int,
    high: int,
    *,
    star: int | None = None,  # one more label that is allowed
    blank: int | None = None,  # a label of the range that is not allowed
) -> None:
    """Raise for the first length or label of the targets of sequences that is out of its range."""

    def expected() -> str:
        others = "" if star is None else f" or the star {star}"
        if blank is not None:
            others = f" other than the blank {blank}"
        return f"labels from {low} to {high}{others}"

    size = targets.shape[-1]
    within("target_lengths", target_lengths, 0, size, "labels")
    counts = None
    if targets.ndim == 2:
        counts = torch.arange(size, device=targets.device) < target_lengths[:, None]
    elif (total := int(target_lengths.sum())) != size:
        raise ValueError(
            f"targets: expected as many labels as the sum of target_lengths, {total}, got {size}"
        )
    values(
        "targets",
        targets,
        low,
        high,
        expected,
        also=star,
        never=blank,
        counts=counts,
        error=IndexError,
    )


def blank(value: object, classes: int) -> None:
    """Raise `ValueError` unless the blank is one of the classes."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or not 0 <= value < classes:  # type: ignore[operator]
        raise ValueError(f"blank: expected a class from 0 to {classes - 1}, got {value!r}")
