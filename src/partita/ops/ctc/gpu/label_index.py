"""The positions of each class in a target.

The gradient of a class sums the posteriors of all its positions. With many classes, it follows the
positions of a class from first to last; with few, it sums ranges of the labels of a chunk in sorted
order, which `posterior_scan.py` stores.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime import launch as runtime_launch
from .lattice import TargetTensors, load_target


class LabelIndex(NamedTuple):
    """The positions of each class in each target; all tensors are int32.

    Fields:
        first: `[N, C]`, the first position of each class, or -1.
        max_repeats: `[N]`, the greatest number of positions after the first; -1 if no class occurs.
        next: `[N, L]`, the next position with the same class, or -1.
    """

    first: Tensor
    max_repeats: Tensor
    next: Tensor


def label_index(targets: TargetTensors, max_target_len: int, C: int, blank: int) -> LabelIndex:
    """Return where each class but the blank occurs in the targets."""
    N, labels = len(targets.target_lengths), targets.labels
    # Each tensor starts on 16 bytes.
    sizes = [runtime_launch.cdiv(size, 4) * 4 for size in (N * C, N, N * max_target_len)]
    buffer = torch.empty(sum(sizes), dtype=torch.int32, device=labels.device)
    buffer[: sizes[0] + sizes[1]].fill_(-1)
    index = LabelIndex(*buffer.split_with_sizes(sizes))
    runtime_launch.launch(
        ctc_label_index_kernel,
        N * runtime_launch.cdiv(max_target_len, 64),
        targets=targets._replace(input_lengths=None),
        index=index,
        M=labels.numel(),
        max_target_len=max_target_len,
        C=C,
        blank=blank,
        BLOCK=64,
        num_warps=4,
    )
    return index


@triton.jit(do_not_specialize=["M", "max_target_len", "C", "blank"])
def ctc_label_index_kernel(
    targets,  # TargetTensors without input lengths
    index,  # LabelIndex; the first positions and the repeats are -1
    M,
    max_target_len,
    C,
    blank,
    BLOCK: tl.constexpr,
):
    """Find the first and next positions of each class, and the greatest number of repeats."""
    blocks = tl.cdiv(max_target_len, BLOCK)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    target_len, offset, invalid = load_target(targets, n, max_target_len, M)
    target_len = tl.where(invalid, 0, target_len).to(tl.int32)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(targets.labels + offset + j, mask=j < target_len, other=-1)
    next_index, before = tl.full([BLOCK], 2147483647, tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, target_len, BLOCK):
        i = start + tl.arange(0, BLOCK)
        other = tl.load(targets.labels + offset + i, mask=i < target_len, other=-2)
        same = label[:, None] == other[None, :]
        next_index = tl.minimum(
            next_index,
            tl.min(tl.where(same & (i[None, :] > j[:, None]), i[None, :], 2147483647), axis=1),
        )
        before += tl.sum((same & (i[None, :] < j[:, None])).to(tl.int32), axis=1)
    valid = (j < target_len) & (label >= 0) & (label < C) & (label != blank)
    tl.store(
        index.next + n * max_target_len + j,
        tl.where(next_index < 2147483647, next_index, -1),
        mask=j < target_len,
    )
    tl.store(index.first + n * C + label, j, mask=valid & (before == 0))
    # The maximum of integers is the same in any order.
    tl.atomic_max(index.max_repeats + n, tl.max(tl.where(valid, before, -1), axis=0))
