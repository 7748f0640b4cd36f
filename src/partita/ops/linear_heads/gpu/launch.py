"""Launches of the kernels that work on chunks of logits between matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import (
    launch_reduction,
    matrix_rows,
    row_view_or_copy,
    vector_width,
)
from ....runtime.launch import cdiv, launch, next_power_of_2
from ...cross_entropy.gpu.launch import one_pass_of_chunk
from ...cross_entropy.gpu.plan import SUM_WORDS
from ...cross_entropy.gpu.reduction import shares_of_denominators
from ...divergence.gpu.launch import DIVERGENCE_KERNELS
from ...logprobs.gpu.launch import ENTRY_KERNELS, topk_of_rows
from ...truncated.gpu.launch import TRUNCATED_KERNELS
from ..chunked import HeadKernels
from ..common import GradientCoefficients, RowState, RowStatistics
from .chunk import linear_accumulate_kernel, linear_gradient_kernel, linear_statistics_kernel


def chunk_options(
    logits: Tensor, softcap: float, block: int, warps: int, *others: Tensor
) -> dict[str, Any]:
    """Return the compile-time options of a kernel that reads the logits, `[M, C]`.

    `others` are the other tensors of this shape that it reads or writes.
    """
    block = min(next_power_of_2(logits.shape[1]), block)
    return {
        "HAS_SOFTCAP": softcap != 0,
        "VEC": vector_width(logits, *others),
        "BLOCK_V": block,
        "num_warps": warps if block > 1024 else 1,
    }


def accumulate_logits(
    logits: Tensor,
    first: int,
    target: Tensor,
    class_weight: Tensor | None,
    state: RowState,
    temperature: float,
    softcap: float,
) -> None:
    """Update the state in place with the logits of the classes from `first` on."""
    view = row_view_or_copy(1, logits)
    launch_reduction(
        linear_accumulate_kernel,
        view,
        carried=4,
        logits=view.strided[0],
        target_ptr=target,
        weight_ptr=class_weight,
        state=state,
        classes=view.classes,
        first=first,
        temperature=temperature,
        softcap=softcap,
        HAS_SOFTCAP=softcap != 0,
    )


def row_statistics(
    state: RowState,
    target: Tensor,
    class_weight: Tensor | None,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> RowStatistics:
    """Return the statistics of rows whose state has seen all classes."""
    maximum, rows = state.maximum, len(target)
    total_weight = None if class_weight is None else class_weight.sum(dtype=maximum.dtype)
    statistics = RowStatistics(
        nll=maximum.new_empty(rows),
        logsumexp=maximum.new_empty(rows),
        smoothing_loss=maximum.new_empty(0 if state.smoothing_loss is None else rows),
        entropy=maximum.new_empty(0 if state.sum_x_exp is None else rows),
        argmax=target.new_empty(0, dtype=torch.int64) if state.argmax is None else state.argmax,
        maximum=maximum,
        sumexp=state.sumexp,
    )
    launch(
        linear_statistics_kernel,
        cdiv(rows, 256),
        state=state,
        target_ptr=target,
        total_weight_ptr=total_weight,
        statistics=statistics,
        rows=rows,
        classes=classes,
        ignore_index=ignore_index,
        temperature=temperature,
        BLOCK_M=256,
        num_warps=4,
    )
    return statistics


def logits_gradient(
    logits: Tensor,
    first: int,
    target: Tensor,
    class_weight: Tensor | None,
    coefficients: GradientCoefficients,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
    result: Tensor,
) -> None:
    """Write the gradient of the logits of the classes from `first` on to `result`.

    `result` may be the logits themselves.
    """
    options = chunk_options(logits, softcap, 4096, 4, result)
    launch(
        linear_gradient_kernel,
        len(logits) * cdiv(logits.shape[1], options["BLOCK_V"]),
        logits=matrix_rows(logits),
        target_ptr=target,
        weight_ptr=class_weight,
        coefficients=coefficients,
        maximum_ptr=maximum,
        sumexp_ptr=sumexp,
        result=matrix_rows(result),
        classes=logits.shape[1],
        first=first,
        temperature=temperature,
        softcap=softcap,
        **options,
    )


def mean_shares(
    target: Tensor,
    class_weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    classes: int,
    mean: bool,
    dtype: torch.dtype,
) -> Tensor | None:
    """Return the partial sums of what a mean or a quotient divides by; None for a sum."""
    if not mean and denominator is None:
        return None
    sums = torch.empty(SUM_WORDS, dtype=torch.int64, device=target.device)
    return shares_of_denominators(
        target, class_weight, denominator, ignore_index, classes, dtype, sums
    )


KERNELS = HeadKernels(
    accumulate_logits,
    row_statistics,
    logits_gradient,
    one_pass_of_chunk,
    mean_shares,
    ENTRY_KERNELS,
    topk_of_rows,
    TRUNCATED_KERNELS,
    DIVERGENCE_KERNELS,
)
