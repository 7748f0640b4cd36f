"""The gradient of a transducer's loss in the logits, from the posteriors of the arcs."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E, exp, exp_exact
from ....primitives.gpu.memory import edge_columns
from .lattice import SIZES, log2_units
from .rows import (
    aligned_ptr,
    column_offset,
    load_piece,
    locate_row,
    program_nodes,
    step_offset,
)


class NodeGradient(NamedTuple):
    """The terms of the gradient of a node's row.

    The gradient of a column is `factor` times its softmax. From that, `blank` and `label` are
    subtracted at their columns. With HAT, `factor` is that of the labels only, and the blank's
    column has `label` times its sigmoid minus `blank` times the rest to 1.

    Fields:
        factor: the factor of the exponentials.
        blank: what the blank's column loses.
        label: what the label's column loses.
        label_index: the column of the label.
        lse: the log-sum-exp, which `row_exp` subtracts.
        scale: what clipped columns are multiplied by; 1 if it is part of the factors.
        limit: the greatest absolute value of a column before that.
    """

    factor: tl.tensor
    blank: tl.tensor
    label: tl.tensor
    label_index: tl.tensor
    lse: tl.tensor
    scale: tl.tensor
    limit: tl.tensor


@triton.jit
def round_lse(lse, dtype: tl.constexpr, DTYPE: tl.constexpr):
    """Return the log-sum-exp that `row_exp` subtracts, and the factor that undoes its rounding."""
    if dtype == tl.float64:
        return lse, 1.0
    elif dtype == tl.float32:
        rounded = lse.to(DTYPE)
        error = (rounded.to(tl.float64) - lse).to(DTYPE)
        # The error is at most the logarithm of V, as the greatest logit has none.
        return rounded, tl.where(tl.abs(error) < 2e-4, 1.0 + error, tl.exp(error))
    else:
        scaled = log2_units(lse, DTYPE)
        rounded = scaled.to(tl.float32)
        return rounded, tl.exp2((rounded.to(tl.float64) - scaled).to(tl.float32))


@triton.jit
def row_exp(x, lse, dtype: tl.constexpr):
    """Return e**(x - lse) as precisely as a gradient of `dtype` needs; see `round_lse`."""
    if dtype == tl.float32:
        return exp_exact(x - lse)
    elif dtype == tl.float64:
        return exp(x - lse)
    else:
        return tl.exp2(tl.fma(x, LOG2E, -lse))


@triton.jit
def finish(grad, row, CLIP: tl.constexpr):
    """Return the gradient of some columns after clipping; NaN stays NaN."""
    if CLIP:
        limited = tl.where(grad > 0.0, row.limit, -row.limit)
        return tl.where(tl.abs(grad) > row.limit, limited, grad) * row.scale
    else:
        return grad


@triton.jit
def special_gradient(
    x, column, blank, row, FUSED: tl.constexpr, HAT: tl.constexpr, dtype: tl.constexpr
):
    """Return the gradient, before clipping, of columns that may be those of blank and label."""
    is_blank = column == blank
    loss = tl.where(column == row.label_index, row.label, 0.0) + tl.where(is_blank, row.blank, 0.0)
    if FUSED:
        grad = row.factor * row_exp(x, row.lse, dtype)
        grad -= loss
        if HAT:  # The probability of the blank minus 1 would cancel.
            d_blank = row.label / (1.0 + tl.exp(-x)) - row.blank / (1.0 + tl.exp(x))
            grad = tl.where(is_blank, d_blank, grad)
        return grad
    else:
        return -loss


@triton.jit
def special_columns(values, blank, label, V, VEC: tl.constexpr, EDGES: tl.constexpr):
    """Return the columns around a row's aligned part, the blank's and the label's, and a mask.

    They are `[32]`; the last two follow lane 15.
    """
    lane = tl.arange(0, 32)
    column, mask = lane * 0 - 1, lane < 0
    if EDGES:
        column, mask = edge_columns(values.head, values.columns, V, VEC, 32)
    column = tl.where(lane == 16, blank, tl.where(lane == 17, label, column))
    is_class = (column >= 0) & (column < V)
    return column, tl.where((lane == 16) | (lane == 17), is_class, mask)


@triton.jit
def node_gradient(
    scale,
    limit,
    posteriors_ptr,
    lse_ptr,
    index,
    size,
    label_index,
    fastemit,
    FUSED: tl.constexpr,
    HAT: tl.constexpr,
    CLIP: tl.constexpr,
    dtype: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return what the gradient of a node's row is made of, and whether its posteriors are not 0."""
    pb = tl.load(posteriors_ptr + index).to(DTYPE)
    pl = tl.load(posteriors_ptr + size + index).to(DTYPE)
    active = (pb != 0.0) | (pl != 0.0)
    pl *= fastemit
    if not CLIP:
        pb, pl = pb * scale, pl * scale
    factor, lse = pl if HAT else pb + pl, tl.zeros([], DTYPE)
    if FUSED:
        exact = tl.load(lse_ptr + index).to(tl.float64)
        if HAT:  # It is -inf where all labels are impossible, and `pl` is 0 there.
            exact = tl.where(exact == -float("inf"), 0.0, exact)
        lse, correction = round_lse(exact, dtype, DTYPE)
        factor *= correction
    return NodeGradient(factor, pb, pl, label_index, lse, scale, limit), active


@triton.jit
def store_piece(ptr, row, column, value, stride_v, VEC: tl.constexpr):
    """Store a block of columns of a row's aligned part at `ptr`."""
    mask = column // VEC * VEC < row.columns
    tl.store(ptr + column_offset(column, stride_v), value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_gradient(
    source,
    result,
    blank,
    V,
    row,
    FUSED: tl.constexpr,
    HAT: tl.constexpr,
    CLIP: tl.constexpr,
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Write the gradient of a row; source and result are addresses of tensors, rows and strides."""
    ptr, values, stride_v = source
    d_ptr, results, d_stride_v = result
    dtype: tl.constexpr = d_ptr.dtype.element_ty
    column, mask = special_columns(values, blank, row.label_index, V, VEC, EDGES)
    special = tl.zeros([32], DTYPE)
    if FUSED:
        special_ptr = ptr + values.start + column_offset(column, stride_v)
        special = tl.load(special_ptr, mask=mask, other=0.0).to(DTYPE)
    special = special_gradient(special, column, blank, row, FUSED, HAT, dtype)
    # The gradient may replace the logits, so all lanes must have read theirs.
    tl.debug_barrier()
    body_ptr = aligned_ptr(ptr, values, VEC, EDGES)
    d_body_ptr = aligned_ptr(d_ptr, results, VEC, EDGES)
    lane = tl.arange(0, BLOCK_V)
    for first in range(0, values.columns, PIECES * BLOCK_V):
        pieces = ()
        for i in tl.static_range(PIECES):
            x = tl.zeros([BLOCK_V], DTYPE)
            if FUSED:
                at = first + i * BLOCK_V + lane
                x = load_piece(body_ptr, values, at, stride_v, VEC, DTYPE)
            pieces = pieces + (x,)
        for i in tl.static_range(PIECES):
            d = tl.zeros([BLOCK_V], DTYPE) + tl.where(row.factor == row.factor, 0.0, row.factor)
            if FUSED:
                e = row_exp(pieces[i], row.lse, dtype)
                d = finish(row.factor * e, row, CLIP)
            store_piece(d_body_ptr, results, first + i * BLOCK_V + lane, d, d_stride_v, VEC)
    # The columns of blank and label replace what the lanes have just stored.
    tl.debug_barrier()
    special = finish(special, row, CLIP).to(dtype)
    tl.store(d_ptr + results.start + column_offset(column, d_stride_v), special, mask=mask)


@triton.jit
def store_zeros(result, V, VEC: tl.constexpr, EDGES: tl.constexpr, BLOCK_V: tl.constexpr):
    """Write zeros to a row; see `store_gradient`."""
    ptr, row, stride_v = result
    if EDGES:
        column, mask = edge_columns(row.head, row.columns, V, VEC, 32)
        zero = tl.zeros([32], ptr.dtype.element_ty)
        tl.store(ptr + row.start + column_offset(column, stride_v), zero, mask=mask)
    body_ptr = aligned_ptr(ptr, row, VEC, EDGES)
    for first in range(0, row.columns, BLOCK_V):
        at = first + tl.arange(0, BLOCK_V)
        store_piece(body_ptr, row, at, tl.zeros([BLOCK_V], tl.float32), stride_v, VEC)


class GradientSource(NamedTuple):
    """The inputs of the gradient of some nodes; see the arguments of the kernels.

    Fields:
        grad_ptr, grad_stride: the upstream gradient.
        lse_ptr, posteriors_ptr: what the forward pass has saved.
        targets_ptr, target_stride: the labels.
        blank, clamp, fastemit: the options of the loss.
    """

    grad_ptr: tl.tensor
    grad_stride: tl.tensor
    lse_ptr: tl.tensor
    posteriors_ptr: tl.tensor
    targets_ptr: tl.tensor
    target_stride: tl.tensor
    blank: tl.tensor
    clamp: tl.tensor
    fastemit: tl.tensor


@triton.jit
def store_gradients_of_nodes(
    source,
    logits,
    dlogits,
    first_step,
    sizes,
    HAT: tl.constexpr,
    CLIP: tl.constexpr,
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Write the gradient of the rows of this program's nodes; rows of gradient 0 are not read.

    `logits` and `dlogits` are addresses and strides, and `sizes` are T, B, U1 and V.
    """
    logits_ptr, strides = logits
    dlogits_ptr, d_strides = dlogits
    T, B, U1, V = sizes
    dtype: tl.constexpr = dlogits_ptr.dtype.element_ty
    FUSED: tl.constexpr = source.lse_ptr is not None
    node = program_nodes(first_step, T, U1, ROWS)
    b, size = node.b.to(tl.int64), B.to(tl.int64) * T * U1
    scale = tl.load(source.grad_ptr + b * source.grad_stride).to(DTYPE)
    limit = tl.full([], source.clamp, DTYPE)
    fastemit = tl.full([], source.fastemit, DTYPE)
    origin = step_offset(node, first_step, strides[0], strides[1])
    d_origin = step_offset(node, first_step, d_strides[0], d_strides[1])
    for r in range(0, tl.minimum(ROWS, U1 - node.first_u)):
        u = (node.first_u + r).to(tl.int64)
        at_label = source.targets_ptr + b * source.target_stride + u
        label = tl.load(at_label, mask=u < U1 - 1, other=-1).to(tl.int32)
        row, active = node_gradient(
            scale,
            limit,
            source.posteriors_ptr,
            source.lse_ptr,
            node.index + r,
            size,
            label,
            fastemit,
            FUSED,
            HAT,
            CLIP,
            dtype,
            DTYPE,
        )
        x = (logits_ptr, locate_row(origin + u * strides[2], V, VEC, EDGES), strides[3])
        d = (dlogits_ptr, locate_row(d_origin + u * d_strides[2], V, VEC, EDGES), d_strides[3])
        if active & (scale != 0.0):
            blank = source.blank
            store_gradient(
                x, d, blank, V, row, FUSED, HAT, CLIP, VEC, EDGES, PIECES, BLOCK_V, DTYPE
            )
        else:
            store_zeros(d, V, VEC, EDGES, BLOCK_V)


@triton.jit(do_not_specialize=SIZES)
def rnnt_gradient_kernel(
    grad_ptr,  # [B]
    logits_ptr,  # [B, T, U1, V], or those of some steps
    lse_ptr,  # [B, T, U1], or None for log-probabilities
    posteriors_ptr,  # [2, B, T, U1], or more of a TDT
    targets_ptr,  # [B, U]
    dlogits_ptr,  # as logits, which it may be
    first_step,  # the first step in `logits`, counted over all sequences
    T,
    B,
    U1,
    V,
    blank,
    clamp: tl.float64,  # greatest absolute value of a gradient, with CLIP
    fastemit: tl.float64,  # 1 + the factor of FastEmit
    grad_stride,
    target_stride,
    stride_b,
    stride_t,
    stride_u,
    stride_v,
    d_stride_b,
    d_stride_t,
    d_stride_u,
    d_stride_v,
    HAT: tl.constexpr,
    CLIP: tl.constexpr,
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,  # nodes of a program
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Write the gradient of the rows of some nodes; rows whose gradient is 0 are not read."""
    saved = (lse_ptr, posteriors_ptr, targets_ptr, target_stride)
    source = GradientSource(grad_ptr, grad_stride, *saved, blank, clamp, fastemit)
    logits = (logits_ptr, (stride_b, stride_t, stride_u, stride_v))
    dlogits = (dlogits_ptr, (d_stride_b, d_stride_t, d_stride_u, d_stride_v))
    rows = (source, logits, dlogits, first_step, (T, B, U1, V))
    store_gradients_of_nodes(*rows, HAT, CLIP, VEC, EDGES, PIECES, ROWS, BLOCK_V, DTYPE)
