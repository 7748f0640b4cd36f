"""The divergence of a student's distribution from a teacher's, for distillation."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.dtypes import acc_dtype
from .autograd import divergence_of_rows
from .common import reduced


def divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Divergence of the student's distribution of each row from the teacher's, for distillation.

    The distributions are softmaxes at the temperature, and the result is not scaled by its square.
    With m = beta * teacher + (1 - beta) * student, a beta between 0 and 1 gives the generalised
    Jensen-Shannon divergence beta * KL(teacher ‖ m) + (1 - beta) * KL(student ‖ m).

    Args:
        logits: the student's, `[..., C]`, floating dtype, any strides; may be -inf.
        teacher_logits: the teacher's, `[..., C]`, any floating dtype. They get no gradient.
        beta: 0 for the forward KL(teacher ‖ student), 1 for the reverse KL(student ‖ teacher), or a
            number between them.
        temperature: positive; what both logits are divided by.
        softcap: replace both logits by `softcap * tanh(logits / softcap)` first.
        mask: `[...]`, bool or numbers; rows where it is 0 have loss and gradient zero, and the mean
            does not count them.
        reduction: `none` (the shape `[...]`), `mean` over the rows of the mask, or `sum`.

    Returns:
        The divergence in nats, a number or `[...]`, fp32 (fp64 for fp64), differentiable in
        `logits`. A mean over no rows is NaN.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected.

    Source: Agarwal et al., On-policy distillation of language models, 2024, whose beta this is.

    Example:
        >>> import torch, partita
        >>> logits = torch.zeros(1, 2, requires_grad=True)
        >>> loss = partita.divergence(logits, torch.tensor([[1.0986, 0.0]]))
        >>> loss.backward()
        >>> loss, logits.grad
        (tensor(0.1308, grad_fn=<...>), tensor([[-0.2500,  0.2500]]))
    """
    checks.floating("logits", logits)
    checks.floating("teacher_logits", teacher_logits)
    checks.device("teacher_logits", teacher_logits, logits, "logits")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(
            f"logits: expected shape [..., C] with at least one class, got {list(logits.shape)}"
        )
    if teacher_logits.shape != logits.shape:
        same_rows = teacher_logits.shape[:-1] == logits.shape[:-1]
        advice = "; cut the longer rows to the classes that both have" if same_rows else ""
        raise ValueError(
            f"teacher_logits: expected the shape of logits = {list(logits.shape)},"
            f" got {list(teacher_logits.shape)}{advice}"
        )
    checks.number("beta", beta, low=0.0, high=1.0)
    numbers = float(beta), *checks.temperature_and_softcap(temperature, softcap)
    checks.choice("reduction", reduction, checks.REDUCTIONS)
    if mask is not None:
        checks.tensor("mask", mask)
        checks.shape("mask", mask, logits.shape[:-1], "logits.shape[:-1]")
        checks.device("mask", mask, logits, "logits")
    dtype = torch.promote_types(logits.dtype, teacher_logits.dtype)
    if acc_dtype(dtype) != acc_dtype(logits.dtype):
        logits = logits.to(dtype)
    return reduced(divergence_of_rows(logits, teacher_logits, *numbers), mask, reduction)
