"""The registered ops of losses from hidden states and their autograd functions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import inert_rows, softcapped
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
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.api import cross_entropy
from ..cross_entropy.autograd import OnePassLoss, token_stats
from ..cross_entropy.common import LossOptions
from ..support.common import Support
from . import reference_support
from .chunked import gradients_like
from .common import (
    TENSORS,
    Head,
    RowOptions,
    RowStatistics,
    Wanted,
    counted_rows,
    empty_statistics,
)
from .products import composed_linear
from .reference import KERNELS, gradient_coefficients


def check_labels(weight: Tensor, target: Tensor | None, ignore_index: int) -> None:
    if target is not None:
        checks.labels("target", target, len(weight), ignore_index)


def saved_logits_fake(head: Head, save_logits: bool) -> Tensor:
    """Return memory for all logits of a head, or none."""
    return head.buffer(head.input.shape[0], head.weight.shape[0] if save_logits else 0)


def _rows_fake(
    head: Head, needs_smoothing: bool, needs_entropy: bool, save_logits: bool
) -> tuple[Tensor, ...]:
    rows = (head.input, head.input.shape[0])
    statistics = empty_statistics(*rows, needs_smoothing, needs_entropy)
    return *statistics, saved_logits_fake(head, save_logits)


def one_pass_fake(head: Head, wanted: Wanted) -> tuple[Tensor, ...]:
    """Return memory for a loss, `[]`, and for its gradients."""
    loss = head.input.new_empty((), dtype=acc_dtype(head.input.dtype))
    dtype = loss.dtype if head.input.dtype == torch.float16 else None  # see `linear_one_pass`
    return loss, *gradients_like(head, wanted, dtype=dtype)


def _gpu() -> tuple[Any, ...]:
    """Import the kernels for GPUs, whose methods serve the ops; of packed rows; of supports."""
    from .gpu import launch, packed, support

    return launch.KERNELS, packed, support


define_op = functools.partial(register.define, gpu=_gpu, vmap=one_by_one)
rows = define_op(KERNELS.linear_rows, _rows_fake, check=check_labels)
rows_backward = define_op(KERNELS.linear_rows_backward, gradients_like)
one_pass = define_op(KERNELS.linear_one_pass, one_pass_fake, check=check_labels)
# The same from the rows whose labels are not ignored, on the GPUs and for the sizes that
# `packing.packs_rows` names.
packed_one_pass = define_op(
    KERNELS.linear_one_pass,
    one_pass_fake,
    name="linear_packed_one_pass",
    check=check_labels,
)
entry_logits = define_op(
    reference_support.linear_entries,
    lambda input, rows: input.new_empty(rows.shape, dtype=acc_dtype(input.dtype)),
)
entry_sums = define_op(
    reference_support.linear_entries_sums,
    lambda like: like.new_empty(like.shape),
)


class RowsLinear(torch.autograd.Function):
    """`torch.nn.functional.linear`, in which rows without a gradient do not count.

    Padding often holds NaN. PyTorch's own layer multiplies it by the gradient 0 of its logits, and
    the gradient of the matrix becomes NaN. The gradients are differentiable again.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool, widens: bool
    ) -> Tensor:
        return composed_linear(input, weight, bias, invariant, widens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.invariant, _ = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias = saved_tensors(ctx)
        grad = grads[0].to(input.dtype)  # of logits that may be wider
        dinput = dweight = dbias = None
        of_input, of_weight, of_bias = needed_gradients(ctx, input, weight, bias)
        if of_input:
            dinput = composed_linear(grad, weight.T, None, ctx.invariant, False)
        rows = input.shape[:-1].numel()  # a reshape that batched gradients know
        grad = grad.reshape(rows, grad.shape[-1])
        if of_weight:
            states = counted_rows(input.reshape(rows, input.shape[-1]), grad)
            dweight = grad.T.to(weight.dtype) @ states.to(weight.dtype)
        if of_bias:
            dbias = grad.sum(0, dtype=bias.dtype)
        return dinput, dweight, dbias, None, None


def rows_linear(head: Head) -> Tensor:
    """Return the logits of a head with hidden states `[..., H]` and a matrix `[C, H]`."""
    (input, weight, bias, states, factor), products = head.tensors, head.products
    if states is not None and factor is not None:
        states, factor = states.to(input.dtype), factor.to(input.dtype)
        of_low_rank = rows_linear(Head(states, factor, None, None, None, *products))
        return rows_linear(Head(input, weight, bias, None, None, *products)) + of_low_rank
    if torch.is_grad_enabled() and (requires_grad(weight) or not head.is_usual):
        result: Tensor = apply(RowsLinear, input, weight, bias, *products)
        return result
    return composed_linear(input, weight, bias, *products)


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
    found = call(*tensors, *saved, *ctx.options, ctx.chunk, *wanted, ctx.backend)
    return tuple(grad if wants else None for grad, wants in zip(found, wanted, strict=True))


def head_backward(
    ctx: Any,
    op: register.Op,
    grads: Sequence[Tensor | None],
    composed: Callable[..., Sequence[Tensor]],
    heads: int = 1,
    others: int = 0,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of a function whose first outputs are differentiable.

    The saved tensors are those that the op takes after the gradients, of which those of the head
    are the first, the logits of each head, and some others. `composed` computes the outputs from
    the head and the saved tensors but logits, differentiable any number of times. Gradients of
    unused outputs are to be skipped: zeros for saved logits would take their memory.
    """
    given = [grad for grad in grads if grad is not None]
    if not given:
        return (None,) * len(ctx.needs_input_grad)
    grads = [torch.zeros_like(given[0]) if grad is None else grad for grad in grads]
    saved = saved_tensors(ctx)
    end = len(saved) - others
    head, tensors = saved[:TENSORS], saved[TENSORS : end - heads]
    logits = saved[end - heads : end]
    wanted = needed_gradients(ctx, *head)
    if is_double_backward(*grads, *head):

        def outputs(*x: Any) -> Sequence[Tensor]:
            return composed(Head._make((*x, 0, ctx.products[1])), *tensors, *saved[end:])

        gradients = double_backward(outputs, head, wanted, grads)
    else:
        arguments = [*grads, *head, *ctx.products, *tensors]
        gradients = gradients_of_rows(ctx, op, grads, arguments, logits, wanted)
    return *gradients, *(None,) * (len(ctx.needs_input_grad) - TENSORS)


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
        head, ctx.products, (target, class_weight) = inputs[:5], inputs[5:7], inputs[7:9]
        ctx.row_options = inputs[9:14]
        ctx.options = (*inputs[9:11], False)  # one rank has all classes
        ctx.chunk, save_logits, ctx.backend = inputs[14:]
        ctx.mark_non_differentiable(*output[4:])
        skip_unused_gradients(ctx)
        if target is None:
            target = RowStatistics(*output[:-1]).argmax
        ctx.save_for_backward(*head, target, class_weight, *output)
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        grads, no_option_grads = grads[:4], (None,) * 12
        if all(grad is None for grad in grads):
            return *(None,) * TENSORS, *no_option_grads
        saved = saved_tensors(ctx)
        head, (target, class_weight), outputs = saved[:5], saved[5:7], saved[7:-1]
        wanted = needed_gradients(ctx, *head)
        if is_double_backward(*grads, *head):
            return *LinearRows._differentiable_gradients(ctx, grads, wanted), *no_option_grads
        statistics, options = RowStatistics(*outputs), RowOptions(*ctx.row_options)
        numbers = (len(head[1]), options.temperature, options.ignore_index)
        coefficients = gradient_coefficients(
            options.used(grads), target, class_weight, statistics.entropy, *numbers
        )
        of_rows = (target, class_weight, statistics.maximum, statistics.sumexp)
        tensors = (*coefficients, *head, *ctx.products, *of_rows)
        gradients = gradients_of_rows(ctx, rows_backward, grads, tensors, saved[-1:], wanted)
        return *gradients, *no_option_grads

    @staticmethod
    def _differentiable_gradients(
        ctx: Any, grads: tuple[Tensor | None, ...], wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        *head, target, class_weight = (saved := saved_tensors(ctx))[:7]
        outputs = saved[7:-1]
        statistics, options = RowStatistics(*outputs), RowOptions(*ctx.row_options)
        used = {i: grad for i, grad in enumerate(options.used(grads)) if grad is not None}
        counted = dict(used)
        if 0 in counted:  # that of nll
            counted[0] = torch.where(target == options.ignore_index, 0, counted[0])
        is_inert = inert_rows((statistics.maximum, statistics.sumexp), counted.values())

        def used_statistics(*tensors: Any) -> list[Tensor]:
            logits = rows_linear(Head._make((*tensors, False, ctx.products[1])))
            logits, numbers = torch.where(is_inert[:, None], 0, logits), options[:3]
            logprob, logsumexp, entropy, *_ = token_stats(logits, target, *numbers, ctx.backend)
            found = [-logprob, logsumexp, logsumexp, entropy]
            if 2 in used:  # that of the smoothing loss
                x = softcapped(logits, options.softcap) / options.temperature
                terms = logsumexp[:, None] - x
                if class_weight is not None:
                    terms = torch.where(class_weight == 0, 0, class_weight.to(x.dtype) * terms)
                found[2] = terms.sum(1)
            return [found[i] for i in used]

        return double_backward(used_statistics, head, wanted, list(used.values()))


class EntryLogits(torch.autograd.Function):
    """The logits of some pairs of a row and a class, `[E]`, without a bias."""

    generate_vmap_rule = True

    @staticmethod
    @takes(entry_logits, "offsets")
    def forward(*args: Any) -> Any:
        return entry_logits(*args[:5])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4], *inputs[5:])
        ctx.backend = inputs[4]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,), tensors = grads, saved_tensors(ctx)
        input, weight, rows, classes, offsets = tensors
        wanted = needed_gradients(ctx, input, weight)
        if is_double_backward(grad, input, weight):
            found = double_backward(
                lambda *x: reference_support.linear_entries(x[0], x[1], rows, classes),
                (input, weight),
                wanted,
                grad,
            )
            return *found, *(None,) * 4
        op, (dinput, dweight) = for_gradients(entry_sums, grad), (None, None)
        if wanted[0]:
            dinput = op(grad, rows, classes, None, offsets, weight, input, ctx.backend)
        if wanted[1]:
            ordered, order = classes.sort(stable=True)
            numbers = torch.arange(weight.shape[0] + 1, device=classes.device)
            starts = torch.searchsorted(ordered, numbers)
            dweight = op(grad, classes, rows, order, starts, input, weight, ctx.backend)
        return dinput, dweight, *(None,) * 4


def logits_of_entries(states: Tensor, head: Head, first_class: int, support: Support) -> Tensor:
    """Return the logits of the entries whose classes a head has, and 0 for others, `[E]`.

    The classes of the head are those from `first_class` on. The states are those of `with_states`.
    """
    rows, classes, offsets = support
    columns = classes - first_class if first_class else classes
    hidden, bias, factor = head.weight.shape[1], head.bias, head.low_rank_weight
    rest = (rows, columns, current_backend(), offsets)
    x: Tensor = apply(EntryLogits, states[:, :hidden], head.weight, *rest)
    if bias is not None and len(bias):
        is_own = (columns >= 0) & (columns < len(bias))
        x = x + torch.where(is_own, bias.to(x.dtype)[torch.where(is_own, columns, 0)], 0)
    return x if factor is None else x + apply(EntryLogits, states[:, hidden:], factor, *rest)


def _composed_loss(*args: Any) -> Tensor:
    *tensors, target, class_weight, denominator, (_, widens, *numbers) = args
    logits = rows_linear(Head._make((*tensors, False, widens))).to(acc_dtype(tensors[0].dtype))
    options = LossOptions._make(numbers[:5])
    loss = cross_entropy(logits, target, class_weight, **options.keywords())
    return loss if denominator is None else loss / denominator


def _run(op: register.Op, *args: Any) -> tuple[Tensor, ...]:
    *head, target, class_weight, denominator, (invariant, widens, *numbers) = args
    found: tuple[Tensor, ...] = op(
        *head, invariant, widens, target, class_weight, denominator, *numbers
    )
    return found


# The tensors are those of a head, labels, class weights, and a denominator, `[]`, which divides a
# sum before the gradients are rounded. The options begin with how products are computed.
ONE_PASS = OnePassLoss(lambda *args: _run(one_pass, *args), _composed_loss, TENSORS + 3)
PACKED_ONE_PASS = ONE_PASS._replace(run=lambda *args: _run(packed_one_pass, *args))
