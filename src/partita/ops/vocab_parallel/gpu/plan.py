"""Memory and sizes of the kernel in which the GPUs of one host share rows."""

from __future__ import annotations

from typing import Any, NamedTuple


class RankMemory(NamedTuple):
    """The memory in which ranks exchange the statistics of rows."""

    # The slots of this rank, [world + M * (world * splits + 1)] int64, zero: the header of each
    # rank, then for each row the pairs of all ranks' programs and the logit of the label.
    slots_ptr: Any
    peers_ptr: Any  # the addresses of the slots of all ranks, [world] int64
    timed_out_ptr: Any  # whether a program of this rank has timed out in any call, [1] int64
    failed_ptr: Any  # the same for the host, [1] int32 on the host


class RowSplit(NamedTuple):
    """The division of each rank's part of a row, which is the same on all ranks."""

    splits: int  # programs that share the part of one rank
    block: int  # classes that one program holds in registers


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
