"""CTC's gradient for many classes, from posteriors by label.

Most classes do not occur in the target, so the kernel first writes the softmax of all classes. Then
the first position of each class sums the posteriors of all positions of that class and overwrites
the class; the position after the last label does so for the blank. No two positions write the same
class.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .gradient import (
    GRADIENT_SIZES,
    load_loss_gradient,
    load_normalizer,
    load_status,
    posterior_scale,
    program_steps,
    scaled_softmax,
    without_star,
)
from .lattice import load_lengths


class GradientRows(NamedTuple):
    """The steps of a program, [ROWS] each.

    Fields:
        logits_ptr: the rows of the logits.
        dlogits_ptr: the rows of the gradient.
        stride_c: the stride of the logits over the classes.
        exists: which steps are rows of the gradient.
        mask: which of them have posteriors.
        nan_mask: NaN or 0, which is added to the gradient.
        maximum: the maximum of the logits.
        scale: the gradient of the loss over the sum of exponentials.
    """

    logits_ptr: tl.tensor
    dlogits_ptr: tl.tensor
    stride_c: tl.tensor
    exists: tl.tensor
    mask: tl.tensor
    nan_mask: tl.tensor
    maximum: tl.tensor
    scale: tl.tensor


@triton.jit
def chunk_offset(j, chunk_stride):
    """Return the offset of position j's posterior, which is stored by chunks of 32 positions."""
    return (j // 32).to(tl.int64) * chunk_stride + j % 32


@triton.jit
def sum_over_positions(posteriors_ptr, chunk_stride, next_ptr, position, max_repeats, mask):
    """Sum the posteriors of each step over the positions of classes.

    `position` is the first position of each class, or -1, and `next_ptr` leads to the others. No
    class has more than `max_repeats` others.
    """
    total = tl.zeros([mask.shape[0], position.shape[0]], posteriors_ptr.dtype.element_ty)
    for _ in range(max_repeats + 1):
        total += tl.load(
            posteriors_ptr[:, None] + chunk_offset(position, chunk_stride)[None, :],
            mask=mask[:, None] & (position >= 0)[None, :],
            other=0.0,
        )
        position = tl.load(next_ptr + position, mask=position >= 0, other=-1)
    return total


@triton.jit
def sum_over_labels(
    posteriors_ptr, blanks_ptr, labels_ptr, target_len, blank, star, T, mask, BLOCK_L: tl.constexpr
):
    """Return the sum of all posteriors of each step, the blank's posterior, and the star's.

    A target may contain the blank as a label; such labels count for the blank.
    """
    total, blank_total = (
        tl.zeros(mask.shape, posteriors_ptr.dtype.element_ty),
        tl.zeros(mask.shape, posteriors_ptr.dtype.element_ty),
    )
    star_total = tl.zeros(mask.shape, posteriors_ptr.dtype.element_ty)
    for first in range(0, target_len // 32 + 1, 32):
        c = first + tl.arange(0, 32)
        block_mask = mask[:, None] & (c <= target_len // 32)[None, :]
        blank_total += tl.sum(
            tl.load(blanks_ptr[:, None] + c.to(tl.int64)[None, :] * T, mask=block_mask, other=0.0),
            axis=1,
        )
    for first in range(0, target_len, BLOCK_L):
        j = first + tl.arange(0, BLOCK_L)
        block_mask = mask[:, None] & (j < target_len)[None, :]
        posterior = tl.load(
            posteriors_ptr[:, None] + chunk_offset(j, T * 32)[None, :], mask=block_mask, other=0.0
        )
        label = tl.load(labels_ptr + j, mask=j < target_len, other=-1)
        is_blank = label == blank
        total += tl.sum(tl.where(is_blank[None, :], 0.0, posterior), axis=1)
        blank_total += tl.sum(tl.where(is_blank[None, :], posterior, 0.0), axis=1)
        if star is not None:
            is_star = label == star
            star_total += tl.sum(tl.where(is_star[None, :], posterior, 0.0), axis=1)
    return total + blank_total, blank_total, star_total


@triton.jit
def row_softmax(rows, v, mask):
    """Return the scaled softmax of the classes v, [ROWS, V], for which logits are loaded."""
    return scaled_softmax(
        rows.logits_ptr[:, None] + (v.to(tl.int64) * rows.stride_c)[None, :],
        mask,
        rows.maximum[:, None],
        rows.scale[:, None],
        rows.maximum.dtype,
    )


@triton.jit
def store_softmax(
    rows,
    C,
    FROM_LOGITS: tl.constexpr,
    VEC: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Store the scaled softmax of all classes, or 0, in pieces that are all loaded before use."""
    ROWS: tl.constexpr = rows.mask.shape[0]
    for first in range(0, C, PIECES * BLOCK_V):
        pieces = ()
        for i in tl.static_range(PIECES):
            v = first + i * BLOCK_V + tl.arange(0, BLOCK_V)
            value = tl.zeros([ROWS, BLOCK_V], rows.maximum.dtype) + rows.nan_mask[:, None]
            if FROM_LOGITS:
                mask = rows.mask[:, None] & (v // VEC * VEC < C)[None, :]
                value += row_softmax(rows, v, mask)
            pieces = pieces + (value,)
        for i in tl.static_range(PIECES):
            v = first + i * BLOCK_V + tl.arange(0, BLOCK_V)
            mask = rows.exists[:, None] & (v // VEC * VEC < C)[None, :]
            ptrs = rows.dlogits_ptr[:, None] + v[None, :]
            tl.store(ptrs, pieces[i].to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def load_positions(labels_ptr, first_ptr, j, target_len, C, blank):
    """Return the class whose gradient each position j writes, and the first position of the class.

    The position is -1 where the class is written by another position, and where no label is the
    class. The position after the last label serves the blank.
    """
    label = tl.load(labels_ptr + j, mask=j < target_len, other=-1)
    position = tl.load(first_ptr + label, mask=(label >= 0) & (label < C), other=-1)
    return tl.where(j == target_len, blank, label), tl.where(position == j, position, -1)


@triton.jit(do_not_specialize=GRADIENT_SIZES)
def ctc_label_gradient_kernel(
    grad_output_ptr,  # [N], or the gradient of their sum or mean []
    logits_ptr,  # [T, N, C]
    labels_ptr,  # [M]
    offsets_ptr,  # [N]
    input_lengths_ptr,  # [N]
    target_lengths_ptr,  # [N]
    maxima_ptr,  # [T, N] or None
    sums_ptr,  # [T, N] or None
    flags_ptr,  # [N] int64
    logz_ptr,  # [N] fp64
    posteriors_ptr,  # [N, num_chunks, T, 32]
    blanks_ptr,  # [N, num_chunks, T]
    first_ptr,  # [N, C] int32, see LabelIndex
    max_repeats_ptr,  # [N] int32
    next_ptr,  # [N, max_target_len] int32
    dlogits_ptr,  # [T, N, C]
    T,
    N,
    C,
    M,
    max_target_len,
    num_chunks,
    blank,
    stride_t,
    stride_n,
    stride_c,
    stride_grad,
    star,  # the label that is the star, or None
    MEAN: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    VEC: tl.constexpr,  # classes that are aligned together
    PIECES: tl.constexpr,  # blocks of classes that are loaded together
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,  # labels that are loaded together
):
    """Compute the gradient of some steps: first the softmax, then the classes of the target."""
    n, first = program_steps(N, ROWS)
    t = first + tl.arange(0, ROWS)
    length, target_len, offset, _ = load_lengths(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, T, max_target_len, M
    )
    mask, nan_mask = load_status(n, t, length, flags_ptr, logz_ptr, ACC_DTYPE)
    grad = load_loss_gradient(grad_output_ptr + n * stride_grad, target_len, N, MEAN, ACC_DTYPE)
    maximum, scale = load_normalizer(maxima_ptr, sums_ptr, t * N + n, mask, grad, ACC_DTYPE)
    row_ptr = logits_ptr + tl.multiple_of(t * stride_t + n * stride_n, VEC)
    d_row_ptr = dlogits_ptr + tl.multiple_of((t * N + n) * C, VEC)
    rows = GradientRows(row_ptr, d_row_ptr, stride_c, t < T, mask, nan_mask, maximum, scale)
    first_row, labels_ptr, T64 = n * num_chunks * T + t, labels_ptr + offset, T.to(tl.int64)
    posteriors_ptr += first_row * 32
    blanks_ptr += first_row
    total, blank_total, star_total = sum_over_labels(
        posteriors_ptr, blanks_ptr, labels_ptr, target_len, blank, star, T64, mask, BLOCK_L
    )
    if star is not None:
        scale = without_star(scale, star_total, total)
        rows = GradientRows(row_ptr, d_row_ptr, stride_c, t < T, mask, nan_mask, maximum, scale)
    coef, max_repeats = posterior_scale(total, grad), tl.load(max_repeats_ptr + n)
    store_softmax(rows, C, maxima_ptr is not None, VEC, PIECES, BLOCK_V)
    tl.debug_barrier()  # The next loop overwrites some of these classes.
    for first in range(0, target_len + 1, BLOCK_L):
        j = first + tl.arange(0, BLOCK_L)
        label, position = load_positions(labels_ptr, first_ptr + n * C, j, target_len, C, blank)
        next_ptr_n = next_ptr + n * max_target_len
        posterior = sum_over_positions(
            posteriors_ptr, T64 * 32, next_ptr_n, position, max_repeats, mask
        )
        posterior += tl.where((j == target_len)[None, :], blank_total[:, None], 0.0)
        block_mask = mask[:, None] & ((position >= 0) | (j == target_len))[None, :]
        value = nan_mask[:, None] - posterior * coef[:, None]
        if maxima_ptr is not None:
            value += row_softmax(rows, label, block_mask)
        d_ptrs = d_row_ptr[:, None] + label[None, :]
        tl.store(d_ptrs, value.to(dlogits_ptr.dtype.element_ty), mask=block_mask)
