"""Specification of statistics over recorded supports, in plain PyTorch.

The support of a row is the set of its recorded classes and its target, or all classes if none are
recorded. With logits x, soft-capped and divided by the temperature, its distribution is the softmax
of x over the support alone. The logits are those of all classes, `[M, C]`, or those of the entries
of a `Support`, `[E]`. In the second form rows without ids have the results 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.rows import (
    by_rows,
    finite_shift,
    inert_rows,
    softcap_slope,
    softcapped,
)
from .common import EVERY_CLASS, INVALID, RECORDED, Support, SupportRows


def members(logits: Tensor, support: Support) -> Tensor:
    """Return which logits are in the supports: all of them in rows without ids and invalid ones."""
    counts = support.classes >= 0
    if logits.ndim == 1:
        return counts
    M, C = logits.shape
    # Entries that do not count have the column after the last class.
    places = (support.rows(), torch.where(counts, support.classes, C))
    found = torch.zeros(M, C + 1, dtype=torch.bool, device=logits.device)
    found = found.index_put(places, torch.ones_like(counts)) if M else found
    return found[:, :C] | (support.kinds != RECORDED).unsqueeze(-1)


def labels(logits: Tensor, target: Tensor) -> Tensor:
    """Return which logits are those of the targets, which are the first entries of a `Support`."""
    place = torch.arange(logits.shape[-1], device=logits.device)
    return place < len(target) if logits.ndim == 1 else place == target.unsqueeze(-1)


def spread(numbers: Tensor, rows: Tensor | None) -> Tensor:
    """Return the number of each row for each of its logits. Entries have `rows`, `[E]`."""
    return numbers.unsqueeze(-1) if rows is None else numbers[rows]


def row_sums(x: Tensor, like: Tensor, rows: Tensor | None) -> Tensor:
    """Return the sum of each row, `[M]`. Entries are added up one by one, in their order."""
    if rows is None:
        return x.sum(-1)
    sums = torch.zeros_like(like, dtype=torch.float64)
    return sums.index_put((rows,), x.double(), accumulate=True).to(x.dtype)


@by_rows
def row_statistics(
    logits: Tensor,
    is_member: Tensor,
    target: Tensor,
    kinds: Tensor,
    rows: Tensor | None,
    temperature: float,
    softcap: float,
) -> SupportRows:
    """Return the statistics of rows of logits."""
    x = softcapped(torch.where(is_member, logits, 0), softcap)
    x = torch.where(is_member, x, -torch.inf)
    label = row_sums(torch.where(labels(logits, target) & is_member, x, 0), target, rows)
    if rows is None:
        maximum = x.amax(-1)
    else:
        maximum = torch.full_like(label, -torch.inf).scatter_reduce(0, rows, x, "amax")
    shift = finite_shift(maximum)
    y = (x - spread(shift, rows)) / temperature
    e = y.exp()
    sumexp = row_sums(e, target, rows)
    log_sumexp = sumexp.log()
    # The sum of p log p would multiply the rounding error of log Z by the entropy.
    entropy = log_sumexp - row_sums(e * torch.where(e == 0, 0, y), target, rows) / sumexp
    logprob = (label - shift) / temperature - log_sumexp
    counts = (kinds == RECORDED) | ((kinds == EVERY_CLASS) & (rows is None))
    nan_or_zero = torch.where(kinds == INVALID, torch.nan, 0.0).to(x.dtype)
    return SupportRows(
        logprob=torch.where(counts, logprob, nan_or_zero),
        entropy=torch.where(counts, entropy, nan_or_zero),
        maximum=maximum,
        sumexp=sumexp,
    )


@by_rows
def row_gradient(
    logits: Tensor,
    is_member: Tensor,
    target: Tensor,
    kinds: Tensor,
    rows: Tensor | None,
    on_label: Tensor,
    on_entropy: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
) -> Tensor:
    """Return the gradient of rows of logits. The statistics say which rows are not finite."""
    counts = (kinds == RECORDED) | (kinds == EVERY_CLASS)
    on_label, on_entropy = (torch.where(counts, grad, 0) for grad in (on_label, on_entropy))
    is_inert = inert_rows((maximum, sumexp), (on_label, on_entropy)) | ~counts
    logits = torch.where(is_member & ~spread(is_inert, rows), logits, 0)
    x = torch.where(is_member, softcapped(logits, softcap), -torch.inf)
    shift = torch.where(is_inert, 0, finite_shift(maximum))
    y = (x - spread(shift, rows)) / temperature
    e = y.exp()
    total = row_sums(e, target, rows)
    total = torch.where(total == 0, 1, total)  # which rows without members have
    p, logp = e / spread(total, rows), y - spread(total.log(), rows)
    # The select comes before the product, so that the second derivative is finite too.
    p_logp = p * torch.where(p == 0, 0, logp)
    negative_entropy = row_sums(p_logp, target, rows)
    one_hot = labels(logits, target).to(x.dtype)
    a, c = (spread(grad.to(x.dtype), rows) for grad in (on_label, on_entropy))
    grad = a * (one_hot - p) - c * (p_logp - p * spread(negative_entropy, rows))
    grad = grad / temperature
    if softcap:
        grad = grad * softcap_slope(logits, softcap)
    is_invalid = spread(kinds == INVALID, rows)
    return torch.where(is_invalid & is_member, torch.nan, grad).to(logits.dtype)


def support_stats(
    logits: Tensor, target: Tensor, support: Support, temperature: float, softcap: float
) -> SupportRows:
    """Compute log-probability and entropy of each row over its support.

    Args:
        logits: `[M, C]`, or `[E]` of the entries.
        target: labels `[M]` int64.
        support: the classes that count in each row.
        temperature: what the soft-capped logits are divided by.
        softcap: the soft-cap, or 0.
    """
    rows = support.rows() if logits.ndim == 1 else None
    of_rows = (members(logits, support), target, support.kinds, rows)
    return SupportRows(*row_statistics(logits, *of_rows, temperature, softcap))


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

    A gradient of None is zero.
    """
    if grad_entropy is None:
        grad_entropy = torch.zeros_like(grad_logprob)
    rows = support.rows() if logits.ndim == 1 else None
    of_rows = (members(logits, support), target, support.kinds, rows, grad_logprob, grad_entropy)
    found: Tensor = row_gradient(logits, *of_rows, maximum, sumexp, temperature, softcap)
    return found
