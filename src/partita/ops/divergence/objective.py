"""The loss that the terms of rows make up, and the result of a distillation loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from .common import (
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
        weights: the weight of each term, a number or a tensor `[...]` or `[]`; None for terms that
            the loss does not have.
        scale: what the other terms are multiplied by.
        reduction: `none`, `mean` or `sum`.
    """

    hard_rows: Tensor | None
    soft_rows: Tensor | None
    weights: Terms
    scale: float
    reduction: str

    @classmethod
    def of_divergence(cls, options: TermOptions, mask: Tensor | None, reduction: str) -> Objective:
        """Return the objective of a single divergence."""
        weights = (1.0 if named else None for named in options.terms)
        return cls(None, mask, Terms(*weights), 1.0, reduction)

    @classmethod
    def from_parts(cls, tensors: Any, numbers: Any) -> Objective:
        """Return the objective of these `tensors` and `numbers`."""
        pairs = zip(tensors[2:], numbers[:5], strict=True)
        weights = (number if tensor is None else tensor for tensor, number in pairs)
        return cls._make((*tensors[:2], Terms(*weights), *numbers[5:]))

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return the seven tensors, None for weights that are none."""
        of_weights = (each if isinstance(each, Tensor) else None for each in self.weights)
        return self.hard_rows, self.soft_rows, *of_weights

    @property
    def numbers(self) -> tuple[Any, ...]:
        """Return what else an objective has, None for weights that are tensors."""
        of_weights = (None if isinstance(each, Tensor) else each for each in self.weights)
        return *of_weights, self.scale, self.reduction

    def map_rows(self, function: Callable[[Tensor], Tensor]) -> Objective:
        """Return the objective with a function of each tensor that has rows."""
        tensors = (
            function(each) if each is not None and each.ndim else each for each in self.tensors
        )
        return Objective.from_parts(tuple(tensors), self.numbers)

    def _parts(self) -> list[tuple[str, Any, Tensor | None, float]]:
        """Return name, weight, rows and scale of each term that has a weight."""
        return [
            (name, weight, self.hard_rows, 1.0)
            if name == "hard"
            else (name, weight, self.soft_rows, self.scale)
            for name, weight in self.weights._asdict().items()
            if weight is not None
        ]

    def factors(self, like: Tensor) -> Tensor:
        """Return the derivative of the loss in each term of each row, packed.

        `like` is a tensor `[...]` in the dtype of the terms.
        """
        found = []
        for _, weight, rows, scale in self._parts():
            factor = row_factors(rows, like, self.reduction)
            if isinstance(weight, Tensor) or weight * scale != 1.0:
                factor = torch.where(factor == 0, 0, factor * weight * scale).to(like.dtype)
            found.append(factor)
        return packed(found, like)

    def loss(self, terms: Tensor) -> Tensor:
        """Return the loss from the packed terms of rows."""
        found, parts = [], self._parts()
        of_terms = unpacked(terms, [True] * len(parts))
        for values, (_, weight, rows, scale) in zip(of_terms, parts, strict=True):
            if isinstance(weight, Tensor) or weight * scale != 1.0:
                values = values * (weight * scale)
            found.append(reduced(values, rows, self.reduction))
        return functools.reduce(torch.add, found)

    def reported(self, terms: Tensor) -> Terms:
        """Return each term that has a weight as the result has it, from the terms of rows."""
        found, parts = dict.fromkeys(Terms._fields), self._parts()
        terms = terms if self.reduction == "none" else terms.detach()
        of_terms = unpacked(terms, [True] * len(parts))
        for values, (name, _, rows, scale) in zip(of_terms, parts, strict=True):
            found[name] = reduced(values * scale, rows, self.reduction)
        return Terms(**found)

    def result(
        self,
        loss: Tensor,
        rows: DivergenceRows,
        teacher: tuple[Tensor, Tensor, Tensor] | None,
        temperature: float,
    ) -> Distillation:
        """Return the result from rows `[...]`.

        A teacher has the maximum, the sum and the arg-max of all of its classes, `[...]` each.
        """
        mass, argmax = None, rows.argmax
        if teacher is not None:
            highest, (maximum, sumexp, argmax) = rows.teacher_maximum, teacher
            below = torch.where(highest == maximum, 0, highest - maximum)
            mass = rows.teacher_sumexp / sumexp * (below / temperature).exp()
        return Distillation(loss, *self.reported(rows.terms), mass, argmax)


def checked_objective(
    weights: Mapping[str, float | Tensor],
    rows: Tensor,
    name: str,
    target: Tensor | None,
    mask: Tensor | None,
    ignore_index: int,
    reduction: str,
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
    of_terms = (
        weight.detach() if isinstance(weight, Tensor) else None if weight is None else float(weight)
        for weight in map(weights.get, Terms._fields)
    )
    scale = numbers[1] ** 2 if scale_by_temperature_squared else 1.0
    soft_rows = counts if mask is None else mask != 0
    objective = Objective(counts, soft_rows, Terms(*of_terms), scale, reduction)
    named = [term in weights for term in Terms._fields]
    return objective, TermOptions._make((*named, True, *numbers, ignore_index))


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
    """Return ids that are safe to read, and 0, or NaN where the id was no class, `[C]` each."""
    ids = classes.long()
    safe = ids.clamp(0, teacher_classes - 1)
    return safe, torch.where(ids == safe, 0.0, torch.nan).to(dtype)
