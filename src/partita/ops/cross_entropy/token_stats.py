"""The autograd functions of token statistics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.autograd import (
    first_derivative,
    for_gradients,
    is_double_backward,
    plain_eager,
    without_wrappers,
)
from . import reference
from .autograd import token_stats_backward_op, token_stats_op


class TokenStatsFunction(torch.autograd.Function):
    """The fields of `TokenStatsRows`, differentiable in the first three.

    Without a target, the arg-max is the target of the backward pass; then the caller passes an
    `ignore_index` that is no class.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor,
        target: Tensor | None,
        temperature: float,
        softcap: float,
        ignore_index: int,
        backend: str,
    ) -> tuple[Tensor, ...]:
        return token_stats_op(logits, target, temperature, softcap, ignore_index, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, target, *ctx.options = inputs
        _, _, entropy, argmax, maximum, sumexp = output
        if plain_eager():
            ctx.set_materialize_grads(False)  # Zeros for unused fields would cost a launch each.
        ctx.mark_non_differentiable(argmax, maximum, sumexp)
        target = argmax if target is None else target
        ctx.save_for_backward(logits, target, maximum, sumexp, entropy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        dlogits = _token_stats_gradient(grads[:3], ctx.saved_tensors, tuple(ctx.options))
        return dlogits, None, None, None, None, None


def _token_stats_gradient(
    grads: tuple[Any, ...], saved: tuple[Any, ...], all_options: tuple[Any, ...]
) -> Tensor:
    """Return the gradient in the logits, which may be differentiated again."""
    *options, backend = all_options
    tensors = without_wrappers(saved)
    grad_logprob, *others = grads
    if grad_logprob is None:
        grad_logprob = torch.zeros_like(tensors[4])
    op = for_gradients(token_stats_backward_op, grad_logprob, *others)
    if not is_double_backward():
        return op(grad_logprob, *others, *tensors, *options, backend)
    others = [torch.zeros_like(grad_logprob) if grad is None else grad for grad in others]
    return first_derivative(
        lambda *tensors: op(*tensors, *options, backend),
        lambda *tensors: reference.token_stats_gradient(*tensors, *options),
        4,
        grad_logprob,
        *others,
        *tensors,
    )
