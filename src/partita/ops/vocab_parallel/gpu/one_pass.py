"""The cross-entropy of rows whose classes lie on several GPUs of one host, with its gradient.

Each program holds its part of a row in registers while it waits for the maximum and the sum of the
other parts, on its own GPU and on the others. The kernel reads and writes the logits once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import apply_softcap, exp, exp_for_dtype, finite_shift
from ....primitives.gpu.memory import (
    aligned_start,
    load_streaming,
    opaque,
    row_span,
    store_streaming,
)
from ....primitives.gpu.sync import merge_normalizers, pack_pair, unpack_pair
from ...cross_entropy.gpu.reduction import mean_scales
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
    softcap = tl.full([], softcap, tl.float32)
    z_loss = tl.full([], z_loss, tl.float32)
    # Tiles are numbered in the order in which programs start, so the tiles before that of a waiting
    # program are running or done.
    tile = tl.atomic_add(tile_counter_ptr, 1, sem="relaxed")
    row = tile // splits
    split = (tile % splits).to(tl.int32)
    pairs = WORLD * splits
    lane = tl.arange(0, BLOCK_SLOTS)
    row_slot = WORLD + row * (pairs + 1)
    head, body = row_span(row * logits_stride, V_local, VEC)
    v = split * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    mask = v // VEC * VEC < body
    block = load_streaming(
        logits_ptr + aligned_start(row * logits_stride, VEC) + v, mask, -float("inf"), True
    )
    mean_scale, z_scale = mean_scales(shares_ptr, MEAN, tl.float32)
    label = tl.load(target_ptr + row).to(tl.int64)
    counts, valid, label_weight = label_weights(label, ignore_index, V, None, 0.0, tl.float32)
    label -= first_class
    owns_label = valid & (label >= 0) & (label < V_local)
    owns_label &= (
        tl.where((label >= head) & (label < head + body), (label - head) // BLOCK_V, 0) == split
    )
    own_label_logit = apply_softcap(
        tl.load(logits_ptr + row * logits_stride + label, mask=owns_label, other=0.0).to(
            tl.float32
        ),
        softcap,
        HAS_SOFTCAP,
    )
    dtype: tl.constexpr = dlogits_ptr.dtype.element_ty
    block, x, e, maximum, part_shift, sumexp, edge, edge_mask, edge_x = row_part(
        block,
        logits_ptr + row * logits_stride,
        mask,
        head,
        body,
        V_local,
        split,
        softcap,
        zero,
        dtype,
        HAS_SOFTCAP,
        HALF,
        VEC,
    )
    programs = (M * splits).to(tl.float32)
    store_on_all_ranks(peers_ptr, rank, V_local.to(tl.float32), programs, tile == 0, WORLD)
    store_on_all_ranks(
        peers_ptr, row_slot + pairs, own_label_logit, own_label_logit, owns_label, WORLD
    )
    store_on_all_ranks(
        peers_ptr, row_slot + rank * splits + split, maximum, sumexp, tile >= 0, WORLD
    )
    slot_mask = (lane < WORLD + pairs) | ((lane == WORLD + pairs) & valid)
    firsts, seconds, arrived = wait_for_slots(
        slots_ptr, row_slot, timed_out_ptr, slot_mask, programs, max_polls, WORLD, BLOCK_SLOTS
    )
    if not arrived:
        tl.store(timed_out_ptr, 1)
        tl.store(failed_ptr, 1)
    classes_before, classes_total = (
        tl.sum(tl.where(lane < rank, firsts, 0.0), axis=0),
        tl.sum(tl.where(lane < WORLD, firsts, 0.0), axis=0),
    )
    agreed = arrived & (classes_before == first_class) & (classes_total == V)
    maximum, sumexp = merge_normalizers(firsts, seconds, (lane >= WORLD) & (lane < WORLD + pairs))
    shift = finite_shift(maximum)
    sumexp = tl.where(agreed, sumexp, float("nan"))
    label_logit = tl.sum(tl.where((lane == WORLD + pairs) & valid, firsts, 0.0), axis=0)
    factor = row_factor(label_weight, 0.0, shift, sumexp, mean_scale, z_scale, z_loss, HAS_Z_LOSS)
    if HALF:
        x = acc_logits(
            opaque(block, tl.full([BLOCK_V], zero, tl.float32).to(block.dtype)),
            mask,
            softcap,
            HAS_SOFTCAP,
        )
        e = exp(x - shift)
        block_factor = factor
    else:
        block_factor = factor * exp_for_dtype(part_shift - shift, dtype)
    dlogits = class_gradient(e, x, block_factor, 0.0, softcap, False, HAS_SOFTCAP)
    if counts:  # one branch for the row costs less than a select for each class
        store_streaming(
            dlogits_ptr + aligned_start(row * dlogits_stride, VEC) + v, dlogits, mask, True
        )
    else:
        store_streaming(
            dlogits_ptr + aligned_start(row * dlogits_stride, VEC) + v,
            tl.zeros_like(dlogits),
            mask,
            True,
        )
    if VEC > 1:
        edge_dlogits = class_gradient(
            exp_for_dtype(edge_x - shift, dtype), edge_x, factor, 0.0, softcap, False, HAS_SOFTCAP
        )
        store_valid_rows(
            dlogits_ptr + row * dlogits_stride + edge, edge_dlogits, edge_mask, counts, False
        )
    tl.store(
        loss_ptr + row,
        row_loss(
            counts,
            label_weight,
            label_logit,
            0.0,
            0.0,
            shift,
            sumexp,
            mean_scale,
            z_scale,
            z_loss,
            False,
            HAS_Z_LOSS,
        ),
        mask=split == 0,
    )
    dlogits_label = label_gradient(
        label,
        own_label_logit,
        owns_label,
        label_weight,
        shift,
        factor,
        mean_scale,
        None,
        V_local,
        0.0,
        softcap,
        False,
        HAS_SOFTCAP,
        tl.float32,
    )
    # The label's gradient overwrites what another thread of this program stored for its class.
    tl.debug_barrier()
    tl.store(dlogits_ptr + row * dlogits_stride + label, dlogits_label.to(dtype), mask=owns_label)
