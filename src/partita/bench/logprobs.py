"""Log-probabilities of eight classes of each row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..runtime.dtypes import acc_dtype
from ..testing import Error
from .case import Buffers, Case, Loop, Moves, Settings, poison
from .cross_entropy import Inputs
from .providers import Function, Provider, eager_logprobs
from .rows import RowsCase, row_error

WIDTHS = (8192, 32768, 131072, 50257)
QUICK_WIDTHS = (32768, 50257)
CLASSES = 8  # of each row


@dataclass(frozen=True)
class Logprobs(RowsCase):
    """The results read the logits once; their gradient reads them a second time and writes."""

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {
            "inference": Moves(self.bytes, "read"),
            "backward": Moves(2 * self.bytes, "copy"),
            "total": Moves(3 * self.bytes, "copy"),
        }

    def inputs(self, buffers: Buffers) -> Inputs:
        labels = buffers.labels(self.rows * CLASSES, self.columns).view(self.rows, CLASSES)
        return Inputs(buffers.normal("logits", self.shape, self.dtype), labels)

    def errors(self, function: Function, inputs: Inputs, provider: Provider) -> Iterator[Error]:
        x, ids = inputs
        leaf = x.detach().requires_grad_()
        poison(x)
        found = function(leaf, ids)
        (grad,) = torch.autograd.grad(found, leaf, torch.ones_like(found))

        def truth(x: Tensor, rows: slice) -> Tensor:
            return eager_logprobs(x, ids[rows])

        def gradient(x: Tensor, rows: slice) -> Tensor:
            chosen = ids[rows]
            dlogits = -CLASSES * x.softmax(-1)
            return dlogits.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=x.dtype))

        yield row_error(found.detach(), truth, x, scale=-1)
        yield row_error(grad, gradient, x, scale=-1)

    def loops(self, function: Function, inputs: Inputs, provider: Provider) -> Sequence[Loop]:
        x, ids = inputs
        leaf = x.detach().requires_grad_()
        upstream = torch.ones(ids.shape, dtype=acc_dtype(x.dtype), device=x.device)
        state: dict[str, Any] = {}

        def forward() -> None:
            state["found"] = function(leaf, ids)

        def backward() -> None:
            state["x"] = torch.autograd.grad(state.pop("found"), leaf, upstream)

        return [
            Loop((("inference", lambda: function(x, ids)),), lambda: None),
            Loop((("forward", forward), ("backward", backward)), state.clear),
        ]


def cases(settings: Settings) -> Iterator[Case]:
    for dtype in settings.types():
        for columns in settings.widths(WIDTHS, QUICK_WIDTHS):
            yield Logprobs("logprobs", dtype, settings.rows(columns), columns)
