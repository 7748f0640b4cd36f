"""The registered ops of divergences and their autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import register
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
from .common import DivergenceRows

_NUMBERS = "float beta, float temperature, float softcap, str backend"


def _fake(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
    dtype = acc_dtype(logits.dtype)
    return tuple(logits.new_empty(logits.shape[:-1], dtype=dtype) for _ in DivergenceRows._fields)


divergence_op: register.Op = register.define(
    f"divergence(Tensor logits, Tensor teacher_logits, {_NUMBERS})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fake,
    vmap=lambda *batch: all_at_once(divergence_op, *batch),
    backends=BACKENDS,
)
divergence_backward_op: register.Op = register.define(
    "divergence_backward(Tensor grad, Tensor logits, Tensor teacher_logits, Tensor student,"
    " Tensor maximum, Tensor sumexp, Tensor teacher_maximum, Tensor teacher_sumexp,"
    f" {_NUMBERS}) -> Tensor",
    lambda grad, logits, *_: torch.empty_like(logits),
    vmap=lambda *batch: all_at_once(divergence_backward_op, *batch),
    backends=BACKENDS,
)


class DivergenceFunction(torch.autograd.Function):
    """The `DivergenceRows`, of which the loss is differentiable in the student's logits."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor,
        teacher_logits: Tensor,
        beta: float,
        temperature: float,
        softcap: float,
        backend: str,
    ) -> tuple[Tensor, ...]:
        return divergence_op(logits, teacher_logits, beta, temperature, softcap, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, teacher_logits, *ctx.options = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(logits, teacher_logits, *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *options, backend = ctx.options
        tensors, grad = saved_tensors(ctx), grads[0]
        op = for_gradients(divergence_backward_op, grad)
        dlogits = first_derivative(
            lambda *tensors: op(*tensors, *options, backend),
            lambda *tensors: reference.divergence_gradient(*tensors, *options),
            2,
            grad,
            *tensors,
        )
        return dlogits, None, None, None, None, None


def divergence_of_rows(
    logits: Tensor, teacher_logits: Tensor, beta: float, temperature: float, softcap: float
) -> Tensor:
    """Return the divergence of each row of checked inputs, `[...]`."""
    call = (logits, teacher_logits.detach(), beta, temperature, softcap, current_backend())
    if needs_no_derivative(logits):
        return divergence_op(*call)[0]
    return apply(DivergenceFunction, *call)[0]
