"""The part of a row that a program has in registers, from its load to its gradient.

The programs of a row have a block of its aligned vectors each. The classes around the vectors are
the edges of the row, which the first program has.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import capped_logits, exp, exp_for_dtype, finite_shift, sum_for_dtype
from ....primitives.gpu.memory import (
    aligned_start,
    edge_columns,
    load_streaming,
    opaque,
    row_span,
    store_streaming,
)
from .row_math import (
    Smoothing,
    class_gradient,
    smoothing_terms,
    smoothing_weights,
    store_valid_rows,
)


class RowPart(NamedTuple):
    """The classes of a row that a program reads.

    Fields:
        split: the index of the program among those that share the row.
        head: the number of classes before the aligned vectors.
        body: the number of classes in the aligned vectors.
        column: the classes of the block, counted from `head`, [BLOCK_V].
        mask: which of them are in the aligned vectors, [BLOCK_V].
    """

    split: Any
    head: Any
    body: Any
    column: Any
    mask: Any


class PartLogits(NamedTuple):
    """The logits of a part in registers, and their statistics.

    Fields:
        part: which classes they are.
        zero: 0.0, which the compiler does not know.
        logits: the logits as loaded, [BLOCK_V].
        x: the soft-capped logits, [BLOCK_V].
        e: exp(x - shift), [BLOCK_V].
        maximum: the maximum of x over the part.
        shift: the maximum, or 0 if that is -inf.
        total: the sum of exp(x - shift) over the part.
        edge: the classes of the edges, [2 * VEC].
        at_edge: which of them this program has, [2 * VEC].
        edge_x: the soft-capped logits of the edges, [2 * VEC].
    """

    part: Any
    zero: Any
    logits: Any
    x: Any
    e: Any
    maximum: Any
    shift: Any
    total: Any
    edge: Any
    at_edge: Any
    edge_x: Any


class PartWeights(NamedTuple):
    """The target weights q of a part. They are one number where all classes have the same weight.

    Fields:
        q: those of the block, [BLOCK_V].
        edge_q: those of the edges, [2 * VEC].
    """

    q: Any
    edge_q: Any


@triton.jit
def locate_part(split, start, classes, VEC: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the part of program `split` of a row that starts `start` elements into the logits."""
    head, body = row_span(start, classes, VEC)
    column = split * BLOCK_V + tl.arange(0, BLOCK_V)  # [BLOCK_V]
    return RowPart(split, head, body, column, column // VEC * VEC < body)


@triton.jit
def load_part(logits_ptr, start, part, STREAM: tl.constexpr, VEC: tl.constexpr):
    """Load the aligned vectors of a part of a row that starts `start` elements into the logits."""
    ptrs = logits_ptr + aligned_start(start, VEC) + part.column
    return load_streaming(ptrs, part.mask, -float("inf"), STREAM)


@triton.jit
def has_class(part, column, valid, BLOCK_V: tl.constexpr):
    """Return whether a class belongs to this program; invalid ones belong to the first program."""
    in_body = valid & (column >= part.head) & (column < part.head + part.body)
    return tl.where(in_body, (column - part.head) // BLOCK_V, 0) == part.split


@triton.jit
def smooth_part(x, shift, part, edge, at_edge, edge_x, options, VEC: tl.constexpr):
    """Return the target weights q of a part, and their sums relative to its shift."""
    targets = options.targets
    if targets.weight is None:
        q = options.spread / targets.classes
        edge_q = q
        first = part.split * x.shape[0]
        weight = q * tl.minimum(tl.maximum(part.body - first, 0), x.shape[0])
        loss = q * tl.sum(tl.where(part.mask, shift - x, 0.0), axis=0)
    else:
        q = smoothing_weights(options, None, part.head + part.column, part.mask)
        edge_q = smoothing_weights(options, None, edge, at_edge)
        weight = tl.sum(q, axis=0)
        loss = tl.sum(smoothing_terms(q, shift, x), axis=0)
    if VEC > 1:
        weight += tl.sum(tl.where(at_edge, edge_q, 0.0), axis=0)
        loss += tl.sum(tl.where(at_edge, smoothing_terms(edge_q, shift, edge_x), 0.0), axis=0)
    return PartWeights(q, edge_q), Smoothing(weight, loss)


@triton.jit
def part_logits(
    logits,
    row_ptr,
    part,
    classes,
    options,
    zero,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
    VEC: tl.constexpr,
):
    """Return the statistics of a part whose logits were loaded, and of its target weights.

    `row_ptr` is the address of the row, `classes` its length, and `dtype` that of the gradient. The
    sums with the target weights come before the exponentials, and before the program waits for
    others: then the logits need no registers beside the exponentials.
    """
    softcap = options.softcap
    x = capped_logits(logits, part.mask, softcap, tl.float32)
    maximum = tl.max(x, axis=0)
    edge, at_edge, edge_x = 0, False, 0.0
    if VEC > 1:
        edge, at_edge = edge_columns(part.head, part.body, classes, VEC, 2 * VEC)  # [2 * VEC]
        at_edge &= part.split == 0
        edge_logits = tl.load(row_ptr + edge, mask=at_edge, other=-float("inf"))
        edge_x = capped_logits(edge_logits, at_edge, softcap, tl.float32)
        maximum = tl.maximum(maximum, tl.max(edge_x, axis=0))
    weights, sums = PartWeights(x, 0.0), Smoothing(0.0, 0.0)
    if options.spread is not None:
        if HALF:
            x = capped_logits(opaque(logits, zero), part.mask, softcap, tl.float32)
        shift = finite_shift(maximum)
        weights, sums = smooth_part(x, shift, part, edge, at_edge, edge_x, options, VEC)
    if HALF:
        logits = opaque(logits, zero)
        x = capped_logits(logits, part.mask, softcap, tl.float32)
    shift = finite_shift(maximum)
    e = exp_for_dtype(x - shift, dtype)
    total = sum_for_dtype(e, 0, dtype)
    if VEC > 1:
        total += tl.sum(exp(edge_x - shift), axis=0)
    loaded = PartLogits(part, zero, logits, x, e, maximum, shift, total, edge, at_edge, edge_x)
    return loaded, weights, sums


@triton.jit
def store_part_gradient(
    dlogits_ptr,
    start,
    loaded,
    weights,
    label,
    terms,
    options,
    HALF: tl.constexpr,
    STREAM: tl.constexpr,
    VEC: tl.constexpr,
):
    """Store the gradient of a part of a row that starts `start` elements into the gradient."""
    part, shift = loaded.part, terms.shift
    dtype: tl.constexpr = dlogits_ptr.dtype.element_ty
    if HALF:
        logits = opaque(loaded.logits, loaded.zero)
        x = capped_logits(logits, part.mask, options.softcap, tl.float32)
        e, part_factor = exp(x - shift), terms.factor
    else:
        x, e = loaded.x, loaded.e
        part_factor = terms.factor * exp_for_dtype(loaded.shift - shift, dtype)
    grad = class_gradient(e, x, part_factor, terms.scale * weights.q, options)
    # One branch for the row costs less than a select for each class. Each side computes the
    # addresses, which would spill a register before the branch.
    if label.not_ignored:
        d_ptrs = dlogits_ptr + aligned_start(start, VEC) + part.column
        store_streaming(d_ptrs, grad, part.mask, STREAM)
    else:
        d_ptrs = dlogits_ptr + aligned_start(start, VEC) + part.column
        store_streaming(d_ptrs, tl.zeros_like(grad), part.mask, STREAM)
    if VEC > 1:
        e = exp_for_dtype(loaded.edge_x - shift, dtype)
        edge_q = terms.scale * weights.edge_q
        grad = class_gradient(e, loaded.edge_x, terms.factor, edge_q, options)
        edge_ptrs = dlogits_ptr + start + loaded.edge
        store_valid_rows(edge_ptrs, grad, loaded.at_edge, label.not_ignored, False)
