"""Specification of cross-entropy and of token statistics in plain PyTorch.

A row with logits x over C classes and target weights q has the loss sum_c q_c (lse - x_c). For a
label y and a smoothing s, q is w_y (1 - s) at y plus s w_c / C at every class c. For target
probabilities t, q is w_c (t_c (1 - s) + s / C). With Q = sum_c q_c the gradient is
Q softmax(x) - q. Soft-capping replaces x by cap tanh(x / cap).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import finite_shift, laid_out_like, row_chunks, softcap_slope
from ...runtime.dtypes import acc_dtype
from .common import OnePass, RowLosses, TokenStatsRows, mean_shares, valid_targets


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Return soft-capped logits in the accumulator's dtype, with the classes last."""
    x = logits.to(acc_dtype(logits.dtype)).movedim(1, -1)
    return softcap * (x / softcap).tanh() if softcap else x


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
    x = capped(logits, softcap)
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
    loss = -logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    weight = None if weight is None else weight.to(x.dtype)
    if weight is not None:
        loss = loss * weight[labels]
    if label_smoothing:
        if weight is None:
            weighted_sum = logp.sum(-1)
        else:
            weighted_sum = torch.where(weight == 0, 0, logp * weight).sum(-1)
        loss = (1 - label_smoothing) * loss - label_smoothing / classes * weighted_sum
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
    grad_logsumexp: Tensor,
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
    classes = logits.shape[1]
    x = capped(logits, softcap)
    p = x.softmax(-1)
    q = target_weights(target, weight, classes, ignore_index, label_smoothing, x)
    grad_loss = grad_loss.to(x.dtype).unsqueeze(-1)
    grad_logsumexp = grad_logsumexp.to(x.dtype).unsqueeze(-1)
    if not target.is_floating_point():
        ignored = (target.long() == ignore_index).unsqueeze(-1)
        grad_loss = torch.where(ignored, 0, grad_loss)
        grad_logsumexp = torch.where(ignored, 0, grad_logsumexp)
        p = torch.where(ignored, 0, p)
    sum_q = q.sum(-1, keepdim=True)
    if weight is None and not target.is_floating_point():
        # The exact sum is 0 or 1; rounding removes the error of adding many terms.
        sum_q = torch.where(sum_q == sum_q, sum_q.round(), torch.nan)
    grad = p * (grad_loss * sum_q + grad_logsumexp) - grad_loss * q
    if softcap:
        grad = grad * softcap_slope(logits.movedim(1, -1), softcap)
    return grad.movedim(-1, 1).to(logits.dtype)


def cross_entropy_backward(
    grad_loss: Tensor, grad_logsumexp: Tensor, logits: Tensor, *args: Any
) -> Tensor:
    """Compute the gradient of the logits in their memory layout."""
    return laid_out_like(cross_entropy_gradient(grad_loss, grad_logsumexp, logits, *args), logits)


def cross_entropy_backward_(
    grad_loss: Tensor, grad_logsumexp: Tensor, logits: Tensor, *args: Any
) -> None:
    """Write the gradient of the logits over them."""
    logits.copy_(cross_entropy_backward(grad_loss, grad_logsumexp, logits, *args))


def _rows_of(tensor: Tensor) -> Tensor:
    """Return `[N, C, ...]` as rows of classes, `[M, C]`."""
    if not tensor.numel():
        return tensor.new_empty(tensor[:, :1].numel(), tensor.shape[1])
    return tensor.movedim(1, -1).reshape(-1, tensor.shape[1])


def mean_scales(
    loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    mean: bool,
) -> Tensor:
    """Return the factors of a row's loss and of its z-loss in the reduced loss, `[2]`."""
    if mean and target.is_floating_point():
        return loss.new_full((2,), loss.numel()).reciprocal()
    return mean_shares(target, weight, ignore_index, logits.shape[1], mean, loss.dtype).reciprocal()


def cross_entropy_reduced(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    mean: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the sum or the mean of the rows' losses."""
    options = (weight, ignore_index, label_smoothing, softcap)
    x = _rows_of(logits)
    labels = _rows_of(target) if target.is_floating_point() else target.reshape(-1)
    losses = [cross_entropy(x[rows], labels[rows], *options).loss for rows in row_chunks(x)]
    loss = torch.cat(losses or [x.new_zeros(0)])
    scale = mean_scales(loss, logits, target, weight, ignore_index, mean)[0]
    return (loss.sum() * scale).to(dtype)


def one_pass(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float,
    z_loss: float,
    mean: bool,
    denominators: Tensor,
) -> Tensor:
    """Compute the reduced loss of rows `[M, C]`, and write its gradient over the logits.

    The rows are processed in chunks, so that their copies fit a cache.
    """
    options = (class_weight, ignore_index, smoothing, softcap, z_loss, denominators)
    losses = [
        _one_pass_of_chunk(logits[rows], target[rows], *options) for rows in row_chunks(logits)
    ]
    if losses:
        loss = torch.stack(losses).sum()
    else:
        loss = logits.new_zeros((), dtype=acc_dtype(logits.dtype))
    return loss + torch.where(denominators[0] == 0, torch.nan, 0.0)  # A mean of nothing is NaN.


def _one_pass_of_chunk(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float,
    z_loss: float,
    denominators: Tensor,
) -> Tensor:
    classes, x = logits.shape[1], capped(logits, softcap)
    labels, not_ignored, out_of_range = valid_targets(target, classes, ignore_index)
    maximum = finite_shift(x.amax(1))
    e = (x - maximum[:, None]).exp_()
    # The dtype of what a row has one number of.
    row_dtype = torch.float64 if x.device.type == "cpu" else x.dtype
    sumexp = e.sum(1, dtype=row_dtype)
    log_sumexp = sumexp.log()
    if class_weight is None:
        weight = torch.ones((), dtype=x.dtype, device=x.device)
        label_weight = weight.to(row_dtype).expand(len(labels))
        sum_weight: Tensor | int = classes
    else:
        weight = class_weight.to(x.dtype)
        label_weight = weight.to(row_dtype)[labels]
        sum_weight = weight.sum(dtype=row_dtype)
    on_label = (1 - smoothing) * label_weight
    label_x = x.gather(1, labels[:, None])[:, 0]
    loss = on_label * (log_sumexp + (maximum.to(row_dtype) - label_x))
    if smoothing:
        terms = torch.where(weight == 0, 0.0, weight * (maximum[:, None] - x))
        smoothing_loss = sum_weight * log_sumexp + terms.sum(1, dtype=row_dtype)
        loss = loss + smoothing / classes * smoothing_loss
    scale, z_scale = denominators.to(row_dtype).reciprocal().unbind()
    loss = scale * loss
    softmax_coef = scale * (on_label + smoothing / classes * sum_weight)
    if z_loss:
        logsumexp = maximum + log_sumexp
        loss = loss + z_loss * z_scale * logsumexp**2
        softmax_coef = softmax_coef + 2 * z_loss * z_scale * logsumexp
    grad = e.mul_((softmax_coef / sumexp).to(x.dtype)[:, None])
    if smoothing:
        grad -= (scale * smoothing / classes * weight).to(x.dtype)
    grad.scatter_add_(1, labels[:, None], -(scale * on_label).to(x.dtype)[:, None])
    if softcap:
        grad *= softcap_slope(logits, softcap)
    nan_or_zero = torch.where(out_of_range, torch.nan, 0.0).to(x.dtype)
    logits.copy_(torch.where(not_ignored[:, None], grad + nan_or_zero[:, None], 0.0))
    return (torch.where(not_ignored, loss, 0.0) + nan_or_zero).sum().to(x.dtype)


def cross_entropy_one_pass(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    mean: bool,
    dtype: torch.dtype,
) -> OnePass:
    """Compute the sum or the mean of the rows' losses, with their z-loss, and its gradient."""
    numbers = (ignore_index, label_smoothing, softcap)
    if not target.is_floating_point() and logits.numel():
        grad = torch.empty_like(logits).copy_(logits)
        loss = cross_entropy_one_pass_(grad, target, weight, *numbers, z_loss, mean, dtype)
        return OnePass(loss, grad)
    rows = cross_entropy(logits, target, weight, *numbers)
    scale, z_scale = mean_scales(rows.loss, logits, target, weight, ignore_index, mean).unbind()
    grad = cross_entropy_backward(
        torch.ones_like(rows.loss) * scale,
        2 * z_loss * rows.logsumexp * z_scale,
        logits,
        target,
        weight,
        rows.maximum,
        rows.sumexp,
        rows.total_weight,
        *numbers,
    )
    z = z_loss * rows.logsumexp.square().sum() * z_scale if z_loss else 0.0
    return OnePass((rows.loss.sum() * scale + z).to(dtype), grad)


def cross_entropy_one_pass_(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    mean: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the reduced loss, and write its gradient over the logits."""
    numbers = (ignore_index, label_smoothing, softcap, z_loss, mean)
    if target.is_floating_point() or not logits.numel():
        loss, grad = cross_entropy_one_pass(logits, target, weight, *numbers, dtype)
        logits.copy_(grad)
        return loss
    classes, dtype_of_sums = logits.shape[1], acc_dtype(logits.dtype)
    denominators = mean_shares(target, weight, ignore_index, classes, mean, dtype_of_sums)
    rows = _rows_of(logits)
    loss = one_pass(rows, target.reshape(-1), weight, *numbers, denominators)
    if rows.data_ptr() != logits.data_ptr():  # The strides allow no view, so the rows are a copy.
        logits.copy_(rows.reshape(logits.movedim(1, -1).shape).movedim(-1, 1))
    return loss.to(dtype)


def scale_(grad: Tensor, factor: Tensor) -> None:
    """Multiply a gradient in place by a scalar tensor."""
    grad.mul_(factor.to(acc_dtype(grad.dtype)))


def token_stats(
    logits: Tensor, target: Tensor, temperature: float, ignore_index: int
) -> TokenStatsRows:
    """Compute the statistics of the rows of `logits / temperature`."""
    x = logits.to(acc_dtype(logits.dtype)) / temperature
    logp = x.log_softmax(-1)
    p = logp.exp()
    labels, not_ignored, out_of_range = valid_targets(target, x.shape[-1], ignore_index)
    logprob = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    entropy = -(p * torch.where(p == 0, 0, logp)).sum(-1)
    maximum = x.amax(-1)
    sumexp = (x - finite_shift(maximum).unsqueeze(-1)).exp().sum(-1)
    nan_or_zero = torch.where(out_of_range, torch.nan, 0.0).to(x.dtype)
    return TokenStatsRows(
        logprob=torch.where(not_ignored, logprob, 0) + nan_or_zero,
        logsumexp=maximum + sumexp.log() + nan_or_zero,
        entropy=entropy + nan_or_zero,
        argmax=x.argmax(-1),
        maximum=maximum * temperature,
        sumexp=sumexp,
    )


def token_stats_gradient(
    grad_logprob: Tensor,
    grad_logsumexp: Tensor,
    grad_entropy: Tensor,
    logits: Tensor,
    target: Tensor,
    maximum: Tensor | None,
    sumexp: Tensor | None,
    entropy: Tensor | None,
    temperature: float,
    ignore_index: int,
) -> Tensor:
    """Compute the gradient of the logits, differentiable in the first four arguments.

    The saved statistics are not used here; they save a kernel work.
    """
    x = logits.to(acc_dtype(logits.dtype)) / temperature
    logp = x.log_softmax(-1)
    p = logp.exp()
    # The select comes before the product, so that the second derivative is finite too.
    p_logp = p * torch.where(p == 0, 0, logp)
    labels, not_ignored, out_of_range = valid_targets(target, x.shape[-1], ignore_index)
    one_hot = (torch.arange(x.shape[-1], device=x.device) == labels.unsqueeze(-1)).to(x.dtype)
    on_label = torch.where(not_ignored, grad_logprob.to(x.dtype), 0).unsqueeze(-1)
    grad = on_label * (one_hot - p) + grad_logsumexp.to(x.dtype).unsqueeze(-1) * p
    grad = grad - grad_entropy.to(x.dtype).unsqueeze(-1) * (
        p_logp - p * p_logp.sum(-1, keepdim=True)
    )
    return torch.where(out_of_range.unsqueeze(-1), torch.nan, grad / temperature).to(logits.dtype)


def token_stats_backward(
    grad_logprob: Tensor, grad_logsumexp: Tensor, grad_entropy: Tensor, logits: Tensor, *args: Any
) -> Tensor:
    """Compute the gradient of the logits in their memory layout."""
    grad = token_stats_gradient(grad_logprob, grad_logsumexp, grad_entropy, logits, *args)
    return laid_out_like(grad, logits)
