"""The registered ops of softmax and log-sum-exp, and their autograd functions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import by_rows
from ...runtime import register
from ...runtime.autograd import (
    all_at_once,
    batch_first,
    first_derivative,
    for_gradients,
)
from ...runtime.dtypes import acc_dtype
from . import reference


def _softmax_vmap(op: register.Op, info: Any, in_dims: Any, *args: Any) -> tuple[Tensor, int]:
    """Serve a batch by one call with the batch dimension first, so `dim` moves by one."""
    *tensors, dim, log, dtype, backend = args
    tensors = [
        batch_first(tensor, in_dim, info.batch_size)
        for tensor, in_dim in zip(tensors, in_dims, strict=False)
    ]
    return op(*tensors, dim + 1, log, dtype, backend), 0


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


softmax_op = register.define(
    reference.over_any_dim(by_rows(reference.softmax)),
    lambda input, dtype: torch.empty_like(input, dtype=dtype),
    gpu=_gpu,
    vmap=_softmax_vmap,
)
softmax_backward_op = register.define(
    reference.over_any_dim(by_rows(reference.softmax_backward, logits=1)),
    lambda output, dtype: torch.empty_like(output, dtype=dtype),
    name="softmax_backward",
    gpu=_gpu,
    vmap=_softmax_vmap,
)


def _logsumexp_fake(input: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    maximum = input.new_empty(input.shape[:-1], dtype=acc_dtype(input.dtype))
    return input.new_empty(input.shape[:-1], dtype=dtype), maximum, torch.empty_like(maximum)


logsumexp_op = register.define(
    by_rows(reference.logsumexp),
    _logsumexp_fake,
    gpu=_gpu,
    vmap=all_at_once,
)
logsumexp_backward_op = register.define(
    by_rows(reference.logsumexp_backward, logits=1),
    lambda input: torch.empty_like(input),
    gpu=_gpu,
    vmap=all_at_once,
)


class SoftmaxFunction(torch.autograd.Function):
    """Softmax, or with `log` its logarithm; the backward pass reads the output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, dim: int, log: bool, dtype: torch.dtype, backend: str) -> Tensor:
        return softmax_op(input, dim, log, dtype, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        input, dim, log, _, backend = inputs
        ctx.options = dim, log, input.dtype, backend
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (output,) = ctx.saved_tensors
        dim, log, dtype, backend = ctx.options
        op = for_gradients(softmax_backward_op, grads[0])
        grad_input = first_derivative(
            lambda grad, output: op(grad, output, dim, log, dtype, backend),
            lambda grad, output: reference.softmax_gradient(grad, output, dim, log, dtype),
            2,
            grads[0],
            output,
        )
        return grad_input, None, None, None, None


class LogSumExpFunction(torch.autograd.Function):
    """Log-sum-exp over the last dimension, with the row's maximum and sum as further results."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, dtype: torch.dtype, backend: str) -> tuple[Tensor, Tensor, Tensor]:
        return logsumexp_op(input, dtype, backend)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        input, _, ctx.backend = inputs
        _, maximum, sumexp = output
        ctx.mark_non_differentiable(maximum, sumexp)
        ctx.save_for_backward(input, maximum, sumexp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        op, backend = for_gradients(logsumexp_backward_op, grads[0]), ctx.backend
        grad_input = first_derivative(
            lambda *tensors: op(*tensors, backend),
            lambda grad, input, *_: reference.logsumexp_gradient(grad, input),
            2,
            grads[0],
            *ctx.saved_tensors,
        )
        return grad_input, None, None
