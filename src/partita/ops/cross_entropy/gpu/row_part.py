"""The logits of a part of a row that a program has in registers, and their gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, exp_for_dtype, finite_shift
from ....primitives.gpu.row_part import in_fp32, part_maximum, part_sum, renewed, store_slice
from .row_math import Smoothing, class_gradient, smoothing_loss


class PartLogits(NamedTuple):
    """The logits of a part in registers, and their statistics.

    Fields:
        logits: the logits as loaded, slices.
        e: exp(x - shift) of the soft-capped logits x, slices.
        maximum: the maximum of x over the part.
        shift: the maximum, or 0 if that is -inf.
        total: the sum of exp(x - shift) over the part.
    """

    logits: Any
    e: Any
    maximum: Any
    shift: Any
    total: Any


@triton.jit
def has_class(part, label, valid, size):
    """Return whether a class belongs to this program; invalid ones belong to the first program."""
    label = tl.where(valid, label, 0)  # A division by the size would spill registers.
    return (label >= part.start) & (label < part.start + size)


@triton.jit
def class_of(part, i: tl.constexpr):
    """Return the classes of the columns of a slice."""
    return part.start - part.begin + i * part.lane.shape[0] + part.lane


@triton.jit
def part_logits(
    logits,
    part,
    options,
    zero,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
    VEC: tl.constexpr,
):
    """Return the statistics of a part whose logits were loaded, and the sums of target weights.

    `dtype` is that of the gradient. The sums with the target weights come before the exponentials,
    and before the program waits for others: then the logits need no registers beside the
    exponentials.
    """
    softcap = options.softcap
    x = in_fp32(logits, part, softcap)
    maximum = part_maximum(x)
    shift = finite_shift(maximum)
    sums = Smoothing(0.0, 0.0)
    if options.spread is not None:
        logits = renewed(logits, zero, HALF)
        x, weights, losses = in_fp32(logits, part, softcap), (), ()
        for i in tl.static_range(len(x)):
            q, factor, loss = smoothing_loss(
                options, None, x[i], shift, class_of(part, i), part.masks[i]
            )
            weights, losses = weights + (q,), losses + (loss,)
        if options.targets.weight is None:
            weight = q * (part.end - part.begin)
        else:
            weight = part_sum(weights, None, part, VEC)
        sums = Smoothing(weight, factor * part_sum(losses, None, part, VEC))
    logits = renewed(logits, zero, HALF)
    x, e = in_fp32(logits, part, softcap), ()
    for i in tl.static_range(len(x)):
        e += (exp_for_dtype(x[i] - shift, dtype),)
    total = part_sum(e, None, part, VEC)
    return PartLogits(logits, e, maximum, shift, total), sums


@triton.jit
def store_part_gradient(
    dlogits,
    part,
    loaded,
    label,
    terms,
    options,
    zero,
    HALF: tl.constexpr,
    STREAM: tl.constexpr,
    VEC: tl.constexpr,
):
    """Store the gradient of a part of a row."""
    shift, factor = terms.shift, terms.factor
    if not HALF:
        factor *= exp_for_dtype(loaded.shift - shift, dlogits.ptr.dtype.element_ty)
    x = in_fp32(renewed(loaded.logits, zero, HALF), part, options.softcap)
    # One branch for the row costs less than a select for each class. Each side computes the
    # addresses, which would spill a register before the branch.
    if label.not_ignored:
        for i in tl.static_range(len(x)):
            e = exp(x[i] - shift) if HALF else loaded.e[i]
            q = e
            if options.spread is not None:
                column, mask = class_of(part, i), part.masks[i]
                q, _, _ = smoothing_loss(options, None, x[i], shift, column, mask)
            grad = class_gradient(e, x[i], factor, terms.scale * q, options)
            store_slice(dlogits, part, i, grad, STREAM, VEC)
    else:
        for i in tl.static_range(len(x)):
            store_slice(dlogits, part, i, tl.zeros_like(x[i]), STREAM, VEC)
