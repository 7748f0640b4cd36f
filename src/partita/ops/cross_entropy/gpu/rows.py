"""Cross-entropy of rows, with the gradient in a pass of its own; and the small kernels around it."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import apply_softcap, divide, exp_for_dtype, finite_shift, log_exact
from ....primitives.gpu.memory import edge_columns, store_streaming
from ....primitives.gpu.reduce import (
    broadcast_lanes,
    by_lane,
    lane_sum,
    merge_lanes,
    online_softmax,
    program_rows,
    row_pointers,
    unmasked_end,
)
from ....primitives.gpu.row_plan import (
    RowView,
    classes_per_program,
    elementwise_plan,
    merge_slots,
    reduce_options,
    reduce_plan_for,
    row_view,
    tile_options,
)
from ....primitives.gpu.sync import (
    arrives_last,
    load_partials,
    merge_normalizers,
    slot_base,
    store_partial,
)
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch
from ..common import RowLosses as RowValues
from .reduction import clear, labels_at


@triton.jit
def label_weights(label, ignore_index, classes, weight_ptr, smoothing, ACC_DTYPE: tl.constexpr):
    """Of each row: whether it counts, whether its label may index, and the weight on the label, NaN where the label is wrong."""
    kept = label != ignore_index
    valid = kept & (label >= 0) & (label < classes)
    on_label = tl.where(valid, 1.0 - smoothing, float("nan")).to(ACC_DTYPE)
    if weight_ptr is not None:
        on_label *= tl.load(weight_ptr + label, mask=valid, other=1.0).to(ACC_DTYPE)
    return kept, valid, tl.where(kept, on_label, 0.0)


@triton.jit
def smoothing_weights(
    probability,
    inside,
    weight_ptr,
    column,
    classes,
    smoothing,
    SPREAD: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """The weights that stand on no label: of smoothing (SPREAD 1), or of target probabilities (SPREAD 2). Zero outside of the row."""
    q = tl.where(inside, smoothing / classes, 0.0).to(ACC_DTYPE)
    if SPREAD == 2:
        q += probability * (1.0 - smoothing)
    if weight_ptr is not None:
        q *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(ACC_DTYPE)
    return q


@triton.jit
def exact_smoothing_weight(spread, smoothing, weight_ptr, SPREAD: tl.constexpr):
    """Their sum over a row: without class weights, that of smoothing is known better than a sum of many roundings."""
    if SPREAD == 1 and weight_ptr is None:
        return spread * 0.0 + smoothing
    else:
        return spread


@triton.jit
def shortfall(q, shift, x):
    """q (shift - x), and 0 where q is 0, whatever x is."""
    return tl.where(q == 0.0, 0.0, q * (shift - x))


@triton.jit
def class_gradient(e, x, factor, scaled_q, softcap, SPREAD: tl.constexpr, CAP: tl.constexpr):
    """Gradient of logits of rows that count: the pull of the softmax less the weights of the target, through the soft-cap."""
    grad = e * factor
    if SPREAD:
        grad -= scaled_q
    if CAP:
        grad *= 1.0 - (x / softcap) * (x / softcap)
    return grad


@triton.jit
def store_valid_rows(ptr, grad, inside, kept, STREAM: tl.constexpr):
    """Store the gradient of rows that count, and zeros in those that do not, whatever their logits: a select for each class would cost more."""
    store_streaming(ptr, grad, inside & kept, STREAM)
    store_streaming(ptr, tl.zeros_like(grad), inside & (kept == 0), STREAM)


@triton.jit
def label_gradient(
    label,
    label_x,
    valid,
    on_label,
    shift,
    factor,
    scale,
    weight_ptr,
    classes,
    smoothing,
    softcap,
    SPREAD: tl.constexpr,
    CAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """The same at the label. It is stored over that of the other classes: comparing every class with the label would cost registers."""
    weight = on_label
    if SPREAD:
        weight += smoothing_weights(on_label, valid, weight_ptr, label, classes, smoothing, 1, ACC_DTYPE)
    return class_gradient(
        exp_for_dtype(label_x - shift, ACC_DTYPE), label_x, factor, scale * weight, softcap, 1, CAP
    )


@triton.jit
def acc_logits(held, inside, softcap, CAP: tl.constexpr):
    """Soft-capped logits in fp32, -inf outside of the row."""
    x = held.to(tl.float32)
    if CAP:
        x = tl.where(inside, apply_softcap(x, softcap, CAP), -float("inf"))
    return x


@triton.jit
def absorb(
    maximum,
    total,
    spread,
    spread_loss,
    x_ptr,
    t_ptr,
    column,
    inside,
    weight_ptr,
    classes,
    smoothing,
    softcap,
    SPREAD: tl.constexpr,
    CAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Statistics of lanes, [ROWS, LANES] each, carried over a further block: maximum, sum, weights q, and sum of q (maximum - x)."""
    EXACT: tl.constexpr = LANES == 1 and x_ptr.dtype.element_ty == tl.float32
    x = tl.load(x_ptr, mask=inside, other=-float("inf")).to(ACC_DTYPE)
    if CAP:
        x = tl.where(inside, apply_softcap(x, softcap, CAP), -float("inf"))
    before = finite_shift(maximum)
    maximum, total = online_softmax(maximum, total, by_lane(x, LANES, VECTOR), EXACT)
    if SPREAD:
        probability = tl.load(t_ptr, mask=inside, other=0.0).to(ACC_DTYPE) if SPREAD == 2 else x
        q = by_lane(
            smoothing_weights(
                probability, inside, weight_ptr, column, classes, smoothing, SPREAD, ACC_DTYPE
            ),
            LANES,
            VECTOR,
        )
        shift = finite_shift(maximum)
        spread_loss += spread * (shift - before).to(tl.float64) + lane_sum(
            shortfall(q, broadcast_lanes(shift), by_lane(x, LANES, VECTOR)), EXACT
        )
        spread += lane_sum(q, EXACT)
    return maximum, total, spread, spread_loss


@triton.jit
def cross_entropy_kernel(
    logits_ptr,  # [batches, rows, classes]
    target_ptr,  # [batches, rows] labels, or [batches, rows, classes] probabilities
    weight_ptr,  # [classes] or None
    loss_ptr,  # [batches, rows]
    logsumexp_ptr,  # [batches, rows]
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    total_weight_ptr,  # [batches, rows]
    boxes_ptr,  # [batches, rows, 2, 1 + splits] int64, zero: the counter, then a box for each program
    words_ptr,  # [words] int64, to be zeroed, or None
    rows,
    classes,
    splits,
    span,
    words,
    x_batch,
    x_row,
    x_class,
    t_batch,
    t_row,
    t_class,
    ignore_index,
    smoothing: tl.float64,
    softcap: tl.float64,
    SPREAD: tl.constexpr,
    CAP: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Rows, or shares of a row, read once in blocks; the last program of a row merges the shares."""
    smoothing, softcap = tl.full([], smoothing, ACC_DTYPE), tl.full([], softcap, ACC_DTYPE)
    VECTOR: tl.constexpr = (
        1 if LANES == 1 else 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    )
    split, batch, row, start, head, body = program_rows(
        rows, splits, x_batch, x_row, classes, VEC, ROWS
    )
    source = row_pointers(logits_ptr, start, x_row, VEC, ROWS)
    maximum, total = (
        tl.full([ROWS, LANES], -float("inf"), ACC_DTYPE),
        tl.zeros([ROWS, LANES], tl.float64),
    )
    spread, spread_loss = tl.zeros([ROWS, LANES], tl.float64), tl.zeros([ROWS, LANES], tl.float64)
    place = batch * rows + row
    if SPREAD == 2:
        kept, on_label, label_x = row < rows, tl.zeros([ROWS], ACC_DTYPE), tl.zeros([ROWS], ACC_DTYPE)
    else:  # under way before anything waits for the row
        label = labels_at(target_ptr, place, row < rows, ignore_index)
        kept, valid, on_label = label_weights(
            label, ignore_index, classes, weight_ptr, smoothing, ACC_DTYPE
        )
        label_x = tl.load(
            logits_ptr + batch * x_batch + row * x_row + label * x_class,
            mask=valid & (row < rows),
            other=0.0,
        ).to(ACC_DTYPE)
        label_x = apply_softcap(label_x, softcap, CAP)
    if words_ptr is not None:
        clear(words_ptr, words, 64)
    t_start = target_ptr + batch * t_batch + row[:, None] * t_row
    last = tl.minimum((split + 1) * span, classes)
    whole = unmasked_end(split * span, last, body, BLOCK_V, LANES)
    for first in range(split * span, whole, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        maximum, total, spread, spread_loss = absorb(
            maximum,
            total,
            spread,
            spread_loss,
            source + column * x_class,
            t_start + (head + column) * t_class,
            head + column,
            tl.full([ROWS, BLOCK_V], True, tl.int1),
            weight_ptr,
            classes,
            smoothing,
            softcap,
            SPREAD,
            CAP,
            ACC_DTYPE,
            LANES,
            VECTOR,
        )
    for first in range(whole, last, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        inside = (row < rows)[:, None] & (column // VEC * VEC < body)
        maximum, total, spread, spread_loss = absorb(
            maximum,
            total,
            spread,
            spread_loss,
            source + column * x_class,
            t_start + (head + column) * t_class,
            head + column,
            inside,
            weight_ptr,
            classes,
            smoothing,
            softcap,
            SPREAD,
            CAP,
            ACC_DTYPE,
            LANES,
            VECTOR,
        )
    if VEC > 1:
        edge, at_edge = edge_columns(head, body, classes, VEC, LANES)  # [LANES]
        maximum, total, spread, spread_loss = absorb(
            maximum,
            total,
            spread,
            spread_loss,
            logits_ptr + start + edge[None, :],
            t_start + edge[None, :] * t_class,
            edge[None, :],
            (at_edge & (split == 0))[None, :],
            weight_ptr,
            classes,
            smoothing,
            softcap,
            SPREAD,
            CAP,
            ACC_DTYPE,
            LANES,
            1,
        )
    lane_shift = finite_shift(maximum)
    maximum, total, _ = merge_lanes(maximum, total)
    spread_loss = tl.sum(
        spread_loss + spread * (finite_shift(maximum)[:, None] - lane_shift).to(tl.float64), axis=1
    )
    spread = tl.sum(spread, axis=1)
    written = row < rows
    total, spread, spread_loss = total.to(ACC_DTYPE), spread.to(ACC_DTYPE), spread_loss.to(ACC_DTYPE)
    if SHARED:
        box = slot_base(boxes_ptr, 2 * tl.sum(place, axis=0), splits)
        second_box = box + splits + 1
        store_partial(second_box, split, tl.sum(spread, axis=0), tl.sum(spread_loss, axis=0))
        store_partial(box, split, tl.sum(maximum, axis=0), tl.sum(total, axis=0))
        written &= arrives_last(box, splits)
        maxima, sums, held = load_partials(box, splits, BLOCK_SPLITS)
        most, all_sums = merge_normalizers(maxima, sums, held)
        spreads, losses, _ = load_partials(second_box, splits, BLOCK_SPLITS)
        losses += spreads * (finite_shift(most) - finite_shift(maxima))
        spread = tl.zeros([ROWS], ACC_DTYPE) + tl.sum(tl.where(held, spreads, 0.0), axis=0)
        spread_loss = tl.zeros([ROWS], ACC_DTYPE) + tl.sum(tl.where(held, losses, 0.0), axis=0)
        maximum, total = tl.zeros([ROWS], ACC_DTYPE) + most, tl.zeros([ROWS], ACC_DTYPE) + all_sums
    shift = finite_shift(maximum)
    spread = exact_smoothing_weight(spread, smoothing, weight_ptr, SPREAD)
    log_total = log_exact(total)
    on_label_loss = on_label * (log_total + (shift - label_x)) if SPREAD != 2 else 0.0
    loss = on_label_loss + (spread * log_total + spread_loss if SPREAD else 0.0)
    tl.store(loss_ptr + place, tl.where(kept, loss, 0.0), mask=written)
    tl.store(logsumexp_ptr + place, tl.where(kept, shift + log_total, 0.0), mask=written)
    tl.store(maximum_ptr + place, maximum, mask=written)
    tl.store(sumexp_ptr + place, total, mask=written)
    tl.store(total_weight_ptr + place, tl.where(kept, on_label + spread, 0.0), mask=written)


@triton.jit
def cross_entropy_backward_kernel(
    grad_loss_ptr,  # [batches, rows]
    grad_logsumexp_ptr,  # [batches, rows]
    logits_ptr,  # [batches, rows, classes]
    target_ptr,  # [batches, rows] labels, or [batches, rows, classes] probabilities
    weight_ptr,  # [classes] or None
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    total_weight_ptr,  # [batches, rows]
    grad_ptr,  # [batches, rows, classes], which may be the logits
    rows,
    classes,
    x_batch,
    x_row,
    x_class,
    t_batch,
    t_row,
    t_class,
    grad_batch,
    grad_row,
    grad_class,
    ignore_index,
    smoothing: tl.float64,
    softcap: tl.float64,
    SPREAD: tl.constexpr,
    CAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A tile of the gradient from the rows' statistics: one read, one write."""
    smoothing, softcap = tl.full([], smoothing, ACC_DTYPE), tl.full([], softcap, ACC_DTYPE)
    spans = tl.cdiv(classes, BLOCK_V)
    block = tl.program_id(0) // spans
    batch = (block // tl.cdiv(rows, ROWS)).to(tl.int64)
    row = (block % tl.cdiv(rows, ROWS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    exists = row < rows
    place = batch * rows + row
    column = ((tl.program_id(0) % spans).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V))[
        None, :
    ]  # [1, BLOCK_V]
    inside = exists[:, None] & (column < classes)
    x = tl.load(
        logits_ptr + batch * x_batch + row[:, None] * x_row + column * x_class,
        mask=inside,
        other=-float("inf"),
    ).to(ACC_DTYPE)
    x = apply_softcap(x, softcap, CAP)
    g = tl.load(grad_loss_ptr + place, mask=exists, other=0.0).to(ACC_DTYPE)
    h = tl.load(grad_logsumexp_ptr + place, mask=exists, other=0.0).to(ACC_DTYPE)
    shift = finite_shift(tl.load(maximum_ptr + place, mask=exists, other=0.0))
    total = tl.load(sumexp_ptr + place, mask=exists, other=1.0)
    pull = g * tl.load(total_weight_ptr + place, mask=exists, other=0.0) + h
    probability = x
    if SPREAD == 2:
        kept = exists
        probability = tl.load(
            target_ptr + batch * t_batch + row[:, None] * t_row + column * t_class,
            mask=inside,
            other=0.0,
        ).to(ACC_DTYPE)
    else:
        label = labels_at(target_ptr, place, exists, ignore_index)
        kept, valid, on_label = label_weights(
            label, ignore_index, classes, weight_ptr, smoothing, ACC_DTYPE
        )
        mine = valid & exists & (label // BLOCK_V == tl.program_id(0) % spans)
        label_x = tl.load(
            logits_ptr + batch * x_batch + row * x_row + label * x_class, mask=mine, other=0.0
        ).to(ACC_DTYPE)
        label_x = apply_softcap(label_x, softcap, CAP)
    factor, scale = divide(pull, total), g
    q = (
        smoothing_weights(probability, inside, weight_ptr, column, classes, smoothing, SPREAD, ACC_DTYPE)
        if SPREAD
        else x
    )
    grad = class_gradient(
        exp_for_dtype(x - shift[:, None], grad_ptr.dtype.element_ty),
        x,
        factor[:, None],
        scale[:, None] * q,
        softcap,
        SPREAD,
        CAP,
    )
    grad_start = grad_ptr + batch * grad_batch + row * grad_row
    tl.debug_barrier()  # in place, the logit at the label must have been read by every warp before one writes over it
    store_valid_rows(grad_start[:, None] + column * grad_class, grad, inside, kept[:, None], False)
    if SPREAD != 2:
        at_label = label_gradient(
            label,
            label_x,
            mine,
            on_label,
            shift,
            factor,
            scale,
            weight_ptr,
            classes,
            smoothing,
            softcap,
            SPREAD,
            CAP,
            ACC_DTYPE,
        )
        tl.debug_barrier()
        tl.store(grad_start + label * grad_class, at_label.to(grad_ptr.dtype.element_ty), mask=mine)


def smoothing_mode(target: Tensor, label_smoothing: float) -> int:
    """Which weights stand on no label: none, those of smoothing, or those of target probabilities."""
    return 2 if target.is_floating_point() else 1 if label_smoothing else 0


def row_shape(logits: Tensor) -> list[int]:
    return [logits.shape[0], *logits.shape[2:]]


def view_of(logits: Tensor, target: Tensor, *outputs: Tensor) -> RowView | None:
    """Logits, target probabilities (the logits again where there are labels), and outputs as rows."""
    return row_view(1, logits, target if target.is_floating_point() else logits, *outputs)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    words: Tensor | None = None,
) -> RowValues:
    """Loss and statistics of the rows; `words`, for a later kernel, are zeroed on the way."""
    view = view_of(logits, target)
    if view is None:
        return cross_entropy(
            logits.contiguous(),
            target.contiguous(),
            weight,
            ignore_index,
            label_smoothing,
            softcap,
            words,
        )
    values = RowValues(
        *(
            logits.new_empty(row_shape(logits), dtype=acc_dtype(logits.dtype))
            for _ in RowValues._fields
        )
    )
    spread = smoothing_mode(target, label_smoothing)
    chosen = reduce_plan_for(view)
    programs = view.batches * cdiv(view.rows, chosen.rows) * chosen.splits
    labels = target if spread == 2 else target.contiguous()
    if programs == 0 and words is not None:
        words.zero_()
    tensors = (
        view.tensors[0],
        labels,
        weight,
        *values,
        merge_slots(view, chosen.splits, words=2),
        words,
    )
    sizes = (
        view.rows,
        view.classes,
        chosen.splits,
        classes_per_program(view, chosen),
        0 if words is None else words.numel(),
        *view.strides[0],
        *view.strides[1],
    )
    numbers = (ignore_index, label_smoothing, softcap)
    launch(
        cross_entropy_kernel,
        programs,
        *tensors,
        *sizes,
        *numbers,
        SPREAD=spread,
        CAP=softcap != 0,
        **reduce_options(chosen, view),
    )
    return values


def cross_entropy_backward(
    grad_loss: Tensor, grad_logsumexp: Tensor, logits: Tensor, target: Tensor, *args: Any
) -> Tensor:
    grad = torch.empty_like(logits)
    if not _backward(grad_loss, grad_logsumexp, logits, target, grad, *args):
        plain = torch.empty_like(logits, memory_format=torch.contiguous_format)
        _backward(grad_loss, grad_logsumexp, logits.contiguous(), target.contiguous(), plain, *args)
        grad.copy_(plain)
    return grad


def cross_entropy_backward_(
    grad_loss: Tensor, grad_logsumexp: Tensor, logits: Tensor, target: Tensor, *args: Any
) -> None:
    if not _backward(grad_loss, grad_logsumexp, logits, target, logits, *args):
        logits.copy_(cross_entropy_backward(grad_loss, grad_logsumexp, logits, target, *args))


def _backward(
    grad_loss: Tensor,
    grad_logsumexp: Tensor,
    logits: Tensor,
    target: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    maximum: Tensor,
    sumexp: Tensor,
    total_weight: Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
) -> bool:
    view = view_of(logits, target, grad)
    if view is None:
        return False
    spread = smoothing_mode(target, label_smoothing)
    chosen = elementwise_plan(view)
    programs = view.batches * cdiv(view.rows, chosen.rows) * cdiv(view.classes, chosen.block)
    labels = target if spread == 2 else target.contiguous()
    upstream = (grad_loss.contiguous(), grad_logsumexp.contiguous())
    statistics = (maximum.contiguous(), sumexp.contiguous(), total_weight.contiguous())
    tensors = (*upstream, logits, labels, weight, *statistics, grad)
    sizes = (view.rows, view.classes, *view.strides[0], *view.strides[1], *view.strides[2])
    numbers = (ignore_index, label_smoothing, softcap)
    launch(
        cross_entropy_backward_kernel,
        programs,
        *tensors,
        *sizes,
        *numbers,
        SPREAD=spread,
        CAP=softcap != 0,
        **tile_options(chosen, logits.dtype),
    )
    return True
