"""The ops of chains, and their derivatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _checks, _op
from .reference import chain as reference


def check_values(scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, lengths: Tensor | None, *_: Any) -> None:
    _checks.within("source", source, -1, scores.shape[2] - 1, "states, or -1 for no edge")
    if lengths is not None:
        _checks.within("lengths", lengths, 0, scores.shape[0], "steps")


_INPUTS = "Tensor scores, Tensor source, Tensor initial, Tensor final, Tensor? lengths"
logz = _op.define(
    "chain",
    f"chain_logz({_INPUTS}, bool best, bool keep, str backend) -> (Tensor, Tensor)",
    lambda scores, source, initial, final, lengths, best, keep: (
        scores.new_empty(scores.shape[1], dtype=torch.float64),
        scores.new_empty((scores.shape[0] + 1, *scores.shape[1:3]) if keep else (0,), dtype=torch.float64),
    ),
    check=check_values,
    numba=True,
)
logz_gradient = _op.define(
    "chain",
    "chain_gradient(Tensor grad, Tensor scores, Tensor initial, Tensor final, Tensor source, Tensor? lengths, Tensor logz, Tensor kept,"
    " bool best, ScalarType dtype, str backend) -> (Tensor, Tensor, Tensor)",
    lambda grad, scores, initial, final, *rest: (
        torch.empty(scores.shape, dtype=rest[-1], device=scores.device),
        *(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (initial, final)),
    ),
    numba=True,
)


class LogZ(torch.autograd.Function):
    """log Z under Log or Max, `[N]` fp64; the gradient is the marginals, or the indicator of the best path."""

    @staticmethod
    def forward(
        scores: Tensor, source: Tensor, initial: Tensor, final: Tensor, lengths: Tensor | None, best: bool, keep: bool, backend: str
    ) -> tuple[Tensor, Tensor]:
        return logz(scores, source, initial, final, lengths, best, keep, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        scores, source, initial, final, lengths, ctx.best, _, ctx.backend = inputs
        logz, kept = output
        ctx.mark_non_differentiable(kept)
        ctx.set_materialize_grads(False)  # zeros for what is kept would be as large as it
        ctx.save_for_backward(scores, source, initial, final, lengths, logz, kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * 8
        scores, source, initial, final, lengths, logz, kept = ctx.saved_tensors
        rest = (source, lengths, logz, kept)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            parts = reference.chain_gradient(grad, scores, initial, final, *rest, ctx.best, scores.dtype)
        else:
            parts = logz_gradient(grad, scores, initial, final, *rest, ctx.best, scores.dtype, ctx.backend)
        d_scores, d_initial, d_final = parts
        return d_scores, None, d_initial, d_final, None, None, None, None
