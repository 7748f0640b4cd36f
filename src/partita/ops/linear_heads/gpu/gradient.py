"""The kernel that computes the gradient of a chunk of logits."""

from __future__ import annotations

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, apply_softcap, finite_shift, log_exact, reciprocal


@triton.jit(do_not_specialize=["classes", "first"])
def linear_gradient_kernel(
    logits,  # StridedRows [rows, classes] of adjacent classes, from the class `first` on
    target_ptr,  # [rows]
    weight_ptr,  # [classes] or None
    coefficients,  # GradientCoefficients [rows]
    maximum_ptr,  # [rows]
    sumexp_ptr,  # [rows]
    result,  # StridedRows [rows, classes], which may be the logits
    classes,
    first,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the gradient of one block of a row from the coefficients of the row."""
    ACC_DTYPE: tl.constexpr = maximum_ptr.dtype.element_ty
    softcap = tl.full([], softcap, ACC_DTYPE)
    log2_scale = tl.full([], LOG2E, ACC_DTYPE) / tl.full([], temperature, ACC_DTYPE)
    blocks = tl.cdiv(classes, BLOCK_V)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    v = tl.program_id(0) % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = v // VEC * VEC < classes
    x = tl.load(logits.ptr + row * logits.m + v, mask=inside, other=0.0).to(ACC_DTYPE)
    x = apply_softcap(x, softcap, HAS_SOFTCAP)
    label = tl.load(target_ptr + row).to(tl.int64) - first
    dlogits_coef = tl.load(coefficients.dlogits_coef + row)
    label_coef = tl.load(coefficients.label_coef + row)
    sumexp = tl.load(sumexp_ptr + row)
    exponent = (x - finite_shift(tl.load(maximum_ptr + row))) * log2_scale
    p = tl.exp2(exponent) * reciprocal(sumexp)
    grad = dlogits_coef * p
    active = tl.abs(dlogits_coef) + tl.abs(label_coef)  # 0 if all coefficients are
    if coefficients.log_coef is not None:
        log_coef = tl.load(coefficients.log_coef + row)
        # The bound keeps the logarithm finite, so that p log p is 0 where p is.
        grad += log_coef * p * (LN2 * tl.maximum(exponent, -10000.0) - log_exact(sumexp))
        active += tl.abs(log_coef)
    if coefficients.smoothing_coef is not None:
        smoothing_coef = tl.load(coefficients.smoothing_coef + row)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + v, mask=v < classes, other=0.0).to(ACC_DTYPE)
            grad += smoothing_coef * weight
        else:
            grad += smoothing_coef
        active += tl.abs(smoothing_coef)
    grad += tl.where(v == label, label_coef, 0.0)
    if HAS_SOFTCAP:
        grad *= 1.0 - (x / softcap) * (x / softcap)
    pointers = result.ptr + row * result.m + v
    grad = tl.where(active == 0.0, 0.0, grad)
    tl.store(pointers, grad.to(result.ptr.dtype.element_ty), mask=inside)
