"""The exchange between programs that share a row, through 64-bit words in zeroed memory.

In an exchange (`exchange_*`) each program stores a pair of numbers in its slot and waits for all
the other pairs. In a merge (`store_pair`, `arrives_last`, `load_pairs`) no program waits, and the
last one to arrive reads the pairs of the row.
"""

import triton
import triton.language as tl

from .math import exp, finite_shift


@triton.jit
def next_part(counter_ptr, SHARED: tl.constexpr):
    """Return the index of a program's next part among those of all rows.

    The counter hands out parts of SHARED rows in order, so that every part that a waiting program
    depends on is under way.
    """
    if SHARED:
        return tl.atomic_add(counter_ptr, 1, sem="relaxed")
    else:
        return tl.program_id(0).to(tl.int64)


@triton.jit
def pack_pair(first, second):
    """Pack two fp32 numbers into one 64-bit word that is never 0.

    A pair of zeros gets the sign bit of -0.
    """
    high = first.to(tl.int32, bitcast=True).to(tl.int64) << 32
    word = high | (second.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)
    return tl.where(word == 0, -0x8000000000000000, word)


@triton.jit
def unpack_pair(word):
    """Return the two fp32 numbers of `pack_pair`."""
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True), word.to(tl.int32).to(
        tl.float32, bitcast=True
    )


@triton.jit
def store_pair(slots_ptr, split, first, second):
    """Give a pair to the programs that share the row, which is one word: none reads half of it."""
    tl.atomic_xchg(slots_ptr + split, pack_pair(first, second), sem="relaxed")


@triton.jit
def collect_pairs(slots_ptr, splits, BLOCK_SPLITS: tl.constexpr):
    """Wait for the pairs of all programs that share the row and return them, [BLOCK_SPLITS] each.

    A word that is not 0 has been written. Programs take their index from an atomic counter, so all
    programs before a waiting one have started, and the programs of one row are few enough to be
    resident together.
    """
    lane = tl.arange(0, BLOCK_SPLITS)
    words = tl.load(slots_ptr + lane, mask=lane < splits, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = tl.load(slots_ptr + lane, mask=lane < splits, other=1, volatile=True)
    return unpack_pair(words)


@triton.jit
def exchange_normalizer(slots_ptr, split, splits, maximum, total, BLOCK_SPLITS: tl.constexpr):
    """Return a row's finite maximum and sum of exponentials, given those of this program's part."""
    store_pair(slots_ptr, split, maximum, total)
    maxima, sums = collect_pairs(slots_ptr, splits, BLOCK_SPLITS)
    maximum, total = merge_normalizers(maxima, sums, tl.arange(0, BLOCK_SPLITS) < splits)
    return finite_shift(maximum), total


@triton.jit
def exchange_sums(slots_ptr, split, splits, first, second, BLOCK_SPLITS: tl.constexpr):
    """Return the sums of two numbers over the programs that share a row."""
    store_pair(slots_ptr, split, first, second)
    firsts, seconds = collect_pairs(slots_ptr, splits, BLOCK_SPLITS)
    valid = tl.arange(0, BLOCK_SPLITS) < splits
    first = tl.sum(tl.where(valid, firsts, 0.0), axis=0)
    return first, tl.sum(tl.where(valid, seconds, 0.0), axis=0)


@triton.jit
def merge_normalizers(maxima, sums, valid):
    """Return a row's maximum and sum of exponentials, given those of its parts, [BLOCK_SPLITS].

    The parts are merged in the order of the programs, so two runs give the same bits.
    """
    maximum = tl.max(tl.where(valid, maxima, -float("inf")), axis=0)
    return maximum, tl.sum(tl.where(valid, sums * exp(maxima - finite_shift(maximum)), 0.0), axis=0)


@triton.jit
def arrives_last(counter_ptr, splits):
    """Return whether all other programs of the row have stored their pairs. No program waits."""
    return tl.atomic_add(counter_ptr, 1, sem="acq_rel") == splits - 1


@triton.jit
def load_pairs(slots_ptr, splits, BLOCK_SPLITS: tl.constexpr):
    """Return the stored pairs of all programs, [BLOCK_SPLITS] each."""
    lane = tl.arange(0, BLOCK_SPLITS)
    return unpack_pair(tl.load(slots_ptr + lane, mask=lane < splits, other=1, volatile=True))
