"""Divergences of a head from another, or from a teacher's most probable classes: ops and calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply, plain_eager, skip_unused_gradients, takes
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import decide
from ..cross_entropy.autograd import OnePass, OnePassLoss
from ..divergence.autograd import divergence_of_classes, terms_of_rows
from ..divergence.common import (
    IGNORED,
    Distillation,
    DivergenceRows,
    Objective,
    TermOptions,
    Terms,
    check_teacher,
    checked_divergence,
    checked_objective,
    empty_rows,
    ids_of_rows,
    mapped_classes,
)
from ..logprobs.common import TopK
from .api import linear_token_stats
from .autograd import (
    check_labels,
    define_op,
    head_backward,
    one_pass_fake,
    rows_linear,
    saved_logits_fake,
)
from .chunked import gradients_like
from .common import TENSORS, Head, Wanted, checked_head
from .inputs import cast_and_check, takes_all_logits
from .logprobs import linear_logprobs_of
from .low_rank import LowRank
from .plan import check_budget, divergence_plan
from .products import composed_linear
from .reference import KERNELS


def _rows_fake(
    head: Head, teacher_input: Tensor, options: TermOptions, save_logits: bool
) -> tuple[Tensor, ...]:
    heads = head, head._replace(input=teacher_input)
    saved = (saved_logits_fake(each, save_logits) for each in heads)
    return *empty_rows(head.input, options), *saved


def _one_pass_fake(head: Head, options: TermOptions, wanted: Wanted) -> tuple[Tensor, ...]:
    _, *gradients = one_pass_fake(head, wanted)
    return *empty_rows(head.input, options), *gradients


divergence_op = define_op(KERNELS.linear_divergence, _rows_fake, check=check_labels)
divergence_backward_op = define_op(KERNELS.linear_divergence_backward, gradients_like)
one_pass_op = define_op(
    KERNELS.linear_divergence_one_pass,
    _one_pass_fake,
    check=check_labels,
    results=len(DivergenceRows._fields) + TENSORS,
)


def composed_rows(
    head: Head, teacher: Head, target: Tensor | None, options: TermOptions
) -> DivergenceRows:
    """Compute the terms of each row from all logits at once, fields `[...]`."""
    logits = rows_linear(head)
    teacher_logits = composed_linear(*teacher[:3], *teacher.products)
    if acc_dtype(teacher_logits.dtype) != acc_dtype(logits.dtype):
        teacher_logits = teacher_logits.to(acc_dtype(logits.dtype))
    return terms_of_rows(logits, teacher_logits, target, options)


class LinearDivergence(torch.autograd.Function):
    """The results of `divergence_op`; the chunk of its backward pass is the last argument."""

    generate_vmap_rule = True

    @staticmethod
    @takes(divergence_op, "backward_chunk")
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return divergence_op(*args[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.products, ctx.options = inputs[5:7], inputs[11:21]
        _, save_logits, ctx.backend, ctx.chunk = inputs[21:]
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*inputs[:TENSORS], *inputs[7:11], *output)
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        def composed(head: Head, *tensors: Any) -> tuple[Tensor]:
            teacher, target = head.beside(*tensors[:3]), tensors[3]
            return (composed_rows(head, teacher, target, TermOptions(*ctx.options)).terms,)

        return head_backward(ctx, divergence_backward_op, grads[:1], composed, heads=2)


def _objective_of(tensors: Sequence[Any], numbers: Sequence[Any]) -> Objective:
    hard_rows, soft_rows, *weights = tensors[TENSORS + 4 :]
    return Objective(hard_rows, soft_rows, Terms(*weights), *numbers[:3])


def _loss_and_gradients(*args: Any) -> tuple[Any, ...]:
    *tensors, (invariant, widens, *numbers) = args
    input, objective = tensors[0], _objective_of(tensors, numbers)
    factors = objective.factors(input.new_empty(len(input), dtype=acc_dtype(input.dtype)))
    rest = (*tensors[TENSORS : TENSORS + 4], factors, *numbers[3:])
    found = one_pass_op(*tensors[:TENSORS], invariant, widens, *rest)
    rows, gradients = DivergenceRows(*found[:-TENSORS]), found[-TENSORS:]
    return (objective.loss(rows.terms), *rows), *gradients


def _composed_loss(*args: Any) -> Tensor:
    *tensors, (_, widens, *numbers) = args
    head = Head._make((*tensors[:TENSORS], False, widens))
    *of_teacher, target = tensors[TENSORS : TENSORS + 4]
    rows = composed_rows(head, head.beside(*of_teacher), target, TermOptions(*numbers[3:13]))
    return _objective_of(tensors, numbers).loss(rows.terms)


# The tensors are those of both heads, the labels, and those of the objective. The options are the
# way in which products are computed, the numbers of the objective, and those of `one_pass_op`.
ONE_PASS = OnePassLoss(_loss_and_gradients, _composed_loss, TENSORS + 4 + 7)


class OnePassRows(OnePass):
    """A `OnePassLoss` whose result is the loss and the `DivergenceRows`."""

    @staticmethod
    def forward(ctx: Any, loss: OnePassLoss, *args: Any) -> Any:
        result: Any = OnePass.forward(ctx, loss, *args)
        ctx.mark_non_differentiable(*result[1:])
        return result


def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """Divergence of a student from a teacher, from the hidden states of both, without the logits.

    It is `divergence(input @ linear_weight.T + linear_bias, teacher_input @ teacher_weight.T +
    teacher_bias, ...)`, and a small call computes just that. With `mean` and `sum` the forward pass
    computes the gradients and the backward pass scales them. A batch takes four matrix products if
    the budget holds the logits of both heads or those of some thousand tokens; otherwise the last
    classes of all tokens are saved, as many as fit, and the logits of the others are computed again
    for the gradient.

    Args:
        input: the student's hidden states `[..., H]`, floating dtype.
        linear_weight: the student's matrix `[C, H]` in the same dtype, or in fp32.
        teacher_input: the teacher's hidden states `[..., K]`; K may differ from H. They get no
            gradient, like all that is the teacher's.
        teacher_weight: the teacher's matrix `[C, K]` in the dtype of `teacher_input`, or in fp32.
        linear_bias, teacher_bias: `[C]` in the dtype of the matrix.
        beta, temperature, softcap, mask, reduction: as in `divergence`.
        memory_budget: bytes of workspace in addition to inputs and results; None for 4 GiB, or
            256 MiB without a gradient.
        logits_dtype: as in `linear_cross_entropy`, for both heads.
        low_rank: as in `linear_cross_entropy`, for the student's head.

    Returns:
        The divergence in nats, a number or `[...]`, fp32 (fp64 for an fp64 student), differentiable
        in the student's hidden states, matrix, bias and `low_rank`. A mean over no rows is NaN.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected;
            heads of different vocabularies; too small a budget.

    Source: as `divergence`, with the plans of `linear_cross_entropy`.

    Example:
        >>> import torch, partita
        >>> hidden, matrix = torch.eye(2, requires_grad=True), torch.zeros(3, 2)
        >>> teacher_matrix = torch.tensor([[1.0], [0.0], [0.0]])
        >>> loss = partita.linear_divergence(hidden, matrix, torch.ones(2, 1), teacher_matrix)
        >>> loss
        tensor(0.1233, grad_fn=<...>)
    """
    head = cast_and_check(input, linear_weight, linear_bias, low_rank=low_rank)
    head = head.of_call(logits_dtype)
    teacher = checked_teacher(head, teacher_input, teacher_weight, teacher_bias)
    of_rows = (input, "input", mask, reduction)
    objective, options = checked_divergence(*of_rows, beta, temperature, softcap)
    check_budget(memory_budget)
    return _loss_of_heads(head, teacher, None, objective, options, memory_budget)[0]


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
    low_rank: LowRank | None = None,
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
        linear_bias, teacher_bias: `[C]`, or `[D]` for the teacher, in the dtype of the matrix.
        target, weights, beta, ignore_index, mask, reduction: as in `distillation_loss`.
        temperature, scale_by_temperature_squared, softcap: as in `distillation_loss`.
        teacher_classes: the teacher's class of each class of the student, `[C]`. The call copies
            these rows of the teacher's matrix, and computes the logits of all of its classes once
            more for `teacher_mass` and `teacher_argmax`.
        memory_budget: bytes of workspace in addition to inputs, results and that copy; None for
            4 GiB, or 256 MiB without a gradient.
        logits_dtype: as in `linear_cross_entropy`, for both heads.
        low_rank: as in `linear_cross_entropy`, for the student's head.

    Returns:
        `Distillation`, as `distillation_loss` returns it, differentiable in the student's hidden
        states, matrix, bias and `low_rank`.

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
    head = cast_and_check(input, linear_weight, linear_bias, low_rank=low_rank)
    head = head.of_call(logits_dtype)
    of_teacher = (teacher_input, teacher_weight, teacher_bias)
    teacher = checked_teacher(head, *of_teacher, same_classes=teacher_classes is None)
    mapped, of_all = None, None
    if teacher_classes is not None:
        sizes = len(linear_weight), len(teacher_weight)
        mapped = mapped_classes(teacher_classes, input, "input", *sizes)
    numbers = (ignore_index, beta, temperature, scale_by_temperature_squared, softcap)
    of_rows = (input, "input", target, mask, reduction)
    objective, options = checked_objective(weights, *of_rows, *numbers)
    check_budget(memory_budget)
    if mapped is not None:
        ids, penalty = mapped
        of_all = linear_token_stats(
            *teacher[:2],
            linear_bias=teacher.bias,
            temperature=temperature,
            softcap=softcap,
            memory_budget=memory_budget,
            logits_dtype=logits_dtype,
        )
        bias = penalty.to(teacher.weight.dtype)
        bias = bias if teacher.bias is None else teacher.bias[ids] + bias
        teacher = head.beside(teacher.input, teacher.weight[ids], bias)
    call = (head, teacher, target if options.hard else None, objective, options, memory_budget)
    return objective.result(*_loss_of_heads(*call), of_all, options.temperature)


def _loss_of_heads(
    head: Head,
    teacher: Head,
    target: Tensor | None,
    objective: Objective,
    options: TermOptions,
    memory_budget: int | None,
) -> tuple[Tensor, DivergenceRows]:
    """Return the loss of two heads, and the results of their rows, fields `[...]`.

    Unless the reduction is `none`, these are for numbers that have no gradient.
    """
    plain, reduction = objective.soft_rows if target is None else target, objective.reduction
    if takes_all_logits([head, teacher], plain, memory_budget):
        rows = composed_rows(head, teacher, target, options)
        return objective.loss(rows.terms), rows
    shape, head, teacher = head.input.shape[:-1], head.flat.aligned, teacher.flat.aligned
    wanted, backend = head.wanted, current_backend()
    if target is not None:
        labels = head.in_blocks(target.reshape(-1).long(), options.ignore_index)
        target = labels.contiguous()
    if head.invariant and objective.soft_rows is None:  # The padding does not count.
        counts = head.input.new_ones(shape.numel(), dtype=torch.bool)
        objective = Objective(objective.hard_rows, counts, *objective[2:])

    def flat(rows: Tensor | None) -> Tensor | None:
        if rows is None or not rows.ndim:
            return rows
        return head.in_blocks(rows.reshape(-1), 0)

    weights = Terms(*map(flat, objective.tensors))
    of_rows = Objective._make((*map(flat, objective[:2]), weights, *objective[3:]))
    has_one_pass = plain_eager() or torch.compiler.is_compiling()
    one_pass = any(wanted) and has_one_pass and reduction != "none"
    (tokens, hidden), dtype = head.input.shape, head.input.dtype
    sizes = (tokens, hidden, len(head.weight), dtype, teacher.input.dtype, memory_budget)
    input_grad, weight_grad, bias_grad, *of_low_rank = wanted
    grads = (input_grad or any(of_low_rank), weight_grad or bias_grad)
    rest = (*head.products, head.rounds)
    plan = divergence_plan(*sizes, *grads, one_pass, *rest, rank=head.rank)
    if dtype == torch.float16:
        one_pass = one_pass and decide(plan.chunk == 0, otherwise=False)
    if one_pass:
        tensors = (*head.tensors, *teacher[:3], target, *of_rows[:2], *of_rows.tensors)
        numbers = (*of_rows[3:], *options, *plan[:3], *wanted, backend)
        loss, *fields = apply(OnePassRows, ONE_PASS, *tensors, (*head.products, *numbers))
    else:
        save_logits = plain_eager() and plan.saved > 0
        chunk = plan.chunk if any(wanted) else len(head.weight)
        call = (*options, plan.tokens, save_logits, backend, chunk)
        fields = apply(LinearDivergence, *head, *teacher[:3], target, *call)[:7]
        loss = of_rows.loss(fields[0])
        if reduction == "none":
            loss = head.of_tokens(loss, shape)
    return loss, DivergenceRows(*(head.of_tokens(field, shape) for field in fields))


def checked_teacher(
    head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, same_classes: bool = True
) -> Head:
    """Return the teacher's head in the dtype of autocast; raise unless it fits the student's.

    The results have no gradient. The vocabularies are the same unless the caller maps them.
    """
    input, matrix, *_ = head
    checks.floating("teacher_input", hidden)
    checks.device("teacher_input", hidden, input, "input")
    checked = checked_head(hidden, weight, bias, "teacher_", "[C, K]", may_round=True)
    hidden, weight, bias, *_ = checked
    if same_classes and len(weight) != len(matrix):
        shorter = "teacher_weight" if len(weight) > len(matrix) else "linear_weight"
        classes = min(len(weight), len(matrix))
        raise ValueError(
            f"teacher_weight: expected the {len(matrix)} classes of linear_weight, got"
            f" {len(weight)}; pass {shorter}[:{classes}] to compare the classes that both have"
        )
    expected = (*input.shape[:-1], weight.shape[1])
    checks.shape("teacher_input", hidden, expected, "the rows of input and K of teacher_weight")
    bias = None if bias is None else bias.detach()
    return head.beside(hidden.detach(), weight.detach(), bias).rounded


def linear_topk_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher: TopK,
    *,
    linear_bias: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """Divergence of a student's head from a teacher whose k most probable classes are known.

    It is `topk_divergence(input @ linear_weight.T + linear_bias, teacher, ...)`, without the logits
    in memory, with the plans of `linear_logprobs`.

    Args:
        input: the student's hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype, or in fp32; see `linear_cross_entropy`.
        teacher: a `TopK`, as in `topk_divergence`.
        linear_bias: `[C]` in the dtype of the matrix.
        beta, temperature, softcap, mask, reduction: as in `topk_divergence`.
        memory_budget: bytes of workspace, as in `linear_logprobs`.
        logits_dtype, low_rank: as in `linear_cross_entropy`.

    Returns:
        The divergence in nats, a number or `[...]`, fp32 (fp64 for fp64), differentiable in hidden
        states, matrix, bias and `low_rank`. A mean over no rows is NaN.

    Raises:
        TypeError, ValueError, IndexError: as in `topk_divergence` and `linear_logprobs`.

    Source: as `topk_divergence`.

    Example:
        >>> import torch, partita
        >>> teacher = partita.topk_logprobs(torch.tensor([[3.0, 1.0, 0.0, 0.0]]), 2)
        >>> partita.linear_topk_divergence(torch.zeros(1, 2), torch.zeros(4, 2), teacher)
        tensor(0.7142)
    """
    head = cast_and_check(input, linear_weight, linear_bias, low_rank=low_rank)
    classes = len(head.weight)
    check_teacher(teacher, input, "input", classes, beta, mask, reduction)
    needs_rest = teacher.indices.shape[-1] < classes
    call = (ids_of_rows(teacher, mask), temperature, softcap, IGNORED, memory_budget, needs_rest)
    logp = linear_logprobs_of(head.of_call(logits_dtype), *call)
    return divergence_of_classes(logp, teacher, float(beta), mask, reduction)
