"""The loss of a head that learns from labels and from another head at once: ops and call."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...runtime import register
from ...runtime.autograd import apply, one_by_one, plain_eager, takes
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.autograd import OnePass, OnePassLoss
from ..distillation.autograd import check_labels, loss_of_logits, result_of_rows, rows_of
from ..distillation.common import (
    Distillation,
    DistillationRows,
    Objective,
    RowState,
    TermOptions,
    Terms,
    check_mapped_classes,
    checked_objective,
    empty_rows,
    mapped_classes,
    mass_of_classes,
    term_options,
    weighted_rows,
)
from ..distillation.reference import DISTILLATION_KERNELS
from .autograd import head_backward, one_pass_fake, rows_linear, saved_logits_fake
from .autograd import rows as rows_op
from .chunked import empty_gradients
from .common import Head, RowStatistics
from .distillation_chunks import DistillationHeads
from .divergence import checked_teacher
from .inputs import cast_and_check, takes_all_logits
from .plan import check_budget, divergence_plan
from .products import composed_linear, in_blocks, without_padding

REFERENCE = DistillationHeads(DISTILLATION_KERNELS)
NUM_OPTIONS = len(TermOptions._fields)


def _gpu() -> tuple[Any, ...]:
    from .gpu import distillation

    return (distillation.KERNELS,)  # which is a tuple itself


def _rows_fake(
    input: Tensor,
    weight: Tensor,
    invariant: bool,
    widens: bool,
    teacher_input: Tensor,
    save_logits: bool,
) -> tuple[Tensor, ...]:
    rest = (weight, invariant, widens, save_logits)
    saved = (saved_logits_fake(each, *rest) for each in (input, teacher_input))
    return *empty_rows(input), *saved


def _one_pass_fake(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    _, *gradients = one_pass_fake(has_rows=True)(
        input, weight, bias, input_grad, weight_grad, bias_grad
    )
    return *empty_rows(input), *gradients


def _check(weight: Tensor, target: Tensor | None, ignore_index: int) -> None:
    check_labels("target", target, len(weight), ignore_index)


define_op = functools.partial(register.define, gpu=_gpu, vmap=one_by_one)
distillation_op = define_op(REFERENCE.linear_distillation, _rows_fake, check=_check)
distillation_backward_op = define_op(REFERENCE.linear_distillation_backward, empty_gradients)
one_pass_op = define_op(REFERENCE.linear_distillation_one_pass, _one_pass_fake, check=_check)


def composed_terms(
    head: Head, teacher: Head, target: Tensor | None, options: TermOptions
) -> Tensor:
    """Compute the terms of each row from all logits at once, `[..., 5]`."""
    logits, teacher_logits = rows_linear(head), composed_linear(*teacher)
    if acc_dtype(teacher_logits.dtype) != acc_dtype(logits.dtype):
        teacher_logits = teacher_logits.to(acc_dtype(logits.dtype))
    return rows_of(logits, teacher_logits, target, options).terms


class LinearDistillation(torch.autograd.Function):
    """The results of `distillation_op`; the chunk of its backward pass is the last argument."""

    generate_vmap_rule = True

    @staticmethod
    @takes(distillation_op, "backward_chunk")
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return distillation_op(*args[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        last = 9 + NUM_OPTIONS
        ctx.products, ctx.options = inputs[3:5], inputs[9:last]
        _, save_logits, ctx.backend, ctx.chunk = inputs[last:]
        ctx.mark_non_differentiable(*output[1:])
        _, state, _, *saved = output
        ctx.save_for_backward(*inputs[:3], *inputs[5:9], state, *saved)
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        def composed(head: Head, *tensors: Any) -> Tensor:
            teacher = Head._make((*tensors[:3], *head[3:]))
            return composed_terms(head, teacher, tensors[3], TermOptions(*ctx.options))

        return head_backward(ctx, distillation_backward_op, grads[0], composed, heads=2)


def _loss_and_gradients(*args: Any) -> tuple[Any, ...]:
    *heads, target, factors, (invariant, widens, *numbers) = args
    rest = (*heads[3:], target, factors, *numbers)
    *rows, of_input, of_weight, of_bias = one_pass_op(*heads[:3], invariant, widens, *rest)
    return (weighted_rows(rows[0], factors).sum(), *rows), of_input, of_weight, of_bias


def _composed_loss(*args: Any) -> Tensor:
    *heads, target, factors, (_, widens, *numbers) = args
    head, teacher = (Head._make((*each, 0, widens)) for each in (heads[:3], heads[3:]))
    terms = composed_terms(head, teacher, target, TermOptions(*numbers[:NUM_OPTIONS]))
    return weighted_rows(terms, factors).sum()


# The tensors are those of both heads, the labels, and the derivative of the loss in each term. The
# options are the way in which products are computed, and those of `one_pass_op`.
ONE_PASS = OnePassLoss(_loss_and_gradients, _composed_loss, 8)


class OnePassTerms(OnePass):
    """A `OnePassLoss` whose result is the loss and the `DistillationRows`."""

    @staticmethod
    def forward(ctx: Any, loss: OnePassLoss, *args: Any) -> Any:
        result: Any = OnePass.forward(ctx, loss, *args)
        ctx.mark_non_differentiable(*result[1:])
        return result


def linear_distillation_loss(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    target: Tensor | None = None,
    *,
    weights: Mapping[str, float | Tensor],
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    softcap: float | None = None,
    teacher_classes: Tensor | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    reduction: str = "mean",
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Distillation:
    """Distillation loss from the hidden states of student and teacher, without the logits.

    It is `distillation_loss(input @ linear_weight.T + linear_bias, teacher_input @
    teacher_weight.T + teacher_bias, target, ...)`, and a small call computes just that. With `mean`
    and `sum` the forward pass computes the gradients, with the four matrix products and the memory
    of `linear_divergence`, whatever the terms.

    Args:
        input: the student's hidden states `[..., H]`, floating dtype.
        linear_weight: the student's matrix `[C, H]` in the same dtype, or in fp32.
        teacher_input: the teacher's hidden states `[..., K]`; K may differ from H. They get no
            gradient, like all that is the teacher's.
        teacher_weight: the teacher's matrix `[C, K]`, or `[D, K]` with `teacher_classes`, in the
            dtype of `teacher_input`, or in fp32.
        target: integer labels `[...]`, which the term `hard` needs.
        weights: as in `distillation_loss`.
        linear_bias, teacher_bias: `[C]`, or `[D]` for the teacher, in the dtype of the matrix.
        beta, temperature, scale_by_temperature_squared, softcap, ignore_index, mask, reduction: as
            in `distillation_loss`.
        teacher_classes: the teacher's class of each class of the student, `[C]`. The call copies
            these rows of the teacher's matrix, and computes the logits of all of its classes once
            more for `teacher_mass` and `teacher_argmax`.
        memory_budget: bytes of workspace in addition to inputs, results and that copy; None for
            4 GiB, or 256 MiB without a gradient.
        logits_dtype: as in `linear_cross_entropy`, for both heads.

    Returns:
        `Distillation(loss, hard, kl, reverse_kl, jsd, tv, teacher_mass, teacher_argmax)`, as
        `distillation_loss` returns it, differentiable in the student's hidden states, matrix and
        bias.

    Raises:
        TypeError, ValueError, IndexError: as in `distillation_loss` and `linear_divergence`.

    Source: as `distillation_loss`, with the plans of `linear_divergence`.

    Example:
        >>> import torch, partita
        >>> hidden, matrix = torch.eye(2, requires_grad=True), torch.zeros(3, 2)
        >>> teacher = torch.ones(2, 1), torch.tensor([[1.0], [0.0], [0.0]])
        >>> weights, target = {"hard": 0.1, "kl": 0.9}, torch.tensor([0, 2])
        >>> found = partita.linear_distillation_loss(
        ...     hidden, matrix, *teacher, target, weights=weights
        ... )
        >>> found.loss, found.kl, found.teacher_argmax
        (tensor(0.2208, grad_fn=<...>), tensor(0.1233), tensor([0, 0]))
    """
    head = cast_and_check(input, linear_weight, linear_bias)
    of_teacher = (teacher_input, teacher_weight, teacher_bias)
    teacher = checked_teacher(head, *of_teacher, same_classes=teacher_classes is None)
    if teacher_classes is not None:
        sizes = len(linear_weight), len(teacher_weight)
        check_mapped_classes(teacher_classes, input, "input", *sizes)
    objective = checked_objective(
        weights,
        input,
        "input",
        target,
        mask,
        ignore_index,
        reduction,
        temperature,
        scale_by_temperature_squared,
    )
    options = term_options(objective, beta, temperature, softcap, ignore_index)
    check_budget(memory_budget)
    head = head.of_call(logits_dtype)
    teacher = Head(*teacher[:3], *head[3:])
    if takes_all_logits([head, teacher], target, memory_budget):
        logits, teacher_logits = rows_linear(head), composed_linear(*teacher)
        rest = (target, teacher_classes, objective, options)
        return loss_of_logits(logits, teacher_logits, *rest)
    shape, head, teacher = input.shape[:-1], head.flat.aligned, teacher.flat.aligned
    tokens, wanted, on_all, stats = head.input.shape[0], head.wanted, None, None
    if teacher_classes is not None:
        dtype = acc_dtype(head.input.dtype)
        ids, on_all = mapped_classes(teacher_classes, len(teacher.weight), dtype)
        stats = _statistics_of_teacher(teacher, options, memory_budget)
        bias = None if teacher.bias is None else teacher.bias[ids]
        teacher = Head(teacher.input, teacher.weight[ids], bias, *teacher[3:])
    labels = None
    if target is not None and options.hard:
        labels = in_blocks(target.reshape(-1).long(), head.invariant, ignore_index).contiguous()
    has_one_pass = plain_eager() or torch.compiler.is_compiling()
    # The gradients of fp16 would underflow before a loss scale is known.
    is_reduced = reduction != "none" and head.input.dtype != torch.float16
    one_pass = any(wanted) and has_one_pass and is_reduced
    plan = divergence_plan(
        tokens,
        head.input.shape[1],
        len(head.weight),
        head.input.dtype,
        teacher.input.dtype,
        memory_budget,
        wanted.input_grad,
        wanted.weight_grad or wanted.bias_grad,
        one_pass,
        *head[3:],
        head.rounds,
    )
    backend = current_backend()

    def of_tokens(rows: Tensor) -> Tensor:
        return without_padding(rows, shape, head.invariant)

    def mass_of(state: Tensor) -> Tensor | None:
        """Return the teacher's mass from the columns of `RowState`."""
        if stats is None or on_all is None:
            return None
        rows = RowState(*state.detach().unbind(-1))
        mass = mass_of_classes(rows, stats.maximum, stats.sumexp, options.temperature)
        return of_tokens(mass * on_all)

    if one_pass:
        like = head.input.new_empty(tokens, dtype=acc_dtype(head.input.dtype))
        factors = _of_flat_rows(objective, shape, head.invariant, like).factors(like)
        factors = factors if on_all is None else factors * on_all
        tensors = (*head[:3], *teacher[:3], labels, factors)
        call = (*head[3:], *options, *plan[:3], *wanted, backend)
        loss, terms, state, argmax = apply(OnePassTerms, ONE_PASS, *tensors, call)
        terms = of_tokens(terms if on_all is None else terms * on_all)
        loss = loss + objective.of_no_rows(like)
        argmax = of_tokens(argmax if stats is None else stats.argmax)
        return Distillation(loss, *objective.reported(terms), mass_of(state), argmax)
    save_logits = plain_eager() and plan.saved > 0
    chunk = plan.chunk if any(wanted) else len(head.weight)
    numbers = (*options, plan.tokens, save_logits, backend, chunk)
    found = apply(LinearDistillation, *head, *teacher[:3], labels, *numbers)
    terms, state, argmax = found[:3]
    terms = of_tokens(terms if on_all is None else terms * on_all)
    rows = DistillationRows(terms, of_tokens(state), argmax)
    argmax = of_tokens(argmax if stats is None else stats.argmax)
    return result_of_rows(rows, objective, mass_of(state), argmax)


def _statistics_of_teacher(
    teacher: Head, options: TermOptions, memory_budget: int | None
) -> RowStatistics:
    """Return the statistics of the rows of a teacher over all of its classes."""
    chunk = teacher.plan(memory_budget, False).chunk
    numbers = (options.temperature, options.softcap, options.ignore_index)
    call = (*teacher, None, None, *numbers, False, True, chunk, False, current_backend())
    return RowStatistics(*rows_op(*call)[:-1])


def _of_flat_rows(
    objective: Objective, shape: torch.Size, invariant: bool, like: Tensor
) -> Objective:
    """Return the objective of hidden states `[M, H]` with their padding, of those `[..., H]`."""

    def flat(rows: Tensor) -> Tensor:
        return in_blocks(rows.reshape(-1), invariant)

    weights = (
        flat(weight) if isinstance(weight, Tensor) and weight.ndim else weight
        for weight in objective.weights
    )
    hard, soft = objective.hard_counts, objective.soft_counts
    if soft is None and invariant:  # The padding does not count.
        soft = like.new_ones(shape.numel(), dtype=torch.bool)
    counts = (None if each is None else flat(each) for each in (hard, soft))
    return Objective._make((Terms(*weights), *counts, *objective[3:]))
