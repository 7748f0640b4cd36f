"""The registered ops of transducers and the autograd functions of their losses."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import (
    first_derivative,
    for_gradients,
    is_double_backward,
    one_by_one,
    saved_tensors,
    skip_unused_gradients,
)
from ...runtime.dtypes import acc_dtype
from . import reference, reference_tdt


def check_sequences(
    targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, T: int, V: int, blank: int
) -> None:
    """Raise for the first length or label that is out of range, where values are checked."""
    if not checks.can_check_values(targets):
        return
    checks.within("logit_lengths", logit_lengths, 0, T, "steps")
    checks.target_labels(targets, target_lengths, 0, V - 1, blank=blank)


def _check_rnnt(
    logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, blank: int
) -> None:
    T, V = logits.shape[1], logits.shape[3]
    check_sequences(targets, logit_lengths, target_lengths, T, V, blank)


def _check_tdt(
    token_logits: Tensor, targets: Tensor, logit_lengths: Tensor, target_lengths: Tensor, blank: int
) -> None:
    _check_rnnt(token_logits, targets, logit_lengths, target_lengths, blank)


def _forward_fake(
    logits: Tensor, fused: bool, need_posteriors: bool
) -> tuple[Tensor, Tensor, Tensor]:
    nodes, dtype = logits.shape[:3], acc_dtype(logits.dtype)
    return (
        logits.new_empty(logits.shape[0], dtype=dtype),
        logits.new_empty(nodes if need_posteriors and fused else (0,), dtype=torch.float64),
        logits.new_empty((2, *nodes) if need_posteriors else (0,), dtype=dtype),
    )


def _tdt_forward_fake(
    token_logits: Tensor, durations: Sequence[int], need_posteriors: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nodes, dtype = token_logits.shape[:3], acc_dtype(token_logits.dtype)
    shapes = (nodes, (2 + len(durations), *nodes)) if need_posteriors else ((0,),) * 2
    return (
        token_logits.new_empty(token_logits.shape[0], dtype=dtype),
        token_logits.new_empty(shapes[0], dtype=torch.float64),
        token_logits.new_empty(shapes[0], dtype=torch.float64),
        token_logits.new_empty(shapes[1], dtype=dtype),
    )


def _align_fake(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = acc_dtype(logits.dtype)
    return (
        logits.new_empty(targets.shape, dtype=torch.int64),
        logits.new_empty(targets.shape, dtype=dtype),
        logits.new_empty(targets.shape[0], dtype=dtype),
    )


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _cpu() -> ModuleType:
    from .cpu import launch

    return launch


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


forward = register.define(
    reference.rnnt_forward,
    _forward_fake,
    gpu=_gpu,
    cpu=_cpu,
    check=_check_rnnt,
    vmap=one_by_one,
    reference_if_empty=True,
)
gradient = register.define(
    reference.rnnt_gradient,
    lambda logits: _contiguous_like(logits),
    gpu=_gpu,
    cpu=_cpu,
    vmap=one_by_one,
    reference_if_empty=True,
)
gradient_inplace = register.define(
    reference.rnnt_gradient,
    lambda: None,
    gpu=_gpu,
    cpu=_cpu,
    overwrites="logits",
    reference_if_empty=True,
)
align = register.define(
    reference.rnnt_align,
    lambda logits, targets: _align_fake(logits, targets),
    gpu=_gpu,
    cpu=_cpu,
    check=_check_rnnt,
    vmap=one_by_one,
    reference_if_empty=True,
)
tdt_forward = register.define(
    reference_tdt.tdt_forward,
    _tdt_forward_fake,
    gpu=_gpu,
    cpu=_cpu,
    check=_check_tdt,
    vmap=one_by_one,
    reference_if_empty=True,
)
tdt_gradient = register.define(
    reference_tdt.tdt_gradient,
    lambda token_logits, duration_logits: (
        _contiguous_like(token_logits),
        _contiguous_like(duration_logits),
    ),
    gpu=_gpu,
    cpu=_cpu,
    vmap=one_by_one,
    reference_if_empty=True,
)
tdt_align = register.define(
    reference_tdt.tdt_align,
    lambda token_logits, targets: _align_fake(token_logits, targets),
    gpu=_gpu,
    cpu=_cpu,
    check=_check_tdt,
    vmap=one_by_one,
    reference_if_empty=True,
)


class RNNTLossFunction(torch.autograd.Function):
    """The losses of a transducer, `[B]`, with the log-sum-exps and posteriors beside them.

    The last two outputs serve the gradient and are not differentiable. With `inplace` the gradient
    replaces the logits.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor,
        targets: Tensor,
        logit_lengths: Tensor,
        target_lengths: Tensor,
        blank: int,
        fused: bool,
        hat: bool,
        delay_penalty: float,
        clamp: float,
        fastemit_lambda: float,
        inplace: bool,
        backend: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sequences = (targets, logit_lengths, target_lengths)
        losses: tuple[Tensor, Tensor, Tensor] = forward(
            logits, *sequences, blank, fused, hat, delay_penalty, True, backend
        )
        return losses

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, *sequences = inputs[:4]
        *ctx.options, ctx.inplace, ctx.backend = inputs[4:]
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        ctx.save_for_backward(logits, *output[1:], *sequences)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * 12
        tensors = (grad, *saved_tensors(ctx))
        blank, fused, hat, delay_penalty, clamp, fastemit_lambda = ctx.options
        options = (blank, fused, hat, clamp, fastemit_lambda)
        if ctx.inplace:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "inplace=True writes the gradient over the logits, so there is no second"
                    " derivative: use inplace=False"
                )
            gradient_inplace(*tensors, *options, ctx.backend)
            torch.autograd.graph.increment_version(tensors[1])
            return tensors[1].detach(), *(None,) * 11
        op, backend = for_gradients(gradient, grad), ctx.backend
        if not is_double_backward():
            return op(*tensors, *options, backend), *(None,) * 11

        def of_logits(grad: Tensor, logits: Tensor, *others: Any) -> Tensor:
            numbers: Any = (blank, fused, hat, delay_penalty, clamp, fastemit_lambda)
            inputs: Any = (grad, logits, *others[2:], *numbers)
            return reference.differentiable_gradient(*inputs)

        result = first_derivative(
            lambda *tensors: op(*tensors, *options, backend), of_logits, 2, *tensors
        )
        return result, *(None,) * 11


class TDTLossFunction(torch.autograd.Function):
    """The losses of a token-and-duration transducer, `[B]`, with what their gradient needs.

    The outputs after the losses are not differentiable.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        token_logits: Tensor,
        duration_logits: Tensor,
        targets: Tensor,
        logit_lengths: Tensor,
        target_lengths: Tensor,
        blank: int,
        durations: list[int],
        sigma: float,
        backend: str,
    ) -> tuple[Tensor, ...]:
        inputs = (token_logits, duration_logits, targets, logit_lengths, target_lengths)
        losses: tuple[Tensor, ...] = tdt_forward(*inputs, blank, durations, sigma, True, backend)
        return losses

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tokens, durations, *sequences = inputs[:5]
        ctx.blank, ctx.durations, ctx.sigma, ctx.backend = inputs[5:]
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        ctx.save_for_backward(tokens, durations, *output[1:], *sequences)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grad = grads[0]
        if grad is None:
            return (None,) * 9
        tensors = (grad, *saved_tensors(ctx))
        op, blank, backend = for_gradients(tdt_gradient, grad), ctx.blank, ctx.backend
        durations, sigma = ctx.durations, ctx.sigma
        if not is_double_backward():
            return *op(*tensors, blank, backend), *(None,) * 7

        def of_logits(grad: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
            inputs: Any = (grad, *others[:2], *others[5:], blank, durations, sigma)
            return reference_tdt.differentiable_gradient(*inputs)

        results = first_derivative(
            lambda *tensors: op(*tensors, blank, backend), of_logits, 3, *tensors
        )
        return *results, *(None,) * 7
