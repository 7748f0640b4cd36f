"""Log-probabilities of given classes on a GPU: allocation and launches.

A pass over all logits stands between passes over the logits of the ids: token statistics in the
forward pass, and their gradient in the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import row_view_or_copy
from ....runtime import checks
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype
from ...cross_entropy.gpu.token_stats import token_stats, token_stats_backward
from ..common import EntryKernels, LogprobRows
from .entries import (
    logprobs_gather_kernel,
    logprobs_gradient_kernel,
    logprobs_kernel,
    logprobs_totals_kernel,
)

BLOCK = 128  # entries of a program
ROW_BLOCK = 1024  # entries of a program that sums over rows


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

    Args:
        logits: the logits of these classes, `[..., C]`.
        first: the first of them.
        classes: the number of all classes.
        ids: `[..., K]` int64, contiguous.
        entries: `[..., K]`, contiguous, in which the logits of other classes stay.
        softcap: the soft-cap, or 0.
        ignore_index: the ignored id.
    """
    view = row_view_or_copy(-1, logits)
    launch(
        logprobs_gather_kernel,
        cdiv(ids.numel(), BLOCK),
        view.tensors[0],
        ids,
        entries,
        ids.numel(),
        ids.shape[-1],
        classes,
        first,
        view.classes,
        view.rows,
        *view.strides[0],
        softcap,
        ignore_index,
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
        entries,
        ids,
        maximum,
        sumexp,
        result,
        ids.numel(),
        ids.shape[-1],
        classes,
        temperature,
        ignore_index,
        BLOCK=BLOCK,
    )
    return result


def logprobs(
    logits: Tensor, ids: Tensor, temperature: float, softcap: float, ignore_index: int
) -> LogprobRows:
    """Compute the log-probabilities of the ids of each row."""
    statistics = token_stats(logits, None, temperature, softcap, checks.NOTHING_IGNORED)
    ids, classes = ids.contiguous(), logits.shape[-1]
    entries = logits.new_empty(ids.shape, dtype=acc_dtype(logits.dtype))
    gather_entries(logits, 0, classes, ids, entries, softcap, ignore_index)
    of_rows = statistics.maximum, statistics.sumexp
    found = finish_logprobs(entries, ids, *of_rows, classes, temperature, ignore_index)
    return LogprobRows(found, entries, *of_rows)


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
        grad,
        ids,
        totals,
        labels,
        totals.numel(),
        K,
        classes,
        ignore_index,
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

    Args:
        dlogits: the gradient of these classes' logits, `[..., C]`, written at the ids.
        first, classes, ids: as in `gather_entries`.
        grad: the gradient of the log-probabilities, `[..., K]`, contiguous.
        totals: its sum over each row's ids, `[...]`.
        entries, maximum, sumexp: the logits of the ids, and the statistics of the rows.
        temperature, softcap, ignore_index: the options.

    Returns:
        The gradient: `dlogits` itself, whatever its strides.
    """
    view = row_view_or_copy(-1, dlogits)
    launch(
        logprobs_gradient_kernel,
        cdiv(ids.numel(), BLOCK),
        grad,
        ids,
        entries,
        totals,
        maximum,
        sumexp,
        view.tensors[0],
        ids.numel(),
        ids.shape[-1],
        classes,
        first,
        view.classes,
        view.rows,
        *view.strides[0],
        temperature,
        softcap,
        ignore_index,
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
    temperature: float,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Compute the gradient of the logits from the statistics of the rows."""
    grad, ids, entries = grad.contiguous(), ids.contiguous(), entries.contiguous()
    of_rows, classes = (maximum.contiguous(), sumexp.contiguous()), logits.shape[-1]
    totals, labels = row_totals(grad, ids, classes, ignore_index)
    # All logits but those of the ids get their gradient here.
    statistics = (labels, *of_rows, maximum, temperature, softcap, checks.NOTHING_IGNORED)
    dlogits = token_stats_backward(totals, None, None, logits, *statistics)
    return write_entries(
        dlogits,
        0,
        classes,
        grad,
        ids,
        totals,
        entries,
        *of_rows,
        temperature,
        softcap,
        ignore_index,
    )


ENTRY_KERNELS = EntryKernels(gather_entries, finish_logprobs, row_totals, write_entries)
