"""Device functions on rows that the kernels of cross-entropy share.

The names are the same in all kernels. For a row of soft-capped logits `x`:

- `shift` is the maximum of x, or 0 if that is -inf, and `total` is the sum of exp(x - shift).
- `q` are the target weights apart from the label's: of label smoothing, or of target
  probabilities. See `SMOOTHING_MODE` in `plan.py`.

Values that belong together travel as named tuples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    divide,
    exp_for_dtype,
    log_exact,
    reciprocal,
    through_softcap,
)
from ....primitives.gpu.reduce import load_capped
from .reduction import load_labels, sum_label_weights, sum_of_shares


class LossOptions(NamedTuple):
    """The targets and the options of a loss. The numbers have the dtype of the arithmetic.

    Fields:
        targets: the `Targets`.
        smoothing: the label smoothing.
        softcap: the bound of the logits, or None.
        z_loss: the factor of the squared log-sum-exp, or None.
        spread: the smoothing if rows have target weights q, or None for hard labels.
    """

    targets: Any
    smoothing: Any
    softcap: Any
    z_loss: Any
    spread: Any


class OptionalTerms(NamedTuple):
    """Numbers of a loss in fp32, which a kernel has no code for where they are None."""

    softcap: float | None
    z_loss: float | None


class Label(NamedTuple):
    """The labels of the rows of a program.

    Fields:
        index: the class.
        not_ignored: whether it is not `ignore_index`.
        in_range: whether it also is a class of the row, so that it may index memory.
        weight: the target weight on the label alone; NaN if it is no class, 0 if it is ignored.
        x: the soft-capped logit at the label, -inf where it was not loaded.
    """

    index: Any
    not_ignored: Any
    in_range: Any
    weight: Any
    x: Any


class Smoothing(NamedTuple):
    """Sums over a row with the target weights q.

    Fields:
        weight: the sum of q.
        loss: the sum of q (shift - x).
    """

    weight: Any
    loss: Any


class LossScales(NamedTuple):
    """The factors of a row's loss in the reduced loss.

    Fields:
        loss: the factor of the loss without its z-loss.
        z_loss: the factor of the z-loss.
        denominator: what the sum of the losses is divided by, if one kernel does all.
    """

    loss: Any
    z_loss: Any
    denominator: Any


class GradientTerms(NamedTuple):
    """The terms of the gradient of the logits of a row.

    Fields:
        shift: the shift of the exponentials.
        factor: the factor of exp(x - shift); 1 / total for a plain loss.
        scale: the factor of the target weights, which are subtracted.
    """

    shift: Any
    factor: Any
    scale: Any


@triton.jit
def label_weights(label, options):
    """Return `not_ignored`, `in_range` and `weight` of `Label` for each row's label."""
    dtype: tl.constexpr = options.smoothing.dtype
    targets = options.targets
    not_ignored = label != targets.ignore_index
    in_range = not_ignored & (label >= 0) & (label < targets.classes)
    weight = tl.where(in_range, 1.0 - options.smoothing, float("nan")).to(dtype)
    if targets.weight is not None:
        weight *= tl.load(targets.weight + label, mask=in_range, other=1.0).to(dtype)
    return not_ignored, in_range, tl.where(not_ignored, weight, 0.0)


@triton.jit
def load_label(index, mask, x_rows, x_column, span, BLOCK_V: tl.constexpr, options):
    """Load the labels of rows, and the logits at those that are in a span of BLOCK_V classes.

    The rows' logits start at `x_rows`, [ROWS]. Without a span all classes are in range. Rows of
    target probabilities have no label.
    """
    if options.targets.labels is None:
        zeros = tl.zeros(mask.shape, options.smoothing.dtype)
        return Label(index, mask, mask, zeros, zeros)
    else:
        targets = options.targets
        label = load_labels(targets.labels, index, mask, targets.ignore_index)
        not_ignored, in_range, weight = label_weights(label, options)
        if span is not None:
            in_range &= mask & (label // BLOCK_V == span)
        x_ptrs = x_rows + label * x_column
        x = load_capped(x_ptrs, in_range, options.softcap, options.smoothing.dtype)
        return Label(label, not_ignored, in_range, weight, x)


@triton.jit
def load_row_gradient(grad, index, mask, ACC_DTYPE: tl.constexpr):
    """Return the numbers of a gradient, `RowNumbers`, at some rows; 0 if there is no gradient."""
    if grad.ptr is None:
        return tl.zeros(index.shape, ACC_DTYPE)
    else:
        return tl.load(grad.ptr + index * grad.step, mask=mask, other=0.0).to(ACC_DTYPE)


@triton.jit
def smoothing_weights(options, at, column, mask):
    """Return the target weights q of a block of classes, 0 outside of the mask.

    They include the target probabilities of the rows `at`, if there are any.
    """
    dtype: tl.constexpr = options.smoothing.dtype
    targets = options.targets
    if targets.labels is None:
        t = targets.probabilities
        t_ptrs = t.ptr + at.batch * t.batch + at.row[:, None] * t.row + column * t.column
        probability = tl.load(t_ptrs, mask=mask, other=0.0).to(dtype)
    q = tl.where(mask, options.spread / targets.classes, 0.0).to(dtype)
    if targets.labels is None:
        q += probability * (1.0 - options.smoothing)
    if targets.weight is not None:
        q *= tl.load(targets.weight + column, mask=mask, other=0.0).to(dtype)
    return q


@triton.jit
def exact_smoothing_weight(smoothing_weight, options):
    """Return the sum of q over a row.

    Without class weights the sum of the smoothing is known exactly, and the sum of many rounded
    terms is not used.
    """
    targets = options.targets
    if options.spread is not None and targets.labels is not None and targets.weight is None:
        return smoothing_weight * 0.0 + options.spread
    else:
        return smoothing_weight


@triton.jit
def smoothing_terms(q, shift, x):
    """Return q (shift - x), and 0 where q is 0, even if x is infinite."""
    return tl.where(q == 0.0, 0.0, q * (shift - x))


@triton.jit
def smoothing_loss(options, at, x, shift, column, mask):
    """Return the target weights q of classes, and terms whose sum times a factor is their loss.

    The weights are one number where all classes have the same one.
    """
    targets = options.targets
    if targets.labels is not None and targets.weight is None:
        q = options.spread / targets.classes
        return q, q, tl.where(mask, shift - x, 0.0)
    else:
        q = smoothing_weights(options, at, column, mask)
        return q, 1.0, smoothing_terms(q, shift, x)


@triton.jit
def class_gradient(e, x, factor, scaled_q, options):
    """Return the gradient of the logits of rows that are not ignored, but for the label's weight.

    It is the softmax's part, `factor * e`, less the target weights, times the soft-cap's slope.
    """
    grad = e * factor
    if options.spread is not None:
        grad -= scaled_q
    return through_softcap(grad, x, options.softcap)


@triton.jit
def store_valid_rows(ptr, grad, mask, not_ignored):
    """Store the gradient of rows that are not ignored, and zeros in rows that are.

    Two masked stores cost less than a select for each class.
    """
    grad = grad.to(ptr.dtype.element_ty)
    tl.store(ptr, grad, mask=mask & not_ignored)
    tl.store(ptr, tl.zeros_like(grad), mask=mask & (not_ignored == 0))


@triton.jit
def store_label_gradient(d_rows, d_column, label, mask, terms, options):
    """Store the gradient of the logits at the labels in the mask, if the targets are labels.

    It replaces the value that the other classes' formula gives: comparing every class with the
    label would cost registers.
    """
    if options.targets.labels is not None:
        weight = label.weight
        if options.spread is not None:  # smoothing gives the label a part too
            weight += smoothing_weights(options, None, label.index, label.in_range)
        e = exp_for_dtype(label.x - terms.shift, options.smoothing.dtype)
        grad = e * terms.factor - terms.scale * weight
        grad = through_softcap(grad, label.x, options.softcap)
        # Another warp of the program may have stored the other value.
        tl.debug_barrier()
        d_ptr = d_rows + label.index * d_column
        tl.store(d_ptr, grad.to(d_ptr.dtype.element_ty), mask=mask)


@triton.jit
def loss_scales(losses, rows, options, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the scales of the losses.

    They come from the shares, or from the targets of all rows, if one program reads all of them in
    blocks of BLOCK labels.
    """
    ACC_DTYPE: tl.constexpr = options.smoothing.dtype
    if BLOCK and MEAN:
        if options.targets.labels is None:
            weights = tl.full([], 0.0, ACC_DTYPE) + rows
            num_rows = weights
        else:
            weights, num_rows = sum_label_weights(options.targets, rows, 0, 1, ACC_DTYPE, BLOCK)
        return LossScales(reciprocal(weights), reciprocal(num_rows), weights)
    elif MEAN:
        scale = reciprocal(sum_of_shares(losses.shares, 0, ACC_DTYPE))
        z_scale = reciprocal(sum_of_shares(losses.shares, 1, ACC_DTYPE))
        return LossScales(scale, z_scale, scale)
    else:
        one = tl.full([], 1.0, ACC_DTYPE)
        return LossScales(one, one, one)


@triton.jit
def gradient_terms(label, smoothing, shift, total, scales, options):
    """Return the terms of the gradient of the reduced loss."""
    softmax_coef = scales.loss * (label.weight + smoothing.weight)
    if options.z_loss is not None:
        softmax_coef += 2.0 * options.z_loss * (shift + log_exact(total)) * scales.z_loss
    return GradientTerms(shift, divide(softmax_coef, total), scales.loss)


@triton.jit
def row_loss(label, smoothing, shift, total, scales, options):
    """Return the loss of each row.

    The kernels call this after they store the gradient, so that both overlap.
    """
    log_total = log_exact(total)
    loss = label.weight * (log_total + (shift - label.x))
    if options.spread is not None:
        loss += smoothing.weight * log_total + smoothing.loss
    if options.z_loss is not None:
        logsumexp = shift + log_total
        loss += options.z_loss * logsumexp * logsumexp * (scales.z_loss / scales.loss)
    return tl.where(label.not_ignored, loss, 0.0)
