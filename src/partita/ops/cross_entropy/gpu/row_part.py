"""The logits of a part of a row that a program has in registers, and their gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import capped_logits, exp, exp_for_dtype, finite_shift
from ....primitives.gpu.memory import opaque
from ....primitives.gpu.reduce import load_capped
from ....primitives.gpu.row_part import edge_of_part, part_ptr, part_sum, store_part
from .row_math import Smoothing, class_gradient, smoothing_loss, store_valid_rows


class PartLogits(NamedTuple):
    """The logits of a part in registers, and their statistics.

    Fields:
        part: which classes they are, `RowPart`.
        zero: 0.0, which the compiler does not know.
        logits: the logits as loaded, [., PARTIALS].
        x: the soft-capped logits, [., PARTIALS].
        e: exp(x - shift), [., PARTIALS].
        maximum: the maximum of x over the part.
        shift: the maximum, or 0 if that is -inf.
        total: the sum of exp(x - shift) over the part.
    """

    part: Any
    zero: Any
    logits: Any
    x: Any
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
def part_logits(
    logits,
    part,
    options,
    zero,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
):
    """Return the statistics of a part whose logits were loaded, its target weights and their sums.

    `dtype` is that of the gradient. The sums with the target weights come before the exponentials,
    and before the program waits for others: then the logits need no registers beside the
    exponentials.
    """
    softcap = options.softcap
    x = capped_logits(logits, part.mask, softcap, tl.float32)
    maximum = tl.max(x)
    q, sums = x, Smoothing(0.0, 0.0)
    if options.spread is not None:
        if HALF:
            x = capped_logits(opaque(logits, zero), part.mask, softcap, tl.float32)
        start = part.start - part.begin
        q, factor, terms = smoothing_loss(
            options, None, x, finite_shift(maximum), start + part.column, part.mask
        )
        if options.targets.weight is None:
            weight = q * (part.end - part.begin)
        else:
            weight = part_sum(q)
        sums = Smoothing(weight, factor * part_sum(terms))
    if HALF:
        logits = opaque(logits, zero)
        x = capped_logits(logits, part.mask, softcap, tl.float32)
    shift = finite_shift(maximum)
    e = exp_for_dtype(x - shift, dtype)
    total = part_sum(e, 1)
    loaded = PartLogits(part, zero, logits, x, e, maximum, shift, total)
    return loaded, q, sums


@triton.jit
def store_part_gradient(
    dlogits,
    logits,
    loaded,
    q,
    label,
    terms,
    options,
    HALF: tl.constexpr,
    STREAM: tl.constexpr,
    VEC: tl.constexpr,
):
    """Store the gradient of a part of a row, given its target weights q.

    The logits at its edges are read here, so they need no registers before. They may be replaced.
    """
    part, shift = loaded.part, terms.shift
    dtype: tl.constexpr = dlogits.ptr.dtype.element_ty
    if VEC > 1:
        edge, at_edge = edge_of_part(part, VEC)  # [2 * VEC]
        x_ptrs = part_ptr(logits, part, VEC) + edge
        edge_x = load_capped(x_ptrs, at_edge, options.softcap, tl.float32)
    if HALF:
        packed = opaque(loaded.logits, loaded.zero)
        x = capped_logits(packed, part.mask, options.softcap, tl.float32)
        e, part_factor = exp(x - shift), terms.factor
    else:
        x, e = loaded.x, loaded.e
        part_factor = terms.factor * exp_for_dtype(loaded.shift - shift, dtype)
    grad = class_gradient(e, x, part_factor, terms.scale * q, options)
    # One branch for the row costs less than a select for each class. Each side computes the
    # addresses, which would spill a register before the branch.
    if label.not_ignored:
        store_part(dlogits, part, grad, STREAM, VEC)
    else:
        store_part(dlogits, part, tl.zeros_like(grad), STREAM, VEC)
    if VEC > 1:
        e = exp_for_dtype(edge_x - shift, dtype)
        edge_q = e
        if options.spread is not None:
            column = part.start - part.begin + edge
            edge_q, _, _ = smoothing_loss(options, None, edge_x, shift, column, at_edge)
        grad = class_gradient(e, edge_x, terms.factor, terms.scale * edge_q, options)
        edge_ptrs = part_ptr(dlogits, part, VEC) + edge
        store_valid_rows(edge_ptrs, grad, at_edge, label.not_ignored, False)
