"""The cross-entropy of rows whose classes lie on several GPUs of one host, with its gradient.

Each program holds its part of a row in registers while it waits for the maximum and the sum of the
other parts, on its own GPU and on the others. The kernel reads and writes the logits once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from ....primitives.gpu.sync import merge_normalizers, next_part, pack_pair, unpack_pair
from ...cross_entropy.gpu.reduction import loss_scales
from ...cross_entropy.gpu.row_math import (
    Label,
    LossOptions,
    Smoothing,
    gradient_terms,
    label_weights,
    load_label_logits,
    row_loss,
    store_label_gradient,
)
from ...cross_entropy.gpu.row_part import (
    PartWeights,
    has_class,
    load_part,
    locate_part,
    part_logits,
    store_part_gradient,
)


class RankMemory(NamedTuple):
    """The memory in which ranks exchange the statistics of rows.

    Fields:
        slots_ptr: the slots of this rank.
        peers_ptr: the addresses of the slots of all ranks, [world].
        timed_out_ptr: whether a program of this rank has timed out.
        failed_ptr: the same for the host.
    """

    slots_ptr: Any
    peers_ptr: Any
    timed_out_ptr: Any
    failed_ptr: Any


class Shard(NamedTuple):
    """The classes of a rank.

    Fields:
        rank: the rank.
        first_class: its first class.
        V_local: the number of its classes.
        V: the number of classes of all ranks.
    """

    rank: Any
    first_class: Any
    V_local: Any
    V: Any


@triton.jit
def store_on_all_ranks(peers_ptr, slot, first, second, mask, WORLD: tl.constexpr):
    """Store a pair of numbers in the same slot of the memory of every rank."""
    for r in tl.static_range(WORLD):
        slots_ptr = tl.load(peers_ptr + r).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(
            slots_ptr + slot, pack_pair(first, second), mask=mask, sem="relaxed", scope="sys"
        )


@triton.jit
def has_mismatched_rank(words, programs, WORLD: tl.constexpr, BLOCK_SLOTS: tl.constexpr):
    """Return whether a header that has arrived is from a rank with another number of programs."""
    _, rank_programs = unpack_pair(words)
    return (
        tl.max(
            ((tl.arange(0, BLOCK_SLOTS) < WORLD) & (words != 0) & (rank_programs != programs)).to(
                tl.int32
            ),
            axis=0,
        )
        == 1
    )


@triton.jit
def wait_for_slots(
    slots_ptr,
    row_slot,
    timed_out_ptr,
    mask,
    programs,
    max_polls,
    WORLD: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    """Wait for the headers of all ranks and the pairs of a row.

    Returns both numbers of each slot, [BLOCK_SLOTS], and whether all of them arrived. They do not
    count as arrived after any program of this rank has timed out, in this call or an earlier one,
    nor if a rank has another number of programs, because it may store no pair for this row.
    """
    lane = tl.arange(0, BLOCK_SLOTS)
    lane_ptr = slots_ptr + tl.where(lane < WORLD, lane, row_slot + lane - WORLD)
    words = tl.load(lane_ptr, mask=mask, other=1, volatile=True)
    in_time = tl.load(timed_out_ptr, volatile=True) == 0
    polls = tl.where(in_time, max_polls, 0)
    while (tl.min((words != 0).to(tl.int32), axis=0) == 0) & (polls > 0):
        words = tl.load(lane_ptr, mask=mask, other=1, volatile=True)
        polls = tl.where(has_mismatched_rank(words, programs, WORLD, BLOCK_SLOTS), 0, polls - 1)
    first, second = unpack_pair(words)
    arrived = (tl.min((words != 0).to(tl.int32), axis=0) == 1) & (
        has_mismatched_rank(words, programs, WORLD, BLOCK_SLOTS) == 0
    )
    return first, second, arrived & in_time


@triton.jit
def load_shard_label(target_ptr, row_ptr, part, shard, BLOCK_V: tl.constexpr, options):
    """Load the label of a row, counted from the first class of this rank.

    It is in range for the program that has it, which alone reads its logit. Also returns whether it
    is a class of any rank.
    """
    label = tl.load(target_ptr).to(tl.int64)
    not_ignored, valid, weight = label_weights(label, options)
    label -= shard.first_class
    is_owner = valid & (label >= 0) & (label < shard.V_local)
    is_owner &= has_class(part, label, True, BLOCK_V)
    x = load_label_logits(row_ptr + label, is_owner, options)
    return Label(label, not_ignored, is_owner, weight, x), valid


@triton.jit
def exchange_with_ranks(
    memory,
    shard,
    loaded,
    label,
    valid,
    tile,
    splits,
    M,
    max_polls,
    WORLD: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    """Give the statistics of a part to all ranks, and return shift, sum and label logit of the row.

    The sum is NaN if the ranks disagree on the rows or the classes, or if one is too late.
    """
    pairs = WORLD * splits
    lane = tl.arange(0, BLOCK_SLOTS)
    row_slot = WORLD + tile // splits * (pairs + 1)
    own_slot = row_slot + shard.rank * splits + loaded.part.split
    programs = (M * splits).to(tl.float32)
    peers_ptr, V_local = memory.peers_ptr, shard.V_local.to(tl.float32)
    store_on_all_ranks(peers_ptr, shard.rank, V_local, programs, tile == 0, WORLD)
    store_on_all_ranks(peers_ptr, row_slot + pairs, label.x, label.x, label.in_range, WORLD)
    store_on_all_ranks(peers_ptr, own_slot, loaded.maximum, loaded.total, tile >= 0, WORLD)
    slot_mask = (lane < WORLD + pairs) | ((lane == WORLD + pairs) & valid)
    firsts, seconds, arrived = wait_for_slots(
        memory.slots_ptr,
        row_slot,
        memory.timed_out_ptr,
        slot_mask,
        programs,
        max_polls,
        WORLD,
        BLOCK_SLOTS,
    )
    if not arrived:
        tl.store(memory.timed_out_ptr, 1)
        tl.store(memory.failed_ptr, 1)
    classes_before = tl.sum(tl.where(lane < shard.rank, firsts, 0.0), axis=0)
    classes_total = tl.sum(tl.where(lane < WORLD, firsts, 0.0), axis=0)
    agreed = arrived & (classes_before == shard.first_class) & (classes_total == shard.V)
    maximum, sumexp = merge_normalizers(firsts, seconds, (lane >= WORLD) & (lane < WORLD + pairs))
    shift = finite_shift(maximum)
    sumexp = tl.where(agreed, sumexp, float("nan"))
    label_logit = tl.sum(tl.where((lane == WORLD + pairs) & valid, firsts, 0.0), axis=0)
    return shift, sumexp, label_logit


@triton.jit(
    do_not_specialize=[
        "M",
        "V",
        "first_class",
        "rank",
        "splits",
        "max_polls",
        "ignore_index",
    ]
)
def parallel_row_kernel(
    logits_ptr,  # [M, V_local]
    target_ptr,  # [M] labels among all classes
    shares_ptr,  # [2, SHARES] partial sums of the mean's denominators, or None
    tile_counter_ptr,  # [1] int64, zero
    # [world + M * (world * splits + 1)] int64, zero: the header of each rank, then for each row the
    # pairs of all ranks' programs and the logit of the label
    slots_ptr,
    peers_ptr,  # [world] int64, the addresses of every rank's slots
    timed_out_ptr,  # [1] int64, shared by all calls
    failed_ptr,  # [1] int32 on the host
    loss_ptr,  # [M]
    dlogits_ptr,  # [M, V_local]
    M,
    V_local,  # classes of this rank
    V,  # classes of all ranks
    first_class,  # of this rank
    rank,
    splits,
    max_polls,
    logits_stride,
    dlogits_stride,
    ignore_index,
    softcap: tl.float64,
    z_loss: tl.float64,
    zero,  # 0.0
    WORLD: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    MEAN: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute loss and gradient of the part of a row that this program holds.

    The programs of all ranks share a row. Its loss is NaN if the ranks disagree on the rows or the
    classes, or if a rank does not take part in time.
    """
    smoothing = tl.full([], 0.0, tl.float32)
    softcap = tl.full([], softcap, tl.float32) if HAS_SOFTCAP else None
    z_loss = tl.full([], z_loss, tl.float32) if HAS_Z_LOSS else None
    options = LossOptions(None, V, ignore_index, smoothing, softcap, z_loss)
    memory = RankMemory(slots_ptr, peers_ptr, timed_out_ptr, failed_ptr)
    shard = Shard(rank, first_class, V_local, V)
    tile = next_part(tile_counter_ptr, True)
    row, split = tile // splits, (tile % splits).to(tl.int32)
    part = locate_part(split, row * logits_stride, V_local, VEC, BLOCK_V)
    logits = load_part(logits_ptr, row * logits_stride, part, True, VEC)
    scales = loss_scales(shares_ptr, target_ptr, M, options, 0, MEAN, 0)
    row_ptr = logits_ptr + row * logits_stride
    label, valid = load_shard_label(target_ptr + row, row_ptr, part, shard, BLOCK_V, options)
    dtype: tl.constexpr = dlogits_ptr.dtype.element_ty
    loaded = part_logits(logits, row_ptr, part, V_local, options, zero, dtype, HALF, VEC)
    shift, sumexp, label_x = exchange_with_ranks(
        memory, shard, loaded, label, valid, tile, splits, M, max_polls, WORLD, BLOCK_SLOTS
    )
    smoothing, weights = Smoothing(0.0, 0.0), PartWeights(0.0, 0.0)
    terms = gradient_terms(label, smoothing, shift, sumexp, scales, options)
    d_start = row * dlogits_stride
    store_part_gradient(
        dlogits_ptr, d_start, loaded, weights, label, terms, options, 0, HALF, True, VEC
    )
    row_label = Label(label.index, label.not_ignored, valid, label.weight, label_x)
    loss = row_loss(row_label, smoothing, shift, sumexp, scales, options, 0)
    tl.store(loss_ptr + row, loss, mask=split == 0)
    store_label_gradient(dlogits_ptr + d_start, 1, label, label.in_range, terms, options, 0)
