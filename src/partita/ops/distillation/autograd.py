"""The registered ops of the terms of a distillation loss, and their derivatives."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import by_rows
from ...runtime import checks, register
from ...runtime.autograd import DifferentiableOp, all_at_once
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.autograd import token_stats_op
from ..cross_entropy.common import TokenStatsRows
from ..divergence.common import in_common_precision
from . import reference
from .common import (
    Distillation,
    DistillationRows,
    Objective,
    RowState,
    TermOptions,
    empty_rows,
    mapped_classes,
    mass_of_classes,
    weighted_rows,
)


def _gpu() -> ModuleType:
    from .gpu import launch

    return launch


def check_labels(name: str, target: Tensor | None, classes: int, ignore_index: int) -> None:
    if target is not None:
        checks.labels(name, target, classes, ignore_index)


define_op = functools.partial(register.define, gpu=_gpu, vmap=all_at_once)
distillation_op = define_op(
    by_rows(reference.distillation),
    lambda logits: tuple(empty_rows(logits)),
    check=lambda logits, target, ignore_index: check_labels(
        "target", target, logits.shape[-1], ignore_index
    ),
)
distillation_backward_op = define_op(
    by_rows(reference.distillation_gradient, logits=1),
    lambda logits: torch.empty_like(logits),
    name="distillation_backward",
)


def _gradient(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    state: Tensor,
    *options: Any,
) -> Tensor:
    tensors = (grad, logits, teacher_logits, target, state)
    return reference.distillation_gradient(*tensors, TermOptions(*options))


_distillation = DifferentiableOp(
    distillation_op,
    distillation_backward_op,
    _gradient,
    lambda args, output: ((*args[:3], output[1]), args[3:-1]),
)


def rows_of(
    logits: Tensor, teacher_logits: Tensor, target: Tensor | None, options: TermOptions
) -> DistillationRows:
    """Return the terms of each row of checked inputs, differentiable in the student's logits."""
    labels = target if options.hard else None
    call = (logits, teacher_logits.detach(), labels, *options, current_backend())
    return DistillationRows(*_distillation(*call))


def loss_of_logits(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    teacher_classes: Tensor | None,
    objective: Objective,
    options: TermOptions,
) -> Distillation:
    """Return the result of `distillation_loss` for checked inputs."""
    logits = in_common_precision(logits, teacher_logits)
    if teacher_classes is None:
        rows = rows_of(logits, teacher_logits, target, options)
        return result_of_rows(rows, objective, None, rows.argmax)
    of_all = teacher_logits.detach().to(acc_dtype(logits.dtype))
    ids, on_all = mapped_classes(teacher_classes, of_all.shape[-1], of_all.dtype)
    *numbers, ignore_index = options[6:]
    stats = TokenStatsRows(*token_stats_op(of_all, None, *numbers, ignore_index, current_backend()))
    rows = rows_of(logits, teacher_logits.index_select(-1, ids), target, options)
    rows = DistillationRows(rows.terms * on_all, *rows[1:])
    state = RowState(*rows.state.unbind(-1))
    mass = mass_of_classes(state, stats.maximum, stats.sumexp, options.temperature)
    return result_of_rows(rows, objective, mass * on_all, stats.argmax)


def result_of_rows(
    rows: DistillationRows, objective: Objective, mass: Tensor | None, argmax: Tensor
) -> Distillation:
    """Return the result from the terms of all rows."""
    like = rows.state[..., 0]
    loss = weighted_rows(rows.terms, objective.factors(like))
    if objective.reduction != "none":
        loss = loss.sum() + objective.of_no_rows(like)
    return Distillation(loss, *objective.reported(rows.terms), mass, argmax)
