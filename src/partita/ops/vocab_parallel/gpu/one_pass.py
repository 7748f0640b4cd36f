"""Cross-entropy of rows whose classes lie on several GPUs of one host, with its gradient: one read and one write, for the GPUs' programs wait for one
another while each holds its part of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import apply_softcap, exp, exp_for_dtype, finite_shift
from ....primitives.gpu.memory import (
    aligned_start,
    load_streaming,
    opaque,
    row_span,
    store_streaming,
)
from ....primitives.gpu.row_plan import RowPlan, row_options
from ....primitives.gpu.sync import merge_normalizers, pack_pair, unpack_pair
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2
from ...cross_entropy.gpu.plan import SUM_WORDS
from ...cross_entropy.gpu.reduction import mean_denominators, mean_scales, reduce_losses
from ...cross_entropy.gpu.row_math import (
    acc_logits,
    class_gradient,
    label_gradient,
    label_weights,
    row_factor,
    row_loss,
    row_part,
    store_valid_rows,
)


@triton.jit
def hand_to(peers_ptr, place, first, second, mask, WORLD: tl.constexpr):
    """Leave a pair at the same place in the boxes of every rank."""
    for r in tl.static_range(WORLD):
        box_ptr = tl.load(peers_ptr + r).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(
            box_ptr + place, pack_pair(first, second), mask=mask, sem="relaxed", scope="sys"
        )


@triton.jit
def strangers(words, programs, WORLD: tl.constexpr, SLOTS: tl.constexpr):
    """Whether a header, of those that are there, is of a rank with another number of programs."""
    _, theirs = unpack_pair(words)
    return (
        tl.max(
            ((tl.arange(0, SLOTS) < WORLD) & (words != 0) & (theirs != programs)).to(tl.int32),
            axis=0,
        )
        == 1
    )


@triton.jit
def wait_for(
    boxes_ptr,
    row_place,
    given_up_ptr,
    wanted,
    programs,
    limit,
    WORLD: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The headers of all ranks and the pairs of a row, [SLOTS], and whether all came before the patience of one program ended it for all, in this call
    or an earlier one, or a rank came with another number of programs, which may leave no pair for this row."""
    lane = tl.arange(0, SLOTS)
    at = boxes_ptr + tl.where(lane < WORLD, lane, row_place + lane - WORLD)
    words = tl.load(at, mask=wanted, other=1, volatile=True)
    going = tl.load(given_up_ptr, volatile=True) == 0
    left = tl.where(going, limit, 0)
    while (tl.min((words != 0).to(tl.int32), axis=0) == 0) & (left > 0):
        words = tl.load(at, mask=wanted, other=1, volatile=True)
        left = tl.where(strangers(words, programs, WORLD, SLOTS), 0, left - 1)
    first, second = unpack_pair(words)
    came = (tl.min((words != 0).to(tl.int32), axis=0) == 1) & (
        strangers(words, programs, WORLD, SLOTS) == 0
    )
    return first, second, came & going


@triton.jit(
    do_not_specialize=["rows", "all_classes", "first", "rank", "splits", "limit", "ignore_index"]
)
def parallel_row_kernel(
    logits_ptr,  # [rows, classes]
    target_ptr,  # [rows] labels among all classes
    shares_ptr,  # [2, SHARES] of what the mean divides by, or None
    ticket_ptr,  # [1] int64, zero: places
    boxes_ptr,  # [world + rows * (world * splits + 1)] int64, zero: headers, then for each row the pairs of the ranks' programs and the label's
    peers_ptr,  # [world] int64, where each rank has its boxes
    given_up_ptr,  # [1] int64, of all calls
    failed_ptr,  # [1] int32 on the host
    loss_ptr,  # [rows]
    grad_ptr,  # [rows, classes]
    rows,
    classes,
    all_classes,
    first,
    rank,
    splits,
    limit,
    x_row,
    grad_row,
    ignore_index,
    softcap: tl.float64,
    z_loss: tl.float64,
    zero,  # 0.0
    WORLD: tl.constexpr,
    CAP: tl.constexpr,
    Z: tl.constexpr,
    MEAN: tl.constexpr,
    HALF: tl.constexpr,
    SLOTS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The part of a row that one of the programs of all ranks holds. The loss is NaN where ranks are not agreed on rows or classes, or one does not come."""
    softcap, z_loss = tl.full([], softcap, tl.float32), tl.full([], z_loss, tl.float32)
    place = tl.atomic_add(ticket_ptr, 1, sem="relaxed")
    row, split = place // splits, (place % splits).to(tl.int32)
    pairs, lane = WORLD * splits, tl.arange(0, SLOTS)
    row_place = WORLD + row * (pairs + 1)
    head, body = row_span(row * x_row, classes, VEC)
    column = split * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    inside = column // VEC * VEC < body
    held = load_streaming(
        logits_ptr + aligned_start(row * x_row, VEC) + column, inside, -float("inf"), True
    )
    mean_scale, z_scale = mean_scales(shares_ptr, MEAN, tl.float32)
    label = tl.load(target_ptr + row).to(tl.int64)
    kept, valid, on_label = label_weights(label, ignore_index, all_classes, None, 0.0, tl.float32)
    label -= first
    mine = valid & (label >= 0) & (label < classes)
    mine &= tl.where((label >= head) & (label < head + body), (label - head) // BLOCK_V, 0) == split
    own_label_x = apply_softcap(
        tl.load(logits_ptr + row * x_row + label, mask=mine, other=0.0).to(tl.float32), softcap, CAP
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
    programs = (rows * splits).to(tl.float32)
    hand_to(peers_ptr, rank, classes.to(tl.float32), programs, place == 0, WORLD)
    hand_to(peers_ptr, row_place + pairs, own_label_x, own_label_x, mine, WORLD)
    hand_to(peers_ptr, row_place + rank * splits + split, maximum, total, place >= 0, WORLD)
    wanted = (lane < WORLD + pairs) | ((lane == WORLD + pairs) & valid)
    firsts, seconds, came = wait_for(
        boxes_ptr, row_place, given_up_ptr, wanted, programs, limit, WORLD, SLOTS
    )
    if not came:
        tl.store(given_up_ptr, 1)
        tl.store(failed_ptr, 1)
    before, everywhere = (
        tl.sum(tl.where(lane < rank, firsts, 0.0), axis=0),
        tl.sum(tl.where(lane < WORLD, firsts, 0.0), axis=0),
    )
    agreed = came & (before == first) & (everywhere == all_classes)
    maximum, total = merge_normalizers(firsts, seconds, (lane >= WORLD) & (lane < WORLD + pairs))
    shift, total = finite_shift(maximum), tl.where(agreed, total, float("nan"))
    label_x = tl.sum(tl.where((lane == WORLD + pairs) & valid, firsts, 0.0), axis=0)
    factor = row_factor(on_label, 0.0, shift, total, mean_scale, z_scale, z_loss, Z)
    if HALF:
        x = acc_logits(
            opaque(held, tl.full([BLOCK_V], zero, tl.float32).to(held.dtype)), inside, softcap, CAP
        )
        e, factor_held = exp(x - shift), factor
    else:
        factor_held = factor * exp_for_dtype(part - shift, dtype)
    grad = class_gradient(e, x, factor_held, 0.0, softcap, False, CAP)
    if kept:  # one branch for the row costs less than a select for each class
        store_streaming(grad_ptr + aligned_start(row * grad_row, VEC) + column, grad, inside, True)
    else:
        store_streaming(
            grad_ptr + aligned_start(row * grad_row, VEC) + column,
            tl.zeros_like(grad),
            inside,
            True,
        )
    if VEC > 1:
        edge_grad = class_gradient(
            exp_for_dtype(edge_x - shift, dtype), edge_x, factor, 0.0, softcap, False, CAP
        )
        store_valid_rows(grad_ptr + row * grad_row + edge, edge_grad, at_edge, kept, False)
    tl.store(
        loss_ptr + row,
        row_loss(
            kept, on_label, label_x, 0.0, 0.0, shift, total, mean_scale, z_scale, z_loss, False, Z
        ),
        mask=split == 0,
    )
    at_label = label_gradient(
        label,
        own_label_x,
        mine,
        on_label,
        shift,
        factor,
        mean_scale,
        None,
        classes,
        0.0,
        softcap,
        False,
        CAP,
        tl.float32,
    )
    tl.debug_barrier()
    tl.store(grad_ptr + row * grad_row + label, at_label.to(dtype), mask=mine)


def _shares(sizes: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Programs among which each rank's part of a row is divided, and the classes that one holds: the same on all ranks."""
    block = min(next_power_of_2(max(*sizes, 1024)), 16384 if itemsize == 2 else 8192)
    return max(1, cdiv(max(sizes), block)), block


def words_of(rows: int, sizes: tuple[int, ...], itemsize: int) -> int:
    """How many the ranks leave for one another."""
    return len(sizes) + rows * (len(sizes) * _shares(sizes, itemsize)[0] + 1)


def parallel_one_pass(
    logits: Tensor,
    target: Tensor,
    boxes: Tensor,
    peers: Tensor,
    given_up: Tensor,
    failed: Tensor,
    limit: int,
    sizes: tuple[int, ...],
    rank: int,
    ignore_index: int,
    softcap: float,
    z_loss: float,
    mean: bool,
) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of this rank's logits, which lie row by row; `sizes` are the classes of all ranks."""
    rows, classes = logits.shape
    dtype, device = acc_dtype(logits.dtype), logits.device
    words, shares = (
        torch.empty(SUM_WORDS + 1, dtype=torch.int64, device=device),
        None,
    )  # the last is the ticket
    if mean:
        shares = mean_denominators(target, None, ignore_index, sum(sizes), words)
    else:
        words.zero_()
    grad, losses = (
        torch.empty(logits.shape, dtype=logits.dtype, device=device),
        torch.empty(rows, dtype=dtype, device=device),
    )
    itemsize, world = logits.element_size(), len(sizes)
    splits, block = _shares(sizes, itemsize)
    in_step = (logits.data_ptr() | grad.data_ptr()) % 16 == 0 and (
        logits.stride(0) - grad.stride(0)
    ) * itemsize % 16 == 0
    plain = (
        not in_step
        or classes < 512
        or (classes % 16 == 0 and logits.stride(0) * itemsize % 16 == 0)
    )
    vector = (
        1 if plain else 16 // itemsize
    )  # elements of an aligned access, of which the compiler would not know otherwise
    numbers = (
        rows,
        classes,
        sum(sizes),
        sum(sizes[:rank]),
        rank,
        splits,
        limit,
        logits.stride(0),
        grad.stride(0),
        ignore_index,
        softcap,
        z_loss,
        0.0,
    )
    plan = RowPlan(
        "row",
        1,
        block,
        max(1, block // (4096 if itemsize == 2 else 2048)),
        splits,
        96 if itemsize == 2 else 168,
        vector,
    )
    options = {
        name: value
        for name, value in row_options(plan, logits.dtype).items()
        if name not in ("SHARED", "STREAM", "BLOCK_SPLITS")
    }
    flags = {
        "WORLD": world,
        "CAP": softcap != 0,
        "Z": z_loss != 0,
        "MEAN": shares is not None,
        "SLOTS": next_power_of_2(world * (splits + 1) + 1),
    }
    tensors = (
        logits,
        target,
        shares,
        words[SUM_WORDS:],
        boxes,
        peers,
        given_up,
        failed,
        losses,
        grad,
    )
    launch(parallel_row_kernel, rows * splits, *tensors, *numbers, **flags, **options)
    return reduce_losses(losses, words, dtype, shares=shares), grad
