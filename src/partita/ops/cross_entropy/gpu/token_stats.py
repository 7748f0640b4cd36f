"""Token statistics: one read of the logits, and the backward pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import LN2, LOG2E, finite_shift, log_exact, reciprocal
from ....primitives.gpu.memory import edge_columns
from ....primitives.gpu.reduce import (
    broadcast_lanes,
    by_lane,
    lane_max,
    lane_sum,
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
    row_view_or_copy,
    tile_options,
    with_output,
)
from ....primitives.gpu.sync import arrives_last, load_partials, slot_base, store_partial
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch
from ..token_stats_reference import Stats
from .reduction import labels_at


@triton.jit
def accumulate_stats(
    maximum, total, surprise, best, x, block, slope, LANES: tl.constexpr, VECTOR: tl.constexpr
):
    """Statistics of lanes, [ROWS, LANES] each, carried over a further block x, [ROWS, BLOCK]: maximum, sum of e, sum of e log2 e, and the
    first block in which the maximum was met. Here e = 2 ** (slope (x - maximum))."""
    x = by_lane(x, LANES, VECTOR)
    block_maximum = lane_max(x)
    best = tl.where(block_maximum > maximum, block, best).to(tl.int32)
    higher = tl.maximum(maximum, block_maximum)
    shift = finite_shift(higher)
    scale = tl.exp2((maximum - shift) * slope).to(tl.float64)
    surprise = scale * (surprise - total * ((shift - finite_shift(maximum)) * slope).to(tl.float64))
    exponent = (x - broadcast_lanes(shift)) * slope
    e = tl.exp2(exponent)
    surprise += lane_sum(
        e * tl.maximum(exponent, -10000.0), False
    )  # where e is 0, so is its part, also at -inf
    return higher, total * scale + lane_sum(e, False), surprise, best


@triton.jit
def first_place(x, column, maximum):
    """The lowest column at which x, [ROWS, BLOCK], is the maximum of its row; one beyond all where it is nowhere."""
    return tl.min(tl.where(x == maximum[:, None], column, 0x7FFFFFFF), axis=1)


@triton.jit
def token_stats_kernel(
    logits_ptr,  # [batches, rows, classes]
    target_ptr,  # [batches, rows]
    logprob_ptr,  # [batches, rows]
    logsumexp_ptr,  # [batches, rows]
    entropy_ptr,  # [batches, rows]
    argmax_ptr,  # [batches, rows]
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    boxes_ptr,  # [batches, rows, 2, 1 + splits] int64, zero: the counter, then a box for each program
    rows,
    classes,
    splits,
    span,
    x_batch,
    x_row,
    x_class,
    temperature: tl.float64,
    ignore_index,
    SHARED: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Rows, or shares of a row, read once in blocks; the last program of a row merges the shares."""
    temperature = tl.full([], temperature, ACC_DTYPE)
    slope = tl.full([], LOG2E, ACC_DTYPE) / temperature
    VECTOR: tl.constexpr = (
        1 if LANES == 1 else 128 // logits_ptr.dtype.element_ty.primitive_bitwidth
    )
    split, batch, row, start, head, body = program_rows(
        rows, splits, x_batch, x_row, classes, VEC, ROWS
    )
    source = row_pointers(logits_ptr, start, x_row, VEC, ROWS)
    maximum, best = tl.full([ROWS, LANES], -float("inf"), ACC_DTYPE), tl.zeros([ROWS, LANES], tl.int32)
    total, surprise = tl.zeros([ROWS, LANES], tl.float64), tl.zeros([ROWS, LANES], tl.float64)
    place = batch * rows + row
    label = labels_at(
        target_ptr, place, row < rows, ignore_index
    )  # under way before anything waits for the row
    kept = label != ignore_index
    valid = kept & (label >= 0) & (label < classes)
    label_x = tl.load(
        logits_ptr + batch * x_batch + row * x_row + label * x_class,
        mask=valid & (row < rows),
        other=0.0,
    ).to(ACC_DTYPE)
    last = tl.minimum((split + 1) * span, classes)
    whole = unmasked_end(split * span, last, body, BLOCK_V, LANES)
    for first in range(split * span, whole, BLOCK_V):
        x = tl.load(source + (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :] * x_class).to(
            ACC_DTYPE
        )
        maximum, total, surprise, best = accumulate_stats(
            maximum, total, surprise, best, x, first // BLOCK_V, slope, LANES, VECTOR
        )
    for first in range(whole, last, BLOCK_V):
        column = (first + tl.arange(0, BLOCK_V).to(tl.int64))[None, :]  # [1, BLOCK_V]
        inside = (row < rows)[:, None] & (column // VEC * VEC < body)
        x = tl.load(source + column * x_class, mask=inside, other=-float("inf")).to(ACC_DTYPE)
        maximum, total, surprise, best = accumulate_stats(
            maximum, total, surprise, best, x, first // BLOCK_V, slope, LANES, VECTOR
        )
    if VEC > 1:
        edge, at_edge = edge_columns(head, body, classes, VEC, LANES)  # [LANES]
        edge_x = tl.load(
            logits_ptr + start + edge[None, :],
            mask=(at_edge & (split == 0))[None, :],
            other=-float("inf"),
        ).to(ACC_DTYPE)
        maximum, total, surprise, best = accumulate_stats(
            maximum, total, surprise, best, edge_x, 0x3FFFFFFF, slope, LANES, 1
        )
    lane_maximum = maximum
    maximum = tl.max(lane_maximum, axis=1)
    shift = finite_shift(maximum)
    scale = tl.exp2((lane_maximum - shift[:, None]) * slope).to(tl.float64)
    surprise = tl.sum(
        scale
        * (
            surprise
            - total * ((shift[:, None] - finite_shift(lane_maximum)) * slope).to(tl.float64)
        ),
        axis=1,
    )
    total = tl.sum(total * scale, axis=1)
    best = tl.min(
        tl.where(lane_maximum == maximum[:, None], best, 0x3FFFFFFF), axis=1
    )  # the first block that has the maximum, read again
    first_block = (tl.sum(best, axis=0) if ROWS == 1 else best[:, None]).to(tl.int64)
    column = first_block * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]  # [ROWS, BLOCK_V]
    x = tl.load(
        source + column * x_class,
        mask=(row < rows)[:, None] & (column // VEC * VEC < body),
        other=-float("inf"),
    ).to(ACC_DTYPE)
    best = first_place(x, (head + column).to(tl.int32), maximum)
    if VEC > 1:
        best = tl.minimum(
            best,
            first_place(edge_x, tl.where(at_edge, edge, 0x7FFFFFFF).to(tl.int32)[None, :], maximum),
        )
    written = row < rows
    total, surprise = total.to(ACC_DTYPE), surprise.to(ACC_DTYPE)
    if SHARED:
        box = slot_base(boxes_ptr, 2 * tl.sum(place, axis=0), splits)
        second_box = box + splits + 1
        store_partial(
            second_box,
            split,
            tl.sum(surprise, axis=0),
            tl.sum(best, axis=0).to(tl.float32, bitcast=True),
        )
        store_partial(box, split, tl.sum(maximum, axis=0), tl.sum(total, axis=0))
        written &= arrives_last(box, splits)
        maxima, sums, held = load_partials(box, splits, BLOCK_SPLITS)
        surprises, places, _ = load_partials(second_box, splits, BLOCK_SPLITS)
        most = tl.max(tl.where(held, maxima, -float("inf")), axis=0)
        shift = finite_shift(most)
        scales = tl.where(held, tl.exp2((maxima - shift) * slope), 0.0)
        parts = tl.where(
            held, scales * (surprises - sums * (shift - finite_shift(maxima)) * slope), 0.0
        )
        nearest = tl.min(
            tl.where(held & (maxima == most), places.to(tl.int32, bitcast=True), 0x7FFFFFFF), axis=0
        )
        maximum, surprise = (
            tl.zeros([ROWS], ACC_DTYPE) + most,
            tl.zeros([ROWS], ACC_DTYPE) + tl.sum(parts, axis=0),
        )
        total = tl.zeros([ROWS], ACC_DTYPE) + tl.sum(tl.where(held, scales * sums, 0.0), axis=0)
        best = tl.zeros([ROWS], tl.int32) + nearest
    spoiled = tl.where(kept & (valid == 0), float("nan"), 0.0).to(ACC_DTYPE)
    shift, log_total = finite_shift(maximum), log_exact(total)
    tl.store(
        logprob_ptr + place,
        tl.where(kept, (label_x - shift) / temperature - log_total, 0.0) + spoiled,
        mask=written,
    )
    tl.store(logsumexp_ptr + place, shift / temperature + log_total + spoiled, mask=written)
    tl.store(entropy_ptr + place, log_total - LN2 * surprise / total + spoiled, mask=written)
    tl.store(argmax_ptr + place, tl.minimum(best, classes - 1).to(tl.int64), mask=written)
    tl.store(maximum_ptr + place, maximum, mask=written)
    tl.store(sumexp_ptr + place, total, mask=written)


@triton.jit
def token_stats_backward_kernel(
    grad_logprob_ptr,  # [batches, rows]
    grad_logsumexp_ptr,  # [batches, rows]
    grad_entropy_ptr,  # [batches, rows]
    logits_ptr,  # [batches, rows, classes]
    target_ptr,  # [batches, rows]
    maximum_ptr,  # [batches, rows]
    sumexp_ptr,  # [batches, rows]
    entropy_ptr,  # [batches, rows]
    grad_ptr,  # [batches, rows, classes]
    rows,
    classes,
    x_batch,
    x_row,
    x_class,
    grad_batch,
    grad_row,
    grad_class,
    temperature: tl.float64,
    ignore_index,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """A tile of the gradient from the rows' statistics: one read, one write."""
    temperature = tl.full([], temperature, ACC_DTYPE)
    spans = tl.cdiv(classes, BLOCK_V)
    block = tl.program_id(0) // spans
    batch = (block // tl.cdiv(rows, ROWS)).to(tl.int64)
    row = (block % tl.cdiv(rows, ROWS)).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    exists = row < rows
    place = batch * rows + row
    label = labels_at(target_ptr, place, exists, ignore_index)
    kept = label != ignore_index
    spoiled = kept & ((label < 0) | (label >= classes))
    on_label = tl.where(
        kept, tl.load(grad_logprob_ptr + place, mask=exists, other=0.0).to(ACC_DTYPE), 0.0
    )
    pull = tl.load(grad_logsumexp_ptr + place, mask=exists, other=0.0).to(ACC_DTYPE) - on_label
    grad_entropy = tl.load(grad_entropy_ptr + place, mask=exists, other=0.0).to(ACC_DTYPE)
    shift = finite_shift(tl.load(maximum_ptr + place, mask=exists, other=0.0))
    total = tl.load(sumexp_ptr + place, mask=exists, other=1.0)
    offset = tl.load(entropy_ptr + place, mask=exists, other=0.0) - log_exact(total)
    column = ((tl.program_id(0) % spans).to(tl.int64) * BLOCK_V + tl.arange(0, BLOCK_V))[
        None, :
    ]  # [1, BLOCK_V]
    inside = exists[:, None] & (column < classes)
    x = tl.load(
        logits_ptr + batch * x_batch + row[:, None] * x_row + column * x_class,
        mask=inside,
        other=-float("inf"),
    ).to(ACC_DTYPE)
    exponent = (x - shift[:, None]) * (tl.full([], LOG2E, ACC_DTYPE) / temperature)
    p = tl.exp2(exponent) * reciprocal(total)[:, None]
    log_ratio = (
        LN2 * tl.maximum(exponent, -10000.0) + offset[:, None]
    )  # log p + entropy, kept finite where p is 0
    grad = p * (pull[:, None] - grad_entropy[:, None] * log_ratio) + tl.where(
        column == label[:, None], on_label[:, None], 0.0
    )
    grad = tl.where(spoiled[:, None], float("nan"), grad / temperature)
    target = grad_ptr + batch * grad_batch + row[:, None] * grad_row + column * grad_class
    tl.store(target, grad.to(grad_ptr.dtype.element_ty), mask=inside)


def token_stats(logits: Tensor, target: Tensor, temperature: float, ignore_index: int) -> Stats:
    view = row_view_or_copy(-1, logits)
    wide = acc_dtype(logits.dtype)
    outputs = Stats(
        *(
            logits.new_empty(logits.shape[:-1], dtype=torch.int64 if name == "argmax" else wide)
            for name in Stats._fields
        )
    )
    chosen = reduce_plan_for(view, carried=4)
    tensors = (
        view.tensors[0],
        target.contiguous(),
        *outputs,
        merge_slots(view, chosen.splits, words=2),
    )
    sizes = (
        view.rows,
        view.classes,
        chosen.splits,
        classes_per_program(view, chosen),
        *view.strides[0],
    )
    programs = view.batches * cdiv(view.rows, chosen.rows) * chosen.splits
    launch(
        token_stats_kernel,
        programs,
        *tensors,
        *sizes,
        temperature,
        ignore_index,
        **reduce_options(chosen, view),
    )
    return outputs


def token_stats_backward(
    grad_logprob: Tensor,
    grad_logsumexp: Tensor,
    grad_entropy: Tensor,
    logits: Tensor,
    target: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    entropy: Tensor,
    temperature: float,
    ignore_index: int,
) -> Tensor:
    upstream = [grad.contiguous() for grad in (grad_logprob, grad_logsumexp, grad_entropy)]

    statistics = [row.contiguous() for row in (maximum, sumexp, entropy)]

    def run(view: RowView) -> None:
        chosen = elementwise_plan(view)
        programs = view.batches * cdiv(view.rows, chosen.rows) * cdiv(view.classes, chosen.block)
        tensors = (*upstream, view.tensors[0], target.contiguous(), *statistics, view.tensors[1])
        sizes = (view.rows, view.classes, *view.strides[0], *view.strides[1])
        launch(
            token_stats_backward_kernel,
            programs,
            *tensors,
            *sizes,
            temperature,
            ignore_index,
            **tile_options(chosen, logits.dtype),
        )

    return with_output(run, -1, logits, dtype=logits.dtype)
