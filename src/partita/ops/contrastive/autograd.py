"""The registered ops of contrastive losses, and their autograd function."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import register
from ...runtime.autograd import (
    double_backward,
    is_double_backward,
    needed_gradients,
    one_by_one,
    saved_tensors,
)
from . import reference
from .common import empty_gradients, empty_state, has_fast_products, mean_loss, scaled_gradients


def _gpu() -> ModuleType:
    from .gpu import kernels

    return kernels


def fake_state(
    a: Tensor, b: Tensor, symmetric: bool, save: bool, served_by: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `contrastive_state` without values, by who serves it."""
    return empty_state(a, b, symmetric, save, served_by == "gpu" and has_fast_products(a))


define_op = functools.partial(register.define, gpu=_gpu, vmap=one_by_one)
state_op = define_op(reference.contrastive_state, fake_state)
gradient_op = define_op(reference.contrastive_gradient, empty_gradients)


class ContrastiveLoss(torch.autograd.Function):
    """The loss of pairs, and the results of `contrastive_state`, from which its gradients follow.

    The loss is differentiable in the features, the scale and the bias.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None,
        is_sigmoid: bool,
        symmetric: bool,
        budget: int,
        save: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        numbers = (logit_scale, logit_bias, 0, is_sigmoid, symmetric, budget)
        rows, columns, saved = state_op(a, b, *numbers, save, backend)
        return mean_loss(rows, columns, is_sigmoid, symmetric), rows, columns, saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *ctx.options, _, ctx.backend = inputs[4:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:4], *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        tensors, grad = saved_tensors(ctx), grads[0]
        inputs, wanted = tensors[:4], needed_gradients(ctx, *tensors[:4])
        if is_double_backward(*inputs, grad):
            *options, _ = ctx.options
            found = double_backward(
                lambda *inputs: reference.contrastive_loss(*inputs, *options), inputs, wanted, grad
            )
        else:
            call = (*tensors, 0, *ctx.options, *wanted[:2], ctx.backend)
            found = scaled_gradients(grad, inputs[2], gradient_op(*call), inputs[0].dtype)
        each = zip(found, wanted, strict=True)
        return *(gradient if wants else None for gradient, wants in each), *(None,) * 5
