"""Divergences of a head from another, or from a teacher's most probable classes: ops and calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply, plain_eager, skip_unused_gradients, takes
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import decide
from ..cross_entropy.autograd import OnePass, OnePassLoss
from ..divergence.autograd import divergence_fake, divergence_of_classes, divergence_of_rows
from ..divergence.common import (
    IGNORED,
    check_options,
    check_teacher,
    ids_of_rows,
    reduced,
    row_factors,
)
from ..logprobs.common import TopK
from .autograd import (
    define_op,
    head_backward,
    one_pass_fake,
    rows_linear,
    saved_logits_fake,
)
from .chunked import empty_gradients
from .common import Head, checked_head
from .inputs import cast_and_check, takes_all_logits
from .logprobs import linear_logprobs_of
from .plan import check_budget, divergence_plan
from .products import composed_linear, in_blocks, without_padding
from .reference import KERNELS


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
    return *divergence_fake(input), *saved


divergence_op = define_op(KERNELS.linear_divergence, _rows_fake)
divergence_backward_op = define_op(KERNELS.linear_divergence_backward, empty_gradients)
one_pass_op = define_op(KERNELS.linear_divergence_one_pass, one_pass_fake(has_rows=True))


def composed_rows(
    head: Head, teacher: Head, beta: float, temperature: float, softcap: float
) -> Tensor:
    """Compute the divergence of each row from all logits at once, `[...]`."""
    logits, teacher_logits = rows_linear(head), composed_linear(*teacher)
    if acc_dtype(teacher_logits.dtype) != acc_dtype(logits.dtype):
        teacher_logits = teacher_logits.to(acc_dtype(logits.dtype))
    return divergence_of_rows(logits, teacher_logits.detach(), beta, temperature, softcap)


class LinearDivergence(torch.autograd.Function):
    """The results of `divergence_op`; the chunk of its backward pass is the last argument."""

    generate_vmap_rule = True

    @staticmethod
    @takes(divergence_op, "backward_chunk")
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return divergence_op(*args[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.products, ctx.options = inputs[3:5], inputs[8:11]
        _, save_logits, ctx.backend, ctx.chunk = inputs[11:]
        ctx.mark_non_differentiable(*output[1:])
        skip_unused_gradients(ctx)
        ctx.save_for_backward(*inputs[:3], *inputs[5:8], *output[1:])
        ctx.is_spent = not save_logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        def composed(head: Head, *tensors: Any) -> tuple[Tensor]:
            return (composed_rows(head, Head._make((*tensors[:3], *head[3:])), *ctx.options),)

        return head_backward(ctx, divergence_backward_op, grads[:1], composed, heads=2)


def _loss_and_gradients(*args: Any) -> tuple[Tensor, ...]:
    *heads, factors, mask, (invariant, widens, reduction, *numbers) = args
    rest = (*heads[3:], factors, *numbers)
    rows, *gradients = one_pass_op(*heads[:3], invariant, widens, *rest)
    return reduced(rows, mask, reduction), *gradients


def _composed_loss(*args: Any) -> Tensor:
    *heads, _, mask, (_, widens, reduction, *numbers) = args
    head, teacher = (Head._make((*each, 0, widens)) for each in (heads[:3], heads[3:]))
    rows = composed_rows(head, teacher, *numbers[:3])
    return reduced(rows, mask, reduction)


# The tensors are those of both heads, the factors of the rows and the mask. The options are the
# way in which products are computed, the reduction, and those of `one_pass_op`.
ONE_PASS = OnePassLoss(_loss_and_gradients, _composed_loss, 8)


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

    Returns:
        The divergence in nats, a number or `[...]`, fp32 (fp64 for an fp64 student), differentiable
        in the student's hidden states, matrix and bias. A mean over no rows is NaN.

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
    head = cast_and_check(input, linear_weight, linear_bias)
    teacher = checked_teacher(head, teacher_input, teacher_weight, teacher_bias)
    check_options(beta, mask, reduction, input, "input")
    numbers = float(beta), *checks.temperature_and_softcap(temperature, softcap)
    check_budget(memory_budget)
    head = head.of_call(logits_dtype)
    teacher = Head(*teacher[:3], *head[3:])
    if takes_all_logits([head, teacher], mask, memory_budget):
        rows = composed_rows(head, teacher, *numbers)
        return reduced(rows, mask, reduction)
    shape, head, teacher = input.shape[:-1], head.flat.aligned, teacher.flat.aligned
    mask, wanted = None if mask is None else mask.reshape(-1), head.wanted
    if head.invariant:  # The padding does not count.
        mask = head.input.new_ones(shape.numel(), dtype=torch.bool) if mask is None else mask
        mask = in_blocks(mask, head.invariant, False)
    has_one_pass = plain_eager() or torch.compiler.is_compiling()
    one_pass = any(wanted) and has_one_pass and reduction != "none"
    (tokens, hidden), dtype = head.input.shape, head.input.dtype
    if head.invariant and dtype == torch.float16:  # the number of tokens must not decide
        one_pass = False
    sizes = (tokens, hidden, len(head.weight), dtype, teacher.input.dtype, memory_budget)
    grads, rest = (wanted.input_grad, wanted.weight_grad or wanted.bias_grad), head[3:]
    plan = divergence_plan(*sizes, *grads, one_pass, *rest, head.rounds)
    if one_pass and dtype == torch.float16:
        # Fp16 has chunks of tokens, whose gradients are scaled as no loss scale is known, or else
        # gradients that need no scale, in the backward pass.
        one_pass = decide(plan.chunk == 0, otherwise=False)
        one_pass = one_pass and decide(plan.tokens < tokens, otherwise=False)
        plan = plan if one_pass else divergence_plan(*sizes, *grads, False, *rest, head.rounds)
    backend = current_backend()
    if one_pass:
        like = head.input.new_empty(tokens, dtype=acc_dtype(dtype))
        tensors = (*head[:3], *teacher[:3], row_factors(mask, like, reduction), mask)
        options = (*head[3:], reduction, *numbers, *plan[:3], *wanted, backend)
        result: Tensor = apply(OnePass, ONE_PASS, *tensors, options)
        return result
    save_logits = plain_eager() and plan.saved > 0
    chunk = plan.chunk if any(wanted) else len(head.weight)
    call = (*head, *teacher[:3], *numbers, plan.tokens, save_logits, backend, chunk)
    loss = reduced(apply(LinearDivergence, *call)[0], mask, reduction)
    return without_padding(loss, shape, head.invariant) if reduction == "none" else loss


def checked_teacher(
    head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None, same_classes: bool = True
) -> Head:
    """Return the teacher's tensors in the dtype of autocast; raise unless they fit the student's.

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
    return Head(hidden.detach(), weight.detach(), bias).rounded


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
        logits_dtype: as in `linear_cross_entropy`.

    Returns:
        The divergence in nats, a number or `[...]`, fp32 (fp64 for fp64), differentiable in hidden
        states, matrix and bias. A mean over no rows is NaN.

    Raises:
        TypeError, ValueError, IndexError: as in `topk_divergence` and `linear_logprobs`.

    Source: as `topk_divergence`.

    Example:
        >>> import torch, partita
        >>> teacher = partita.topk_logprobs(torch.tensor([[3.0, 1.0, 0.0, 0.0]]), 2)
        >>> partita.linear_topk_divergence(torch.zeros(1, 2), torch.zeros(4, 2), teacher)
        tensor(0.7142)
    """
    cast_and_check(input, linear_weight, linear_bias)
    checks.temperature_and_softcap(temperature, softcap)
    classes = len(linear_weight)
    check_teacher(teacher, input, "input", classes, beta, mask, reduction)
    needs_rest = teacher.indices.shape[-1] < classes
    numbers = (temperature, softcap, IGNORED, memory_budget, logits_dtype, needs_rest)
    ids = ids_of_rows(teacher, mask)
    logp = linear_logprobs_of(input, linear_weight, ids, linear_bias, *numbers)
    return divergence_of_classes(logp, teacher, float(beta), mask, reduction)
