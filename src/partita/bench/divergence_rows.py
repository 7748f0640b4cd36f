"""The divergence of rows of logits, whose limit is the bandwidth of memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .case import Buffers, Case, Moves, Settings
from .divergence_case import BETAS, MeanDivergence
from .divergence_peers import rows_of_logits
from .rows import blocks

WIDTHS = (32768, 128256)
QUICK_WIDTHS = (128256,)
ROWS_JUDGED = 256  # whose gradients are compared


class RowInputs(NamedTuple):
    logits: Tensor  # [rows, columns]
    teacher_logits: Tensor  # [rows, columns]
    beta: float


@dataclass(frozen=True)
class DivergenceRows(MeanDivergence):
    """The divergence of logits, which reads both once and writes the gradient."""

    rows: int
    columns: int
    beta: float

    sizes: ClassVar[tuple[str, ...]] = ("rows", "columns", "beta")
    varying: ClassVar[tuple[str, ...]] = ("columns", "beta")
    learned: ClassVar[int] = 1

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

    def truth(self, inputs: RowInputs) -> tuple[Tensor, Tensor]:
        """Compute loss and gradient of the first rows in fp64, rows in parts."""
        x, t, beta = inputs
        with torch.no_grad():
            parts = [rows_of_logits(x[rows].double(), t[rows].double(), beta) for rows in blocks(x)]
        judged = x[:ROWS_JUDGED].double().requires_grad_()
        with torch.enable_grad():
            mean = rows_of_logits(judged, t[:ROWS_JUDGED].double(), beta).sum() / len(x)
            (gradient,) = torch.autograd.grad(mean, judged)
        return torch.cat(parts).mean(), gradient


def cases(settings: Settings) -> Iterator[Case]:
    for dtype in settings.types(torch.bfloat16):
        for columns in settings.widths(WIDTHS, QUICK_WIDTHS):
            for beta in BETAS:
                yield DivergenceRows("divergence", dtype, settings.rows(columns), columns, beta)
