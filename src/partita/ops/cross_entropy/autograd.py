"""The ops and the autograd functions of cross-entropy and token statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...primitives.rows import by_rows
from ...runtime import checks, register
from ...runtime.autograd import (
    DifferentiableOp,
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
)
from ...runtime.dtypes import acc_dtype
from . import reference, reference_one_pass
from .common import (
    NOT_READ,
    LossOptions,
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
    weight_index = 2 if op is cross_entropy_op else 4
    if in_dims[weight_index] is not None:
        raise NotImplementedError(
            "weight: class weights that differ over a vmapped dimension are not supported"
        )
    merged = list(args)
    for i, (arg, dim) in enumerate(zip(args, in_dims, strict=True)):
        if i != weight_index and isinstance(arg, Tensor):
            merged[i] = batch_first(arg, dim, info.batch_size).flatten(0, 1)
    found = op(*merged)
    fields = (found,) if isinstance(found, Tensor) else found
    size = info.batch_size, len(fields[0]) // max(info.batch_size, 1)
    batched = tuple(field.unflatten(0, size) for field in fields)
    return (batched[0], 0) if isinstance(found, Tensor) else (batched, (0,) * len(batched))


def _rows_fake(logits: Tensor) -> tuple[Tensor, ...]:
    shape, dtype = [logits.shape[0], *logits.shape[2:]], acc_dtype(logits.dtype)
    return tuple(logits.new_empty(shape, dtype=dtype) for _ in RowLosses._fields)


def _gpu() -> tuple[ModuleType, ...]:
    from .gpu import launch, reduction, token_stats

    return launch, reduction, token_stats


define_op = functools.partial(register.define, gpu=_gpu)
cross_entropy_op = define_op(
    reference_one_pass.cross_entropy, _rows_fake, check=_check_labels, vmap=_rows_vmap
)
cross_entropy_backward_op = define_op(
    reference_one_pass.cross_entropy_backward,
    lambda logits: torch.empty_like(logits),
    name="cross_entropy_backward",
    vmap=_rows_vmap,
)
cross_entropy_backward_inplace_op = define_op(
    reference_one_pass.cross_entropy_backward,
    lambda: None,
    name="cross_entropy_backward",
    overwrites="logits",
)
cross_entropy_reduced_op = define_op(
    reference_one_pass.cross_entropy_reduced,
    lambda logits, dtype: logits.new_empty((), dtype=dtype),
    check=_check_labels,
)
cross_entropy_one_pass_op = define_op(
    reference_one_pass.cross_entropy_one_pass,
    lambda logits, dtype: (logits.new_empty((), dtype=dtype), torch.empty_like(logits)),
    check=_check_labels,
)
cross_entropy_one_pass_inplace_op = define_op(
    reference_one_pass.cross_entropy_one_pass_,
    lambda logits, dtype: logits.new_empty((), dtype=dtype),
    mutates="logits",
    check=_check_labels,
)
scale_gradient = define_op(reference.scale_, lambda: None, mutates="grad")


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
        numbers: tuple[int, float, float],
        backend: str,
        inplace: bool,
    ) -> tuple[Tensor, ...]:
        return cross_entropy_op(logits, target, weight, *numbers, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, target, weight, ctx.options, ctx.backend, ctx.inplace = inputs
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
        options, backend = ctx.options, ctx.backend
        tensors = (grad_loss, grad_logsumexp, logits, target, weight, *statistics)
        if ctx.inplace:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    "inplace=True writes the gradient over the logits, so there is no second"
                    " derivative: use inplace=False"
                )
            cross_entropy_backward_inplace_op(*tensors, *options, backend)
            torch.autograd.graph.increment_version(logits)
            return logits.detach(), None, None, None, None, None
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
        return grad_logits, grad_target, grad_weight, None, None, None


class OnePassLoss(NamedTuple):
    """A reduced loss that is computed together with its gradients."""

    # Returns the loss and its gradients from tensors and a tuple of options.
    run: Callable[..., tuple[Tensor, ...]]
    # Returns the loss from the same arguments, differentiable any number of times; None if the
    # gradient takes the place of the logits, and so serves one backward pass.
    composed: Callable[..., Tensor] | None
    num_tensors: int  # how many of the arguments are tensors that a later backward pass needs


class OnePass(torch.autograd.Function):
    """A `OnePassLoss` of tensors, of which the first are differentiable, and of its options.

    The options end with the backend. The first backward pass of eager code scales the saved
    gradients in place, and later ones compute them again. A compiler keeps them as tensors of its
    graph.
    """

    @staticmethod
    def forward(ctx: Any, loss: OnePassLoss, *args: Any) -> Tensor:
        result, *gradients = loss.run(*args)
        ctx.save_for_backward(*args[: loss.num_tensors], *gradients)
        ctx.set_materialize_grads(False)
        ctx.loss, ctx.options, ctx.is_spent = loss, args[-1], False
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        loss, options, grad = ctx.loss, ctx.options, grads[0]
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        if loss.composed is None and (torch.is_grad_enabled() or ctx.is_spent):
            raise RuntimeError(
                "inplace=True wrote the gradient over the logits: it serves one backward pass"
                " and no second derivative"
            )
        saved = ctx.saved_tensors  # It raises if these were written to since.
        tensors, gradients = saved[: loss.num_tensors], saved[loss.num_tensors :]
        wanted = ctx.needs_input_grad[1 : 1 + len(gradients)]
        results: Sequence[Tensor | None]
        if is_double_backward():
            inputs, rest = tensors[: len(gradients)], tensors[len(gradients) :]
            results = double_backward(
                lambda *inputs: loss.composed(*inputs, *rest, options), inputs, wanted, grad
            )
        else:
            if ctx.is_spent:
                gradients = loss.run(*tensors, options)[1:]
            results = [
                scaled_gradient(ctx, gradient, grad, options[-1]) if wants else None
                for gradient, wants in zip(gradients, wanted, strict=True)
            ]
        return None, *results, *(None,) * (len(ctx.needs_input_grad) - 1 - len(wanted))


def _loss_and_gradient(*args: Any) -> tuple[Tensor, Tensor]:
    *tensors, options = args
    found: tuple[Tensor, Tensor] = cross_entropy_one_pass_op(*tensors, *options)
    return found


def _composed_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    options: tuple[Any, ...],
) -> Tensor:
    *numbers, dtype, backend = options
    loss = cross_entropy_of_rows(logits, target, weight, LossOptions(*numbers), dtype, backend)
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
    if not (gradient.is_cpu and float(upstream) == 1.0):
        # The write is no new version of a saved tensor, which a later backward pass may ask for.
        scale_gradient(gradient.data, upstream, backend)
    return gradient


def cross_entropy_of_rows(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
    backend: str,
    inplace: bool = False,
) -> Tensor:
    """Return the loss, reduced from the rows' losses in PyTorch.

    A compiler or a function transform sees every step but the loss of the rows itself.
    """
    if needs_no_derivative(logits, target, weight):
        fields = cross_entropy_op(logits, target, weight, *options[:3], backend)
    else:
        fields = apply(CrossEntropyRows, logits, target, weight, options[:3], backend, inplace)
    loss, logsumexp = fields[:2]
    z = logsumexp_term(options, logsumexp)
    numbers = (logits.shape[1], options.ignore_index, options.reduction)
    return reduce_losses(loss, z, target, weight, *numbers).to(dtype)


def _stats_fake(logits: Tensor) -> tuple[Tensor, ...]:
    shape, dtype = logits.shape[:-1], acc_dtype(logits.dtype)
    return tuple(
        logits.new_empty(shape, dtype=torch.int64 if name == "argmax" else dtype)
        for name in TokenStatsRows._fields
    )


def _check_stats_labels(logits: Tensor, target: Tensor | None, ignore_index: int) -> None:
    if target is not None and ignore_index != NOT_READ:  # which a kernel wrote
        checks.labels("target", target, logits.shape[-1], ignore_index)


token_stats_op = define_op(
    reference.of_read_rows(by_rows(reference.token_stats)),
    _stats_fake,
    check=_check_stats_labels,
    vmap=all_at_once,
)
token_stats_backward_op = define_op(
    reference.of_read_rows(by_rows(reference.token_stats_gradient, logits=3), logits=3),
    lambda logits: torch.empty_like(logits),
    name="token_stats_backward",
    vmap=all_at_once,
)


def _stats_saved(args: tuple[Any, ...], output: TokenStatsRows) -> tuple[Any, Any]:
    """Save the arg-max as the target where there is none; `ignore_index` is no class then."""
    (logits, target, *options, _), (_, _, entropy, argmax, maximum, sumexp) = args, output
    return (logits, argmax if target is None else target, maximum, sumexp, entropy), options


token_stats = DifferentiableOp(
    token_stats_op,
    token_stats_backward_op,
    reference.token_stats_gradient,
    _stats_saved,
    results=3,
)
