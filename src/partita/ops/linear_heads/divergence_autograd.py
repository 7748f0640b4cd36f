"""The registered ops of divergences from hidden states and their autograd functions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import register
from ...runtime.autograd import (
    double_backward,
    for_gradients,
    is_double_backward,
    needed_gradients,
    one_by_one,
    plain_eager,
    saved_tensors,
    spend,
)
from ...runtime.dtypes import acc_dtype
from ..divergence.autograd import divergence_of_rows
from ..divergence.common import DivergenceRows, reduced
from . import reference_divergence
from .autograd import gradients_fake, only_wanted, scaled_gradients
from .plan import padded_width
from .rows_linear import rows_linear


def _rows_fake(
    input: Tensor, weight: Tensor, teacher_input: Tensor, save_logits: bool
) -> tuple[Tensor, ...]:
    dtype, M = acc_dtype(input.dtype), input.shape[0]
    size = M * padded_width(weight.shape[0]) if save_logits else 0
    return (
        *(input.new_empty(M, dtype=dtype) for _ in DivergenceRows._fields),
        input.new_empty(size),
        teacher_input.new_empty(size),
    )


def _one_pass_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    loss = input.new_empty(input.shape[0], dtype=acc_dtype(input.dtype))
    return loss, *gradients_fake(input, weight, bias, input_grad, weight_grad, bias_grad)


def _gpu_divergence() -> ModuleType:
    from .gpu import launch_divergence

    return launch_divergence


divergence_op = register.define(
    reference_divergence.linear_divergence,
    _rows_fake,
    gpu=_gpu_divergence,
    vmap=one_by_one,
)
divergence_backward_op = register.define(
    reference_divergence.linear_divergence_backward,
    gradients_fake,
    gpu=_gpu_divergence,
    vmap=one_by_one,
)
one_pass_op = register.define(
    reference_divergence.linear_divergence_one_pass,
    _one_pass_fake,
    gpu=_gpu_divergence,
    vmap=one_by_one,
)


def composed_rows(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    beta: float,
    temperature: float,
    softcap: float,
) -> Tensor:
    """Compute the divergence of each row from all logits at once, `[...]`."""
    logits = rows_linear(input, weight, bias)
    teacher_logits = torch.nn.functional.linear(teacher_input, teacher_weight, teacher_bias)
    if acc_dtype(teacher_logits.dtype) != acc_dtype(logits.dtype):
        teacher_logits = teacher_logits.to(acc_dtype(logits.dtype))
    return divergence_of_rows(logits, teacher_logits.detach(), beta, temperature, softcap)


class LinearDivergence(torch.autograd.Function):
    """The divergences of the rows, and what their gradient needs.

    If the logits are saved, the first backward pass overwrites them with their gradient. Later
    backward passes compute them again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float,
        softcap: float,
        tokens: int,
        chunk: int,
        save_logits: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        heads = (input, weight, bias, teacher_input, teacher_weight, teacher_bias)
        return divergence_op(*heads, beta, temperature, softcap, tokens, save_logits, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *heads, beta, temperature, softcap, _, ctx.chunk, save_logits, ctx.backend = inputs
        ctx.options = (beta, temperature, softcap)
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*heads, *output[1:])
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        no_other_grads, grad = (None,) * 10, grads[0]
        *tensors, logits, teacher_logits = saved_tensors(ctx)
        wanted = needed_gradients(ctx, *tensors[:3])
        heads = tensors[:6]
        if is_double_backward(grad, *heads[:3]):
            gradients = double_backward(
                lambda *student: composed_rows(*student, *heads[3:], *ctx.options),
                heads[:3],
                wanted,
                grad,
            )
            return *gradients, *no_other_grads
        saved, op = None, for_gradients(divergence_backward_op, grad)
        if plain_eager() and op is divergence_backward_op:
            # A batch of gradients would overwrite the logits more than once.
            saved = spend(ctx, logits, teacher_logits)
        saved = saved or (heads[0].new_empty(0), heads[3].new_empty(0))
        gradients = op(grad, *tensors, *saved, *ctx.options, ctx.chunk, *wanted, ctx.backend)
        return *only_wanted(gradients, wanted), *no_other_grads


class LinearDivergenceOnePass(torch.autograd.Function):
    """The reduced divergence and its gradients, which are not differentiable outputs.

    The first backward pass of eager code scales the saved gradients in place, and later ones
    compute them again. A compiler keeps them as tensors of its graph.
    """

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        factors: Tensor,
        mask: Tensor | None,
        reduction: str,
        beta: float,
        temperature: float,
        softcap: float,
        tokens: int,
        saved: int,
        chunk: int,
        input_grad: bool,
        weight_grad: bool,
        bias_grad: bool,
        backend: str,
    ) -> tuple[Tensor, ...]:
        heads = (input, weight, bias, teacher_input, teacher_weight, teacher_bias)
        numbers = (beta, temperature, softcap, tokens, saved, chunk)
        wanted = (input_grad, weight_grad, bias_grad)
        rows, *gradients = one_pass_op(*heads, factors, *numbers, *wanted, backend)
        return reduced(rows, mask, reduction), *gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.reduction, ctx.numbers, ctx.sizes = inputs[8], inputs[9:12], inputs[12:15]
        ctx.wanted, ctx.backend = inputs[15:18], inputs[18]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:8], *output[1:])
        ctx.is_spent = False

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad, no_option_grads = grads[0], (None,) * 16
        if grad is None:
            return None, None, None, *no_option_grads
        saved: tuple[Any, ...] = ctx.saved_tensors
        (*heads, factors, mask), gradients = saved[:8], saved[8:]
        if is_double_backward():

            def loss(*student: Any) -> Tensor:
                rows = composed_rows(*student, *heads[3:], *ctx.numbers)
                return reduced(rows, mask, ctx.reduction)

            return *double_backward(loss, heads[:3], ctx.wanted, grad), *no_option_grads
        if ctx.is_spent:
            call = (*heads, factors, *ctx.numbers, *ctx.sizes, *ctx.wanted, ctx.backend)
            gradients = one_pass_op(*call)[1:]
        return *scaled_gradients(ctx, gradients, grad), *no_option_grads
