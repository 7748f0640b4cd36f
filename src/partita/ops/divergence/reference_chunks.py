"""Divergences of rows whose classes come in chunks, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.rows import finite_shift, row_chunks, softcap_slope, softcapped
from ...runtime.dtypes import acc_dtype
from .common import (
    DivergenceKernels,
    DivergenceRows,
    DivergenceState,
)
from .reference import expected, log_mixture, log_ratio


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
