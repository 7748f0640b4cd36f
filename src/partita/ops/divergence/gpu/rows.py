"""Kernels of divergences: statistics of two rows, the divergence of the mixture, the gradient.

Rows may be all logits or those of a chunk of classes. "First" and "second" are teacher and student
for the forward KL, and student and teacher for the reverse one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    LN2,
    LOG2E,
    apply_softcap,
    exp,
    finite_shift,
    log_exact,
    reciprocal,
)
from ....primitives.gpu.reduce import broadcast_lanes, by_lane, lane_max, lane_sum

REVERSE, MIXTURE = tl.constexpr(1), tl.constexpr(2)


class StridedRows(NamedTuple):
    """Rows `[M, C]` with the strides `m, c`."""

    ptr: Any
    m: Any
    c: Any


class RowSplit(NamedTuple):
    """The classes of a row, the programs that share it, and the classes of each but the last."""

    classes: Any
    splits: Any
    classes_per_program: Any


class LogitRow(NamedTuple):
    """One row of logits: address, stride over classes, their number, and the soft-cap or None."""

    ptr: Any
    stride: Any
    classes: Any
    softcap: Any


class PairStatistics(NamedTuple):
    """Maximum and sum of exponentials of the student's row and of the teacher's, `[M]` or one."""

    maximum: Any
    total: Any
    teacher_maximum: Any
    teacher_total: Any


class PairState(NamedTuple):
    """The statistics of both rows: `[M]`, `[1, LANES]` of the lanes, or numbers.

    Fields:
        maximum, total: maximum and sum of exponentials of the first row.
        other_maximum, other_total: those of the second row.
        weighted: the sum of e * (first - second), e the exponentials of the first row. It is
            relative to the maxima, so that an offset of a row cancels before anything is rounded.
    """

    maximum: Any
    total: Any
    other_maximum: Any
    other_total: Any
    weighted: Any


@triton.jit
def load_classes(row, v, UNMASKED: tl.constexpr, ACC_DTYPE: tl.constexpr, VEC: tl.constexpr):
    """Load the soft-capped logits of the classes v, -inf past the last class.

    Rows are padded to VEC classes, so the mask of a load is constant over a vector.
    """
    HAS_SOFTCAP: tl.constexpr = row.softcap is not None
    pointers = row.ptr + v.to(tl.int64) * row.stride
    if UNMASKED:
        return apply_softcap(tl.load(pointers).to(ACC_DTYPE), row.softcap, HAS_SOFTCAP)
    else:
        x = tl.load(pointers, mask=v // VEC * VEC < row.classes, other=0.0).to(ACC_DTYPE)
        return tl.where(v < row.classes, apply_softcap(x, row.softcap, HAS_SOFTCAP), -float("inf"))


@triton.jit
def rescaled(state, maximum, other_maximum, log2_scale):
    """Return the sums of a state relative to other maxima, which are at least its own."""
    shift, other_shift = finite_shift(maximum), finite_shift(other_maximum)
    scale = tl.exp2((state.maximum - shift) * log2_scale).to(tl.float64)
    other_scale = tl.exp2((state.other_maximum - other_shift) * log2_scale).to(tl.float64)
    # Differences of one row are exact where those of two rows with other offsets are not.
    moved = (finite_shift(state.maximum) - shift) - (
        finite_shift(state.other_maximum) - other_shift
    )
    # An infinite sum stays, unless its probabilities vanish.
    weighted = tl.where(scale == 0.0, 0.0, scale * (state.weighted + state.total * moved))
    return state.total * scale, state.other_total * other_scale, weighted


@triton.jit
def accumulate_pair(
    state,
    start,
    x_row,
    y_row,
    log2_scale,
    UNMASKED: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one block of classes to the statistics of the lanes."""
    ACC_DTYPE: tl.constexpr = state.maximum.dtype
    LANES: tl.constexpr = state.maximum.shape[1]
    VECTOR: tl.constexpr = 1 if LANES == 1 else VEC
    v = (start + tl.arange(0, BLOCK))[None, :]
    x = load_classes(x_row, v, UNMASKED, ACC_DTYPE, VEC)
    y = load_classes(y_row, v, UNMASKED, ACC_DTYPE, VEC)
    x, y = by_lane(x, LANES, VECTOR), by_lane(y, LANES, VECTOR)
    maximum = tl.maximum(state.maximum, lane_max(x))
    other_maximum = tl.maximum(state.other_maximum, lane_max(y))
    total, other_total, weighted = rescaled(state, maximum, other_maximum, log2_scale)
    x -= broadcast_lanes(finite_shift(maximum))
    y -= broadcast_lanes(finite_shift(other_maximum))
    e = tl.exp2(x * log2_scale)
    total += lane_sum(e, False)
    other_total += lane_sum(tl.exp2(y * log2_scale), False)
    # A class of probability 0 counts as 0, even if its logits are infinite.
    weighted += lane_sum(tl.where(e == 0.0, 0.0, e * (x - y)), False)
    return PairState(maximum, total, other_maximum, other_total, weighted)


@triton.jit(do_not_specialize=["num_seen"])
def divergence_accumulate_kernel(
    first,  # StridedRows [M, C]
    second,  # StridedRows [M, C]
    kl_ptr,  # [M]
    student_ptr,  # [M]: KL(student ‖ teacher) if the student is first, otherwise 0
    state,  # PairState [M]
    classes,
    num_seen,  # the number of classes that the state has seen, which is not read if that is 0
    temperature: tl.float64,
    softcap: tl.float64,
    STUDENT_FIRST: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update the state of two rows, and KL(first ‖ second), with one read of these classes."""
    ACC_DTYPE: tl.constexpr = state.maximum.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    inverse = 1.0 / tl.full([], temperature, tl.float64)
    x_ptr, y_ptr = first.ptr + row * first.m, second.ptr + row * second.m
    cap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    x_row = LogitRow(x_ptr, first.c, classes, cap)
    y_row = LogitRow(y_ptr, second.c, classes, cap)
    log2_scale = tl.full([], LOG2E, ACC_DTYPE) / tl.full([], temperature, ACC_DTYPE)
    zero = tl.zeros([1, LANES], tl.float64)
    nothing = tl.full([1, LANES], -float("inf"), ACC_DTYPE)
    lanes = PairState(nothing, zero, nothing, zero, zero)
    unmasked_end = classes // BLOCK * BLOCK
    TAIL: tl.constexpr = BLOCK if LANES == 1 else LANES * VEC
    for start in range(0, unmasked_end, BLOCK):
        lanes = accumulate_pair(lanes, start, x_row, y_row, log2_scale, True, VEC, BLOCK)
    for start in range(unmasked_end, classes, TAIL):
        lanes = accumulate_pair(lanes, start, x_row, y_row, log2_scale, False, VEC, TAIL)
    seen = num_seen > 0
    before = PairState(
        tl.load(state.maximum + row, mask=seen, other=-float("inf")),
        tl.load(state.total + row, mask=seen, other=0.0).to(tl.float64),
        tl.load(state.other_maximum + row, mask=seen, other=-float("inf")),
        tl.load(state.other_total + row, mask=seen, other=0.0).to(tl.float64),
        tl.load(state.weighted + row, mask=seen, other=0.0).to(tl.float64),
    )
    maximum = tl.maximum(before.maximum, tl.max(lanes.maximum))
    other_maximum = tl.maximum(before.other_maximum, tl.max(lanes.other_maximum))
    total, other_total, weighted = rescaled(before, maximum, other_maximum, log2_scale)
    of_lanes = rescaled(lanes, maximum, other_maximum, log2_scale)
    total += tl.sum(of_lanes[0])
    other_total += tl.sum(of_lanes[1])
    weighted += tl.sum(of_lanes[2])
    kl = (weighted / total * inverse + tl.log(other_total / total)).to(ACC_DTYPE)
    tl.store(kl_ptr + row, kl)
    tl.store(student_ptr + row, kl if STUDENT_FIRST else tl.zeros_like(kl))
    tl.store(state.maximum + row, maximum)
    tl.store(state.total + row, total.to(ACC_DTYPE))
    tl.store(state.other_maximum + row, other_maximum)
    tl.store(state.other_total + row, other_total.to(ACC_DTYPE))
    tl.store(state.weighted + row, weighted.to(ACC_DTYPE))


@triton.jit
def load_statistics(statistics, row):
    """Load the statistics of a row of the student and of the teacher."""
    return PairStatistics(
        tl.load(statistics.maximum + row),
        tl.load(statistics.total + row),
        tl.load(statistics.teacher_maximum + row),
        tl.load(statistics.teacher_total + row),
    )


@triton.jit
def probabilities(x, maximum, total, inverse):
    """Return the softmax of logits from the statistics of their row."""
    return exp((x - finite_shift(maximum)) * inverse) * reciprocal(total)


@triton.jit
def log2_probabilities(x, maximum, total, inverse):
    """Return the base-2 logarithm of the softmax, from the statistics of the row."""
    offset = log_exact(total) * LOG2E
    return (x - finite_shift(maximum)) * (inverse * LOG2E) - offset


@triton.jit
def mixture_terms(x, t, pair, weight, inverse):
    """Return p, q, log2(p / m) and log2(q / m), where m is the mixture; 0 where p or q is 0.

    Logarithms are subtracted, because a quotient takes longer than an exponential.
    """
    log_p = log2_probabilities(x, pair.maximum, pair.total, inverse)
    log_q = log2_probabilities(t, pair.teacher_maximum, pair.teacher_total, inverse)
    p, q = tl.exp2(log_p), tl.exp2(log_q)
    log_m = tl.log2(weight * q + (1.0 - weight) * p)
    return (
        p,
        q,
        tl.where(p == 0.0, 0.0, log_p - log_m),
        tl.where(q == 0.0, 0.0, log_q - log_m),
    )


@triton.jit(do_not_specialize=["num_seen"])
def divergence_mixture_kernel(
    logits,  # StridedRows [M, C]
    teacher,  # StridedRows [M, C]
    loss_ptr,  # [M]
    student_ptr,  # [M]
    statistics,  # PairStatistics [M]
    classes,
    num_seen,  # the number of classes that the divergences have seen
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add these classes to the divergences of teacher and student from their mixture."""
    ACC_DTYPE: tl.constexpr = statistics.maximum.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x_ptr, t_ptr = logits.ptr + row * logits.m, teacher.ptr + row * teacher.m
    cap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    x_row = LogitRow(x_ptr, logits.c, classes, cap)
    t_row = LogitRow(t_ptr, teacher.c, classes, cap)
    weight = tl.full([], beta, ACC_DTYPE)
    inverse = reciprocal(tl.full([], temperature, ACC_DTYPE))
    pair = load_statistics(statistics, row)
    of_teacher, of_student = tl.zeros([BLOCK], ACC_DTYPE), tl.zeros([BLOCK], ACC_DTYPE)
    for start in range(0, classes, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = load_classes(x_row, v, False, ACC_DTYPE, VEC)
        t = load_classes(t_row, v, False, ACC_DTYPE, VEC)
        p, q, ratio, t_ratio = mixture_terms(x, t, pair, weight, inverse)
        of_student += p * ratio
        of_teacher += q * t_ratio
    seen = num_seen > 0
    loss = tl.load(loss_ptr + row, mask=seen, other=0.0)
    student = tl.load(student_ptr + row, mask=seen, other=0.0)
    student_term, teacher_term = tl.sum(of_student) * LN2, tl.sum(of_teacher) * LN2
    tl.store(loss_ptr + row, loss + weight * teacher_term + (1.0 - weight) * student_term)
    tl.store(student_ptr + row, student + student_term)


@triton.jit
def divergence_gradient_kernel(
    grad_ptr,  # [M]
    logits,  # StridedRows [M, C]
    teacher,  # StridedRows [M, C]
    student_ptr,  # [M]
    statistics,  # PairStatistics [M]
    dlogits,  # StridedRows [M, C] of adjacent classes; may be the logits
    classes,
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a block of the gradient of the student's logits with two reads and one write."""
    ACC_DTYPE: tl.constexpr = statistics.maximum.dtype.element_ty
    blocks = tl.cdiv(classes, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    v = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    x_ptr, t_ptr = logits.ptr + row * logits.m, teacher.ptr + row * teacher.m
    cap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    x_row = LogitRow(x_ptr, logits.c, classes, cap)
    t_row = LogitRow(t_ptr, teacher.c, classes, cap)
    weight = tl.full([], beta, ACC_DTYPE)
    inverse = reciprocal(tl.full([], temperature, ACC_DTYPE))
    x = load_classes(x_row, v, False, ACC_DTYPE, VEC)
    t = load_classes(t_row, v, False, ACC_DTYPE, VEC)
    pair = load_statistics(statistics, row)
    if KIND == MIXTURE:
        p, _, ratio, _ = mixture_terms(x, t, pair, weight, inverse)
        terms = (1.0 - weight) * p * (ratio * LN2 - tl.load(student_ptr + row))
    elif KIND == REVERSE:
        apart = (x - finite_shift(pair.maximum)) - (t - finite_shift(pair.teacher_maximum))
        ratio = apart * inverse - (log_exact(pair.total) - log_exact(pair.teacher_total))
        p = probabilities(x, pair.maximum, pair.total, inverse)
        terms = tl.where(p == 0.0, 0.0, p * (ratio - tl.load(student_ptr + row)))
    else:
        p = probabilities(x, pair.maximum, pair.total, inverse)
        terms = p - probabilities(t, pair.teacher_maximum, pair.teacher_total, inverse)
    on_row = tl.load(grad_ptr + row).to(ACC_DTYPE) * inverse
    result = on_row * terms
    if HAS_SOFTCAP:
        result *= (1.0 - x / cap) * (1.0 + x / cap)
    # The padding of a row becomes 0, which products on some devices read.
    result = tl.where(on_row == 0.0, 0.0, tl.where(v < classes, result, 0.0))
    pointers = dlogits.ptr + row * dlogits.m + v
    tl.store(pointers, result.to(dlogits.ptr.dtype.element_ty), mask=v // VEC * VEC < classes)
