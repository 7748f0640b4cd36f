"""The gradient of a transducer's loss in the logits, from the posteriors of the arcs."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E, exp, exp_exact
from ....primitives.gpu.memory import edge_columns
from .lattice import SIZES, log2_units
from .rows import (
    ROWS,
    aligned_ptr,
    column_offset,
    load_piece,
    locate_row,
    program_nodes,
    step_offset,
)

DURATION_NODES = 64  # nodes of a warp, for which no more registers are needed than for rows
BLOCK = tl.constexpr(DURATION_NODES)


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
def finish(grad, node, CLIP: tl.constexpr):
    """Return the gradient of some columns after clipping; NaN stays NaN."""
    if CLIP:
        limited = tl.where(grad > 0.0, node.limit, -node.limit)
        return tl.where(tl.abs(grad) > node.limit, limited, grad) * node.scale
    else:
        return grad


@triton.jit
def store_piece(ptr, row, column, value, TILE: tl.constexpr):
    """Store a block of columns of a row's aligned part at `ptr`."""
    mask = column // TILE.vector * TILE.vector < row.columns
    ptr += column_offset(column, row.stride_v)
    tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_gradient(
    values,
    results,
    node,
    blank,
    V,
    FUSED: tl.constexpr,
    HAT: tl.constexpr,
    CLIP: tl.constexpr,
    TILE: tl.constexpr,  # RowTile
    DTYPE: tl.constexpr,
):
    """Write the gradient of a row of logits, `values`, to the row `results`."""
    dtype: tl.constexpr = results.ptr.dtype.element_ty
    # The columns around the aligned part, and in lanes 16 and 17 those of blank and label.
    lane = tl.arange(0, 32)
    column, mask = lane * 0 - 1, lane < 0
    if TILE.edges:
        column, mask = edge_columns(values.head, values.columns, V, TILE.vector, 32)
    column = tl.where(lane == 16, blank, tl.where(lane == 17, node.label_index, column))
    is_class = (column >= 0) & (column < V)
    mask = tl.where((lane == 16) | (lane == 17), is_class, mask)
    if FUSED:
        special_ptr = values.ptr + values.start + column_offset(column, values.stride_v)
        logit = tl.load(special_ptr, mask=mask, other=0.0).to(DTYPE)
    is_blank = column == blank
    loss = tl.where(column == node.label_index, node.label, 0.0)
    loss += tl.where(is_blank, node.blank, 0.0)
    if FUSED:
        special = node.factor * row_exp(logit, node.lse, dtype) - loss
        if HAT:  # The probability of the blank minus 1 would cancel.
            d_blank = node.label / (1.0 + tl.exp(-logit)) - node.blank / (1.0 + tl.exp(logit))
            special = tl.where(is_blank, d_blank, special)
    else:
        special = -loss
    # The gradient may replace the logits, so all lanes must have read theirs.
    tl.debug_barrier()
    body_ptr = aligned_ptr(values, TILE)
    d_body_ptr = aligned_ptr(results, TILE)
    BLOCK_V: tl.constexpr = TILE.block
    PIECES: tl.constexpr = TILE.pieces
    piece = tl.arange(0, BLOCK_V)
    for first in range(0, values.columns, PIECES * BLOCK_V):
        pieces = ()
        for i in tl.static_range(PIECES):
            x = tl.zeros([BLOCK_V], DTYPE)
            if FUSED:
                at = first + i * BLOCK_V + piece
                x = load_piece(body_ptr, values.stride_v, at, values.columns, TILE.vector, DTYPE)
            pieces = pieces + (x,)
        for i in tl.static_range(PIECES):
            d = tl.zeros([BLOCK_V], DTYPE) + tl.where(node.factor == node.factor, 0.0, node.factor)
            if FUSED:
                e = row_exp(pieces[i], node.lse, dtype)
                d = finish(node.factor * e, node, CLIP)
            store_piece(d_body_ptr, results, first + i * BLOCK_V + piece, d, TILE)
    # The columns of blank and label replace what the lanes have just stored.
    tl.debug_barrier()
    special = finish(special, node, CLIP).to(dtype)
    d_special_ptr = results.ptr + results.start + column_offset(column, results.stride_v)
    tl.store(d_special_ptr, special, mask=mask)


class Upstream(NamedTuple):
    """The inputs of the gradients beside the logits.

    Fields:
        ptr, stride: the gradient of the losses, `[B]`, and its stride.
        posteriors_ptr: the posteriors of blank, label and durations, `[2 + K, B, T, U1]`.
        labels_ptr: the labels, `[B, U]`.
    """

    ptr: tl.tensor
    stride: tl.tensor
    posteriors_ptr: tl.tensor
    labels_ptr: tl.tensor


class StridedLogits(NamedTuple):
    """The gradient of the logits, `[B, T, U1, V]`, and its strides over these."""

    ptr: tl.tensor
    b: tl.tensor
    t: tl.tensor
    u: tl.tensor
    v: tl.tensor


@triton.jit(do_not_specialize=SIZES)
def rnnt_gradient_kernel(
    grad,  # Upstream
    logits,  # Logits, all of them or those of some steps; without log-sum-exps log-probabilities
    durations,  # Durations
    dlogits,  # StridedLogits, which may be the logits
    first_step,  # the first step in `logits`, counted over all sequences
    steps,  # the number of steps
    T,
    B,
    U1,
    V,
    blank,
    clamp: tl.float64,  # greatest absolute value of a gradient, with CLIP
    fastemit: tl.float64,  # 1 + the factor of FastEmit
    target_stride,
    stride_b,
    stride_t,
    stride_u,
    K: tl.constexpr,  # durations
    HAT: tl.constexpr,
    CLIP: tl.constexpr,
    TILE: tl.constexpr,  # RowTile
):
    """Write the gradient of the rows of some nodes; rows whose gradient is 0 are not read.

    Other programs write that of the durations. They come last and are short, so they run beside the
    last rows.
    """
    DTYPE: tl.constexpr = grad.posteriors_ptr.dtype.element_ty
    FUSED: tl.constexpr = logits.lse_ptr is not None
    BLOCK_V: tl.constexpr = TILE.block
    programs = steps * tl.cdiv(U1, ROWS)
    if (durations.ptr is None) or tl.program_id(0) < programs:
        node = program_nodes(first_step, T, U1)
        b, size = node.b.to(tl.int64), B.to(tl.int64) * T * U1
        scale = tl.load(grad.ptr + b * grad.stride).to(DTYPE)
        limit = tl.full([], clamp, DTYPE)
        label_factor = tl.full([], fastemit, DTYPE)
        origin = step_offset(node, first_step, stride_b, stride_t)
        d_origin = step_offset(node, first_step, dlogits.b, dlogits.t)
        for r in range(0, tl.minimum(ROWS, U1 - node.first_u)):
            u = (node.first_u + r).to(tl.int64)
            label_ptr = grad.labels_ptr + b * target_stride + u
            label_index = tl.load(label_ptr, mask=u < U1 - 1, other=-1).to(tl.int32)
            index = node.index + r
            of_blank = tl.load(grad.posteriors_ptr + index).to(DTYPE)
            of_label = tl.load(grad.posteriors_ptr + size + index).to(DTYPE)
            active = (of_blank != 0.0) | (of_label != 0.0)
            of_label *= label_factor
            if not CLIP:
                of_blank, of_label = of_blank * scale, of_label * scale
            factor, lse = of_label if HAT else of_blank + of_label, tl.zeros([], DTYPE)
            if FUSED:
                exact = tl.load(logits.lse_ptr + index).to(tl.float64)
                if HAT:  # It is -inf where all labels are impossible, whose posterior is 0 there.
                    exact = tl.where(exact == -float("inf"), 0.0, exact)
                lse, correction = round_lse(exact, dlogits.ptr.dtype.element_ty, DTYPE)
                factor *= correction
            gradient = NodeGradient(factor, of_blank, of_label, label_index, lse, scale, limit)
            start = origin + u * stride_u
            values = locate_row(logits.ptr, start, logits.stride_v, V, TILE)
            start = d_origin + u * dlogits.u
            results = locate_row(dlogits.ptr, start, dlogits.v, V, TILE)
            if active & (scale != 0.0):
                row = (values, results, gradient, blank, V)
                store_gradient(*row, FUSED, HAT, CLIP, TILE, DTYPE)
            else:  # zeros
                if TILE.edges:
                    column, mask = edge_columns(results.head, results.columns, V, TILE.vector, 32)
                    zero = tl.zeros([32], dlogits.ptr.dtype.element_ty)
                    edge_ptr = results.ptr + results.start + column_offset(column, dlogits.v)
                    tl.store(edge_ptr, zero, mask=mask)
                body_ptr = aligned_ptr(results, TILE)
                for first in range(0, results.columns, BLOCK_V):
                    piece = first + tl.arange(0, BLOCK_V)
                    store_piece(body_ptr, results, piece, tl.zeros([BLOCK_V], tl.float32), TILE)
    else:
        program, blocks = tl.program_id(0) - programs, tl.cdiv(T * U1, BLOCK)
        b, block = (program // blocks).to(tl.int64), program % blocks
        index = block * BLOCK + tl.arange(0, BLOCK)
        mask = index < T * U1
        nodes, size = b * T * U1 + index, B.to(tl.int64) * T * U1
        scales = tl.load(grad.ptr + (b + index * 0) * grad.stride).to(DTYPE)
        read = mask & (scales != 0.0)
        arcs, total = (), tl.zeros([BLOCK], DTYPE)
        for k in tl.static_range(K):
            arc = tl.load(grad.posteriors_ptr + (2 + k) * size + nodes, mask=read, other=0.0)
            arcs = arcs + (arc,)
            total += arc
        active = read & (total != 0.0)
        lse = tl.load(durations.lse_ptr + nodes, mask=active, other=0.0).to(tl.float64)
        for k in tl.static_range(K):
            x = tl.load(durations.ptr + nodes * K + k, mask=active, other=0.0).to(tl.float64)
            softmax = tl.exp(x - lse) if DTYPE == tl.float64 else tl.exp((x - lse).to(tl.float32))
            d = tl.where(active, (total * softmax - arcs[k]) * scales, 0.0)
            grad_ptr = durations.grad_ptr + nodes * K + k
            tl.store(grad_ptr, d.to(grad_ptr.dtype.element_ty), mask=mask)
