"""The specification of divergences between two rows of logits, in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ...primitives.rows import laid_out_like, softcap_slope, without_inert_rows
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.reference import scaled_rows
from .common import DivergenceRows


def expected(p: Tensor, values: Tensor) -> Tensor:
    """Return the sum of p times the values of each row; a probability of 0 counts as 0."""
    return (p * torch.where(p == 0, 0, values)).sum(-1)


def log_mixture(logp: Tensor, teacher_logp: Tensor, beta: float) -> Tensor:
    """Return the log of `beta * teacher + (1 - beta) * student`, NaN where both are 0.

    On a CPU `torch.logaddexp` computes the last elements of a tensor in another way.
    """
    teacher, student = teacher_logp + math.log(beta), logp + math.log1p(-beta)
    return torch.maximum(teacher, student) - logsigmoid((teacher - student).abs())


def log_ratio(logp: Tensor, teacher_logp: Tensor, beta: float) -> Tensor:
    """Return log(student / teacher) for beta 1, else log(student / mixture).

    It is 0 where the student is 0, and its derivatives are finite there.
    """
    is_zero = logp == -torch.inf
    logp = torch.where(is_zero, 0, logp)
    other = teacher_logp if beta == 1 else log_mixture(logp, teacher_logp, beta)
    return torch.where(is_zero, 0, logp - other)


def divergence(
    logits: Tensor, teacher_logits: Tensor, beta: float, temperature: float, softcap: float
) -> DivergenceRows:
    """Compute the divergence of each row of the student's logits from the teacher's.

    Args:
        logits, teacher_logits: `[..., C]`.
        beta: 0 for KL(teacher ‖ student), 1 for KL(student ‖ teacher), between them the generalised
            Jensen-Shannon divergence.
        temperature: what the soft-capped logits are divided by.
        softcap: the soft-cap, or 0.
    """
    dtype = acc_dtype(logits.dtype)
    x, maximum = scaled_rows(logits, temperature, softcap)
    t, teacher_maximum = scaled_rows(teacher_logits.to(dtype), temperature, softcap)
    logp, teacher_logp = x.log_softmax(-1), t.log_softmax(-1)
    p, q = logp.exp(), teacher_logp.exp()
    sumexp, teacher_sumexp = x.exp().sum(-1), t.exp().sum(-1)
    # Where one row alone decides the weights, logits are subtracted before the logarithms of the
    # sums, which keeps the digits that they share.
    student = torch.zeros_like(maximum)
    if beta == 0:
        loss = expected(q, t - x) + (sumexp / teacher_sumexp).log()
    elif beta == 1:
        loss = expected(p, x - t) + (teacher_sumexp / sumexp).log()
        student = loss.clone()
    else:
        student = expected(p, log_ratio(logp, teacher_logp, beta))
        teacher = expected(q, teacher_logp - log_mixture(logp, teacher_logp, beta))
        loss = beta * teacher + (1 - beta) * student
    return DivergenceRows(
        loss=loss,
        student=student,
        maximum=maximum,
        sumexp=sumexp,
        teacher_maximum=teacher_maximum,
        teacher_sumexp=teacher_sumexp,
    )


def divergence_gradient(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    student: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    teacher_maximum: Tensor,
    teacher_sumexp: Tensor,
    beta: float,
    temperature: float,
    softcap: float,
) -> Tensor:
    """Compute the gradient of the student's logits, differentiable in the first two arguments.

    The statistics only say which rows are not finite.
    """
    statistics = (student, maximum, sumexp, teacher_maximum, teacher_sumexp)
    logits, teacher_logits = (
        without_inert_rows(each, statistics, (grad,)) for each in (logits, teacher_logits)
    )
    x, _ = scaled_rows(logits, temperature, softcap)
    t, _ = scaled_rows(teacher_logits.to(x.dtype), temperature, softcap)
    logp, teacher_logp = x.log_softmax(-1), t.log_softmax(-1)
    p = logp.exp()
    if beta == 0:
        terms = p - teacher_logp.exp()
    else:
        ratio = log_ratio(logp, teacher_logp, beta)
        mean = expected(p, ratio).unsqueeze(-1)
        # A class of probability 0 has no gradient, even where the ratio is infinite.
        terms = p * torch.where(p == 0, 0, ratio - mean)
        if beta != 1:
            terms = terms * (1 - beta)
    result = (grad.to(x.dtype) / temperature).unsqueeze(-1) * terms
    if softcap:
        result = result * softcap_slope(logits, softcap)
    return result.to(logits.dtype)


def divergence_one_pass(
    logits: Tensor,
    teacher_logits: Tensor,
    row_factor: Tensor | None,
    factor: float,
    beta: float,
    temperature: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Compute the divergence of each row, and the gradient of the sum of them times factors.

    The factors are `row_factor`, `[...]`, or one number for all rows. A row whose factor is 0 has
    loss and gradient 0, whatever its logits are.
    """
    numbers = (beta, temperature, softcap)
    rows = divergence(logits, teacher_logits, *numbers)
    if row_factor is None:
        row_factor = torch.full_like(rows.loss, factor)
    dlogits = divergence_gradient(row_factor, logits, teacher_logits, *rows[1:], *numbers)
    return torch.where(row_factor == 0, 0, rows.loss), laid_out_like(dlogits, logits)
