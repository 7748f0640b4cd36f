"""Cross-entropy between logits and targets, with its gradient in the same pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import (
    apply,
    autocast_dtype,
    batch_first,
    first_derivative,
    plain_eager,
    refuse_forward_mode,
)
from ...runtime.backend import current_backend, resolve
from ...runtime.dtypes import acc_dtype
from . import reference
from .backends import BACKENDS

REDUCTIONS = ("none", "mean", "sum")


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
scale = register.define(
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
        scale.eager(gradient, grad, ctx.options.backend)
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
    denominators = reference.cross_entropy_denominators(
        target, weight, options.ignore_index, logits.shape[1]
    )
    main = loss.sum() / denominators[0]
    return (main if z is None else main + z.sum() / denominators[1]).to(options.dtype)


def _check(
    input: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, softcap: float | None
) -> None:
    checks.floating("input", input)
    checks.tensor("target", target)
    checks.whole("ignore_index", ignore_index)
    if input.ndim == 0:
        raise ValueError("input: expected shape [N, C, ...] or [C], got []")
    checks.device("target", target, input, "input")
    classes = input.shape[0 if input.ndim == 1 else 1]
    if target.shape == input.shape and target.is_floating_point():
        if ignore_index >= 0:
            raise ValueError(
                f"ignore_index: expected none (a negative number) with target probabilities, got {ignore_index}"
            )
    else:
        checks.integer("target", target)
        rows = [] if input.ndim == 1 else [input.shape[0], *input.shape[2:]]
        checks.shape("target", target, rows, "[N, ...] of input without its classes")
    if weight is not None:
        checks.floating("weight", weight)
        checks.device("weight", weight, input, "input")
        checks.shape("weight", weight, [classes], "[C]")
        if weight.requires_grad and not target.is_floating_point() and torch.is_grad_enabled():
            raise RuntimeError(
                "weight: not differentiable with label targets, as in torch; detach it, or give target probabilities"
            )
    if softcap is not None:
        checks.number("softcap", softcap, low=0.0, open_low=True)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    inplace: bool = False,
) -> Tensor:
    """Cross-entropy between logits and targets: `F.cross_entropy`, with soft-capping and z-loss.

    When `input` needs a gradient and `reduction` is `mean` or `sum`, the loss and the gradient come from one pass over the logits, on a GPU one
    read and one write, on a CPU some rows at a time. With `reduction="none"`, fp16 logits (whose gradient would underflow before a loss scale),
    `torch.compile` and function transforms, the loss comes in the forward pass and the gradient in the backward pass.

    Args:
        input: logits `[N, C, ...]` or `[C]`, floating dtype, any strides.
        target: labels `[N, ...]` or `[]`, any integer dtype; or probabilities with the shape of `input`, differentiable.
        weight: `[C]`, one factor for each class; differentiable with target probabilities.
        ignore_index: rows with this label have loss and gradient zero and are not counted.
        reduction: `none` (shape `[N, ...]`), `mean` (over the class weights of the rows that count) or `sum`.
        label_smoothing: share of the target that is spread evenly over the classes, 0 to 1.
        softcap: put `softcap * tanh(input / softcap)` in the place of the logits.
        z_loss: add `z_loss * logsumexp ** 2` to each row that is not ignored.
        inplace: write the gradient over the memory of `input`, which is no longer logits after the call (after the backward pass for fp16); no
            effect where no gradient is needed and in compiled code. It serves one backward pass.

    Returns:
        The loss in nats, a number or `[N, ...]`, in the dtype that `F.cross_entropy` returns (fp32 under autocast). A mean over no rows is NaN.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected.
        IndexError: a label out of range; on a GPU only with `PARTITA_CHECK=1`, otherwise the loss and the gradient of that row are NaN.
        RuntimeError: `inplace=True` with a leaf.

    Source: Szegedy et al., Rethinking the Inception architecture, 2016 (smoothing); Gemma 2, 2024 (soft-capping); PaLM, 2022 (z-loss).

    Example:
        >>> import torch, partita
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]], requires_grad=True)
        >>> loss = partita.cross_entropy(logits, torch.tensor([0, 0]))
        >>> loss.backward()
        >>> loss, logits.grad
        (tensor(1.1269, grad_fn=<...>), tensor([[-0.0596,  0.0596],
                [-0.4404,  0.4404]]))
    """
    _check(input, target, weight, ignore_index, softcap)
    checks.choice("reduction", reduction, REDUCTIONS)
    weight = None if weight is None else weight.contiguous()
    if label_smoothing != 0.0:
        checks.number("label_smoothing", label_smoothing, low=0.0, high=1.0)
    if z_loss != 0.0:
        checks.number("z_loss", z_loss, low=0.0)
    result = input.dtype
    if target.is_floating_point():
        result = torch.promote_types(result, target.dtype)
    if weight is not None and target.is_floating_point():
        result = torch.promote_types(result, weight.dtype)
    if result in (torch.float16, torch.bfloat16) and autocast_dtype(input.device) is not None:
        result = torch.float32
    if result == torch.float64:
        input = input.to(result)  # in which probabilities or class weights came
    numbers = float(label_smoothing), float(softcap or 0.0), float(z_loss)
    options = _Options(ignore_index, *numbers, reduction == "mean", result, current_backend())
    if input.ndim > 1:
        return _loss(input, target, weight, options, reduction, inplace)
    loss = _loss(input.unsqueeze(0), target.unsqueeze(0), weight, options, reduction, inplace)
    return loss.squeeze(0) if reduction == "none" else loss


def _loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: _Options,
    reduction: str,
    inplace: bool,
) -> Tensor:
    if not plain_eager():
        return _reduced(logits, target, weight, options, reduction)
    others = target.requires_grad or (weight is not None and weight.requires_grad)
    if not (torch.is_grad_enabled() and (logits.requires_grad or others)):
        refuse_forward_mode(logits, target, weight)
        if reduction == "none" or options.z_loss:
            return _reduced(logits, target, weight, options, reduction)
        return _reduced_loss(logits, target, weight, *options[:3], *options[4:])
    inplace = inplace and logits.requires_grad
    if inplace:
        _check_inplace(logits, others)
    early = reduction != "none" and logits.dtype != torch.float16 and not others
    if early and (
        inplace
        or logits.device.type == "cpu"
        or resolve(options.backend, logits.device, has_cpu=False) == "gpu"
    ):
        return apply(_OnePass, logits, target, weight, options, inplace)
    if inplace:
        torch.autograd.graph.increment_version(
            logits
        )  # before the logits are saved: the backward pass alone may read them
    return _reduced(logits, target, weight, options, reduction, inplace)


def _check_inplace(logits: Tensor, others: bool) -> None:
    base = logits._base if logits._is_view() else logits
    if logits.is_leaf or (base is not None and base.is_leaf and base.requires_grad):
        raise RuntimeError(
            "inplace: expected logits that were computed from something, got a leaf, whose values would be lost"
        )
    reach = 0
    for stride, size in sorted(zip(logits.stride(), logits.shape, strict=True)):
        if size > 1 and stride <= reach:
            raise ValueError(
                "inplace: expected logits whose elements each have their own memory, got a tensor that is expanded or overlaps itself"
            )
        reach += stride * (size - 1)
    if others:
        raise RuntimeError("inplace: expected targets and class weights that need no gradient")
