"""The registered ops of divergences and their derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import by_rows
from ...runtime import checks, register
from ...runtime.autograd import DifferentiableOp, all_at_once, apply, plain_eager
from ...runtime.backend import current_backend, resolve
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.autograd import OnePass, OnePassLoss
from ..logprobs.common import TopK
from ..softmax.autograd import logsumexp
from . import reference
from .common import (
    DivergenceRows,
    TermOptions,
    divergence_options,
    empty_rows,
    reduced,
    row_factors,
)

# Rounding errors of log-probabilities that the sum of their exponentials may have.
ROUNDING_ERRORS = 8


def _state_fake(logits: Tensor, options: TermOptions) -> Tensor:
    return logits.new_empty(len(logits), sum(options.exchanged), dtype=acc_dtype(logits.dtype))


def _check_labels(logits: Tensor, target: Tensor | None, ignore_index: int) -> None:
    if target is not None:
        checks.labels("target", target, logits.shape[-1], ignore_index)


def _gpu() -> tuple[Any, ...]:
    from .gpu import launch

    return launch, launch.DIVERGENCE_KERNELS


define_op = functools.partial(register.define, gpu=_gpu)
divergence_op = define_op(
    by_rows(reference.divergence), empty_rows, check=_check_labels, vmap=all_at_once
)
divergence_backward_op = define_op(
    by_rows(reference.divergence_gradient, logits=1),
    lambda logits: torch.empty_like(logits),
    name="divergence_backward",
    vmap=all_at_once,
)
divergence_one_pass_op = define_op(
    by_rows(reference.divergence_one_pass),
    lambda logits: (
        logits.new_empty(logits.shape[:-1], dtype=acc_dtype(logits.dtype)),
        torch.empty_like(logits),
    ),
)
divergence_state_op = define_op(reference.DIVERGENCE_KERNELS.divergence_state, _state_fake)
divergence_mixture_op = define_op(
    reference.DIVERGENCE_KERNELS.divergence_mixture,
    lambda logits, maximum, jsd, tv: maximum.new_empty(2, len(logits), jsd + tv),
)
divergence_local_gradient_op = define_op(
    reference.DIVERGENCE_KERNELS.divergence_local_gradient, lambda logits: torch.empty_like(logits)
)


def _gradient(*args: Any) -> Tensor:
    gradient: Callable[..., Tensor] = reference.divergence_gradient
    return gradient(*args[:4], DivergenceRows(*args[4:11]), TermOptions(*args[11:]))


_divergence = DifferentiableOp(
    divergence_op,
    divergence_backward_op,
    _gradient,
    lambda args, output: ((*args[:3], *output), args[3:-1]),
)


# A reduced divergence's beta, temperature, soft-cap or 0, reduction and backend.
Options = tuple[float, float, float, str, str]


def _loss_and_gradient(
    logits: Tensor, teacher_logits: Tensor, mask: Tensor | None, options: Options
) -> tuple[Tensor, Tensor]:
    *numbers, reduction, backend = options
    rows, row_factor = logits.shape[:-1].numel(), None
    if mask is not None:
        like = logits.new_empty(mask.shape, dtype=acc_dtype(logits.dtype))
        row_factor = row_factors(mask, like, reduction)
    factor = 1 / max(rows, 1) if reduction == "mean" else 1.0
    rest = (row_factor, factor, *numbers, backend)
    loss, gradient = divergence_one_pass_op(logits, teacher_logits, *rest)
    return reduced(loss, mask, reduction), gradient


def _composed_loss(
    logits: Tensor, teacher_logits: Tensor, mask: Tensor | None, options: Options
) -> Tensor:
    *numbers, reduction, _ = options
    return reduced(divergence_of_rows(logits, teacher_logits, *numbers), mask, reduction)


ONE_PASS = OnePassLoss(_loss_and_gradient, _composed_loss, 3)


def reduced_divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor | None,
    beta: float,
    temperature: float,
    softcap: float,
    reduction: str,
) -> Tensor:
    """Return the reduced divergence of checked inputs by the pass that suits the call.

    A gradient in fp16 must have its upstream factor, which scales losses, before it is rounded.
    """
    is_one_pass = (
        reduction != "none"
        and logits.dtype != torch.float16
        and plain_eager()
        and torch.is_grad_enabled()
        and logits.requires_grad
    )
    backend = current_backend()
    if is_one_pass and resolve(backend, logits.device, has_cpu=False) == "gpu":
        options = (beta, temperature, softcap, reduction, backend)
        return apply(OnePass, ONE_PASS, logits, teacher_logits.detach(), mask, options)
    loss = divergence_of_rows(logits, teacher_logits, beta, temperature, softcap)
    return reduced(loss, mask, reduction)


def terms_of_rows(
    logits: Tensor, teacher_logits: Tensor, target: Tensor | None, options: TermOptions
) -> DivergenceRows:
    """Return the terms of each row of checked inputs, differentiable in the student's logits."""
    labels = target if options.hard else None
    call = (logits, teacher_logits.detach(), labels, *options, current_backend())
    return DivergenceRows(*_divergence(*call))


def divergence_of_rows(
    logits: Tensor, teacher_logits: Tensor, beta: float, temperature: float, softcap: float
) -> Tensor:
    """Return the divergence of each row of checked inputs, `[...]`."""
    options = divergence_options(beta, temperature, softcap)
    return terms_of_rows(logits, teacher_logits, None, options).terms


def divergence_of_classes(
    logp: Tensor, teacher: TopK, beta: float, mask: Tensor | None, reduction: str
) -> Tensor:
    """Return the reduced divergence from the student's log-probabilities of a teacher's classes.

    The few numbers of a row are computed in fp64, since the teacher's rest is a difference.

    Args:
        logp: the student's, `[..., k]`; `[..., k + 1]` with that of all other classes together.
        mask: `[...]`, 0 in rows that do not count, or None.
    """
    dtype = torch.promote_types(logp.dtype, acc_dtype(teacher.logprobs.dtype))
    student, of_teacher = logp.double(), teacher.logprobs.detach().double()
    if logp.shape[-1] > of_teacher.shape[-1]:
        rest = _rest_of_teacher(of_teacher, student[..., -1:], torch.finfo(dtype).eps)
        of_teacher = torch.cat([of_teacher, rest], -1)
    if mask is not None:  # these rows must not give NaN, by which their gradient is multiplied
        is_valid = mask.unsqueeze(-1) != 0
        student, of_teacher = (torch.where(is_valid, each, 0) for each in (student, of_teacher))
    loss = divergence_of_rows(student, of_teacher, beta, 1.0, 0.0)
    return reduced(loss.to(dtype), mask, reduction)


def _rest_of_teacher(logp: Tensor, student: Tensor, resolution: float) -> Tensor:
    """Return the log-probability of all classes but the teacher's best, `[..., 1]`.

    Rounding hides small probabilities. There the teacher has that of the student, `[..., 1]` in
    log, but at most what its own numbers say.
    """
    # The order of PyTorch's own sum would follow from the number of rows.
    total = logsumexp(logp, logp.dtype, current_backend())[0].exp()
    rest = 1.0 - total.unsqueeze(-1)
    hidden = torch.minimum(student.detach().exp(), rest.clamp(min=resolution))
    return torch.where(rest <= ROUNDING_ERRORS * resolution, hidden, rest).log()
