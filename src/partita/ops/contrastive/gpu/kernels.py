"""The kernels that read a chunk of logits between two products, and their launches.

A program has a tile of a chunk. What it finds for its rows and columns are parts, which another
kernel merges in the order of the tiles.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import (
    exp,
    exp_for_dtype,
    finite_shift,
    log1p_pair,
    reciprocal,
    rounded_product,
)
from ....runtime.launch import cdiv, launch
from .. import common
from ..common import ContrastiveKernels, Logits, LogSumExp

# The rows and columns of a program. Large tiles share the work of a sum over rows among warps; with
# more rows the gradient would take more registers than a thread has.
SCANNED, DIFFERENTIATED = (128, 128), (32, 128)
# A sum of exponentials from this one on has lost nothing to underflow, which begins below 1e-38.
SMALLEST_SUM = tl.constexpr(1e-30)
MERGED, MERGED_PARTS = 64, 16  # results of a program that merges, and the parts it loads together


class Tile(NamedTuple):
    """The logits of a program.

    Fields:
        row, column: their places in the chunk, [R, 1] and [1, C].
        mask: which of them exist, [R, C].
        is_pair: which are those of pairs, [R, C].
        has_pairs: whether there may be any; most tiles have none.
        similarity, logit: the products and the logits, [R, C].
        row_block, column_block: the place of the tile.
    """

    row: Any
    column: Any
    mask: Any
    is_pair: Any
    has_pairs: Any
    similarity: Any
    logit: Any
    row_block: Any
    column_block: Any


@triton.jit
def load_tile(logits, stride, R, C, TILE_R: tl.constexpr, TILE_C: tl.constexpr):
    """Load the tile of this program."""
    blocks = tl.cdiv(C, TILE_C)
    row_block, column_block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    first_row, first_column = row_block * TILE_R, column_block * TILE_C
    r, c = tl.arange(0, TILE_R)[:, None], tl.arange(0, TILE_C)[None, :]
    row, column = first_row + r, first_column + c
    mask = (row < R) & (column < C)
    # Offsets in a tile have 32 bits, since one for each logit is computed.
    start = logits.similarities + (first_row.to(tl.int64) * stride + first_column)
    similarity = tl.load(start + (r * stride + c), mask=mask, other=0.0)
    # The shift is subtracted from the same rounded logit that is stored for a pair.
    logit = rounded_product(similarity, tl.load(logits.scale))
    if logits.bias is not None:
        logit += tl.load(logits.bias)
    # The columns of the pairs start at this one.
    pairs = first_row + logits.first
    has_pairs = (pairs < first_column + TILE_C) & (pairs + TILE_R > first_column)
    is_pair = mask & (column == row + logits.first)
    return Tile(row, column, mask, is_pair, has_pairs, similarity, logit, row_block, column_block)


@triton.jit
def store_part(parts, maximum, total, place, size, block):
    """Store the log-sum-exps of a tile over an axis; `place` are those of the other."""
    offset = block.to(tl.int64) * size + place
    tl.store(parts.maximum + offset, maximum, mask=place < size)
    tl.store(parts.total + offset, total, mask=place < size)


@triton.jit
def logsumexp(logit, AXIS: tl.constexpr):
    """Return the maxima over an axis of a tile, and the sums of the exponentials below them."""
    maximum = tl.max(logit, axis=AXIS, keep_dims=True)
    return maximum, tl.sum(exp(logit - finite_shift(maximum)), axis=AXIS, keep_dims=True)


@triton.jit(do_not_specialize=["R"])
def contrastive_scan_kernel(
    logits,  # Logits, [R, C]
    stride,
    rows,  # LogSumExp of the tiles of each row, [column blocks, R]; of sigmoids the sums alone
    columns,  # LogSumExp of the tiles of each column, [row blocks, C], or None
    pairs_ptr,  # [R], the logits of pairs
    R,
    C,
    IS_SIGMOID: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Compute the log-sum-exps of the rows and the columns of a tile from one read of its logits.

    Of sigmoids it computes the sum of the losses of each row.
    """
    tile = load_tile(logits, stride, R, C, TILE_R, TILE_C)
    if tile.has_pairs:
        tl.store(pairs_ptr + tile.row + tile.column * 0, tile.logit, mask=tile.is_pair)
    if IS_SIGMOID:
        x = tl.where(tile.is_pair, -tile.logit, tile.logit)
        # The loss of a logit is log(1 + exp(x)).
        loss = tl.maximum(x, 0.0) + log1p_pair(exp(-tl.abs(x)))[0]
        total = tl.sum(tl.where(tile.mask, loss, 0.0), axis=1, keep_dims=True)
        offset = tile.column_block.to(tl.int64) * R + tile.row
        tl.store(rows.total + offset, total, mask=tile.row < R)
    else:
        x = tl.where(tile.mask, tile.logit, -float("inf"))
        of_rows = (tile.row, R, tile.column_block)
        if columns is None:
            store_part(rows, *logsumexp(x, 1), *of_rows)
        else:
            # One exponential serves for both sums, as none underflows that matters to its own sum.
            of_columns = (tile.column, C, tile.row_block)
            maximum = tl.max(x)
            e = exp(x - finite_shift(maximum))
            row_sum, column_sum = (
                tl.sum(e, axis=1, keep_dims=True),
                tl.sum(e, axis=0, keep_dims=True),
            )
            least = tl.minimum(
                tl.min(tl.where(tile.row < R, row_sum, float("inf"))),
                tl.min(tl.where(tile.column < C, column_sum, float("inf"))),
            )
            if least >= SMALLEST_SUM:
                store_part(rows, maximum, row_sum, *of_rows)
                store_part(columns, maximum, column_sum, *of_columns)
            else:
                store_part(rows, *logsumexp(x, 1), *of_rows)
                store_part(columns, *logsumexp(x, 0), *of_columns)


@triton.jit(do_not_specialize=["R", "factor"])
def contrastive_gradient_kernel(
    logits,  # Logits, [R, C]
    stride,
    rows,  # LogSumExp, [R]
    columns,  # LogSumExp, [C], or None
    gradient_ptr,  # [R, C], written
    gradient_stride,
    scale_ptr,  # [column blocks, R], sums of the gradient times the similarity
    bias_ptr,  # [column blocks, R], sums of the gradient
    factor: tl.float32,
    R,
    C,
    IS_SIGMOID: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Compute the gradient of a tile of logits, times a factor where it is rounded."""
    tile = load_tile(logits, stride, R, C, TILE_R, TILE_C)
    dtype: tl.constexpr = tile.logit.dtype
    if IS_SIGMOID:
        # The gradient in x is its sigmoid, which is that of the logit but for the sign of pairs.
        x = tl.where(tile.is_pair, -tile.logit, tile.logit)
        decay = exp_for_dtype(-tl.abs(x), gradient_ptr.dtype.element_ty)
        inverse = reciprocal(1.0 + decay)
        sigmoid = tl.where(x < 0.0, decay * inverse, inverse)
        gradient = tl.where(tile.is_pair, -sigmoid, sigmoid)
    else:
        gradient = probabilities(tile.logit, rows, tile.row, R, gradient_ptr)
        if columns is not None:
            of_columns = probabilities(tile.logit, columns, tile.column, C, gradient_ptr)
            gradient = (gradient + of_columns) * 0.5
        if tile.has_pairs:
            gradient -= tl.where(tile.is_pair, 1.0, 0.0)
    gradient = tl.where(tile.mask, gradient, 0.0).to(dtype)
    start = gradient_ptr + tile.row_block.to(tl.int64) * TILE_R * gradient_stride
    r, c = tl.arange(0, TILE_R)[:, None], tl.arange(0, TILE_C)[None, :]
    ptrs = start + tile.column_block * TILE_C + (r * gradient_stride + c)
    rounded = (gradient * factor).to(gradient_ptr.dtype.element_ty)
    tl.store(ptrs, rounded, mask=tile.mask)
    offset, mask = tile.column_block.to(tl.int64) * R + tile.row, tile.row < R
    of_scale = tl.sum(gradient * tile.similarity, axis=1, keep_dims=True)
    tl.store(scale_ptr + offset, of_scale, mask=mask)
    tl.store(bias_ptr + offset, tl.sum(gradient, axis=1, keep_dims=True), mask=mask)


@triton.jit
def probabilities(logit, state, place, size, gradient_ptr):
    """Return the softmax over rows or columns, in the precision that the gradient needs."""
    shift = finite_shift(tl.load(state.maximum + place, mask=place < size, other=0.0))
    total = tl.load(state.total + place, mask=place < size, other=1.0)
    # Logits outside of the tile's mask may be above the maximum.
    x = tl.minimum(logit - shift, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return exp_for_dtype(x, gradient_ptr.dtype.element_ty) * reciprocal(total)


@triton.jit(do_not_specialize=["P", "K"])
def contrastive_merge_kernel(
    parts,  # LogSumExp, [P, K]; or without maxima, for sums
    result,  # LogSumExp, [K], the same
    P,
    K,
    ADDS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Merge the parts of each result in their order, after what is there with ADDS."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = place < K
    dtype: tl.constexpr = result.total.dtype.element_ty
    maximum = tl.full([BLOCK], -float("inf"), dtype)
    total = tl.zeros([BLOCK], tl.float64)
    if ADDS:
        maximum = tl.load(result.maximum + place, mask=exists, other=-float("inf"))
        total = tl.load(result.total + place, mask=exists, other=0.0).to(tl.float64)
    for start in range(0, P, PARTS):
        part = start + tl.arange(0, PARTS).to(tl.int64)[:, None]
        offset, mask = part * K + place[None, :], (part < P) & exists[None, :]
        found = tl.load(parts.total + offset, mask=mask, other=0.0)
        if parts.maximum is not None:
            of_parts = tl.load(parts.maximum + offset, mask=mask, other=-float("inf"))
            larger = tl.maximum(maximum, tl.max(of_parts, axis=0))
            shift = finite_shift(larger)
            total *= exp(maximum - shift).to(tl.float64)
            found *= exp(of_parts - shift[None, :])
            maximum = larger
        total += tl.sum(found.to(tl.float64), axis=0)
    tl.store(result.total + place, total.to(dtype), mask=exists)
    if result.maximum is not None:
        tl.store(result.maximum + place, maximum, mask=exists)


def launch_tiles(
    kernel: Any, chunk: Logits, is_sigmoid: bool, tile: tuple[int, int], **options: Any
) -> None:
    """Launch a program for each tile of a chunk."""
    R, C = chunk.similarities.shape
    launch(
        kernel,
        cdiv(R, tile[0]) * cdiv(C, tile[1]),
        logits=chunk,
        stride=chunk.similarities.stride(0),
        R=R,
        C=C,
        **options,
        IS_SIGMOID=is_sigmoid,
        TILE_R=tile[0],
        TILE_C=tile[1],
        num_warps=8,
    )


def merge(parts: LogSumExp, result: LogSumExp, adds: bool = False) -> None:
    """Merge parts `[P, K]`, or add them up where there are no maxima."""
    P, K = parts.total.shape
    launch(
        contrastive_merge_kernel,
        cdiv(K, MERGED),
        parts=parts,
        result=result,
        P=P,
        K=K,
        ADDS=adds,
        PARTS=MERGED_PARTS,
        BLOCK=MERGED,
        num_warps=4,
    )


def scan(
    chunk: Logits,
    is_sigmoid: bool,
    rows: LogSumExp,
    pairs: Tensor,
    columns: LogSumExp | None,
    adds: bool,
) -> None:
    """Write the statistics of a chunk; see `ContrastiveKernels`."""
    R, C = chunk.similarities.shape
    of_rows = LogSumExp(*pairs.new_empty(2, cdiv(C, SCANNED[1]), R))
    of_columns = None
    if columns is not None:
        of_columns = LogSumExp(*pairs.new_empty(2, cdiv(R, SCANNED[0]), C))
    if is_sigmoid:
        rows.maximum.zero_()
        of_rows, rows = (each._replace(maximum=None) for each in (of_rows, rows))
    tensors = {"rows": of_rows, "columns": of_columns, "pairs_ptr": pairs}
    launch_tiles(contrastive_scan_kernel, chunk, is_sigmoid, SCANNED, **tensors)
    merge(of_rows, rows)
    if columns is not None and of_columns is not None:
        merge(of_columns, columns, adds)


def gradient(
    chunk: Logits,
    is_sigmoid: bool,
    rows: LogSumExp,
    columns: LogSumExp | None,
    factor: float,
    result: Tensor,
    sums: Tensor,
) -> None:
    """Write the gradient of a chunk of logits and the sums of its rows; see the reference."""
    R, C = chunk.similarities.shape
    parts = sums.new_empty(2, cdiv(C, DIFFERENTIATED[1]), R)
    launch_tiles(
        contrastive_gradient_kernel,
        chunk,
        is_sigmoid,
        DIFFERENTIATED,
        rows=rows,
        columns=columns,
        gradient_ptr=result,
        gradient_stride=result.stride(0),
        scale_ptr=parts[0],
        bias_ptr=parts[1],
        factor=factor,
    )
    for part, total in zip(parts, sums, strict=True):
        merge(LogSumExp(None, part), LogSumExp(None, total))


KERNELS = ContrastiveKernels(scan, gradient)
contrastive_state = functools.partial(common.contrastive_state, kernels=KERNELS)
contrastive_gradient = functools.partial(common.contrastive_gradient, kernels=KERNELS)
