"""The specification of the terms of two rows of logits, in plain PyTorch.

A student has the probabilities p = softmax(x / T), a teacher q = softmax(t / T), and m is
beta q + (1 - beta) p. With c a class, y the label and sums over classes, the terms of a row are

    hard        log sum exp(x) - x_y                       of the student at temperature 1
    kl          sum q log(q / p)                           gradient  p_c - q_c
    reverse_kl  sum p log(p / q)                           p_c (log(p_c / q_c) - reverse_kl)
    jsd         beta sum q log(q / m) + (1 - beta) s       (1 - beta) p_c (log(p_c / m_c) - s)
                with s = sum p log(p / m)
    tv          sum |p - q| / 2                            p_c (sign(p_c - q_c) - r) / 2
                with r = sum p sign(p - q)

Gradients in x / T are beside the terms; that of `hard` in x is softmax(x)_c - [c = y]. The
functions of `DIVERGENCE_KERNELS` take rows whose classes come in chunks.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ...primitives.rows import (
    finite_shift,
    laid_out_like,
    part_of,
    row_chunks,
    softcap_slope,
    softcapped,
    without_inert_rows,
)
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.common import valid_targets
from ..cross_entropy.reference import scaled_rows
from .common import (
    NO_TERMS,
    DivergenceKernels,
    DivergenceRows,
    DivergenceState,
    Means,
    TermOptions,
    Terms,
    columns,
    counts,
    divergence_options,
    label_loss,
    packed,
    unpacked,
)


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


def label_logit(x: Tensor, target: Tensor, first: int) -> Tensor:
    """Return the logit of each label among the classes from `first` on, -inf for another."""
    index = target.long() - first
    inside = (index >= 0) & (index < x.shape[-1])
    found = x.gather(-1, torch.where(inside, index, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, found, -torch.inf)


def divergence(
    logits: Tensor, teacher_logits: Tensor, target: Tensor | None, options: TermOptions
) -> DivergenceRows:
    """Compute the terms of each row of the student's logits and the teacher's, `[..., C]`.

    The labels are `[...]`, or None without the term `hard`.
    """
    dtype, (_, *numbers, ignored) = acc_dtype(logits.dtype), options[6:]
    x, maximum = scaled_rows(logits, *numbers)
    t, teacher_maximum = scaled_rows(teacher_logits.to(dtype), *numbers)
    logp, teacher_logp = x.log_softmax(-1), t.log_softmax(-1)
    p, q = logp.exp(), teacher_logp.exp()
    sumexp, teacher_sumexp = x.exp().sum(-1), t.exp().sum(-1)
    terms, means = dict.fromkeys(Terms._fields), dict.fromkeys(Means._fields)
    found: dict[str, Any] = {**terms, **means}
    if options.hard and target is not None:
        plain, capped = sumexp, softcapped(logits, options.softcap)
        if options.means.plain:
            plain = (capped - finite_shift(maximum).unsqueeze(-1)).exp().sum(-1)
            found["plain"] = plain
        label = label_logit(capped, target, 0)
        found["hard"] = label_loss(target, label, maximum, plain, x.shape[-1], ignored)
    # Where one row alone decides the weights, logits are subtracted before the logarithms of the
    # sums, which keeps the digits that they share.
    if options.kl:
        found["kl"] = expected(q, t - x) + (sumexp / teacher_sumexp).log()
    if options.reverse_kl:
        found["reverse_kl"] = expected(p, x - t) + (teacher_sumexp / sumexp).log()
    if options.jsd:
        found["jsd"], found["student"] = mixed(logp, teacher_logp, options.beta)
    if options.tv:
        found["tv"], found["sign"] = variation(p, q)
    best = logits.new_empty((*maximum.shape, 0), dtype=torch.int64)
    if options.best:
        best = softcapped(teacher_logits.to(dtype), options.softcap).max(-1)[1]
    return DivergenceRows(
        terms=packed([found[name] for name in terms if found[name] is not None], maximum),
        maximum=maximum,
        sumexp=sumexp,
        teacher_maximum=teacher_maximum,
        teacher_sumexp=teacher_sumexp,
        means=packed([found[name] for name in means if found[name] is not None], maximum),
        argmax=best,
    )


def mixed(logp: Tensor, teacher_logp: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return the terms of these classes in `jsd` and in KL(student ‖ mixture)."""
    student = expected(logp.exp(), log_ratio(logp, teacher_logp, beta))
    mixture = log_mixture(logp, teacher_logp, beta)
    teacher = expected(teacher_logp.exp(), teacher_logp - mixture)
    return beta * teacher + (1 - beta) * student, student


def variation(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the terms of these classes in `tv` and in the mean of sign(p - q)."""
    difference = p - q
    return difference.abs().sum(-1) / 2, (p * difference.sign()).sum(-1)


def gradient_of_terms(
    grad: Tensor,  # that of the packed terms
    logits: Tensor,  # the student's, [..., C]
    pair: tuple[Tensor, Tensor],  # log-probabilities of student and teacher, [..., C]
    plain: Tensor | None,  # the student's probabilities at temperature 1, for `hard`
    # The mean that is subtracted in each term, [...], or None for that of these classes.
    means: Terms,
    target: Tensor | None,  # the labels, for `hard`
    first: int,
    classes: int,
    options: TermOptions,
) -> Tensor:
    """Return the gradient of the logits of the classes from `first` on, of `classes` in all."""
    (logp, teacher_logp), found = pair, []
    grad, p, q = grad.to(logp.dtype), logp.exp(), teacher_logp.exp()
    on = columns(grad / options.temperature, options.terms)
    if options.kl:
        found.append(weighed(on.kl, p - q))
    for on_row, mean, beta in (
        (on.reverse_kl, means.reverse_kl, 1.0),
        (on.jsd, means.jsd, options.beta),
    ):
        if on_row is not None:
            ratio = log_ratio(logp, teacher_logp, beta)
            own = mean is None
            mean = expected(p, ratio) if mean is None else mean
            # A class of probability 0 has no gradient, even where the ratio is infinite.
            of_class = torch.where(p == 0, 0, ratio - mean.unsqueeze(-1))
            scale = 1.0 if beta == 1 else 1 - beta
            found.append(weighed(on_row, p * of_class * scale if own else scale * p * of_class))
    if options.tv:
        mean = variation(p, q)[1] if means.tv is None else means.tv
        found.append(weighed(on.tv, 0.5 * p * ((p - q).sign() - mean.unsqueeze(-1))))
    if target is not None and plain is not None:
        _, valid, invalid = valid_targets(target, classes, options.ignore_index)
        column = torch.arange(first, first + p.shape[-1], device=p.device)
        is_label = (column == target.long().unsqueeze(-1)).to(p.dtype)
        on_row = torch.where(valid, unpacked(grad, options.terms)[0], 0)
        on_row = on_row * torch.where(invalid, torch.nan, 1.0).to(p.dtype)
        found.append(weighed(on_row, plain - is_label))
    result = functools.reduce(torch.add, found)
    return result * softcap_slope(logits, options.softcap) if options.softcap else result


def weighed(on_row: Tensor, values: Tensor) -> Tensor:
    """Return the product, 0 for the factor 0 of values that are not finite."""
    on_row = on_row.unsqueeze(-1)
    return on_row * torch.where((on_row == 0) & ~values.isfinite(), 0, values)


def divergence_gradient(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    rows: DivergenceRows,
    options: TermOptions,
) -> Tensor:
    """Compute the gradient of the student's logits, differentiable in the first two arguments.

    The terms and statistics only say which rows are not finite.
    """
    of_rows = (*unpacked(rows.terms, options.terms), *unpacked(rows.means, options.means))
    known, grads = (*of_rows, *rows[1:5]), unpacked(grad, options.terms)
    soft = grads[options.hard :] or grads
    logits = without_inert_rows(logits, known, grads)
    teacher_logits = without_inert_rows(teacher_logits, known, soft)
    x, _ = scaled_rows(logits, options.temperature, options.softcap)
    t, _ = scaled_rows(teacher_logits.to(x.dtype), options.temperature, options.softcap)
    pair = (x.log_softmax(-1), t.log_softmax(-1))
    plain = softcapped(logits, options.softcap).softmax(-1) if options.hard else None
    place = (target, 0, logits.shape[-1], options)
    return gradient_of_terms(grad, logits, pair, plain, NO_TERMS, *place).to(logits.dtype)


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
    options = divergence_options(beta, temperature, softcap)
    rows = divergence(logits, teacher_logits, None, options)
    if row_factor is None:
        row_factor = torch.full_like(rows.terms, factor)
    pair = (row_factor, logits, teacher_logits, None)
    dlogits = divergence_gradient(*pair, rows, options)
    return torch.where(row_factor == 0, 0, rows.terms), laid_out_like(dlogits, logits)


def accumulate(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    state: DivergenceState,
    first: int,
    classes: int,
    options: TermOptions,
) -> None:
    """Update the state in place with the logits of the classes from `first` on, `[M, C]` each."""
    if first == 0:
        for each in (state.rows.maximum, state.rows.teacher_maximum, state.sums.label):
            if each is not None:
                each.fill_(-torch.inf)
        for each in (
            state.rows.sumexp,
            state.rows.teacher_sumexp,
            state.rows.means,
            *state.sums[:2],
        ):
            if each is not None:
                each.zero_()
    for rows in row_chunks(logits):
        x = softcapped(logits[rows], options.softcap)
        t = softcapped(teacher_logits[rows].to(x.dtype), options.softcap)
        _accumulate_rows(x, t, part_of(target, rows), part_of(state, rows), first, classes, options)


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
    x: Tensor,
    t: Tensor,
    target: Tensor | None,
    state: DivergenceState,
    first: int,
    classes: int,
    options: TermOptions,
) -> None:
    rows, sums = state
    terms, means = columns(rows.terms, options.terms), columns(rows.means, options.means)
    temperature, maximum = options.temperature, rows.maximum.clone()
    if options.best:
        highest, best = t.max(1)
        is_higher = (highest > rows.teacher_maximum) | (first == 0)
        rows.argmax.copy_(torch.where(is_higher, first + best, rows.argmax))
    before = rows.sumexp.clone(), rows.teacher_sumexp.clone()
    student = _add_classes(x, rows.maximum, rows.sumexp, temperature)
    teacher = _add_classes(t, rows.teacher_maximum, rows.teacher_sumexp, temperature)
    of_student = (student, before[0], rows.sumexp)
    of_teacher = (teacher, before[1], rows.teacher_sumexp)
    for weighted, kl, one, other in (
        (sums.forward, terms.kl, of_teacher, of_student),
        (sums.reverse, terms.reverse_kl, of_student, of_teacher),
    ):
        if weighted is not None:
            (relative, e, moved, scale), sumexp_before, sumexp = one
            (other_relative, _, other_moved, _), _, other_sumexp = other
            # The weighted sum is relative to both maxima, and moves with them.
            earlier = scale * (weighted + sumexp_before * (other_moved - moved))
            added = torch.where(e == 0, 0, e * (relative - other_relative)).sum(1)
            weighted.copy_(torch.where(scale == 0, 0, earlier) + added)
            kl.copy_(weighted / sumexp / temperature + (other_sumexp / sumexp).log())
    if target is not None and sums.label is not None:
        plain, relative = rows.sumexp, student[0]
        if means.plain is not None:
            scale = (maximum - finite_shift(rows.maximum)).exp()
            plain = means.plain.copy_(means.plain * scale + relative.exp().sum(1))
        sums.label.copy_(torch.maximum(sums.label, label_logit(x, target, first)))
        numbers = (classes, options.ignore_index)
        terms.hard.copy_(label_loss(target, sums.label, rows.maximum, plain, *numbers))


def _logp(logits: Tensor, maximum: Tensor, sumexp: Tensor, options: TermOptions) -> Tensor:
    """Return log-probabilities from the statistics of the rows."""
    x = softcapped(logits.to(maximum.dtype), options.softcap)
    return (x - finite_shift(maximum)[:, None]) / options.temperature - sumexp.log()[:, None]


def accumulate_mixture(
    logits: Tensor,
    teacher_logits: Tensor,
    state: DivergenceState,
    first: int,
    options: TermOptions,
) -> None:
    """Add these classes to what needs the normalisers of both rows."""
    for part in row_chunks(logits):
        rows = part_of(state.rows, part)
        logp = _logp(logits[part], rows.maximum, rows.sumexp, options)
        statistics = (rows.teacher_maximum, rows.teacher_sumexp)
        teacher_logp = _logp(teacher_logits[part], *statistics, options)
        terms, means = columns(rows.terms, options.terms), columns(rows.means, options.means)
        found: list[tuple[Tensor, Tensor]] = []
        if options.jsd:
            loss, student = mixed(logp, teacher_logp, options.beta)
            found += [(terms.jsd, loss), (means.student, student)]
        if options.tv:
            distance, sign = variation(logp.exp(), teacher_logp.exp())
            found += [(terms.tv, distance), (means.sign, sign)]
        for total, of_classes in found:
            total.copy_(of_classes if first == 0 else total + of_classes)


def write_gradient(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    rows: DivergenceRows,
    first: int,
    classes: int,
    options: TermOptions,
    result: Tensor,
) -> None:
    """Write the gradient of the classes from `first` on, `[M, C]`; `result` may be the logits."""
    for part in row_chunks(logits):
        of_rows = part_of(rows, part)
        _, maximum, sumexp, teacher_maximum, teacher_sumexp, *_ = of_rows
        logp = _logp(logits[part], maximum, sumexp, options)
        teacher_logp = _logp(teacher_logits[part], teacher_maximum, teacher_sumexp, options)
        terms, means = columns(of_rows.terms, options.terms), columns(of_rows.means, options.means)
        known = Terms(None, None, terms.reverse_kl, means.student, means.sign)
        labels, plain = part_of(target, part), None
        if options.hard:
            x = softcapped(logits[part].to(logp.dtype), options.softcap)
            plain = (x - finite_shift(maximum)[:, None]).exp()
            plain = plain / (sumexp if means.plain is None else means.plain)[:, None]
        rest = ((logp, teacher_logp), plain, known, labels, first, classes, options)
        dlogits = gradient_of_terms(grad[part], logits[part], *rest)
        has_gradient = counts(grad[part]).unsqueeze(-1)
        result[part] = torch.where(has_gradient, dlogits, 0).to(result.dtype)


DIVERGENCE_KERNELS = DivergenceKernels(accumulate, accumulate_mixture, write_gradient)
