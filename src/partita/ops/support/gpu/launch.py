"""Statistics over recorded supports on a GPU: allocation and launches."""

from __future__ import annotations

import torch
from torch import Tensor

from ....primitives.gpu.row_plan import StridedRows, flat_rows, matrix_rows
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, tl_acc_dtype
from ..common import Support, SupportRows, SupportSets, empty_sets
from .rows import support_gradient_kernel, support_rows_kernel
from .sets import support_entries_kernel, support_sets_kernel

ID_BLOCK = 64  # ids of a row that its program reads together; the usual row has eight
PLACE_BLOCK = 256  # places in the order that a program compares
ROW_BLOCK = 1024  # classes or entries of a row that a program reads together
ENTRY_BLOCK = 128  # the same without logits


def support_sets(
    target: Tensor, ids: Tensor, offsets: Tensor, num_classes: int, ignore_index: int
) -> SupportSets:
    """Find which entries of each row count, and sort them by class; see the reference."""
    M, K = len(target), len(ids)
    sets = empty_sets(target, ids)
    keys, rows = torch.full_like(sets.keys, num_classes), torch.empty_like(sets.rows)
    is_bad = torch.zeros(1, dtype=torch.int32, device=target.device)
    launch(
        support_entries_kernel,
        M,
        target_ptr=target,
        ids_ptr=ids,
        offsets_ptr=offsets,
        keys_ptr=keys,
        rows_ptr=rows,
        kinds_ptr=sets.kinds,
        in_set_ptr=sets.in_set,
        is_bad_ptr=is_bad,
        M=M,
        K=K,
        num_classes=num_classes,
        ignore_index=ignore_index,
        BLOCK=ID_BLOCK,
        num_warps=1,
    )
    torch.sort(keys, stable=True, out=(sets.keys, sets.order))
    launch(
        support_sets_kernel,
        cdiv(K + M, PLACE_BLOCK),
        offsets_ptr=offsets,
        entry_rows_ptr=rows,
        order_ptr=sets.order,
        keys_ptr=sets.keys,
        rows_ptr=sets.rows,
        classes_ptr=sets.classes,
        kinds_ptr=sets.kinds,
        in_set_ptr=sets.in_set,
        is_bad_ptr=is_bad,
        M=M,
        E=K + M,
        num_classes=num_classes,
        BLOCK=PLACE_BLOCK,
        num_warps=4,
    )
    return sets


def statistics(
    logits: StridedRows | None,
    x: Tensor | None,
    like: Tensor,
    classes: int,
    target: Tensor,
    support: Support,
    temperature: float,
    softcap: float,
) -> SupportRows:
    """Compute the statistics from logits, or from the soft-capped logits of entries.

    `like` is a tensor of the dtype and on the device of the logits.
    """
    M, dtype = len(target), acc_dtype(like.dtype)
    results = SupportRows(*(like.new_empty(M, dtype=dtype) for _ in SupportRows._fields))
    launch(
        support_rows_kernel,
        M,
        logits=logits,
        x_ptr=x,
        target_ptr=target,
        support=support,
        results=results,
        K=len(support.rows) - M,
        classes=classes,
        temperature=temperature,
        softcap=softcap,
        HAS_SOFTCAP=softcap != 0,
        ACC_DTYPE=tl_acc_dtype(like.dtype),
        BLOCK=ENTRY_BLOCK if logits is None else ROW_BLOCK,
        num_warps=1 if logits is None else 4,
    )
    return results


def gradient(
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    logits: StridedRows | None,
    x: Tensor | None,
    like: Tensor,
    classes: int,
    target: Tensor,
    support: Support,
    results: SupportRows,
    dlogits: StridedRows | None,
    dx: Tensor | None,
    temperature: float,
    softcap: float,
) -> None:
    """Write the gradient of logits that are in supports, or of the entries that count."""
    M = len(target)
    launch(
        support_gradient_kernel,
        M,
        grad_logprob=flat_rows(grad_logprob),
        grad_entropy=flat_rows(grad_entropy),
        logits=logits,
        x_ptr=x,
        target_ptr=target,
        support=support,
        results=results,
        dlogits=dlogits,
        dx_ptr=dx,
        K=len(support.rows) - M,
        classes=classes,
        temperature=temperature,
        softcap=softcap,
        HAS_SOFTCAP=softcap != 0,
        ACC_DTYPE=tl_acc_dtype(like.dtype),
        BLOCK=ENTRY_BLOCK if logits is None else ROW_BLOCK,
        num_warps=1 if logits is None else 4,
    )


def support_stats(
    logits: Tensor, target: Tensor, support: Support, temperature: float, softcap: float
) -> SupportRows:
    """Compute log-probability and entropy of each row over its support; see the reference."""
    rows, classes = matrix_rows(logits), logits.shape[1]
    return statistics(rows, None, logits, classes, target, support, temperature, softcap)


def support_stats_backward(
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    support: Support,
    entropy: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
) -> Tensor:
    """Compute the gradient of the logits, 0 outside of the supports."""
    dlogits = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
    results = SupportRows(entropy, entropy, maximum, sumexp)  # the first one is not read
    gradient(
        grad_logprob,
        grad_entropy,
        matrix_rows(logits),
        None,
        logits,
        logits.shape[1],
        target,
        support,
        results,
        matrix_rows(dlogits),
        None,
        temperature,
        softcap,
    )
    return dlogits
