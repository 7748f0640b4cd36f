"""The recorded supports of rows, results and checks that reference and kernels share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.autograd import is_capturing, plain_eager

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
    """The classes that count in each row, as a list of E = M + K entries: M targets, then K ids.

    All fields but `keys` are int64. Rows with all classes in their support have no entry that
    counts. The order of the entries is by class, then targets before ids, then by row.

    Fields:
        kinds: `RECORDED`, `EVERY_CLASS`, `IGNORED` or `INVALID`, `[M]`.
        starts: where the ids of each row begin among all ids, `[M]`.
        numbers: how many ids of each row are read, `[M]`.
        classes: the class of each entry, or -1 for one that does not count, `[E]`. Of the entries
            of a row that name the same class the first one counts, which may be the target.
        order: the entries in their order, `[E]`.
        keys: their classes in this order, int32, with repeated ids. The number of all classes
            stands for none, also of an id that is its row's target, `[E]`.
        ordered_rows: their rows in this order, `[E]`.
    """

    kinds: Tensor
    starts: Tensor
    numbers: Tensor
    classes: Tensor
    order: Tensor
    keys: Tensor
    ordered_rows: Tensor

    def rows(self) -> Tensor:
        """Return the row of each entry, `[E]`."""
        return torch.empty_like(self.ordered_rows).scatter(0, self.order, self.ordered_rows)


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


def sorted_entries(
    keys: Tensor, rows: Tensor, num_classes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the last four fields of a `Support` from the key and the row of each entry.

    A stable sort by class finds the ids that repeat in a row: they are neighbours in the order,
    because ids that are the target of their row have no class as their key.
    """
    ordered, order = keys.sort(stable=True)
    ordered_rows = rows[order]
    is_same = (ordered[1:] == ordered[:-1]) & (ordered_rows[1:] == ordered_rows[:-1])
    is_repeated = torch.zeros_like(keys, dtype=torch.bool).scatter(0, order[1:], is_same)
    classes = torch.where(is_repeated | (keys == num_classes), -1, keys).long()
    return classes, order, ordered, ordered_rows


def support_sets(
    target: Tensor, ids: Tensor, offsets: Tensor, num_classes: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of a `Support`, and whether each target was recorded, `[M]`.

    It waits for nothing.

    Args:
        target: labels `[M]` int64.
        ids: recorded classes `[K]` int64, one row after another. Classes may repeat.
        offsets: where the ids of each row begin, and their number, `[M + 1]` int64.
        num_classes: the number of all classes.
        ignore_index: the label of rows that do not count.
    """
    M, device = len(target), target.device
    begin, end = offsets[:-1], offsets[1:]
    is_bad = (begin > end).any() | (offsets[0] != 0) | (offsets[-1] != len(ids))
    if M == 0:
        ids = ids[:0]
    places = torch.arange(len(ids), device=device)
    row_of_id = (torch.searchsorted(offsets, places, right=True) - 1).clamp(0, max(M - 1, 0))
    rows = torch.cat([torch.arange(M, device=device), row_of_id])
    entries = torch.cat([target, ids])

    def any_in_row(flags: Tensor, rows: Tensor) -> Tensor:
        found = torch.zeros(M + 1, dtype=torch.bool, device=device)
        return found.scatter(0, torch.where(flags, rows, M), True)[:M]

    is_class = (entries >= 0) & (entries < num_classes)
    kinds = torch.where(end > begin, RECORDED, EVERY_CLASS)
    kinds = torch.where(any_in_row(~is_class, rows), INVALID, kinds)
    kinds = torch.where(target == ignore_index, IGNORED, kinds)
    kinds = torch.where(is_bad, INVALID, kinds)
    is_listed = ((kinds == RECORDED) | (kinds == INVALID)) & (end > begin) & ~is_bad
    is_target = ids == target[row_of_id]
    is_own = torch.cat([torch.ones_like(target, dtype=torch.bool), ~is_target])
    counts = is_class & is_listed[rows] & is_own
    keys = torch.where(counts, entries, num_classes).int()
    recorded = any_in_row(is_target, row_of_id)
    return (
        kinds,
        begin.clone(),
        torch.where(is_listed, end - begin, 0),
        *sorted_entries(keys, rows, num_classes),
        (kinds == EVERY_CLASS) | (recorded & (kinds == RECORDED)),
    )


def rows_without_ids(kinds: Tensor, offsets: Tensor) -> Tensor | None:
    """Return the rows that need all classes, or None if there are none.

    The host waits for their number unless offsets on the CPU tell that every row has ids. Compilers
    and transforms do not know it: there these are all rows.
    """
    if not plain_eager():
        return torch.arange(kinds.shape[0], device=kinds.device)
    if offsets.is_cpu and bool((offsets.diff() > 0).all()):
        return None
    if is_capturing(kinds):
        raise RuntimeError(
            "offsets: expected offsets on the CPU and ids in every row while a CUDA graph is"
            " captured, because the number of rows without ids is read on the host"
        )
    rows = (kinds == EVERY_CLASS).nonzero()[:, 0]
    return rows if len(rows) else None


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
