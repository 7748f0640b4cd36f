"""Divergences on a GPU: allocation and launches."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import (
    LaneTile,
    StridedRows,
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
    TermOptions,
    columns,
    divergence_options,
    empty_rows,
    empty_state,
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
    PairShare,
    PairStatistics,
    RowSplit,
    Scan,
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
# Launches know such an option by its identity.
SCANS = {flags: Scan(*flags) for flags in itertools.product((False, True), repeat=4)}


def _options(tile: LaneTile, softcap: float) -> dict[str, Any]:
    """Return the compile-time options of a kernel."""
    return {"HAS_SOFTCAP": softcap != 0, "TILE": tile, "num_warps": tile.num_warps}


def _shared(
    x: StridedRows, t: StridedRows, rows: DivergenceRows, first: int, options: TermOptions
) -> dict[str, Any]:
    """Return the arguments that the kernels of some classes of both rows share."""
    return {
        "logits": x,
        "teacher": t,
        "terms": columns(rows.terms, options.terms),
        "statistics": PairStatistics(*rows[1:5]),
        "means": columns(rows.means, options.means),
        "first": first,
        "temperature": options.temperature,
        "softcap": options.softcap,
        "NUM_TERMS": sum(options.terms),
        "NUM_MEANS": sum(options.means),
    }


def _scan_tile(
    x: StridedRows, t: StridedRows, classes: int, block: int, options: TermOptions
) -> LaneTile:
    """Return the tile of a scan of both rows.

    Where the compiler loads the vectors, their addresses take the registers of half of a block,
    which the sums of several terms need.
    """
    tile = lane_tile(classes, block, 4, x, t)
    if tile.access or sum(options.terms) == 1:
        return tile
    return lane_tile(classes, block // 2, 4, x, t)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _flat(field: Tensor, logits: Tensor) -> Tensor:
    """Return a field of rows of logits, `[..., C]`, as contiguous `[M]` or `[M, N]`."""
    if logits.ndim == 2 and field.is_contiguous():  # which saves the host time of two calls
        return field
    shape, more = logits.shape[:-1], field.shape[logits.ndim - 1 :]
    return field.reshape(shape.numel(), *more).contiguous()


def _flat_rows(rows: DivergenceRows, logits: Tensor) -> DivergenceRows:
    return DivergenceRows(*(_flat(field, logits) for field in rows))


def _labels(target: Tensor | None) -> Tensor | None:
    return None if target is None else target.reshape(-1).long().contiguous()


def accumulate(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    state: DivergenceState,
    first: int,
    classes: int,
    options: TermOptions,
) -> None:
    """Update the state in place with the logits of the classes from `first` on, `[M, C]` each."""
    rows, x, t = state.rows, matrix_rows(logits), matrix_rows(teacher_logits)
    tile, width = _scan_tile(x, t, logits.shape[1], BLOCK, options), logits.shape[1]
    segments = segments_of(tile, x, len(logits), width, len(PairShare._fields))
    launch(
        divergence_accumulate_kernel,
        len(logits) * segments.programs,
        target_ptr=target,
        sums=state.sums,
        argmax_ptr=rows.argmax,
        segments=segments,
        classes=width,
        vocabulary=classes,
        ignore_index=options.ignore_index,
        SCAN=SCANS[options.kl, options.reverse_kl, options.means.plain, options.best],
        **_shared(x, t, rows, first, options),
        **_options(tile, options.softcap),
    )


def accumulate_mixture(
    logits: Tensor,
    teacher_logits: Tensor,
    state: DivergenceState,
    first: int,
    options: TermOptions,
) -> None:
    """Add these classes to the terms and means that need the normalisers of both rows."""
    rows, x, t = state.rows, matrix_rows(logits), matrix_rows(teacher_logits)
    tile, width = _scan_tile(x, t, logits.shape[1], MIXTURE_BLOCK, options), logits.shape[1]
    segments = segments_of(tile, x, len(logits), width, 4 if options.tv else 2)
    launch(
        divergence_mixture_kernel,
        len(logits) * segments.programs,
        segments=segments,
        classes=width,
        beta=options.beta,
        **_shared(x, t, rows, first, options),
        **_options(tile, options.softcap),
    )


def write_gradient(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    rows: DivergenceRows,
    first: int,
    classes: int,
    options: TermOptions,
    result: Tensor,
) -> None:
    """Write the gradient of the classes from `first` on, `[M, C]`; `result` may be the logits."""
    block = GRADIENT_BLOCK // 2 if options.is_mixed else GRADIENT_BLOCK
    tile = stored_tile(block, 4, logits, teacher_logits, result)
    launch(
        divergence_gradient_kernel,
        len(logits) * cdiv(logits.shape[1], tile.block),
        grads=columns(grad, options.terms),
        target_ptr=target,
        dlogits=matrix_rows(result),
        classes=logits.shape[1],
        vocabulary=classes,
        beta=options.beta,
        ignore_index=options.ignore_index,
        **_shared(matrix_rows(logits), matrix_rows(teacher_logits), rows, first, options),
        **_options(tile, options.softcap),
    )


DIVERGENCE_KERNELS = DivergenceKernels(accumulate, accumulate_mixture, write_gradient)


def divergence(
    logits: Tensor, teacher_logits: Tensor, target: Tensor | None, options: TermOptions
) -> DivergenceRows:
    """Compute the terms of each row, with a second read for those of a mixture."""
    x, t, labels = _rows(logits), _rows(teacher_logits), _labels(target)
    found = empty_rows(logits, options)
    flat = _flat_rows(found, logits)
    state = empty_state(flat, options)
    accumulate(x, t, labels, state, 0, x.shape[1], options)
    if options.is_mixed:
        accumulate_mixture(x, t, state, 0, options)
    return found


def divergence_backward(
    grad: Tensor,
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None,
    rows: DivergenceRows,
    options: TermOptions,
) -> Tensor:
    """Compute the gradient of the student's logits from the statistics of the rows."""
    x, t = _rows(logits), _rows(teacher_logits)
    of_rows = (_flat(grad, logits), x, t, _labels(target), _flat_rows(rows, logits))
    place = (0, x.shape[1], options)
    dlogits = DIVERGENCE_KERNELS.divergence_local_gradient(*of_rows, *place)
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
    term = divergence_options(beta, temperature, softcap)
    plan: MixturePlan | OnePassPlan | None = _mixture_plan(x, t, beta)
    if plan is None and x.dtype == t.dtype and x.stride(1) == t.stride(1) == 1:
        plan = one_pass_plan(x.shape[1], x.element_size(), target)
    if plan is None:
        fields = divergence(logits, teacher_logits, None, term)
        loss = fields.terms
        if row_factor is None:
            row_factor = torch.full_like(loss, factor)
        else:
            loss = torch.where(row_factor == 0, 0, loss)
        flat, width = _flat_rows(fields, logits), x.shape[1]
        write_gradient(_flat(row_factor, logits), x, t, None, flat, 0, width, term, dlogits)
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
            "KIND": 0 if term.kl else 1 if term.reverse_kl else 2,  # see `FORWARD` in rows.py
            "SCAN": SCANS[term.kl, term.reverse_kl, False, False],
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
