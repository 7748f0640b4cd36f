"""The specification of statistics over the classes that a sampler keeps, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import torch
from torch import Tensor

from ...primitives.rows import finite_shift, inert_rows, row_chunks, softcap_slope, softcapped
from ...runtime.dtypes import acc_dtype
from ..cross_entropy.common import valid_targets
from .common import Rules, TruncatedKernels, TruncatedRows, TruncatedSums, is_valid, part_of


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
    temperature, keeps_target = rules.temperature, rules.keeps_target
    x, maximum = scaled_rows(logits, temperature, softcap)
    e = x.exp()
    sumexp, raw = e.sum(-1), logits.to(x.dtype)
    least = threshold_of(raw, x, e, rules)
    label = x.argmax(-1) if target is None else target.to(torch.int64, copy=True)
    labels, not_ignored, out_of_range = valid_targets(label, x.shape[-1], ignore_index)
    of_label = labels.unsqueeze(-1)
    kept, label_kept = kept_classes(raw, least, labels, not_ignored & keeps_target)
    invalid = out_of_range
    for rule, value in rules.checked():
        invalid = invalid | ~is_valid(rule, value)
    nan_or_zero = torch.where(invalid, torch.nan, 0.0).to(x.dtype)
    kept_sumexp = torch.where(kept, e, 0).sum(-1) + nan_or_zero
    log_sum, shift = kept_sumexp.log(), finite_shift(maximum)
    if temperature is not None:
        shift = shift / temperature.to(x.dtype)
    logprob = x.gather(-1, of_label).squeeze(-1) - log_sum
    has_logprob = kept.gather(-1, of_label).squeeze(-1) | (logprob != logprob)
    logprob = torch.where(has_logprob, logprob, -torch.inf)
    terms = torch.where(kept & (e != 0), e * x, 0)
    return TruncatedRows(
        logprob=torch.where(not_ignored, logprob, 0) + nan_or_zero,
        logsumexp=shift + sumexp.log() + nan_or_zero,
        kept_logsumexp=shift + log_sum,
        entropy=log_sum - terms.sum(-1) / kept_sumexp,
        kept=kept.sum(-1),
        in_set=(label_kept | ~not_ignored) & ~invalid,
        threshold=between(raw, least),
        label=label,
        maximum=maximum,
        sumexp=sumexp,
        kept_sumexp=kept_sumexp,
    )


def scaled_rows(
    logits: Tensor, temperature: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return (x - maximum) / temperature with soft-capped logits x, and the maximum of each row."""
    x = softcapped(logits, softcap)
    maximum = x.detach().amax(-1)
    x = x - finite_shift(maximum).unsqueeze(-1)
    return x if temperature is None else x / temperature.to(x.dtype).unsqueeze(-1), maximum


def kept_classes(
    raw: Tensor, threshold: Tensor, labels: Tensor, adds_label: Tensor
) -> tuple[Tensor, Tensor]:
    """Return which classes are kept, and whether the rules keep the label.

    A label that they drop is kept where `adds_label` is true. Masked classes are never kept.
    """
    exists, of_label = raw > -torch.inf, labels.unsqueeze(-1)
    kept = (raw >= threshold.unsqueeze(-1)) & exists
    is_label = torch.arange(raw.shape[-1], device=raw.device) == of_label
    adds = is_label & adds_label.unsqueeze(-1) & exists
    return kept | adds, kept.gather(-1, of_label).squeeze(-1)


def between(raw: Tensor, least: Tensor) -> Tensor:
    """Return a number between the logits from `least` on and those below it, `[...]`."""
    is_kept = (raw >= least.unsqueeze(-1)) & (raw > -torch.inf)
    dropped = raw.masked_fill(is_kept, -torch.inf).amax(-1)
    middle = raw.masked_fill(~is_kept, torch.inf).amin(-1) / 2 + dropped / 2
    return torch.where((middle > dropped) & (middle < torch.inf), middle, least)


def threshold_of(raw: Tensor, x: Tensor, e: Tensor, rules: Rules) -> Tensor:
    """Return the least logit of each row that the rules keep; -inf if they keep all.

    Args:
        raw: the logits, `[..., C]`.
        x: the same, soft-capped, relative to the maximum and over the temperature.
        e: exp(x).
        rules: the rules.
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
        mass = torch.where(ordered >= before.unsqueeze(-1), e.gather(-1, index), 0)
        mass = mass.double().cumsum(-1)
        below = (mass < top_p.unsqueeze(-1) * mass[..., -1:]).sum(-1)
        least = torch.maximum(least, torch.where(top_p < 1, at(below), nothing))
    return least


def truncated_stats_gradient(
    grad_logprob: Tensor,
    grad_logsumexp: Tensor | None,
    grad_kept: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    rows: TruncatedSums,
    keeps_target: bool,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Compute the gradient of the logits, differentiable in the first five arguments.

    A gradient of None is zero. The kept classes are those that the forward pass has found.
    """
    labels, not_ignored, out_of_range = valid_targets(rows.label, logits.shape[-1], ignore_index)
    raw = logits.detach().to(acc_dtype(logits.dtype))
    kept, _ = kept_classes(raw, rows.threshold, labels, not_ignored & keeps_target)
    # The derivative of a log-probability of -inf is 0.
    on_label = torch.where(not_ignored & (rows.in_set | keeps_target), grad_logprob, 0)
    grads = (on_label, grad_logsumexp, grad_kept, grad_entropy)
    is_inert = inert_rows((rows.maximum, rows.sumexp, rows.kept_sumexp), grads).unsqueeze(-1)
    logits, kept = torch.where(is_inert, 0, logits), kept | is_inert
    x, _ = scaled_rows(logits, rows.temperature, softcap)
    logp = x.masked_fill(~kept, -torch.inf).log_softmax(-1)
    p = logp.exp()
    one_hot = (torch.arange(x.shape[-1], device=x.device) == labels.unsqueeze(-1)).to(x.dtype)
    result = on_label.to(x.dtype).unsqueeze(-1) * (one_hot - p)
    if grad_logsumexp is not None:
        result = result + grad_logsumexp.to(x.dtype).unsqueeze(-1) * x.softmax(-1)
    if grad_kept is not None:
        result = result + grad_kept.to(x.dtype).unsqueeze(-1) * p
    if grad_entropy is not None:
        # The select comes before the product, so that the second derivative is finite too.
        p_logp = p * torch.where(p == 0, 0, logp)
        result = result - grad_entropy.to(x.dtype).unsqueeze(-1) * (
            p_logp - p * p_logp.sum(-1, keepdim=True)
        )
    if rows.temperature is not None:
        result = result / rows.temperature.to(x.dtype).unsqueeze(-1)
    if softcap:
        result = result * softcap_slope(logits, softcap)
    is_active = torch.stack([grad != 0 for grad in grads if grad is not None]).any(0)
    invalid = out_of_range | (is_active & rows.kept_sumexp.isnan())
    return torch.where(invalid.unsqueeze(-1), torch.nan, result).to(logits.dtype)


def truncated_of_rows(
    logits: Tensor,
    target: Tensor | None,
    rules: Rules,
    softcap: float,
    ignore_index: int,
    found: TruncatedRows,
) -> None:
    """Write the statistics of rows `[M, C]` to the results."""
    for rows in row_chunks(logits):
        of_rows = rules.map(itemgetter(rows))
        labels = None if target is None else target[rows]
        part = truncated_stats(logits[rows], labels, of_rows, softcap, ignore_index)
        for field, value in zip(found, part, strict=True):
            field[rows] = value


def truncated_gradient(
    logits: Tensor,
    first: int,
    grads: Sequence[Tensor | None],
    rows: TruncatedSums,
    classes: int,
    keeps_target: bool,
    softcap: float,
    ignore_index: int,
    result: Tensor,
) -> None:
    """Write the gradient of the logits of the classes from `first` on, `[M, width]`.

    Args:
        logits: the logits of these classes.
        first: the first of them.
        grads: the gradients of the first four `TruncatedStats`, `[M]`, or None for zeros.
        rows: the rows' statistics.
        classes: the number of all classes.
        keeps_target, softcap, ignore_index: as in `truncated_stats`.
        result: memory for the gradient, which may be the logits.
    """
    for part in row_chunks(logits):
        of_rows = TruncatedSums(*part_of(rows, part))
        zeros = torch.zeros_like(of_rows.maximum)
        on_label, on_all, on_kept, on_entropy = (
            zeros if each is None else each.to(zeros.dtype) for each in part_of(grads, part)
        )
        label = of_rows.label
        _, not_ignored, out_of_range = valid_targets(label, classes, ignore_index)
        on_label = torch.where(not_ignored & (of_rows.in_set | keeps_target), on_label, 0)
        on_kept = on_kept - on_label
        raw = logits[part].to(zeros.dtype)
        column = torch.arange(first, first + raw.shape[1], device=raw.device)
        is_label = column == label[:, None]
        kept = raw >= of_rows.threshold[:, None]
        kept = (kept | (is_label & (not_ignored & keeps_target)[:, None])) & (raw > -torch.inf)
        x = softcapped(raw, softcap) - finite_shift(of_rows.maximum)[:, None]
        temperature = of_rows.temperature
        slope = zeros + 1 if temperature is None else 1 / temperature.to(zeros.dtype)
        x = x * slope[:, None]
        e, total = x.exp(), of_rows.kept_sumexp
        offset = (of_rows.entropy - total.log())[:, None]
        logp_plus_entropy = torch.where(e == 0, 0, x) + offset
        of_kept = on_kept[:, None] - on_entropy[:, None] * logp_plus_entropy
        grad = torch.where(kept, e / total[:, None] * of_kept, 0)
        grad = grad + e * (on_all / of_rows.sumexp)[:, None]
        grad = (grad + torch.where(is_label, on_label[:, None], 0)) * slope[:, None]
        if softcap:
            grad = grad * softcap_slope(raw, softcap)
        active = torch.stack([on_label, on_all, on_kept, on_entropy]).ne(0).any(0)
        invalid = out_of_range | (active & total.isnan())
        grad = torch.where(active[:, None], grad, 0)
        result[part] = torch.where(invalid[:, None], torch.nan, grad).to(result.dtype)


TRUNCATED_KERNELS = TruncatedKernels(truncated_of_rows, truncated_gradient)
