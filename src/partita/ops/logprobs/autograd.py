"""The registered ops of log-probabilities and their autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import (
    all_at_once,
    apply,
    first_derivative,
    for_gradients,
    needs_no_derivative,
    saved_tensors,
)
from ...runtime.backend import current_backend
from . import reference
from .backends import BACKENDS
from .common import TopK, TopKRows, logprobs_fake, topk_fake

_NUMBERS = "float temperature, float softcap, int ignore_index"


def _check_ids(
    logits: Tensor, ids: Tensor, temperature: float, softcap: float, ignore_index: int, _: bool
) -> None:
    checks.labels("ids", ids, logits.shape[-1], ignore_index)


logprobs_op: register.Op = register.define(
    f"logprobs(Tensor logits, Tensor ids, {_NUMBERS}, bool needs_rest, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda logits, ids, *options: logprobs_fake(logits, ids, options[-1]),
    check=_check_ids,
    vmap=lambda *batch: all_at_once(logprobs_op, *batch),
    backends=BACKENDS,
)
logprobs_backward_op: register.Op = register.define(
    "logprobs_backward(Tensor grad, Tensor logits, Tensor ids, Tensor entries, Tensor maximum,"
    f" Tensor sumexp, Tensor rest, {_NUMBERS}, str backend) -> Tensor",
    lambda grad, logits, *_: torch.empty_like(logits),
    vmap=lambda *batch: all_at_once(logprobs_backward_op, *batch),
    backends=BACKENDS,
)
topk_op: register.Op = register.define(
    "topk_logprobs(Tensor logits, int k, float temperature, float softcap, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda logits, k, *_: topk_fake(logits, k),
    vmap=lambda *batch: all_at_once(topk_op, *batch),
    backends=BACKENDS,
)


class LogprobsFunction(torch.autograd.Function):
    """The `LogprobRows`, of which the log-probabilities are differentiable in the logits."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor,
        ids: Tensor,
        temperature: float,
        softcap: float,
        ignore_index: int,
        needs_rest: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        return logprobs_op(logits, ids, temperature, softcap, ignore_index, needs_rest, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, ids, *numbers, _, backend = inputs
        ctx.options = (*numbers, backend)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(logits, ids, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _logits_gradient(ctx, grads[0]), *(None,) * 6


class TopKFunction(torch.autograd.Function):
    """The `TopKRows`, of which the log-probabilities are differentiable in the logits."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, k: int, temperature: float, softcap: float, backend: str
    ) -> tuple[Tensor, ...]:
        return topk_op(logits, k, temperature, softcap, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, _, temperature, softcap, backend = inputs
        ctx.options = (temperature, softcap, checks.NOTHING_IGNORED, backend)
        ctx.mark_non_differentiable(*output[1:])
        rows = TopKRows(*output)
        no_rest = rows.entries[..., :0]
        ctx.save_for_backward(
            logits, rows.indices, rows.entries, rows.maximum, rows.sumexp, no_rest
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _logits_gradient(ctx, grads[0]), None, None, None, None


def _logits_gradient(ctx: Any, grad: Tensor) -> Tensor:
    """Return the gradient of the logits from that of the log-probabilities of saved ids."""
    *options, backend = ctx.options
    op = for_gradients(logprobs_backward_op, grad)
    return first_derivative(
        lambda *tensors: op(*tensors, *options, backend),
        lambda *tensors: reference.logprobs_gradient(*tensors, *options),
        2,
        grad,
        *saved_tensors(ctx),
    )


def topk_of(logits: Tensor, k: int, temperature: float, softcap: float) -> TopK:
    """Return the `TopK` of checked inputs."""
    call = (logits, k, temperature, softcap, current_backend())
    found = topk_op(*call) if needs_no_derivative(logits) else apply(TopKFunction, *call)
    return TopK(*found[:3])


def logprobs_of(
    logits: Tensor,
    ids: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
    needs_rest: bool = False,
) -> Tensor:
    """Return the log-probabilities of checked inputs, `[..., K]`, or `[..., K + 1]` with a rest."""
    call = (logits, ids, temperature, softcap, ignore_index, needs_rest, current_backend())
    if needs_no_derivative(logits):
        return logprobs_op(*call)[0]
    return apply(LogprobsFunction, *call)[0]
