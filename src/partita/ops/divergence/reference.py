"""The specification of divergences between two rows of logits, in plain PyTorch.

The functions of `DIVERGENCE_KERNELS` take rows whose classes come in chunks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ...primitives.rows import (
    finite_shift,
    laid_out_like,
    row_chunks,
    softcap_slope,
    softcapped,
    without_inert_rows,
)
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.reference import scaled_rows
from .common import DivergenceKernels, DivergenceRows, DivergenceState


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


def new_state(like: Tensor) -> DivergenceState:
    """Return the `DivergenceState` of as many rows as `like` has, before any class."""
    zero = torch.zeros(len(like), dtype=acc_dtype(like.dtype), device=like.device)
    nothing = torch.full_like(zero, -torch.inf)
    rows = DivergenceRows(
        loss=zero,
        student=zero.clone(),
        maximum=nothing,
        sumexp=zero.clone(),
        teacher_maximum=nothing.clone(),
        teacher_sumexp=zero.clone(),
    )
    return DivergenceState(rows, zero.clone())


def accumulate(
    logits: Tensor,
    teacher_logits: Tensor,
    state: DivergenceState,
    first: int,
    beta: float,
    temperature: float,
    softcap: float,
) -> None:
    """Update the state in place with the logits of the classes from `first` on, `[M, C]` each."""
    for rows in row_chunks(logits):
        x = softcapped(logits[rows], softcap)
        t = softcapped(teacher_logits[rows].to(x.dtype), softcap)
        _accumulate_rows(x, t, state.part(rows), beta, temperature)


def _add_classes(
    x: Tensor, maximum: Tensor, sumexp: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Update a row's maximum and sum with some of its classes.

    Returns:
        The logits relative to the maximum, their exponentials, by how much the maximum has moved,
        and the factor of earlier exponentials, 0 if there are none.
    """
    shift_before, new_maximum = finite_shift(maximum), torch.maximum(maximum, x.amax(1))
    shift = finite_shift(new_maximum)
    relative, scale = x - shift[:, None], ((maximum - shift) / temperature).exp()
    e = (relative / temperature).exp()
    sumexp.copy_(sumexp * scale + e.sum(1))
    maximum.copy_(new_maximum)
    return relative, e, shift - shift_before, scale


def _accumulate_rows(
    x: Tensor, t: Tensor, state: DivergenceState, beta: float, temperature: float
) -> None:
    rows, weighted = state
    student = (x, rows.maximum, rows.sumexp)
    teacher = (t, rows.teacher_maximum, rows.teacher_sumexp)
    one, other = (student, teacher) if beta else (teacher, student)
    sumexp_before = one[2].clone()
    first, e, moved, scale = _add_classes(*one, temperature)
    second, _, other_moved, _ = _add_classes(*other, temperature)
    # The weighted sum is relative to both maxima, and moves with them.
    before = scale * (weighted + sumexp_before * (other_moved - moved))
    terms = torch.where(e == 0, 0, e * (first - second)).sum(1)
    weighted.copy_(torch.where(scale == 0, 0, before) + terms)
    kl = weighted / one[2] / temperature + (other[2] / one[2]).log()
    rows.loss.copy_(kl)
    rows.student.copy_(kl if beta else torch.zeros_like(kl))


def _logp(
    logits: Tensor, maximum: Tensor, sumexp: Tensor, temperature: float, softcap: float
) -> Tensor:
    """Return log-probabilities from the statistics of the rows."""
    x = softcapped(logits.to(maximum.dtype), softcap)
    return (x - finite_shift(maximum)[:, None]) / temperature - sumexp.log()[:, None]


def accumulate_mixture(
    logits: Tensor,
    teacher_logits: Tensor,
    state: DivergenceState,
    first: int,
    beta: float,
    temperature: float,
    softcap: float,
) -> None:
    """Add these classes to the divergences from the mixture, of rows with known statistics."""
    for part in row_chunks(logits):
        rows = state.part(part).rows
        logp = _logp(logits[part], rows.maximum, rows.sumexp, temperature, softcap)
        statistics = (rows.teacher_maximum, rows.teacher_sumexp)
        teacher_logp = _logp(teacher_logits[part], *statistics, temperature, softcap)
        student = expected(logp.exp(), log_ratio(logp, teacher_logp, beta))
        mixture = log_mixture(logp, teacher_logp, beta)
        teacher = expected(teacher_logp.exp(), teacher_logp - mixture)
        loss = beta * teacher + (1 - beta) * student
        rows.loss.copy_(loss if first == 0 else rows.loss + loss)
        rows.student.copy_(student if first == 0 else rows.student + student)


def write_gradient(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    rows: DivergenceRows,
    beta: float,
    temperature: float,
    softcap: float,
    result: Tensor,
) -> None:
    """Write the gradient of the student's logits, `[M, C]`; `result` may be the logits."""
    for part in row_chunks(logits):
        _, student, maximum, sumexp, *of_teacher = (field[part] for field in rows)
        logp = _logp(logits[part], maximum, sumexp, temperature, softcap)
        maximum, sumexp = of_teacher
        teacher_logp = _logp(teacher_logits[part], maximum, sumexp, temperature, softcap)
        p = logp.exp()
        if beta == 0:
            terms = p - teacher_logp.exp()
        else:
            ratio = log_ratio(logp, teacher_logp, beta) - student[:, None]
            terms = (1.0 if beta == 1 else 1 - beta) * p * torch.where(p == 0, 0, ratio)
        on_row = (grad[part].to(p.dtype) / temperature)[:, None]
        dlogits = on_row * terms
        if softcap:
            dlogits = dlogits * softcap_slope(logits[part], softcap)
        result[part] = torch.where(on_row == 0, 0, dlogits).to(result.dtype)


DIVERGENCE_KERNELS = DivergenceKernels(new_state, accumulate, accumulate_mixture, write_gradient)


def divergence_local_gradient(
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
    """Compute the gradient of some classes' logits from the statistics of all classes."""
    statistics = (student, maximum, sumexp, teacher_maximum, teacher_sumexp)
    result, numbers = torch.empty_like(logits), (beta, temperature, softcap)
    write_gradient(
        grad, logits, teacher_logits, DivergenceRows(grad, *statistics), *numbers, result
    )
    return result
