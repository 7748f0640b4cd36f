"""The memory of CTC: the workspace that the loss keeps for its gradient, and that of the gradient.

Each is one tensor of fp64, whose parts the launches take.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime.parts import Part
from .plan import CHUNK, CTCPlan, ceil_div, workspace_sizes

ALIGNMENT = 32  # words; rows of posteriors start on whole lines of the cache


class CTCWorkspace(NamedTuple):
    """The parts of the workspace, which is one buffer; see `plan.workspace_sizes`.

    Fields:
        num_zeros: the words from the start that must be 0 before the scan: `tile_counter`,
            `finished`, `flags`, and `carries` if a target has several chunks.
        zeros: these words.
        tile_counter: `[1]`, counts the programs that have started; None if no program waits.
        finished: `[1]`, counts the programs of the loss kernel that have stored their loss.
        flags: `[N]`, see `lattice.NEEDS_FP64` and `lattice.INVALID`.
        carries: `[2, num_chunks, N, carry_steps]`, what chunks hand to their neighbors.
        states: `[2, num_blocks + 1, N, num_chunks, 2, 32]`, α and β before each eighth step of
            their halves, and at the middle.
        logz: `[N]` fp64, log2 of the partition function.
        maxima: `[T, N]`, the maximum of each row; None for log-probabilities.
        sums: `[T, N]`, the sum of exponentials relative to it; None for log-probabilities.
        table: `[N, 24 + T + 24, table_width]`, emissions as words, or None.
        posteriors: `[N, num_chunks, T, 32]` by label, if the loss computes them, otherwise None.
        blank_posteriors: `[N, num_chunks, T]`, those of the blank, or None.
    """

    num_zeros: int
    zeros: Part
    tile_counter: Part | None
    finished: Part
    flags: Part
    carries: Part
    states: Part
    logz: Part
    maxima: Part | None
    sums: Part | None
    table: Part | None
    posteriors: Part | None
    blank_posteriors: Part | None


def workspace_parts(
    buffer: Tensor, plan: CTCPlan, shape: Sequence[int], from_logits: bool, save: bool
) -> CTCWorkspace:
    """Return the parts of a buffer of shape `plan.saved_shape(...)`."""
    sizes = workspace_sizes(shape, plan, from_logits, save)
    starts = [8 * words for words in accumulate(sizes, initial=0)]
    acc_dtype = torch.float64 if plan.fp64 else torch.float32
    programs_wait = plan.num_chunks > 1 and not plan.fp64
    has_posteriors = sizes.posteriors > 0
    return CTCWorkspace(
        num_zeros=starts[4 if plan.num_chunks > 1 else 3] // 8,
        zeros=(buffer, 0, torch.int64),
        tile_counter=(buffer, starts[0], torch.int64) if programs_wait else None,
        finished=(buffer, starts[1], torch.int64),
        flags=(buffer, starts[2], torch.int64),
        carries=(buffer, starts[3], torch.int64),
        states=(buffer, starts[4], torch.int64),
        logz=(buffer, starts[5], torch.float64),
        maxima=(buffer, starts[6], acc_dtype) if sizes.maxima else None,
        sums=(buffer, starts[7], acc_dtype) if sizes.sums else None,
        table=(buffer, starts[8], torch.int64) if plan.table_width else None,
        posteriors=(buffer, starts[9], acc_dtype) if has_posteriors else None,
        blank_posteriors=(buffer, starts[10], acc_dtype) if has_posteriors else None,
    )


class ScanMemory(NamedTuple):
    """The memory that the scan of the posteriors writes.

    Fields:
        counter: `[1]`, counts the programs that have started; None if no program waits.
        carries: `[2, num_chunks, N, carry_steps]`, what chunks hand to their neighbors.
        posteriors: `[N, num_chunks, T, width]` by label or by class.
        blank_posteriors: `[N, num_chunks, T]`, those of the blank.
        order: `[N, num_chunks, 1 + 2 * class_groups, 32]` int32, the order of the labels by class
            and the range of each class; None if it is not used.
    """

    counter: Part | None
    carries: Part
    posteriors: Part
    blank_posteriors: Part
    order: Part | None


def scan_memory(logits: Tensor, plan: CTCPlan, width: int, workspace: CTCWorkspace) -> ScanMemory:
    """Return the memory of the scan; posteriors that the workspace has a part for are there.

    Args:
        logits: `[T, N, C]`.
        plan: how the batch is cut.
        width: the numbers in a row of posteriors.
        workspace: the parts of the workspace.
    """
    T, N, _ = logits.shape
    posteriors, blanks = workspace.posteriors, workspace.blank_posteriors
    is_saved = posteriors is not None
    chunks, per_word = N * plan.num_chunks, 1 if plan.fp64 else 2
    has_order = plan.class_groups > 0 and not plan.sum_by_class and not is_saved
    sizes = (
        2,
        2 * chunks * plan.carry_steps if plan.num_chunks > 1 else 0,
        0 if is_saved else ceil_div(chunks * T * width, per_word),
        0 if is_saved else ceil_div(chunks * T, per_word),
        chunks * (1 + 2 * plan.class_groups) * CHUNK // 2 if has_order else 0,
    )
    starts = [
        8 * words
        for words in accumulate((-(-n // ALIGNMENT) * ALIGNMENT for n in sizes), initial=0)
    ]
    buffer = torch.empty(starts[5] // 8, dtype=torch.float64, device=logits.device)
    dtype = torch.float64 if plan.fp64 else torch.float32
    return ScanMemory(
        counter=None if workspace.tile_counter is None else (buffer, 0, torch.int64),
        carries=(buffer, starts[1], torch.int64),
        posteriors=posteriors or (buffer, starts[2], dtype),
        blank_posteriors=blanks or (buffer, starts[3], dtype),
        order=(buffer, starts[4], torch.int32) if has_order else None,
    )
