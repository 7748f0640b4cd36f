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
from . import reference_linear
from .autograd import RNNTLossFunction, TDTLossFunction, check_sequences
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
    tensors: Sequence[Tensor | None], factor: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Return empty tensors with the shapes of the losses and of the gradients."""
    encoder = tensors[0]
    assert encoder is not None
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
    reference_linear.linear_rnnt,
    lambda *args: _fake(args[:4], args[7], args[15:]),
    gpu=_gpu,
    cpu=_cpu,
    check=_check,
    vmap=one_by_one,
    reference_if_empty=True,
)
linear_tdt = register.define(
    reference_linear.linear_tdt,
    lambda *args: _fake(args[:6], args[9], args[16:]),
    gpu=_gpu,
    cpu=_cpu,
    check=_check,
    vmap=one_by_one,
    reference_if_empty=True,
)

# The arguments of the functions below, in their order: tensors that may need a gradient (encoder,
# predictor, matrix, bias; for a TDT also matrix and bias of the durations), targets and lengths,
# options of the nodes, chunk and whether all logits are saved, which gradients are wanted, the
# reduction and the backend.
TENSORS = {False: 4, True: 6}


def losses_of_joint(is_tdt: bool, tensors: Sequence[Any], rest: Sequence[Any]) -> Tensor:
    """Return the losses `[B]` by way of all logits, differentiable any number of times.

    Args:
        is_tdt: whether there are durations.
        tensors: encoder, predictor, and matrix and bias of each head.
        rest: targets, lengths and the options of the nodes, as the ops take them, and the backend.
    """
    encoder, predictor, *heads = tensors
    targets, logit_lengths, target_lengths, activation, *options, backend = rest
    T, U1 = encoder.shape[1], predictor.shape[1]
    mask = chunk_mask(logit_lengths, target_lengths, 0, T, U1)
    hidden = joint_hidden(encoder, predictor, activation, mask)
    logits = [
        torch.nn.functional.linear(hidden, weight, bias)
        for weight, bias in zip(heads[::2], heads[1::2], strict=True)
    ]
    sequences = (targets, logit_lengths, target_lengths)
    losses: Tensor
    if is_tdt:
        losses = TDTLossFunction.apply(*logits, *sequences, *options, backend)[0]
        return losses
    blank, hat, delay_penalty, fastemit_lambda = options
    numbers = (blank, True, hat, delay_penalty, 0.0, fastemit_lambda, False)
    losses = RNNTLossFunction.apply(*logits, *sequences, *numbers, backend)[0]
    return losses


def _call(
    op: Any, args: Sequence[Any], num_tensors: int, factor: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Call the op with `args`: tensors, sequences, options of nodes and chunks, and the backend."""
    *inputs, backend = args
    split = num_tensors + 3
    found: tuple[Tensor, ...] = op(*inputs[:split], factor, *inputs[split:], *wanted, backend)
    return found


def _differentiable(
    ctx: Any, inputs: Sequence[Any], grad: Tensor, reduction: str
) -> tuple[Tensor | None, ...]:
    """Return gradients that can be differentiated again."""
    num_tensors = TENSORS[ctx.is_tdt]
    tensors, sequences = inputs[:num_tensors], inputs[num_tensors:]

    def loss(*tensors: Any) -> Tensor:
        rest = (*sequences, *ctx.options[:-2], ctx.backend)
        return reduce_losses(losses_of_joint(ctx.is_tdt, tensors, rest), sequences[2], reduction)

    return double_backward(loss, tensors, ctx.wanted, grad)


class ReducedLoss(torch.autograd.Function):
    """The reduced loss, whose gradients are computed in the forward pass.

    The outputs after the loss are the gradients; they are not differentiable.
    """

    @staticmethod
    def forward(is_tdt: bool, *args: Any) -> tuple[Tensor, ...]:
        num_tensors, op = TENSORS[is_tdt], linear_tdt if is_tdt else linear_rnnt
        inputs, (reduction, backend) = args[: -2 - num_tensors], args[-2:]
        wanted, encoder, target_lengths = (
            args[-2 - num_tensors : -2],
            args[0],
            args[num_tensors + 2],
        )
        ones = encoder.new_ones(encoder.shape[0], dtype=acc_dtype(encoder.dtype))
        factor = loss_factors(ones, target_lengths, reduction)
        losses, *gradients = _call(op, (*inputs, backend), num_tensors, factor, wanted)
        return reduce_losses(losses, target_lengths, reduction), *gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.is_tdt, *args = inputs
        num_tensors = TENSORS[ctx.is_tdt]
        ctx.options = tuple(args[num_tensors + 3 : -2 - num_tensors])
        ctx.wanted, (ctx.reduction, ctx.backend) = tuple(args[-2 - num_tensors : -2]), args[-2:]
        ctx.arguments = len(inputs)
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*args[: num_tensors + 3], *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad, num_tensors = grads[0], TENSORS[ctx.is_tdt]
        if grad is None:
            return (None,) * ctx.arguments
        tensors = saved_tensors(ctx)
        inputs, gradients = tensors[: num_tensors + 3], tensors[num_tensors + 3 :]
        if is_double_backward():
            found = _differentiable(ctx, inputs, grad, ctx.reduction)
        else:
            found = tuple(
                (gradient.to(grad.dtype) * grad).to(gradient.dtype) if wants else None
                for gradient, wants in zip(gradients, ctx.wanted, strict=True)
            )
        return None, *found, *(None,) * (ctx.arguments - 1 - num_tensors)


class UnreducedLosses(torch.autograd.Function):
    """The losses `[B]`, whose gradients are computed in the backward pass."""

    @staticmethod
    def forward(is_tdt: bool, *args: Any) -> Tensor:
        num_tensors, op = TENSORS[is_tdt], linear_tdt if is_tdt else linear_rnnt
        return _call(
            op,
            (*args[: -1 - num_tensors], args[-1]),
            num_tensors,
            None,
            args[-1 - num_tensors : -1],
        )[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.is_tdt, *args = inputs
        num_tensors = TENSORS[ctx.is_tdt]
        ctx.options, ctx.backend = tuple(args[num_tensors + 3 : -1 - num_tensors]), args[-1]
        ctx.wanted, ctx.arguments = tuple(args[-1 - num_tensors : -1]), len(inputs)
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*args[: num_tensors + 3])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad, num_tensors = grads[0], TENSORS[ctx.is_tdt]
        if grad is None:
            return (None,) * ctx.arguments
        inputs = saved_tensors(ctx)
        if is_double_backward():
            found = _differentiable(ctx, inputs, grad, "none")
        else:
            op = for_gradients(linear_tdt if ctx.is_tdt else linear_rnnt, grad)
            args = (*inputs, *ctx.options, ctx.backend)
            gradients = _call(op, args, num_tensors, grad.contiguous(), ctx.wanted)[1:]
            found = tuple(
                gradient if wants else None
                for gradient, wants in zip(gradients, ctx.wanted, strict=True)
            )
        return None, *found, *(None,) * (ctx.arguments - 1 - num_tensors)
