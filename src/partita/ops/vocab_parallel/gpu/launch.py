"""Launches of the kernels that serve losses over a sharded vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import RowPlan, RowView, row_options, row_view, shape_of
from ....primitives.gpu.target import target_of
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype
from ...cross_entropy.common import LossOptions
from ...cross_entropy.gpu.plan import SUM_WORDS
from ...cross_entropy.gpu.reduction import LossSum, reduce_losses, shares_of_denominators
from ...cross_entropy.gpu.row_math import OptionalTerms
from ...linear_heads.common import (
    GradientCoefficients,
    RowOptions,
    RowStatistics,
    StatisticsGrads,
    empty_coefficients,
    empty_statistics,
)
from ...linear_heads.gpu.launch import KERNELS
from ..common import RankKernels
from .merge import parallel_coefficients_kernel, parallel_fields_kernel
from .one_pass import parallel_row_kernel
from .plan import RankMemory, row_split, slots_per_row

RANK_KERNELS = RankKernels(KERNELS)


def parallel_fields(
    gathered: Tensor,
    target: Tensor,
    classes: int,
    first_class: int,
    rank: int,
    options: RowOptions,
) -> RowStatistics:
    """Return the statistics of the rows from the packed states of all ranks."""
    world, _, M = gathered.shape
    needs_smoothing, needs_entropy = options.needs_smoothing, options.needs_entropy
    results = empty_statistics(gathered, M, needs_smoothing, needs_entropy)
    launch(
        parallel_fields_kernel,
        cdiv(M, 128),
        gathered_ptr=gathered.contiguous(),
        target_ptr=target.contiguous(),
        results=results,
        M=M,
        world=world,
        V=classes,
        first_class=first_class,
        rank=rank,
        ignore_index=options.ignore_index,
        temperature=options.temperature,
        HAS_SMOOTHING=needs_smoothing,
        ENTROPY=needs_entropy,
        ACC_DTYPE=tl_acc_dtype(gathered.dtype),
        BLOCK=128,
        num_warps=4,
    )
    return results


def parallel_coefficients(
    target: Tensor,
    grads: StatisticsGrads,
    class_weight: Tensor | None,
    entropies: Tensor,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> GradientCoefficients:
    """Return the coefficients of each row's gradient from the gradients of its statistics."""
    M, total_weight = len(target), None
    nll, logsumexp, smoothing, entropy = (g if g is None else g.contiguous() for g in grads)
    results = empty_coefficients(M, grads)
    dtype = results.dlogits_coef.dtype
    if class_weight is not None and smoothing is not None:
        total_weight = class_weight.sum(dtype=dtype)
    launch(
        parallel_coefficients_kernel,
        cdiv(M, 128),
        target_ptr=target.contiguous(),
        grad_nll_ptr=nll,
        grad_logsumexp_ptr=logsumexp,
        grad_smoothing_ptr=smoothing,
        grad_entropy_ptr=entropy,
        entropy_ptr=None if entropy is None else entropies,
        total_weight_ptr=total_weight,
        coefficients=results._replace(
            log_coef=None if entropy is None else results.log_coef,
            smoothing_coef=None if smoothing is None else results.smoothing_coef,
        ),
        M=M,
        V=classes,
        ignore_index=ignore_index,
        temperature=temperature,
        ACC_DTYPE=tl_acc_dtype(dtype),
        BLOCK=128,
        num_warps=4,
    )
    return results


def parallel_one_pass(
    logits: Tensor,
    target: Tensor,
    memory: RankMemory,
    max_polls: int,
    sizes: tuple[int, ...],
    rank: int,
    options: LossOptions,
) -> tuple[Tensor, Tensor]:
    """Return the sum or the mean of the losses, and the gradient of this rank's logits.

    The classes of a row of `logits` are contiguous; `sizes` are the numbers of classes of all
    ranks. A program reads its slots `max_polls` times before it times out.
    """
    M, V_local = logits.shape
    itemsize = logits.element_size()
    workspace = torch.empty(SUM_WORDS + 1, dtype=torch.int64, device=logits.device)
    tile_counter = workspace[SUM_WORDS:]
    shares = None
    if options.reduction == "mean":  # this launch also clears the workspace
        numbers = (options.ignore_index, sum(sizes), acc_dtype(logits.dtype))
        shares = shares_of_denominators(target, None, None, *numbers, workspace)
    else:
        workspace.zero_()
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    losses = torch.empty(M, dtype=acc_dtype(logits.dtype), device=logits.device)
    view = row_view(-1, logits, dlogits)
    assert view is not None
    plan = _row_plan(view, sizes)
    constants = row_options(plan, V_local, logits.dtype)
    del constants["BLOCK_SPLITS"]  # Programs of all ranks share a row.
    launch(
        parallel_row_kernel,
        M * plan.splits,
        logits=view.strided[0],
        target_ptr=target,
        tile_counter_ptr=tile_counter,
        memory=memory,
        losses=LossSum(losses, shares, None),
        dlogits=view.strided[1],
        M=M,
        V_local=V_local,
        V=sum(sizes),
        first_class=sum(sizes[:rank]),
        rank=rank,
        splits=plan.splits,
        size=plan.part(V_local),
        max_polls=max_polls,
        ignore_index=options.ignore_index,
        terms=OptionalTerms(options.softcap or None, options.z_loss or None),
        zero=0.0,
        WORLD=len(sizes),
        BLOCK_SLOTS=next_power_of_2(len(sizes) + slots_per_row(sizes, itemsize)),
        **constants,
    )
    loss = reduce_losses(losses, workspace, acc_dtype(logits.dtype), shares=shares)
    return loss, dlogits


def _row_plan(view: RowView, sizes: tuple[int, ...]) -> RowPlan:
    """Return the plan of `parallel_row_kernel`."""
    shape = shape_of(view)
    splits, block = row_split(sizes, shape.itemsize)
    num_warps = max(1, block // (4096 if shape.itemsize == 2 else 2048))
    registers = 96 if shape.itemsize == 2 else 168
    target = target_of(view.tensors[0].device)
    plan = RowPlan("row", 1, block, num_warps, splits, registers)
    return plan.with_partials(shape.itemsize, target).for_any_start(shape).compiled_for(target)
