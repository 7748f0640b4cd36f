"""The registered ops of losses from hidden states and their autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import finite_shift, inert_rows, softcapped
from ...runtime import checks, register
from ...runtime.autograd import (
    apply,
    double_backward,
    for_gradients,
    is_double_backward,
    needed_gradients,
    one_by_one,
    plain_eager,
    requires_grad,
    saved_tensors,
    skip_unused_gradients,
    spend,
    takes,
)
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.api import cross_entropy
from ..cross_entropy.autograd import OnePassLoss, scaled_gradient
from ..cross_entropy.common import LossOptions, valid_targets
from . import reference
from .chunked import empty_gradients
from .common import Head, RowOptions, RowStatistics, Wanted, counted_rows, empty_statistics
from .invariance import linear_by_blocks
from .plan import padded_width


def _check_labels(weight: Tensor, target: Tensor | None, ignore_index: int) -> None:
    if target is not None:
        checks.labels("target", target, len(weight), ignore_index)


def _rows_fake(
    input: Tensor, weight: Tensor, needs_smoothing: bool, needs_entropy: bool, save_logits: bool
) -> tuple[Tensor, ...]:
    M, C = input.shape[0], weight.shape[0]
    saved = input.new_empty(M * padded_width(C) if save_logits else 0)
    return *empty_statistics(input, M, needs_smoothing, needs_entropy), saved


def one_pass_fake(has_rows: bool) -> Callable[..., tuple[Tensor, ...]]:
    """Return the fake of an op that returns a loss, of all rows or of each, and its gradients."""

    def fake(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        input_grad: bool,
        weight_grad: bool,
        bias_grad: bool,
    ) -> tuple[Tensor, ...]:
        rows = (input.shape[0],) if has_rows else ()
        loss = input.new_empty(rows, dtype=acc_dtype(input.dtype))
        return loss, *empty_gradients(input, weight, bias, input_grad, weight_grad, bias_grad)

    return fake


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


def _gpu_packed() -> ModuleType:
    from .gpu import packed

    return packed


rows = register.define(
    reference.linear_rows,
    _rows_fake,
    gpu=_gpu,
    check=_check_labels,
    vmap=one_by_one,
)
rows_backward = register.define(
    reference.linear_rows_backward,
    empty_gradients,
    gpu=_gpu,
    vmap=one_by_one,
)
one_pass = register.define(
    reference.linear_one_pass,
    one_pass_fake(has_rows=False),
    gpu=_gpu,
    check=_check_labels,
    vmap=one_by_one,
)
# The same from the rows whose labels are not ignored, on the GPUs and for the sizes that
# `packing.packs_rows` names.
packed_one_pass = register.define(
    reference.linear_one_pass,
    one_pass_fake(has_rows=False),
    gpu=_gpu_packed,
    name="linear_packed_one_pass",
    check=_check_labels,
    vmap=one_by_one,
)


class RowsLinear(torch.autograd.Function):
    """`torch.nn.functional.linear`, in which rows without a gradient do not count.

    Padding often holds NaN. PyTorch's own layer multiplies it by the gradient 0 of its logits, and
    the gradient of the matrix becomes NaN. The gradients are differentiable again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, block: int) -> Tensor:
        return linear_by_blocks(input, weight, bias, block)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.block = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (input, weight, bias) = grads, saved_tensors(ctx)
        dinput = dweight = dbias = None
        of_input, of_weight, of_bias = needed_gradients(ctx, input, weight, bias)
        if of_input:
            dinput = linear_by_blocks(grad, weight.T, None, ctx.block)
        rows = input.shape[:-1].numel()  # a reshape that batched gradients know
        grad = grad.reshape(rows, grad.shape[-1])
        if of_weight:
            dweight = grad.T @ counted_rows(input.reshape(rows, input.shape[-1]), grad)
        if of_bias:
            dbias = grad.sum(0)
        return dinput, dweight, dbias, None


def rows_linear(input: Tensor, weight: Tensor, bias: Tensor | None, block: int = 0) -> Tensor:
    """Return `input @ weight.T + bias` of hidden states `[..., H]` and a matrix `[C, H]`.

    Each product has `block` rows, unless that is 0.
    """
    if (block or requires_grad(weight)) and torch.is_grad_enabled():
        result: Tensor = apply(RowsLinear, input, weight, bias, block)
        return result
    return linear_by_blocks(input, weight, bias, block)


def differentiable_statistics(
    head: Head,
    target: Tensor,
    class_weight: Tensor | None,
    options: RowOptions,
    is_inert: Tensor,
) -> tuple[Tensor, ...]:
    """Compute nll, log Z, smoothing loss and entropy from all logits at once.

    The result is differentiable any number of times. Inert rows, `[M]`, have zeros for logits.
    """
    logits = torch.where(is_inert[:, None], 0, rows_linear(*head))
    x, temperature = softcapped(logits, options.softcap), options.temperature
    # Quotients of large logits would lose what tells the classes apart.
    shift = finite_shift(x.detach().amax(-1))
    x = (x - shift[:, None]) / temperature
    logp = x.log_softmax(-1)
    labels, valid, invalid = valid_targets(target, len(head.weight), options.ignore_index)
    nan_mask = torch.where(invalid, torch.nan, 0.0).to(x.dtype)
    nll = torch.where(valid, -logp.gather(1, labels[:, None])[:, 0], 0.0) + nan_mask
    smoothing_loss, entropy = x.new_empty(0), x.new_empty(0)
    if options.needs_smoothing:
        weighted = logp
        if class_weight is not None:
            weights = class_weight.to(x.dtype)
            weighted = torch.where(weights == 0, 0.0, logp * weights)
        smoothing_loss = nan_mask - weighted.sum(1)
    if options.needs_entropy:
        p = logp.exp()
        entropy = -(p * torch.where(p == 0, 0.0, logp)).sum(1) + nan_mask
    logsumexp = shift / temperature + x.logsumexp(1)
    return nll, logsumexp + nan_mask, smoothing_loss, entropy


def gradients_of_rows(
    ctx: Any,
    op: register.Op,
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
    logits: Sequence[Tensor],
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden states, matrix and bias by an op of the backward pass.

    The op takes the tensors, the saved logits of each head, the options and the chunk of the
    context, and which gradients are wanted. If the logits are saved, the first backward pass
    overwrites them with their gradient. Later backward passes compute them again. The gradients of
    the rows, `grads`, may be batched.
    """
    saved, call = None, for_gradients(op, *grads)
    if plain_eager() and call is op:
        # A batch of gradients would overwrite the logits more than once.
        saved = spend(ctx, *logits)
    saved = saved or tuple(each.new_empty(0) for each in logits)
    found = call(*tensors, *saved, *ctx.options, ctx.chunk, ctx.block, *wanted, ctx.backend)
    return tuple(grad if wants else None for grad, wants in zip(found, wanted, strict=True))


def head_backward(
    ctx: Any, op: register.Op, grad: Tensor, composed: Callable[..., Tensor], heads: int = 1
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of a function whose first output is differentiable.

    The saved tensors are those that the op takes after the gradient, of which hidden states, matrix
    and bias are the first, and the logits of each head. `composed` computes the output from the
    saved tensors, differentiable any number of times.
    """
    saved = saved_tensors(ctx)
    tensors, logits = saved[:-heads], saved[-heads:]
    wanted = needed_gradients(ctx, *tensors[:3])
    if is_double_backward(grad, *tensors[:3]):
        gradients = double_backward(
            lambda *head: composed(*head, *tensors[3:]), tensors[:3], wanted, grad
        )
    else:
        gradients = gradients_of_rows(ctx, op, [grad], [grad, *tensors], logits, wanted)
    return *gradients, *(None,) * (len(ctx.needs_input_grad) - 3)


def takes_chunk(op: register.Op) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return `takes` for the parameters of an op and the chunk of its backward pass."""
    return takes(SimpleNamespace(parameters=[*op.parameters, "backward_chunk"]))


class LinearRows(torch.autograd.Function):
    """The `RowStatistics` of the rows, and the saved logits: the results of `rows`.

    Without a target, the arg-max is the target of the backward pass.
    """

    generate_vmap_rule = True

    @staticmethod
    @takes(rows)
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return rows(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        head, ctx.row_options = list(inputs[:5]), inputs[5:10]
        ctx.options, (ctx.chunk, ctx.block, save_logits, ctx.backend) = inputs[5:7], inputs[10:]
        ctx.mark_non_differentiable(*output[4:])
        skip_unused_gradients(ctx)
        if head[3] is None:
            head[3] = RowStatistics(*output[:-1]).argmax
        ctx.save_for_backward(*head, *output)
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grads, no_option_grads = grads[:4], (None,) * 11
        if all(grad is None for grad in grads):
            return None, None, None, *no_option_grads
        saved = saved_tensors(ctx)
        head, (target, class_weight), outputs = saved[:3], saved[3:5], saved[5:-1]
        wanted = needed_gradients(ctx, *head)
        if is_double_backward(*grads, *head):
            return *LinearRows._differentiable_gradients(ctx, grads, wanted), *no_option_grads
        statistics, options = RowStatistics(*outputs), RowOptions(*ctx.row_options)
        coefficients = reference.gradient_coefficients(
            options.used(grads),
            target,
            class_weight,
            statistics.entropy,
            len(head[1]),
            options.temperature,
            options.ignore_index,
            statistics.maximum.dtype,
        )
        of_rows = (target, class_weight, statistics.maximum, statistics.sumexp)
        tensors = (*coefficients, *head, *of_rows)
        gradients = gradients_of_rows(ctx, rows_backward, grads, tensors, saved[-1:], wanted)
        return *gradients, *no_option_grads

    @staticmethod
    def _differentiable_gradients(
        ctx: Any, grads: tuple[Tensor | None, ...], wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        input, weight, bias, target, class_weight, *outputs, _ = saved_tensors(ctx)
        sizes = [output.numel() for output in outputs]
        used = {
            i: grad
            for i, grad in enumerate(grads[:4])
            if grad is not None and sizes[i] == grad.numel()
        }
        statistics, options = RowStatistics(*outputs), RowOptions(*ctx.row_options)
        counted = dict(used)
        if 0 in counted:  # that of nll
            counted[0] = torch.where(target == options.ignore_index, 0, counted[0])
        is_inert = inert_rows((statistics.maximum, statistics.sumexp), counted.values())

        def used_statistics(*head: Any) -> list[Tensor]:
            of_rows = (target, class_weight, options, is_inert)
            found = differentiable_statistics(Head(*head), *of_rows)
            return [found[i] for i in used]

        return double_backward(used_statistics, (input, weight, bias), wanted, list(used.values()))


def _composed_loss(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    denominator: Tensor | None,
    *numbers: Any,
) -> Tensor:
    options = LossOptions._make(numbers[:5])
    logits = rows_linear(input, weight, bias).to(acc_dtype(input.dtype))
    loss = cross_entropy(logits, target, class_weight, **options.keywords())
    return loss if denominator is None else loss / denominator


# A denominator, `[]`, divides a sum before the gradients are rounded.
ONE_PASS = OnePassLoss(lambda *args: one_pass(*args), _composed_loss, 6)
PACKED_ONE_PASS = ONE_PASS._replace(run=lambda *args: packed_one_pass(*args))


class LinearOnePass(torch.autograd.Function):
    """A `OnePassLoss` of a head and its gradients, which are not differentiable outputs.

    The first three tensors are the head. After the tensors come the options, which gradients are
    wanted, and the backend.

    The first backward pass of eager code scales the saved gradients in place, and later ones
    compute them again. A compiler keeps them as tensors of its graph.
    """

    @staticmethod
    def forward(  # Dynamo counts the arguments, so they have names.
        loss: OnePassLoss,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        denominator: Tensor | None,
        options: tuple[Any, ...],
        wanted: Wanted,
        backend: str,
    ) -> tuple[Tensor, ...]:
        tensors = (input, weight, bias, target, class_weight, denominator)
        return loss.run(*tensors, *options, *wanted, backend)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.loss, *tensors, ctx.options, ctx.wanted, ctx.backend = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.is_spent = False

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        loss, grad, saved = ctx.loss, grads[0], ctx.saved_tensors
        tensors, gradients = saved[: loss.num_tensors], saved[loss.num_tensors :]
        results: tuple[Tensor | None, ...] = (None, None, None)
        if grad is not None and is_double_backward():
            rest = (*tensors[3:], *ctx.options)
            results = double_backward(
                lambda *head: loss.composed(*head, *rest), tensors[:3], ctx.wanted, grad
            )
        elif grad is not None:
            if ctx.is_spent:
                gradients = loss.run(*tensors, *ctx.options, *ctx.wanted, ctx.backend)[1:]
            results = tuple(
                scaled_gradient(ctx, gradient, grad, ctx.backend) if wants else None
                for gradient, wants in zip(gradients, ctx.wanted, strict=True)
            )
        return None, *results, *(None,) * (len(ctx.needs_input_grad) - 4)
