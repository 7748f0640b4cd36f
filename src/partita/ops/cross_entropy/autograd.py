"""The ops of cross-entropy and their derivatives."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import (
    batch_first,
    first_derivative,
)
from ...runtime.dtypes import acc_dtype
from . import reference
from .backends import BACKENDS


def _row_shape(logits: Tensor) -> list[int]:
    return [logits.shape[0], *logits.shape[2:]]


def _check_labels(logits: Tensor, target: Tensor, ignore_index: int) -> None:
    if not target.is_floating_point():
        checks.labels("target", target, logits.shape[1], ignore_index)


def _rows_vmap(info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    """The batch joins the rows: every tensor has it in front, but for the class weights, which cannot have it."""
    count = sum(isinstance(arg, Tensor) or arg is None for arg in args)
    tensors, options = list(args[:count]), args[count:]
    weight_at = 2 if count == 3 else 4
    if in_dims[weight_at] is not None:
        raise NotImplementedError(
            "weight: class weights that differ over a vmapped dimension are not supported"
        )
    for i, (tensor, at) in enumerate(zip(tensors, in_dims, strict=False)):
        if i != weight_at:
            tensors[i] = batch_first(tensor, at, info.batch_size).flatten(0, 1)
    if count == 3:
        return tuple(
            part.unflatten(0, (info.batch_size, len(part) // max(info.batch_size, 1)))
            for part in _rows(*tensors, *options)
        ), (0,) * 5
    return _rows_backward(*tensors, *options).unflatten(0, (info.batch_size, -1)), 0


def _rows_fake(logits: Tensor, *_: Any) -> tuple[Tensor, ...]:
    wide = acc_dtype(logits.dtype)
    return tuple(logits.new_empty(_row_shape(logits), dtype=wide) for _ in range(5))


_rows = register.define(
    "cross_entropy(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, float softcap, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _rows_fake,
    check=lambda logits, target, weight, ignore_index, *_: _check_labels(
        logits, target, ignore_index
    ),
    vmap=_rows_vmap,
    backends=BACKENDS,
)
_rows_backward = register.define(
    "cross_entropy_backward(Tensor grad_loss, Tensor grad_logsumexp, Tensor logits, Tensor target, Tensor? weight,"
    " Tensor maximum, Tensor sumexp, Tensor total_weight, int ignore_index, float label_smoothing, float softcap, str backend) -> Tensor",
    lambda grad_loss, grad_logsumexp, logits, *_: torch.empty_like(logits),
    vmap=_rows_vmap,
    backends=BACKENDS,
)
_rows_backward_inplace = register.define(
    "cross_entropy_backward_(Tensor grad_loss, Tensor grad_logsumexp, Tensor(a!) logits, Tensor target, Tensor? weight,"
    " Tensor maximum, Tensor sumexp, Tensor total_weight, int ignore_index, float label_smoothing, float softcap, str backend) -> ()",
    lambda *_: None,
    backends=BACKENDS,
)
_NUMBERS = "int ignore_index, float label_smoothing, float softcap"
_reduced_loss = register.define(
    f"cross_entropy_reduced(Tensor logits, Tensor target, Tensor? weight, {_NUMBERS}, bool mean, ScalarType dtype, str backend) -> Tensor",
    lambda logits, *args: logits.new_empty((), dtype=args[-1]),
    check=lambda logits, target, weight, ignore_index, *_: _check_labels(
        logits, target, ignore_index
    ),
    backends=BACKENDS,
)
_one_pass = register.define(
    f"cross_entropy_one_pass(Tensor logits, Tensor target, Tensor? weight, {_NUMBERS}, float z_loss, bool mean, ScalarType dtype, str backend)"
    " -> (Tensor, Tensor)",
    lambda logits, *args: (logits.new_empty((), dtype=args[-1]), torch.empty_like(logits)),
    check=lambda logits, target, weight, ignore_index, *_: _check_labels(
        logits, target, ignore_index
    ),
    backends=BACKENDS,
)
_one_pass_inplace = register.define(
    f"cross_entropy_one_pass_(Tensor(a!) logits, Tensor target, Tensor? weight, {_NUMBERS}, float z_loss, bool mean, ScalarType dtype, str backend)"
    " -> Tensor",
    lambda logits, *args: logits.new_empty((), dtype=args[-1]),
    check=lambda logits, target, weight, ignore_index, *_: _check_labels(
        logits, target, ignore_index
    ),
    backends=BACKENDS,
)
scale_gradient = register.define(
    "scale_(Tensor(a!) grad, Tensor factor, str backend) -> ()",
    lambda *_: None,
    backends=BACKENDS,
)


class _Options(NamedTuple):
    ignore_index: int
    label_smoothing: float
    softcap: float  # 0 for none
    z_loss: float
    mean: bool
    dtype: torch.dtype  # of the loss
    backend: str


class _Rows(torch.autograd.Function):
    """Loss and log-sum-exp of each row; the gradient is computed in the backward pass, over the logits where `inplace`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        softcap: float,
        backend: str,
        inplace: bool,
    ) -> tuple[Tensor, ...]:
        return _rows(logits, target, weight, ignore_index, smoothing, softcap, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, target, weight, *ctx.options, ctx.inplace = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(logits, target, weight, *output[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits, target, weight, *statistics = ctx.saved_tensors
        grad_loss, grad_logsumexp = grads[:2]
        *options, backend = ctx.options
        if ctx.inplace:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "inplace=True writes the gradient over the logits, so there is no second derivative: use inplace=False"
                )
            _rows_backward_inplace(
                grad_loss, grad_logsumexp, logits, target, weight, *statistics, *options, backend
            )
            torch.autograd.graph.increment_version(logits)
            return logits.detach(), *(None for _ in range(7))
        probabilities = target.is_floating_point()
        variables = 3 if not probabilities else 4 if weight is None else 5
        grad_logits = first_derivative(
            lambda *tensors: _rows_backward(*tensors, *options, backend),
            lambda *tensors: reference.cross_entropy_gradient(*tensors, *options),
            variables,
            *(grad_loss, grad_logsumexp, logits, target, weight, *statistics),
        )
        grad_target, grad_weight = None, None
        if probabilities and (ctx.needs_input_grad[1] or ctx.needs_input_grad[2]):
            others = [target] if weight is None else [target, weight]
            pull_back = torch.func.vjp(
                lambda target, weight=None: (
                    reference.cross_entropy(logits, target, weight, *options).loss
                ),
                *others,
            )[1]
            grad_target, grad_weight = (*pull_back(grad_loss), None)[:2]
        return grad_logits, grad_target, grad_weight, None, None, None, None, None


class _OnePass(torch.autograd.Function):
    """The reduced loss, with the gradient formed beside it; eager only, because it keeps that gradient until the first backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        options: _Options,
        inplace: bool,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.options, ctx.inplace = options, inplace
        if inplace:
            loss = _one_pass_inplace(logits, target, weight, *options)
            torch.autograd.graph.increment_version(logits)
            ctx.gradient, ctx.version = logits.detach(), logits._version
        else:
            ctx.save_for_backward(logits, target, weight)
            loss, ctx.gradient = _one_pass(logits, target, weight, *options)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        (grad,) = grads
        if grad is None:
            return None, None, None, None, None
        if ctx.inplace and (torch.is_grad_enabled() or ctx.gradient is None):
            raise RuntimeError(
                "inplace=True wrote the gradient over the logits: it serves one backward pass and no second derivative"
            )
        if ctx.inplace and ctx.gradient._version != ctx.version:
            raise RuntimeError(
                "inplace=True wrote the gradient over the logits, and that memory has been written to since: there is no gradient any more"
            )
        if torch.is_grad_enabled():
            logits, target, weight = ctx.saved_tensors
            loss = _reduced(
                logits, target, weight, ctx.options, "mean" if ctx.options.mean else "sum"
            )
            return (
                torch.autograd.grad(loss, logits, grad, create_graph=True)[0],
                None,
                None,
                None,
                None,
            )
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            logits, target, weight = ctx.saved_tensors
            gradient = _one_pass(logits, target, weight, *ctx.options)[1]
        scale_gradient.eager(gradient, grad, ctx.options.backend)
        return gradient, None, None, None, None


def _reduced(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: _Options,
    reduction: str,
    inplace: bool = False,
) -> Tensor:
    """The loss from the rows: each term in PyTorch, so that a compiler or a function transform sees through it."""
    numbers = options.ignore_index, options.label_smoothing, options.softcap
    loss, logsumexp, *_ = _Rows.apply(logits, target, weight, *numbers, options.backend, inplace)
    z = options.z_loss * logsumexp.square() if options.z_loss else None
    if reduction != "mean":
        loss = loss if z is None else loss + z
        return (loss if reduction == "none" else loss.sum()).to(options.dtype)
    if target.is_floating_point():
        rows = loss.numel()
        main = loss.sum() / rows if rows else loss.sum() / 0.0
        return (main if z is None else main + z.sum() / rows).to(options.dtype)
    denominators = reference.mean_denominators(
        target, weight, options.ignore_index, logits.shape[1]
    )
    main = loss.sum() / denominators[0]
    return (main if z is None else main + z.sum() / denominators[1]).to(options.dtype)
