"""The registered ops of log-probabilities and their autograd function."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...paths.autograd import takes
from ...primitives.rows import by_rows
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
from .common import TopK, TopKRows, logprobs_fake, topk_fake


def _check_ids(logits: Tensor, ids: Tensor, ignore_index: int) -> None:
    checks.labels("ids", ids, logits.shape[-1], ignore_index)


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


logprobs_op = register.define(
    by_rows(reference.logprobs),
    lambda logits, ids, needs_rest: logprobs_fake(logits, ids, needs_rest),
    gpu=_gpu,
    check=_check_ids,
    vmap=all_at_once,
)
logprobs_backward_op = register.define(
    by_rows(reference.logprobs_backward, logits=1),
    lambda logits: torch.empty_like(logits),
    gpu=_gpu,
    vmap=all_at_once,
)
topk_op = register.define(
    by_rows(reference.topk_logprobs),
    lambda logits, k: topk_fake(logits, k),
    gpu=_gpu,
    vmap=all_at_once,
)


class LogprobsFunction(torch.autograd.Function):
    """The `LogprobRows`, of which the log-probabilities are differentiable in the logits."""

    generate_vmap_rule = True

    @staticmethod
    @takes(logprobs_op)
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return logprobs_op(*args)

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
    @takes(topk_op)
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return topk_op(*args)

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
