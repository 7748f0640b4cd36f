"""Kernels that find which entries of each row's support count."""

import triton
import triton.language as tl

from ..common import EVERY_CLASS, IGNORED, INVALID, RECORDED

KIND_RECORDED, KIND_EVERY_CLASS = tl.constexpr(RECORDED), tl.constexpr(EVERY_CLASS)
KIND_IGNORED, KIND_INVALID = tl.constexpr(IGNORED), tl.constexpr(INVALID)


@triton.jit(do_not_specialize=["M", "K", "num_classes"])
def support_entries_kernel(
    target_ptr,  # [M] int64
    ids_ptr,  # [K] int64
    offsets_ptr,  # [M + 1] int64
    keys_ptr,  # [E] int32, the number of all classes in each
    rows_ptr,  # [E] int32
    kinds_ptr,  # [M] int32
    in_set_ptr,  # [M] bool
    is_bad_ptr,  # [1] int32, 0
    M,
    K,
    num_classes,
    ignore_index: tl.int64,
    BLOCK: tl.constexpr,
):
    """Write class and row of each entry of one row, and say what is known of the row.

    `is_bad` becomes 1 if the offsets decrease or do not run from 0 to K.
    """
    row = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(offsets_ptr + row), tl.load(offsets_ptr + row + 1)
    is_bad = (begin < 0) | (begin > end) | (end > K)
    is_bad = is_bad | ((row == 0) & (begin != 0)) | ((row == M - 1) & (end != K))
    tl.store(is_bad_ptr, 1, mask=is_bad)
    begin = tl.where(is_bad, 0, begin)
    number = tl.where(is_bad, 0, end - begin)
    label = tl.load(target_ptr + row)
    is_ignored = label == ignore_index
    is_invalid = (is_ignored == 0) & ((label < 0) | (label >= num_classes))
    counts = (is_ignored == 0) & (is_invalid == 0) & (number > 0)
    base = begin + row
    tl.store(rows_ptr + base, row.to(tl.int32))
    tl.store(keys_ptr + base, tl.where(counts, label, num_classes).to(tl.int32))
    invalid_ids = tl.zeros([BLOCK], tl.int32)
    for start in range(0, number, BLOCK):
        place = start + tl.arange(0, BLOCK)
        mask = place < number
        id = tl.load(ids_ptr + begin + place, mask=mask, other=0)
        is_class = (id >= 0) & (id < num_classes)
        key = tl.where(is_class & (is_ignored == 0), id, num_classes)
        tl.store(rows_ptr + base + 1 + place, tl.full([BLOCK], row, tl.int32), mask=mask)
        tl.store(keys_ptr + base + 1 + place, key.to(tl.int32), mask=mask)
        invalid_ids = invalid_ids | (mask & (is_class == 0)).to(tl.int32)
    is_invalid = is_invalid | (tl.max(invalid_ids, axis=0) > 0)
    kind = tl.where(number > 0, KIND_RECORDED, KIND_EVERY_CLASS)
    kind = tl.where(is_invalid, KIND_INVALID, kind)
    kind = tl.where(is_ignored, KIND_IGNORED, kind)
    tl.store(kinds_ptr + row, kind)
    tl.store(in_set_ptr + row, kind == KIND_EVERY_CLASS)


@triton.jit(do_not_specialize=["M", "E", "num_classes"])
def support_sets_kernel(
    offsets_ptr,  # [M + 1] int64
    entry_rows_ptr,  # [E] int32, of each entry
    order_ptr,  # [E] int64, the entries sorted by class
    keys_ptr,  # [E] int32, the classes in this order
    rows_ptr,  # [E] int32, written in this order
    classes_ptr,  # [E] int32
    kinds_ptr,  # [M] int32, updated
    in_set_ptr,  # [M] bool, updated
    is_bad_ptr,  # [1] int32
    M,
    E,
    num_classes,
    BLOCK: tl.constexpr,
):
    """Write the rows in the order, and the class of each entry, or -1 if it does not count.

    Entries of a row that name the same class stand next to each other in the order, the target
    before ids. If the offsets are bad, no entry counts and all rows are invalid.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask, has_previous = place < E, (place < E) & (place > 0)
    is_good = tl.load(is_bad_ptr) == 0
    entry = tl.load(order_ptr + place, mask=mask, other=0)
    previous = tl.load(order_ptr + place - 1, mask=has_previous, other=0)
    key = tl.load(keys_ptr + place, mask=mask, other=0)
    is_class = mask & is_good & (key < num_classes)
    is_same = tl.load(keys_ptr + place - 1, mask=has_previous, other=-1) == key
    row = tl.load(entry_rows_ptr + entry, mask=is_class, other=0).to(tl.int64)
    previous_row = tl.load(entry_rows_ptr + previous, mask=is_class & is_same, other=-1)
    tl.store(rows_ptr + place, row.to(tl.int32), mask=mask)
    is_repeated = is_class & (previous_row == row)
    tl.store(classes_ptr + entry, tl.where(is_class & (is_repeated == 0), key, -1), mask=mask)
    is_recorded = tl.load(kinds_ptr + row, mask=is_repeated, other=-1) == KIND_RECORDED
    base = tl.load(offsets_ptr + row, mask=is_repeated, other=0) + row
    tl.store(in_set_ptr + row, base == base, mask=is_recorded & (previous == base))
    is_row = (place < M) & (is_good == 0)
    tl.store(kinds_ptr + place, tl.full([BLOCK], KIND_INVALID, tl.int32), mask=is_row)
    tl.store(in_set_ptr + place, place < 0, mask=is_row)
