"""What a case is: an op at one size, what is timed of it, and how a result is judged."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..cli.console import DTYPES
from .measure import Step, Timing, time_steps
from .providers import Function, Provider

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
GPU_LOGITS = 2**28
CPU_LOGITS = 2**20


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    Fields:
        dtypes, columns: of the cases; none for those that each op has by default.
        elements: of the logits, in every case, and the most that the scores of chains have; None for what suits the device.
        quick: fewer sizes.
        sweep: time the sweep over narrow widths.
        repetitions: of each measurement.
        device: where it runs.
    """

    dtypes: tuple[torch.dtype, ...]
    columns: tuple[int, ...]
    elements: int | None
    quick: bool
    sweep: bool
    repetitions: int
    device: torch.device

    @property
    def logits(self) -> int:
        """How many, in every case."""
        return self.elements or (GPU_LOGITS if self.device.type == "cuda" else CPU_LOGITS)

    def rows(self, columns: int) -> int:
        """So many have as many logits as asked for."""
        return max(1, self.logits // columns)

    def types(self, *default: torch.dtype) -> tuple[torch.dtype, ...]:
        return self.dtypes or default or (torch.float32, torch.bfloat16)

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

    def normal(self, use: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape)
        flat = self._flat.get((use, dtype))
        if flat is None or flat.numel() < size:
            for key in [key for key in self._flat if key[0] == use]:
                del self._flat[key]
            flat = self._flat[use, dtype] = torch.randn(
                size, device=self.device, generator=self._generator, dtype=dtype
            )
        return flat[:size].view(shape)

    def labels(self, rows: int, classes: int) -> Tensor:
        return torch.randint(classes, (rows,), device=self.device, generator=self._generator)


@dataclass(frozen=True)
class Loop:
    """Steps that are timed one after another, again and again; `before` runs untimed ahead of each round."""

    steps: tuple[Step, ...]
    before: Callable[[], None]


@dataclass(frozen=True)
class Verdict:
    """The worst element of a result: its error and what is allowed, in the unit of the case; its place, its value, and the true one."""

    error: float
    allowed: float
    index: tuple[int, ...]
    got: float
    expected: float

    @property
    def wrong(self) -> bool:
        return not self.error <= self.allowed


@dataclass(frozen=True)
class Case(ABC):
    """An op at one size."""

    op: str
    dtype: torch.dtype

    sizes: ClassVar[tuple[str, ...]]  # what names the dimensions of its scores, each an attribute
    varying: ClassVar[tuple[str, ...]]  # those by which the lines of a table differ
    scores: ClassVar[str]  # what they are called
    unit: ClassVar[str] = ""  # of the errors, where these are no plain numbers
    without: ClassVar[tuple[str, ...]] = ("naive",)  # the providers that are not taken here
    label: ClassVar[str] = ""  # tells apart cases of an op that are not to be put into one table
    versus: ClassVar[str] = ""  # the provider whose times the others are compared with
    yardstick: ClassVar[str] = (
        ""  # the provider whose times are the unit of the others', and whose results are not judged
    )
    memory_of: ClassVar[str] = "total"  # the part whose memory is measured
    caption: ClassVar[str] = (
        ""  # of the picture of its times; none for those that have no such picture
    )

    def size(self, names: Sequence[str]) -> str:
        return " × ".join(f"{getattr(self, name):,}" for name in names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the scores."""
        return tuple(getattr(self, name) for name in self.sizes)

    @property
    def bytes(self) -> int:
        """Of the scores."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    @abstractmethod
    def moves(self) -> Mapping[str, Moves]:
        """For each part that has a limit. The order is that of the report; parts that are timed and not named here have none."""

    @abstractmethod
    def inputs(self, buffers: Buffers) -> Any:
        """What the functions are called with."""

    @abstractmethod
    def standard(self, inputs: Any) -> Any:
        """What the results of every provider are held to."""

    @abstractmethod
    def verdicts(
        self, function: Function, inputs: Any, provider: Provider, standard: Any
    ) -> Iterator[Verdict]:
        """On each result and gradient, against fp64."""

    @abstractmethod
    def loops(self, function: Function, inputs: Any, provider: Provider) -> Sequence[Loop]:
        """What is timed."""

    def times(
        self,
        function: Function,
        inputs: Any,
        provider: Provider,
        device: torch.device,
        repetitions: int,
    ) -> dict[str, Timing]:
        result: dict[str, Timing] = {}
        for loop in self.loops(function, inputs, provider):
            result |= time_steps(loop.steps, device, before=loop.before, repetitions=repetitions)
            loop.before()
        return result

    def extra_memory(
        self, function: Function, inputs: Any, provider: Provider, device: torch.device
    ) -> int | None:
        """Peak bytes beyond the inputs; None where that is not asked."""
        return None

    def __str__(self) -> str:
        return f"{self.op} {DTYPE_NAMES[self.dtype]} {self.size(self.sizes)}"


def poison(like: Tensor) -> None:
    """Leave NaN in the memory that the next tensor of this size gets, so that what a kernel does not write is seen."""
    torch.full_like(like, torch.nan)
