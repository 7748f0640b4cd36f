"""CTC's gradient for few classes, from the posteriors that the scan stored.

The gradient of a logit is the softmax minus the posterior of its class; the gradient of a
log-probability is minus the posterior. With a star, the softmax is multiplied by the posterior of
all classes but the star, which depends on no logit. The posteriors of a step carry a common factor,
so each step divides by their sum. There are two kernels:

- `ctc_lane_gradient_kernel`: one warp, a class in each lane, up to 64 classes. It sums posteriors
  by class, in the order that the scan has stored.
- `ctc_label_gradient_kernel` in `label_gradient.py`: posteriors by label, any number of classes.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import exp_for_dtype, finite_shift
from .lanes import prefix_sums, range_sum
from .lattice import load_lengths

GRADIENT_SIZES = [
    "T",
    "N",
    "C",
    "M",
    "max_target_len",
    "num_chunks",
    "blank",
    "stride_t",
    "stride_n",
    "stride_grad",
    "star",
]


class LogitTensors(NamedTuple):
    """The logits and their gradient.

    Fields:
        ptr: `[T, N, C]` logits.
        stride_c: the stride of the logits over the classes.
        grad_ptr: `[T, N, C]`, the gradient, contiguous.
    """

    ptr: tl.tensor
    stride_c: tl.tensor
    grad_ptr: tl.tensor


@triton.jit
def load_status(saved, n, t, length, ACC_DTYPE: tl.constexpr):
    """Return which steps of a sequence have posteriors, and a term that is NaN or 0 for each step.

    All steps of an invalid sequence are NaN; if log Z is NaN, those within the length are.
    """
    logz = tl.load(saved.logz + n)
    nan_mask = tl.where(
        tl.load(saved.flags + n) >= 2,
        float("nan"),
        tl.where(t < length, tl.where(logz != logz, float("nan"), 0.0), 0.0),
    )
    return t < tl.where(logz > -float("inf"), length, 0), nan_mask.to(ACC_DTYPE)


@triton.jit
def load_loss_gradient(ptr, target_len, N, MEAN: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Load the gradient of a sequence's loss, given that of the loss or of the MEAN."""
    grad = tl.load(ptr).to(ACC_DTYPE)
    if MEAN:
        grad /= (tl.maximum(target_len, 1) * N).to(ACC_DTYPE)
    return grad


@triton.jit
def without_star(scale, star_total, total):
    """Return the factor of the softmax of a step that has the star's posterior in its total."""
    return scale * tl.where(total > 0.0, (total - star_total) / total, 1.0)


@triton.jit
def load_normalizer(saved, row, mask, grad, ACC_DTYPE: tl.constexpr):
    """Return the maximum of each row, and the gradient over the sum of exponentials."""
    if saved.maxima is None:
        return tl.zeros(row.shape, ACC_DTYPE), tl.zeros(row.shape, ACC_DTYPE)
    else:
        maximum = finite_shift(tl.load(saved.maxima + row, mask=mask, other=0.0))
        sum_exp = tl.load(saved.sums + row, mask=mask, other=1.0)
        return maximum, tl.where(mask, grad / sum_exp, 0.0)


@triton.jit
def scaled_softmax(ptr, mask, maximum, scale, ACC_DTYPE: tl.constexpr):
    """Load logits and return exp(x - maximum) · scale."""
    x = tl.load(ptr, mask=mask, other=-float("inf")).to(ACC_DTYPE)
    return exp_for_dtype(x - maximum, ACC_DTYPE) * scale


@triton.jit
def store_gradient(values, steps, row, v, inputs, outputs, sizes, star, ACC_DTYPE: tl.constexpr):
    """Store the gradient of the classes v, `[32]`, at one of the steps of a program.

    `values` are the posteriors of these classes, those of all labels and, for a star, those of its
    group; `steps` has a step in each lane. The step is `row`, a tensor `[32]`, so that Triton
    translates this function once, not for each unrolled step.
    """
    posterior, label_total, star_sum = values
    blanks, nan_mask, maximum, scale, grad = steps
    dlogits_ptr, row_stride = outputs
    C, blank, num_rows, rows_left = sizes
    row_blank = tl.gather(blanks, row, 0)
    total = label_total + row_blank
    posterior += tl.where(v == blank, row_blank, 0.0)
    value = tl.gather(nan_mask, row, 0) - posterior * tl.where(total > 0.0, grad / total, 0.0)
    if len(inputs) > 0:
        shift, factor = tl.gather(maximum, row, 0), tl.gather(scale, row, 0)
        if star is not None:
            factor = without_star(factor, tl.gather(star_sum, row * 0 + C % 32, 0), total)
        logits_ptr, stride_t, stride_c = inputs
        ptrs = logits_ptr + row.to(tl.int64) * stride_t + v.to(tl.int64) * stride_c
        mask = (v < C) & (row < num_rows)
        value += scaled_softmax(ptrs, mask, shift, factor, ACC_DTYPE)
    tl.store(
        dlogits_ptr + row * row_stride + v,
        value.to(dlogits_ptr.dtype.element_ty),
        mask=(v < C) & (row < rows_left),
    )


@triton.jit(do_not_specialize=GRADIENT_SIZES)
def ctc_lane_gradient_kernel(
    grad_output_ptr,  # [N], or the gradient of their sum or mean []
    logits,  # LogitTensors
    targets,  # TargetTensors
    saved,  # SavedScan
    posteriors,  # ScanMemory without counter and carries
    T,
    N,
    C,
    M,
    max_target_len,
    num_chunks,
    blank,
    stride_t,
    stride_n,
    stride_grad,
    star,  # the label that is the star, or None
    MEAN: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,  # groups of 32 classes, with the star after them
):
    """Compute the gradient of some steps with a class in each lane."""
    ACC_DTYPE: tl.constexpr = posteriors.labels.dtype.element_ty
    n, first = (tl.program_id(0) % N).to(tl.int64), (tl.program_id(0) // N).to(tl.int64) * ROWS
    lane, t = tl.arange(0, 32), first + tl.arange(0, 32)
    length, target_len = load_lengths(targets, n, T, max_target_len, M)[:2]
    mask, nan_mask = load_status(saved, n, t, length, ACC_DTYPE)
    grad = load_loss_gradient(grad_output_ptr + n * stride_grad, target_len, N, MEAN, ACC_DTYPE)
    num_rows = tl.sum((mask & (lane < ROWS)).to(tl.int32), axis=0)
    first_row = n * num_chunks * T + first
    labels_ptr, blanks_ptr = posteriors.labels + first_row * 32, posteriors.blanks + first_row
    own_chunks, T64 = target_len // 32 + 1, T.to(tl.int64)
    order_ptr = posteriors.order + n * num_chunks * ((1 + 2 * GROUPS) * 32) + lane
    sums, totals, blanks = (), (), lane.to(ACC_DTYPE) * 0.0
    for _ in tl.static_range(ROWS * GROUPS):
        sums = sums + (lane.to(ACC_DTYPE) * 0.0,)
    for _ in tl.static_range(ROWS):
        totals = totals + (lane.to(ACC_DTYPE) * 0.0,)
    for _ in range(own_chunks):
        row, new_sums, new_totals = lane * 0, (), ()
        order, ordered, bounds = tl.load(order_ptr), (), ()
        ptrs = labels_ptr + order
        for _ in tl.static_range(ROWS):
            ordered = ordered + (tl.load(ptrs + row * 32, mask=row < num_rows, other=0.0),)
            row += 1
        for g in tl.static_range(GROUPS):
            begin_ptr = order_ptr + (1 + 2 * g) * 32
            bounds = bounds + ((tl.load(begin_ptr), tl.load(begin_ptr + 32)),)
        running = prefix_sums(ordered, lane)
        for u in tl.static_range(ROWS):
            new_totals = new_totals + (totals[u] + tl.gather(running[u], lane * 0 + 31, 0),)
            for g in tl.static_range(GROUPS):
                class_sum = range_sum(running[u], bounds[g][0], bounds[g][1])
                new_sums = new_sums + (sums[u * GROUPS + g] + class_sum,)
        sums, totals = new_sums, new_totals
        order_ptr += (1 + 2 * GROUPS) * 32
        blanks += tl.load(blanks_ptr + lane, mask=(lane < ROWS) & (lane < num_rows), other=0.0)
        labels_ptr += T64 * 32
        blanks_ptr += T64
    maximum, scale = load_normalizer(saved, t * N + n, mask & (lane < ROWS), grad, ACC_DTYPE)
    steps, row = (blanks, nan_mask, maximum, scale, grad), lane * 0
    inputs, sizes = (), (C, blank, num_rows, T - first)
    if saved.maxima is not None:
        inputs = (logits.ptr + first * stride_t + n * stride_n, stride_t, logits.stride_c)
    outputs = (logits.grad_ptr + (first * N + n) * C, N.to(tl.int64) * C)
    for u in tl.static_range(ROWS):
        for g in tl.static_range(GROUPS):
            values = (sums[u * GROUPS + g], totals[u], sums[u * GROUPS + GROUPS - 1])
            store_gradient(
                values, steps, row, g * 32 + lane, inputs, outputs, sizes, star, ACC_DTYPE
            )
        row += 1
