"""What a case is: an op at one size, what is timed of it, and how a result is judged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..testing import Error, ulp_error
from ..testing.budget import Scale
from .measure import Step, Timing, time_steps
from .providers import Function, Provider

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ELEMENTS_AT_ONCE = 2**24  # of which the truth is computed in fp64


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Fields:
        dtypes, columns: of the cases; no columns for those that each op has by default.
        elements: of the logits, in every case.
        quick: fewer sizes.
        sweep: time the sweep over narrow widths.
        repetitions: of each measurement.
    """

    dtypes: tuple[torch.dtype, ...]
    columns: tuple[int, ...]
    elements: int
    quick: bool
    sweep: bool
    repetitions: int

    def widths(self, full: Sequence[int], quick: Sequence[int]) -> Sequence[int]:
        return self.columns or (quick if self.quick else full)


@dataclass(frozen=True)
class Moves:
    """The fewest bytes that a part of the work must move, and the bandwidth that bounds it: `copy` or `read`."""

    bytes: int
    limit: str


class Buffers:
    """Random numbers, drawn once for each use and dtype, and seen in whatever shape a case has."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def normal(self, use: str, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        size = rows * columns
        flat = self._flat.get((use, dtype))
        if flat is None or flat.numel() < size:
            for key in [key for key in self._flat if key[0] == use]:
                del self._flat[key]
            flat = self._flat[use, dtype] = torch.randn(size, device=self.device, generator=self._generator, dtype=dtype)
        return flat[:size].view(rows, columns)

    def labels(self, rows: int, classes: int) -> Tensor:
        return torch.randint(classes, (rows,), device=self.device, generator=self._generator)


@dataclass(frozen=True)
class Loop:
    """Steps that are timed one after another, again and again; `before` runs untimed ahead of each round."""

    steps: tuple[Step, ...]
    before: Callable[[], None]


@dataclass(frozen=True)
class Case(ABC):
    """An op at one size."""

    op: str
    dtype: torch.dtype
    rows: int
    columns: int

    without: ClassVar[tuple[str, ...]] = ("naive",)  # the providers that are not taken here
    label: ClassVar[str] = ""  # tells apart cases of an op that are not to be put into one table

    @property
    def bytes(self) -> int:
        """Of the logits."""
        return self.rows * self.columns * self.dtype.itemsize

    @property
    @abstractmethod
    def moves(self) -> Mapping[str, Moves]:
        """For each part that has a limit. The order is that of the report; parts that are timed and not named here have none."""

    @abstractmethod
    def inputs(self, buffers: Buffers) -> Any:
        """What the functions are called with."""

    @abstractmethod
    def errors(self, function: Function, inputs: Any, provider: Provider) -> Iterator[Error]:
        """Errors against fp64, one for each result and gradient."""

    @abstractmethod
    def loops(self, function: Function, inputs: Any, provider: Provider) -> Sequence[Loop]:
        """What is timed."""

    def times(self, function: Function, inputs: Any, provider: Provider, device: torch.device, repetitions: int) -> dict[str, Timing]:
        result: dict[str, Timing] = {}
        for loop in self.loops(function, inputs, provider):
            result |= time_steps(loop.steps, device, before=loop.before, repetitions=repetitions)
            loop.before()
        return result

    def extra_memory(self, function: Function, inputs: Any, provider: Provider, device: torch.device) -> int | None:
        """Peak bytes beyond the inputs; None where that is not asked."""
        return None

    def __str__(self) -> str:
        return f"{self.op} {DTYPE_NAMES[self.dtype]} {self.rows:,} × {self.columns:,}"


def poison(like: Tensor) -> None:
    """Leave NaN in the memory that the next tensor of this size gets, so that what a kernel does not write is seen."""
    torch.full_like(like, torch.nan)


def blocks(x: Tensor) -> Iterator[slice]:
    """Rows that fp64 has room for."""
    step = max(1, ELEMENTS_AT_ONCE // x.shape[1])
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def row_error(result: Tensor, truth: Callable[[Tensor, slice], Tensor], x: Tensor, *, scale: Scale = "element") -> Error:
    """The worst error of rows, which are compared with the truth a block at a time.

    Args:
        result: `[rows, ...]`.
        truth: from some rows of `x` in fp64, and which they are, to those of the result.
        x: `[rows, columns]`, the input.
        scale: of `ulp_error`.
    """
    with torch.no_grad():
        return max((ulp_error(result[rows], truth(x[rows].double(), rows), scale=scale) for rows in blocks(x)), key=lambda error: error.ulp)


def divided(elements: int, columns: int) -> int:
    return max(1, elements // columns)
