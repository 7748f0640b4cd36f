"""The cross-entropy of rows whose classes lie on several GPUs of one host, with its gradient.

Each program holds its part of a row in registers while it waits for the maximum and the sum of the
other parts, on its own GPU and on the others. The kernel reads and writes the logits once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from ....primitives.gpu.reduce import load_capped
from ....primitives.gpu.row_part import load_part, locate_part, row_offset
from ....primitives.gpu.sync import merge_normalizers, next_part, pack_pair, unpack_pair
from ...cross_entropy.gpu.reduction import Targets
from ...cross_entropy.gpu.row_math import (
    Label,
    LossOptions,
    Smoothing,
    gradient_terms,
    label_weights,
    loss_scales,
    row_loss,
    store_label_gradient,
)
from ...cross_entropy.gpu.row_part import (
    has_class,
    part_logits,
    store_part_gradient,
)


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
    is_header = tl.arange(0, BLOCK_SLOTS) < WORLD
    mismatched = is_header & (words != 0) & (rank_programs != programs)
    return tl.max(mismatched.to(tl.int32), axis=0) == 1


@triton.jit(
    do_not_specialize=["M", "V", "first_class", "rank", "splits", "max_polls", "ignore_index"]
)
def parallel_row_kernel(
    logits,  # StridedRows [1, M, V_local]
    target_ptr,  # [M] labels among all classes
    tile_counter_ptr,  # [1] int64, zero
    memory,  # RankMemory
    losses,  # LossSum
    dlogits,  # StridedRows [1, M, V_local]
    M,
    V_local,  # classes of this rank
    V,  # classes of all ranks
    first_class,  # of this rank
    rank,
    splits,
    size,  # classes of a part
    max_polls,
    ignore_index,
    terms,  # OptionalTerms
    zero,  # 0.0
    WORLD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
    FULL: tl.constexpr,
    VEC: tl.constexpr,
):
    """Compute loss and gradient of the part of a row that this program holds.

    The programs of all ranks share a row. Its loss is NaN if the ranks disagree on the rows or the
    classes, or if a rank does not take part in time.
    """
    smoothing = tl.full([], 0.0, tl.float32)
    targets = Targets(target_ptr, None, None, V, ignore_index)
    options = LossOptions(targets, smoothing, *terms, None)  # type: ignore[call-arg]
    STREAM: tl.constexpr = VEC == 1  # The hints would spill registers beside masks.
    tile = next_part(tile_counter_ptr, True).to(tl.int32)
    part = locate_part(logits, tile, M, V_local, splits, size, LANES, SLICES, FULL, VEC)
    row, split = part.row, part.split
    packed = load_part(logits, part, -float("inf"), zero, HALF, STREAM, FULL, VEC)
    x_ptr = logits.ptr + row_offset(logits, row, M)
    scales = loss_scales(losses, M, options, losses.shares is not None, 0)
    # The label is counted from the first class of this rank. The program that has it alone reads
    # its logit.
    label = tl.load(target_ptr + row).to(tl.int64)
    not_ignored, valid, weight = label_weights(label, options)
    label -= first_class
    is_owner = valid & (label >= 0) & (label < V_local)
    is_owner &= has_class(part, label, True, size)
    x = load_capped(x_ptr + label, is_owner, options.softcap, tl.float32)
    label = Label(label, not_ignored, is_owner, weight, x)
    dtype: tl.constexpr = dlogits.ptr.dtype.element_ty
    loaded, _ = part_logits(packed, part, options, zero, dtype, HALF, VEC)

    # Give the statistics of the part to all ranks.
    pairs = WORLD * splits
    lane = tl.arange(0, BLOCK_SLOTS)
    row_slot = WORLD + row.to(tl.int64) * (pairs + 1)
    own_slot = row_slot + rank * splits + split
    programs = (M * splits).to(tl.float32)
    peers_ptr = memory.peers_ptr
    store_on_all_ranks(peers_ptr, rank, V_local.to(tl.float32), programs, tile == 0, WORLD)
    store_on_all_ranks(peers_ptr, row_slot + pairs, label.x, label.x, is_owner, WORLD)
    store_on_all_ranks(peers_ptr, own_slot, loaded.maximum, loaded.total, tile >= 0, WORLD)

    # Wait for the headers of all ranks and the pairs of the row. They do not count as arrived after
    # any program of this rank has timed out, in this call or an earlier one, nor if a rank has
    # another number of programs, because it may store no pair for this row.
    slot_mask = (lane < WORLD + pairs) | ((lane == WORLD + pairs) & valid)
    lane_ptr = memory.slots_ptr + tl.where(lane < WORLD, lane, row_slot + lane - WORLD)
    words = tl.load(lane_ptr, mask=slot_mask, other=1, volatile=True)
    in_time = tl.load(memory.timed_out_ptr, volatile=True) == 0
    polls = tl.where(in_time, max_polls, 0)
    while (tl.min((words != 0).to(tl.int32), axis=0) == 0) & (polls > 0):
        words = tl.load(lane_ptr, mask=slot_mask, other=1, volatile=True)
        polls = tl.where(has_mismatched_rank(words, programs, WORLD, BLOCK_SLOTS), 0, polls - 1)
    firsts, seconds = unpack_pair(words)
    arrived = (tl.min((words != 0).to(tl.int32), axis=0) == 1) & (
        has_mismatched_rank(words, programs, WORLD, BLOCK_SLOTS) == 0
    )
    arrived &= in_time
    if not arrived:
        tl.store(memory.timed_out_ptr, 1)
        tl.store(memory.failed_ptr, 1)
    classes_before = tl.sum(tl.where(lane < rank, firsts, 0.0), axis=0)
    classes_total = tl.sum(tl.where(lane < WORLD, firsts, 0.0), axis=0)
    agreed = arrived & (classes_before == first_class) & (classes_total == V)
    maximum, sumexp = merge_normalizers(firsts, seconds, (lane >= WORLD) & (lane < WORLD + pairs))
    shift = finite_shift(maximum)
    sumexp = tl.where(agreed, sumexp, float("nan"))
    label_x = tl.sum(tl.where((lane == WORLD + pairs) & valid, firsts, 0.0), axis=0)

    sums = Smoothing(0.0, 0.0)
    terms = gradient_terms(label, sums, shift, sumexp, scales, options)
    store_part_gradient(dlogits, part, loaded, label, terms, options, zero, HALF, STREAM, VEC)
    row_label = Label(label.index, not_ignored, valid, weight, label_x)
    loss = row_loss(row_label, sums, shift, sumexp, scales, options)
    tl.store(losses.loss + row, loss, mask=split == 0)
    d_ptr = dlogits.ptr + row_offset(dlogits, row, M)
    store_label_gradient(d_ptr, 1, label, is_owner, terms, options)
