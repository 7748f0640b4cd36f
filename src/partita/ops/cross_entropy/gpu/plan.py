"""Sizes of the reductions over rows, the layout of their workspace, and the kernels' modes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

SHARES = 32  # programs that share a reduction: one warp adds up their partial sums
# 64-bit words of workspace: a counter, a slot for each program, and one word of padding, so that
# whatever follows is aligned.
SUM_WORDS = 2 + SHARES
# PyTorch multiplies gradients of up to this many elements by the incoming gradient, which takes the
# host less time than an op. The kernel saves the pass over a larger one if the factor is 1.
SMALL_GRADIENT = 2**16
SCALE_BLOCK = 4096  # elements that a program of the scaling kernel handles at a time
SCALE_PROGRAMS = 1024

# The one-pass kernel also computes the denominators of the mean and reduces the loss, up to this
# many rows, programs and elements. Each of its programs reads all labels, which takes less time
# than a launch.
FEW_ROWS = 128  # which it reads in a smaller block
FUSED_ROWS = 1024
FUSED_ELEMENTS = 2**22

HARD_LABELS, SMOOTHED_LABELS, PROBABILITIES = 0, 1, 2  # values of SMOOTHING_MODE


class ReductionPlan(NamedTuple):
    """A cut of a sum over rows into programs.

    Fields:
        programs: programs that share the sum.
        block: elements that a program reads at a time.
    """

    programs: int
    block: int


def reduction_plan(elements: int) -> ReductionPlan:
    """Return how many programs share a sum of `elements` numbers."""
    share = -(-elements // SHARES)
    block = min(2048, max(128, 1 << (share - 1).bit_length()))
    return ReductionPlan(max(1, min(SHARES, -(-elements // block))), block)


def fused_block(rows: int, programs: int, classes: int) -> int:
    """Return the block in which a one-pass kernel reads labels and the losses of all programs.

    It is 0 if the kernel leaves the denominators and the reduction to other kernels.
    """
    size = max(rows, programs)
    if programs == 0 or size > FUSED_ROWS or rows * classes > FUSED_ELEMENTS:
        return 0
    return FEW_ROWS if size <= FEW_ROWS else FUSED_ROWS


def has_row_programs(rows: int, width: int) -> bool:
    """Return whether each row of a gradient is multiplied by a program of its own.

    The number of programs then grows evenly with the rows.
    """
    return rows <= FUSED_ROWS and 0 < width <= SCALE_BLOCK


def scale_programs(rows: int, width: int) -> int:
    """Return how many programs multiply a gradient of so many rows by a factor."""
    if has_row_programs(rows, width):
        return rows
    return min(-(-rows * width // SCALE_BLOCK), SCALE_PROGRAMS)


def smoothing_mode(target: Tensor, label_smoothing: float) -> int:
    """Return which target weights a row has besides the one on its label.

    Hard labels have none, smoothed labels have the weights of the smoothing, and target
    probabilities have a weight for every class and no label.
    """
    if target.is_floating_point():
        return PROBABILITIES
    return SMOOTHED_LABELS if label_smoothing else HARD_LABELS
