"""The calls of ops that differ by their number of rows alone, as in ragged batches."""

from __future__ import annotations

from typing import Any

import torch

from ...runtime.programs import Rows
from .gpu.plan import (
    FEW_ROWS,
    FUSED_ROWS,
    PROBABILITIES,
    fused_block,
    has_row_programs,
    smoothing_mode,
)


def loss_grows_evenly(args: tuple[Any, ...], limit: int) -> bool:
    """Return whether one program serves all numbers of rows of a class of calls.

    That is so where each program of the kernel has one row of labels and reduces the loss itself,
    in the same block for the fewest and the most rows.

    Args:
        args: the arguments of `cross_entropy_one_pass`.
        limit: the greatest number of rows of the class.
    """
    from ...primitives.gpu.row_plan import row_plan_for, row_view  # Triton may be missing

    logits, target, _, denominator, _, label_smoothing, *_ = args
    if logits.ndim != 2 or denominator is not None:
        return False
    if smoothing_mode(target, label_smoothing) == PROBABILITIES:
        return False
    view = row_view(1, logits, logits, torch.empty_like(logits))
    plan = None if view is None else row_plan_for(view, patched=True)
    if plan is None or plan.kind == "loop" or plan.max_registers is not None:
        return False
    block = fused_block(logits.shape[0], logits.shape[0], logits.shape[1])
    is_same = block == fused_block(limit, limit, logits.shape[1])
    return plan.rows == plan.splits == 1 and block > 0 and is_same


def scaling_grows_evenly(args: tuple[Any, ...], limit: int) -> bool:
    """Return whether one program multiplies gradients with all numbers of rows of a class.

    Args:
        args: the arguments of `scale_`.
        limit: the greatest number of rows of the class.
    """
    gradient = args[0]
    return gradient.is_contiguous() and has_row_programs(limit, gradient[0].numel())


# A single row needs no exchange, so it is in no class.
LOSS_ROWS = Rows((0, 1), (1, FEW_ROWS, FUSED_ROWS), loss_grows_evenly)
SCALED_ROWS = Rows((0,), (1, FUSED_ROWS), scaling_grows_evenly)
