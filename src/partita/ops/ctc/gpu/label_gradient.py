"""CTC's gradient for many classes, from posteriors by label.

Most classes do not occur in the target, so the kernel first writes the softmax of all classes. Then
the first position of each class sums the posteriors of all positions of that class and overwrites
the class; the position after the last label does so for the blank. No two positions write the same
class.
"""

import triton
import triton.language as tl

from .gradient import GRADIENT_SIZES, load_normalizer, load_sequence, scaled_softmax


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
    posteriors_ptr, blanks_ptr, labels_ptr, target_len, blank, T, mask, BLOCK_L: tl.constexpr
):
    """Return the sum of all posteriors of each step, and the blank's posterior.

    A target may contain the blank as a label; such labels count for the blank.
    """
    total, blank_total = (
        tl.zeros(mask.shape, posteriors_ptr.dtype.element_ty),
        tl.zeros(mask.shape, posteriors_ptr.dtype.element_ty),
    )
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
        is_blank = tl.load(labels_ptr + j, mask=j < target_len, other=-1) == blank
        total += tl.sum(tl.where(is_blank[None, :], 0.0, posterior), axis=1)
        blank_total += tl.sum(tl.where(is_blank[None, :], posterior, 0.0), axis=1)
    return total + blank_total, blank_total


@triton.jit
def softmax_pieces(
    source_ptr,
    first,
    C,
    stride_c,
    maximum,
    scale,
    mask,
    nan_mask,
    ACC_DTYPE: tl.constexpr,
    FROM_LOGITS: tl.constexpr,
    VEC: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Return the scaled softmax of some classes, or 0, in pieces that are all loaded before use."""
    pieces = ()
    for i in tl.static_range(PIECES):
        v = first + i * BLOCK_V + tl.arange(0, BLOCK_V)
        value = tl.zeros([mask.shape[0], BLOCK_V], ACC_DTYPE) + nan_mask[:, None]
        if FROM_LOGITS:
            block_mask = mask[:, None] & (v // VEC * VEC < C)[None, :]
            value += scaled_softmax(
                source_ptr[:, None] + v.to(tl.int64)[None, :] * stride_c,
                block_mask,
                maximum[:, None],
                scale[:, None],
                ACC_DTYPE,
            )
        pieces = pieces + (value,)
    return pieces


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
    MEAN: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    VEC: tl.constexpr,  # classes that are aligned together
    PIECES: tl.constexpr,  # blocks of classes that are loaded together
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,  # labels that are loaded together
):
    """Compute the gradient of some steps: first the softmax, then the classes of the target."""
    n, t = (
        (tl.program_id(0) % N).to(tl.int64),
        (tl.program_id(0) // N).to(tl.int64) * ROWS + tl.arange(0, ROWS),
    )
    target_len, offset, grad, mask, nan_mask = load_sequence(
        n,
        t,
        T,
        N,
        max_target_len,
        M,
        grad_output_ptr,
        stride_grad,
        offsets_ptr,
        input_lengths_ptr,
        target_lengths_ptr,
        flags_ptr,
        logz_ptr,
        MEAN,
        ACC_DTYPE,
    )
    maximum, scale = load_normalizer(maxima_ptr, sums_ptr, t * N + n, mask, grad, ACC_DTYPE)
    source_ptr, target_ptr = (
        logits_ptr + tl.multiple_of(t * stride_t + n * stride_n, VEC),
        dlogits_ptr + tl.multiple_of((t * N + n) * C, VEC),
    )
    row_posteriors_ptr, row_blanks_ptr, chunk_rows = (
        posteriors_ptr + (n * num_chunks * T + t) * 32,
        blanks_ptr + n * num_chunks * T + t,
        T.to(tl.int64),
    )
    total, blank_total = sum_over_labels(
        row_posteriors_ptr,
        row_blanks_ptr,
        labels_ptr + offset,
        target_len,
        blank,
        chunk_rows,
        mask,
        BLOCK_L,
    )
    coef, max_repeats = tl.where(total > 0.0, grad / total, 0.0), tl.load(max_repeats_ptr + n)
    for first in range(0, C, PIECES * BLOCK_V):
        pieces = softmax_pieces(
            source_ptr,
            first,
            C,
            stride_c,
            maximum,
            scale,
            mask,
            nan_mask,
            ACC_DTYPE,
            maxima_ptr is not None,
            VEC,
            PIECES,
            BLOCK_V,
        )
        for i in tl.static_range(PIECES):
            v = first + i * BLOCK_V + tl.arange(0, BLOCK_V)
            block_mask = (t < T)[:, None] & (v // VEC * VEC < C)[None, :]
            tl.store(
                target_ptr[:, None] + v[None, :],
                pieces[i].to(dlogits_ptr.dtype.element_ty),
                mask=block_mask,
            )
    tl.debug_barrier()  # The next loop overwrites some of these classes.
    for first in range(0, target_len + 1, BLOCK_L):
        j = first + tl.arange(0, BLOCK_L)
        label = tl.load(labels_ptr + offset + j, mask=j < target_len, other=-1)
        position = tl.load(first_ptr + n * C + label, mask=(label >= 0) & (label < C), other=-1)
        # The position after the last label serves the blank.
        position, label = (
            tl.where(position == j, position, -1),
            tl.where(j == target_len, blank, label),
        )
        posterior = sum_over_positions(
            row_posteriors_ptr,
            chunk_rows * 32,
            next_ptr + n * max_target_len,
            position,
            max_repeats,
            mask,
        )
        posterior += tl.where((j == target_len)[None, :], blank_total[:, None], 0.0)
        block_mask = mask[:, None] & ((position >= 0) | (j == target_len))[None, :]
        value = nan_mask[:, None] - posterior * coef[:, None]
        if maxima_ptr is not None:
            value += scaled_softmax(
                source_ptr[:, None] + (label.to(tl.int64) * stride_c)[None, :],
                block_mask,
                maximum[:, None],
                scale[:, None],
                ACC_DTYPE,
            )
        tl.store(
            target_ptr[:, None] + label[None, :],
            value.to(dlogits_ptr.dtype.element_ty),
            mask=block_mask,
        )
