"""The divergence of a head from another, or from a teacher's most probable classes."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import apply, plain_eager
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ..divergence.autograd import divergence_of_classes
from ..divergence.common import (
    IGNORED,
    check_options,
    check_teacher,
    ids_of_rows,
    reduced,
    row_factors,
)
from ..logprobs.common import TopK
from . import divergence_autograd as autograd
from .common import Head, checked_head
from .divergence_plan import divergence_plan
from .inputs import checked_matrix, takes_all_logits
from .logprobs import linear_logprobs_of
from .plan import check_budget


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
        linear_weight: the student's matrix `[C, H]` in the same dtype.
        teacher_input: the teacher's hidden states `[..., K]`; K may differ from H. They get no
            gradient, like all that is the teacher's.
        teacher_weight: the teacher's matrix `[C, K]` in the dtype of `teacher_input`.
        linear_bias, teacher_bias: `[C]`.
        beta, temperature, softcap, mask, reduction: as in `divergence`.
        memory_budget: bytes of workspace in addition to inputs and results; None for 4 GiB, or
            256 MiB without a gradient.

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
    head = checked_matrix(input, linear_weight, linear_bias)
    teacher = _checked_teacher(head, teacher_input, teacher_weight, teacher_bias)
    check_options(beta, mask, reduction, input, "input")
    numbers = float(beta), *checks.temperature_and_softcap(temperature, softcap)
    check_budget(memory_budget)
    if takes_all_logits([head, teacher], mask, memory_budget):
        rows = autograd.composed_rows(*head, *teacher, *numbers)
        return reduced(rows, mask, reduction)
    flat_mask = None if mask is None else mask.reshape(-1)
    heads = head.flat, teacher.flat
    loss = _planned(*heads, numbers, flat_mask, reduction, memory_budget)
    return loss.reshape(input.shape[:-1]) if reduction == "none" else loss


def _checked_teacher(head: Head, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Head:
    """Return the teacher's tensors in the dtype of autocast; raise unless they fit the student's.

    The results have no gradient.
    """
    input, matrix, _ = head
    checks.floating("teacher_input", hidden)
    checks.device("teacher_input", hidden, input, "input")
    hidden, weight, bias = checked_head(hidden, weight, bias, "teacher_")
    if weight.ndim != 2:
        raise ValueError(f"teacher_weight: expected shape [C, K], got {list(weight.shape)}")
    if len(weight) != len(matrix):
        shorter = "teacher_weight" if len(weight) > len(matrix) else "linear_weight"
        classes = min(len(weight), len(matrix))
        raise ValueError(
            f"teacher_weight: expected the {len(matrix)} classes of linear_weight, got"
            f" {len(weight)}; pass {shorter}[:{classes}] to compare the classes that both have"
        )
    expected = (*input.shape[:-1], weight.shape[1])
    checks.shape("teacher_input", hidden, expected, "the rows of input and K of teacher_weight")
    return Head(hidden.detach(), weight.detach(), None if bias is None else bias.detach())


def _planned(
    head: Head,
    teacher: Head,
    numbers: tuple[float, ...],
    mask: Tensor | None,
    reduction: str,
    memory_budget: int | None,
) -> Tensor:
    """Compute the divergence in the chunks of the plan; the hidden states are `[M, H]`."""
    input, weight, _ = head
    wanted = head.wanted
    has_one_pass = plain_eager() or torch.compiler.is_compiling()
    # The gradients of fp16 would underflow before a loss scale is known.
    is_reduced = reduction != "none" and input.dtype != torch.float16
    one_pass = any(wanted) and has_one_pass and is_reduced
    tokens, hidden = input.shape
    plan = divergence_plan(
        tokens,
        hidden,
        len(weight),
        input.dtype,
        teacher.input.dtype,
        memory_budget,
        wanted[0],
        wanted[1] or wanted[2],
        one_pass,
    )
    backend, sizes = current_backend(), plan[:3]
    if not one_pass:
        save_logits = plain_eager() and plan.saved > 0
        chunk = plan.chunk if any(wanted) else len(weight)
        call = (*head, *teacher, *numbers, plan.tokens, save_logits, backend, chunk)
        return reduced(apply(autograd.LinearDivergence, *call)[0], mask, reduction)
    like = input.new_empty(tokens, dtype=acc_dtype(input.dtype))
    factors = row_factors(mask, like, reduction)
    tensors = (*head, *teacher, factors, mask)
    rest = ((reduction, *numbers, *sizes), wanted, backend)
    return apply(autograd.LinearDivergenceOnePass, autograd.ONE_PASS, *tensors, *rest)[0]


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
) -> Tensor:
    """Divergence of a student's head from a teacher whose k most probable classes are known.

    It is `topk_divergence(input @ linear_weight.T + linear_bias, teacher, ...)`, without the logits
    in memory, with the plans of `linear_logprobs`.

    Args:
        input: the student's hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype.
        teacher: a `TopK`, as in `topk_divergence`.
        linear_bias: `[C]` in the same dtype.
        beta, temperature, softcap, mask, reduction: as in `topk_divergence`.
        memory_budget: bytes of workspace, as in `linear_logprobs`.

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
    checked_matrix(input, linear_weight, linear_bias)
    checks.temperature_and_softcap(temperature, softcap)
    classes = len(linear_weight)
    check_teacher(teacher, input, "input", classes, beta, mask, reduction)
    needs_rest = teacher.indices.shape[-1] < classes
    options = (linear_bias, temperature, softcap, IGNORED, memory_budget, needs_rest)
    logp = linear_logprobs_of(input, linear_weight, ids_of_rows(teacher, mask), *options)
    return divergence_of_classes(logp, teacher, float(beta), mask, reduction)
