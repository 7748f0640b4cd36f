"""The kernels that read a chunk of logits between two products, and their launches.

A program has a tile of a chunk. What it finds for its rows and columns are parts, which another
kernel merges in the order of the tiles.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ....primitives import rows as row_functions
from ....primitives.gpu.math import (
    LOG2E,
    exp,
    exp_for_dtype,
    finite_shift,
    log1p_pair,
    reciprocal,
    rounded_product,
)
from ....primitives.gpu.target import target_of
from ....runtime.launch import INTERPRETED, cdiv, launch
from .. import common
from ..common import ContrastiveKernels, Logits, LogSumExp, Product, has_fast_products


class Tiling(NamedTuple):
    """The tiles of a chunk of logits, and their programs.

    Fields:
        rows, columns: of a tile.
        warps: of its program.
        group: the rows of tiles that run beside each other, so that they read the same columns.
    """

    rows: int
    columns: int
    warps: int = 8
    group: int = 1


# Large tiles share the work of a sum over rows among warps; with more rows the gradient would take
# more registers than a thread has.
SCANNED, DIFFERENTIATED = Tiling(128, 128), Tiling(32, 128)
# Where a kernel multiplies, two programs of the scan or one of the gradient fill a multiprocessor.
PRODUCT_SCANNED, PRODUCT_DIFFERENTIATED = Tiling(128, 128, 4, 16), Tiling(128, 256, 8, 8)
# The columns are those of the kernel that multiplies, whose parts of sums it may write. With fewer
# threads than twice the columns, Triton would share a row among all warps and exchange its sums.
CODES_DIFFERENTIATED = Tiling(16, PRODUCT_DIFFERENTIATED.columns, 16)
BLOCK_D = 64  # features of a step of a product
# A sum of exponentials from this one on has lost nothing to underflow, which begins below 1e-38.
SMALLEST_SUM = tl.constexpr(1e-30)
# The greatest error of a logit from a code; the gradient of bf16 is rounded as much.
LARGEST_ERROR = tl.constexpr(2.0**-9)
# fp32 numbers around this one have steps of 1, and their last 16 bits count them, from 0 on.
CODE_ORIGIN = tl.constexpr(2.0**23 + 2.0**15)
WIDENS = tl.constexpr(INTERPRETED)  # The interpreter would multiply the bits of bf16.
MERGED, MERGED_PARTS = 64, 16  # results of a program that merges, and the parts it loads together


class Tile(NamedTuple):
    """The logits of a program, or of some of its columns.

    Fields:
        row, column: their places in the chunk, [R, 1] and [1, C].
        is_whole: whether all of them exist.
        pairs: the places of the columns of the rows' pairs, [R, 1].
        has_pairs: whether there may be any; most tiles have none.
        similarity, logit: the products and the logits, [R, C].
        blocks: the row and the column of the tile among tiles.
    """

    row: Any
    column: Any
    is_whole: Any
    pairs: Any
    has_pairs: Any
    similarity: Any
    logit: Any
    blocks: Any


@triton.jit
def place_of(tile, R, C, TILE_R: tl.constexpr, TILE_C: tl.constexpr, GROUP: tl.constexpr):
    """Return the row and the column of a tile. GROUP rows of tiles read the same columns."""
    columns = tl.cdiv(C, TILE_C)
    first = tile // (GROUP * columns) * GROUP
    rows = tl.minimum(tl.cdiv(R, TILE_R) - first, GROUP)
    inside = tile % (GROUP * columns)
    return first + inside % rows, inside // rows


@triton.jit
def loaded(
    logits, stride, row_block, column_block, R, C, TILE_R: tl.constexpr, TILE_C: tl.constexpr
):
    """Load the similarities of a tile."""
    first_row, first_column = row_block * TILE_R, column_block * TILE_C
    r, c = tl.arange(0, TILE_R)[:, None], tl.arange(0, TILE_C)[None, :]
    # Offsets in a tile have 32 bits, since one for each logit is computed.
    start = logits.similarities + (first_row.to(tl.int64) * stride + first_column)
    mask = (first_row + r < R) & (first_column + c < C)
    return tl.load(start + (r * stride + c), mask=mask, other=0)


@triton.jit
def multiplied(
    factors,
    row_block,
    column_block,
    D,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute the similarities of a tile from the features of its rows and columns."""
    total = tl.zeros([TILE_R, TILE_C], tl.float32)
    for k in range(0, D, BLOCK_D):
        x = factors[0].load([row_block * TILE_R, k])
        y = factors[1].load([column_block * TILE_C, k])
        if WIDENS:
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(x, y.T, total)
    return total


@triton.jit
def encoded(similarity, step):
    """Return similarities as codes; see `Codes`."""
    steps = tl.fma(similarity, 1.0 / step, CODE_ORIGIN)
    return steps.to(tl.int32, bitcast=True).to(tl.int16)


@triton.jit
def decoded(code):
    """Return codes as numbers of steps."""
    bits = code.to(tl.uint16, bitcast=True).to(tl.uint32) | 0x4B000000  # those of 2**23
    return bits.to(tl.float32, bitcast=True) - CODE_ORIGIN


@triton.jit
def as_tile(
    similarity, logits, row_block, column_block, first_column, R, C, step=None, pairs_ptr=None
):
    """Describe the similarities of a tile, or of some of its columns.

    They may be numbers of steps, beside the exact logits of pairs.
    """
    ROWS: tl.constexpr = similarity.shape[0]
    COLUMNS: tl.constexpr = similarity.shape[1]
    first_row = row_block * ROWS
    row = first_row + tl.arange(0, ROWS)[:, None]
    column = first_column + tl.arange(0, COLUMNS)[None, :]
    is_whole = (first_row + ROWS <= R) & (first_column + COLUMNS <= C)
    # The shift is subtracted from the same rounded logit that is stored for a pair.
    scale = tl.load(logits.scale)
    logit = rounded_product(similarity, scale if step is None else scale * step)
    if logits.bias is not None:
        logit += tl.load(logits.bias)
    pairs = first_row + logits.first
    has_pairs = (pairs < first_column + COLUMNS) & (pairs + ROWS > first_column)
    if pairs_ptr is not None:
        if has_pairs:
            exact = tl.load(pairs_ptr + row, mask=row < R, other=0.0)
            logit = tl.where(column == row + logits.first, exact, logit)
    blocks = (row_block, column_block)
    return Tile(row, column, is_whole, row + logits.first, has_pairs, similarity, logit, blocks)


@triton.jit
def quarters(tile):
    """Return the columns of a tile in four parts, whose numbers stay in their threads."""
    left, right = halves(tile)
    return halves(left) + halves(right)


@triton.jit
def halves(tile):
    """Return the left and the right half of a tile."""
    ROWS: tl.constexpr = tile.shape[0]
    COLUMNS: tl.constexpr = tile.shape[1]
    return tl.split(tl.permute(tl.reshape(tile, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


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


@triton.jit
def scan_tile(tile, rows, columns, pairs_ptr, R, C, IS_SIGMOID: tl.constexpr):
    """Store the log-sum-exps of the rows and the columns of a tile; see the kernels."""
    row_block, column_block = tile.blocks
    if IS_SIGMOID:
        offset = column_block.to(tl.int64) * R + tile.row
        tl.store(rows.total + offset, loss_of_rows(tile, pairs_ptr, R, C), mask=tile.row < R)
    else:
        store_pairs(tile, pairs_ptr, R, C)
        x = tile.logit
        if not tile.is_whole:
            x = tl.where((tile.row < R) & (tile.column < C), x, -float("inf"))
        of_rows = (tile.row, R, column_block)
        if columns is None:
            store_part(rows, *logsumexp(x, 1), *of_rows)
        else:
            # One exponential serves for both sums, as none underflows that matters to its own sum.
            of_columns = (tile.column, C, row_block)
            maximum = tl.max(tl.max(x, axis=1), axis=0)
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


@triton.jit
def store_pairs(tile, pairs_ptr, R, C):
    """Store the logits of the pairs of a tile."""
    if tile.has_pairs:
        is_pair = (tile.column == tile.pairs) & (tile.row < R) & (tile.column < C)
        tl.store(pairs_ptr + tile.row + tile.column * 0, tile.logit, mask=is_pair)


@triton.jit
def loss_of_rows(tile, pairs_ptr, R, C):
    """Store the logits of pairs, and return the sums of the losses of sigmoids over the columns."""
    store_pairs(tile, pairs_ptr, R, C)
    excess = tl.maximum(tile.logit, 0.0)
    if tile.has_pairs:
        excess = tl.where(tile.column == tile.pairs, tl.maximum(-tile.logit, 0.0), excess)
    # The loss of a logit z is log(1 + exp(z)), and that of a pair's log(1 + exp(-z)).
    loss = excess + log1p_pair(exp(-tl.abs(tile.logit)))[0]
    if not tile.is_whole:
        loss = tl.where((tile.row < R) & (tile.column < C), loss, 0.0)
    return tl.sum(loss, axis=1, keep_dims=True)


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
    places = place_of(tl.program_id(0), R, C, TILE_R, TILE_C, 1)
    similarity = loaded(logits, stride, *places, R, C, TILE_R, TILE_C)
    tile = as_tile(similarity, logits, *places, places[1] * TILE_C, R, C)
    scan_tile(tile, rows, columns, pairs_ptr, R, C, IS_SIGMOID)


@triton.jit(do_not_specialize=["R", "D"])
def contrastive_product_scan_kernel(
    logits,  # Logits without similarities
    a,  # descriptor of the features of the rows, [R, D]
    b,  # descriptor of those of the columns, [C, D]
    codes,  # descriptor of the codes of the similarities, [R, C], written; or None
    steps_ptr,  # [R], the steps of their rows, or None
    rows,  # as in contrastive_scan_kernel
    columns,
    pairs_ptr,
    R,
    C,
    D,
    IS_SIGMOID: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute the similarities of a tile and its log-sum-exps, and write codes at most.

    Two programs share a multiprocessor: one multiplies while the other computes exponentials.
    """
    places = place_of(tl.program_id(0), R, C, TILE_R, TILE_C, GROUP)
    similarity = multiplied((a, b), *places, D, TILE_R, TILE_C, BLOCK_D)
    if codes is not None:
        row = places[0] * TILE_R + tl.arange(0, TILE_R)[:, None]
        step = tl.load(steps_ptr + row, mask=row < R, other=1.0)
        codes.store([places[0] * TILE_R, places[1] * TILE_C], encoded(similarity, step))
    if IS_SIGMOID:
        total = tl.zeros([TILE_R, 1], tl.float32)
        parts = quarters(similarity)
        for i in tl.static_range(4):
            first = places[1] * TILE_C + i * (TILE_C // 4)
            tile = as_tile(parts[i], logits, *places, first, R, C)
            total += loss_of_rows(tile, pairs_ptr, R, C)
        offset = places[1].to(tl.int64) * R + tile.row
        tl.store(rows.total + offset, total, mask=tile.row < R)
    else:
        tile = as_tile(similarity, logits, *places, places[1] * TILE_C, R, C)
        scan_tile(tile, rows, columns, pairs_ptr, R, C, IS_SIGMOID)


@triton.jit
def gradient_of(tile, weights, columns, R, C, DTYPE: tl.constexpr, IS_SIGMOID: tl.constexpr):
    """Return the gradient of the logits of a tile, in the precision that `DTYPE` needs.

    `weights` are those of its rows.
    """
    if IS_SIGMOID:
        gradient = sigmoid(tile.logit, DTYPE)
        if tile.has_pairs:
            # That of a pair is the sigmoid less 1, without cancellation.
            of_pair = -sigmoid(-tile.logit, DTYPE)
            gradient = tl.where(tile.column == tile.pairs, of_pair, gradient)
    else:
        gradient = probabilities(tile.logit, *weights, DTYPE)
        if columns is not None:
            of_columns = load_weights(columns, tile.column, C)
            gradient += probabilities(tile.logit, *of_columns, DTYPE)
        if tile.has_pairs:
            gradient -= tl.where(tile.column == tile.pairs, 1.0, 0.0)
    gradient = gradient.to(tile.logit.dtype)
    if not tile.is_whole:
        gradient = tl.where((tile.row < R) & (tile.column < C), gradient, 0.0)
    return gradient


@triton.jit
def sigmoid(x, DTYPE: tl.constexpr):
    """Return 1 / (1 + exp(-x)) in the precision that `DTYPE` needs."""
    decay = exp_for_dtype(-tl.abs(x), DTYPE)
    inverse = reciprocal(1.0 + decay)
    return tl.where(x < 0.0, decay * inverse, inverse)


@triton.jit
def store_sums(scale_ptr, bias_ptr, of_scale, of_bias, tile, R):
    """Store the sums of a tile's gradient, times the similarity and alone, over its columns."""
    offset = tile.blocks[1].to(tl.int64) * R + tile.row
    tl.store(scale_ptr + offset, of_scale, mask=tile.row < R)
    tl.store(bias_ptr + offset, of_bias, mask=tile.row < R)


@triton.jit
def is_precise(error_ptr):
    """Return whether codes give the logits with a small error."""
    return tl.load(error_ptr) <= LARGEST_ERROR


@triton.jit(do_not_specialize=["R", "factor"])
def contrastive_gradient_kernel(
    logits,  # Logits, [R, C]
    stride,
    rows,  # LogSumExp, [R], of `weights_of`
    columns,  # LogSumExp, [C], the same, or None
    gradient_ptr,  # [R, C], written
    gradient_stride,
    scale_ptr,  # [column blocks, R], sums of the gradient times the similarity
    bias_ptr,  # [column blocks, R], sums of the gradient
    steps_ptr,  # [R], the steps of the rows if the similarities are codes, or None
    pairs_ptr,  # [R], the logits of pairs, or None
    error_ptr,  # [], the greatest error of a logit that is a code, or None
    factor: tl.float32,
    R,
    C,
    IS_SIGMOID: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
):
    """Compute the gradient of a tile of logits, times a factor where it is rounded.

    Where codes are too coarse it does nothing, and the kernel that multiplies does all.
    """
    if error_ptr is not None:
        if not is_precise(error_ptr):
            return
    places = place_of(tl.program_id(0), R, C, TILE_R, TILE_C, 1)
    similarity = loaded(logits, stride, *places, R, C, TILE_R, TILE_C)
    step = None
    if steps_ptr is not None:
        row = places[0] * TILE_R + tl.arange(0, TILE_R)[:, None]
        step = tl.load(steps_ptr + row, mask=row < R, other=0.0)
        similarity = decoded(similarity)
    tile = as_tile(similarity, logits, *places, places[1] * TILE_C, R, C, step, pairs_ptr)
    dtype: tl.constexpr = gradient_ptr.dtype.element_ty
    weights = None if IS_SIGMOID else load_weights(rows, tile.row, R)
    gradient = gradient_of(tile, weights, columns, R, C, dtype, IS_SIGMOID)
    start = gradient_ptr + places[0].to(tl.int64) * TILE_R * gradient_stride
    r, c = tl.arange(0, TILE_R)[:, None], tl.arange(0, TILE_C)[None, :]
    ptrs = start + places[1] * TILE_C + (r * gradient_stride + c)
    exists = (tile.row < R) & (tile.column < C)
    tl.store(ptrs, (gradient * factor).to(dtype), mask=exists)
    of_scale = tl.sum(gradient * tile.similarity, axis=1, keep_dims=True)
    of_bias = tl.sum(gradient, axis=1, keep_dims=True)
    if step is not None:
        of_scale *= step
    store_sums(scale_ptr, bias_ptr, of_scale, of_bias, tile, R)


@triton.jit(do_not_specialize=["R", "D", "factor"])
def contrastive_product_gradient_kernel(
    logits,  # Logits without similarities
    a,  # descriptor of the features of the rows, [R, D]
    b,  # descriptor of those of the columns, [C, D]
    rows,  # as in contrastive_gradient_kernel
    columns,
    gradient,  # descriptor of the gradient, [R, C], written
    scale_ptr,
    bias_ptr,
    error_ptr,
    factor: tl.float32,
    R,
    C,
    D,
    IS_SIGMOID: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute the similarities of tiles and their gradient, without writing the similarities.

    A program has several tiles. It loads the first features of the next one before it computes the
    gradient, a quarter of the columns after another, so that it stays in registers.
    """
    tiles = tl.cdiv(R, TILE_R) * tl.cdiv(C, TILE_C)
    if error_ptr is not None:
        tiles = 0 if is_precise(error_ptr) else tiles
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        places = place_of(tile, R, C, TILE_R, TILE_C, GROUP)
        similarity = multiplied((a, b), *places, D, TILE_R, TILE_C, BLOCK_D)
        of_scale = tl.zeros([TILE_R, 1], tl.float32)
        of_bias = tl.zeros([TILE_R, 1], tl.float32)
        row = places[0] * TILE_R + tl.arange(0, TILE_R)[:, None]
        weights = None if IS_SIGMOID else load_weights(rows, row, R)
        parts = quarters(similarity)
        for i in tl.static_range(4):
            first = places[1] * TILE_C + i * (TILE_C // 4)
            part = as_tile(parts[i], logits, *places, first, R, C)
            found = gradient_of(part, weights, columns, R, C, gradient.dtype, IS_SIGMOID)
            gradient.store([places[0] * TILE_R, first], (found * factor).to(gradient.dtype))
            of_scale += tl.sum(found * part.similarity, axis=1, keep_dims=True)
            of_bias += tl.sum(found, axis=1, keep_dims=True)
        store_sums(scale_ptr, bias_ptr, of_scale, of_bias, part, R)


@triton.jit
def load_weights(state, place, size):
    """Load the shift and the weight of rows or columns; see `weights_of`."""
    if state is None:
        return None
    else:
        return (
            tl.load(state.maximum + place, mask=place < size, other=0.0),
            tl.load(state.total + place, mask=place < size, other=0.0),
        )


@triton.jit
def probabilities(logit, shift, weight, DTYPE: tl.constexpr):
    """Return the softmax over rows or columns, in the precision that the gradient needs."""
    x = logit - shift
    if DTYPE.primitive_bitwidth == 16:
        return tl.exp2(tl.fma(x, LOG2E, weight))
    else:
        # Logits outside of the chunk may be above the maximum.
        x = tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return exp_for_dtype(x, DTYPE) * weight


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


def tensors_of(chunk: Logits, tiling: Tiling) -> dict[str, Any]:
    """Return the arguments of a launch that give the similarities, or the features to multiply."""
    similarities = chunk.similarities
    if isinstance(similarities, Tensor):
        return {"logits": chunk, "stride": similarities.stride(0)}
    sizes = zip(similarities[:2], (tiling.rows, tiling.columns), strict=True)
    a, b = (TensorDescriptor.from_tensor(x, [size, BLOCK_D]) for x, size in sizes)
    return {
        "logits": chunk._replace(similarities=None),
        "a": a,
        "b": b,
        "D": similarities.a.shape[1],
        "BLOCK_D": BLOCK_D,
        "GROUP": tiling.group,
        "num_stages": 3,
    }


def launch_tiles(
    kernel: Any,
    chunk: Logits,
    is_sigmoid: bool,
    tiling: Tiling,
    programs: int | None = None,
    **options: Any,
) -> None:
    """Launch a program for each tile of a chunk, or fewer."""
    R, C = chunk.similarities.shape
    tiles = cdiv(R, tiling.rows) * cdiv(C, tiling.columns)
    launch(
        kernel,
        tiles if programs is None else min(tiles, programs),
        **tensors_of(chunk, tiling),
        **options,
        R=R,
        C=C,
        IS_SIGMOID=is_sigmoid,
        TILE_R=tiling.rows,
        TILE_C=tiling.columns,
        num_warps=tiling.warps,
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
    kernel, tiling = contrastive_scan_kernel, SCANNED
    tensors: dict[str, Any] = {}
    if isinstance(chunk.similarities, Product):
        kernel, tiling = contrastive_product_scan_kernel, PRODUCT_SCANNED
        codes = chunk.similarities.codes
        tile = [tiling.rows, tiling.columns]
        descriptor = codes and TensorDescriptor.from_tensor(codes.codes, tile)
        tensors = {"codes": descriptor, "steps_ptr": codes and codes.steps}
    of_rows = LogSumExp(*pairs.new_empty(2, cdiv(C, tiling.columns), R))
    of_columns = None
    if columns is not None:
        of_columns = LogSumExp(*pairs.new_empty(2, cdiv(R, tiling.rows), C))
    if is_sigmoid:
        rows.maximum.zero_()
        of_rows, rows = (each._replace(maximum=None) for each in (of_rows, rows))
    tensors |= {"rows": of_rows, "columns": of_columns, "pairs_ptr": pairs}
    launch_tiles(kernel, chunk, is_sigmoid, tiling, **tensors)
    merge(of_rows, rows)
    if columns is not None and of_columns is not None:
        merge(of_columns, columns, adds)


def weights_of(state: LogSumExp, share: float, dtype: torch.dtype) -> LogSumExp:
    """Return the shifts of exponentials, and what they are multiplied by: share / total.

    In half types it is the logarithm to base 2, which costs the kernel no product.
    """
    shift, weight = row_functions.finite_shift(state.maximum), share / state.total
    return LogSumExp(shift, weight.log2() if dtype.itemsize == 2 else weight)


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
    if not is_sigmoid:
        share = 1.0 if columns is None else 0.5
        rows = weights_of(rows, share, result.dtype)
        columns = columns and weights_of(columns, share, result.dtype)
    product = chunk.similarities if isinstance(chunk.similarities, Product) else None
    codes = product and product.codes
    tiling = DIFFERENTIATED if product is None else PRODUCT_DIFFERENTIATED
    parts = sums.new_empty(2, cdiv(C, tiling.columns), R)
    shared: dict[str, Any] = {"rows": rows, "columns": columns, "factor": factor}
    shared |= {"scale_ptr": parts[0], "bias_ptr": parts[1], "error_ptr": codes and codes.error}
    if product is not None:
        quarter = [tiling.rows, tiling.columns // 4]
        launch_tiles(
            contrastive_product_gradient_kernel,
            chunk,
            is_sigmoid,
            tiling,
            target_of(result.device).multiprocessors,
            gradient=TensorDescriptor.from_tensor(result, quarter),
            **shared,
        )
        chunk, tiling = chunk._replace(similarities=codes and codes.codes), CODES_DIFFERENTIATED
    if chunk.similarities is not None:
        launch_tiles(
            contrastive_gradient_kernel,
            chunk,
            is_sigmoid,
            tiling,
            gradient_ptr=result,
            gradient_stride=result.stride(0),
            steps_ptr=codes and codes.steps,
            pairs_ptr=codes and codes.pairs,
            **shared,
        )
    for part, total in zip(parts, sums, strict=True):
        merge(LogSumExp(None, part), LogSumExp(None, total))


KERNELS = ContrastiveKernels(scan, gradient, has_fast_products)
contrastive_state = functools.partial(common.contrastive_state, kernels=KERNELS)
contrastive_gradient = functools.partial(common.contrastive_gradient, kernels=KERNELS)
