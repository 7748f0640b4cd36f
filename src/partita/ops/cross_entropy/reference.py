"""Cross-entropy with all its options.

A row with logits x over C classes and the weights q of its classes has the loss sum_c q_c (lse - x_c), where q is
w_y (1 - s) at the target y plus s w_c / C everywhere (s the smoothing), or w_c (t_c (1 - s) + s / C) for target probabilities t.
With Q = sum_c q_c its gradient is Q softmax(x) - q. Soft-capping puts cap tanh(x / cap) in the place of x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...primitives.rows import finite_shift, laid_out_like, row_chunks, softcap_slope
from ...runtime.dtypes import acc_dtype
from .common import OnePass, RowLosses, valid_targets


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Logits, classes last, in the accumulator's dtype, soft-capped where `softcap` is not zero."""
    wide = logits.to(acc_dtype(logits.dtype)).movedim(1, -1)
    return softcap * (wide / softcap).tanh() if softcap else wide


def target_weights(
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    ignore_index: int,
    smoothing: float,
    like: Tensor,
) -> Tensor:
    """The weights q, `[N, ..., C]`; NaN in rows whose label is wrong, 0 in ignored rows."""
    weights = like.new_ones(classes) if weight is None else weight.to(like.dtype)
    if target.is_floating_point():
        return weights * (
            target.to(like.dtype).movedim(1, -1) * (1 - smoothing) + smoothing / classes
        )
    labels, kept, wrong = valid_targets(target, classes, ignore_index)
    hot = torch.arange(classes, device=target.device) == labels.unsqueeze(-1)
    q = torch.where(hot, (1 - smoothing) * weights, 0) + smoothing / classes * weights
    return torch.where(wrong, torch.nan, kept.to(like.dtype)).unsqueeze(-1) * q


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
) -> RowLosses:
    classes = logits.shape[1]
    x = capped(logits, softcap)
    if classes == 0:
        nothing = x.new_zeros(x.shape[:-1])
        loss = (
            nothing
            if target.is_floating_point()
            else torch.where(target.long() == ignore_index, 0.0, nothing + torch.nan)
        )
        return RowLosses(loss, nothing - torch.inf, nothing - torch.inf, nothing, nothing)
    logp = x.log_softmax(-1)
    maximum = x.amax(-1)
    sumexp = (x - finite_shift(maximum).unsqueeze(-1)).exp().sum(-1)
    logsumexp = maximum + sumexp.log()
    if target.is_floating_point():
        q = target_weights(target, weight, classes, ignore_index, label_smoothing, x)
        loss = -(q * torch.where((q == 0) & (logp == -torch.inf), 0, logp)).sum(-1)
        return RowLosses(loss, logsumexp, maximum, sumexp, q.sum(-1))
    labels, kept, wrong = valid_targets(target, classes, ignore_index)
    loss = -logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    if weight is not None:
        loss = loss * weight.to(x.dtype)[labels]
    if label_smoothing:
        everywhere = (
            logp.sum(-1)
            if weight is None
            else torch.where(weight == 0, 0, logp * weight.to(x.dtype)).sum(-1)
        )
        loss = (1 - label_smoothing) * loss - label_smoothing / classes * everywhere
    on_label = x.new_ones(()) if weight is None else weight.to(x.dtype)[labels]
    spread = 1.0 if weight is None else weight.to(x.dtype).mean()
    total_weight = torch.where(kept, (1 - label_smoothing) * on_label + label_smoothing * spread, 0)
    spoiled = torch.where(wrong, torch.nan, 0.0).to(x.dtype)
    return RowLosses(
        torch.where(kept, loss, 0) + spoiled,
        torch.where(kept, logsumexp, 0),
        maximum,
        sumexp,
        total_weight + spoiled,
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
    """Differentiable in the first three, and in `weight` and probability targets; the three that follow spare a kernel work."""
    classes = logits.shape[1]
    x = capped(logits, softcap)
    p = x.softmax(-1)
    q = target_weights(target, weight, classes, ignore_index, label_smoothing, x)
    g, h = grad_loss.to(x.dtype).unsqueeze(-1), grad_logsumexp.to(x.dtype).unsqueeze(-1)
    if not target.is_floating_point():
        ignored = (target.long() == ignore_index).unsqueeze(-1)
        g, h, p = torch.where(ignored, 0, g), torch.where(ignored, 0, h), torch.where(ignored, 0, p)
    total_weight = q.sum(-1, keepdim=True)
    if weight is None and not target.is_floating_point():
        total_weight = torch.where(
            total_weight == total_weight, total_weight.round(), torch.nan
        )  # 0 or 1, but for the rounding of many terms
    grad = p * (g * total_weight + h) - g * q
    if softcap:
        grad = grad * softcap_slope(logits.movedim(1, -1), softcap)
    return grad.movedim(-1, 1).to(logits.dtype)


def cross_entropy_backward(
    grad_loss: Tensor, grad_logsumexp: Tensor, logits: Tensor, *args: Any
) -> Tensor:
    return laid_out_like(cross_entropy_gradient(grad_loss, grad_logsumexp, logits, *args), logits)


def mean_denominators(
    target: Tensor, weight: Tensor | None, ignore_index: int, classes: int
) -> Tensor:
    """What the mean divides by: `[2]`, the class weights of the targets that count, and their number."""
    labels, kept, _ = valid_targets(target, classes, ignore_index)
    count = kept.sum() if weight is None else kept.sum(dtype=acc_dtype(weight.dtype))
    if weight is None or classes == 0:
        return torch.stack([count, count])
    return torch.stack([torch.where(kept, weight[labels], 0).sum(dtype=count.dtype), count])


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
    """Sum or mean of the loss of the rows."""
    x, labels = _flat(logits), _flat(target) if target.is_floating_point() else target.reshape(-1)
    loss = torch.cat(
        [
            cross_entropy(
                x[rows], labels[rows], weight, ignore_index, label_smoothing, softcap
            ).loss
            for rows in row_chunks(x)
        ]
        or [x.new_zeros(0)]
    )
    return (loss.sum() * mean_scales(loss, logits, target, weight, ignore_index, mean)[0]).to(dtype)


def _flat(tensor: Tensor) -> Tensor:
    """Rows of classes, `[M, C]`."""
    return (
        tensor.movedim(1, -1).reshape(-1, tensor.shape[1])
        if tensor.numel()
        else tensor.new_empty(tensor[:, :1].numel(), tensor.shape[1])
    )


def mean_scales(
    loss: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    mean: bool,
) -> Tensor:
    """What the loss and the z-loss of a row are multiplied by: `[2]`."""
    if mean and target.is_floating_point():
        return loss.new_full((2,), loss.numel()).reciprocal()
    return mean_shares(target, weight, ignore_index, logits.shape[1], mean, loss.dtype).reciprocal()


def mean_shares(
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    classes: int,
    mean: bool,
    wide: torch.dtype,
) -> Tensor:
    """What the loss and the z-loss of a row are divided by, `[2]`."""
    if not mean:
        return torch.ones(2, dtype=wide, device=target.device)
    return mean_denominators(target, class_weight, ignore_index, classes).to(wide)


def one_pass(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float,
    z_loss: float,
    mean: bool,
    divisors: Tensor,
) -> Tensor:
    """The loss of all rows together, divided as told; the logits become its gradient. Some rows at a time: the copies of these fit a cache."""
    options = (class_weight, ignore_index, smoothing, softcap, z_loss, divisors)
    losses = [_one_pass(logits[rows], target[rows], *options) for rows in row_chunks(logits)]
    loss = (
        torch.stack(losses).sum() if losses else logits.new_zeros((), dtype=acc_dtype(logits.dtype))
    )
    return loss + torch.where(divisors[0] == 0, torch.nan, 0.0)  # a mean over nothing


def _one_pass(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float,
    z_loss: float,
    divisors: Tensor,
) -> Tensor:
    classes, x = logits.shape[1], capped(logits, softcap)
    labels, kept, wrong = valid_targets(target, classes, ignore_index)
    maximum, wide = finite_shift(x.amax(1)), x.dtype
    e = (x - maximum[:, None]).exp_()
    row = torch.float64 if x.device.type == "cpu" else wide  # of the numbers that a row has one of
    total = e.sum(1, dtype=row)
    log_total = total.log()
    of_class = (
        torch.ones((), dtype=wide, device=x.device)
        if class_weight is None
        else class_weight.to(wide)
    )
    on_label = (1 - smoothing) * (
        of_class.to(row)[labels]
        if class_weight is not None
        else of_class.to(row).expand(len(labels))
    )
    loss = on_label * (log_total + (maximum.to(row) - x.gather(1, labels[:, None])[:, 0]))
    weights = of_class.sum(dtype=row) if class_weight is not None else classes
    if smoothing:
        below = torch.where(of_class == 0, 0.0, of_class * (maximum[:, None] - x)).sum(1, dtype=row)
        loss = loss + smoothing / classes * (weights * log_total + below)
    scale, z_scale = divisors.to(row).reciprocal().unbind()
    loss, pull = scale * loss, scale * (on_label + smoothing / classes * weights)
    if z_loss:
        logsumexp = maximum + log_total
        loss, pull = loss + z_loss * z_scale * logsumexp**2, pull + 2 * z_loss * z_scale * logsumexp
    grad = e.mul_((pull / total).to(wide)[:, None])
    if smoothing:
        grad -= (scale * smoothing / classes * of_class).to(wide)
    grad.scatter_add_(1, labels[:, None], -(scale * on_label).to(wide)[:, None])
    if softcap:
        grad *= softcap_slope(logits, softcap)
    spoilt = torch.where(wrong, torch.nan, 0.0).to(wide)
    logits.copy_(torch.where(kept[:, None], grad + spoilt[:, None], 0.0))
    return (torch.where(kept, loss, 0.0) + spoilt).sum().to(wide)


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
    """Sum or mean of the loss of the rows, z-loss included, and its gradient."""
    if not target.is_floating_point() and logits.numel():
        grad = torch.empty_like(logits).copy_(logits)
        return OnePass(
            cross_entropy_one_pass_(
                grad, target, weight, ignore_index, label_smoothing, softcap, z_loss, mean, dtype
            ),
            grad,
        )
    rows = cross_entropy(logits, target, weight, ignore_index, label_smoothing, softcap)
    scale, z_scale = mean_scales(rows.loss, logits, target, weight, ignore_index, mean).unbind()
    g = torch.ones_like(rows.loss) * scale
    h = 2 * z_loss * rows.logsumexp * z_scale
    statistics = rows.maximum, rows.sumexp, rows.total_weight
    grad = cross_entropy_backward(
        g, h, logits, target, weight, *statistics, ignore_index, label_smoothing, softcap
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
    """The same, with the gradient in the place of the logits."""
    if target.is_floating_point() or not logits.numel():
        loss, grad = cross_entropy_one_pass(
            logits, target, weight, ignore_index, label_smoothing, softcap, z_loss, mean, dtype
        )
        logits.copy_(grad)
        return loss
    wide, classes = acc_dtype(logits.dtype), logits.shape[1]
    divisors, rows = mean_shares(target, weight, ignore_index, classes, mean, wide), _flat(logits)
    loss = one_pass(
        rows,
        target.reshape(-1),
        weight,
        ignore_index,
        label_smoothing,
        softcap,
        z_loss,
        mean,
        divisors,
    )
    if rows.data_ptr() != logits.data_ptr():  # a copy, for they do not lie side by side
        logits.copy_(rows.reshape(logits.movedim(1, -1).shape).movedim(-1, 1))
    return loss.to(dtype)


def cross_entropy_backward_(
    grad_loss: Tensor, grad_logsumexp: Tensor, logits: Tensor, *args: Any
) -> None:
    logits.copy_(cross_entropy_backward(grad_loss, grad_logsumexp, logits, *args))


def scale_(grad: Tensor, factor: Tensor) -> None:
    grad.mul_(factor.to(acc_dtype(grad.dtype)))
