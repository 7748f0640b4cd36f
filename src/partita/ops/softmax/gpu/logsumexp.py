"""The kernels of log-sum-exp, and of softmax and gradients from the statistics of rows."""

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E, divide, exp_for_dtype, finite_shift, log_exact
from ....primitives.gpu.reduce import (
    locate_tile,
    program_rows,
    scan_rows,
    tile_ptrs,
)


@triton.jit
def logsumexp_kernel(
    input,  # StridedRows
    results,  # LogSumExp, [batches, rows]
    segments,  # Segments
    rows,
    classes,
    ACC_DTYPE: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Compute the log-sum-exp of rows, or of parts of a row, with one read in blocks.

    The last program of a row merges the parts.
    """
    slope = tl.full([], LOG2E, ACC_DTYPE)
    at = program_rows(input, rows, classes, segments, TILE.rows)
    state, mask = scan_rows(input, at, segments, slope, None, None, None, False, TILE)
    maximum, total = state.maximum, state.total.to(ACC_DTYPE)
    result = tl.where(maximum == float("inf"), maximum, maximum + log_exact(total))
    result_ptrs = results.logsumexp + at.index
    tl.store(result_ptrs, result.to(result_ptrs.dtype.element_ty), mask=mask)
    tl.store(results.maximum + at.index, maximum, mask=mask)
    tl.store(results.sumexp + at.index, total, mask=mask)


@triton.jit
def softmax_elementwise_kernel(
    grad,  # RowNumbers, with None for ones
    input,  # StridedRows
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    result,  # StridedRows
    rows,
    classes,
    LOG: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute a tile of the softmax times the rows' gradients, or of the log-softmax."""
    tile = locate_tile(rows, classes, tl.cdiv(classes, BLOCK_V), ROWS, BLOCK_V)
    index, row_mask = tile.index, tile.row_mask
    total = tl.load(sumexp_ptr + index, mask=row_mask, other=1.0)
    shift = finite_shift(tl.load(maximum_ptr + index, mask=row_mask, other=0.0))
    x = tl.load(tile_ptrs(input, tile), mask=tile.mask, other=-float("inf")).to(ACC_DTYPE)
    dtype: tl.constexpr = result.ptr.dtype.element_ty
    if LOG:
        y = x - shift[:, None] - log_exact(total)[:, None]
    else:
        on_row = tl.full([ROWS], 1.0, ACC_DTYPE)
        if grad.ptr is not None:
            grad_ptrs = grad.ptr + index * grad.step
            on_row = tl.load(grad_ptrs, mask=row_mask, other=0.0).to(ACC_DTYPE)
        y = exp_for_dtype(x - shift[:, None], dtype) * divide(on_row, total)[:, None]
    tl.store(tile_ptrs(result, tile), y.to(dtype), mask=tile.mask)
