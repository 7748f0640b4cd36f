"""The registered ops of transducers and the autograd functions of their losses.

Tensors come from logits, or from encoder and predictor, whose joint is computed in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import (
    apply,
    double_backward,
    first_derivative,
    for_gradients,
    is_double_backward,
    needs_gradient,
    one_by_one,
    plain_eager,
    refuse_forward_mode,
    saved_tensors,
    skip_unused_gradients,
    takes,
)
from ...runtime.dtypes import acc_dtype
from ..ctc.common import reduce_losses
from . import reference
from .common import (
    JointInputs,
    NodeInputs,
    NodeOptions,
    loss_factors,
    node_mask,
)
from .joint import chunk_logits, joint_hidden


def _check(
    logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, blank: int
) -> None:
    """Raise for the first length or label that is out of range, where values are checked."""
    if checks.can_check_values(targets):
        checks.within("logit_lengths", logit_lengths, 0, logits.shape[1], "steps")
        checks.target_labels(targets, target_lengths, 0, logits.shape[3] - 1, blank=blank)


def _check_joint(
    encoder: Tensor,
    weight: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
) -> None:
    if checks.can_check_values(targets):
        checks.within("logit_lengths", logit_lengths, 0, encoder.shape[1], "steps")
        checks.target_labels(targets, target_lengths, 0, weight.shape[0] - 1, blank=blank)


def _forward_fake(
    logits: Tensor, durations: Sequence[int], fused: bool, need_posteriors: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nodes, dtype, K = logits.shape[:3], acc_dtype(logits.dtype), len(durations)
    return (
        logits.new_empty(logits.shape[0], dtype=dtype),
        logits.new_empty(nodes if need_posteriors and fused else (0,), dtype=torch.float64),
        logits.new_empty(nodes if need_posteriors and K else (0,), dtype=torch.float64),
        logits.new_empty((2 + K, *nodes) if need_posteriors else (0,), dtype=dtype),
    )


def _align_fake(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = acc_dtype(logits.dtype)
    return (
        logits.new_empty(targets.shape, dtype=torch.int64),
        logits.new_empty(targets.shape, dtype=dtype),
        logits.new_empty(targets.shape[0], dtype=dtype),
    )


def _gradient_fake(logits: Tensor, duration_logits: Tensor | None) -> tuple[Tensor, Tensor]:
    found = logits.new_empty(logits.shape)
    return found, found.new_empty((0,) if duration_logits is None else duration_logits.shape)


def _joint_fake(
    inputs: JointInputs, factor: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    encoder = inputs.encoder
    shapes = (
        tensor.shape if tensor is not None and wants and factor is not None else (0,)
        for tensor, wants in zip(inputs[:TENSORS], wanted, strict=True)
    )
    losses = encoder.new_empty(encoder.shape[0], dtype=acc_dtype(encoder.dtype))
    return losses, *(encoder.new_empty(shape) for shape in shapes)


def _cpu() -> ModuleType:
    from .cpu import launch

    return launch


def _gpu() -> tuple[ModuleType, ...]:
    from .gpu import launch, launch_linear

    return launch, launch_linear


_define = partial(register.define, gpu=_gpu, cpu=_cpu, reference_if_empty=True)
forward = _define(reference.rnnt_forward, _forward_fake, check=_check, vmap=one_by_one)
gradient = _define(reference.rnnt_gradient, _gradient_fake, vmap=one_by_one)
gradient_inplace = _define(
    reference.logits_gradient, lambda: None, name="rnnt_gradient", overwrites="logits"
)
align = _define(reference.rnnt_align, _align_fake, check=_check, vmap=one_by_one)
linear_rnnt = _define(reference.linear_rnnt, _joint_fake, check=_check_joint, vmap=one_by_one)


class LossFunction(torch.autograd.Function):
    """The losses of a transducer, `[B]`, with what their gradient needs beside them.

    The outputs after the losses are not differentiable. RNN-T has no durations and no logits of
    durations. With `inplace` the gradient replaces the logits.
    """

    generate_vmap_rule = True

    @staticmethod
    @takes(forward, "clamp", "fastemit_lambda", "inplace")
    def forward(*args: Any) -> Any:
        return forward(*args[:-3])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *options, _, ctx.backend, clamp, fastemit_lambda, ctx.inplace = inputs[5:]
        ctx.options = (*options, clamp, fastemit_lambda)
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*inputs[:5], *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * 16
        tensors, options = (grad, *saved_tensors(ctx)), (*ctx.options, ctx.backend)
        if ctx.inplace:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "inplace=True writes the gradient over the logits, so there is no second"
                    " derivative: use inplace=False"
                )
            logits = tensors[1]
            gradient_inplace(*tensors, *options)
            torch.autograd.graph.increment_version(logits)
            return logits.detach(), *(None,) * 15
        op = for_gradients(gradient, grad)

        def kernel(*tensors: Any) -> Any:
            return op(*tensors, *options)

        def of_logits(grad: Tensor, *rest: Any) -> Any:
            *numbers, clamp, fastemit_lambda = ctx.options
            nodes = NodeInputs(*rest[:5]), NodeOptions(*numbers)
            return reference.differentiable_gradient(grad, *nodes, clamp, fastemit_lambda)

        if is_double_backward():
            variables = 2 if tensors[2] is None else 3
            found = first_derivative(kernel, of_logits, variables, *tensors)
        else:
            found = kernel(*tensors)
        return found[0], None if tensors[2] is None else found[1], *(None,) * 14


def losses_of(
    inputs: Sequence[Any], nodes: Sequence[Any], of_gradient: Sequence[Any], backend: str
) -> Tensor:
    """Return the losses, `[B]`, with what a gradient needs only where one may follow.

    The arguments are the fields of `NodeInputs` and `NodeOptions`, and the options of the gradient:
    clamp, FastEmit's factor, and whether it is written over the logits.
    """
    logits: Sequence[Tensor | None] = inputs[:2]
    found: Sequence[Tensor]
    if needs_gradient(*logits) or not plain_eager():
        found = apply(LossFunction, *inputs, *nodes, True, backend, *of_gradient)
    else:
        refuse_forward_mode(*logits)
        found = forward(*inputs, *nodes, False, backend)
    return found[0]


# The arguments of `LinearLoss`, in their order: 8 tensors that may need a gradient (encoder,
# predictor, matrix and bias of tokens and of durations, A and B), 3 of targets and lengths, options
# of the nodes, chunk, whether all logits are saved and whether products have whole blocks, which
# gradients are wanted, the reduction and the backend.
TENSORS, INPUTS = 8, 11


def losses_of_joint(tensors: Sequence[Any], rest: Sequence[Any], invariant: bool = False) -> Tensor:
    """Return the losses `[B]` by way of all logits, differentiable any number of times.

    The tensors are the first `TENSORS` of `JointInputs`. The rest are targets,
    lengths and options as the op takes them, and the backend.
    """
    *sequences, activation = rest[:4]
    *nodes, fastemit_lambda, backend = rest[4:]
    inputs = JointInputs(*tensors, *sequences)
    encoder, predictor = inputs[:2]
    lengths = (inputs.logit_lengths, inputs.target_lengths)
    mask = node_mask(*lengths, 0, encoder.shape[1], predictor.shape[1])
    hidden = joint_hidden(encoder, predictor, activation, mask, invariant)
    logits = chunk_logits(inputs, hidden, mask.shape, invariant)
    args = (*logits, *sequences, *nodes, True, backend, 0.0, fastemit_lambda, False)
    losses: Tensor = LossFunction.apply(*args)[0]
    return losses


class LinearLoss(torch.autograd.Function):
    """The loss from encoder and predictor, reduced, or `[B]` with the reduction `none`.

    A reduced loss computes its gradients in the forward pass, because the factor of each sequence
    is known then. They are the outputs after the loss, and not differentiable. Losses that are not
    reduced compute them in the backward pass.
    """

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        *inputs, wanted, reduction, backend = args
        encoder, target_lengths, factor = args[0], args[INPUTS - 1], None
        if reduction != "none":
            ones = encoder.new_ones(encoder.shape[0], dtype=acc_dtype(encoder.dtype))
            factor = loss_factors(ones, target_lengths, reduction)
        found = linear_rnnt(*inputs[:INPUTS], factor, *inputs[INPUTS:], wanted, backend)
        return reduce_losses(found[0], target_lengths, reduction), *found[1:]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *ctx.options, ctx.wanted, ctx.reduction, ctx.backend = inputs[INPUTS:]
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*inputs[:INPUTS], *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad, tensors = grads[0], saved_tensors(ctx)
        inputs, gradients = tensors[:INPUTS], tensors[INPUTS:]
        sequences = inputs[TENSORS:]
        rest = (None,) * (len(sequences) + len(ctx.options) + 3)
        if grad is None:
            return (None,) * TENSORS + rest

        def loss(*variables: Any) -> Tensor:
            options = (*sequences, *ctx.options[:-3], ctx.backend)
            return reduce_losses(losses_of_joint(variables, options), sequences[2], ctx.reduction)

        if is_double_backward():
            return *double_backward(loss, inputs[:TENSORS], ctx.wanted, grad), *rest
        if ctx.reduction == "none":
            op, options = for_gradients(linear_rnnt, grad), (*ctx.options, ctx.wanted, ctx.backend)
            gradients = op(*inputs, grad.contiguous(), *options)[1:]
        else:
            gradients = tuple((each.to(grad.dtype) * grad).to(each.dtype) for each in gradients)
        found = (each if wants else None for each, wants in zip(gradients, ctx.wanted, strict=True))
        return *found, *rest
