"""Cases: an op at one size, what is timed of it, and how its results are judged.

A family of ops declares its cases as subclasses: their inputs, how many of these have a gradient,
the fewest bytes that a part must move, and the truth. All else follows here.
"""

from __future__ import annotations

import importlib
import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..cli.console import DTYPES
from ..runtime.backend import is_installed
from .measure import Step, Timing, nothing, peak_extra_memory, time_steps

Function = Callable[..., Any]
Load = Callable[[], Function]

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
GPU_LOGITS = 2**28
CPU_LOGITS = 2**20


@dataclass(frozen=True)
class Limited:
    """A function of a provider, and why it cannot take the inputs of a case, or None."""

    load: Load
    beyond: Callable[[Any], str | None]

    def __call__(self) -> Function:
        return self.load()


Functions = Mapping[str, Mapping[str, Load]]  # by provider and op


@dataclass(frozen=True)
class Provider:
    """An implementation of some ops."""

    name: str  # on the command line and in the tables
    ops: Mapping[str, Load]  # for each op what imports or compiles it, called for each case
    packages: tuple[str, ...] = ()  # the modules that must be installed
    install: str = ""  # the command that installs them
    overwrites: bool = False  # whether a loss leaves its gradient in the memory of the logits

    @property
    def is_ours(self) -> bool:
        return is_ours(self.name)

    def missing(self) -> str | None:
        """Return why the provider cannot be timed on this machine, or None."""
        if not all(map(is_installed, self.packages)):
            return f"{self.name}: not installed ({self.install})"
        return None

    def refusal(self, op: str, inputs: Any) -> str | None:
        """Return why the provider cannot take the inputs of a case of this op, or None."""
        served = self.ops.get(op)
        return served.beyond(inputs) if isinstance(served, Limited) else None


def is_ours(name: str) -> bool:
    return name.partition("-")[0] == "partita"


def given(function: Function) -> Load:
    """Return what loads a function that is there."""
    return lambda: function


def load(module: str, name: str) -> Load:
    """Return what imports a function of a module, or of a class of it."""
    return lambda: operator.attrgetter(name)(importlib.import_module(module))


def needs_gpu(inputs: Any) -> str | None:
    """Return why a provider without a useful path on the CPU cannot take the inputs, or None."""
    return None if inputs[0].device.type == "cuda" else "needs a GPU"


@dataclass(frozen=True)
class Settings:
    """The choices of the user."""

    dtypes: tuple[torch.dtype, ...]  # empty for the defaults of each op
    columns: tuple[int, ...]  # widths, empty for the defaults of each op
    elements: int | None  # of logits, and the limit for scores of chains; None for the default
    quick: bool  # whether there are fewer sizes
    sweep: bool  # whether the sweep over narrow widths is timed
    repetitions: int
    device: torch.device
    do_bench: bool = False  # whether the sweep of softmax alone is timed, by Triton's `do_bench`

    @property
    def logits(self) -> int:
        return self.elements or (GPU_LOGITS if self.device.type == "cuda" else CPU_LOGITS)

    def rows(self, columns: int) -> int:
        return max(1, self.logits // columns)

    def types(self, *default: torch.dtype) -> tuple[torch.dtype, ...]:
        return self.dtypes or default or (torch.float32, torch.bfloat16)


class Moves(NamedTuple):
    """The fewest bytes that a part of the work must move."""

    bytes: int  # in the declaration of a case, in units of those of the scores
    limit: str  # the bandwidth that bounds them, `copy` or `read`


class Sizes(NamedTuple):
    """The sizes of the cases of an op, each their fields: on a GPU and on a CPU, all or few."""

    gpu: Sequence[tuple[Any, ...]]
    gpu_quick: Sequence[tuple[Any, ...]]
    cpu: Sequence[tuple[Any, ...]]
    cpu_quick: Sequence[tuple[Any, ...]]

    def of(self, settings: Settings) -> Iterable[tuple[Any, ...]]:
        full, quick = self[:2] if settings.device.type == "cuda" else self[2:]
        return quick if settings.quick else full


class Widths(NamedTuple):
    """The widths of rows, all or few, and the options beside them; any number of logits is full."""

    full: Sequence[int]
    quick: Sequence[int]
    options: Sequence[tuple[Any, ...]] = ((),)

    def of(self, settings: Settings) -> Iterable[tuple[Any, ...]]:
        widths = settings.columns or (self.quick if settings.quick else self.full)
        pairs = itertools.product(widths, self.options)
        return ((settings.rows(width), width, *option) for width, option in pairs)


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


class Attempt(NamedTuple):
    """A function of a provider and the inputs of a case, which it is given."""

    function: Function
    inputs: Any
    provider: Provider


@dataclass(frozen=True)
class Loop:
    """Steps that are timed one after another; `before` runs untimed before each round."""

    steps: tuple[Step, ...]
    before: Callable[[], None] = nothing


@dataclass(frozen=True)
class Verdict:
    """The worst element of a result."""

    error: float  # in the unit of the case, like its bound
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

    # Tables and pictures show these.
    sizes: ClassVar[tuple[str, ...]]  # the attributes by which cases differ
    dimensions: ClassVar[tuple[str, ...]] = ()  # those that the scores have, if not all
    scores: ClassVar[str] = "logits"  # the name of the scores
    unit: ClassVar[str] = ""  # the unit of the errors; empty for plain numbers
    label: ClassVar[str] = ""  # separates cases of one op into tables of their own
    versus: ClassVar[str] = ""  # the provider that the others are compared with
    # The times of the yardstick are the unit of the others. Its results are not judged.
    yardstick: ClassVar[str] = ""
    caption: ClassVar[str] = ""  # the title of the picture of the times; empty for no picture

    # These say what is timed.
    without: ClassVar[tuple[str, ...]] = ("naive",)  # the providers that are left out
    learned: ClassVar[int] = 0  # the number of inputs, the first ones, that have a gradient
    arguments: ClassVar[int | None] = None  # the number of inputs that a function takes, if not all
    is_packed: ClassVar[bool] = False  # whether functions take the inputs as one argument
    work: ClassVar[Mapping[str, Moves]] = {}  # parts with a limit, in the order of the report
    memory_of: ClassVar[str] = ""  # the part whose memory is measured; empty for none
    # The size that the widths of the user replace, empty for none, and the least that it can be.
    width: ClassVar[str] = ""
    least_width: ClassVar[int] = 1
    # The sizes that get smaller where scores are limited, one after the other, each with its least.
    shrinks: ClassVar[Mapping[str, int]] = {}

    def within(self, elements: int) -> Any:
        """Return the case with about this number of scores at most."""
        case: Any = self
        for name, least in self.shrinks.items():
            size = getattr(case, name)
            room = elements * size // math.prod(case.shape)
            case = replace(case, **{name: max(least, min(size, room))})
        return case

    def size(self, names: Sequence[str]) -> str:
        return " × ".join(f"{getattr(self, name):,}" for name in names)

    @property
    def shape(self) -> tuple[int, ...]:  # of the scores
        return tuple(getattr(self, name) for name in self.dimensions or self.sizes)

    @property
    def bytes(self) -> int:  # of the scores
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def moves(self) -> Mapping[str, Moves]:
        """Return the bytes of each part that has a limit."""
        return {part: Moves(n * self.bytes, limit) for part, (n, limit) in self.work.items()}

    @abstractmethod
    def inputs(self, buffers: Buffers) -> Any:
        """Return the inputs of the functions, as a NamedTuple."""

    @abstractmethod
    def standard(self, inputs: Any) -> Any:
        """Return the truth that the results of all providers are compared with."""

    @abstractmethod
    def verdicts(self, attempt: Attempt, standard: Any) -> Iterator[Verdict]:
        """Yield a verdict on each result and gradient against fp64."""

    def outputs(self, result: Any) -> Sequence[Tensor]:
        """Return the results that are differentiated."""
        return [result]

    def upstream(self, inputs: Any) -> Sequence[Tensor] | None:
        """Return the gradients of the outputs, or None for one number."""
        return None

    def leaves(self, inputs: Any, provider: Provider) -> list[Tensor]:
        """Return the inputs that have a gradient, as leaves."""
        return [tensor.detach().requires_grad_() for tensor in inputs[: self.learned]]

    def trained(self, attempt: Attempt) -> tuple[Any, tuple[Tensor, ...]]:
        """Return results and gradients, which are computed into memory that holds NaN."""
        function, inputs, provider = attempt
        leaves = self.leaves(inputs, provider)
        for leaf in leaves:
            poison(leaf)
        result = function(*leaves, *inputs[self.learned : self.arguments])
        for leaf in leaves:
            poison(leaf)
        return result, torch.autograd.grad(self.outputs(result), leaves, self.upstream(inputs))

    def inference(self, attempt: Attempt) -> Loop:
        function, inputs, _ = attempt
        arguments = (inputs,) if self.is_packed else inputs[: self.arguments]
        return Loop((("inference", lambda: function(*arguments)),))

    def training(self, attempt: Attempt) -> Loop:
        function, inputs, provider = attempt
        leaves, upstream = self.leaves(inputs, provider), self.upstream(inputs)
        others = inputs[self.learned : self.arguments]
        state: dict[str, Any] = {}

        def before() -> None:
            state.clear()
            for leaf, x in zip(leaves, inputs, strict=False):
                if leaf.data_ptr() != x.data_ptr():  # a copy, which the provider overwrites
                    with torch.no_grad():
                        leaf.copy_(x)

        def forward() -> None:
            state["outputs"] = self.outputs(function(*leaves, *others))

        def backward() -> None:
            state["gradients"] = torch.autograd.grad(state.pop("outputs"), leaves, upstream)

        return Loop((("forward", forward), ("backward", backward)), before)

    def loops(self, attempt: Attempt) -> list[Loop]:
        loops = [self.inference(attempt)]
        return [*loops, self.training(attempt)] if self.learned else loops

    def times(self, attempt: Attempt, device: torch.device, repetitions: int) -> dict[str, Timing]:
        result: dict[str, Timing] = {}
        for loop in self.loops(attempt):
            result |= time_steps(loop.steps, device, before=loop.before, repetitions=repetitions)
            loop.before()
        return result

    def extra_memory(self, attempt: Attempt, device: torch.device) -> int | None:
        """Return the peak bytes beyond the inputs; None where they are not measured."""
        if not self.memory_of:
            return None
        loop = self.loops(attempt)[-1]
        return peak_extra_memory(loop.steps, device, before=loop.before)

    def __str__(self) -> str:
        return f"{self.op} {DTYPE_NAMES[self.dtype]} {self.size(self.sizes)}"


def cases_of(
    kinds: Mapping[str, tuple[type[Case], Sizes | Widths]], *default: torch.dtype
) -> Callable[[Settings], Iterator[Case]]:
    """Return what yields the cases of some ops, by dtype, op and size.

    With widths of the user, these are cases of the first size.
    """

    def cases(settings: Settings) -> Iterator[Case]:
        for dtype in settings.types(*default):
            for op, (kind, sizes) in kinds.items():
                found = [kind(op, dtype, *size) for size in sizes.of(settings)]
                if settings.columns and kind.width:
                    widths: list[Any] = [max(kind.least_width, n) for n in settings.columns]
                    found = [replace(found[0], **{kind.width: n}) for n in widths]
                limit = settings.elements
                yield from found if limit is None else (case.within(limit) for case in found)

    return cases


def poison(like: Tensor) -> None:
    """Leave NaN in the memory that the next tensor of this size gets, to show missing writes."""
    torch.full_like(like, torch.nan)
