"""Log-probabilities of given or of the most probable classes on a GPU: allocation and launches.

A pass over all logits stands between passes over the logits of the ids: token statistics in the
forward pass, and their gradient in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import lane_tile, matrix_rows, row_view_or_copy
from ....runtime import checks
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype
from ...cross_entropy.gpu.token_stats import token_stats, token_stats_backward
from ..common import (
    EntryKernels,
    LogprobRows,
    TopKRows,
    new_rest,
    other_classes,
    topk_fake,
    with_ids,
    with_rest,
)
from .entries import (
    Ids,
    LogitChunk,
    logprobs_gather_kernel,
    logprobs_gradient_kernel,
    logprobs_kernel,
    logprobs_rest_kernel,
    logprobs_totals_kernel,
)
from .topk import topk_logprobs_kernel

BLOCK = 128  # entries of a program
REST_BLOCK = 4096  # classes that a program reads together
REST_WARPS = 8
WARP = 32
ROW_BLOCK = 1024  # entries of a program that sums over rows
TOPK_BYTES = 32  # that a lane loads at once
LANE_BLOCK = 512  # classes of a lane that are read together
# Classes from which on four and eight warps share a row.
LONG_ROW, LONGEST_ROW = 4096, 32_768


def gather_entries(
    logits: Tensor,
    first: int,
    classes: int,
    ids: Tensor,
    entries: Tensor,
    softcap: float,
    ignore_index: int,
) -> None:
    """Write the soft-capped logits of the ids among the classes from `first` on, 0 for no class.

    The arguments are those of the reference. The ids and entries are contiguous.
    """
    view = row_view_or_copy(-1, logits)
    launch(
        logprobs_gather_kernel,
        cdiv(ids.numel(), BLOCK),
        chunk=LogitChunk(view.strided[0], view.rows, first, view.classes),
        ids=Ids(ids, ids.shape[-1], classes, ignore_index),
        entries_ptr=entries,
        entries=ids.numel(),
        softcap=softcap,
        HAS_SOFTCAP=softcap != 0,
        ACC_DTYPE=tl_acc_dtype(logits.dtype),
        BLOCK=BLOCK,
    )


def finish_logprobs(
    entries: Tensor,
    ids: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> Tensor:
    """Return the log-probabilities of the ids from their logits and the rows' statistics."""
    result = torch.empty_like(entries)
    launch(
        logprobs_kernel,
        cdiv(ids.numel(), BLOCK),
        entries_ptr=entries,
        ids=Ids(ids, ids.shape[-1], classes, ignore_index),
        maximum_ptr=maximum,
        sumexp_ptr=sumexp,
        logprobs_ptr=result,
        entries=ids.numel(),
        temperature=temperature,
        BLOCK=BLOCK,
    )
    return result


def accumulate_rest(
    logits: Tensor, first: int, ids: Tensor, rest: Tensor, temperature: float, softcap: float
) -> None:
    """Update the statistics of the rest with the classes from `first` on that are no ids.

    The arguments are those of the reference. The rest is contiguous.
    """
    view = row_view_or_copy(-1, logits)
    tile = lane_tile(view.classes, REST_BLOCK, REST_WARPS, view.strided[0])
    launch(
        logprobs_rest_kernel,
        rest.numel() // 2,
        logits=view.strided[0],
        ids_ptr=ids.sort(-1).values.contiguous(),
        rest_ptr=rest,
        K=ids.shape[-1],
        classes=view.classes,
        first=first,
        rows=view.rows,
        temperature=temperature,
        softcap=softcap,
        HAS_SOFTCAP=softcap != 0,
        ACC_DTYPE=tl_acc_dtype(logits.dtype),
        TILE=tile,
        num_warps=tile.num_warps,
    )


def logprobs(
    logits: Tensor,
    ids: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
    needs_rest: bool,
) -> LogprobRows:
    """Compute the log-probabilities of the ids of each row, and of the rest if it is needed."""
    ids, classes = ids.contiguous(), logits.shape[-1]
    entries = logits.new_empty(ids.shape, dtype=acc_dtype(logits.dtype))
    gather_entries(logits, 0, classes, ids, entries, softcap, ignore_index)
    numbers = (classes, temperature, ignore_index)
    if needs_rest:
        rest = new_rest(logits, ids.shape[:-1])
        accumulate_rest(logits, 0, ids, rest, temperature, softcap)
        maximum, sumexp = with_ids(rest, entries, ids, *numbers)
    else:
        statistics = token_stats(logits, None, temperature, softcap, checks.NOTHING_IGNORED)
        maximum, sumexp = statistics.maximum, statistics.sumexp
        rest = entries.new_empty(*ids.shape[:-1], 0)
    found = finish_logprobs(entries, ids, maximum, sumexp, *numbers)
    if needs_rest:
        found = with_rest(found, rest, maximum, sumexp, temperature)
    return LogprobRows(found, entries, maximum, sumexp, rest)


def row_totals(grad: Tensor, ids: Tensor, classes: int, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return the sum of the gradients of each row's ids, and one of its classes."""
    rows, K = ids.shape[:-1], ids.shape[-1]
    totals = grad.new_empty(rows)
    labels = torch.empty(rows, dtype=torch.int64, device=ids.device)
    block = min(next_power_of_2(max(K, 1)), ROW_BLOCK)
    rows_of_program = ROW_BLOCK // block
    launch(
        logprobs_totals_kernel,
        cdiv(totals.numel(), rows_of_program),
        grad_ptr=grad,
        ids=Ids(ids, K, classes, ignore_index),
        totals_ptr=totals,
        labels_ptr=labels,
        M=totals.numel(),
        ROWS=rows_of_program,
        BLOCK=block,
    )
    return totals, labels


def write_entries(
    dlogits: Tensor,
    first: int,
    classes: int,
    grad: Tensor,
    ids: Tensor,
    totals: Tensor,
    entries: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Write the gradient of the logits of the ids among the classes from `first` on.

    The arguments are those of the reference, contiguous but for `dlogits`, which is returned.
    """
    view = row_view_or_copy(-1, dlogits)
    launch(
        logprobs_gradient_kernel,
        cdiv(ids.numel(), BLOCK),
        grad_ptr=grad,
        ids=Ids(ids, ids.shape[-1], classes, ignore_index),
        entries_ptr=entries,
        totals_ptr=totals,
        maximum_ptr=maximum,
        sumexp_ptr=sumexp,
        chunk=LogitChunk(view.strided[0], view.rows, first, view.classes),
        entries=ids.numel(),
        temperature=temperature,
        softcap=softcap,
        HAS_SOFTCAP=softcap != 0,
        BLOCK=BLOCK,
    )
    return dlogits if view.tensors[0] is dlogits else dlogits.copy_(view.tensors[0])


def logprobs_backward(
    grad: Tensor,
    logits: Tensor,
    ids: Tensor,
    entries: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    rest: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Compute the gradient of the logits from the statistics of the rows."""
    classes, on_ids = logits.shape[-1], grad[..., : ids.shape[-1]].contiguous()
    ids, entries = ids.contiguous(), entries.contiguous()
    of_rows = maximum.contiguous(), sumexp.contiguous()
    totals, labels = row_totals(on_ids, ids, classes, ignore_index)
    # All logits but those of the ids get their gradient here.
    on_label, factor, statistics = totals, None, of_rows
    if rest.shape[-1]:
        totals = totals + grad[..., -1]
        factor, *statistics = other_classes(grad, totals, *of_rows, rest, temperature)
        on_label = torch.zeros_like(factor)
    dlogits = token_stats_backward(
        on_label,
        factor,
        None,
        logits,
        labels,
        statistics[0],
        statistics[1],
        statistics[0],  # no entropy
        temperature,
        softcap,
        checks.NOTHING_IGNORED,
    )
    return write_entries(
        dlogits,
        0,
        classes,
        on_ids,
        ids,
        totals,
        entries,
        *of_rows,
        temperature,
        softcap,
        ignore_index,
    )


def topk_of_rows(
    logits: Tensor, k: int, temperature: float, softcap: float, found: TopKRows
) -> None:
    """Write the k most probable classes of rows `[M, C]` to the results."""
    classes = logits.shape[1]
    warps = 8 if classes >= LONGEST_ROW else 4 if classes >= LONG_ROW else 1
    rows, block = matrix_rows(logits), WARP * warps * TOPK_BYTES // logits.element_size()
    tile = lane_tile(classes, block, warps, rows)
    per_lane = cdiv(classes, tile.lanes)
    launch(
        topk_logprobs_kernel,
        len(logits),
        logits=rows,
        found=found,
        classes=classes,
        K=k,
        temperature=temperature,
        softcap=softcap,
        HAS_SOFTCAP=softcap != 0,
        ACC_DTYPE=tl_acc_dtype(found.maximum.dtype),
        TILE=tile,
        LANE_BLOCK=min(max(next_power_of_2(per_lane), tile.vector), LANE_BLOCK),
        num_warps=tile.num_warps,
    )


def topk_logprobs(logits: Tensor, k: int, temperature: float, softcap: float) -> TopKRows:
    """Find the k most probable classes of each row, `[..., C]`, and their log-probabilities."""
    found = topk_fake(logits, k)
    rows = logits.reshape(-1, logits.shape[-1])
    topk_of_rows(rows, k, temperature, softcap, found)
    return found


ENTRY_KERNELS = EntryKernels(
    gather_entries, finish_logprobs, row_totals, write_entries, accumulate_rest
)
