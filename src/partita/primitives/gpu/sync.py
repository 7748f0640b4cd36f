"""The exchange between programs that share a row."""

import triton
import triton.language as tl

from .math import exp, finite_shift


@triton.jit
def pack_pair(first, second):
    """Two fp32 numbers in one 64-bit word, which is never 0: a pair of zeros gets the sign bit of -0."""
    high = first.to(tl.int32, bitcast=True).to(tl.int64) << 32
    word = high | (second.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    return tl.where(word == 0, -0x8000000000000000, word)


@triton.jit
def unpack_pair(word):
    """The two numbers of `pack`."""
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), word.to(tl.int32).to(
        tl.float32, bitcast=True
    )


@triton.jit
def exchange_pairs(box_ptr, split, splits, first, second, BLOCK_SPLITS: tl.constexpr):
    """Hand a pair to the programs that share the row, wait for theirs, and return all, [BLOCK_SPLITS] each, in the programs' order.

    A pair is one 64-bit word, so nobody sees half of it, and it says by not being 0 that it is there. Programs take their places from
    a ticket, so all those before a waiting program have started, and those of its own row are few enough to fit beside it.
    """
    tl.atomic_xchg(box_ptr + split, pack_pair(first, second), sem="relaxed")
    lane = tl.arange(0, BLOCK_SPLITS)
    words = tl.load(box_ptr + lane, mask=lane < splits, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = tl.load(box_ptr + lane, mask=lane < splits, other=1, volatile=True)
    return unpack_pair(words)


@triton.jit
def exchange_normalizer(box_ptr, split, splits, maximum, total, BLOCK_SPLITS: tl.constexpr):
    """Maximum (as a finite shift) and sum of exponentials of a row, from those of the part that each program holds."""
    maxima, sums = exchange_pairs(box_ptr, split, splits, maximum, total, BLOCK_SPLITS)
    maximum, total = merge_normalizers(maxima, sums, tl.arange(0, BLOCK_SPLITS) < splits)
    return finite_shift(maximum), total


@triton.jit
def exchange_sum(box_ptr, split, splits, value, BLOCK_SPLITS: tl.constexpr):
    """The sum of a number over the programs that share a row."""
    values, _ = exchange_pairs(box_ptr, split, splits, value, value, BLOCK_SPLITS)
    return tl.sum(tl.where(tl.arange(0, BLOCK_SPLITS) < splits, values, 0.0), axis=0)


@triton.jit
def merge_normalizers(maxima, sums, held):
    """Maximum and sum of exponentials of a row from those of its parts, [BLOCK_SPLITS], in their order."""
    maximum = tl.max(tl.where(held, maxima, -float("inf")), axis=0)
    return maximum, tl.sum(tl.where(held, sums * exp(maxima - finite_shift(maximum)), 0.0), axis=0)


@triton.jit
def slot_base(boxes_ptr, row, splits):
    """Where a row's counter stands, with a box for each of its programs behind it."""
    return boxes_ptr + row * (splits + 1)


@triton.jit
def store_partial(box_ptr, split, first, second):
    """Leave a pair for the program of the row that comes last."""
    tl.atomic_xchg(box_ptr + 1 + split, pack_pair(first, second), sem="relaxed")


@triton.jit
def arrives_last(box_ptr, splits):
    """Whether all other programs of the row have left their pairs: nobody waits, the last one merges."""
    return tl.atomic_add(box_ptr, 1, sem="acq_rel") == splits - 1


@triton.jit
def load_partials(box_ptr, splits, BLOCK_SPLITS: tl.constexpr):
    """The pairs that were left, [BLOCK_SPLITS] each, and which lanes hold one."""
    lane = tl.arange(0, BLOCK_SPLITS)
    first, second = unpack_pair(
        tl.load(box_ptr + 1 + lane, mask=lane < splits, other=1, volatile=True)
    )
    return first, second, lane < splits
