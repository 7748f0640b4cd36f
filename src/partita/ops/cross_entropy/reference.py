"""Specification of cross-entropy and of token statistics in plain PyTorch.

A row with logits x over C classes and target weights q has the loss sum_c q_c (lse - x_c). For a
label y and a smoothing s, q is w_y (1 - s) at y plus s w_c / C at every class c. For target
probabilities t, q is w_c (t_c (1 - s) + s / C). With Q = sum_c q_c the gradient is
Q softmax(x) - q. Soft-capping replaces x by cap tanh(x / cap). Ignored rows count as rows of zeros,
so that no derivative depends on what they hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import (
    finite_shift,
    softcap_slope,
    softcapped,
    without_inert_rows,
)
from ...runtime.dtypes import acc_dtype
from .common import NOT_READ, RowLosses, TokenStatsRows, valid_targets


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Return soft-capped logits in the accumulator's dtype, with the classes last."""
    return softcapped(logits.movedim(1, -1), softcap)


def without_ignored(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return logits, `[N, C, ...]`, with zeros in rows whose label is ignored."""
    if target.is_floating_point():
        return logits
    return logits.masked_fill((target.long() == ignore_index).unsqueeze(1), 0)


def target_weights(
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    ignore_index: int,
    smoothing: float,
    like: Tensor,
) -> Tensor:
    """Return the target weights q, `[N, ..., C]`.

    They are NaN in rows whose label is out of range, and 0 in ignored rows.
    """
    weights = like.new_ones(classes) if weight is None else weight.to(like.dtype)
    if target.is_floating_point():
        return weights * (
            target.to(like.dtype).movedim(1, -1) * (1 - smoothing) + smoothing / classes
        )
    labels, not_ignored, out_of_range = valid_targets(target, classes, ignore_index)
    is_label = torch.arange(classes, device=target.device) == labels.unsqueeze(-1)
    q = torch.where(is_label, (1 - smoothing) * weights, 0) + smoothing / classes * weights
    row_factor = torch.where(out_of_range, torch.nan, not_ignored.to(like.dtype))
    return row_factor.unsqueeze(-1) * q


def label_losses(logp: Tensor, labels: Tensor, weight: Tensor | None, smoothing: float) -> Tensor:
    """Return the losses of rows whose labels are classes, from their log-probabilities."""
    classes = logp.shape[-1]
    loss = -logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if weight is not None:
        loss = loss * weight[labels]
    if smoothing:
        if weight is None:
            weighted_sum = logp.sum(-1)
        else:
            weighted_sum = torch.where(weight == 0, 0, logp * weight).sum(-1)
        loss = (1 - smoothing) * loss - smoothing / classes * weighted_sum
    return loss


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
) -> RowLosses:
    """Compute the loss and the statistics of each row."""
    classes = logits.shape[1]
    x = capped(without_ignored(logits, target, ignore_index), softcap)
    if classes == 0:
        zero = x.new_zeros(x.shape[:-1])
        loss = zero
        if not target.is_floating_point():
            loss = torch.where(target.long() == ignore_index, 0.0, zero + torch.nan)
        return RowLosses(loss, zero - torch.inf, zero - torch.inf, zero, zero)
    logp = x.log_softmax(-1)
    maximum = x.amax(-1)
    sumexp = (x - finite_shift(maximum).unsqueeze(-1)).exp().sum(-1)
    logsumexp = maximum + sumexp.log()
    if target.is_floating_point():
        q = target_weights(target, weight, classes, ignore_index, label_smoothing, x)
        loss = -(q * torch.where((q == 0) & (logp == -torch.inf), 0, logp)).sum(-1)
        return RowLosses(loss, logsumexp, maximum, sumexp, q.sum(-1))
    labels, not_ignored, out_of_range = valid_targets(target, classes, ignore_index)
    weight = None if weight is None else weight.to(x.dtype)
    loss = label_losses(logp, labels, weight, label_smoothing)
    on_label = x.new_ones(()) if weight is None else weight[labels]
    mean_weight = 1.0 if weight is None else weight.mean()
    total_weight = (1 - label_smoothing) * on_label + label_smoothing * mean_weight
    nan_or_zero = torch.where(out_of_range, torch.nan, 0.0).to(x.dtype)
    return RowLosses(
        loss=torch.where(not_ignored, loss, 0) + nan_or_zero,
        logsumexp=torch.where(not_ignored, logsumexp, 0),
        maximum=maximum,
        sumexp=sumexp,
        total_weight=torch.where(not_ignored, total_weight, 0) + nan_or_zero,
    )


def cross_entropy_gradient(
    grad_loss: Tensor,
    grad_logsumexp: Tensor | None,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    maximum: Tensor | None,
    sumexp: Tensor | None,
    total_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
) -> Tensor:
    """Compute the gradient of the logits.

    It is differentiable in the first three arguments, in `weight` and in target probabilities. The
    saved statistics are not used here; they save a kernel work.
    """
    classes, dtype = logits.shape[1], logits.dtype
    logits = without_ignored(logits, target, ignore_index)
    x = capped(logits, softcap)
    p = x.softmax(-1)
    q = target_weights(target, weight, classes, ignore_index, label_smoothing, x)
    grad_loss = grad_loss.to(x.dtype).unsqueeze(-1)
    if grad_logsumexp is None:
        grad_logsumexp = torch.zeros_like(grad_loss)
    else:
        grad_logsumexp = grad_logsumexp.to(x.dtype).unsqueeze(-1)
    if not target.is_floating_point():
        ignored = (target.long() == ignore_index).unsqueeze(-1)
        grad_loss = torch.where(ignored, 0, grad_loss)
        grad_logsumexp = torch.where(ignored, 0, grad_logsumexp)
    # The rounding of these factors of a row would be in the gradients of all its classes.
    sum_dtype = torch.float64 if x.device.type == "cpu" else x.dtype
    sum_q = q.sum(-1, keepdim=True, dtype=sum_dtype)
    if weight is None and not target.is_floating_point():
        # The exact sum is 0 or 1; rounding removes the error of adding many terms.
        sum_q = torch.where(sum_q == sum_q, sum_q.round(), torch.nan)
    on_softmax = (grad_loss.to(sum_dtype) * sum_q + grad_logsumexp.to(sum_dtype)).to(x.dtype)
    grad = p * on_softmax - grad_loss * q
    if softcap:
        grad = grad * softcap_slope(logits.movedim(1, -1), softcap)
    return grad.movedim(-1, 1).to(dtype)


def scale_(grad: Tensor, factor: Tensor) -> None:
    """Multiply a gradient in place by a scalar tensor."""
    grad.mul_(factor.to(acc_dtype(grad.dtype)))


def of_read_rows(function: Callable[..., Any], logits: int = 0) -> Callable[..., Any]:
    """Return a function of rows that leaves out those that are not read, where results are 0.

    The argument after the logits is the labels, and the last one `ignore_index`.
    """

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        if args[-1] != NOT_READ:
            return function(*args)
        labels = args[logits + 1]
        rows = (labels != NOT_READ).nonzero(as_tuple=True)
        if len(rows[0]) == 1:  # PyTorch adds up a single row in another order.
            rows = tuple(each.repeat(2) for each in rows)
        found = function(*(arg[rows] if isinstance(arg, Tensor) else arg for arg in args))

        def spread(x: Tensor) -> Tensor:
            like = args[logits] if x.ndim > 1 else labels
            return torch.zeros_like(like, dtype=x.dtype).index_put_(rows, x)

        return spread(found) if isinstance(found, Tensor) else found._make(map(spread, found))

    return run


def scaled_rows(logits: Tensor, temperature: float, softcap: float) -> tuple[Tensor, Tensor]:
    """Return (x - maximum) / temperature with soft-capped logits x, and the maximum of each row.

    The maximum has no gradient. It is subtracted before the division, because a rounded quotient of
    large logits loses what tells the classes apart.
    """
    x = softcapped(logits, softcap)
    maximum = x.detach().amax(-1)
    return (x - finite_shift(maximum).unsqueeze(-1)) / temperature, maximum


def token_stats(
    logits: Tensor, target: Tensor | None, temperature: float, softcap: float, ignore_index: int
) -> TokenStatsRows:
    """Compute the statistics of the rows of soft-capped logits over the temperature.

    Without a target, the label of a row is its arg-max.
    """
    x, maximum = scaled_rows(logits, temperature, softcap)
    e = x.exp()
    sumexp = e.sum(-1)
    argmax = x.argmax(-1)
    labels, not_ignored, out_of_range = valid_targets(
        argmax if target is None else target, x.shape[-1], ignore_index
    )
    logprob = x.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - sumexp.log()
    # The sum of p log p would multiply the rounding error of log Z by the entropy.
    entropy = sumexp.log() - (e * torch.where(e == 0, 0, x)).sum(-1) / sumexp
    nan_or_zero = torch.where(out_of_range, torch.nan, 0.0).to(x.dtype)
    return TokenStatsRows(
        logprob=torch.where(not_ignored, logprob, 0) + nan_or_zero,
        logsumexp=maximum / temperature + sumexp.log() + nan_or_zero,
        entropy=entropy + nan_or_zero,
        argmax=argmax,
        maximum=maximum,
        sumexp=sumexp,
    )


def token_stats_gradient(
    grad_logprob: Tensor,
    grad_logsumexp: Tensor | None,
    grad_entropy: Tensor | None,
    logits: Tensor,
    target: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    entropy: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
) -> Tensor:
    """Compute the gradient of the logits, differentiable in the first four arguments.

    A gradient of None is zero. The statistics only say which rows are not finite.
    """
    labels, not_ignored, out_of_range = valid_targets(target, logits.shape[-1], ignore_index)
    on_label = torch.where(not_ignored, grad_logprob, 0)
    logits = without_inert_rows(logits, (maximum, sumexp), (on_label, grad_logsumexp, grad_entropy))
    x, _ = scaled_rows(logits, temperature, softcap)
    logp = x.log_softmax(-1)
    p = logp.exp()
    # The select comes before the product, so that the second derivative is finite too.
    p_logp = p * torch.where(p == 0, 0, logp)
    one_hot = (torch.arange(x.shape[-1], device=x.device) == labels.unsqueeze(-1)).to(x.dtype)
    grad = on_label.to(x.dtype).unsqueeze(-1) * (one_hot - p)
    if grad_logsumexp is not None:
        grad = grad + grad_logsumexp.to(x.dtype).unsqueeze(-1) * p
    if grad_entropy is not None:
        grad = grad - grad_entropy.to(x.dtype).unsqueeze(-1) * (
            p_logp - p * p_logp.sum(-1, keepdim=True)
        )
    grad = grad / temperature
    if softcap:
        grad = grad * softcap_slope(logits, softcap)
    return torch.where(out_of_range.unsqueeze(-1), torch.nan, grad).to(logits.dtype)
