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
from .common import LogprobRows

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
        *options, backend = ctx.options
        tensors, grad = saved_tensors(ctx), grads[0]
        op = for_gradients(logprobs_backward_op, grad)
        dlogits = first_derivative(
            lambda *tensors: op(*tensors, *options, backend),
            lambda *tensors: reference.logprobs_gradient(*tensors, *options),
            2,
            grad,
            *tensors,
        )
        return dlogits, None, None, None, None, None


def logprobs_of(
    logits: Tensor, ids: Tensor, temperature: float, softcap: float, ignore_index: int
) -> Tensor:
    """Return the log-probabilities of checked inputs, `[..., K]`."""
    call = (logits, ids, temperature, softcap, ignore_index, current_backend())
    if needs_no_derivative(logits):
        return logprobs_op(*call)[0]
    return apply(LogprobsFunction, *call)[0]
