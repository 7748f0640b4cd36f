"""The registered ops of divergences from hidden states and their autograd functions."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import register
from ...runtime.autograd import one_by_one
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.autograd import OnePassLoss
from ..divergence.autograd import divergence_of_rows
from ..divergence.common import DivergenceRows, reduced
from . import reference
from .autograd import LinearOnePass, head_backward, one_pass_fake, rows_linear
from .chunked import empty_gradients
from .common import Wanted
from .plan import padded_width


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


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


divergence_op = register.define(
    reference.linear_divergence,
    _rows_fake,
    gpu=_gpu,
    vmap=one_by_one,
)
divergence_backward_op = register.define(
    reference.linear_divergence_backward,
    empty_gradients,
    gpu=_gpu,
    vmap=one_by_one,
)
one_pass_op = register.define(
    reference.linear_divergence_one_pass,
    one_pass_fake(has_rows=True),
    gpu=_gpu,
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
    """The results of `divergence_op`; the chunk of its backward pass is the last argument."""

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
        save_logits: bool,
        backend: str,
        chunk: int,
    ) -> tuple[Tensor, ...]:
        heads = (input, weight, bias, teacher_input, teacher_weight, teacher_bias)
        return divergence_op(*heads, beta, temperature, softcap, tokens, save_logits, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.options, (_, save_logits, ctx.backend, ctx.chunk) = inputs[6:9], inputs[9:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*inputs[:6], *output[1:])
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        def composed(*tensors: Any) -> Tensor:
            return composed_rows(*tensors[:6], *ctx.options)

        return head_backward(ctx, divergence_backward_op, grads[0], composed, heads=2)


def _loss_and_gradients(*args: Any) -> tuple[Tensor, ...]:
    *heads, factors, mask = args[:8]
    rows, *gradients = one_pass_op(*heads, factors, *args[9:])
    return reduced(rows, mask, args[8]), *gradients


def _composed_loss(*args: Any) -> Tensor:
    mask, reduction = args[7:9]
    return reduced(composed_rows(*args[:6], *args[9:12]), mask, reduction)


# The tensors are both heads, the factors of the rows and the mask. The options are the reduction
# and those of `one_pass_op`.
ONE_PASS = OnePassLoss(_loss_and_gradients, _composed_loss, 8)


class LinearDivergenceOnePass(LinearOnePass):
    """The reduced divergence of heads and its gradients; see `LinearOnePass`."""

    @staticmethod
    def forward(  # type: ignore[override]
        loss: OnePassLoss,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_input: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        factors: Tensor,
        mask: Tensor | None,
        options: tuple[Any, ...],
        wanted: Wanted,
        backend: str,
    ) -> tuple[Tensor, ...]:
        heads = (input, weight, bias, teacher_input, teacher_weight, teacher_bias)
        return loss.run(*heads, factors, mask, *options, *wanted, backend)
