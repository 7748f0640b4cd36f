"""Statistics over the classes that a sampler keeps on a GPU: allocation and launches."""

from __future__ import annotations

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import (
    RowView,
    flat_rows,
    launch_elementwise,
    matrix_rows,
    with_output,
)
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype
from ..common import TruncatedRows, truncated_fake
from .kernels import (
    truncated_search_kernel,
    truncated_stats_backward_kernel,
    truncated_stats_kernel,
)

WARP = 32
TILE = 4096  # classes that are searched on chip
SOME = 128  # groups of classes in a tile
SCAN_WARPS, SEARCH_WARPS = 8, 8
SEARCH_BLOCK, SAMPLE = 4096, 4096
SCAN_REGISTERS, REGISTERS = None, 128
# The low bits of the key of a number in fp32 that all keys of a half type share.
SHARED_BITS = {torch.bfloat16: 16, torch.float16: 13}


def truncated_of_rows(
    logits: Tensor,
    target: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    temperature: Tensor | None,
    min_p_first: bool,
    keeps_target: bool,
    softcap: float,
    ignore_index: int,
    found: TruncatedRows,
) -> None:
    """Write the statistics of rows `[M, C]` to the results. The other tensors are contiguous."""
    (M, classes), dtype = logits.shape, found.maximum.dtype
    whole = classes <= TILE
    tile = max(next_power_of_2(classes), 2 * WARP) if whole else TILE
    lanes = 1 if whole else WARP * SCAN_WARPS
    block = tile if whole else max(TILE * lanes // SOME, next_power_of_2(cdiv(classes, 32)))
    groups = 0 if whole else cdiv(classes, block) * lanes
    some = max(tile * lanes // block, 1)
    rules = {
        "top_k_ptr": top_k,
        "top_p_ptr": top_p,
        "min_p_ptr": min_p,
        "temperature_ptr": temperature,
    }
    options = {
        "MIN_P_FIRST": min_p_first,
        "KEEPS_TARGET": keeps_target,
        "HAS_SOFTCAP": softcap != 0,
        "SHIFT": SHARED_BITS.get(logits.dtype, 0),
        "ACC_DTYPE": tl_acc_dtype(logits.dtype),
    }
    launch(
        truncated_stats_kernel,
        M,
        logits=matrix_rows(logits),
        target_ptr=target,
        **rules,
        results=found,
        maxima_ptr=logits.new_empty((M, groups), dtype=dtype),
        chosen_ptr=logits.new_empty((M, some), dtype=torch.int32),
        classes=classes,
        groups=groups,
        softcap=softcap,
        ignore_index=ignore_index,
        **options,
        WHOLE=whole,
        LANES=lanes,
        BLOCK=block,
        GROUPS=next_power_of_2(max(groups, 1)),
        SOME=some,
        TILE=tile,
        num_warps=max(tile // 1024, 1) if whole else SCAN_WARPS,
        **({'maxnreg': SCAN_REGISTERS} if SCAN_REGISTERS else {}),
    )
    if not whole:
        launch(
            truncated_search_kernel,
            M,
            logits=matrix_rows(logits),
            **rules,
            results=found,
            buffer_ptr=logits.new_empty((M, TILE), dtype=dtype),
            classes=classes,
            softcap=softcap,
            ignore_index=ignore_index,
            **options,
            LANES=WARP * SEARCH_WARPS,
            BLOCK=SEARCH_BLOCK,
            TILE=TILE,
            SAMPLE=SAMPLE,
            num_warps=SEARCH_WARPS,
            **({'maxnreg': REGISTERS} if REGISTERS else {}),
        )


def truncated_stats(
    logits: Tensor,
    target: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    temperature: Tensor | None,
    min_p_first: bool,
    keeps_target: bool,
    softcap: float,
    ignore_index: int,
) -> TruncatedRows:
    """Compute the statistics of rows, `[..., C]`, over the classes that the rules keep."""
    found = truncated_fake(logits)
    if found.label.numel():
        of_rows = (target, top_k, top_p, min_p, temperature)
        truncated_of_rows(
            logits.reshape(-1, logits.shape[-1]),
            *(None if each is None else each.contiguous() for each in of_rows),
            min_p_first,
            keeps_target,
            softcap,
            ignore_index,
            found,
        )
    return found


def truncated_stats_backward(
    grad_logprob: Tensor,
    grad_logsumexp: Tensor | None,
    grad_kept: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    label: Tensor,
    temperature: Tensor | None,
    threshold: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    kept_sumexp: Tensor,
    entropy: Tensor,
    keeps_target: bool,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Compute the gradient of the logits from the rows' statistics; a gradient of None is zero."""
    saved = (entropy, threshold, label, maximum, sumexp, kept_sumexp)
    entropy, threshold, label, *sums = (each.contiguous() for each in saved)
    found = TruncatedRows(entropy, entropy, entropy, entropy, label, label, threshold, label, *sums)

    def run(view: RowView) -> None:
        launch_elementwise(
            truncated_stats_backward_kernel,
            view,
            grad_logprob=flat_rows(grad_logprob),
            grad_logsumexp=flat_rows(grad_logsumexp),
            grad_kept=flat_rows(grad_kept),
            grad_entropy=flat_rows(grad_entropy),
            logits=view.strided[0],
            temperature_ptr=None if temperature is None else temperature.contiguous(),
            found=found,
            dlogits=view.strided[1],
            classes=view.classes,
            softcap=softcap,
            ignore_index=ignore_index,
            KEEPS_TARGET=keeps_target,
            HAS_SOFTCAP=softcap != 0,
        )

    return with_output(run, -1, logits, dtype=logits.dtype)
