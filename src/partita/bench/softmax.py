"""Softmax and log-softmax over rows, and a sweep over narrow widths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..testing import Error
from .case import Buffers, Case, Loop, Moves, Settings, poison
from .measure import Timing, rotation, time_do_bench, time_replay
from .providers import Function, Provider
from .rows import RowsCase, row_error

WIDTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 781, 50257)
QUICK_WIDTHS = (256, 4096, 65536, 781)
SWEEP_ROWS = 4096
SWEEP_STEP = 128
SWEEP_LAST = 6272
DO_BENCH_LAST = 12672  # of the plot in Triton's tutorial


class Inputs(NamedTuple):
    x: Tensor  # [rows, columns]
    grad: Tensor  # [rows, columns]


@dataclass(frozen=True)
class Softmax(RowsCase):
    """Forward reads x and writes y; backward reads y and its gradient and writes that of x."""

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {
            "forward": Moves(2 * self.bytes, "copy"),
            "backward": Moves(3 * self.bytes, "copy"),
            "total": Moves(5 * self.bytes, "copy"),
        }

    def inputs(self, buffers: Buffers) -> Inputs:
        shape = self.shape, self.dtype
        return Inputs(
            buffers.normal("logits", *shape).detach().requires_grad_(),
            buffers.normal("gradient", *shape),
        )

    def errors(self, function: Function, inputs: Inputs, provider: Provider) -> Iterator[Error]:
        x, grad = inputs
        poison(x)
        y = function(x)
        yield row_error(y.detach(), lambda x, _: torch.softmax(x, -1), x)
        poison(x)
        (result,) = torch.autograd.grad(y, x, grad)
        yield row_error(result, lambda x, rows: _softmax_backward(x, grad[rows]), x, scale=-1)

    def loops(self, function: Function, inputs: Inputs, provider: Provider) -> Sequence[Loop]:
        x, grad = inputs
        state: dict[str, Any] = {}

        def forward() -> None:
            state["y"] = function(x)

        def backward() -> None:
            state["x"] = torch.autograd.grad(state.pop("y"), x, grad)

        return [Loop((("forward", forward), ("backward", backward)), state.clear)]


def _softmax_backward(x: Tensor, grad: Tensor) -> Tensor:
    y = torch.softmax(x, -1)
    weighted = y * grad.to(x.dtype)
    return weighted - y * weighted.sum(-1, keepdim=True)


@dataclass(frozen=True)
class LogSoftmax(RowsCase):
    """Forward alone, with one read and one write."""

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(2 * self.bytes, "copy")}

    def inputs(self, buffers: Buffers) -> Tensor:
        return buffers.normal("logits", self.shape, self.dtype)

    def errors(self, function: Function, inputs: Tensor, provider: Provider) -> Iterator[Error]:
        poison(inputs)
        yield row_error(function(inputs), lambda x, _: torch.log_softmax(x, -1), inputs, scale=-1)

    def loops(self, function: Function, inputs: Tensor, provider: Provider) -> Sequence[Loop]:
        return [Loop((("inference", lambda: function(inputs)),), lambda: None)]


@dataclass(frozen=True)
class Sweep(RowsCase):
    """Softmax forward of narrow rows inside a CUDA graph, which leaves out the host."""

    without: ClassVar[tuple[str, ...]] = ()
    label: ClassVar[str] = "sweep"

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"replay": Moves(2 * self.bytes, "copy")}

    def inputs(self, buffers: Buffers) -> Sequence[Tensor]:
        sets = rotation(2 * self.bytes, buffers.device)
        return buffers.normal("sweep", (sets * self.rows, self.columns), self.dtype).split(
            self.rows
        )

    def errors(
        self, function: Function, inputs: Sequence[Tensor], provider: Provider
    ) -> Iterator[Error]:
        poison(inputs[0])
        yield row_error(function(inputs[0]), lambda x, _: torch.softmax(x, -1), inputs[0])

    def loops(
        self, function: Function, inputs: Sequence[Tensor], provider: Provider
    ) -> Sequence[Loop]:
        return []

    def times(
        self,
        function: Function,
        inputs: Sequence[Tensor],
        provider: Provider,
        device: torch.device,
        repetitions: int,
    ) -> dict[str, Timing]:
        return {
            "replay": time_replay(
                function, inputs, device, bytes_moved=2 * self.bytes, repetitions=repetitions
            )
        }


@dataclass(frozen=True)
class DoBenchSweep(Sweep):
    """The same by Triton's `do_bench`, which empties the L2 cache and includes the launch."""

    label: ClassVar[str] = "do_bench"

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"do_bench": Moves(2 * self.bytes, "copy")}

    def inputs(self, buffers: Buffers) -> Sequence[Tensor]:
        return [buffers.normal("sweep", self.shape, self.dtype)]

    def times(
        self,
        function: Function,
        inputs: Sequence[Tensor],
        provider: Provider,
        device: torch.device,
        repetitions: int,
    ) -> dict[str, Timing]:
        return {"do_bench": time_do_bench(lambda: function(inputs[0]))}


def _sweep(settings: Settings, kind: type[Sweep], last: int) -> Iterator[Case]:
    step = 8 * SWEEP_STEP if settings.quick else SWEEP_STEP
    rows = min(SWEEP_ROWS, settings.rows(last))
    for columns in range(2 * SWEEP_STEP, last + 1, step):
        yield kind("softmax", torch.float32, rows, columns)


def cases(settings: Settings) -> Iterator[Case]:
    if settings.do_bench:
        yield from _sweep(settings, DoBenchSweep, DO_BENCH_LAST)
        return
    for dtype in settings.types():
        for columns in settings.widths(WIDTHS, QUICK_WIDTHS):
            size = dtype, settings.rows(columns), columns
            yield Softmax("softmax", *size)
            yield LogSoftmax("log_softmax", *size)
    if settings.sweep:
        yield from _sweep(settings, Sweep, SWEEP_LAST)
