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
from ...runtime.dtypes import acc_dtype
from . import reference
from .backends import BACKENDS
from .common import LogprobRows, TopK, TopKRows, topk_fake

_NUMBERS = "float temperature, float softcap, int ignore_index"


def _check_ids(
    logits: Tensor, ids: Tensor, temperature: float, softcap: float, ignore_index: int
) -> None:
    checks.labels("ids", ids, logits.shape[-1], ignore_index)


def _fake(logits: Tensor, ids: Tensor, *_: Any) -> tuple[Tensor, ...]:
    dtype = acc_dtype(logits.dtype)
    return LogprobRows(
        *(logits.new_empty(ids.shape, dtype=dtype) for _ in range(2)),
        *(logits.new_empty(logits.shape[:-1], dtype=dtype) for _ in range(2)),
    )


logprobs_op: register.Op = register.define(
    f"logprobs(Tensor logits, Tensor ids, {_NUMBERS}, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _fake,
    check=_check_ids,
    vmap=lambda *batch: all_at_once(logprobs_op, *batch),
    backends=BACKENDS,
)
logprobs_backward_op: register.Op = register.define(
    "logprobs_backward(Tensor grad, Tensor logits, Tensor ids, Tensor entries, Tensor maximum,"
    f" Tensor sumexp, {_NUMBERS}, str backend) -> Tensor",
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
        backend: str,
    ) -> tuple[Tensor, ...]:
        return logprobs_op(logits, ids, temperature, softcap, ignore_index, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, ids, *ctx.options = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(logits, ids, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _logits_gradient(ctx, grads[0]), None, None, None, None, None


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
        ctx.save_for_backward(logits, rows.indices, rows.entries, rows.maximum, rows.sumexp)

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
    logits: Tensor, ids: Tensor, temperature: float, softcap: float, ignore_index: int
) -> Tensor:
    """Return the log-probabilities of checked inputs, `[..., K]`."""
    call = (logits, ids, temperature, softcap, ignore_index, current_backend())
    if needs_no_derivative(logits):
        return logprobs_op(*call)[0]
    return apply(LogprobsFunction, *call)[0]
