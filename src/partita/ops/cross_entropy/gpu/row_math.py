"""Device functions on rows that the kernels of cross-entropy share.

The names are the same in all kernels. For a row of soft-capped logits `x`:

- `shift` is the maximum of x, or 0 if that is -inf, and `total` is the sum of exp(x - shift).
- `on_label` is the target weight on the label alone.
- `q` are the other target weights: of label smoothing, or of target probabilities. See
  `SMOOTHING_MODE` in `plan.py`. `smoothing_weight` is the sum of q, and `smoothing_loss` is the sum
  of q (shift - x).
- `not_ignored` says that the label is not `ignore_index`. `in_range` says that it also is a class,
  so that it may index memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    apply_softcap,
    divide,
    exp,
    exp_for_dtype,
    finite_shift,
    log_exact,
    sum_for_dtype,
)
from ....primitives.gpu.memory import edge_columns, opaque, store_streaming


@triton.jit
def label_weights(label, ignore_index, classes, weight_ptr, smoothing, ACC_DTYPE: tl.constexpr):
    """Return `not_ignored`, `in_range` and the target weight on each row's label.

    The weight is NaN if the label is out of range, and 0 if it is ignored.
    """
    not_ignored = label != ignore_index
    in_range = not_ignored & (label >= 0) & (label < classes)
    on_label = tl.where(in_range, 1.0 - smoothing, float("nan")).to(ACC_DTYPE)
    if weight_ptr is not None:
        on_label *= tl.load(weight_ptr + label, mask=in_range, other=1.0).to(ACC_DTYPE)
    return not_ignored, in_range, tl.where(not_ignored, on_label, 0.0)


@triton.jit
def load_row_gradient(grad_ptr, index, step, mask, ACC_DTYPE: tl.constexpr):
    """Return the rows' numbers of a gradient, which lie `step` apart; 0 if there is no gradient."""
    if grad_ptr is None:
        return tl.zeros(index.shape, ACC_DTYPE)
    else:
        return tl.load(grad_ptr + index * step, mask=mask, other=0.0).to(ACC_DTYPE)


@triton.jit
def smoothing_weights(
    probability,
    mask,
    weight_ptr,
    column,
    classes,
    smoothing,
    SMOOTHING_MODE: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Return the target weights q of a block of classes, 0 outside of the mask."""
    q = tl.where(mask, smoothing / classes, 0.0).to(ACC_DTYPE)
    if SMOOTHING_MODE == 2:
        q += probability * (1.0 - smoothing)
    if weight_ptr is not None:
        q *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(ACC_DTYPE)
    return q


@triton.jit
def exact_smoothing_weight(smoothing_weight, smoothing, weight_ptr, SMOOTHING_MODE: tl.constexpr):
    """Return the sum of q over a row.

    Without class weights the sum of the smoothing is known exactly, and the sum of many rounded
    terms is not used.
    """
    if SMOOTHING_MODE == 1 and weight_ptr is None:
        return smoothing_weight * 0.0 + smoothing
    else:
        return smoothing_weight


@triton.jit
def smoothing_terms(q, shift, x):
    """Return q (shift - x), and 0 where q is 0, even if x is infinite."""
    return tl.where(q == 0.0, 0.0, q * (shift - x))


@triton.jit
def class_gradient(
    e, x, factor, scaled_q, softcap, SMOOTHING_MODE: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """Return the gradient of the logits of rows that are not ignored, but for the label's weight.

    It is the softmax's part, `factor * e`, less the target weights, times the soft-cap's slope.
    """
    grad = e * factor
    if SMOOTHING_MODE:
        grad -= scaled_q
    if HAS_SOFTCAP:
        grad *= 1.0 - (x / softcap) * (x / softcap)
    return grad


@triton.jit
def store_valid_rows(ptr, grad, mask, not_ignored, STREAM: tl.constexpr):
    """Store the gradient of rows that are not ignored, and zeros in rows that are.

    Two masked stores cost less than a select for each class.
    """
    store_streaming(ptr, grad, mask & not_ignored, STREAM)
    store_streaming(ptr, tl.zeros_like(grad), mask & (not_ignored == 0), STREAM)


@triton.jit
def label_gradient(
    label,
    label_x,
    in_range,
    on_label,
    shift,
    factor,
    scale,
    weight_ptr,
    classes,
    smoothing,
    softcap,
    SMOOTHING_MODE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Return the gradient of the label's logit.

    It is stored over the value that the other classes' formula gives: comparing every class with
    the label would cost registers.
    """
    weight = on_label
    if SMOOTHING_MODE:
        weight += smoothing_weights(
            on_label, in_range, weight_ptr, label, classes, smoothing, 1, ACC_DTYPE
        )
    e = exp_for_dtype(label_x - shift, ACC_DTYPE)
    return class_gradient(e, label_x, factor, scale * weight, softcap, 1, HAS_SOFTCAP)


@triton.jit
def acc_logits(logits, mask, softcap, HAS_SOFTCAP: tl.constexpr):
    """Return soft-capped logits in fp32, -inf outside of the mask."""
    x = logits.to(tl.float32)
    if HAS_SOFTCAP:
        x = tl.where(mask, apply_softcap(x, softcap, HAS_SOFTCAP), -float("inf"))
    return x


@triton.jit
def row_factor(
    on_label, smoothing_weight, shift, total, scale, z_scale, z_loss, HAS_Z_LOSS: tl.constexpr
):
    """Return the factor of exp(x - shift) in each row's gradient."""
    softmax_coef = scale * (on_label + smoothing_weight)
    if HAS_Z_LOSS:
        softmax_coef += 2.0 * z_loss * (shift + log_exact(total)) * z_scale
    return divide(softmax_coef, total)


@triton.jit
def row_loss(
    not_ignored,
    on_label,
    label_x,
    smoothing_weight,
    smoothing_loss,
    shift,
    total,
    scale,
    z_scale,
    z_loss,
    SMOOTHING_MODE: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
):
    """Return the loss of each row.

    The kernels call this after they store the gradient, so that both overlap.
    """
    log_total = log_exact(total)
    loss = on_label * (log_total + (shift - label_x))
    if SMOOTHING_MODE:
        loss += smoothing_weight * log_total + smoothing_loss
    if HAS_Z_LOSS:
        logsumexp = shift + log_total
        loss += z_loss * logsumexp * logsumexp * (z_scale / scale)
    return tl.where(not_ignored, loss, 0.0)


@triton.jit
def row_part(
    logits,
    row_ptr,
    mask,
    head,
    body,
    classes,
    split,
    softcap,
    zero,
    dtype: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HALF: tl.constexpr,
    VEC: tl.constexpr,
):
    """Return the statistics of the part of a row that a program has in registers.

    These are: the logits as loaded, x, exp(x - part_shift), the maximum of x, part_shift, the sum
    of the exponentials; and of the classes outside of the row's aligned vectors, which only the
    first program of a row has, the columns, their mask and their x.
    """
    x = acc_logits(logits, mask, softcap, HAS_SOFTCAP)
    maximum = tl.max(x, axis=0)
    edge, at_edge, edge_x = 0, False, 0.0
    if VEC > 1:
        edge, at_edge = edge_columns(head, body, classes, VEC, 2 * VEC)  # [2 * VEC]
        at_edge &= split == 0
        edge_logits = tl.load(row_ptr + edge, mask=at_edge, other=-float("inf"))
        edge_x = acc_logits(edge_logits, at_edge, softcap, HAS_SOFTCAP)
        maximum = tl.maximum(maximum, tl.max(edge_x, axis=0))
    if HALF:
        logits = opaque(logits, tl.full(logits.shape, zero, tl.float32).to(logits.dtype))
        x = acc_logits(logits, mask, softcap, HAS_SOFTCAP)
    part_shift = finite_shift(maximum)
    e = exp_for_dtype(x - part_shift, dtype)
    total = sum_for_dtype(e, 0, dtype)
    if VEC > 1:
        total += tl.sum(exp(edge_x - part_shift), axis=0)
    return logits, x, e, maximum, part_shift, total, edge, at_edge, edge_x
