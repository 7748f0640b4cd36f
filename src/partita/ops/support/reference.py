"""Specification of statistics over recorded supports, in plain PyTorch.

The support of a row is the set of its recorded classes and its target, or all classes if none are
recorded. With logits x, soft-capped and divided by the temperature, its distribution is the softmax
of x over the support alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...primitives.rows import (
    finite_shift,
    row_chunks,
    softcap_slope,
    softcapped,
    without_inert_rows,
)
from ..cross_entropy.common import valid_targets
from .common import EVERY_CLASS, IGNORED, INVALID, RECORDED, Support, SupportRows, SupportSets


def support_sets(
    target: Tensor, ids: Tensor, offsets: Tensor, num_classes: int, ignore_index: int
) -> SupportSets:
    """Find which entries of each row count, and sort them by class.

    Args:
        target: labels `[M]` int64.
        ids: recorded classes `[K]` int64, one row after another. Classes may repeat.
        offsets: where the ids of each row begin, and their number, `[M + 1]` int64.
        num_classes: the number of all classes.
        ignore_index: the label of rows that do not count.
    """
    M, K, device = len(target), len(ids), target.device
    is_bad = (offsets.diff() < 0).any() | (offsets[0] != 0) | (offsets[-1] != K)
    offsets = torch.where(is_bad, 0, offsets)
    row_of_id = torch.searchsorted(offsets[1:], torch.arange(K, device=device), right=True)
    row_of_id = row_of_id.clamp(max=max(M - 1, 0))
    labels, not_ignored, target_invalid = valid_targets(target, num_classes, ignore_index)
    id_invalid = (ids < 0) | (ids >= num_classes)
    has_ids = offsets[1:] > offsets[:-1]
    rows = torch.arange(M, device=device)
    keys = target.new_full((K + M,), num_classes)
    row_of_entry = torch.zeros_like(keys)
    if M > 0:
        places = torch.arange(K, device=device) + row_of_id + 1
        counts = not_ignored[row_of_id] & ~id_invalid
        keys[places] = torch.where(counts, ids, num_classes)
        row_of_entry[places] = row_of_id
        places = offsets[:-1] + rows
        counts = not_ignored & ~target_invalid & has_ids
        keys[places] = torch.where(counts, labels, num_classes)
        row_of_entry[places] = rows
    invalid_ids = _any_of_rows(id_invalid, row_of_id, M)
    kinds = torch.where(has_ids, RECORDED, EVERY_CLASS)
    kinds = torch.where(target_invalid | invalid_ids, INVALID, kinds)
    kinds = torch.where(not_ignored, kinds, IGNORED)
    kinds = torch.where(is_bad, INVALID, kinds)
    sorted_keys, order = keys.sort(stable=True)
    sorted_rows = row_of_entry[order]
    is_repeated = torch.zeros_like(keys, dtype=torch.bool)
    is_same = (sorted_keys[1:] == sorted_keys[:-1]) & (sorted_rows[1:] == sorted_rows[:-1])
    is_repeated[order[1:]] = is_same
    classes = torch.where(is_repeated | (keys == num_classes) | is_bad, -1, keys)
    if M > 0:
        recorded = _any_of_rows(ids == target[row_of_id], row_of_id, M)
    else:
        recorded = torch.zeros_like(not_ignored)
    return SupportSets(
        classes=classes.int(),
        order=order,
        keys=sorted_keys.int(),
        rows=torch.where((sorted_keys < num_classes) & ~is_bad, sorted_rows, 0).int(),
        kinds=kinds.int(),
        in_set=(kinds == EVERY_CLASS) | (recorded & (kinds == RECORDED)),
    )


def _any_of_rows(of_ids: Tensor, row_of_id: Tensor, M: int) -> Tensor:
    """Return whether a flag is set for any id of each row, `[M]`."""
    number = torch.zeros(M, dtype=torch.int64, device=of_ids.device)
    return number.index_add(0, row_of_id, of_ids.long()) > 0 if M else number > 0


def row_parts(logits: Tensor, support: Support) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the rows, few of them at a time on a CPU, and of their entries."""
    M = len(logits)
    for rows in row_chunks(logits) if M else [slice(0, 0)]:
        if rows.stop - rows.start == M:
            yield rows, slice(None)
        else:
            first, end = support.offsets[rows.start], support.offsets[rows.stop]
            yield rows, slice(int(first) + rows.start, int(end) + rows.stop)


def members(
    support: Support, row_of_entry: Tensor, rows: slice, entries: slice, num_classes: int
) -> Tensor:
    """Return which classes are in the supports of some rows, all of them in rows without ids."""
    kinds = support.kinds[rows]
    found = torch.zeros((len(kinds), num_classes + 1), dtype=torch.bool, device=kinds.device)
    classes = support.classes[entries].long()
    counts = classes >= 0
    # Entries that do not count have the column after the last class.
    row = torch.where(counts, row_of_entry[entries] - rows.start, 0)
    if len(kinds):
        found[row, torch.where(counts, classes, num_classes)] = True
    return found[:, :num_classes] | (kinds != RECORDED).unsqueeze(-1)


def supported_rows(logits: Tensor, is_member: Tensor, softcap: float) -> Tensor:
    """Return the soft-capped logits, -inf outside of the supports, whatever the logits are there.

    Rows that do not count are rows of zeros before this.
    """
    x = softcapped(torch.where(is_member, logits, 0), softcap)
    return torch.where(is_member, x, -torch.inf)


def statistics(x: Tensor, label: Tensor, kinds: Tensor, temperature: float) -> SupportRows:
    """Compute the statistics of rows of soft-capped logits, -inf outside of the supports.

    Args:
        x: `[M, W]`; columns are classes or entries.
        label: the soft-capped logit of the target, `[M]`.
        kinds: a field of `Support`.
        temperature: what the logits are divided by.
    """
    maximum = x.detach().amax(-1)
    shift = finite_shift(maximum)
    y = (x - shift.unsqueeze(-1)) / temperature
    e = y.exp()
    sumexp = e.sum(-1)
    log_sumexp = sumexp.log()
    logprob = (label - shift) / temperature - log_sumexp
    # The sum of p log p would multiply the rounding error of log Z by the entropy.
    entropy = log_sumexp - (e * torch.where(e == 0, 0, y)).sum(-1) / sumexp
    counts = kinds <= EVERY_CLASS
    nan_or_zero = torch.where(kinds == INVALID, torch.nan, 0.0).to(x.dtype)
    return SupportRows(
        logprob=torch.where(counts, logprob, 0) + nan_or_zero,
        entropy=torch.where(counts, entropy, 0) + nan_or_zero,
        maximum=maximum,
        sumexp=sumexp,
    )


def support_stats(
    logits: Tensor, target: Tensor, support: Support, temperature: float, softcap: float
) -> SupportRows:
    """Compute log-probability and entropy of each row over its support.

    Args:
        logits: `[M, C]`.
        target: labels `[M]` int64.
        support: the classes that count in each row.
        temperature: what the soft-capped logits are divided by.
        softcap: the soft-cap, or 0.
    """
    C, found, row_of_entry = logits.shape[-1], list[SupportRows](), support.rows_of_entries()
    for rows, entries in row_parts(logits, support):
        kinds = support.kinds[rows]
        counts = kinds <= EVERY_CLASS
        of_rows = torch.where(counts.unsqueeze(-1), logits[rows], 0)
        is_member = members(support, row_of_entry, rows, entries, C)
        x = supported_rows(of_rows, is_member, softcap)
        label = x.gather(-1, torch.where(counts, target[rows], 0).unsqueeze(-1)).squeeze(-1)
        found.append(statistics(x, label, kinds, temperature))
    return SupportRows(*map(torch.cat, zip(*found, strict=True)))


def support_gradient(
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
    """Compute the gradient of the logits, differentiable in the first three arguments.

    A gradient of None is zero. The statistics only say which rows are not finite.
    """
    if grad_entropy is None:
        grad_entropy = torch.zeros_like(grad_logprob)
    C, found, row_of_entry = logits.shape[-1], list[Tensor](), support.rows_of_entries()
    for rows, entries in row_parts(logits, support):
        kinds = support.kinds[rows]
        counts = kinds <= EVERY_CLASS
        on_label = torch.where(counts, grad_logprob[rows], 0)
        on_entropy = torch.where(counts, grad_entropy[rows], 0)
        of_rows = torch.where(counts.unsqueeze(-1), logits[rows], 0)
        is_member = members(support, row_of_entry, rows, entries, C)
        of_rows = torch.where(is_member, of_rows, 0)
        of_rows = without_inert_rows(of_rows, (maximum[rows], sumexp[rows]), (on_label, on_entropy))
        x = supported_rows(of_rows, is_member, softcap)
        shift = finite_shift(x.detach().amax(-1, keepdim=True))
        logp = ((x - shift) / temperature).log_softmax(-1)
        p = logp.exp()
        # The select comes before the product, so that the second derivative is finite too.
        p_logp = p * torch.where(p == 0, 0, logp)
        label = torch.where(counts, target[rows], 0).unsqueeze(-1)
        one_hot = (torch.arange(C, device=x.device) == label).to(x.dtype)
        grad = on_label.to(x.dtype).unsqueeze(-1) * (one_hot - p)
        grad = grad - on_entropy.to(x.dtype).unsqueeze(-1) * (
            p_logp - p * p_logp.sum(-1, keepdim=True)
        )
        grad = grad / temperature
        if softcap:
            grad = grad * softcap_slope(of_rows, softcap)
        is_invalid = (kinds == INVALID).unsqueeze(-1)
        found.append(torch.where(is_invalid, torch.nan, grad).to(logits.dtype))
    return torch.cat(found)
