"""Statistics over the classes that a sampler keeps on a GPU: allocation and launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import (
    RowView,
    flat_rows,
    lane_tile,
    launch_elementwise,
    matrix_rows,
    row_view,
    with_output,
)
from ....runtime.launch import launch, next_power_of_2, tl_acc_dtype
from ..common import (
    Rules,
    TruncatedGrads,
    TruncatedKernels,
    TruncatedRows,
    TruncatedSums,
    truncated_fake,
)
from .kernels import SamplerRules, truncated_stats_backward_kernel, truncated_stats_kernel

WHOLE_ROW = 4096  # classes of a row that is one tile
LONG_ROW = 32_768  # classes from which on more warps read a row
WARPS, SHORT_WARPS = 8, 4
EACH = 16  # classes of a block for each thread
REGISTERS = 512  # of a thread, times the warps of its program
TILE = 4096  # classes that are searched at once at most
SAMPLE = 4096  # classes from which thresholds are guessed
BINS = 128
# The low bits of the key of a number in fp32 that all keys of a half type share.
SHARED_BITS = {torch.bfloat16: 16, torch.float16: 13}


def truncated_of_rows(
    logits: Tensor,
    target: Tensor | None,
    rules: Rules,
    softcap: float,
    ignore_index: int,
    found: TruncatedRows,
) -> None:
    """Write the statistics of rows `[M, C]` to the results."""
    target = None if target is None else target.contiguous()
    rules = rules.map(Tensor.contiguous)
    M, classes = logits.shape
    whole = classes <= WHOLE_ROW
    if not whole and logits.stride(1) != 1:  # each read would load a sector for each class
        logits = logits.contiguous()
    rows = matrix_rows(logits)
    # Half of the sample and of the tile are enough for the bracket of top-k, and half of the warps
    # have less work that is the same in all of them. In fp32 the kernel would spill more.
    part = 2 if rules.top_k is not None and logits.element_size() == 2 else 1
    # A bracket has few classes of a short row.
    candidates = min(max(next_power_of_2(classes // 16), 1024), TILE // part)
    if whole:
        candidates = next_power_of_2(classes)
        tile = lane_tile(classes, candidates, max(candidates // 1024, 1), rows)
        candidates = tile.block
    else:
        warps = WARPS // part if classes >= LONG_ROW else SHORT_WARPS
        tile = lane_tile(classes, EACH * 32 * warps, warps, rows)
    dtype = found.maximum.dtype
    # All addresses of a row of the buffer have the same high word.
    width = 0 if whole else next_power_of_2(3 * candidates + tile.block)
    buffer = logits.new_empty((M + 1) * width, dtype=dtype)
    first = -buffer.data_ptr() // dtype.itemsize % max(width, 1)
    limit = {}
    if not whole and tile.access and logits.element_size() <= 4:
        limit = {"maxnreg": REGISTERS // (part * tile.num_warps)}
    launch(
        truncated_stats_kernel,
        M,
        logits=rows,
        target_ptr=target,
        rules=SamplerRules(*rules[:4]),
        results=found,
        buffer=matrix_rows(buffer[first : first + M * width].view(M, width)),
        classes=classes,
        softcap=softcap,
        ignore_index=ignore_index,
        MIN_P_FIRST=rules.min_p_first,
        KEEPS_TARGET=rules.keeps_target,
        HAS_SOFTCAP=softcap != 0,
        SHIFT=SHARED_BITS.get(logits.dtype, 0),
        ACC_DTYPE=tl_acc_dtype(logits.dtype),
        WHOLE=whole,
        CANDIDATES=candidates,
        SAMPLE=SAMPLE // part,
        BINS=BINS,
        TILE=tile,
        num_warps=tile.num_warps,
        **limit,
    )


def truncated_stats(
    logits: Tensor,
    target: Tensor | None,
    rules: Rules,
    softcap: float,
    ignore_index: int,
) -> TruncatedRows:
    """Compute the statistics of rows, `[..., C]`, over the classes that the rules keep."""
    found = truncated_fake(logits)
    if found.label.numel():
        rows = logits.reshape(-1, logits.shape[-1])
        truncated_of_rows(rows, target, rules, softcap, ignore_index, found)
    return found


def truncated_stats_backward(
    grads: TruncatedGrads,
    logits: Tensor,
    rows: TruncatedSums,
    keeps_target: bool,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Compute the gradient of the logits from those of the rows' statistics."""
    options = (grads, rows, logits.shape[-1], keeps_target, softcap, ignore_index)

    def run(view: RowView) -> None:
        _write_gradient(view, 0, *options)

    return with_output(run, -1, logits, dtype=logits.dtype)


def truncated_gradient(logits: Tensor, *args: Any) -> None:
    """Write the gradient of the logits of some classes; see the reference."""
    *options, result = args
    view = row_view(-1, logits, result)
    assert view is not None
    _write_gradient(view, *options)


def _write_gradient(
    view: RowView,
    first: int,
    grads: TruncatedGrads,
    rows: TruncatedSums,
    classes: int,
    keeps_target: bool,
    softcap: float,
    ignore_index: int,
) -> None:
    numbers = ("on_label", "on_all", "on_kept", "on_entropy")
    gradients = map(flat_rows, grads)
    contiguous: Any = (None if each is None else each.contiguous() for each in rows)
    launch_elementwise(
        truncated_stats_backward_kernel,
        view,
        **dict(zip(numbers, gradients, strict=True)),
        logits=view.strided[0],
        found=TruncatedSums(*contiguous),
        dlogits=view.strided[1],
        width=view.classes,
        first=first,
        classes=classes,
        softcap=softcap,
        ignore_index=ignore_index,
        KEEPS_TARGET=keeps_target,
        HAS_SOFTCAP=softcap != 0,
    )


TRUNCATED_KERNELS = TruncatedKernels(truncated_of_rows, truncated_gradient)
