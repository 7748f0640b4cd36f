"""The recorded supports of rows, results and checks that reference and kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import is_batched, is_capturing, is_traced

# What is known of a row: its recorded classes, that it has none and every class is possible, that
# its target is ignored, or that its target, an id or the offsets are out of range.
RECORDED, EVERY_CLASS, IGNORED, INVALID = range(4)


class SupportStats(NamedTuple):
    """Statistics of each row over the classes that its sampler recorded as possible.

    Fields:
        logprob: log-probability of the target in nats, 0 where it is ignored, `[...]`.
        entropy: entropy of the distribution in nats, 0 where the target is ignored, `[...]`.
        in_set: whether the target is one of the recorded classes, `[...]` bool.
    """

    logprob: Tensor
    entropy: Tensor
    in_set: Tensor


class Support(NamedTuple):
    """The classes that count in each row: its target and its recorded ids, as a flat list.

    Row r has the entries from `offsets[r]` + r on. The first one is its target, and its ids follow,
    so that M rows with K ids have E = K + M entries.

    Fields:
        offsets: where the ids of each row begin, and the number of all ids, `[M + 1]` int64.
        classes: the class of each entry, or -1 for an entry that does not count, `[E]` int32. Of
            the entries of a row that name the same class the first one counts.
        order: the entries sorted by class, those of a class by row, `[E]` int64.
        keys: the classes in this order, with those of repeated entries; the number of all classes
            stands for none, `[E]` int32.
        rows: the rows in this order, 0 where there is no class, `[E]` int32.
        kinds: `RECORDED`, `EVERY_CLASS`, `IGNORED` or `INVALID` for each row, `[M]` int32.
    """

    offsets: Tensor
    classes: Tensor
    order: Tensor
    keys: Tensor
    rows: Tensor
    kinds: Tensor

    def rows_of_entries(self) -> Tensor:
        """Return the row of each entry, 0 where it has no class, `[E]` int64."""
        rows = self.rows.long()
        return torch.zeros_like(rows).scatter(0, self.order, rows)


class SupportSets(NamedTuple):
    """The fields of a `Support` without the offsets, and whether a row's target was recorded."""

    classes: Tensor
    order: Tensor
    keys: Tensor
    rows: Tensor
    kinds: Tensor
    in_set: Tensor


class SupportRows(NamedTuple):
    """The differentiable statistics of each row, and what their gradient needs.

    Fields:
        logprob, entropy: the fields of `SupportStats`, NaN in invalid rows, `[M]`.
        maximum: maximum of the soft-capped logits of the support, `[M]`.
        sumexp: sum of exp((logits - maximum) / temperature) over the support, `[M]`.
    """

    logprob: Tensor
    entropy: Tensor
    maximum: Tensor
    sumexp: Tensor


class SupportKernels(NamedTuple):
    """The functions of one backend that work on the entries of supports from hidden states.

    Fields:
        dots: returns the soft-capped logits of the entries that count, 0 for others, `[E]`.
        statistics: returns the `SupportRows` of rows with ids.
        coefficients: returns the gradients of the entries' logits before the soft-cap, `[E]`.
        gradients: returns `HeadGradients` from these, to which it adds those of other rows.
    """

    dots: Callable[..., Tensor]
    statistics: Callable[..., SupportRows]
    coefficients: Callable[..., Tensor]
    gradients: Callable[..., Any]


def rows_without_ids(kinds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows that need all classes, and their number, `[]` on the host.

    The rows are the first numbers of a tensor `[M]`. In a CUDA graph, which cannot wait for the
    number, they are all rows.
    """
    if is_capturing(kinds):
        rows = torch.arange(len(kinds), device=kinds.device)
        return rows, torch.tensor(len(kinds))
    found = (kinds == EVERY_CLASS).nonzero()[:, 0]
    rows = found.new_zeros(len(kinds))
    rows[: len(found)] = found
    return rows, torch.tensor(len(found))


def empty_sets(target: Tensor, ids: Tensor) -> SupportSets:
    """Return memory for the supports of M rows with K ids."""
    rows, entries = target.shape[0], target.shape[0] + ids.shape[0]
    return SupportSets(
        classes=target.new_empty(entries, dtype=torch.int32),
        order=target.new_empty(entries, dtype=torch.int64),
        keys=target.new_empty(entries, dtype=torch.int32),
        rows=target.new_empty(entries, dtype=torch.int32),
        kinds=target.new_empty(rows, dtype=torch.int32),
        in_set=target.new_empty(rows, dtype=torch.bool),
    )


def may_lack_ids(offsets: Tensor) -> bool:
    """Return whether a row may have no ids, which only offsets on the CPU tell without waiting."""
    if not offsets.is_cpu or is_traced() or is_batched(offsets):
        return True
    return bool((offsets.diff() <= 0).any())


def check_support(ids: Tensor, offsets: Tensor, labels: Tensor, name: str) -> None:
    """Raise unless ids `[K]` and offsets `[M + 1]` fit the labels `[M]` of the named tensor."""
    checks.integer("ids", ids)
    checks.device("ids", ids, labels, name)
    checks.integer("offsets", offsets)
    if not offsets.is_cpu:
        checks.device("offsets", offsets, labels, name)
    if ids.ndim != 1:
        raise ValueError(f"ids: expected shape [K], got {list(ids.shape)}")
    checks.shape("offsets", offsets, [labels.shape[0] + 1], f"[M + 1] for the M rows of {name}")


def check_values(
    target: Tensor, ids: Tensor, offsets: Tensor, num_classes: int, ignore_index: int
) -> None:
    """Raise for the first label, id or offset that is out of range, where values are checked."""
    checks.labels("target", target, num_classes, ignore_index)
    checks.labels("ids", ids, num_classes, checks.NOTHING_IGNORED)
    check_offsets(offsets, len(ids))


def check_offsets(offsets: Tensor, number: int) -> None:
    """Raise unless the offsets run from 0 to the number of ids, where values are checked."""
    if not checks.can_check_values(offsets):
        return
    ends = {0: 0, len(offsets) - 1: number}
    for place, expected in ends.items():
        if (found := int(offsets[place])) != expected:
            meaning = "0" if place == 0 else f"the number of ids, {expected},"
            raise ValueError(f"offsets: expected {meaning} at [{place}], got {found}")
    if (index := checks.first_index(offsets.diff() < 0)) is not None:
        first, second = offsets[index[0]], offsets[index[0] + 1]
        raise ValueError(
            f"offsets: expected numbers that do not decrease, got {int(second)} after {int(first)}"
            f" at [{index[0] + 1}]"
        )
