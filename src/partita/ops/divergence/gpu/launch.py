"""Divergences on a GPU: allocation and launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....primitives.rows import laid_out_like
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype
from ..common import DivergenceRows
from .rows import (
    divergence_gradient_kernel,
    divergence_mixture_kernel,
    divergence_statistics_kernel,
)

MAX_BLOCK = 4096  # classes that a program reads at a time
GRADIENT_BLOCK = 2048


def _options(classes: int, largest: int, softcap: float, dtype: torch.dtype) -> dict[str, Any]:
    block = min(next_power_of_2(classes), largest)
    return {
        "HAS_SOFTCAP": softcap != 0,
        "ACC_DTYPE": tl_acc_dtype(dtype),
        "BLOCK": block,
        "num_warps": 8 if block == MAX_BLOCK else 4,
    }


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def divergence(
    logits: Tensor, teacher_logits: Tensor, beta: float, temperature: float, softcap: float
) -> DivergenceRows:
    """Compute the divergence of each row, with a second read for a beta between 0 and 1."""
    x, t, dtype = _rows(logits), _rows(teacher_logits), acc_dtype(logits.dtype)
    fields = [logits.new_empty(logits.shape[:-1], dtype=dtype) for _ in range(6)]
    loss, student, *of_both = fields
    options = _options(x.shape[1], MAX_BLOCK, softcap, dtype)
    strides = (*x.stride(), *t.stride())
    is_forward = beta == 0
    pairs = [(x, x.stride(), of_both[:2]), (t, t.stride(), of_both[2:])]
    first, second = reversed(pairs) if is_forward else pairs
    launch(
        divergence_statistics_kernel,
        len(x),
        first[0],
        second[0],
        loss,
        student,
        *first[2],
        *second[2],
        x.shape[1],
        *first[1],
        *second[1],
        temperature,
        softcap,
        STUDENT_FIRST=not is_forward,
        **options,
    )
    if 0 < beta < 1:
        launch(
            divergence_mixture_kernel,
            len(x),
            x,
            t,
            *of_both,
            loss,
            student,
            x.shape[1],
            *strides,
            beta,
            temperature,
            softcap,
            **options,
        )
    return DivergenceRows(loss, student, *of_both)


def divergence_backward(
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
    """Compute the gradient of the student's logits from the statistics of the rows."""
    x, t = _rows(logits), _rows(teacher_logits)
    statistics = (student, maximum, sumexp, teacher_maximum, teacher_sumexp)
    dlogits = x.new_empty(x.shape)
    options = _options(x.shape[1], GRADIENT_BLOCK, softcap, acc_dtype(logits.dtype))
    launch(
        divergence_gradient_kernel,
        len(x) * cdiv(x.shape[1], options["BLOCK"]),
        grad.contiguous(),
        x,
        t,
        *(row.contiguous() for row in statistics),
        dlogits,
        x.shape[1],
        *x.stride(),
        *t.stride(),
        beta,
        temperature,
        softcap,
        KIND=0 if beta == 0 else 1 if beta == 1 else 2,
        **options,
    )
    return laid_out_like(dlogits.view(logits.shape), logits)
