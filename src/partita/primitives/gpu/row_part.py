"""The part of a row that a program holds, from its load to its store.

A part is a tuple of slices, [LANES] each, of which a thread has one aligned vector. Rows start at
any address: a program loads the vectors that hold a class of its part, and stores those that hold
no other. The classes at its two ends, fewer than VEC each, are stored one by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .math import capped_logits, rounded_product, tree_sum


class RowPart(NamedTuple):
    """The classes of a row that a program has.

    Fields:
        row, rows: the row among those of all batches, and the number of rows of a batch.
        split: the index of the program among those that share the row.
        start: the class of column `begin`.
        begin, end: the columns of the first class, below VEC, and after the last one.
        lane: the columns of the first slice, [LANES].
        masks: for each slice which columns are classes of the part, [LANES].
        loaded: for each slice the columns of the vectors that hold such a class, [LANES].
        stored: for each slice the columns of the vectors that hold no other class, [LANES].
    """

    row: Any
    rows: Any
    split: Any
    start: Any
    begin: Any
    end: Any
    lane: Any
    masks: Any
    loaded: Any
    stored: Any


@triton.jit
def locate_part(
    x,
    index,
    rows,
    classes,
    splits,
    size,
    LANES: tl.constexpr,
    SLICES: tl.constexpr,
    FULL: tl.constexpr,
    VEC: tl.constexpr,
):
    """Return part `index` of the rows of x, `StridedRows`, which have `splits` parts each.

    All but the last part of a row have `size` classes, which is a multiple of VEC. Of the slices of
    any part, the first FULL ones end before it does.
    """
    row, split = index // splits, index % splits
    begin = row_offset(x, row, rows).to(tl.int32) & (VEC - 1)
    end = begin + tl.minimum(classes - split * size, size)
    lane = tl.arange(0, LANES)
    masks, loaded, stored = (), (), ()
    for i in tl.static_range(SLICES):
        mask = tl.full([LANES], True, tl.int1)
        load, store = mask, mask
        if i >= FULL:
            # A thread has few lanes, so this is one comparison a class.
            mask = lane < end - i * LANES
            load, store = mask, mask
        if VEC > 1:
            vector = lane // VEC * VEC
            if i >= FULL:
                load, store = vector < end - i * LANES, vector < end - i * LANES - (VEC - 1)
            if i == 0:
                mask, store = mask & (lane >= begin), store & (vector >= begin)
        masks, loaded, stored = masks + (mask,), loaded + (load,), stored + (store,)
    return RowPart(row, rows, split, split * size, begin, end, lane, masks, loaded, stored)


@triton.jit
def row_offset(x, row, rows):
    """Return where a row of `StridedRows` starts, given its index among those of all batches."""
    return (row // rows).to(tl.int64) * x.batch + (row % rows).to(tl.int64) * x.row


@triton.jit
def part_ptr(x, part, VEC: tl.constexpr):
    """Return the address of column 0 of a part."""
    return x.ptr + (row_offset(x, part.row, part.rows) // VEC * VEC + part.start)


@triton.jit
def load_part(
    x,
    part,
    other: tl.constexpr,
    zero,
    HALF: tl.constexpr,
    STREAM: tl.constexpr,
    FULL: tl.constexpr,
    VEC: tl.constexpr,
):
    """Load the classes of a part, and `other` outside of it.

    With STREAM, for rows that programs share, they leave the cache to the exchange slots and to the
    loads in flight of other programs.
    """
    POLICY: tl.constexpr = "evict_first" if STREAM else ""
    ptrs = part_ptr(x, part, VEC) + part.lane
    slices = ()
    for i in tl.static_range(len(part.masks)):
        mask = part.loaded[i]
        packed = tl.load(ptrs + i * part.lane.shape[0], mask, other, eviction_policy=POLICY)
        if VEC > 1 and (i == 0 or i >= FULL):
            # The interpreter has no constants of type bf16, only conversions.
            outside = tl.full([], other, tl.float32).to(packed.dtype)
            # Selected numbers of a half type occupy a register each until they are packed.
            packed = opaque(tl.where(part.masks[i], packed, outside), zero, HALF)
        slices += (packed,)
    return slices


@triton.jit
def opaque(packed, zero, HALF: tl.constexpr):
    """Return numbers of a HALF type as values that the compiler regards as new.

    The compiler then converts them to fp32 once more. Otherwise it would hold the fp32 copies,
    which double the registers that a row occupies while its program waits. `zero` is 0.0, which the
    compiler does not know. It knows that two values are equal that are made from the same one.
    """
    if HALF:
        zeros = tl.full(packed.shape, zero, tl.float32).to(packed.dtype)
        xor: tl.constexpr = "xor.b32 $0, $1, $2;"
        return tl.inline_asm_elementwise(
            xor, "=r,r,r", [packed, zeros], dtype=packed.dtype, is_pure=False, pack=2
        )
    else:
        return packed


@triton.jit
def renewed(slices, zero, HALF: tl.constexpr):
    """Return slices as new values; see `opaque`."""
    values = ()
    for i in tl.static_range(len(slices)):
        values += (opaque(slices[i], zero, HALF),)
    return values


@triton.jit
def in_fp32(slices, part, softcap=None):
    """Return the slices of a part in fp32, soft-capped if they are logits with a soft-cap."""
    values = ()
    for i in tl.static_range(len(slices)):
        values += (capped_logits(slices[i], part.masks[i], softcap, tl.float32),)
    return values


@triton.jit
def store_slice(x, part, i: tl.constexpr, value, STREAM: tl.constexpr, VEC: tl.constexpr):
    """Store the classes of a slice: vectors, and what the ends of the part have of a vector."""
    MODIFIER: tl.constexpr = ".cs" if STREAM else ""
    ptrs = part_ptr(x, part, VEC) + (i * part.lane.shape[0] + part.lane)
    value = value.to(x.ptr.dtype.element_ty)
    tl.store(ptrs, value, part.stored[i], cache_modifier=MODIFIER)
    if VEC > 1:  # The compiler drops what none of the classes needs.
        tl.store(ptrs, value, part.masks[i] & (part.stored[i] == 0))


@triton.jit
def part_maximum(slices):
    """Return the maximum of a part."""
    maximum = slices[0]
    for i in tl.static_range(1, len(slices)):
        maximum = tl.maximum(maximum, slices[i])
    return tl.max(maximum)


@triton.jit
def part_sum(terms, factors, part, VEC: tl.constexpr):
    """Return the sum of terms, or of their products with factors, with bits that rows share.

    Classes that are equal modulo LANES are added in their order. They are in one lane, which is
    `begin` lanes after that of a row that starts on a vector.
    """
    total = terms[0] if factors is None else rounded_product(terms[0], factors[0])
    for i in tl.static_range(1, len(terms)):
        total = total + terms[i] if factors is None else tl.fma(terms[i], factors[i], total)
    LANES: tl.constexpr = total.shape[0]
    if LANES == 32 * VEC:  # A warp moves them by the bits of `begin`.
        for bit in tl.static_range(VEC.bit_length() - 1):
            lane = (part.lane + (1 << bit)) & (LANES - 1)
            moved = tl.gather(total, lane, 0)
            total = tl.where((part.begin & (1 << bit)) != 0, moved, total)
    elif VEC > 1:
        # The condition is true but for NaN. It gives the index the layout of the sums.
        lane = tl.where(total == total, (part.lane + part.begin) & (LANES - 1), part.lane)
        total = tl.gather(total, lane, 0)
    return tl.sum(tree_sum(total))
