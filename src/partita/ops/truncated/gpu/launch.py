"""Statistics over the classes that a sampler keeps on a GPU: allocation and launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import (
    RowView,
    flat_rows,
    launch_elementwise,
    matrix_rows,
    row_view,
    with_output,
)
from ....primitives.gpu.target import target_of
from ....runtime.launch import launch, next_power_of_2, tl_acc_dtype
from ..common import Rules, TruncatedKernels, TruncatedRows, TruncatedSums, truncated_fake
from .kernels import (
    truncated_stats_backward_kernel,
    truncated_stats_kernel,
    truncated_totals_kernel,
)

WARP = 32
TILE = 4096  # classes that are searched on chip
WARPS = 4
READ_BYTES = 64  # the bytes of a row that each thread reads at once
READ_REGISTERS, SEARCH_REGISTERS = 80, 128
SAMPLE = 4096  # classes from which thresholds are guessed
BINS = 256
COMMON = 32  # classes of the sample from which on the first read collects
MARGIN = 1.5  # of guesses, in standard deviations
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
    whole = classes <= TILE
    tile = max(next_power_of_2(classes), 2 * WARP) if whole else TILE
    gpu = target_of(logits.device)
    warps = max(tile // 1024, 1) if whole else WARPS * WARP // gpu.warp_size
    lanes, rows = gpu.warp_size * warps, 0 if whole else M
    block = tile if whole else lanes * READ_BYTES // logits.element_size()
    is_aligned = logits.stride(1) == 1 and logits.stride(0) % 16 == 0
    options = {
        "logits": matrix_rows(logits),
        "temperature_ptr": rules.temperature,
        "results": found,
        "buffer_ptr": logits.new_empty(rows, tile + block),
        "counts_ptr": logits.new_empty(rows, lanes, dtype=torch.int32),
        "sample_ptr": logits.new_empty(rows, BINS, dtype=torch.int32),
        "classes": classes,
        "softcap": softcap,
        "HAS_SOFTCAP": softcap != 0,
        "SHIFT": SHARED_BITS.get(logits.dtype, 0),
        "ACC_DTYPE": tl_acc_dtype(logits.dtype),
        "TILE": tile,
        "LANES": lanes,
        "BLOCK": block,
        "VECTOR": 16 // logits.element_size() if is_aligned else 1,
        "SAMPLE": SAMPLE,
        "BINS": BINS,
        "num_warps": warps,
    }
    # Rows that are not aligned are read class by class, for which threads need more registers.
    read, search = {"maxnreg": READ_REGISTERS}, {"maxnreg": SEARCH_REGISTERS}
    if whole or not (is_aligned and gpu.runs_ptx):
        read, search = {}, {}
    launch(truncated_totals_kernel, rows, **options, COMMON=COMMON, **read)
    launch(
        truncated_stats_kernel,
        M,
        target_ptr=target,
        top_k_ptr=rules.top_k,
        top_p_ptr=rules.top_p,
        min_p_ptr=rules.min_p,
        ignore_index=ignore_index,
        MIN_P_FIRST=rules.min_p_first,
        KEEPS_TARGET=rules.keeps_target,
        WHOLE=whole,
        MARGIN=MARGIN,
        **options,
        **search,
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
    grad_logprob: Tensor,
    grad_logsumexp: Tensor | None,
    grad_kept: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    rows: TruncatedSums,
    keeps_target: bool,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Compute the gradient of the logits from the rows' statistics; a gradient of None is zero."""
    grads = (grad_logprob, grad_logsumexp, grad_kept, grad_entropy)
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
    grads: Sequence[Tensor | None],
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
