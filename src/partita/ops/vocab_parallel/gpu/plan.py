"""Sizes and launch options of the kernel in which the GPUs of one host share rows."""

from __future__ import annotations

from typing import NamedTuple


class RowSplit(NamedTuple):
    """The division of each rank's part of a row, which is the same on all ranks.

    Fields:
        splits: programs that share the part of one rank.
        block: classes that one program holds in registers.
    """

    splits: int
    block: int


def row_split(sizes: tuple[int, ...], itemsize: int) -> RowSplit:
    """Divide a row whose ranks have `sizes` classes of `itemsize` bytes."""
    block = min(1 << (max(*sizes, 1024) - 1).bit_length(), 16384 if itemsize == 2 else 8192)
    return RowSplit(max(1, -(-max(sizes) // block)), block)


def slots_per_row(sizes: tuple[int, ...], itemsize: int) -> int:
    """Return how many slots a row has: one for each program of all ranks, and one for the label."""
    return len(sizes) * row_split(sizes, itemsize).splits + 1


def slot_count(M: int, sizes: tuple[int, ...], itemsize: int) -> int:
    """Return how many 64-bit slots a call uses: a header of each rank, and those of M rows."""
    return len(sizes) + M * slots_per_row(sizes, itemsize)
