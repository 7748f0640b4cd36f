"""Token statistics: log-probability, log-sum-exp, entropy and arg-max from one read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..testing import Error, ulp_error
from .case import Buffers, Case, Loop, Moves, Settings, poison
from .cross_entropy import Inputs
from .providers import Function, Provider, eager_token_stats
from .rows import RowsCase, row_error

WIDTHS = (8192, 32768, 131072, 50257)
QUICK_WIDTHS = (32768, 50257)


@dataclass(frozen=True)
class TokenStats(RowsCase):
    """The statistics read the logits once; their gradient reads them a second time and writes."""

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {
            "inference": Moves(self.bytes, "read"),
            "backward": Moves(2 * self.bytes, "copy"),
            "total": Moves(3 * self.bytes, "copy"),
        }

    def inputs(self, buffers: Buffers) -> Inputs:
        return Inputs(
            buffers.normal("logits", self.shape, self.dtype),
            buffers.labels(self.rows, self.columns),
        )

    def errors(self, function: Function, inputs: Inputs, provider: Provider) -> Iterator[Error]:
        x, target = inputs
        leaf = x.detach().requires_grad_()
        poison(x)
        results = function(leaf, target)[:3]
        (grad,) = torch.autograd.grad(
            results, leaf, [torch.ones_like(result) for result in results]
        )

        def truth(x: Tensor, rows: slice) -> Tensor:
            return torch.stack(eager_token_stats(x, target[rows])[:3], -1)

        def gradient(x: Tensor, rows: slice) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(truth(x, rows).sum(), x)[0]

        yield row_error(torch.stack([result.detach() for result in results], -1), truth, x, scale=0)
        yield row_error(grad, gradient, x, scale=-1)
        chosen = x.gather(-1, function(x, target)[3].unsqueeze(-1)).squeeze(-1)
        yield ulp_error(chosen, x.amax(-1).double())

    def loops(self, function: Function, inputs: Inputs, provider: Provider) -> Sequence[Loop]:
        x, target = inputs
        leaf = x.detach().requires_grad_()
        state: dict[str, Any] = {}

        def forward() -> None:
            state["stats"] = function(leaf, target)

        def backward() -> None:
            logprob, logsumexp, entropy, _ = state.pop("stats")
            state["x"] = torch.autograd.grad(
                (logprob, logsumexp, entropy), leaf, (ones, ones, ones)
            )

        ones = torch.ones(
            x.shape[0],
            dtype=torch.float64 if x.dtype == torch.float64 else torch.float32,
            device=x.device,
        )
        return [
            Loop((("inference", lambda: function(x, target)),), lambda: None),
            Loop((("forward", forward), ("backward", backward)), state.clear),
        ]


def cases(settings: Settings) -> Iterator[Case]:
    for dtype in settings.types():
        for columns in settings.widths(WIDTHS, QUICK_WIDTHS):
            yield TokenStats("token_stats", dtype, settings.rows(columns), columns)
