"""Specification of the terms of a distillation loss, in plain PyTorch.

A student has the probabilities p = softmax(x / T), a teacher q = softmax(t / T), and m is
beta q + (1 - beta) p. With c a class, y the label and sums over classes, the terms of a row are

    hard        log sum exp(x) - x_y                       of the student at temperature 1
    kl          sum q log(q / p)                           gradient  p_c - q_c
    reverse_kl  sum p log(p / q)                           p_c (log(p_c / q_c) - reverse_kl)
    jsd         beta sum q log(q / m) + (1 - beta) s       (1 - beta) p_c (log(p_c / m_c) - s)
                with s = sum p log(p / m)
    tv          sum |p - q| / 2                            p_c (sign(p_c - q_c) - r) / 2
                with r = sum p sign(p - q)

Gradients in x / T are beside the terms; that of `hard` in x is softmax(x)_c - [c = y]. So a loss is
two reads of the logits for the terms, or one without `jsd` and `tv`, and one for the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.rows import (
    finite_shift,
    row_chunks,
    softcap_slope,
    softcapped,
    without_inert_rows,
)
from ..cross_entropy.common import valid_targets
from ..divergence.reference import expected
from .common import DistillationKernels, DistillationRows, RowState, TermOptions, Terms

NO_LOG = -1000.0  # the logarithm of a probability of 0


class Pair(NamedTuple):
    """Some classes of both rows, `[..., C]`, as their statistics normalise them.

    Fields:
        relative: the student's soft-capped logits below their maximum.
        a, b: exponents of student and teacher.
        p, q: probabilities of student and teacher.
    """

    relative: Tensor
    a: Tensor
    b: Tensor
    p: Tensor
    q: Tensor


def statistics(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    first: int,
    options: TermOptions,
) -> tuple[RowState, Tensor]:
    """Return the first eight fields of the `RowState` of some classes alone, and their arg-max.

    The sums are differentiable. The maxima count as constants, on which no term depends.
    """
    x = softcapped(logits, options.softcap)
    t = softcapped(teacher_logits.to(x.dtype), options.softcap)
    maximum, (teacher_maximum, argmax) = x.detach().amax(-1), t.detach().max(-1)
    relative = x - finite_shift(maximum).unsqueeze(-1)
    a = relative / options.temperature
    b = (t - finite_shift(teacher_maximum).unsqueeze(-1)) / options.temperature
    e, f, zero = a.exp(), b.exp(), torch.zeros_like(maximum)
    label = torch.full_like(maximum, -torch.inf)
    if target is not None and options.hard:
        index = target.long() - first
        inside = (index >= 0) & (index < x.shape[-1])
        found = x.gather(-1, torch.where(inside, index, 0).unsqueeze(-1)).squeeze(-1)
        label = torch.where(inside, found, label)
    state = RowState(
        maximum=maximum,
        sumexp=e.sum(-1),
        plain_sumexp=relative.exp().sum(-1) if options.hard else zero,
        teacher_maximum=teacher_maximum,
        teacher_sumexp=f.sum(-1),
        forward=expected(f, b - a) if options.kl else zero,
        reverse=expected(e, a - b) if options.reverse_kl else zero,
        label=label,
        student=zero,
        teacher=zero,
        distance=zero,
        sign=zero,
    )
    return state, first + argmax


def pair_of(logits: Tensor, teacher_logits: Tensor, state: RowState, options: TermOptions) -> Pair:
    """Return some classes of both rows, normalised by the statistics of all classes."""
    x = softcapped(logits, options.softcap)
    t = softcapped(teacher_logits.to(x.dtype), options.softcap)
    relative = x - finite_shift(state.maximum).unsqueeze(-1)
    a = relative / options.temperature
    b = (t - finite_shift(state.teacher_maximum).unsqueeze(-1)) / options.temperature
    p, q = a.exp() / state.sumexp.unsqueeze(-1), b.exp() / state.teacher_sumexp.unsqueeze(-1)
    return Pair(relative, a, b, p, q)


def log_ratios(pair: Pair, state: RowState, beta: float) -> tuple[Tensor, Tensor]:
    """Return log(p / m) and log(q / m), finite if p or q is 0."""
    m = (beta * pair.q + (1 - beta) * pair.p).clamp_min(torch.finfo(pair.p.dtype).tiny).log()
    log_p = (pair.a - state.sumexp.log().unsqueeze(-1)).clamp_min(NO_LOG)
    log_q = (pair.b - state.teacher_sumexp.log().unsqueeze(-1)).clamp_min(NO_LOG)
    return log_p - m, log_q - m


def mixture_statistics(
    logits: Tensor, teacher_logits: Tensor, state: RowState, options: TermOptions
) -> RowState:
    """Return the state with its last four fields those of some classes."""
    pair = pair_of(logits, teacher_logits, state, options)
    found = list(state)
    if options.jsd:
        ratio, teacher_ratio = log_ratios(pair, state, options.beta)
        found[8:10] = (pair.p * ratio).sum(-1), (pair.q * teacher_ratio).sum(-1)
    if options.tv:
        difference = pair.p - pair.q
        found[10:] = difference.abs().sum(-1), (pair.p * difference.sign()).sum(-1)
    return RowState(*found)


def terms_of(state: RowState, target: Tensor | None, classes: int, options: TermOptions) -> Tensor:
    """Return the terms of rows from the statistics of all classes, `[..., 5]`."""
    zero = torch.zeros_like(state.maximum)
    found = Terms(zero, zero, zero, zero, zero)._asdict()
    log_ratio = state.sumexp.log() - state.teacher_sumexp.log()
    if options.hard and target is not None:
        _, valid, invalid = valid_targets(target, classes, options.ignore_index)
        nll = state.plain_sumexp.log() + (finite_shift(state.maximum) - state.label)
        found["hard"] = torch.where(valid, nll, 0) + torch.where(invalid, torch.nan, zero)
    if options.kl:
        found["kl"] = state.forward / state.teacher_sumexp + log_ratio
    if options.reverse_kl:
        found["reverse_kl"] = state.reverse / state.sumexp - log_ratio
    if options.jsd:
        found["jsd"] = options.beta * state.teacher + (1 - options.beta) * state.student
    if options.tv:
        found["tv"] = state.distance / 2
    return torch.stack(list(found.values()), -1)


def distillation(
    logits: Tensor, teacher_logits: Tensor, target: Tensor | None, options: TermOptions
) -> DistillationRows:
    """Compute the terms of each row.

    Args:
        logits, teacher_logits: `[..., C]`.
        target: the labels `[...]`, or None without the term `hard`.
        options: which terms, and how.
    """
    state, argmax = statistics(logits, teacher_logits, target, 0, options)
    if options.is_mixed:
        state = mixture_statistics(logits, teacher_logits, state, options)
    terms = terms_of(state, target, logits.shape[-1], options)
    return DistillationRows(terms, torch.stack(state, -1), argmax)


def gradient_of(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    state: RowState,
    first: int,
    classes: int,
    options: TermOptions,
) -> Tensor:
    """Compute the gradient of some classes of the student's logits, in the accumulator dtype.

    Args:
        grad: that of the terms of each row, `[..., 5]`.
        logits, teacher_logits: the classes from `first` on, `[..., C]`.
        target: the labels, `[...]`.
        state: the statistics of all `classes` classes.
    """
    pair = pair_of(logits, teacher_logits, state, options)
    on = Terms(*grad.to(pair.p.dtype).unbind(-1))

    def weighed(on_row: Tensor, values: Tensor) -> Tensor:
        """Return the product, 0 for the factor 0 of values that are not finite."""
        on_row = on_row.unsqueeze(-1)
        return on_row * torch.where((on_row == 0) & ~values.isfinite(), 0, values)

    soft = torch.zeros_like(pair.p)
    if options.kl:
        soft = soft + weighed(on.kl, pair.p - pair.q)
    if options.reverse_kl:
        mean = (state.reverse / state.sumexp).unsqueeze(-1)
        ratio = torch.where(pair.p == 0, 0, pair.a - pair.b - mean)
        soft = soft + weighed(on.reverse_kl, pair.p * ratio)
    if options.jsd:
        ratio, _ = log_ratios(pair, state, options.beta)
        terms = pair.p * (ratio - state.student.unsqueeze(-1))
        soft = soft + weighed(on.jsd, (1 - options.beta) * terms)
    if options.tv:
        signs = (pair.p - pair.q).sign() - state.sign.unsqueeze(-1)
        soft = soft + weighed(on.tv, 0.5 * pair.p * signs)
    result = soft / options.temperature
    if options.hard and target is not None:
        _, valid, invalid = valid_targets(target, classes, options.ignore_index)
        column = torch.arange(first, first + logits.shape[-1], device=logits.device)
        is_label = column == target.long().unsqueeze(-1)
        plain = pair.relative.exp() / state.plain_sumexp.unsqueeze(-1)
        on_hard = torch.where(valid, on.hard, 0)
        on_hard = on_hard * torch.where(invalid, torch.nan, 1.0).to(plain.dtype)
        result = result + weighed(on_hard, plain - is_label.to(plain.dtype))
    if options.softcap:
        result = result * softcap_slope(logits, options.softcap)
    return result


def distillation_gradient(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    state: Tensor,
    options: TermOptions,
) -> Tensor:
    """Compute the gradient of the student's logits, differentiable in the first two arguments.

    The state only says which rows are not finite.
    """
    grads, known = grad.unbind(-1), state.unbind(-1)
    logits, teacher_logits = (
        without_inert_rows(each, (*known[:7], *known[8:]), grads)
        for each in (logits, teacher_logits)
    )
    of_rows, _ = statistics(logits, teacher_logits, target, 0, options)
    if options.is_mixed:
        of_rows = mixture_statistics(logits, teacher_logits, of_rows, options)
    rest = (target, of_rows, 0, logits.shape[-1], options)
    return gradient_of(grad, logits, teacher_logits, *rest).to(logits.dtype)


def _moved(
    state: RowState, maximum: Tensor, teacher_maximum: Tensor, temperature: float
) -> Sequence[Tensor]:
    """Return the five sums of a state relative to maxima that are at least its own."""
    shift, teacher_shift = finite_shift(maximum), finite_shift(teacher_maximum)
    by = (shift - finite_shift(state.maximum)) / temperature
    teacher_by = (teacher_shift - finite_shift(state.teacher_maximum)) / temperature
    plain = (state.maximum - shift).exp()
    scale = ((state.maximum - shift) / temperature).exp()
    teacher_scale = ((state.teacher_maximum - teacher_shift) / temperature).exp()
    forward = teacher_scale * (state.forward + state.teacher_sumexp * (by - teacher_by))
    reverse = scale * (state.reverse + state.sumexp * (teacher_by - by))
    return (
        state.sumexp * scale,
        state.plain_sumexp * plain,
        state.teacher_sumexp * teacher_scale,
        torch.where(teacher_scale == 0, 0, forward),
        torch.where(scale == 0, 0, reverse),
    )


def accumulate(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    found: DistillationRows,
    first: int,
    classes: int,
    options: TermOptions,
) -> None:
    """Update the results in place with the classes from `first` on, of `classes` in all."""
    for rows in row_chunks(logits):
        labels, part = None if target is None else target[rows], found.part(rows)
        state, argmax = statistics(logits[rows], teacher_logits[rows], labels, first, options)
        if first:
            before = RowState(*part.state.unbind(-1))
            is_higher = state.teacher_maximum > before.teacher_maximum
            argmax = torch.where(is_higher, argmax, part.argmax)
            maxima = (
                torch.maximum(before.maximum, state.maximum),
                torch.maximum(before.teacher_maximum, state.teacher_maximum),
            )
            sums = [
                one + other
                for one, other in zip(
                    _moved(before, *maxima, options.temperature),
                    _moved(state, *maxima, options.temperature),
                    strict=True,
                )
            ]
            label = torch.maximum(before.label, state.label)
            fields = (maxima[0], *sums[:2], maxima[1], *sums[2:], label, *before[8:])
            state = RowState._make(fields)
        part.terms.copy_(terms_of(state, labels, classes, options))
        part.state.copy_(torch.stack(state, -1))
        part.argmax.copy_(argmax)


def accumulate_mixture(
    logits: Tensor,
    teacher_logits: Tensor,
    found: DistillationRows,
    first: int,
    options: TermOptions,
) -> None:
    """Add these classes to what needs the normalisers of both rows."""
    for rows in row_chunks(logits):
        part = found.part(rows)
        before = RowState(*part.state.unbind(-1))
        state = mixture_statistics(logits[rows], teacher_logits[rows], before, options)
        last = [
            one + other if first else one for one, other in zip(state[8:], before[8:], strict=True)
        ]
        part.state[:, 8:].copy_(torch.stack(last, -1))
        part.terms[:, 3].copy_(options.beta * last[1] + (1 - options.beta) * last[0])
        part.terms[:, 4].copy_(last[2] / 2)


def write_gradient(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    state: Tensor,
    first: int,
    classes: int,
    options: TermOptions,
    result: Tensor,
) -> None:
    """Write the gradient of the classes from `first` on, `[M, C]`; `result` may be the logits."""
    for rows in row_chunks(logits):
        labels = None if target is None else target[rows]
        rest = (labels, RowState(*state[rows].unbind(-1)), first, classes, options)
        dlogits = gradient_of(grad[rows], logits[rows], teacher_logits[rows], *rest)
        is_inert = (grad[rows] == 0).all(-1, keepdim=True)
        result[rows] = torch.where(is_inert, 0, dlogits).to(result.dtype)


DISTILLATION_KERNELS = DistillationKernels(accumulate, accumulate_mixture, write_gradient)
