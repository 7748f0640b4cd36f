"""Cases: an op at one size, what is timed of it, and how its results are judged."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..cli.console import DTYPES
from .measure import Step, Timing, peak_extra_memory, time_steps
from .providers import Function, Provider

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
GPU_LOGITS = 2**28
CPU_LOGITS = 2**20
SLOW_REPETITIONS = 3


@dataclass(frozen=True)
class Settings:
    """The choices of the user.

    Fields:
        dtypes, columns: the dtypes and widths of the cases; empty for the defaults of each op.
        elements: the number of logits of a case, and the limit for scores of chains; None for the
            default of the device.
        quick: whether there are fewer sizes.
        sweep: whether the sweep over narrow widths is timed.
        repetitions: the number of repetitions of each measurement.
        device: the device.
        do_bench: whether of softmax the sweep alone is timed, by Triton's `do_bench`.
    """

    dtypes: tuple[torch.dtype, ...]
    columns: tuple[int, ...]
    elements: int | None
    quick: bool
    sweep: bool
    repetitions: int
    device: torch.device
    do_bench: bool = False

    @property
    def logits(self) -> int:
        """Return the number of logits of a case."""
        return self.elements or (GPU_LOGITS if self.device.type == "cuda" else CPU_LOGITS)

    def rows(self, columns: int) -> int:
        """Return the number of rows that makes the number of logits."""
        return max(1, self.logits // columns)

    def types(self, *default: torch.dtype) -> tuple[torch.dtype, ...]:
        return self.dtypes or default or (torch.float32, torch.bfloat16)

    def widths(self, full: Sequence[int], quick: Sequence[int]) -> Sequence[int]:
        return self.columns or (quick if self.quick else full)


@dataclass(frozen=True)
class Moves:
    """The fewest bytes that a part of the work must move.

    Fields:
        bytes: the bytes.
        limit: the bandwidth that bounds them, `copy` or `read`.
    """

    bytes: int
    limit: str


class Buffers:
    """Random numbers, drawn once for each use and dtype, and viewed in the shape of each case."""

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
    """Steps that are timed one after another; `before` runs untimed before each round."""

    steps: tuple[Step, ...]
    before: Callable[[], None]


@dataclass(frozen=True)
class Verdict:
    """The worst element of a result.

    Fields:
        error, allowed: its error and the bound, in the unit of the case.
        index: its index.
        got, expected: its value and the true value.
    """

    error: float
    allowed: float
    index: tuple[int, ...]
    got: float
    expected: float

    @property
    def failed(self) -> bool:
        """Return whether the error exceeds the bound; NaN does."""
        return not self.error <= self.allowed


@dataclass(frozen=True)
class Case(ABC):
    """An op at one size."""

    op: str
    dtype: torch.dtype

    sizes: ClassVar[tuple[str, ...]]  # the attributes that are the dimensions of the scores
    varying: ClassVar[tuple[str, ...]]  # the sizes by which the lines of a table differ
    scores: ClassVar[str]  # the name of the scores
    unit: ClassVar[str] = ""  # the unit of the errors; empty for plain numbers
    without: ClassVar[tuple[str, ...]] = ("naive",)  # the providers that are left out
    label: ClassVar[str] = ""  # separates cases of one op into tables of their own
    versus: ClassVar[str] = ""  # the provider that the others are compared with
    # The times of the yardstick are the unit of the others. Its results are not judged.
    yardstick: ClassVar[str] = ""
    memory_of: ClassVar[str] = "total"  # the part whose memory is measured
    caption: ClassVar[str] = ""  # the title of the picture of the times; empty for no picture

    def size(self, names: Sequence[str]) -> str:
        return " × ".join(f"{getattr(self, name):,}" for name in names)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the scores."""
        return tuple(getattr(self, name) for name in self.sizes)

    @property
    def bytes(self) -> int:
        """Return the bytes of the scores."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    @abstractmethod
    def moves(self) -> Mapping[str, Moves]:
        """Return the bytes of each part that has a limit, in the order of the report."""

    @abstractmethod
    def inputs(self, buffers: Buffers) -> Any:
        """Return the inputs of the functions."""

    @abstractmethod
    def standard(self, inputs: Any) -> Any:
        """Return the truth that the results of all providers are compared with."""

    @abstractmethod
    def verdicts(
        self, function: Function, inputs: Any, provider: Provider, standard: Any
    ) -> Iterator[Verdict]:
        """Yield a verdict on each result and gradient against fp64."""

    @abstractmethod
    def loops(self, function: Function, inputs: Any, provider: Provider) -> Sequence[Loop]:
        """Return the loops that are timed."""

    def is_slow(self, provider: Provider, device: torch.device) -> bool:
        """Return whether a provider takes so long that its loops are repeated less often."""
        return False

    def times(
        self,
        function: Function,
        inputs: Any,
        provider: Provider,
        device: torch.device,
        repetitions: int,
    ) -> dict[str, Timing]:
        if self.is_slow(provider, device):
            repetitions = min(repetitions, SLOW_REPETITIONS)
        result: dict[str, Timing] = {}
        for loop in self.loops(function, inputs, provider):
            result |= time_steps(loop.steps, device, before=loop.before, repetitions=repetitions)
            loop.before()
        return result

    def extra_memory(
        self, function: Function, inputs: Any, provider: Provider, device: torch.device
    ) -> int | None:
        """Return the peak bytes beyond the inputs; None where they are not measured."""
        return None

    def __str__(self) -> str:
        return f"{self.op} {DTYPE_NAMES[self.dtype]} {self.size(self.sizes)}"


class TrainedCase(Case):
    """A case that is timed without gradients, and with them forward and backward."""

    @abstractmethod
    def training(self, function: Function, inputs: Any) -> Loop:
        """Return the loop of a training step."""

    def loops(self, function: Function, inputs: Any, provider: Provider) -> Sequence[Loop]:
        return [
            Loop((("inference", lambda: function(*inputs)),), lambda: None),
            self.training(function, inputs),
        ]

    def extra_memory(
        self, function: Function, inputs: Any, provider: Provider, device: torch.device
    ) -> int | None:
        loop = self.training(function, inputs)
        return peak_extra_memory(loop.steps, device, before=loop.before)


def training_loop(
    function: Function,
    inputs: Sequence[Tensor],
    others: Sequence[Any],
    upstream: Tensor | None = None,
) -> Loop:
    """Return the loop of `function(*inputs, *others)` and the gradients of the inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    state: dict[str, Any] = {}

    def forward() -> None:
        state["result"] = function(*leaves, *others)

    def backward() -> None:
        state["gradients"] = torch.autograd.grad(state.pop("result"), leaves, upstream)

    return Loop((("forward", forward), ("backward", backward)), state.clear)


def poison(like: Tensor) -> None:
    """Leave NaN in the memory that the next tensor of this size gets, to show missing writes."""
    torch.full_like(like, torch.nan)
