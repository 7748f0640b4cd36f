"""Loss and gradient of cross-entropy together, and the loss alone, in plain PyTorch.

They serve the CPU, where they take few calls and little temporary memory. So do the losses of rows
and their gradient, a few rows at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.rows import by_rows, finite_shift, row_chunks
from ...runtime.dtypes import acc_dtype
from ...runtime.register import resolved
from . import reference
from .common import LossOptions, mean_shares, valid_targets
from .reference import capped, label_losses

# A loss is the negative logarithm of a probability that is at least this large. That of a smaller
# one, which is rounded to a denormal number or to 0, is computed from the maximum of the row.
SMALLEST_PROBABILITY = 1e-30

cross_entropy = by_rows(reference.cross_entropy, classes=1, shared=(2,))
cross_entropy_backward = by_rows(reference.cross_entropy_gradient, logits=2, classes=1, shared=(4,))


def _rows_of(tensor: Tensor) -> Tensor:
    """Return `[N, C, ...]` as rows of classes, `[M, C]`, with their values in memory."""
    tensor = resolved(tensor)
    if not tensor.numel():
        return tensor.new_empty(tensor[:, :1].numel(), tensor.shape[1])
    return tensor.movedim(1, -1).reshape(-1, tensor.shape[1])


def cross_entropy_reduced(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the sum or the mean of the rows' losses, without their z-loss."""
    x, numbers = _rows_of(logits), options[:3]
    targets = _rows_of(target) if target.is_floating_point() else target.reshape(-1)
    losses = [_losses(x[rows], targets[rows], weight, *numbers) for rows in row_chunks(x)]
    loss = torch.cat(losses or [x.new_zeros(0)])
    is_mean = options.reduction == "mean"
    divides = (None, options.ignore_index, logits.shape[1], is_mean, loss.dtype)
    return (loss.sum() * mean_shares(target, weight, *divides)[0].reciprocal()).to(dtype)


def _losses(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    softcap: float,
) -> Tensor:
    """Return the losses of rows `[M, C]` without their statistics."""
    classes = logits.shape[1]
    if target.is_floating_point() or classes == 0:
        return cross_entropy(logits, target, weight, ignore_index, smoothing, softcap).loss
    x = capped(logits, softcap)
    labels, not_ignored, out_of_range = valid_targets(target, classes, ignore_index)
    weight = None if weight is None else weight.to(x.dtype)
    fresh = x.data_ptr() != logits.data_ptr()
    logp = torch.log_softmax(x, 1, out=x) if fresh else torch.log_softmax(x, 1)
    loss = torch.where(not_ignored, label_losses(logp, labels, weight, smoothing), 0)
    return loss + torch.where(out_of_range, torch.nan, 0.0).to(x.dtype)


def one_pass(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    options: LossOptions,
    denominators: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Compute the reduced loss of rows `[M, C]`, and write its gradient over the logits.

    Where the gradient itself holds the intermediate results, all rows are processed together:
    calls of few rows would make threads wait for one another. Otherwise chunks of rows bound the
    temporary memory. `denominators` are those of the mean loss and of the mean z-loss, `[2]`. `out`
    is memory for a gradient that does not replace the logits.
    """
    out = logits if out is None else out
    has_terms = options.softcap or options.label_smoothing
    fits_out = out.dtype == acc_dtype(logits.dtype) and not has_terms
    slices = [slice(None)] if fits_out and len(logits) else row_chunks(logits)
    losses = [
        _one_pass_of_chunk(
            logits[rows], out[rows], target[rows], class_weight, options, denominators
        )
        for rows in slices
    ]
    if losses:
        loss = torch.stack(losses).sum()
    else:
        loss = logits.new_zeros((), dtype=acc_dtype(logits.dtype))
    return loss + torch.where(denominators[0] == 0, torch.nan, 0.0)  # A mean of nothing is NaN.


def _one_pass_of_chunk(
    logits: Tensor,
    out: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    options: LossOptions,
    denominators: Tensor,
) -> Tensor:
    """Compute the sum of the losses of rows `[M, C]` and write their gradient to `out`."""
    ignore_index, smoothing, softcap, z_loss = options[:4]
    classes, x, tanh = logits.shape[1], logits.to(acc_dtype(logits.dtype)), None
    if softcap:
        tanh = (x / softcap).tanh_()
        x = softcap * tanh
    on_cpu = x.device.type == "cpu"
    labels, not_ignored, out_of_range = valid_targets(target, classes, ignore_index)
    index, row_dtype = labels[:, None], torch.float64 if on_cpu else x.dtype
    weight = x.new_ones(()) if class_weight is None else class_weight.to(x.dtype)
    label_weight = weight.to(row_dtype).expand(classes)[labels]
    sum_weight = weight.expand(classes).sum(dtype=row_dtype) if smoothing else 0.0
    scale, z_scale = denominators.to(row_dtype).reciprocal().unbind()
    on_label = (1 - smoothing) * label_weight

    # The softmax may replace the logits, so all that depends on them comes first.
    label_x = x.gather(1, index)[:, 0]
    is_copy = x.data_ptr() != logits.data_ptr()
    is_replaced = is_copy or out.data_ptr() == logits.data_ptr()
    finds_maximum = bool(smoothing or z_loss) or is_replaced or not on_cpu
    maximum = finite_shift(x.amax(1)) if finds_maximum else label_x
    terms = torch.zeros((), dtype=row_dtype, device=x.device)
    if smoothing:
        terms = torch.where(weight == 0, 0.0, weight * (maximum[:, None] - x))
        terms = terms.sum(1, dtype=row_dtype)
    # On the CPU the result may replace its input.
    memory = x if is_copy else out
    is_fit = on_cpu and memory.dtype == x.dtype
    p = torch.softmax(x, 1, out=memory) if is_fit else torch.softmax(x, 1)

    label_p = p.gather(1, index)[:, 0].to(row_dtype)
    log_sumexp, label_loss = label_x, -label_p.log()  # only rows with a maximum need the former
    is_small = label_p < SMALLEST_PROBABILITY
    if finds_maximum or bool(is_small.any()):
        if not finds_maximum:
            maximum = finite_shift(x.amax(1))
        log_sumexp = -p.amax(1).to(row_dtype).log()  # the softmax of the maximum is 1 / sumexp
        exact_loss = log_sumexp + (maximum.to(row_dtype) - label_x)
        label_loss = exact_loss if finds_maximum else torch.where(is_small, exact_loss, label_loss)
    loss = on_label * label_loss
    softmax_coef = scale * (on_label + smoothing / classes * sum_weight)
    if smoothing:
        loss = loss + smoothing / classes * (sum_weight * log_sumexp + terms)
    loss = scale * loss
    if z_loss:
        logsumexp = maximum + log_sumexp
        loss = loss + z_loss * z_scale * logsumexp**2
        softmax_coef = softmax_coef + 2 * z_loss * z_scale * logsumexp
    nan_or_zero = torch.where(out_of_range, torch.nan, 0.0).to(row_dtype)
    grad = p.mul_((softmax_coef + nan_or_zero).to(x.dtype)[:, None])
    if smoothing:
        grad -= (scale * smoothing / classes * weight).to(x.dtype)
    grad.scatter_add_(1, index, -(scale * on_label).to(x.dtype)[:, None])
    if tanh is not None:
        grad *= (1 - tanh).mul_(1 + tanh)  # the derivative of soft-capping, without cancellation
    if not on_cpu or not bool(not_ignored.all()):
        grad.masked_fill_(~not_ignored[:, None], 0.0)
    if grad.data_ptr() != out.data_ptr():
        out.copy_(grad)
    return (torch.where(not_ignored, loss, 0.0) + nan_or_zero).sum().to(x.dtype)


def cross_entropy_one_pass(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
    *,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the sum or the mean of the rows' losses, with their z-loss, and its gradient.

    A denominator, `[]`, divides the sum and its gradient, which may replace the logits.
    """
    is_mean = options.reduction == "mean"
    divides = (denominator, options.ignore_index, logits.shape[1], is_mean, acc_dtype(logits.dtype))
    denominators = mean_shares(target, weight, *divides)
    if target.is_floating_point() or not logits.numel():
        loss, grad = _two_passes(logits, target, weight, options, denominators)
        return loss.to(dtype), logits.copy_(grad) if inplace else grad
    grad = logits if inplace else torch.empty_like(logits)
    rows, grad_rows = _rows_of(logits), _rows_of(grad)
    is_view = grad_rows.data_ptr() == grad.data_ptr()
    if not is_view:  # The strides allow no view, so the gradient goes through a copy of the rows.
        grad_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
    loss = one_pass(rows, target.reshape(-1), weight, options, denominators, grad_rows)
    if not is_view:
        grad.copy_(grad_rows.reshape(logits.movedim(1, -1).shape).movedim(-1, 1))
    return loss.to(dtype), grad


def cross_entropy_one_pass_(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    denominator: Tensor | None,
    options: LossOptions,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the reduced loss, and write its gradient over the logits."""
    rest = (denominator, options, dtype)
    return cross_entropy_one_pass(logits, target, weight, *rest, inplace=True)[0]


def _two_passes(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: LossOptions,
    denominators: Tensor,
) -> tuple[Tensor, Tensor]:
    """Compute the reduced loss and its gradient from the losses of the rows."""
    rows = cross_entropy(logits, target, weight, *options[:3])
    (scale, z_scale), z_loss = denominators.reciprocal().unbind(), options.z_loss
    grad = cross_entropy_backward(
        torch.ones_like(rows.loss) * scale,
        2 * z_loss * rows.logsumexp * z_scale,
        logits,
        target,
        weight,
        rows.maximum,
        rows.sumexp,
        rows.total_weight,
        *options[:3],
    )
    z = z_loss * rows.logsumexp.square().sum() * z_scale if z_loss else 0.0
    return rows.loss.sum() * scale + z, grad
