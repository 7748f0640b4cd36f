"""Typed views of the workspace that CTC's loss allocates and keeps for its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .plan import CTCPlan, workspace_sizes


class CTCWorkspace(NamedTuple):
    """The parts of the workspace, which is one buffer; see `plan.workspace_sizes`.

    Fields:
        zeros: the words that must be 0 before the scan: `tile_counter`, `finished`, `flags`, and
            `carries` if a target has several chunks.
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

    zeros: Tensor
    tile_counter: Tensor | None
    finished: Tensor
    flags: Tensor
    carries: Tensor
    states: Tensor
    logz: Tensor
    maxima: Tensor | None
    sums: Tensor | None
    table: Tensor | None
    posteriors: Tensor | None
    blank_posteriors: Tensor | None


def workspace_views(
    buffer: Tensor, plan: CTCPlan, shape: Sequence[int], from_logits: bool, save: bool
) -> CTCWorkspace:
    """Return the parts of a buffer of shape `plan.saved_shape(...)`."""
    sizes = workspace_sizes(shape, plan, from_logits, save)
    words = buffer.view(torch.int64)
    (
        tile_counter,
        finished,
        flags,
        carries,
        states,
        logz,
        maxima,
        sums,
        table,
        posteriors,
        blank_posteriors,
        _,
    ) = words.split_with_sizes(list(sizes))
    acc_dtype = torch.float64 if plan.fp64 else torch.float32
    programs_wait = plan.num_chunks > 1 and not plan.fp64
    return CTCWorkspace(
        zeros=words[: sum(sizes[: 4 if plan.num_chunks > 1 else 3])],
        tile_counter=tile_counter if programs_wait else None,
        finished=finished,
        flags=flags,
        carries=carries,
        states=states,
        logz=logz.view(torch.float64),
        maxima=maxima.view(acc_dtype) if sizes.maxima else None,
        sums=sums.view(acc_dtype) if sizes.sums else None,
        table=table if plan.table_width else None,
        posteriors=posteriors.view(acc_dtype) if sizes.posteriors else None,
        blank_posteriors=blank_posteriors.view(acc_dtype) if sizes.posteriors else None,
    )
