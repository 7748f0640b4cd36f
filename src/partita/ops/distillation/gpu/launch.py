"""The terms of a distillation loss on a GPU: allocation and launches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....primitives.gpu.row_plan import (
    LaneTile,
    StridedRows,
    lane_tile,
    matrix_rows,
    segments_of,
    stored_tile,
)
from ....primitives.rows import laid_out_like
from ....runtime.launch import cdiv, launch
from ..common import (
    DistillationKernels,
    DistillationRows,
    RowState,
    TermOptions,
    empty_rows,
)
from .rows import (
    Share,
    distillation_accumulate_kernel,
    distillation_gradient_kernel,
    distillation_mixture_kernel,
)

# Classes that a program of four warps reads at a time.
BLOCK = 2048
MIXTURE_BLOCK = 1024
GRADIENT_BLOCK = 4096


def _scan_tile(x: StridedRows, t: StridedRows, classes: int, block: int) -> LaneTile:
    """Return the tile of a scan of both rows.

    Where the compiler loads the vectors, their addresses take the registers of half of a block.
    """
    tile = lane_tile(classes, block, 4, x, t)
    return tile if tile.access else lane_tile(classes, block // 2, 4, x, t)


def _needs_plain(options: TermOptions) -> bool:
    """Return whether the cross-entropy needs a sum of exponentials of its own."""
    return options.hard and options.temperature != 1


def accumulate(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    found: DistillationRows,
    first: int,
    classes: int,
    options: TermOptions,
) -> None:
    """Update the results in place with the classes from `first` on, of `classes` in all."""
    x, t = matrix_rows(logits), matrix_rows(teacher_logits)
    tile, (rows, width) = _scan_tile(x, t, logits.shape[1], BLOCK), logits.shape
    segments = segments_of(tile, x, rows, width, len(Share._fields))
    launch(
        distillation_accumulate_kernel,
        rows * segments.programs,
        logits=x,
        teacher=t,
        target_ptr=target,
        terms_ptr=found.terms,
        state=RowState(*found.state.unbind(-1)),
        argmax_ptr=found.argmax,
        segments=segments,
        classes=width,
        first=first,
        vocabulary=classes,
        temperature=options.temperature,
        softcap=options.softcap,
        ignore_index=options.ignore_index,
        PLAIN=_needs_plain(options),
        NAMED=options.named,
        HAS_SOFTCAP=options.softcap != 0,
        TILE=tile,
        num_warps=tile.num_warps,
    )


def accumulate_mixture(
    logits: Tensor,
    teacher_logits: Tensor,
    found: DistillationRows,
    first: int,
    options: TermOptions,
) -> None:
    """Add these classes to what needs the normalisers of both rows."""
    x, t = matrix_rows(logits), matrix_rows(teacher_logits)
    tile, (rows, width) = _scan_tile(x, t, logits.shape[1], MIXTURE_BLOCK), logits.shape
    segments = segments_of(tile, x, rows, width, 4)
    launch(
        distillation_mixture_kernel,
        rows * segments.programs,
        logits=x,
        teacher=t,
        terms_ptr=found.terms,
        state=RowState(*found.state.unbind(-1)),
        segments=segments,
        classes=width,
        first=first,
        beta=options.beta,
        temperature=options.temperature,
        softcap=options.softcap,
        NAMED=options.named,
        HAS_SOFTCAP=options.softcap != 0,
        TILE=tile,
        num_warps=tile.num_warps,
    )


def write_gradient(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    state: Tensor,
    first: int,
    classes: int,
    options: TermOptions,
    result: Tensor,
) -> None:
    """Write the gradient of the classes from `first` on, `[M, C]`; `result` may be the logits."""
    block = GRADIENT_BLOCK // 2 if options.is_mixed else GRADIENT_BLOCK
    tile = stored_tile(block, 4, logits, teacher_logits, result)
    launch(
        distillation_gradient_kernel,
        len(logits) * cdiv(logits.shape[1], tile.block),
        grad_ptr=grad,
        logits=matrix_rows(logits),
        teacher=matrix_rows(teacher_logits),
        target_ptr=target,
        state=RowState(*state.unbind(-1)),
        dlogits=matrix_rows(result),
        classes=logits.shape[1],
        first=first,
        vocabulary=classes,
        beta=options.beta,
        temperature=options.temperature,
        softcap=options.softcap,
        ignore_index=options.ignore_index,
        PLAIN=_needs_plain(options),
        NAMED=options.named,
        HAS_SOFTCAP=options.softcap != 0,
        TILE=tile,
        num_warps=tile.num_warps,
    )


DISTILLATION_KERNELS = DistillationKernels(accumulate, accumulate_mixture, write_gradient)


def distillation(
    logits: Tensor, teacher_logits: Tensor, target: Tensor | None, options: TermOptions
) -> DistillationRows:
    """Compute the terms of each row, with a second read for those of a mixture."""
    x, t = _rows(logits), _rows(teacher_logits)
    labels, found = _labels(target), empty_rows(logits)
    flat = DistillationRows(found.terms.view(-1, 5), _rows(found.state), found.argmax.view(-1))
    accumulate(x, t, labels, flat, 0, x.shape[1], options)
    if options.is_mixed:
        accumulate_mixture(x, t, flat, 0, options)
    return found


def distillation_backward(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    state: Tensor,
    options: TermOptions,
) -> Tensor:
    """Compute the gradient of the student's logits from the statistics of the rows."""
    x, t, labels = _rows(logits), _rows(teacher_logits), _labels(target)
    dlogits = x.new_empty(x.shape)
    rest = (labels, _rows(state).contiguous(), 0, x.shape[1], options, dlogits)
    write_gradient(_rows(grad).contiguous(), x, t, *rest)
    return laid_out_like(dlogits.view(logits.shape), logits)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _labels(target: Tensor | None) -> Any:
    return None if target is None else target.reshape(-1).long().contiguous()
