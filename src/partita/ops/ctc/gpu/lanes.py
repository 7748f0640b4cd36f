"""Kernels of one warp per program, and sums and sorting over its 32 lanes."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from ....primitives.gpu.target import target_of
from ....runtime.launch import launch

# Triton's pass that rearranges memory accesses takes minutes for kernels of one warp, and gains
# nothing there. Gluon has no such pass. The interpreter and AMD know Triton alone, so each kernel
# of one warp exists in both languages.
LANES = gl.BlockedLayout([1], [32], [1], [0])


class LaneKernel(NamedTuple):
    """A kernel of one warp per program in both languages; see `LANES`."""

    triton: Any
    gluon: Any


def launch_lanes(kernel: LaneKernel, programs: int, device: torch.device, **options: Any) -> None:
    """Launch a kernel of one warp per program, in Gluon on NVIDIA GPUs."""
    function, options["LAYOUT"] = kernel.triton, None
    if target_of(device).runs_ptx:
        function, options["LAYOUT"] = kernel.gluon, LANES
    launch(function, programs, **options, num_warps=1)


@triton.jit
def lane_index(LAYOUT: tl.constexpr):
    """Return 0 to 31, in Triton's own layout, or in the layout that Gluon needs."""
    if LAYOUT is None:
        return tl.arange(0, 32)
    else:
        return gl.arange(0, 32, LAYOUT)


@triton.jit
def sum_over_lanes(values, lane, BIT: tl.constexpr = 16):
    """Sum each tensor of a tuple over the lanes; the length of the tuple is a power of two.

    Lane i of 32 gets the sum of tensor i · len(values) // 32.
    """
    if BIT == 0:
        return values[0]
    elif len(values) == 1:
        return sum_over_lanes((values[0] + tl.gather(values[0], lane ^ BIT, 0),), lane, BIT // 2)
    else:
        folded = ()
        for i in tl.static_range(len(values) // 2):
            first, second = values[i], values[i + len(values) // 2]
            sent = tl.gather(tl.where((lane & BIT) != 0, first, second), lane ^ BIT, 0)
            folded = folded + (tl.where((lane & BIT) != 0, second, first) + sent,)
        return sum_over_lanes(folded, lane, BIT // 2)


@triton.jit
def sort_by_class(label, has_label, lane, GROUPS: tl.constexpr):
    """Sort the lanes by label, and find the range of each class in that order.

    Lanes without a label come last. Returns the order `[32]`, and for each of GROUPS groups of 32
    classes a pair (begin, end) with one class per lane.
    """
    rank, order = lane * 0, lane * 0
    key, bounds = tl.where(has_label, label, 2147483647), ()
    for j in range(32):
        other = tl.gather(key, lane * 0 + j, 0)
        rank += ((other < key) | ((other == key) & (j < lane))).to(tl.int32)
    for j in range(32):
        order = tl.where(tl.gather(rank, lane * 0 + j, 0) == lane, j, order)
    for g in tl.static_range(GROUPS):
        begin, end = lane * 0, lane * 0
        for j in range(32):
            other = tl.gather(key, lane * 0 + j, 0)
            begin += (other < g * 32 + lane).to(tl.int32)
            end += (other <= g * 32 + lane).to(tl.int32)
        bounds = bounds + ((begin, end),)
    return order, bounds


@triton.jit
def prefix_sums(values, lane, BIT: tl.constexpr = 1):
    """Return the inclusive prefix sums over the lanes of each tensor of a tuple."""
    if BIT == 32:
        return values
    else:
        sums, source, valid = (), tl.maximum(lane - BIT, 0), (lane >= BIT).to(tl.float32)
        for i in tl.static_range(len(values)):
            sums = sums + (values[i] + tl.gather(values[i], source, 0) * valid,)
        return prefix_sums(sums, lane, 2 * BIT)


@triton.jit
def range_sum(sums, begin, end):
    """Return the sums over the ranges [begin, end) from inclusive prefix sums."""
    below = tl.gather(sums, tl.maximum(begin - 1, 0), 0) * (begin > 0).to(tl.float32)
    return tl.gather(sums, tl.maximum(end - 1, 0), 0) * (end > 0).to(tl.float32) - below
