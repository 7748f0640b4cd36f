"""The posteriors of CTC's second scan in memory, by label or summed by class."""

from typing import NamedTuple

import triton
import triton.language as tl

from .lanes import prefix_sums, range_sum, sum_over_lanes


class PosteriorRows(NamedTuple):
    """The memory for a chunk's posteriors, and the order in which they are summed.

    Fields:
        label_ptr: the first row of posteriors, `[WIDTH]` for each step.
        blank_ptr: the blank's posterior of the first step.
        order: the lanes sorted by class, `[32]`.
        bounds: the range of each class in that order, for each group of 32 classes.
        C: number of columns by class: the classes, and the star if there is one.
    """

    label_ptr: tl.tensor
    blank_ptr: tl.tensor
    order: tl.tensor
    bounds: tuple[tl.tensor, ...]
    C: tl.tensor


@triton.jit
def store_posteriors(
    rows,
    labels,
    blanks,
    p,
    padding,
    lane,
    FORWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store the posteriors of a block of steps, by label or by class, and those of the blanks.

    The sums of the blanks have one step in every 32 / BLOCK_T lanes.
    """
    sign: tl.constexpr = 1 if FORWARD else -1
    step = p - padding + lane * BLOCK_T // 32
    total = sum_over_lanes(blanks, lane).to(rows.blank_ptr.dtype.element_ty)
    tl.store(rows.blank_ptr + step * sign, total, mask=(lane % (32 // BLOCK_T) == 0) & (step >= 0))
    row_ptr = rows.label_ptr + (p - padding).to(tl.int64) * (sign * WIDTH) + lane
    if GROUPS == 0:
        for u in tl.static_range(BLOCK_T):
            tl.store(
                row_ptr + u * sign * WIDTH,
                labels[u].to(rows.label_ptr.dtype.element_ty),
                mask=p + u >= padding,
            )
    else:
        ordered = ()
        for u in tl.static_range(BLOCK_T):
            ordered = ordered + (tl.gather(labels[u], rows.order, 0),)
        sums = prefix_sums(ordered, lane)
        for g in tl.static_range(GROUPS):
            for u in tl.static_range(BLOCK_T):
                valid = (p + u >= padding) & (g * 32 + lane < rows.C)
                tl.store(
                    row_ptr + (u * sign * WIDTH + g * 32),
                    range_sum(sums[u], rows.bounds[g][0], rows.bounds[g][1]),
                    mask=valid,
                )
