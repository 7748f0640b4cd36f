"""The divergence of rows of logits, whose limit is the bandwidth of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .case import Buffers, Case, Loop, Moves, Settings, TrainedCase, Verdict, poison, training_loop
from .divergence_peers import rows_of_logits
from .linear_cross_entropy import worst_error
from .providers import TORCH, Function, Provider
from .rows import blocks

WIDTHS = (32768, 128256)
QUICK_WIDTHS = (128256,)
BETAS = (0.0, 0.5, 1.0)
TOLERANCE = 2.0  # the bound is this multiple of PyTorch's error, plus the slack
ROWS_JUDGED = 256  # whose gradients are compared


class RowInputs(NamedTuple):
    logits: Tensor  # [rows, columns]
    teacher_logits: Tensor  # [rows, columns]
    beta: float


class RowTruth(NamedTuple):
    """The loss and the gradient of the first rows in fp64, and the errors of PyTorch."""

    loss: Tensor
    gradient: Tensor
    own: list[float]


@dataclass(frozen=True)
class DivergenceRows(TrainedCase):
    """The mean divergence, which reads both logits once and writes the gradient."""

    rows: int
    columns: int
    beta: float

    sizes: ClassVar[tuple[str, ...]] = ("rows", "columns", "beta")
    varying: ClassVar[tuple[str, ...]] = ("columns", "beta")
    scores: ClassVar[str] = "logits"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows, self.columns

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {
            "inference": Moves(2 * self.bytes, "read"),
            "total": Moves(3 * self.bytes, "copy"),
        }

    def inputs(self, buffers: Buffers) -> RowInputs:
        logits = buffers.normal("logits", self.shape, self.dtype)
        teacher_logits = buffers.normal("teacher logits", self.shape, self.dtype)
        return RowInputs(logits, teacher_logits, self.beta)

    def standard(self, inputs: RowInputs) -> RowTruth:
        loss, gradient = truth_of(inputs)
        own = errors(TORCH.ops[self.op](), inputs, loss, gradient)
        return RowTruth(loss, gradient, [verdict.error for verdict in own])

    def verdicts(
        self, function: Function, inputs: RowInputs, provider: Provider, standard: RowTruth
    ) -> Iterator[Verdict]:
        slack = torch.finfo(self.dtype).eps / 4 if self.dtype.itemsize == 2 else 1e-5
        found = errors(function, inputs, standard.loss, standard.gradient)
        for verdict, own in zip(found, standard.own, strict=True):
            yield replace(verdict, allowed=TOLERANCE * own + slack)

    def training(self, function: Function, inputs: RowInputs) -> Loop:
        return training_loop(function, inputs[:1], inputs[1:])


def truth_of(inputs: RowInputs) -> tuple[Tensor, Tensor]:
    """Compute loss and gradient of the first rows in fp64, rows in parts."""
    x, t, beta = inputs
    with torch.no_grad():
        parts = [rows_of_logits(x[rows].double(), t[rows].double(), beta) for rows in blocks(x)]
    judged = x[:ROWS_JUDGED].double().requires_grad_()
    with torch.enable_grad():
        mean = rows_of_logits(judged, t[:ROWS_JUDGED].double(), beta).sum() / len(x)
        (gradient,) = torch.autograd.grad(mean, judged)
    return torch.cat(parts).mean(), gradient


def errors(
    function: Function, inputs: RowInputs, loss: Tensor, gradient: Tensor
) -> Iterator[Verdict]:
    """Yield the errors over the greatest true value, without a bound.

    They are those of the loss with gradients and without, and of the first rows' gradients.
    """
    leaf = inputs.logits.detach().requires_grad_()
    poison(leaf)
    result = function(leaf, *inputs[1:])
    (found,) = torch.autograd.grad(result, leaf)
    yield worst_error(result.detach()[None], loss[None])
    with torch.no_grad():
        yield worst_error(function(*inputs).detach()[None], loss[None])
    verdict = worst_error(found[: len(gradient)], gradient)
    finite = all(bool(found[rows].isfinite().all()) for rows in blocks(found))
    yield verdict if finite else replace(verdict, error=float("inf"))


def cases(settings: Settings) -> Iterator[Case]:
    for dtype in settings.types(torch.bfloat16):
        for columns in settings.widths(WIDTHS, QUICK_WIDTHS):
            for beta in BETAS:
                yield DivergenceRows("divergence", dtype, settings.rows(columns), columns, beta)
