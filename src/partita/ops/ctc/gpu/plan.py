"""CTC on a GPU: how a batch is cut into programs, and the memory of its launches.

The loss keeps a workspace for its gradient. It is one tensor of fp64, whose parts the launches
take. Plans are pure functions of sizes. Nothing here imports Triton, so that the fakes of the
registered ops can use it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....runtime.caches import register_cache
from ....runtime.sizes import cdiv, choose, smaller

CHUNK = 32  # positions of a target in a chunk, one per lane of a warp
SAVE_EVERY = 8  # steps from one saved state to the next
TABLE_MARGIN = 24  # rows of the emission table before and after its steps
FULL_GPU = 2048  # programs beyond which a GPU is full


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

    flags: Tensor
    carries: Tensor
    states: Tensor
    logz: Tensor
    maxima: Tensor | None
    sums: Tensor | None


class CTCWorkspace(NamedTuple):
    """The parts of the workspace, which is one buffer; see `ctc_plan`.

    Fields:
        buffer: the whole buffer.
        zeros: the words from its start that must be 0 before the scan, see `CTCPlan.num_zeros`.
        tile_counter: `[1]`, counts the programs that have started; None if no program waits.
        finished: `[1]`, counts the programs of the loss kernel that have stored their loss.
        saved: see `SavedScan`.
        table: `[N, 24 + T + 24, table_width]`, emissions as words, or None.
    """

    buffer: Tensor
    zeros: Tensor
    tile_counter: Tensor | None
    finished: Tensor
    saved: SavedScan
    table: Tensor | None


class CTCPlan(NamedTuple):
    """The sizes of the programs into which a batch is cut, and the layout of the workspace.

    Fields:
        fp64: whether the states of all sequences are in fp64.
        table_width: row length of the emission table of all classes, 0 if there is none.
        num_chunks: chunks of 32 target positions; each is a program in each direction.
        class_groups: groups of 32 classes if there are few classes, otherwise 0.
        num_blocks: blocks of SAVE_EVERY steps in a half.
        carry_steps: steps in these blocks, which is the number of carries of a chunk.
        words: the size of the workspace in 64-bit words.
        num_zeros: how many of them must be 0 before the scan: the counters, the flags, and the
            carries if a target has several chunks.
        sizes: the words of the counters, of the fields of `SavedScan` and of the table, 0 without
            them, and the rest. Each starts on 16 bytes.
    """

    fp64: bool
    table_width: int
    num_chunks: int
    class_groups: int
    num_blocks: int
    carry_steps: int
    words: int
    num_zeros: int
    sizes: tuple[int, ...]

    def workspace(self, buffer: Tensor) -> CTCWorkspace:
        """Return the parts of a buffer."""
        words = buffer.view(torch.int64)
        parts: list[Any] = [part if len(part) else None for part in words.split(self.sizes)]
        counter, finished, flags, carries, states, logz, *normalizers, table, _ = parts
        dtype = torch.float64 if self.fp64 else torch.float32
        of_rows = (part if part is None else part.view(dtype) for part in normalizers)
        saved = SavedScan(flags, carries, states, logz.view(torch.float64), *of_rows)
        return CTCWorkspace(buffer, words, counter, finished, saved, table)


def table_width(C: int, max_target_len: int) -> int:
    """Return the row length of the emission table: C rounded up to 8 for few classes, else 0."""
    return choose(C <= smaller(4 * max_target_len, 256), cdiv(C, 8) * 8, 0)


def saved_shape(
    shape: Sequence[int], max_target_len: int, save: bool, backend_table: str
) -> tuple[int, ...]:
    """Return the shape of the fp64 tensor that the loss saves for the gradient.

    Args:
        shape: `[T, N, C]` of the logits.
        max_target_len: the greatest target length.
        save: whether a gradient will be computed.
        backend_table: "reference" saves nothing; "cpu" saves α before each step; "gpu" saves the
            workspace: states before each eighth step, carries, log-sum-exps, and the emission table
            for few classes.
    """
    T, N, C = shape
    if backend_table == "cpu" and save:
        return N, T + 1, 2 * max_target_len + 4
    if backend_table != "gpu":
        return (0,)
    num_blocks, num_chunks = (T + 16) // 16, max_target_len // CHUNK + 1
    states = 2 * ((num_blocks if save else 0) + 1) * N * num_chunks * 2 * CHUNK
    carries = 2 * N * num_chunks * num_blocks * SAVE_EVERY
    table = (T + 2 * TABLE_MARGIN) * table_width(C, max_target_len)
    # 16 words leave room for the counters and for the alignment of each part.
    return (16 + states + carries + (2 + 2 * T + table) * N,)


@functools.lru_cache(maxsize=4096)
def ctc_plan(
    shape: tuple[int, int, int], fp64: bool, max_target_len: int, from_logits: bool, save: bool
) -> CTCPlan:
    """Return the plan for logits of shape `[T, N, C]`.

    Each part of the workspace starts on 16 bytes, because Triton compiles another kernel for
    unaligned pointers.
    """
    T, N, C = shape
    width = 0 if fp64 else table_width(C, max_target_len)
    num_blocks, num_chunks = cdiv(T + 1, 2 * SAVE_EVERY), max_target_len // CHUNK + 1
    carry_steps, chunks = num_blocks * SAVE_EVERY, N * num_chunks
    normalizers = T * N if fp64 else cdiv(T * N, 2)
    sizes = [
        int(num_chunks > 1 and not fp64),  # tile_counter
        1,  # finished
        N,  # flags
        2 * chunks * carry_steps,  # carries
        2 * (num_blocks * save + 1) * chunks * 2 * CHUNK,  # states
        N,  # logz
        normalizers * from_logits,  # maxima
        normalizers * from_logits,  # sums
        (T + 2 * TABLE_MARGIN) * N * width,  # table
    ]
    sizes = [size + size % 2 for size in sizes]
    words = saved_shape(shape, max_target_len, save, "gpu")[0]
    return CTCPlan(
        fp64=fp64,
        table_width=width,
        num_chunks=num_chunks,
        class_groups=cdiv(C, 32) if C <= 64 else 0,
        num_blocks=num_blocks,
        carry_steps=carry_steps,
        words=words,
        num_zeros=sum(sizes[: 4 if num_chunks > 1 else 3]),
        sizes=(*sizes, words - sum(sizes)),
    )


register_cache("ctc.gpu.plan", ctc_plan.cache_clear)


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
