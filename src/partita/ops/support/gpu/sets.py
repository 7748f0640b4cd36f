"""Kernels that find which entries of each row's support count, and their launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime.launch import cdiv, launch
from ..common import EVERY_CLASS, IGNORED, INVALID, RECORDED, Support, empty_sets

KIND_RECORDED, KIND_EVERY_CLASS = tl.constexpr(RECORDED), tl.constexpr(EVERY_CLASS)
KIND_IGNORED, KIND_INVALID = tl.constexpr(IGNORED), tl.constexpr(INVALID)
ID_BLOCK = 64  # ids of a row that its program reads together; the usual row has eight
PLACE_BLOCK = 256  # places in the order that a program compares


@triton.jit(do_not_specialize=["M", "K", "num_classes"])
def support_entries_kernel(
    target_ptr,  # [M] int64
    ids_ptr,  # [K] int64
    offsets_ptr,  # [M + 1] int64
    support,  # Support, of which the first three fields are written
    keys_ptr,  # [E] int32, written for each entry
    rows_ptr,  # [E], written for each entry
    in_set_ptr,  # [M] bool
    is_bad_ptr,  # [1] int32, 0
    M,
    K,
    num_classes,
    ignore_index: tl.int64,
    BLOCK: tl.constexpr,
):
    """Write key and row of each entry of one row, and say what is known of the row.

    `is_bad` becomes 1 if the offsets decrease or do not run from 0 to K.
    """
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
    is_bad = (begin < 0) | (begin > end) | (end > K)
    is_bad = is_bad | ((row == 0) & (begin != 0)) | ((row == M - 1) & (end != K))
    tl.store(is_bad_ptr, 1, mask=is_bad)
    number = tl.where(is_bad, 0, end - begin)
    label = tl.load(target_ptr + row)
    is_ignored = label == ignore_index
    is_class = (label >= 0) & (label < num_classes)
    is_listed = (is_ignored == 0) & (number > 0)
    tl.store(rows_ptr + row, row)
    tl.store(keys_ptr + row, tl.where(is_class & is_listed, label, num_classes).to(tl.int32))
    has_target = tl.zeros([BLOCK], tl.int32)
    has_invalid = tl.zeros([BLOCK], tl.int32)
    for start in range(0, number, BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask = place < number
        id = tl.load(ids_ptr + begin + place, mask=mask, other=0)
        is_id, is_target = (id >= 0) & (id < num_classes), id == label
        key = tl.where(is_id & (is_target == 0) & is_listed, id, num_classes)
        tl.store(rows_ptr + M + begin + place, tl.full([BLOCK], row, tl.int64), mask=mask)
        tl.store(keys_ptr + M + begin + place, key.to(tl.int32), mask=mask)
        has_target = has_target | (mask & is_target).to(tl.int32)
        has_invalid = has_invalid | (mask & (is_id == 0)).to(tl.int32)
    kind = tl.where(number > 0, KIND_RECORDED, KIND_EVERY_CLASS)
    kind = tl.where((is_class == 0) | (tl.max(has_invalid, axis=0) > 0), KIND_INVALID, kind)
    kind = tl.where(is_ignored, KIND_IGNORED, kind)
    is_recorded = (kind == KIND_RECORDED) & (tl.max(has_target, axis=0) > 0)
    tl.store(support.kinds + row, kind)
    tl.store(support.starts + row, begin)
    tl.store(support.numbers + row, tl.where(is_listed, number, 0))
    tl.store(in_set_ptr + row, is_recorded | (kind == KIND_EVERY_CLASS))


@triton.jit(do_not_specialize=["M", "E", "num_classes"])
def support_sets_kernel(
    support,  # Support, with order and keys; classes and ordered rows are written
    rows_ptr,  # [E] of each entry
    in_set_ptr,  # [M] bool, updated
    is_bad_ptr,  # [1] int32
    M,
    E,
    num_classes,
    BLOCK: tl.constexpr,
):
    """Write the rows in the order, and the class of each entry, or -1 if it does not count.

    Ids of a row that repeat are neighbours in the order. If the offsets are bad, no entry counts
    and all rows are invalid.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < E
    is_good = tl.load(is_bad_ptr) == 0
    entry = tl.load(support.order + place, mask=mask, other=0)
    key = tl.load(support.keys + place, mask=mask, other=0)
    is_class = mask & is_good & (key < num_classes)
    row = tl.load(rows_ptr + entry, mask=is_class, other=0)
    before = tl.load(support.keys + place - 1, mask=mask & (place > 0), other=-1)
    is_same = is_class & (before == key)
    previous = tl.load(support.order + place - 1, mask=is_same, other=0)
    is_same = is_same & (tl.load(rows_ptr + previous, mask=is_same, other=-1) == row)
    tl.store(support.ordered_rows + place, row, mask=mask)
    tl.store(support.classes + entry, tl.where(is_class & (is_same == 0), key, -1), mask=mask)
    is_row = (place < M) & (is_good == 0)
    tl.store(support.kinds + place, tl.full([BLOCK], KIND_INVALID, tl.int64), mask=is_row)
    tl.store(support.numbers + place, tl.zeros([BLOCK], tl.int64), mask=is_row)
    tl.store(in_set_ptr + place, place < 0, mask=is_row)


def support_sets(
    target: Tensor, ids: Tensor, offsets: Tensor, num_classes: int, ignore_index: int
) -> tuple[Tensor, ...]:
    """Find which entries of each row count, and sort them by class; see the reference."""
    if len(target) == 0:
        ids = ids[:0]
    M, K = len(target), len(ids)
    *fields, in_set = empty_sets(target, ids)
    support = Support(*fields)
    keys, rows = torch.empty_like(support.keys), torch.empty_like(support.ordered_rows)
    is_bad = torch.zeros(1, dtype=torch.int32, device=target.device)
    launch(
        support_entries_kernel,
        M,
        target_ptr=target,
        ids_ptr=ids,
        offsets_ptr=offsets,
        support=support,
        keys_ptr=keys,
        rows_ptr=rows,
        in_set_ptr=in_set,
        is_bad_ptr=is_bad,
        M=M,
        K=K,
        num_classes=num_classes,
        ignore_index=ignore_index,
        BLOCK=ID_BLOCK,
        num_warps=1,
    )
    torch.sort(keys, stable=True, out=(support.keys, support.order))
    launch(
        support_sets_kernel,
        cdiv(M + K, PLACE_BLOCK),
        support=support,
        rows_ptr=rows,
        in_set_ptr=in_set,
        is_bad_ptr=is_bad,
        M=M,
        E=M + K,
        num_classes=num_classes,
        BLOCK=PLACE_BLOCK,
        num_warps=4,
    )
    return *support, in_set
