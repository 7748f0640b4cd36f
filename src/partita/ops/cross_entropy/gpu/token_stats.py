"""Kernels of token statistics and of their gradient, and their launches.

With `slope` = log2(e) / temperature, the exponentials are 2**u, u = slope (x - maximum).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import (
    LN2,
    LOG2E,
    finite_shift,
    log_exact,
    reciprocal,
    through_softcap,
)
from ....primitives.gpu.reduce import (
    ProgramRows,
    load_capped,
    locate_tile,
    program_rows,
    scan_rows,
    tile_ptrs,
)
from ....primitives.gpu.row_plan import (
    RowView,
    flat_rows,
    launch_elementwise,
    launch_reduction,
    row_view_or_copy,
    with_output,
)
from ....runtime.dtypes import acc_dtype
from ..common import NOT_READ, TokenStatsRows
from .reduction import load_labels
from .row_math import load_row_gradient


@triton.jit
def lowest_argmax(x, at, found, softcap, mask, BLOCK_V: tl.constexpr):
    """Return the lowest class of each row in the mask that has the maximum which `scan_rows` found.

    The first block that has it is read once more. If all logits are NaN, it is the last class.
    """
    ROWS: tl.constexpr = found.maximum.shape[0]
    block = tl.sum(found.argmax, axis=0) if ROWS == 1 else found.argmax[:, None]
    column = block.to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]  # [ROWS, BLOCK_V]
    mask = mask[:, None] & (column < at.classes)
    block_x = load_capped(at.ptrs[:, None] + column * x.column, mask, softcap, found.maximum.dtype)
    sought = found.maximum
    if softcap is not None:  # Another copy of the code may round a hyperbolic tangent differently.
        sought = tl.max(block_x, axis=1)
    is_sought = mask & (block_x == sought[:, None])
    return tl.min(tl.where(is_sought, column.to(tl.int32), at.classes - 1), axis=1).to(tl.int64)


@triton.jit
def token_stats_kernel(
    logits,  # StridedRows
    target_ptr,  # [batches, rows], or None for the arg-max
    results,  # TokenStatsRows, [batches, rows]
    segments,  # Segments
    rows,
    classes,
    temperature: tl.float64,
    softcap: tl.float64,
    ignore_index,
    HAS_SOFTCAP: tl.constexpr,
    READS_IGNORED: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Compute the statistics of rows, each read once in blocks.

    Where several programs share a row, the last one of them merges their results. Programs whose
    rows are all ignored need not read them; their statistics are those of no classes then.
    """
    temperature = tl.full([], temperature, ACC_DTYPE)
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    slope = tl.full([], LOG2E, ACC_DTYPE) / temperature
    at = program_rows(logits, rows, classes, segments, TILE.rows)
    # The label and its logit are loaded before anything waits for the row.
    index, mask = at.index, at.mask
    if target_ptr is not None:
        label = load_labels(target_ptr, index, mask, ignore_index)
    else:
        label = index * 0  # any class; the maximum replaces its logit
    not_ignored = label != ignore_index
    in_range = not_ignored & (label >= 0) & (label < classes)
    if not READS_IGNORED:
        read = tl.where(tl.max(not_ignored.to(tl.int32), axis=0) > 0, classes, 0)
        at = ProgramRows(index, mask, at.batch, at.row, at.ptrs, read, at.split)
    label_ptrs = at.ptrs + label * logits.column
    label_x = load_capped(label_ptrs, in_range & mask, softcap, ACC_DTYPE)
    found, mask = scan_rows(logits, at, segments, slope, softcap, None, None, True, TILE)
    argmax = lowest_argmax(logits, at, found, softcap, mask, TILE.block)
    maximum, total = found.maximum, found.total.to(ACC_DTYPE)
    # The results are NaN where the label is no class. An ignored label has log-probability 0.
    x = maximum if target_ptr is None else label_x
    shift, log_total = finite_shift(maximum), log_exact(total)
    is_invalid = not_ignored & (in_range == 0)
    nan_or_zero = tl.where(is_invalid, float("nan"), 0.0).to(ACC_DTYPE)
    logprob = tl.where(not_ignored, (x - shift) / temperature - log_total, 0.0) + nan_or_zero
    logsumexp = shift / temperature + log_total + nan_or_zero
    entropy = log_total - LN2 * found.sum_x_exp.to(ACC_DTYPE) / total + nan_or_zero
    tl.store(results.logprob + index, logprob, mask=mask)
    tl.store(results.logsumexp + index, logsumexp, mask=mask)
    tl.store(results.entropy + index, entropy, mask=mask)
    tl.store(results.argmax + index, argmax, mask=mask)
    tl.store(results.maximum + index, maximum, mask=mask)
    tl.store(results.sumexp + index, total, mask=mask)


@triton.jit
def token_stats_backward_kernel(
    grad_logprob,  # RowNumbers
    grad_logsumexp,  # RowNumbers, with None for zeros
    grad_entropy,  # RowNumbers, with None for zeros
    logits,  # StridedRows
    target_ptr,  # [batches, rows]
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    entropy_ptr,  # [batches, rows]
    dlogits,  # StridedRows
    rows,
    classes,
    temperature: tl.float64,
    softcap: tl.float64,
    ignore_index,
    HAS_SOFTCAP: tl.constexpr,
    READS_IGNORED: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute a tile of the gradient from the rows' statistics with one read and one write.

    Ignored rows that are not read have the gradient 0.
    """
    temperature = tl.full([], temperature, ACC_DTYPE)
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    tile = locate_tile(rows, classes, tl.cdiv(classes, BLOCK_V), ROWS, BLOCK_V)
    index, row_mask, mask = tile.index, tile.row_mask, tile.mask
    label = load_labels(target_ptr, index, row_mask, ignore_index)
    not_ignored = label != ignore_index
    out_of_range = not_ignored & ((label < 0) | (label >= classes))
    on_label = load_row_gradient(grad_logprob, index, row_mask, ACC_DTYPE)
    on_label = tl.where(not_ignored, on_label, 0.0)
    softmax_coef = -on_label + load_row_gradient(grad_logsumexp, index, row_mask, ACC_DTYPE)
    on_entropy = load_row_gradient(grad_entropy, index, row_mask, ACC_DTYPE)
    read = mask
    if not READS_IGNORED:
        on_entropy = tl.where(not_ignored, on_entropy, 0.0)
        read = mask & not_ignored[:, None]
    shift = finite_shift(tl.load(maximum_ptr + index, mask=row_mask, other=0.0))
    total = tl.load(sumexp_ptr + index, mask=row_mask, other=1.0)
    offset = tl.load(entropy_ptr + index, mask=row_mask, other=0.0) - log_exact(total)
    x = load_capped(tile_ptrs(logits, tile), read, softcap, ACC_DTYPE)
    exponent = (x - shift[:, None]) * (tl.full([], LOG2E, ACC_DTYPE) / temperature)
    p = tl.exp2(exponent) * reciprocal(total)[:, None]
    # This is log p + entropy, which stays finite where p is 0.
    logp_plus_entropy = LN2 * tl.maximum(exponent, -10000.0) + offset[:, None]
    grad = p * (softmax_coef[:, None] - on_entropy[:, None] * logp_plus_entropy)
    grad += tl.where(tile.column == label[:, None], on_label[:, None], 0.0)
    grad = tl.where(out_of_range[:, None], float("nan"), grad / temperature)
    grad = through_softcap(grad, x, softcap)
    # A row without an upstream gradient has none, even if its logits are NaN.
    active = tl.abs(on_label) + tl.abs(softmax_coef) + tl.abs(on_entropy)  # [ROWS]
    grad = tl.where((active == 0.0)[:, None] & (out_of_range == 0)[:, None], 0.0, grad)
    tl.store(tile_ptrs(dlogits, tile), grad.to(dlogits.ptr.dtype.element_ty), mask=mask)


def token_stats(
    logits: Tensor, target: Tensor | None, temperature: float, softcap: float, ignore_index: int
) -> TokenStatsRows:
    """Compute the statistics of the rows; without a target, the label of a row is its arg-max."""
    view = row_view_or_copy(-1, logits)
    dtype = acc_dtype(logits.dtype)
    rows = TokenStatsRows(
        *(
            logits.new_empty(logits.shape[:-1], dtype=torch.int64 if name == "argmax" else dtype)
            for name in TokenStatsRows._fields
        )
    )
    launch_reduction(
        token_stats_kernel,
        view,
        carried=4,
        # With more, 1,024 programs would not run at the same time; a soft-cap would spill.
        max_registers=64 if softcap == 0 else None,
        logits=view.strided[0],
        target_ptr=None if target is None else target.contiguous(),
        results=rows,
        classes=view.classes,
        temperature=temperature,
        softcap=softcap,
        ignore_index=ignore_index,
        HAS_SOFTCAP=softcap != 0,
        READS_IGNORED=ignore_index != NOT_READ,
    )
    return rows


def token_stats_backward(
    grad_logprob: Tensor,
    grad_logsumexp: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    entropy: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Compute the gradient of the logits from the rows' statistics; a gradient of None is zero."""

    def run(view: RowView) -> None:
        launch_elementwise(
            token_stats_backward_kernel,
            view,
            grad_logprob=flat_rows(grad_logprob),
            grad_logsumexp=flat_rows(grad_logsumexp),
            grad_entropy=flat_rows(grad_entropy),
            logits=view.strided[0],
            target_ptr=target.contiguous(),
            maximum_ptr=maximum.contiguous(),
            sumexp_ptr=sumexp.contiguous(),
            entropy_ptr=entropy.contiguous(),
            dlogits=view.strided[1],
            classes=view.classes,
            temperature=temperature,
            softcap=softcap,
            ignore_index=ignore_index,
            HAS_SOFTCAP=softcap != 0,
            READS_IGNORED=ignore_index != NOT_READ,
        )

    return with_output(run, -1, logits, dtype=logits.dtype)
