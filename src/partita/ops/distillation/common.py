"""The terms of a distillation loss, its result, and what reference and kernels share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.dtypes import acc_dtype


class Distillation(NamedTuple):
    """The result of `distillation_loss`.

    Fields:
        loss: the weighted sum of the terms, a number, or `[...]` under `none`.
        hard: the cross-entropy of the student's logits with the labels.
        kl: KL(teacher ‖ student).
        reverse_kl: KL(student ‖ teacher).
        jsd: the generalised Jensen-Shannon divergence.
        tv: the total variation, half of the sum of |student - teacher|.
        teacher_mass: the teacher's probability of all classes that the student has, `[...]`; None
            without `teacher_classes`.
        teacher_argmax: the teacher's most probable class, the lowest of equal ones, `[...]` int64.

    A term that has no weight is None. Under `none` the others are `[...]` and differentiable.
    Otherwise they are numbers without a gradient, reduced as the loss is, but not weighted.
    """

    loss: Tensor
    hard: Tensor | None
    kl: Tensor | None
    reverse_kl: Tensor | None
    jsd: Tensor | None
    tv: Tensor | None
    teacher_mass: Tensor | None
    teacher_argmax: Tensor


class Terms(NamedTuple):
    """Something for each term of the loss, in the order of the terms of a row."""

    hard: Any
    kl: Any
    reverse_kl: Any
    jsd: Any
    tv: Any


class TermOptions(NamedTuple):
    """The options of the terms of rows.

    Fields:
        hard, kl, reverse_kl, jsd, tv: whether the term is computed.
        beta: the teacher's weight in the mixture of the Jensen-Shannon divergence.
        temperature: what the soft-capped logits are divided by in all terms but `hard`.
        softcap: the soft-cap of both logits, or 0.
        ignore_index: the label of rows without a `hard` term.
    """

    hard: bool
    kl: bool
    reverse_kl: bool
    jsd: bool
    tv: bool
    beta: float
    temperature: float
    softcap: float
    ignore_index: int

    @property
    def named(self) -> Terms:
        """Return which terms are computed."""
        return Terms(*self[:5])

    @property
    def is_mixed(self) -> bool:
        """Return whether a term needs the normalisers of both rows first."""
        return self.jsd or self.tv


class RowState(NamedTuple):
    """The statistics of two rows after some of their classes: the columns of a tensor `[..., 12]`.

    x and t are the soft-capped logits of student and teacher. The exponentials e and f of the two
    rows are those of a = (x - maximum) / temperature and of b, the same of t.

    Fields:
        maximum, sumexp: the maximum of x, and the sum of e.
        plain_sumexp: the sum of exp(x - maximum).
        teacher_maximum, teacher_sumexp: the maximum of t, and the sum of f.
        forward: the sum of f * (b - a), for `kl`.
        reverse: the sum of e * (a - b), for `reverse_kl`.
        label: x of the label, -inf until that class was read.
        student, teacher: KL(student ‖ mixture) and KL(teacher ‖ mixture), for `jsd`.
        distance: the sum of |p - q| over the probabilities of student and teacher, for `tv`.
        sign: the sum of p * sign(p - q).

    Those that no term needs are 0. The last four follow from a second read of the classes.
    """

    maximum: Tensor
    sumexp: Tensor
    plain_sumexp: Tensor
    teacher_maximum: Tensor
    teacher_sumexp: Tensor
    forward: Tensor
    reverse: Tensor
    label: Tensor
    student: Tensor
    teacher: Tensor
    distance: Tensor
    sign: Tensor


STATE_WORDS = len(RowState._fields)


class DistillationRows(NamedTuple):
    """The terms of rows, fp32 (fp64 for fp64), and what their gradient needs.

    Fields:
        terms: the terms in the order of `Terms`, 0 for those that are not computed, `[..., 5]`.
        state: the columns of `RowState`, `[..., 12]`.
        argmax: the lowest class with the teacher's maximum, `[...]` int64.
    """

    terms: Tensor
    state: Tensor
    argmax: Tensor

    def part(self, rows: slice) -> DistillationRows:
        """Return the fields of some rows, in the same memory."""
        return DistillationRows(*(field[rows] for field in self))


def empty_rows(logits: Tensor) -> DistillationRows:
    """Return memory for the results of rows of logits, `[..., C]`."""
    shape, dtype = logits.shape[:-1], acc_dtype(logits.dtype)
    return DistillationRows(
        logits.new_empty(*shape, len(Terms._fields), dtype=dtype),
        logits.new_empty(*shape, STATE_WORDS, dtype=dtype),
        logits.new_empty(shape, dtype=torch.int64),
    )


class DistillationKernels(NamedTuple):
    """The functions of one backend that work on some classes of both rows, `[M, C]` each.

    Fields:
        accumulate: updates `DistillationRows` in place with the classes from `first` on, or writes
            them if that is 0.
        accumulate_mixture: adds what needs both normalisers, which have seen all classes.
        gradient: writes the gradient of the student's logits, which may take their place.
    """

    accumulate: Callable[..., None]
    accumulate_mixture: Callable[..., None]
    gradient: Callable[..., None]


class Objective(NamedTuple):
    """How the terms of rows make up the loss.

    Fields:
        weights: the weight of each term, a number or a tensor `[...]`; None for terms without one.
        hard_counts: which rows have a `hard` term, `[...]`, or None for all.
        soft_counts: which rows have the other terms, `[...]`, or None for all.
        soft_scale: what the other terms are multiplied by.
        reduction: `none`, `mean` or `sum`.
    """

    weights: Terms
    hard_counts: Tensor | None
    soft_counts: Tensor | None
    soft_scale: float
    reduction: str

    def counts(self, name: str) -> Tensor | None:
        """Return which rows have a term."""
        return self.hard_counts if name == "hard" else self.soft_counts

    def _divisor(self, name: str, rows: Tensor) -> Tensor:
        """Return what the sum of a term over the rows is divided by, `[]`."""
        counts = self.counts(name)
        if self.reduction != "mean":
            return rows.new_ones(())
        # A compiler would take the number of rows of a tensor for a constant.
        return (torch.ones_like(rows) if counts is None else counts).sum().to(rows.dtype)

    def factors(self, rows: Tensor) -> Tensor:
        """Return the derivative of the loss in each term of each row, `[..., 5]`.

        `rows` is a tensor `[...]` in the dtype of the terms.
        """
        columns = []
        for name, weight in self.weights._asdict().items():
            if weight is None:
                columns.append(torch.zeros_like(rows))
                continue
            scale = 1.0 if name == "hard" else self.soft_scale
            column = torch.zeros_like(rows) + weight * scale / self._divisor(name, rows)
            counts = self.counts(name)
            columns.append(column if counts is None else torch.where(counts, column, 0))
        return torch.stack(columns, -1)

    def of_no_rows(self, rows: Tensor) -> Tensor:
        """Return what a mean over no rows adds to the loss, `[]`: NaN, and 0 in other cases."""
        names = [name for name, weight in self.weights._asdict().items() if weight is not None]
        divisors = torch.stack([self._divisor(name, rows) for name in names])
        return torch.where((divisors == 0).any(), torch.nan, 0.0).to(rows.dtype)

    def reported(self, terms: Tensor) -> Terms:
        """Return each term that has a weight as the result has it, from the terms of rows."""
        found: list[Tensor | None] = []
        terms = terms if self.reduction == "none" else terms.detach()
        for index, name in enumerate(Terms._fields):
            if self.weights[index] is None:
                found.append(None)
                continue
            counts, rows = self.counts(name), terms[..., index]
            rows = rows if counts is None else torch.where(counts, rows, 0)
            rows = rows if name == "hard" or self.soft_scale == 1 else rows * self.soft_scale
            if self.reduction != "none":
                rows = rows.sum() / self._divisor(name, rows)
            found.append(rows)
        return Terms(*found)


def weighted_rows(terms: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of the terms of each row times factors, `[...]`, from `[..., 5]` each.

    A factor of 0 stands for a term that the row does not have.
    """
    hard, *others = (factors * torch.where(factors == 0, 0, terms)).unbind(-1)
    return functools.reduce(torch.add, others, hard)


def checked_objective(
    weights: Mapping[str, float | Tensor],
    rows: Tensor,
    name: str,
    target: Tensor | None,
    mask: Tensor | None,
    ignore_index: int,
    reduction: str,
    temperature: float,
    scale_by_temperature_squared: bool,
) -> Objective:
    """Return the `Objective` of rows `[..., D]` of the named tensor; raise for a bad option."""
    if not isinstance(weights, Mapping) or not weights:
        raise TypeError(
            "weights: expected a dict from the names of terms to their weights, such as"
            f' {{"hard": 0.5, "kl": 0.5}}, got {weights!r}'
        )
    for term, weight in weights.items():
        checks.choice("weights", term, Terms._fields)
        if isinstance(weight, Tensor):
            checks.floating(f"weights[{term!r}]", weight)
            checks.device(f"weights[{term!r}]", weight, rows, name)
            if weight.ndim:
                shape = (rows.shape[:-1], f"{name}.shape[:-1]")
                checks.shape(f"weights[{term!r}]", weight, *shape)
        else:
            checks.number(f"weights[{term!r}]", weight, low=0.0)
    checks.choice("reduction", reduction, checks.REDUCTIONS)
    if target is not None:
        checks.integer("target", target)
        checks.device("target", target, rows, name)
        checks.shape("target", target, rows.shape[:-1], f"{name}.shape[:-1]")
    elif "hard" in weights:
        raise ValueError("target: expected the labels of the term 'hard', got None")
    if mask is not None:
        checks.tensor("mask", mask)
        checks.shape("mask", mask, rows.shape[:-1], f"{name}.shape[:-1]")
        checks.device("mask", mask, rows, name)
    counts = None if target is None else target != ignore_index
    detached = {
        term: weight.detach() if isinstance(weight, Tensor) else float(weight)
        for term, weight in weights.items()
    }
    return Objective(
        weights=Terms(*(detached.get(term) for term in Terms._fields)),
        hard_counts=counts,
        soft_counts=counts if mask is None else mask != 0,
        soft_scale=float(temperature) ** 2 if scale_by_temperature_squared else 1.0,
        reduction=reduction,
    )


def term_options(
    objective: Objective, beta: float, temperature: float, softcap: float | None, ignore_index: int
) -> TermOptions:
    """Return the options of the terms that have a weight; raise for a bad number."""
    numbers = checks.temperature_and_softcap(temperature, softcap)
    checks.number("beta", beta, low=0.0, high=1.0)
    checks.python_int("ignore_index", ignore_index)
    named = Terms(*(weight is not None for weight in objective.weights))
    if objective.weights.jsd is not None and beta in (0.0, 1.0):
        raise ValueError(
            f"beta: expected a number between 0 and 1 for the term 'jsd', got {beta}; the terms"
            " 'kl' and 'reverse_kl' are the divergences at the ends"
        )
    return TermOptions._make((*named, float(beta), *numbers, ignore_index))


def check_mapped_classes(
    classes: Tensor, rows: Tensor, name: str, student_classes: int, teacher_classes: int
) -> None:
    """Raise unless these are ids of the teacher's classes, one for each class of the student."""
    checks.integer("teacher_classes", classes)
    checks.device("teacher_classes", classes, rows, name)
    meaning = "the classes of the student"
    checks.shape("teacher_classes", classes, (student_classes,), meaning)
    checks.labels("teacher_classes", classes, teacher_classes, checks.NOTHING_IGNORED)


def mapped_classes(
    classes: Tensor, teacher_classes: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return ids that are safe to read, `[C]`, and 1, or NaN if they are not the user's, `[]`."""
    ids = classes.long()
    safe = ids.clamp(0, teacher_classes - 1)
    return safe, torch.where((ids == safe).all(), 1.0, torch.nan).to(dtype)


def mass_of_classes(state: RowState, maximum: Tensor, sumexp: Tensor, temperature: float) -> Tensor:
    """Return the teacher's probability of the classes of the state, `[...]`.

    `maximum` and `sumexp` are those of all its classes, as `RowState` has them.
    """
    below = torch.where(state.teacher_maximum == maximum, 0, state.teacher_maximum - maximum)
    return state.teacher_sumexp / sumexp * (below / temperature).exp()
