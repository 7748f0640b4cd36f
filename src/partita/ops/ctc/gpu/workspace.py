"""The memory of CTC: the workspace that the loss keeps for its gradient, and that of the gradient.

The workspace is one tensor of fp64, whose parts the launches take.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....runtime.caches import register_cache
from ....runtime.parts import Part
from .plan import CHUNK, TABLE_MARGIN, CTCPlan, ceil_div, ctc_plan, saved_shape


class SavedScan(NamedTuple):
    """The parts of the workspace that kernels of the loss and of its gradient share.

    Fields:
        flags: `[N]` int64, zero before the first scan, see `lattice.NEEDS_FP64` and
            `lattice.INVALID`.
        carries: words `[2, num_chunks, N, carry_steps]`, zero before the first scan, what chunks
            hand to their neighbors.
        states: words `[2, num_blocks + 1, N, num_chunks, 2, 32]`, α and β before each eighth step
            of their halves, and at the middle.
        logz: `[N]` fp64, log2 of the partition function.
        maxima: `[T, N]`, the maximum of each row; None for log-probabilities, and in scans.
        sums: `[T, N]`, the sum of exponentials relative to it; None likewise.
    """

    flags: Part
    carries: Part
    states: Part
    logz: Part
    maxima: Part | None
    sums: Part | None


class CTCWorkspace(NamedTuple):
    """The parts of the workspace, which is one buffer; see `workspace_layout`.

    Fields:
        buffer: the whole buffer.
        num_zeros: the words from the start that must be 0 before the scan: `tile_counter`,
            `finished`, the flags, and the carries if a target has several chunks.
        zeros: these words.
        tile_counter: `[1]`, counts the programs that have started; None if no program waits.
        finished: `[1]`, counts the programs of the loss kernel that have stored their loss.
        saved: see `SavedScan`.
        table: `[N, 24 + T + 24, table_width]`, emissions as words, or None.
    """

    buffer: Tensor
    num_zeros: int
    zeros: Part
    tile_counter: Part | None
    finished: Part
    saved: SavedScan
    table: Part | None


class WorkspaceLayout(NamedTuple):
    """Where the parts of the workspace are.

    Fields:
        plan: how the batch is cut.
        words: the size of the buffer in 64-bit words.
        num_zeros: see `CTCWorkspace`.
        parts: the offset in bytes and the dtype, or None, of the zeros, the counters, the fields of
            `SavedScan` and the table.
    """

    plan: CTCPlan
    words: int
    num_zeros: int
    parts: tuple[tuple[int, torch.dtype] | None, ...]

    def of(self, buffer: Tensor) -> CTCWorkspace:
        """Return the parts of a buffer."""
        parts: list[Any] = [part and (buffer, *part) for part in self.parts]
        zeros, tile_counter, finished, *saved, table = parts
        counters = (tile_counter, finished)
        return CTCWorkspace(buffer, self.num_zeros, zeros, *counters, SavedScan(*saved), table)


@functools.lru_cache(maxsize=4096)
def workspace_layout(
    shape: tuple[int, int, int], fp64: bool, max_target_len: int, from_logits: bool, save: bool
) -> WorkspaceLayout:
    """Return the layout of a buffer of shape `plan.saved_shape(...)`.

    Each part starts on 16 bytes, because Triton compiles another kernel for unaligned pointers.
    """
    (T, N, _), plan = shape, ctc_plan(shape, fp64, max_target_len)
    rows, chunks, acc_dtype = T * N, N * plan.num_chunks, torch.float32
    normalizers = ceil_div(rows, 2)
    if fp64:
        normalizers, acc_dtype = rows, torch.float64
    sizes = (
        (plan.num_chunks > 1 and not fp64, 1, torch.int64),  # tile_counter
        (True, 1, torch.int64),  # finished
        (True, N, torch.int64),  # flags
        (True, 2 * chunks * plan.carry_steps, torch.int64),  # carries
        (True, 2 * (plan.num_blocks * save + 1) * chunks * 2 * CHUNK, torch.int64),  # states
        (True, N, torch.float64),  # logz
        (from_logits, normalizers, acc_dtype),  # maxima
        (from_logits, normalizers, acc_dtype),  # sums
        (plan.table_width > 0, (T + 2 * TABLE_MARGIN) * N * plan.table_width, torch.int64),
    )
    parts, starts, start = [], [], 0
    for wanted, words, dtype in sizes:
        parts.append((8 * start, dtype) if wanted else None)
        starts.append(start)
        start += words + words % 2 if wanted else 0
    (words,) = saved_shape(shape, max_target_len, save, "gpu")
    num_zeros = starts[4 if plan.num_chunks > 1 else 3]
    return WorkspaceLayout(plan, words, num_zeros, ((0, torch.int64), *parts))


register_cache("ctc.gpu.workspace.layouts", workspace_layout.cache_clear)


class ScanMemory(NamedTuple):
    """The memory that the scan of the posteriors writes.

    Fields:
        counter: `[1]`, counts the programs that have started; None if no program waits.
        carries: `[2, num_chunks, N, carry_steps]`, what chunks hand to their neighbors.
        labels: `[N, num_chunks, T, 32]`, the posteriors of the labels.
        blanks: `[N, num_chunks, T]`, those of the blank.
        order: `[N, num_chunks, 1 + 2 * class_groups, 32]` int32, the order of the labels by class
            and the range of each class; None for many classes.
    """

    counter: Tensor | None
    carries: Tensor | None
    labels: Tensor
    blanks: Tensor
    order: Tensor | None


def scan_memory(logits: Tensor, plan: CTCPlan) -> ScanMemory:
    """Return memory for the scan of logits `[T, N, C]`."""
    T, N, _ = logits.shape
    device, chunks = logits.device, plan.num_chunks
    dtype = torch.float64 if plan.fp64 else torch.float32
    counter = order = None
    if chunks > 1 and not plan.fp64:
        counter = torch.empty(1, dtype=torch.int64, device=device)
    if plan.class_groups > 0:
        shape = (N, chunks, 1 + 2 * plan.class_groups, CHUNK)
        order = torch.empty(shape, dtype=torch.int32, device=device)
    carries = torch.empty((2, chunks, N, plan.carry_steps), dtype=torch.int64, device=device)
    labels = torch.empty((N, chunks, T, CHUNK), dtype=dtype, device=device)
    blanks = torch.empty((N, chunks, T), dtype=dtype, device=device)
    return ScanMemory(counter, carries, labels, blanks, order)
