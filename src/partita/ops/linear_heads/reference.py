"""Statistics and gradients of rows of logits that come in chunks of classes, in plain PyTorch.

This module says what is done to a chunk. The loops over chunks stand in `chunked.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.rows import finite_shift, part_of, row_chunks, softcap_slope, softcapped
from ..cross_entropy.common import mean_shares, valid_targets
from ..cross_entropy.reference_one_pass import one_pass
from ..divergence.reference import DIVERGENCE_KERNELS
from ..logprobs.reference import ENTRY_KERNELS, topk_of_rows
from ..truncated.reference import TRUNCATED_KERNELS
from .chunked import HeadKernels
from .common import GradientCoefficients, RowState, RowStatistics, StatisticsGrads


def accumulate_logits(
    logits: Tensor,
    first: int,
    target: Tensor,
    class_weight: Tensor | None,
    state: RowState,
    temperature: float,
    softcap: float,
) -> None:
    """Update the state in place with the logits of the classes from `first` on, or overwrite it.

    `class_weight` holds the weights of these classes.
    """
    if first == 0:
        state.clear()
    for rows in row_chunks(logits):
        x, index = softcapped(logits[rows], softcap), target[rows].long() - first
        of_rows = part_of(state, rows)
        in_chunk = (index >= 0) & (index < x.shape[1])
        label = x.gather(1, torch.where(in_chunk, index, 0)[:, None])[:, 0]
        of_rows.label.copy_(torch.where(in_chunk, label, of_rows.label))
        chunk_maximum, chunk_argmax = x.max(1)
        maximum = torch.maximum(of_rows.maximum, chunk_maximum)
        shift = finite_shift(maximum)
        if first == 0 and of_rows.origin is not None:
            of_rows.origin.copy_(finite_shift(x[:, 0]))
        if of_rows.origin is not None and of_rows.smoothing_loss is not None:
            terms = of_rows.origin[:, None] - x
            if class_weight is not None:
                terms = torch.where(class_weight == 0, 0.0, class_weight.to(x.dtype) * terms)
            of_rows.smoothing_loss.add_(terms.sum(1))
        exponent = (x - shift[:, None]) / temperature
        e, scale = exponent.exp(), ((of_rows.maximum - shift) / temperature).exp()
        if of_rows.sum_x_exp is not None and of_rows.argmax is not None:
            increase = of_rows.sumexp * (shift - finite_shift(of_rows.maximum)) / temperature
            rescaled = scale * (of_rows.sum_x_exp - increase)
            of_rows.sum_x_exp.copy_(rescaled + torch.where(e == 0, 0.0, e * exponent).sum(1))
            argmax = torch.where(
                chunk_maximum > of_rows.maximum, first + chunk_argmax, of_rows.argmax
            )
            of_rows.argmax.copy_(argmax)
        of_rows.sumexp.mul_(scale).add_(e.sum(1))
        of_rows.maximum.copy_(maximum)


def row_statistics(
    state: RowState,
    target: Tensor,
    class_weight: Tensor | None,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> RowStatistics:
    """Return the statistics of rows whose state has seen all classes."""
    _, valid, invalid = valid_targets(target, classes, ignore_index)
    nan_mask = torch.where(invalid, torch.nan, 0.0).to(state.maximum.dtype)
    shift, log_sumexp = finite_shift(state.maximum), state.sumexp.log()
    nll = torch.where(valid, log_sumexp + (shift - state.label) / temperature, 0.0)
    smoothing_loss, entropy = shift.new_empty(0), shift.new_empty(0)
    if state.smoothing_loss is not None and state.origin is not None:
        total_weight = classes if class_weight is None else class_weight.to(shift.dtype).sum()
        from_origin = total_weight * (log_sumexp + (shift - state.origin))
        smoothing_loss = from_origin + state.smoothing_loss + nan_mask
    if state.sum_x_exp is not None:
        entropy = log_sumexp - state.sum_x_exp / state.sumexp + nan_mask
    argmax = target.new_empty(0, dtype=torch.int64) if state.argmax is None else state.argmax
    return RowStatistics(
        nll=nll + nan_mask,
        logsumexp=shift / temperature + log_sumexp + nan_mask,
        smoothing_loss=smoothing_loss,
        entropy=entropy,
        argmax=argmax,
        maximum=state.maximum,
        sumexp=state.sumexp,
    )


def gradient_coefficients(
    grads: StatisticsGrads,
    target: Tensor,
    class_weight: Tensor | None,
    entropies: Tensor,
    classes: int,
    temperature: float,
    ignore_index: int,
) -> GradientCoefficients:
    """Return the coefficients of the rows from the gradients of their statistics.

    `entropies` is read for that of the entropy, and has the dtype of the coefficients.
    """
    (nll, logsumexp, smoothing_loss, entropy), dtype = grads, entropies.dtype
    _, valid, invalid = valid_targets(target, classes, ignore_index)
    dlogits_coef = torch.where(invalid, torch.nan, 0.0).to(dtype)
    label_coef, log_coef, smoothing_coef = torch.zeros_like(dlogits_coef), None, None
    if nll is not None:
        label_coef = -torch.where(valid, nll, 0.0)
        dlogits_coef = dlogits_coef - label_coef
    if logsumexp is not None:
        dlogits_coef = dlogits_coef + logsumexp
    if smoothing_loss is not None:
        total_weight = classes if class_weight is None else class_weight.to(dtype).sum()
        dlogits_coef = dlogits_coef + smoothing_loss * total_weight
        smoothing_coef = -smoothing_loss / temperature
    if entropy is not None:
        # A row without a gradient has the coefficient 0, whatever its entropy is.
        of_row = torch.where(entropy == 0, 0, entropy * entropies)
        dlogits_coef = dlogits_coef - of_row
        log_coef = -entropy / temperature
    return GradientCoefficients(
        dlogits_coef / temperature, label_coef / temperature, log_coef, smoothing_coef
    )


def logits_gradient(
    logits: Tensor,
    first: int,
    target: Tensor,
    class_weight: Tensor | None,
    coefficients: GradientCoefficients,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
    result: Tensor,
) -> None:
    """Write the gradient of the logits of the classes from `first` on to `result`.

    `result` may be the logits themselves. `class_weight` holds the weights of these classes.
    """
    for rows in row_chunks(logits):
        dlogits_coef, label_coef, log_coef, smoothing_coef = part_of(coefficients, rows)
        x = softcapped(logits[rows], softcap)
        exponent = (x - finite_shift(maximum[rows])[:, None]) / temperature
        sums = sumexp[rows, None]
        p = exponent.exp() / sums
        grad = dlogits_coef[:, None] * p
        active = (dlogits_coef != 0) | (label_coef != 0)
        if log_coef is not None:
            p_log_p = torch.where(p == 0, 0.0, p * (exponent - sums.log()))
            grad = grad + log_coef[:, None] * p_log_p
            active = active | (log_coef != 0)
        if smoothing_coef is not None:
            weights = 1.0 if class_weight is None else class_weight.to(x.dtype)
            grad = grad + smoothing_coef[:, None] * weights
            active = active | (smoothing_coef != 0)
        classes = torch.arange(first, first + x.shape[1], device=x.device)
        grad = grad + torch.where(classes == target[rows, None].long(), label_coef[:, None], 0.0)
        if softcap:
            grad = grad * softcap_slope(logits[rows], softcap)
        result[rows].copy_(torch.where(active[:, None], grad, 0.0))


KERNELS = HeadKernels(
    accumulate_logits,
    row_statistics,
    logits_gradient,
    one_pass,
    mean_shares,
    ENTRY_KERNELS,
    topk_of_rows,
    TRUNCATED_KERNELS,
    DIVERGENCE_KERNELS,
)
