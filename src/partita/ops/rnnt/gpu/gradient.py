"""The gradient of a transducer's loss in the logits, from the posteriors of the arcs."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .lattice import SIZES
from .rows import edge_mask, exp_of_row, load_edges, load_piece, locate_rows, program_nodes


class NodeGradient(NamedTuple):
    """What the gradient of a node's row is made of; each field is `[ROWS]`.

    Fields:
        scale: the upstream gradient.
        factor: the factor of exp(x - lse).
        blank: what the blank's entry loses, or with HAT its gradient.
        label: what the label's entry loses.
        label_index: the column of the label.
        lse: the log-sum-exp, rounded to the dtype of the arithmetic.
        active: whether the gradient is not 0.
    """

    scale: tl.tensor
    factor: tl.tensor
    blank: tl.tensor
    label: tl.tensor
    label_index: tl.tensor
    lse: tl.tensor
    active: tl.tensor


@triton.jit
def sum_durations(posteriors_ptr, index, mask, size, K: tl.constexpr):
    """Return the sum over K durations of the posteriors of some nodes."""
    total = tl.load(posteriors_ptr + index, mask=mask, other=0.0)
    for k in tl.static_range(1, K):
        total += tl.load(posteriors_ptr + k * size + index, mask=mask, other=0.0)
    return total


@triton.jit
def row_gradient(x, column, blank, clamp, row, HAT: tl.constexpr, dtype: tl.constexpr):
    """Return the gradient of a block of columns; all of it is 0 in rows that are not active."""
    is_label, is_blank = column == row.label_index[:, None], column == blank
    label = tl.where(is_label, row.label[:, None], 0.0)
    grad = row.factor[:, None]
    if row.lse is not None:
        grad = grad * exp_of_row(x - row.lse[:, None], dtype)
        if HAT:
            grad = tl.where(is_blank, row.blank[:, None], grad - label)
        else:
            grad -= tl.where(is_blank, row.blank[:, None], label)
    else:
        grad = -tl.where(is_blank, row.blank[:, None], label)
    # NaN stays NaN.
    grad = tl.where(tl.abs(grad) > clamp, tl.where(grad > 0.0, clamp, -clamp), grad)
    return tl.where(row.active[:, None], grad * row.scale[:, None], 0.0).to(dtype)


@triton.jit
def load_row_gradient(
    grad_ptr,
    logits_ptr,
    lse_ptr,
    posteriors_ptr,
    targets_ptr,
    node,
    values,
    blank,
    fastemit,
    mask,
    B,
    T,
    U1,
    grad_stride,
    target_stride,
    stride_v,
    HAT: tl.constexpr,
    K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Return what the gradient of the rows is made of."""
    scale = tl.load(grad_ptr + (node.b + node.u * 0).to(tl.int64) * grad_stride).to(DTYPE)
    fastemit = tl.full([], fastemit, DTYPE)
    size = B.to(tl.int64) * T * U1
    read = mask & (scale != 0.0)
    pb = sum_durations(posteriors_ptr, node.index, read, size, K).to(DTYPE)
    pl = sum_durations(posteriors_ptr + K * size, node.index, read, size, K).to(DTYPE) * fastemit
    active = read & ((pb != 0.0) | (pl != 0.0))
    has_label = mask & (node.u < U1 - 1)
    at_label = targets_ptr + node.b.to(tl.int64) * target_stride + node.u
    label_index = tl.load(at_label, mask=has_label, other=-1).to(tl.int32)
    factor, rounded_lse = pb + pl, None
    if lse_ptr is not None:
        lse = tl.load(lse_ptr + node.index, mask=active, other=0.0)
        rounded_lse = lse.to(DTYPE)
        if HAT:
            at_blank = values.start + tl.cast(blank, tl.int64) * stride_v
            x = tl.load(logits_ptr + at_blank, mask=active, other=0.0).to(DTYPE)
            pb, factor = factor / (1.0 + tl.exp(-x)) - pb, pl
        # The difference that rounding makes is small, so its exponential has two terms.
        factor *= 1.0 + (rounded_lse.to(tl.float64) - lse.to(tl.float64)).to(DTYPE)
    return NodeGradient(scale, factor, pb, pl, label_index, rounded_lse, active)


@triton.jit(do_not_specialize=SIZES)
def rnnt_gradient_kernel(
    grad_ptr,  # [B]
    logits_ptr,  # [B, T, U1, V], or those of some steps
    lse_ptr,  # [B, T, U1], or None for log-probabilities
    posteriors_ptr,  # [2, K, B, T, U1]
    targets_ptr,  # [B, U]
    dlogits_ptr,  # as logits, which it may be
    first_step,  # the first step in `logits`, counted over all sequences
    T,
    B,
    U1,
    V,
    blank,
    clamp,  # greatest absolute value of a gradient, or inf
    fastemit,  # 1 + the factor of FastEmit
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
    K: tl.constexpr,  # durations
    VEC: tl.constexpr,
    EDGES: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Write the gradient of the rows of some nodes; rows whose gradient is 0 are not read."""
    dtype: tl.constexpr = dlogits_ptr.dtype.element_ty
    node = program_nodes(first_step, T, U1, ROWS)
    mask = node.u < U1
    values = locate_rows(node, first_step, T, V, stride_b, stride_t, stride_u, VEC, EDGES)
    results = locate_rows(node, first_step, T, V, d_stride_b, d_stride_t, d_stride_u, VEC, EDGES)
    row = load_row_gradient(
        grad_ptr,
        logits_ptr,
        lse_ptr,
        posteriors_ptr,
        targets_ptr,
        node,
        values,
        blank,
        fastemit,
        mask,
        B,
        T,
        U1,
        grad_stride,
        target_stride,
        stride_v,
        HAT,
        K,
        DTYPE,
    )
    clamp = tl.full([], clamp, DTYPE)
    if HAT:
        # The gradient may replace the logits, so all warps must have read that of the blank.
        tl.debug_barrier()
    if EDGES:
        edge_x, edge_column, _ = load_edges(logits_ptr, values, row.active, V, VEC, DTYPE)
        edge_d = row_gradient(edge_x, edge_column, blank, clamp, row, HAT, dtype)
        edge_column, edge = edge_mask(values, mask, V, VEC)
        tl.store(dlogits_ptr + results.start[:, None] + edge_column, edge_d, mask=edge)
    for first in range(0, V, PIECES * BLOCK_V):
        pieces = ()
        for i in tl.static_range(PIECES):
            column = first + i * BLOCK_V + tl.arange(0, BLOCK_V)
            read = row.active if lse_ptr is not None else row.active & False
            x = load_piece(logits_ptr, values, column, read, stride_v, VEC, DTYPE)
            pieces = pieces + (x,)
        for i in tl.static_range(PIECES):
            column = first + i * BLOCK_V + tl.arange(0, BLOCK_V)
            at = values.head[:, None] + column[None, :]
            d = row_gradient(pieces[i], at, blank, clamp, row, HAT, dtype)
            inside = mask[:, None] & (column[None, :] // VEC * VEC < results.columns[:, None])
            offset = results.body[:, None] + column[None, :].to(tl.int64) * d_stride_v
            tl.store(dlogits_ptr + offset, d, mask=inside)
