"""The registered ops of transducer losses from encoder and predictor, and their autograd functions.

A reduced loss computes its gradients in the forward pass, because the factor of each sequence is
known then. Losses that are not reduced compute them in the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import register
from ...runtime.autograd import (
    double_backward,
    for_gradients,
    is_double_backward,
    one_by_one,
    saved_tensors,
    skip_unused_gradients,
)
from ...runtime.dtypes import acc_dtype
from . import reference
from .autograd import LossFunction, check_sequences
from .common import loss_factors, reduce_losses
from .joint import chunk_mask, joint_hidden


def _check(
    encoder: Tensor,
    weight: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
) -> None:
    sequences = (targets, logit_lengths, target_lengths)
    check_sequences(*sequences, encoder.shape[1], weight.shape[0], blank)


def _fake(
    encoder: Tensor,
    predictor: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    duration_weight: Tensor | None,
    duration_bias: Tensor | None,
    factor: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    tensors = (encoder, predictor, weight, bias, duration_weight, duration_bias)
    shapes = (
        tensor.shape if tensor is not None and wants and factor is not None else (0,)
        for tensor, wants in zip(tensors, wanted, strict=True)
    )
    losses = encoder.new_empty(encoder.shape[0], dtype=acc_dtype(encoder.dtype))
    return losses, *(encoder.new_empty(shape) for shape in shapes)


def _cpu() -> ModuleType:
    from .cpu import launch

    return launch


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


linear_rnnt = register.define(
    reference.linear_rnnt,
    _fake,
    gpu=_gpu,
    cpu=_cpu,
    check=_check,
    vmap=one_by_one,
    reference_if_empty=True,
)

# The arguments of the functions below, in their order: 6 tensors that may need a gradient (encoder,
# predictor, matrix and bias of tokens and of durations), 3 of targets and lengths, options of the
# nodes, chunk and whether all logits are saved, which gradients are wanted, the reduction and the
# backend.
TENSORS, INPUTS = 6, 9


def losses_of_joint(tensors: Sequence[Any], rest: Sequence[Any]) -> Tensor:
    """Return the losses `[B]` by way of all logits, differentiable any number of times.

    Args:
        tensors: encoder, predictor, and matrix and bias of each head.
        rest: targets, lengths and the options of the nodes, as the op takes them, and the backend.
    """
    encoder, predictor, *heads = tensors
    targets, logit_lengths, target_lengths, activation, *options, backend = rest
    T, U1 = encoder.shape[1], predictor.shape[1]
    mask = chunk_mask(logit_lengths, target_lengths, 0, T, U1)
    hidden = joint_hidden(encoder, predictor, activation, mask)
    logits, duration_logits = (
        None if weight is None else torch.nn.functional.linear(hidden, weight, bias)
        for weight, bias in zip(heads[::2], heads[1::2], strict=True)
    )
    blank, durations, hat, sigma, delay_penalty, fastemit_lambda = options
    inputs = (logits, duration_logits, targets, logit_lengths, target_lengths)
    numbers = (blank, durations, True, hat, sigma, delay_penalty, 0.0, fastemit_lambda, False)
    losses: Tensor = LossFunction.apply(*inputs, *numbers, backend)[0]
    return losses


def _call(args: Sequence[Any], factor: Tensor | None, wanted: Sequence[bool]) -> Sequence[Tensor]:
    """Call the op with `args`: tensors, sequences, options of nodes and chunks, and the backend."""
    *inputs, backend = args
    op = linear_rnnt if factor is None else for_gradients(linear_rnnt, factor)
    found: Sequence[Tensor] = op(*inputs[:INPUTS], factor, *inputs[INPUTS:], wanted, backend)
    return found


def _differentiable(
    ctx: Any, inputs: Sequence[Any], grad: Tensor, reduction: str
) -> tuple[Tensor | None, ...]:
    """Return gradients that can be differentiated again."""
    tensors, sequences = inputs[:TENSORS], inputs[TENSORS:]

    def loss(*tensors: Any) -> Tensor:
        rest = (*sequences, *ctx.options[:-2], ctx.backend)
        return reduce_losses(losses_of_joint(tensors, rest), sequences[2], reduction)

    return double_backward(loss, tensors, ctx.wanted, grad)


class ReducedLoss(torch.autograd.Function):
    """The reduced loss, whose gradients are computed in the forward pass.

    The outputs after the loss are the gradients; they are not differentiable.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        *inputs, wanted, reduction, backend = args
        encoder, target_lengths = args[0], args[INPUTS - 1]
        ones = encoder.new_ones(encoder.shape[0], dtype=acc_dtype(encoder.dtype))
        factor = loss_factors(ones, target_lengths, reduction)
        losses, *gradients = _call((*inputs, backend), factor, wanted)
        return reduce_losses(losses, target_lengths, reduction), *gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *ctx.options, ctx.wanted, ctx.reduction, ctx.backend = inputs[INPUTS:]
        ctx.arguments = len(inputs)
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*inputs[:INPUTS], *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * ctx.arguments
        tensors = saved_tensors(ctx)
        if is_double_backward():
            found = _differentiable(ctx, tensors[:INPUTS], grad, ctx.reduction)
        else:
            found = tuple(
                (gradient.to(grad.dtype) * grad).to(gradient.dtype) if wants else None
                for gradient, wants in zip(tensors[INPUTS:], ctx.wanted, strict=True)
            )
        return *found, *(None,) * (ctx.arguments - TENSORS)


class UnreducedLosses(torch.autograd.Function):
    """The losses `[B]`, whose gradients are computed in the backward pass."""

    @staticmethod
    def forward(*args: Any) -> Tensor:
        *inputs, wanted, backend = args
        return _call((*inputs, backend), None, wanted)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *ctx.options, ctx.wanted, ctx.backend = inputs[INPUTS:]
        ctx.arguments = len(inputs)
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*inputs[:INPUTS])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * ctx.arguments
        inputs = saved_tensors(ctx)
        if is_double_backward():
            found = _differentiable(ctx, inputs, grad, "none")
        else:
            args = (*inputs, *ctx.options, ctx.backend)
            gradients = _call(args, grad.contiguous(), ctx.wanted)[1:]
            found = tuple(
                gradient if wants else None
                for gradient, wants in zip(gradients, ctx.wanted, strict=True)
            )
        return *found, *(None,) * (ctx.arguments - TENSORS)
