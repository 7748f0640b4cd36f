"""Launches of the kernels that work on chunks of logits between matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import (
    launch_reduction,
    matrix_rows,
    row_view_or_copy,
    vector_width,
)
from ....primitives.gpu.target import target_of
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
from .low_rank import low_rank_gradients_kernel, low_rank_sums_kernel

# A tile of the logits' gradient in `low_rank_gradients_kernel`.
TILE_TOKENS, TILE_CLASSES = 64, 512
# With fewer classes too few programs read. With more, or a greater rank, partial sums are too many.
MIN_CLASSES, MAX_CLASSES, MAX_RANK = 2**16, 2**19, 32


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
    classes = logits.shape[1]
    block = min(next_power_of_2(classes), 4096)
    launch(
        linear_gradient_kernel,
        len(logits) * cdiv(classes, block),
        logits=matrix_rows(logits),
        target_ptr=target,
        weight_ptr=class_weight,
        coefficients=coefficients,
        maximum_ptr=maximum,
        sumexp_ptr=sumexp,
        result=matrix_rows(result),
        classes=classes,
        first=first,
        temperature=temperature,
        softcap=softcap,
        HAS_SOFTCAP=softcap != 0,
        VEC=vector_width(logits, result),
        BLOCK_V=block,
        num_warps=4 if block > 1024 else 1,
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


def low_rank_gradients(
    dlogits: Tensor, states: Tensor, factor: Tensor, dstates: Tensor, dfactor: Tensor
) -> bool:
    """Add the gradients of the factors `[M, r]` and `[C, r]` to fp32 sums, in one read.

    Return False where that takes a product for each. Otherwise the gradient of the logits,
    `[M, C]`, is overwritten. The bits of a row of `dstates` depend on that row alone.
    """
    (tokens, classes), rank = dlogits.shape, factor.shape[1]
    fits = classes % 16 == 0 and MIN_CLASSES <= classes <= MAX_CLASSES and 0 < rank <= MAX_RANK
    if dlogits.dtype.itemsize != 2 or not fits:
        return False
    block, target = next_power_of_2(rank), target_of(dlogits.device)
    tiles = 3 if block <= 16 else 2  # in shared memory
    shared = tiles * TILE_TOKENS * (TILE_CLASSES + block) + TILE_CLASSES * block
    if target.vendor != "nvidia" or shared * dlogits.itemsize > target.shared_memory:
        return False
    # The last program has room for the partial sums too.
    step = next(n for n in range(TILE_CLASSES, 0, -16) if not 0 < classes % n < 2 * rank)
    programs, partials = cdiv(classes, step), dlogits.view(torch.float32)
    launch(
        low_rank_gradients_kernel,
        programs,
        dlogits=dlogits,
        dlogits_stride=dlogits.stride(0),
        partials=partials,
        partials_stride=partials.stride(0),
        states=states.contiguous(),
        factor=factor.contiguous(),
        dfactor=dfactor,
        tokens=tokens,
        classes=classes,
        rank=rank,
        step=step,
        BLOCK_M=TILE_TOKENS,
        BLOCK_C=TILE_CLASSES,
        RANK=block,
        num_warps=8,
        num_stages=tiles,
    )
    launch(
        low_rank_sums_kernel,
        tokens,
        partials=partials,
        partials_stride=partials.stride(0),
        dstates=dstates,
        parts=programs,
        rank=rank,
        step=step // 2,
        PARTS=next_power_of_2(programs),
        RANK=block,
        num_warps=4,
    )
    return True


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
    low_rank_gradients,
)
