"""The loss that the terms of rows make up, and the result of a distillation loss."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...primitives.rows import finite_shift
from ...runtime import checks
from ..cross_entropy.api import TokenStats
from .common import (
    NO_TERMS,
    DivergenceRows,
    TermOptions,
    Terms,
    check_options,
    packed,
    reduced,
    row_factors,
    unpacked,
)


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


class Objective(NamedTuple):
    """How the terms of rows make up the loss.

    Fields:
        hard_rows: which rows have a `hard` term, `[...]`, or None for all.
        soft_rows: which rows have the other terms, `[...]`, or None for all.
        tensors: the weights that are tensors `[...]` or `[]`, otherwise None.
        numbers: the weights that are numbers, otherwise None.
        scale: what the terms but `hard` are multiplied by.
        reduction: `none`, `mean` or `sum`.
    """

    hard_rows: Tensor | None
    soft_rows: Tensor | None
    tensors: Terms
    numbers: Terms
    scale: float
    reduction: str

    @classmethod
    def of_divergence(cls, options: TermOptions, mask: Tensor | None, reduction: str) -> Objective:
        """Return the objective of a single divergence."""
        numbers = (1.0 if named else None for named in options.terms)
        return cls(None, mask, NO_TERMS, Terms(*numbers), 1.0, reduction)

    def _parts(self) -> list[tuple[str, Tensor | None, float, Any]]:
        """Return name, rows, scale and weight of each term that has a weight."""
        weights = zip(Terms._fields, self.tensors, self.numbers, strict=True)
        of_hard, of_others = (self.hard_rows, 1.0), (self.soft_rows, self.scale)
        return [
            (name, *(of_hard if name == "hard" else of_others), number if x is None else x)
            for name, x, number in weights
            if x is not None or number is not None
        ]

    def factors(self, like: Tensor) -> Tensor:
        """Return the derivative of the loss in each term of each row `[...]`, packed."""
        found = []
        for _, rows, scale, weight in self._parts():
            factor = row_factors(rows, like, self.reduction)
            if isinstance(weight, Tensor) or weight * scale != 1.0:
                factor = torch.where(factor == 0, 0, factor * weight * scale).to(like.dtype)
            found.append(factor)
        return packed(found, like)

    def _reduced(self, terms: Tensor, weighted: bool) -> list[Tensor]:
        """Return each of the packed terms, reduced, times its weight or not."""
        parts, found = self._parts(), []
        of_terms = unpacked(terms, [True] * len(parts))
        for values, (_, rows, scale, weight) in zip(of_terms, parts, strict=True):
            factor = weight * scale if weighted else scale
            if isinstance(factor, Tensor) or factor != 1.0:
                values = values * factor
            found.append(reduced(values, rows, self.reduction))
        return found

    def loss(self, terms: Tensor) -> Tensor:
        """Return the loss from the packed terms of rows."""
        return functools.reduce(torch.add, self._reduced(terms, weighted=True))

    def result(
        self, loss: Tensor, rows: DivergenceRows, teacher: TokenStats | None, temperature: float
    ) -> Distillation:
        """Return the result from rows `[...]`, and statistics of all of the teacher's classes."""
        terms = rows.terms if self.reduction == "none" else rows.terms.detach()
        values = zip(self._parts(), self._reduced(terms, weighted=False), strict=True)
        found: dict[str, Any] = {name: value for (name, *_), value in values}
        mass, argmax = None, rows.argmax
        if teacher is not None:
            shift = finite_shift(rows.teacher_maximum) / temperature
            logsumexp = shift + rows.teacher_sumexp.log()
            mass, argmax = (logsumexp - teacher.logsumexp).exp().detach(), teacher.argmax
        return Distillation._make((loss, *map(found.get, Terms._fields), mass, argmax))


def checked_objective(
    weights: Mapping[str, float | Tensor],
    rows: Tensor,
    name: str,
    target: Tensor | None,
    mask: Tensor | None,
    reduction: str,
    ignore_index: int,
    beta: float,
    temperature: float,
    scale_by_temperature_squared: bool,
    softcap: float | None,
) -> tuple[Objective, TermOptions]:
    """Return objective and options for rows `[..., D]` of the named tensor; raise for bad ones."""
    if not isinstance(weights, Mapping) or not weights:
        raise TypeError(
            "weights: expected a dict from the names of terms to their weights, such as"
            f' {{"hard": 0.5, "kl": 0.5}}, got {weights!r}'
        )
    shape = (rows.shape[:-1], f"{name}.shape[:-1]")
    for term, weight in weights.items():
        checks.choice("weights", term, Terms._fields)
        if isinstance(weight, Tensor):
            checks.floating(f"weights[{term!r}]", weight)
            checks.device(f"weights[{term!r}]", weight, rows, name)
            if weight.ndim:
                checks.shape(f"weights[{term!r}]", weight, *shape)
        else:
            checks.number(f"weights[{term!r}]", weight, low=0.0)
    if target is not None:
        checks.integer("target", target)
        checks.device("target", target, rows, name)
        checks.shape("target", target, *shape)
    elif "hard" in weights:
        raise ValueError("target: expected the labels of the term 'hard', got None")
    check_options(beta, mask, reduction, rows, name)
    checks.python_int("ignore_index", ignore_index)
    numbers = float(beta), *checks.temperature_and_softcap(temperature, softcap)
    if "jsd" in weights and beta in (0.0, 1.0):
        raise ValueError(
            f"beta: expected a number between 0 and 1 for the term 'jsd', got {beta}; the terms"
            " 'kl' and 'reverse_kl' are the divergences at the ends"
        )
    counts = None if target is None else target != ignore_index
    given = [weights.get(term) for term in Terms._fields]
    tensors = (x.detach() if isinstance(x, Tensor) else None for x in given)
    floats = (None if x is None or isinstance(x, Tensor) else float(x) for x in given)
    scale = numbers[1] ** 2 if scale_by_temperature_squared else 1.0
    soft_rows = counts if mask is None else mask != 0
    of_terms = (Terms(*tensors), Terms(*floats))
    objective = Objective(counts, soft_rows, *of_terms, scale, reduction)
    named = [term in weights for term in Terms._fields]
    return objective, TermOptions._make((*named, True, *numbers, ignore_index))


def mapped_classes(
    classes: Tensor, rows: Tensor, name: str, student_classes: int, teacher_classes: int
) -> tuple[Tensor, Tensor]:
    """Return ids that are safe to read, and 0, or NaN where an id was no class, `[C]` each.

    Raise unless these are ids of the teacher's classes, one for each class of the student.
    """
    checks.integer("teacher_classes", classes)
    checks.device("teacher_classes", classes, rows, name)
    meaning = "the classes of the student"
    checks.shape("teacher_classes", classes, (student_classes,), meaning)
    checks.labels("teacher_classes", classes, teacher_classes, checks.NOTHING_IGNORED)
    ids = classes.long()
    safe = ids.clamp(0, teacher_classes - 1)
    return safe, torch.where(ids == safe, 0.0, torch.nan)
