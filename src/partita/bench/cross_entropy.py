"""Mean cross-entropy: the loss, its gradient, their memory, and the host time of a call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..testing import Error, ulp_error
from .case import Buffers, Case, Loop, Moves, Settings, poison
from .measure import Timing, peak_extra_memory, time_host
from .providers import Function, Provider
from .rows import RowsCase, blocks, row_error

WIDTHS = (8192, 16384, 32768, 131072, 262144, 50257)
QUICK_WIDTHS = (8192, 131072, 50257)
HOST_ROWS, HOST_COLUMNS, HOST_CALLS = 4, 10, 100


class Inputs(NamedTuple):
    x: Tensor  # [rows, columns]
    target: Tensor  # [rows]


@dataclass(frozen=True)
class CrossEntropy(RowsCase):
    """The loss reads the logits once; loss and gradient read them once and write the gradient."""

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read"), "total": Moves(2 * self.bytes, "copy")}

    def inputs(self, buffers: Buffers) -> Inputs:
        return Inputs(
            buffers.normal("logits", self.shape, self.dtype),
            buffers.labels(self.rows, self.columns),
        )

    def errors(self, function: Function, inputs: Inputs, provider: Provider) -> Iterator[Error]:
        x, target = inputs
        leaf = _leaf(x, provider)
        poison(x)
        loss = function(leaf, target)
        (grad,) = torch.autograd.grad(loss, leaf)

        def truth(x: Tensor, rows: slice) -> Tensor:
            p = torch.softmax(x, -1)
            p.scatter_add_(-1, target[rows].unsqueeze(-1), p.new_full((x.shape[0], 1), -1.0))
            return p / target.numel()

        yield row_error(grad, truth, x)
        expected = (
            torch.stack(
                [
                    F.cross_entropy(x[rows].double(), target[rows], reduction="sum")
                    for rows in blocks(x)
                ]
            ).sum()
            / target.numel()
        )
        yield ulp_error(loss.detach(), expected)
        yield ulp_error(function(x, target), expected)

    def loops(self, function: Function, inputs: Inputs, provider: Provider) -> Sequence[Loop]:
        x, target = inputs
        loops = [_training(function, x, target, provider)]
        if provider.name != "partita-inplace":
            loops.insert(0, Loop((("inference", lambda: function(x, target)),), lambda: None))
        return loops

    def extra_memory(
        self, function: Function, inputs: Inputs, provider: Provider, device: torch.device
    ) -> int | None:
        loop = _training(function, *inputs, provider)
        return peak_extra_memory(loop.steps, device, before=loop.before)


def _leaf(x: Tensor, provider: Provider) -> Tensor:
    """Return logits that require a gradient; a copy where the provider overwrites them."""
    return (x.clone() if provider.overwrites else x.detach()).requires_grad_()


def _training(function: Function, x: Tensor, target: Tensor, provider: Provider) -> Loop:
    leaf = _leaf(x, provider)
    state: dict[str, Any] = {}

    def before() -> None:
        state.clear()
        if provider.overwrites:
            with torch.no_grad():
                leaf.copy_(x)

    def forward() -> None:
        state["loss"] = function(leaf, target)

    def backward() -> None:
        state["grad"] = torch.autograd.grad(state["loss"], leaf)

    return Loop((("forward", forward), ("backward", backward)), before)


@dataclass(frozen=True)
class Host(CrossEntropy):
    """Forward and backward of a few logits, whose time is that of the host."""

    without: ClassVar[tuple[str, ...]] = ("naive", "partita-inplace")
    label: ClassVar[str] = "host"

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {}

    def times(
        self,
        function: Function,
        inputs: Inputs,
        provider: Provider,
        device: torch.device,
        repetitions: int,
    ) -> dict[str, Timing]:
        leaf = _leaf(inputs.x, provider)

        def call() -> object:
            return torch.autograd.grad(function(leaf, inputs.target), leaf)

        return {"host": time_host(call, device, calls=HOST_CALLS, repetitions=repetitions)}

    def extra_memory(
        self, function: Function, inputs: Inputs, provider: Provider, device: torch.device
    ) -> int | None:
        return None


def cases(settings: Settings) -> Iterator[Case]:
    for dtype in settings.types():
        for columns in settings.widths(WIDTHS, QUICK_WIDTHS):
            yield CrossEntropy("cross_entropy", dtype, settings.rows(columns), columns)
    yield Host("cross_entropy", torch.float32, HOST_ROWS, HOST_COLUMNS)
