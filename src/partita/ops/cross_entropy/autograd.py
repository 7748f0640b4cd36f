"""The ops and the autograd functions of cross-entropy and token statistics."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...paths.autograd import takes
from ...primitives.rows import by_rows
from ...runtime import checks, register
from ...runtime.autograd import (
    all_at_once,
    apply,
    batch_first,
    double_backward,
    first_derivative,
    for_gradients,
    is_batched_gradient,
    is_double_backward,
    needed_gradients,
    needs_no_derivative,
    plain_eager,
    saved_tensors,
    without_wrappers,
)
from ...runtime.dtypes import acc_dtype
from . import reference, reference_one_pass
from .common import (
    CrossEntropyOptions,
    RowLosses,
    TokenStatsRows,
    logsumexp_term,
    reduce_losses,
)


def _check_labels(logits: Tensor, target: Tensor, ignore_index: int) -> None:
    if not target.is_floating_point():
        checks.labels("target", target, logits.shape[1], ignore_index)


def _rows_vmap(op: register.Op, info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    """Merge the batch into the rows.

    Every tensor has its batch dimension first, except for the class weights, which cannot have one.
    """
    num_tensors = sum(isinstance(arg, Tensor) or arg is None for arg in args)
    tensors, options = list(args[:num_tensors]), args[num_tensors:]
    weight_index = 2 if op is cross_entropy_op else 4
    if in_dims[weight_index] is not None:
        raise NotImplementedError(
            "weight: class weights that differ over a vmapped dimension are not supported"
        )
    for i, (tensor, dim) in enumerate(zip(tensors, in_dims, strict=False)):
        if i != weight_index and tensor is not None:
            tensors[i] = batch_first(tensor, dim, info.batch_size).flatten(0, 1)
    found = op(*tensors, *options)
    if isinstance(found, Tensor):
        return found.unflatten(0, (info.batch_size, -1)), 0
    return tuple(
        field.unflatten(0, (info.batch_size, len(field) // max(info.batch_size, 1)))
        for field in found
    ), (0,) * len(found)


def _rows_fake(logits: Tensor) -> tuple[Tensor, ...]:
    shape, dtype = [logits.shape[0], *logits.shape[2:]], acc_dtype(logits.dtype)
    return tuple(logits.new_empty(shape, dtype=dtype) for _ in RowLosses._fields)


def _gpu() -> tuple[ModuleType, ...]:
    from .gpu import launch, reduction, token_stats

    return launch, reduction, token_stats


cross_entropy_op = register.define(
    reference_one_pass.cross_entropy,
    _rows_fake,
    gpu=_gpu,
    check=_check_labels,
    vmap=_rows_vmap,
)
cross_entropy_backward_op = register.define(
    reference_one_pass.cross_entropy_backward,
    lambda logits: torch.empty_like(logits),
    name="cross_entropy_backward",
    gpu=_gpu,
    vmap=_rows_vmap,
)
cross_entropy_backward_inplace_op = register.define(
    reference_one_pass.cross_entropy_backward,
    lambda: None,
    name="cross_entropy_backward",
    gpu=_gpu,
    overwrites="logits",
)
cross_entropy_reduced_op = register.define(
    reference_one_pass.cross_entropy_reduced,
    lambda logits, dtype: logits.new_empty((), dtype=dtype),
    gpu=_gpu,
    check=_check_labels,
)
cross_entropy_one_pass_op = register.define(
    reference_one_pass.cross_entropy_one_pass,
    lambda logits, dtype: (logits.new_empty((), dtype=dtype), torch.empty_like(logits)),
    gpu=_gpu,
    check=_check_labels,
)
cross_entropy_one_pass_inplace_op = register.define(
    reference_one_pass.cross_entropy_one_pass_,
    lambda logits, dtype: logits.new_empty((), dtype=dtype),
    gpu=_gpu,
    mutates="logits",
    check=_check_labels,
)
scale_gradient = register.define(
    reference.scale_,
    lambda: None,
    gpu=_gpu,
    mutates="grad",
)


class CrossEntropyRows(torch.autograd.Function):
    """The loss and log-sum-exp of each row, with the gradient computed in the backward pass.

    With `inplace` the gradient replaces the logits.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        options: CrossEntropyOptions,
        inplace: bool,
    ) -> tuple[Tensor, ...]:
        return cross_entropy_op(logits, target, weight, *options[:3], options.backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, target, weight, ctx.options, ctx.inplace = inputs
        if plain_eager():  # A zero gradient of the log-sum-exp would cost a launch.
            ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(logits, target, weight, *output[2:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        logits, target, weight, *statistics = saved_tensors(ctx)
        grad_loss, grad_logsumexp = grads[:2]
        if grad_loss is None:
            grad_loss = torch.zeros_like(statistics[0])
        options, backend = ctx.options[:3], ctx.options.backend
        tensors = (grad_loss, grad_logsumexp, logits, target, weight, *statistics)
        if ctx.inplace:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "inplace=True writes the gradient over the logits, so there is no second"
                    " derivative: use inplace=False"
                )
            cross_entropy_backward_inplace_op(*tensors, *options, backend)
            torch.autograd.graph.increment_version(logits)
            return logits.detach(), None, None, None, None
        has_probabilities = target.is_floating_point()
        op = for_gradients(cross_entropy_backward_op, grad_loss, grad_logsumexp)
        if not is_double_backward():
            grad_logits = op(*tensors, *options, backend)
        else:
            if grad_logsumexp is None:
                grad_logsumexp = torch.zeros_like(grad_loss)
            grad_logits = first_derivative(
                lambda *tensors: op(*tensors, *options, backend),
                lambda *tensors: reference.cross_entropy_gradient(*tensors, *options),
                3 if not has_probabilities else 4 if weight is None else 5,
                grad_loss,
                grad_logsumexp,
                *tensors[2:],
            )
        grad_target, grad_weight = None, None
        needed = needed_gradients(ctx, logits, target, weight)
        if has_probabilities and (needed[1] or needed[2]):
            others = [target] if weight is None else [target, weight]
            vjp = torch.func.vjp(
                lambda target, weight=None: (
                    reference.cross_entropy(logits, target, weight, *options).loss
                ),
                *others,
            )[1]
            grad_target, grad_weight = (*vjp(grad_loss), None)[:2]
        return grad_logits, grad_target, grad_weight, None, None


class OnePassLoss(NamedTuple):
    """A reduced loss that is computed together with its gradients.

    Fields:
        run: returns the loss and its gradients from tensors and options.
        composed: returns the loss from the same arguments, differentiable any number of times; None
            if the gradient takes the place of the logits, and so serves one backward pass.
        num_tensors: how many of the first arguments are tensors that a later backward pass needs.
    """

    run: Callable[..., tuple[Tensor, ...]]
    composed: Callable[..., Tensor] | None
    num_tensors: int


class RowsOnePass(torch.autograd.Function):
    """A `OnePassLoss` of rows of logits, the first tensor. Its options are a tuple with a backend.

    It is for eager code only: the first backward pass scales the saved gradient in place, and a
    second one computes it again.
    """

    @staticmethod
    def forward(ctx: Any, loss: OnePassLoss, *args: Any) -> Tensor:
        result, gradient = loss.run(*args)
        ctx.save_for_backward(gradient, *args[: loss.num_tensors])
        ctx.set_materialize_grads(False)
        ctx.loss, ctx.options, ctx.is_spent = loss, args[-1], False
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        loss, options, dlogits = ctx.loss, ctx.options, None
        if grads[0] is not None:
            if loss.composed is None and (torch.is_grad_enabled() or ctx.is_spent):
                raise RuntimeError(
                    "inplace=True wrote the gradient over the logits: it serves one backward pass"
                    " and no second derivative"
                )
            dlogits, *tensors = ctx.saved_tensors  # It raises if these were written to since.
            if torch.is_grad_enabled():
                logits, *others = tensors
                (dlogits,) = double_backward(
                    lambda x: loss.composed(x, *others, options), [logits], [True], grads[0]
                )
            else:
                if ctx.is_spent:
                    dlogits = loss.run(*tensors, options)[1]
                dlogits = scaled_gradient(ctx, dlogits, grads[0], options.backend)
        return None, dlogits, *(None,) * (len(ctx.needs_input_grad) - 2)


def _loss_and_gradient(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, options = args
    found: tuple[Tensor, Tensor] = cross_entropy_one_pass_op(*tensors, *options)
    return found


def _composed_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    options: CrossEntropyOptions,
) -> Tensor:
    reduction = "mean" if options.mean else "sum"
    loss = cross_entropy_of_rows(logits, target, weight, options, reduction)
    return loss if denominator is None else loss / denominator


def _loss_in_place(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, options = args
    loss = cross_entropy_one_pass_inplace_op(*tensors, *options)
    torch.autograd.graph.increment_version(tensors[0])
    return loss, tensors[0].detach()


# A denominator, `[]`, divides a sum before the gradient is rounded.
CROSS_ENTROPY_ONE_PASS = OnePassLoss(_loss_and_gradient, _composed_loss, 4)
CROSS_ENTROPY_IN_PLACE = OnePassLoss(_loss_in_place, None, 0)


def scaled_gradient(ctx: Any, gradient: Tensor, upstream: Tensor, backend: str) -> Tensor:
    """Return the gradient of a one-pass loss times the gradient that arrives from above.

    A plain eager pass writes over the memory of the gradient, and marks the context as spent. A
    compiler and a batch of upstream gradients get a new tensor, rounded once.
    """
    if torch.compiler.is_compiling() or is_batched_gradient(upstream):
        return (gradient.to(upstream.dtype) * upstream).to(gradient.dtype)
    ctx.is_spent = True
    scale_by_upstream(gradient, upstream, backend)
    return gradient


def scale_by_upstream(gradient: Tensor, upstream: Tensor, backend: str) -> None:
    """Multiply the gradient of a loss in place by the gradient that arrives from above.

    The write is no new version of a saved tensor, which a later backward pass may ask for.
    """
    if gradient.is_cpu and float(upstream) == 1.0:
        return
    scale_gradient(gradient.data, upstream, backend)


def cross_entropy_of_rows(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: CrossEntropyOptions,
    reduction: str,
    inplace: bool = False,
) -> Tensor:
    """Return the loss, reduced from the rows' losses in PyTorch.

    A compiler or a function transform sees every step but the loss of the rows itself.
    """
    if needs_no_derivative(logits, target, weight):
        fields = cross_entropy_op(logits, target, weight, *options[:3], options.backend)
    else:
        fields = apply(CrossEntropyRows, logits, target, weight, options, inplace)
    loss, logsumexp = fields[:2]
    z = logsumexp_term(options, logsumexp)
    numbers = (logits.shape[1], options.ignore_index, reduction)
    return reduce_losses(loss, z, target, weight, *numbers).to(options.dtype)


def _stats_fake(logits: Tensor) -> tuple[Tensor, ...]:
    shape, dtype = logits.shape[:-1], acc_dtype(logits.dtype)
    return tuple(
        logits.new_empty(shape, dtype=torch.int64 if name == "argmax" else dtype)
        for name in TokenStatsRows._fields
    )


def _check_stats_labels(logits: Tensor, target: Tensor | None, ignore_index: int) -> None:
    if target is not None:
        checks.labels("target", target, logits.shape[-1], ignore_index)


token_stats_op = register.define(
    by_rows(reference.token_stats),
    _stats_fake,
    gpu=_gpu,
    check=_check_stats_labels,
    vmap=all_at_once,
)
token_stats_backward_op = register.define(
    by_rows(reference.token_stats_backward, logits=3),
    lambda logits: torch.empty_like(logits),
    name="token_stats_backward",
    gpu=_gpu,
    vmap=all_at_once,
)


class TokenStatsFunction(torch.autograd.Function):
    """The fields of `TokenStatsRows`, differentiable in the first three.

    Without a target, the arg-max is the target of the backward pass; then the caller passes an
    `ignore_index` that is no class.
    """

    generate_vmap_rule = True

    @staticmethod
    @takes(token_stats_op)
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return token_stats_op(*args)

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
