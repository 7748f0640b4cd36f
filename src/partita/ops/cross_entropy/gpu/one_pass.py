"""Cross-entropy: loss and gradient of a row in one pass."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import (
    apply_softcap,
    divide,
    exp,
    exp_for_dtype,
    finite_shift,
    log_exact,
    reciprocal,
    sum_for_dtype,
)
from ....primitives.gpu.memory import (
    aligned_start,
    edge_columns,
    load_streaming,
    opaque,
    row_span,
    store_streaming,
)
from ....primitives.gpu.row_plan import exchange_words, row_options, row_plan_for, tile_options
from ....primitives.gpu.sync import exchange_normalizer, exchange_pairs
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch
from ..common import OnePass
from .reduction import (
    SHARES,
    SUM_WORDS,
    labels_at,
    mean_denominators,
    reduce_losses,
    scale_,
    whole_of,
)
from .rows import (
    acc_logits,
    class_gradient,
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_backward_,
    exact_smoothing_weight,
    label_gradient,
    label_weights,
    row_shape,
    shortfall,
    smoothing_mode,
    smoothing_weights,
    store_valid_rows,
    view_of,
)

__all__ = [
    "cross_entropy",
    "cross_entropy_backward",
    "cross_entropy_backward_",
    "cross_entropy_one_pass",
    "cross_entropy_one_pass_",
    "cross_entropy_reduced",
    "scale_",
]


@triton.jit
def mean_scales(shares_ptr, MEAN: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """What the loss and the z-loss of a row are multiplied by."""
    if MEAN:
        return reciprocal(whole_of(shares_ptr, 0, ACC_DTYPE)), reciprocal(whole_of(shares_ptr, 1, ACC_DTYPE))
    else:
        return tl.full([], 1.0, ACC_DTYPE), tl.full([], 1.0, ACC_DTYPE)


@triton.jit
def row_factor(on_label, spread, shift, total, scale, z_scale, z_loss, Z: tl.constexpr):
    """Of rows: the factor of exp(x - shift) in the gradient."""
    pull = scale * (on_label + spread)
    if Z:
        pull += 2.0 * z_loss * (shift + log_exact(total)) * z_scale
    return divide(pull, total)


@triton.jit
def row_loss(
    kept,
    on_label,
    label_x,
    spread,
    spread_loss,
    shift,
    total,
    scale,
    z_scale,
    z_loss,
    SPREAD: tl.constexpr,
    Z: tl.constexpr,
):
    """Of rows: the loss. It is computed while the gradient is on its way to memory."""
    log_total = log_exact(total)
    loss = on_label * (log_total + (shift - label_x))
    if SPREAD:
        loss += spread * log_total + spread_loss
    if Z:
        logsumexp = shift + log_total
        loss += z_loss * logsumexp * logsumexp * (z_scale / scale)
    return tl.where(kept, loss, 0.0)


@triton.jit
def cross_entropy_tile_kernel(
    logits_ptr,  # [batches, rows, classes]
    target_ptr,  # [batches, rows] labels, or [batches, rows, classes] probabilities
    weight_ptr,  # [classes] or None
    shares_ptr,  # [2, SHARES] of what the mean divides by, or None
    loss_ptr,  # [batches, rows], or [] where one program has all rows
    grad_ptr,  # [batches, rows, classes]
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
    z_loss: tl.float64,
    SPREAD: tl.constexpr,
    CAP: tl.constexpr,
    Z: tl.constexpr,
    MEAN: tl.constexpr,
    ALONE: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Whole rows in one tile: one read of the logits, one write of their gradient. A program that is ALONE reduces the loss too."""
    smoothing, softcap, z_loss = (
        tl.full([], smoothing, ACC_DTYPE),
        tl.full([], softcap, ACC_DTYPE),
        tl.full([], z_loss, ACC_DTYPE),
    )
    blocks = tl.cdiv(rows, ROWS)
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK_V).to(tl.int64)[None, :]  # [1, BLOCK_V]
    inside = (row < rows)[:, None] & (column < classes)  # [ROWS, BLOCK_V]
    start = logits_ptr + batch * x_batch + row * x_row  # [ROWS]
    x = tl.load(start[:, None] + column * x_class, mask=inside, other=-float("inf")).to(ACC_DTYPE)
    place = batch * rows + row
    if SPREAD != 2:  # what comes from elsewhere is under way before anything waits for the row
        label = labels_at(target_ptr, place, row < rows, ignore_index)
        kept, valid, on_label = label_weights(
            label, ignore_index, classes, weight_ptr, smoothing, ACC_DTYPE
        )
        label_x = apply_softcap(
            tl.load(start + label * x_class, mask=valid, other=0.0).to(ACC_DTYPE), softcap, CAP
        )
    mean_scale, z_scale = mean_scales(shares_ptr, MEAN and not ALONE, ACC_DTYPE)
    if CAP:
        x = tl.where(inside, apply_softcap(x, softcap, CAP), -float("inf"))
    shift = finite_shift(tl.max(x, axis=1))
    e = exp_for_dtype(x - shift[:, None], grad_ptr.dtype.element_ty)
    total = sum_for_dtype(e, 1, grad_ptr.dtype.element_ty)
    probability = x
    if SPREAD == 2:
        kept, on_label, label_x = row < rows, tl.zeros([ROWS], ACC_DTYPE), shift
        probability = tl.load(
            target_ptr + batch * t_batch + row[:, None] * t_row + column * t_class,
            mask=inside,
            other=0.0,
        ).to(ACC_DTYPE)
    q, spread, spread_loss = x, tl.zeros([ROWS], ACC_DTYPE), tl.zeros([ROWS], ACC_DTYPE)
    if SPREAD:
        q = smoothing_weights(
            probability, inside, weight_ptr, column, classes, smoothing, SPREAD, ACC_DTYPE
        )
        spread = sum_for_dtype(q, 1, grad_ptr.dtype.element_ty)
        spread_loss = sum_for_dtype(shortfall(q, shift[:, None], x), 1, grad_ptr.dtype.element_ty)
        spread = exact_smoothing_weight(spread, smoothing, weight_ptr, SPREAD)
    if ALONE and MEAN:
        count = tl.sum((kept & (row < rows)).to(ACC_DTYPE), axis=0)
        weights = count
        if weight_ptr is not None and SPREAD != 2:
            weights = tl.sum(
                tl.load(weight_ptr + label, mask=valid & (row < rows), other=0.0).to(ACC_DTYPE), axis=0
            )
        mean_scale, z_scale = reciprocal(weights), reciprocal(count)
    factor = row_factor(on_label, spread, shift, total, mean_scale, z_scale, z_loss, Z)
    grad = class_gradient(e, x, factor[:, None], mean_scale * q, softcap, SPREAD, CAP)
    grad_start = grad_ptr + batch * grad_batch + row * grad_row
    tl.debug_barrier()  # in place, the logit at the label must have been read by every warp before one writes over it
    store_valid_rows(grad_start[:, None] + column * grad_class, grad, inside, kept[:, None], False)
    loss = row_loss(
        kept,
        on_label,
        label_x,
        spread,
        spread_loss,
        shift,
        total,
        mean_scale,
        z_scale,
        z_loss,
        SPREAD,
        Z,
    )
    if ALONE:
        reduced = tl.sum(tl.where(row < rows, loss, 0.0), axis=0)
        tl.store(
            loss_ptr, (divide(reduced, weights) if MEAN else reduced).to(loss_ptr.dtype.element_ty)
        )
    else:
        tl.store(loss_ptr + place, loss, mask=row < rows)
    if SPREAD != 2:
        at_label = label_gradient(
            label,
            label_x,
            valid,
            on_label,
            shift,
            factor,
            mean_scale,
            weight_ptr,
            classes,
            smoothing,
            softcap,
            SPREAD,
            CAP,
            ACC_DTYPE,
        )
        tl.debug_barrier()
        tl.store(
            grad_start + label * grad_class,
            at_label.to(grad_ptr.dtype.element_ty),
            mask=valid & (row < rows),
        )


@triton.jit
def row_part(
    held,
    row_ptr,
    inside,
    head,
    body,
    classes,
    split,
    softcap,
    zero,
    dtype: tl.constexpr,
    CAP: tl.constexpr,
    HALF: tl.constexpr,
    VEC: tl.constexpr,
):
    """Of what a program holds of a row: that itself, as logits and as exponentials, maximum, shift and sum; and the classes at the row's edges, where it
    has them: columns, which they are, and logits."""
    x = acc_logits(held, inside, softcap, CAP)
    maximum = tl.max(x, axis=0)
    edge, at_edge, edge_x = 0, False, 0.0
    if VEC > 1:
        edge, at_edge = edge_columns(head, body, classes, VEC, 2 * VEC)  # [2 * VEC]
        at_edge &= split == 0
        edge_x = acc_logits(
            tl.load(row_ptr + edge, mask=at_edge, other=-float("inf")), at_edge, softcap, CAP
        )
        maximum = tl.maximum(maximum, tl.max(edge_x, axis=0))
    if HALF:
        held = opaque(held, tl.full(held.shape, zero, tl.float32).to(held.dtype))
        x = acc_logits(held, inside, softcap, CAP)
    part = finite_shift(maximum)
    e = exp_for_dtype(x - part, dtype)
    total = sum_for_dtype(e, 0, dtype)
    if VEC > 1:
        total += tl.sum(exp(edge_x - part), axis=0)
    return held, x, e, maximum, part, total, edge, at_edge, edge_x


@triton.jit
def cross_entropy_row_kernel(
    logits_ptr,  # [rows, classes]
    target_ptr,  # [rows] labels
    weight_ptr,  # [classes] or None
    shares_ptr,  # [2, SHARES] of what the mean divides by, or None
    boxes_ptr,  # [1 + 2 * rows * splits] int64, zero: the ticket, then two boxes for each program
    loss_ptr,  # [rows]
    grad_ptr,  # [rows, classes]
    classes,
    splits,
    x_row,
    grad_row,
    ignore_index,
    smoothing: tl.float64,
    softcap: tl.float64,
    z_loss: tl.float64,
    zero,  # 0.0
    SPREAD: tl.constexpr,
    CAP: tl.constexpr,
    Z: tl.constexpr,
    MEAN: tl.constexpr,
    HALF: tl.constexpr,
    SHARED: tl.constexpr,
    STREAM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A row, or the part of a row that one of several programs holds: one read and one write at any width and alignment."""
    smoothing, softcap, z_loss = (
        tl.full([], smoothing, tl.float32),
        tl.full([], softcap, tl.float32),
        tl.full([], z_loss, tl.float32),
    )
    place = tl.atomic_add(boxes_ptr, 1, sem="relaxed") if SHARED else tl.program_id(0).to(tl.int64)
    row, split = place // splits, (place % splits).to(tl.int32)
    head, body = row_span(row * x_row, classes, VEC)
    column = split * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    inside = column // VEC * VEC < body
    held = load_streaming(
        logits_ptr + aligned_start(row * x_row, VEC) + column, inside, -float("inf"), STREAM
    )
    mean_scale, z_scale = mean_scales(shares_ptr, MEAN, tl.float32)
    label = tl.load(target_ptr + row).to(tl.int64)
    kept, valid, on_label = label_weights(
        label, ignore_index, classes, weight_ptr, smoothing, tl.float32
    )
    owner = (
        tl.where(valid & (label >= head) & (label < head + body), (label - head) // BLOCK_V, 0)
        == split
    )
    label_x = apply_softcap(
        tl.load(logits_ptr + row * x_row + label, mask=valid & owner, other=0.0).to(tl.float32),
        softcap,
        CAP,
    )
    dtype: tl.constexpr = grad_ptr.dtype.element_ty
    held, x, e, maximum, part, total, edge, at_edge, edge_x = row_part(
        held,
        logits_ptr + row * x_row,
        inside,
        head,
        body,
        classes,
        split,
        softcap,
        zero,
        dtype,
        CAP,
        HALF,
        VEC,
    )
    q, edge_q, spread, spread_loss = x, 0.0, 0.0, 0.0
    shift = part
    if SHARED:
        box = boxes_ptr + 1 + row * splits
        shift, total = exchange_normalizer(box, split, splits, maximum, total, BLOCK_SPLITS)
    if SPREAD:
        q = smoothing_weights(
            0.0, inside, weight_ptr, head + column, classes, smoothing, SPREAD, tl.float32
        )
        spread, spread_loss = tl.sum(q, axis=0), tl.sum(shortfall(q, shift, x), axis=0)
        if VEC > 1:
            edge_q = smoothing_weights(
                0.0, at_edge, weight_ptr, edge, classes, smoothing, SPREAD, tl.float32
            )
            spread += tl.sum(edge_q, axis=0)
            spread_loss += tl.sum(shortfall(edge_q, shift, edge_x), axis=0)
        if SHARED:
            lane = tl.arange(0, BLOCK_SPLITS)
            all_spread, all_loss = exchange_pairs(
                box + tl.num_programs(0), split, splits, spread, spread_loss, BLOCK_SPLITS
            )
            spread, spread_loss = (
                tl.sum(tl.where(lane < splits, all_spread, 0.0), axis=0),
                tl.sum(tl.where(lane < splits, all_loss, 0.0), axis=0),
            )
    spread = exact_smoothing_weight(spread, smoothing, weight_ptr, SPREAD)
    factor = row_factor(on_label, spread, shift, total, mean_scale, z_scale, z_loss, Z)
    if HALF:
        x = acc_logits(
            opaque(held, tl.full([BLOCK_V], zero, tl.float32).to(held.dtype)), inside, softcap, CAP
        )
        e, factor_held = exp(x - shift), factor
    else:
        factor_held = factor * exp_for_dtype(part - shift, dtype)
    grad = class_gradient(e, x, factor_held, mean_scale * q, softcap, SPREAD, CAP)
    if kept:  # one branch for the row costs less than a select for each class
        store_streaming(
            grad_ptr + aligned_start(row * grad_row, VEC) + column, grad, inside, STREAM
        )
    else:
        store_streaming(
            grad_ptr + aligned_start(row * grad_row, VEC) + column,
            tl.zeros_like(grad),
            inside,
            STREAM,
        )
    if VEC > 1:
        edge_grad = class_gradient(
            exp_for_dtype(edge_x - shift, dtype),
            edge_x,
            factor,
            mean_scale * edge_q,
            softcap,
            SPREAD,
            CAP,
        )
        store_valid_rows(grad_ptr + row * grad_row + edge, edge_grad, at_edge, kept, False)
    loss = row_loss(
        kept,
        on_label,
        label_x,
        spread,
        spread_loss,
        shift,
        total,
        mean_scale,
        z_scale,
        z_loss,
        SPREAD,
        Z,
    )
    tl.store(loss_ptr + row, loss, mask=owner)
    at_label = label_gradient(
        label,
        label_x,
        valid,
        on_label,
        shift,
        factor,
        mean_scale,
        weight_ptr,
        classes,
        smoothing,
        softcap,
        SPREAD,
        CAP,
        tl.float32,
    )
    tl.debug_barrier()
    tl.store(
        grad_ptr + row * grad_row + label,
        at_label.to(grad_ptr.dtype.element_ty),
        mask=valid & owner,
    )


def cross_entropy_one_pass(logits: Tensor, *args: Any) -> OnePass:
    grad = torch.empty_like(logits)
    return OnePass(_one_pass(logits, grad, *args), grad)


def cross_entropy_one_pass_(logits: Tensor, *args: Any) -> Tensor:
    return _one_pass(logits, logits, *args)


def one_pass_of_chunk(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    mean: bool,
    shares: Tensor | None,
) -> Tensor:
    """The same, in place, of some rows of many: the shares are of what a mean of all divides by."""
    numbers = (ignore_index, label_smoothing, softcap, z_loss, mean)
    return _one_pass(
        logits, logits, target, weight, *numbers, acc_dtype(logits.dtype), shares, part=True
    )


def _one_pass(
    logits: Tensor,
    grad: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    mean: bool,
    dtype: torch.dtype,
    shares: Tensor | None = None,
    part: bool = False,
) -> Tensor:
    spread = smoothing_mode(target, label_smoothing)
    numbers = (ignore_index, label_smoothing, softcap, z_loss)
    view = view_of(logits, target, grad)
    chosen = None if view is None else row_plan_for(view, patched=True)
    labels = target if spread == 2 else target.contiguous()
    flags = {"SPREAD": spread, "CAP": softcap != 0, "Z": z_loss != 0, "MEAN": mean}
    if (
        view is not None
        and chosen is not None
        and chosen.kind == "tile"
        and view.batches == 1
        and 0 < view.rows <= chosen.rows
        and not part
    ):
        sizes = (view.rows, view.classes, *view.strides[0], *view.strides[1], *view.strides[2])
        result = logits.new_empty((), dtype=dtype)
        tensors = (logits, labels, weight, None, result, grad)
        launch(
            cross_entropy_tile_kernel,
            1,
            *tensors,
            *sizes,
            *numbers,
            **flags,
            ALONE=True,
            **tile_options(chosen, logits.dtype),
        )
        return result
    if (
        view is None
        or chosen is None
        or chosen.kind == "loop"
        or (chosen.kind == "row" and spread == 2)
    ):
        words, shares = _prepared(
            logits, target, weight, ignore_index, mean and not part, shares=shares
        )
        return reduce_losses(
            _two_passes(logits, target, grad, weight, shares, *numbers), words, dtype, shares=shares
        )
    boxes = exchange_words(view, chosen.splits, words=2 if spread else 1)
    words, shares = _prepared(
        logits, target, weight, ignore_index, mean and not part, boxes, shares
    )
    loss = logits.new_empty(row_shape(logits), dtype=acc_dtype(logits.dtype))
    args: tuple[Any, ...] = (logits, labels, weight, shares)
    if chosen.kind == "row":
        args += (
            words[SUM_WORDS:],
            loss,
            grad,
            view.classes,
            chosen.splits,
            view.strides[0][1],
            view.strides[2][1],
        )
        launch(
            cross_entropy_row_kernel,
            view.rows * chosen.splits,
            *args,
            *numbers,
            0.0,
            **flags,
            **row_options(chosen, logits.dtype),
        )
    else:
        args += (
            loss,
            grad,
            view.rows,
            view.classes,
            *view.strides[0],
            *view.strides[1],
            *view.strides[2],
        )
        programs = view.batches * cdiv(view.rows, chosen.rows)
        launch(
            cross_entropy_tile_kernel,
            programs,
            *args,
            *numbers,
            **flags,
            ALONE=False,
            **tile_options(chosen, logits.dtype),
        )
    return reduce_losses(loss, words, dtype, shares=shares)


def _prepared(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    mean: bool,
    boxes: int = 0,
    shares: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Zeroed words for the total and, behind them, for the boxes; and the shares of what a mean divides by, where it is not told them."""
    words = torch.empty(SUM_WORDS + boxes, dtype=torch.int64, device=logits.device)
    if mean and not target.is_floating_point():
        return words, mean_denominators(target, weight, ignore_index, logits.shape[1], words)
    return words.zero_(), equal_shares(logits) if mean else shares


def equal_shares(logits: Tensor) -> Tensor:
    """Shares of the number of rows, by which a mean over target probabilities divides."""
    return torch.full(
        (2, SHARES),
        math.prod(row_shape(logits)) / SHARES,
        dtype=acc_dtype(logits.dtype),
        device=logits.device,
    )


def cross_entropy_reduced(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    mean: bool,
    dtype: torch.dtype,
) -> Tensor:
    words = torch.empty(SUM_WORDS, dtype=torch.int64, device=logits.device)
    loss = cross_entropy(logits, target, weight, ignore_index, label_smoothing, softcap, words).loss
    if not mean:
        return reduce_losses(loss, words, dtype)
    if target.is_floating_point():
        return reduce_losses(loss, words, dtype, shares=equal_shares(logits))
    return reduce_losses(
        loss,
        words,
        dtype,
        target=target,
        weight=weight,
        ignore_index=ignore_index,
        classes=logits.shape[1],
    )


def _two_passes(
    logits: Tensor,
    target: Tensor,
    grad: Tensor,
    weight: Tensor | None,
    shares: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
) -> Tensor:
    """The same where a row fits no tile: statistics of the rows, then their gradient."""
    rows = cross_entropy(logits, target, weight, ignore_index, label_smoothing, softcap)
    scale, z_scale = (
        (1.0, 1.0) if shares is None else shares.sum(1).to(rows.loss.dtype).reciprocal().unbind()
    )
    upstream = torch.ones_like(rows.loss) * scale, 2 * z_loss * rows.logsumexp * z_scale
    statistics = (rows.maximum, rows.sumexp, rows.total_weight)
    numbers = (ignore_index, label_smoothing, softcap)
    if grad.data_ptr() == logits.data_ptr():
        cross_entropy_backward_(*upstream, logits, target, weight, *statistics, *numbers)
    else:
        grad.copy_(cross_entropy_backward(*upstream, logits, target, weight, *statistics, *numbers))
    return rows.loss + z_loss * rows.logsumexp.square() * (z_scale / scale) if z_loss else rows.loss
