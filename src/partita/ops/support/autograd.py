"""The registered ops of statistics over recorded supports."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...runtime import register
from ...runtime.autograd import DifferentiableOp, one_by_one
from ...runtime.backend import current_backend
from ...runtime.dtypes import acc_dtype
from ...runtime.lengths import on_device
from . import common, reference
from .common import (
    EVERY_CLASS,
    Support,
    SupportRows,
    SupportStats,
    check_offsets,
    check_values,
    rows_without_ids,
)


def _gpu() -> ModuleType:
    from .gpu import rows

    return rows


def _sets_fake(target: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    M, E = target.shape[0], target.shape[0] + ids.shape[0]
    keys, in_set = target.new_empty(E, dtype=torch.int32), target.new_empty(M, dtype=torch.bool)
    kinds, starts, numbers, classes, order, rows = map(target.new_empty, (M, M, M, E, E, E))
    return kinds, starts, numbers, classes, order, keys, rows, in_set


def _stats_fake(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    dtype = acc_dtype(logits.dtype)
    return tuple(logits.new_empty(target.shape, dtype=dtype) for _ in SupportRows._fields)


sets_op = register.define(
    common.support_sets,
    _sets_fake,
    gpu=_gpu,
    check=check_values,
    vmap=one_by_one,
)
stats_op = register.define(reference.support_stats, _stats_fake, gpu=_gpu, vmap=one_by_one)
stats_backward_op = register.define(
    reference.support_gradient,
    lambda logits: torch.empty_like(logits),
    name="support_stats_backward",
    gpu=_gpu,
    vmap=one_by_one,
)


def _saves(args: tuple[Any, ...], output: SupportRows) -> tuple[Any, Any]:
    (logits, target, *support, temperature, softcap, _), (_, *statistics) = args, output
    return (logits, target, *support, *statistics), (temperature, softcap)


def _gradient(*args: Any) -> Tensor:
    """Compute the gradient of the logits; the fields of the `Support` come one by one."""
    (on_label, on_entropy, logits, target), support, rest = args[:4], args[4:11], args[11:]
    grads = (on_label, on_entropy)
    return reference.support_gradient(*grads, logits, target, Support(*support), *rest)


_stats = DifferentiableOp(stats_op, stats_backward_op, _gradient, _saves, results=2)


def sets_of(
    target: Tensor, ids: Tensor, offsets: Tensor, num_classes: int, ignore_index: int
) -> tuple[Support, Tensor]:
    """Return the supports of rows with labels `[M]`, and whether each target was recorded.

    The offsets may be on the CPU.
    """
    ids, offsets = ids.long().contiguous(), offsets.long().contiguous()
    if offsets.device != target.device:
        check_offsets(offsets, ids.shape[0])
        offsets = on_device(target.device, offsets)[0]
    call = (target, ids, offsets, num_classes, ignore_index, current_backend())
    *support, in_set = sets_op(*call)
    return Support(*support), in_set


def stats_of(
    logits: Tensor, target: Tensor, support: Support, temperature: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of logits `[M, C]`, or of those of the entries, `[E]`."""
    call = (logits, target, *support, temperature, softcap, current_backend())
    logprob, entropy = _stats(*call)[:2]
    return logprob, entropy


def stats_of_parts(
    entries: Callable[[Support], Tensor],
    all_classes: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    target: Tensor,
    ids: Tensor,
    offsets: Tensor,
    num_classes: int,
    ignore_index: int,
    temperature: float,
    softcap: float,
) -> SupportStats:
    """Return the statistics of rows with ids from the logits of their entries, and of the others.

    Args:
        entries: returns the logits of the entries, `[E]`.
        all_classes: takes rows without ids and their labels, and returns their log-probabilities
            and entropies. It is called if there are such rows.
        target: labels `[...]`.
    """
    labels = target.reshape(-1).long().contiguous()
    support, in_set = sets_of(labels, ids, offsets, num_classes, ignore_index)
    found = stats_of(entries(support), labels, support, temperature, softcap)
    rows = rows_without_ids(support.kinds, offsets)
    if rows is not None:
        is_whole = support.kinds == EVERY_CLASS
        others = all_classes(rows, torch.where(is_whole, labels, 0)[rows])
        logprob, entropy = (
            torch.where(is_whole, torch.zeros_like(field).index_put((rows,), other), field)
            for field, other in zip(found, others, strict=True)
        )
        found = logprob, entropy
    return SupportStats(*(field.reshape(target.shape) for field in (*found, in_set)))
