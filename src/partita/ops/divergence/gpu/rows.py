"""Kernels of divergences: statistics of two rows, the divergence of the mixture, the gradient.

"First" and "second" are teacher and student for the forward KL, and student and teacher for the
reverse one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import divide, exp, finite_shift, log_exact, reciprocal
from ...cross_entropy.gpu.token_stats import load_capped

FORWARD, REVERSE, MIXTURE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def divergence_statistics_kernel(
    first_ptr,  # [M, C]
    second_ptr,  # [M, C]
    kl_ptr,  # [M]
    student_ptr,  # [M]: KL(student ‖ teacher) if the student is first, otherwise 0
    first_maximum_ptr,  # [M]
    first_sumexp_ptr,  # [M]
    second_maximum_ptr,  # [M]
    second_sumexp_ptr,  # [M]
    classes,
    first_row,  # strides
    first_class,
    second_row,
    second_class,
    temperature: tl.float64,
    softcap: tl.float64,
    STUDENT_FIRST: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute maximum and sum of two rows, and KL(first ‖ second), with one read.

    The sum of e * (first - second), e the exponentials of the first row, is carried relative to the
    maxima, so that an offset of a row cancels before anything is rounded.
    """
    row = tl.program_id(0).to(tl.int64)
    cap = tl.full([], softcap, ACC_DTYPE)
    inverse = reciprocal(tl.full([], temperature, ACC_DTYPE))
    maximum = tl.full([], -float("inf"), ACC_DTYPE)
    other_maximum = tl.full([], -float("inf"), ACC_DTYPE)
    total, other_total, weighted = tl.zeros_like(cap), tl.zeros_like(cap), tl.zeros_like(cap)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = column < classes
        at = row * first_row + column * first_class
        x = load_capped(first_ptr + at, mask, cap, HAS_SOFTCAP, ACC_DTYPE)
        at = row * second_row + column * second_class
        y = load_capped(second_ptr + at, mask, cap, HAS_SOFTCAP, ACC_DTYPE)
        new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
        new_other = tl.maximum(other_maximum, tl.max(y, axis=0))
        new_shift, new_other_shift = finite_shift(new_maximum), finite_shift(new_other)
        # A sum without terms must not be scaled by the infinity of a negative maximum.
        shift = tl.where(maximum == -float("inf"), new_shift, maximum)
        other_shift = tl.where(other_maximum == -float("inf"), new_other_shift, other_maximum)
        maximum, other_maximum = new_maximum, new_other
        scale = exp((shift - new_shift) * inverse)
        e = exp((x - new_shift) * inverse)
        apart = (x - new_shift) - (y - new_other_shift)
        moved = (shift - other_shift) - (new_shift - new_other_shift)
        weighted = scale * (weighted + total * moved) + tl.sum(tl.where(e == 0.0, 0.0, e * apart))
        total = scale * total + tl.sum(e)
        other_total = other_total * exp((other_shift - new_other_shift) * inverse)
        other_total += tl.sum(exp((y - new_other_shift) * inverse))
    kl = divide(weighted, total) * inverse - log_exact(total) + log_exact(other_total)
    tl.store(kl_ptr + row, kl)
    tl.store(student_ptr + row, kl if STUDENT_FIRST else tl.zeros_like(kl))
    tl.store(first_maximum_ptr + row, maximum)
    tl.store(first_sumexp_ptr + row, total)
    tl.store(second_maximum_ptr + row, other_maximum)
    tl.store(second_sumexp_ptr + row, other_total)


@triton.jit
def probabilities(x, maximum, total, inverse):
    """Return the softmax of logits from the statistics of their row."""
    return exp((x - finite_shift(maximum)) * inverse) * reciprocal(total)


@triton.jit
def log_of_ratio(p, mixture):
    """Return log(p / mixture), and 0 where p is 0."""
    return tl.where(p == 0.0, 0.0, tl.log(p / tl.where(p == 0.0, 1.0, mixture)))


@triton.jit
def divergence_mixture_kernel(
    logits_ptr,  # [M, C]
    teacher_ptr,  # [M, C]
    maximum_ptr,  # [M]
    sumexp_ptr,  # [M]
    teacher_maximum_ptr,  # [M]
    teacher_sumexp_ptr,  # [M]
    loss_ptr,  # [M]
    student_ptr,  # [M]
    classes,
    logits_row,  # strides
    logits_class,
    teacher_row,
    teacher_class,
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the divergences of teacher and student from their mixture with a second read."""
    row = tl.program_id(0).to(tl.int64)
    cap, weight = tl.full([], softcap, ACC_DTYPE), tl.full([], beta, ACC_DTYPE)
    inverse = reciprocal(tl.full([], temperature, ACC_DTYPE))
    maximum, total = tl.load(maximum_ptr + row), tl.load(sumexp_ptr + row)
    other_maximum = tl.load(teacher_maximum_ptr + row)
    other_total = tl.load(teacher_sumexp_ptr + row)
    teacher, student = tl.zeros_like(cap), tl.zeros_like(cap)
    for start in range(0, classes, BLOCK):
        column = start + tl.arange(0, BLOCK).to(tl.int64)
        mask = column < classes
        at = row * logits_row + column * logits_class
        x = load_capped(logits_ptr + at, mask, cap, HAS_SOFTCAP, ACC_DTYPE)
        at = row * teacher_row + column * teacher_class
        t = load_capped(teacher_ptr + at, mask, cap, HAS_SOFTCAP, ACC_DTYPE)
        p = probabilities(x, maximum, total, inverse)
        q = probabilities(t, other_maximum, other_total, inverse)
        mixture = weight * q + (1.0 - weight) * p
        student += tl.sum(p * log_of_ratio(p, mixture))
        teacher += tl.sum(q * log_of_ratio(q, mixture))
    tl.store(loss_ptr + row, weight * teacher + (1.0 - weight) * student)
    tl.store(student_ptr + row, student)


@triton.jit
def divergence_gradient_kernel(
    grad_ptr,  # [M]
    logits_ptr,  # [M, C]
    teacher_ptr,  # [M, C]
    student_ptr,  # [M]
    maximum_ptr,  # [M]
    sumexp_ptr,  # [M]
    teacher_maximum_ptr,  # [M]
    teacher_sumexp_ptr,  # [M]
    dlogits_ptr,  # [M, C], contiguous
    classes,
    logits_row,  # strides
    logits_class,
    teacher_row,
    teacher_class,
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a block of the gradient of the student's logits with two reads and one write."""
    blocks = tl.cdiv(classes, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < classes
    cap, weight = tl.full([], softcap, ACC_DTYPE), tl.full([], beta, ACC_DTYPE)
    inverse = reciprocal(tl.full([], temperature, ACC_DTYPE))
    at = row * logits_row + column * logits_class
    x = load_capped(logits_ptr + at, mask, cap, HAS_SOFTCAP, ACC_DTYPE)
    at = row * teacher_row + column * teacher_class
    t = load_capped(teacher_ptr + at, mask, cap, HAS_SOFTCAP, ACC_DTYPE)
    maximum, total = tl.load(maximum_ptr + row), tl.load(sumexp_ptr + row)
    other_maximum = tl.load(teacher_maximum_ptr + row)
    other_total = tl.load(teacher_sumexp_ptr + row)
    p = probabilities(x, maximum, total, inverse)
    if KIND == REVERSE:
        apart = (x - finite_shift(maximum)) - (t - finite_shift(other_maximum))
        ratio = apart * inverse - (log_exact(total) - log_exact(other_total))
        terms = tl.where(p == 0.0, 0.0, p * (ratio - tl.load(student_ptr + row)))
    else:
        q = probabilities(t, other_maximum, other_total, inverse)
        if KIND == FORWARD:
            terms = p - q
        else:
            ratio = log_of_ratio(p, weight * q + (1.0 - weight) * p)
            terms = (1.0 - weight) * p * (ratio - tl.load(student_ptr + row))
    on_row = tl.load(grad_ptr + row).to(ACC_DTYPE) * inverse
    result = on_row * terms
    if HAS_SOFTCAP:
        result *= (1.0 - x / cap) * (1.0 + x / cap)
    result = tl.where(on_row == 0.0, 0.0, result)
    tl.store(
        dlogits_ptr + row * classes + column, result.to(dlogits_ptr.dtype.element_ty), mask=mask
    )
