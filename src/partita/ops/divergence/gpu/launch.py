"""Divergences on a GPU: allocation and launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import (
    LaneTile,
    lane_tile,
    matrix_rows,
    segments_of,
    stored_tile,
    vector_width,
)
from ....primitives.gpu.target import target_of
from ....primitives.rows import laid_out_like
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import (
    cdiv,
    launch,
    next_power_of_2,
    zeroed_words,
)
from ..common import (
    DivergenceKernels,
    DivergenceRows,
    DivergenceState,
)
from .mixture import divergence_mixture_row_kernel
from .one_pass import divergence_row_kernel
from .plan import (
    MIXTURE_REGISTERS,
    MIXTURE_WARPS,
    MixturePlan,
    OnePassPlan,
    mixture_plan,
    one_pass_plan,
)
from .rows import (
    PairStatistics,
    RowSplit,
    divergence_accumulate_kernel,
    divergence_gradient_kernel,
    divergence_mixture_kernel,
)

# Classes that a program reads at a time. It has a warp for each 512 of them, or 256 where much is
# computed.
BLOCK = 2048
MIXTURE_BLOCK = 1024
GRADIENT_BLOCK = 4096
ROW_BYTES = 16  # what one thread loads of a row at once


def _options(tile: LaneTile, softcap: float) -> dict[str, Any]:
    """Return the compile-time options of a kernel."""
    return {"HAS_SOFTCAP": softcap != 0, "TILE": tile, "num_warps": tile.num_warps}


def _kind(beta: float) -> int:
    """Return which divergence a kernel computes; see `REVERSE` and `MIXTURE` in rows.py."""
    return 0 if beta == 0 else 1 if beta == 1 else 2


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def new_state(like: Tensor) -> DivergenceState:
    """Return memory for the state of the rows, which the first classes write without reading."""
    fields = [like.new_empty(len(like), dtype=acc_dtype(like.dtype)) for _ in range(7)]
    return DivergenceState(DivergenceRows(*fields[:6]), fields[6])


def accumulate(
    logits: Tensor,
    teacher_logits: Tensor,
    state: DivergenceState,
    first: int,
    beta: float,
    temperature: float,
    softcap: float,
) -> None:
    """Update the state in place with the logits of the classes from `first` on, `[M, C]` each."""
    rows, x, t = state.rows, matrix_rows(logits), matrix_rows(teacher_logits)
    tile, classes = lane_tile(logits.shape[1], BLOCK, 4, x, t), logits.shape[1]
    segments = segments_of(tile, x, len(logits), classes, 5)
    launch(
        divergence_accumulate_kernel,
        len(logits) * segments.programs,
        logits=x,
        teacher=t,
        kl_ptr=rows.loss,
        student_ptr=rows.student,
        statistics=PairStatistics(*rows[2:]),
        weighted_ptr=state.weighted,
        segments=segments,
        classes=classes,
        num_seen=first,
        temperature=temperature,
        softcap=softcap,
        KIND=0 if beta == 0 else 1,
        **_options(tile, softcap),
    )


def accumulate_mixture(
    logits: Tensor,
    teacher_logits: Tensor,
    state: DivergenceState,
    first: int,
    beta: float,
    temperature: float,
    softcap: float,
) -> None:
    """Add these classes to the divergences from the mixture, of rows with known statistics."""
    x, t = matrix_rows(logits), matrix_rows(teacher_logits)
    tile, classes = lane_tile(logits.shape[1], MIXTURE_BLOCK, 4, x, t), logits.shape[1]
    segments = segments_of(tile, x, len(logits), classes, 2)
    launch(
        divergence_mixture_kernel,
        len(logits) * segments.programs,
        logits=x,
        teacher=t,
        loss_ptr=state.rows.loss,
        student_ptr=state.rows.student,
        statistics=PairStatistics(*state.rows[2:]),
        segments=segments,
        classes=classes,
        num_seen=first,
        beta=beta,
        temperature=temperature,
        softcap=softcap,
        **_options(tile, softcap),
    )


def write_gradient(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    rows: DivergenceRows,
    beta: float,
    temperature: float,
    softcap: float,
    result: Tensor,
) -> None:
    """Write the gradient of the student's logits, `[M, C]`; `result` may be the logits."""
    block = GRADIENT_BLOCK // 2 if 0 < beta < 1 else GRADIENT_BLOCK
    tile = stored_tile(block, 4, logits, teacher_logits, result)
    launch(
        divergence_gradient_kernel,
        len(logits) * cdiv(logits.shape[1], tile.block),
        grad_ptr=grad,
        logits=matrix_rows(logits),
        teacher=matrix_rows(teacher_logits),
        student_ptr=rows.student,
        statistics=PairStatistics(*rows[2:]),
        dlogits=matrix_rows(result),
        classes=logits.shape[1],
        beta=beta,
        temperature=temperature,
        softcap=softcap,
        KIND=_kind(beta),
        **_options(tile, softcap),
    )


DIVERGENCE_KERNELS = DivergenceKernels(new_state, accumulate, accumulate_mixture, write_gradient)


def divergence(
    logits: Tensor, teacher_logits: Tensor, beta: float, temperature: float, softcap: float
) -> DivergenceRows:
    """Compute the divergence of each row, with a second read for a beta between 0 and 1."""
    x, t = _rows(logits), _rows(teacher_logits)
    dtype, rows = acc_dtype(logits.dtype), logits.shape[:-1]
    fields = DivergenceRows(*(logits.new_empty(rows, dtype=dtype) for _ in range(6)))
    state = DivergenceState(fields, logits.new_empty(rows, dtype=dtype))
    numbers = (beta, temperature, softcap)
    accumulate(x, t, state, 0, *numbers)
    if 0 < beta < 1:
        accumulate_mixture(x, t, state, 0, *numbers)
    return fields


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
    rows = DivergenceRows(grad, *(row.contiguous() for row in statistics))
    dlogits = x.new_empty(x.shape)
    numbers = (beta, temperature, softcap)
    write_gradient(grad.contiguous(), x, t, rows, *numbers, dlogits)
    return laid_out_like(dlogits.view(logits.shape), logits)


def divergence_one_pass(
    logits: Tensor,
    teacher_logits: Tensor,
    row_factor: Tensor | None,
    factor: float,
    beta: float,
    temperature: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Compute the divergence of each row, and the gradient of the sum of them times factors."""
    x, t = _rows(logits), _rows(teacher_logits)
    dlogits, target = x.new_empty(x.shape), target_of(x.device)
    if row_factor is not None:
        row_factor = row_factor.contiguous()
    plan: MixturePlan | OnePassPlan | None = _mixture_plan(x, t, beta)
    if plan is None and x.dtype == t.dtype and x.stride(1) == t.stride(1) == 1:
        plan = one_pass_plan(x.shape[1], x.element_size(), target)
    if plan is None:
        fields = divergence(logits, teacher_logits, beta, temperature, softcap)
        loss = fields.loss
        if row_factor is None:
            row_factor = torch.full_like(loss, factor)
        else:
            loss = torch.where(row_factor == 0, 0, loss)
        numbers = (beta, temperature, softcap)
        write_gradient(row_factor, x, t, fields, *numbers, dlogits)
        return loss, laid_out_like(dlogits.view(logits.shape), logits)
    kernel: Any = divergence_mixture_row_kernel
    block_splits = next_power_of_2(plan.splits)
    options: dict[str, Any]
    if isinstance(plan, MixturePlan):
        if vector_width(x, t) == 1:  # Copies start on 16 bytes.
            x, t = (rows.clone(memory_format=torch.contiguous_format) for rows in (x, t))
        options = {
            "BLOCK_SPLITS": max(32, block_splits),
            "BLOCKS": plan.blocks,
            "num_warps": MIXTURE_WARPS,
            "maxnreg": MIXTURE_REGISTERS,
        }
    else:
        kernel, sizes = divergence_row_kernel, (plan.block, plan.num_warps)
        options = {
            "BLOCK_SPLITS": block_splits if plan.splits > 1 else 0,
            "KIND": _kind(beta),
            "FAST": target.runs_ptx and x.element_size() == 2,
            "TILE": lane_tile(x.shape[1], *sizes, matrix_rows(x), matrix_rows(t)),
            "STORED": stored_tile(*sizes, x, t, dlogits),
            "num_warps": plan.num_warps,
        }
    loss = logits.new_empty(logits.shape[:-1], dtype=acc_dtype(logits.dtype))
    programs = len(x) * plan.splits
    launch(
        kernel,
        programs,
        logits=matrix_rows(x),
        teacher=matrix_rows(t),
        dlogits=matrix_rows(dlogits),
        row_factor_ptr=row_factor,
        slots_ptr=zeroed_words(x.device, 1 + 3 * programs if plan.splits > 1 else 0)[0],
        loss_ptr=loss,
        row_split=RowSplit(x.shape[1], plan.splits, plan.classes_per_program),
        factor=factor,
        beta=beta,
        temperature=temperature,
        softcap=softcap,
        HAS_SOFTCAP=softcap != 0,
        **options,
    )
    return loss, laid_out_like(dlogits.view(logits.shape), logits)


def _mixture_plan(x: Tensor, t: Tensor, beta: float) -> MixturePlan | None:
    """Return the plan of a divergence from a mixture whose rows stay in registers, or None.

    It serves widths of whole vectors. Rows that do not start on one are copied.
    """
    if not 0 < beta < 1 or not target_of(x.device).runs_ptx:
        return None
    if x.dtype != t.dtype or x.element_size() != 2:
        return None
    if x.shape[1] % (ROW_BYTES // x.element_size()):
        return None
    return mixture_plan(x.shape[1])


divergence_local_gradient = divergence_backward  # whose statistics are those of all ranks
