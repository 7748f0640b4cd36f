"""The specification of statistics over the classes that a sampler keeps, in plain PyTorch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import by_rows, finite_shift, inert_rows, softcap_slope, softcapped
from ..cross_entropy.common import valid_targets
from .common import (
    Rules,
    TruncatedGrads,
    TruncatedKernels,
    TruncatedRows,
    TruncatedSums,
    is_valid,
)


def truncated_stats(
    logits: Tensor,
    target: Tensor | None,
    rules: Rules,
    softcap: float,
    ignore_index: int,
) -> TruncatedRows:
    """Compute the statistics of rows, `[..., C]`, over the classes that the rules keep.

    A soft-cap of 0 is none. Without a target, the label of a row is its arg-max.
    """
    temperature, x = rules.temperature, softcapped(logits, softcap)
    maximum = x.amax(-1)
    x = scaled(x, maximum, temperature)
    threshold = threshold_of(logits.to(x.dtype), x, rules)
    label = x.argmax(-1) if target is None else target.to(torch.int64, copy=True)
    labels, not_ignored, out_of_range = valid_targets(label, x.shape[-1], ignore_index)
    of_label = labels.unsqueeze(-1)
    of_target = logits.gather(-1, of_label).squeeze(-1)
    in_set = (of_target >= threshold) & (of_target > -torch.inf)
    adds = is_class(labels, logits) & (not_ignored & rules.keeps_target).unsqueeze(-1)
    kept = kept_classes(logits, threshold, adds)
    invalid = out_of_range
    for rule in ("top_p", "min_p", "temperature"):
        if (value := getattr(rules, rule)) is not None:
            invalid = invalid | ~is_valid(rule, value)
    nan_or_zero = torch.where(invalid, torch.nan, 0.0).to(x.dtype)
    sumexp, kept_sumexp, entropy = sums_of(x, kept)
    log_sum, shift = kept_sumexp.log(), finite_shift(maximum)
    if temperature is not None:
        shift = shift / temperature.to(x.dtype)
    logprob = x.gather(-1, of_label).squeeze(-1) - log_sum
    has_logprob = kept.gather(-1, of_label).squeeze(-1) | (logprob != logprob)
    logprob = torch.where(has_logprob, logprob, -torch.inf)
    return TruncatedRows(
        logprob=torch.where(not_ignored, logprob, 0) + nan_or_zero,
        logsumexp=shift + sumexp.log() + nan_or_zero,
        kept_logsumexp=shift + log_sum + nan_or_zero,
        entropy=entropy + nan_or_zero,
        kept=kept.sum(-1),
        in_set=(in_set | ~not_ignored) & ~invalid,
        threshold=threshold,
        label=label,
        maximum=maximum,
        sumexp=sumexp,
        kept_sumexp=kept_sumexp + nan_or_zero,
    )


def scaled(x: Tensor, maximum: Tensor, temperature: Tensor | None) -> Tensor:
    """Return (x - maximum) / temperature of rows, `[..., C]`."""
    x = x - finite_shift(maximum).unsqueeze(-1)
    return x if temperature is None else x / temperature.to(x.dtype).unsqueeze(-1)


def is_class(label: Tensor, logits: Tensor, first: int = 0) -> Tensor:
    """Return which of the classes from `first` on is the label, `[..., C]`."""
    column = torch.arange(first, first + logits.shape[-1], device=logits.device)
    return column == label.unsqueeze(-1)


def kept_classes(logits: Tensor, threshold: Tensor, adds: Tensor) -> Tensor:
    """Return which classes reach the threshold or are added, without masked ones, `[..., C]`."""
    return ((logits >= threshold.unsqueeze(-1)) | adds) & (logits > -torch.inf)


def sums_of(x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums of exp(x) over all and over the kept classes, and the entropy of these."""
    e = x.exp()
    kept_sumexp = torch.where(kept, e, 0).sum(-1)
    sum_x_exp = (e * torch.where(kept & (e != 0), x, 0)).sum(-1)
    return e.sum(-1), kept_sumexp, kept_sumexp.log() - sum_x_exp / kept_sumexp


def threshold_of(raw: Tensor, x: Tensor, rules: Rules) -> Tensor:
    """Return a number of each row which the logits that the rules keep reach; -inf for all.

    It lies between the least kept and the greatest dropped logit.

    Args:
        raw: the logits, `[..., C]`.
        x: the same, soft-capped, relative to the maximum and over the temperature.
    """
    top_k, top_p, min_p = rules[:3]
    classes, (ordered, index) = raw.shape[-1], raw.sort(-1, descending=True)
    nothing = torch.full_like(raw[..., 0], -torch.inf)

    def at(position: Tensor) -> Tensor:
        return ordered.gather(-1, position.clamp(0, classes - 1).unsqueeze(-1)).squeeze(-1)

    of_min_p = nothing
    if min_p is not None:
        passes = x >= min_p.to(x.dtype).log().unsqueeze(-1)
        of_min_p = torch.where(min_p > 0, at(passes.sum(-1) - 1), nothing)
    before = of_min_p if rules.min_p_first else nothing
    if top_k is not None:
        is_active = (top_k > 0) & (top_k < classes)
        before = torch.maximum(before, torch.where(is_active, at(top_k - 1), nothing))
    least = torch.maximum(before, of_min_p)
    if top_p is not None:
        mass = torch.where(ordered >= before.unsqueeze(-1), x.exp().gather(-1, index), 0)
        mass = mass.double().cumsum(-1)
        below = (mass < top_p.unsqueeze(-1) * mass[..., -1:]).sum(-1)
        least = torch.maximum(least, torch.where(top_p < 1, at(below), nothing))
    number = (ordered >= least.unsqueeze(-1)).sum(-1)
    middle = at(number - 1) / 2 + at(number) / 2
    return torch.where((middle > at(number)) & (middle < torch.inf), middle, least)


def truncated_stats_gradient(
    grads: TruncatedGrads,
    logits: Tensor,
    rows: TruncatedSums,
    keeps_target: bool,
    softcap: float,
    ignore_index: int,
    *,
    first: int = 0,
    classes: int | None = None,
) -> Tensor:
    """Compute the gradient of the logits from those of the rows' statistics.

    The kept classes are those that the forward pass has found. The logits may be those of some
    classes alone, from `first` on and out of `classes`.
    """
    label, _, temperature, threshold, maximum, total, kept_total, entropy = rows
    _, not_ignored, out_of_range = valid_targets(label, classes or logits.shape[-1], ignore_index)
    grads = grads.counted(rows, keeps_target, ignore_index)
    on_label, on_all, on_kept, on_entropy = (
        torch.zeros_like(maximum) if grad is None else grad.to(maximum.dtype) for grad in grads
    )
    is_label = is_class(label, logits, first)
    adds = is_label & (not_ignored & keeps_target).unsqueeze(-1)
    kept = kept_classes(logits.detach(), threshold, adds)
    x = scaled(softcapped(logits, softcap), maximum, temperature)
    e = x.exp()
    logp_plus_entropy = torch.where(e == 0, 0, x) + (entropy - kept_total.log()).unsqueeze(-1)
    of_kept = (on_kept - on_label).unsqueeze(-1) - on_entropy.unsqueeze(-1) * logp_plus_entropy
    grad = torch.where(kept, e / kept_total.unsqueeze(-1) * of_kept, 0)
    grad = grad + e * (on_all / total).unsqueeze(-1)
    grad = grad + torch.where(is_label, on_label.unsqueeze(-1), 0)
    if temperature is not None:
        grad = grad / temperature.to(grad.dtype).unsqueeze(-1)
    if softcap:
        grad = grad * softcap_slope(logits, softcap)
    active = grads.counts()
    invalid = out_of_range | (active & kept_total.isnan())
    grad = torch.where(active.unsqueeze(-1), grad, 0)
    return torch.where(invalid.unsqueeze(-1), torch.nan, grad).to(logits.dtype)


def differentiable_gradient(*args: Any) -> Tensor:
    """Return the same, differentiable in the gradients and in the logits of all classes.

    The arguments are those of `truncated_stats_gradient`, the fields of tuples one by one.
    """
    grads, logits, rows = TruncatedGrads(*args[:4]), args[4], TruncatedSums(*args[5:13])
    keeps_target, softcap, ignore_index = args[13:]
    grads = grads.counted(rows, keeps_target, ignore_index)
    is_inert = inert_rows((rows.maximum, rows.sumexp, rows.kept_sumexp), grads)
    adds_label = (rows.label != ignore_index) & keeps_target
    adds = (is_class(rows.label, logits) & adds_label.unsqueeze(-1)) | is_inert.unsqueeze(-1)
    logits = torch.where(is_inert.unsqueeze(-1), 0, logits)
    kept, x = kept_classes(logits.detach(), rows.threshold, adds), softcapped(logits, softcap)
    maximum = x.detach().amax(-1)
    sumexp, kept_sumexp, entropy = sums_of(scaled(x, maximum, rows.temperature), kept)
    kept_sumexp = torch.where(is_inert | ~rows.kept_sumexp.isnan(), kept_sumexp, torch.nan)
    rows = TruncatedSums(*rows[:4], maximum, sumexp, kept_sumexp, entropy)
    return truncated_stats_gradient(grads, logits, rows, keeps_target, softcap, ignore_index)


def truncated_of_rows(logits: Tensor, *args: Any) -> None:
    """Write the statistics of rows `[M, C]` to the results, the last argument."""
    *options, found = args
    for field, value in zip(found, by_rows(truncated_stats)(logits, *options), strict=True):
        field.copy_(value)


def truncated_gradient(
    logits: Tensor,
    first: int,
    grads: TruncatedGrads,
    rows: TruncatedSums,
    classes: int,
    *args: Any,
) -> None:
    """Write the gradient of the logits of some classes, `[M, width]`, to the last argument."""
    *options, result = args
    gradient = functools.partial(truncated_stats_gradient, first=first, classes=classes)
    result.copy_(by_rows(gradient, logits=1)(grads, logits, rows, *options))


TRUNCATED_KERNELS = TruncatedKernels(truncated_of_rows, truncated_gradient)
