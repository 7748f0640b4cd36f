"""Sizes of the reductions over rows, and the modes of the kernels."""

from __future__ import annotations

from torch import Tensor

SHARES = 32  # programs that share a reduction: one warp adds up their partial sums
# 64-bit words of workspace: a counter, a slot for each program, and one word of padding, so that
# whatever follows is aligned.
SUM_WORDS = 2 + SHARES

# The one-pass kernel also computes the denominators of the mean and reduces the loss, up to this
# many rows, programs and elements. Each of its programs reads all labels, which takes less time
# than a launch.
FEW_ROWS = 128  # which it reads in a smaller block
FUSED_ROWS = 1024
FUSED_ELEMENTS = 2**22

HARD_LABELS, SMOOTHED_LABELS, PROBABILITIES = 0, 1, 2  # values of SMOOTHING_MODE


def fused_block(rows: int, programs: int, classes: int) -> int:
    """Return the block in which a one-pass kernel reads labels and the losses of all programs.

    It is 0 if the kernel leaves the denominators and the reduction to other kernels.
    """
    size = max(rows, programs)
    if programs == 0 or size > FUSED_ROWS or rows * classes > FUSED_ELEMENTS:
        return 0
    return FEW_ROWS if size <= FEW_ROWS else FUSED_ROWS


def smoothing_mode(target: Tensor, label_smoothing: float) -> int:
    """Return which target weights a row has besides the one on its label.

    Hard labels have none, smoothed labels have the weights of the smoothing, and target
    probabilities have a weight for every class and no label.
    """
    if target.is_floating_point():
        return PROBABILITIES
    return SMOOTHED_LABELS if label_smoothing else HARD_LABELS
