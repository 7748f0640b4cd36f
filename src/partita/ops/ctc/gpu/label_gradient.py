"""CTC's gradient for many classes, from posteriors by label.

Most classes do not occur in the target, so the kernel first writes the softmax of all classes. Then
the first position of each class sums the posteriors of all positions of that class and overwrites
the class; the position after the last label does so for the blank. No two positions write the same
class. An index has the first position of each class and the next one of each position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime.launch import cdiv, launch
from .gradient import (
    GRADIENT_SIZES,
    load_loss_gradient,
    load_normalizer,
    load_status,
    scaled_softmax,
    without_star,
)
from .lattice import TargetTensors, load_lengths, load_target


class LabelIndex(NamedTuple):
    """The positions of each class in each target; all tensors are int32.

    Fields:
        first: `[N, C]`, the first position of each class, or -1.
        max_repeats: `[N]`, the greatest number of positions after the first; -1 if no class occurs.
        next: `[N, L]`, the next position with the same class, or -1.
    """

    first: Tensor
    max_repeats: Tensor
    next: Tensor


def label_index(targets: TargetTensors, max_target_len: int, C: int, blank: int) -> LabelIndex:
    """Return where each class but the blank occurs in the targets."""
    N, labels = len(targets.target_lengths), targets.labels
    # Each tensor starts on 16 bytes.
    sizes = [cdiv(size, 4) * 4 for size in (N * C, N, N * max_target_len)]
    buffer = torch.empty(sum(sizes), dtype=torch.int32, device=labels.device)
    buffer[: sizes[0] + sizes[1]].fill_(-1)
    index = LabelIndex(*buffer.split_with_sizes(sizes))
    launch(
        ctc_label_index_kernel,
        N * cdiv(max_target_len, 64),
        targets=targets._replace(input_lengths=None),
        index=index,
        M=labels.numel(),
        max_target_len=max_target_len,
        C=C,
        blank=blank,
        BLOCK=64,
        num_warps=4,
    )
    return index


@triton.jit(do_not_specialize=["M", "max_target_len", "C", "blank"])
def ctc_label_index_kernel(
    targets,  # TargetTensors without input lengths
    index,  # LabelIndex; the first positions and the repeats are -1
    M,
    max_target_len,
    C,
    blank,
    BLOCK: tl.constexpr,
):
    """Find the first and next positions of each class, and the greatest number of repeats."""
    blocks = tl.cdiv(max_target_len, BLOCK)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    target_len, offset, invalid = load_target(targets, n, max_target_len, M)
    target_len = tl.where(invalid, 0, target_len).to(tl.int32)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(targets.labels + offset + j, mask=j < target_len, other=-1)
    next_index, before = tl.full([BLOCK], 2147483647, tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, target_len, BLOCK):
        i = start + tl.arange(0, BLOCK)
        other = tl.load(targets.labels + offset + i, mask=i < target_len, other=-2)
        same = label[:, None] == other[None, :]
        next_index = tl.minimum(
            next_index,
            tl.min(tl.where(same & (i[None, :] > j[:, None]), i[None, :], 2147483647), axis=1),
        )
        before += tl.sum((same & (i[None, :] < j[:, None])).to(tl.int32), axis=1)
    valid = (j < target_len) & (label >= 0) & (label < C) & (label != blank)
    tl.store(
        index.next + n * max_target_len + j,
        tl.where(next_index < 2147483647, next_index, -1),
        mask=j < target_len,
    )
    tl.store(index.first + n * C + label, j, mask=valid & (before == 0))
    # The maximum of integers is the same in any order.
    tl.atomic_max(index.max_repeats + n, tl.max(tl.where(valid, before, -1), axis=0))


@triton.jit
def chunk_offset(j, chunk_stride):
    """Return the offset of position j's posterior, which is stored by chunks of 32 positions."""
    return (j // 32).to(tl.int64) * chunk_stride + j % 32


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


@triton.jit(do_not_specialize=GRADIENT_SIZES)
def ctc_label_gradient_kernel(
    grad_output_ptr,  # [N], or the gradient of their sum or mean []
    logits,  # LogitTensors
    targets,  # TargetTensors
    saved,  # SavedScan
    posteriors,  # ScanMemory without counter and carries
    index,  # LabelIndex
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
    VEC: tl.constexpr,  # classes that are aligned together
    PIECES: tl.constexpr,  # blocks of classes that are loaded together
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,  # labels that are loaded together
):
    """Compute the gradient of some steps: first the softmax, then the classes of the target."""
    ACC_DTYPE: tl.constexpr = posteriors.labels.dtype.element_ty
    n, first = (tl.program_id(0) % N).to(tl.int64), (tl.program_id(0) // N).to(tl.int64) * ROWS
    t = first + tl.arange(0, ROWS)
    length, target_len, offset = load_lengths(targets, n, T, max_target_len, M)[:3]
    mask, nan_mask = load_status(saved, n, t, length, ACC_DTYPE)
    grad = load_loss_gradient(grad_output_ptr + n * stride_grad, target_len, N, MEAN, ACC_DTYPE)
    maximum, scale = load_normalizer(saved, t * N + n, mask, grad, ACC_DTYPE)
    row_ptrs = logits.ptr + tl.multiple_of(t * stride_t + n * stride_n, VEC)
    d_row_ptrs = logits.grad_ptr + tl.multiple_of((t * N + n) * C, VEC)
    exists = t < T
    first_row, labels_ptr, T64 = n * num_chunks * T + t, targets.labels + offset, T.to(tl.int64)
    posterior_ptrs, blank_ptrs = posteriors.labels + first_row * 32, posteriors.blanks + first_row
    total, blank_total, star_total = sum_over_labels(
        posterior_ptrs, blank_ptrs, labels_ptr, target_len, blank, star, T64, mask, BLOCK_L
    )
    if star is not None:
        scale = without_star(scale, star_total, total)
    coef = tl.where(total > 0.0, grad / total, 0.0)
    max_repeats = tl.load(index.max_repeats + n)
    for first_class in range(0, C, PIECES * BLOCK_V):
        pieces = ()  # all are loaded before the first is stored
        for i in tl.static_range(PIECES):
            v = first_class + i * BLOCK_V + tl.arange(0, BLOCK_V)
            value = tl.zeros([ROWS, BLOCK_V], ACC_DTYPE) + nan_mask[:, None]
            if saved.maxima is not None:
                piece_mask = mask[:, None] & (v // VEC * VEC < C)[None, :]
                ptrs = row_ptrs[:, None] + (v.to(tl.int64) * logits.stride_c)[None, :]
                value += scaled_softmax(
                    ptrs, piece_mask, maximum[:, None], scale[:, None], ACC_DTYPE
                )
            pieces = pieces + (value,)
        for i in tl.static_range(PIECES):
            v = first_class + i * BLOCK_V + tl.arange(0, BLOCK_V)
            piece_mask = exists[:, None] & (v // VEC * VEC < C)[None, :]
            ptrs = d_row_ptrs[:, None] + v[None, :]
            tl.store(ptrs, pieces[i].to(ptrs.dtype.element_ty), mask=piece_mask)
    tl.debug_barrier()  # The next loop overwrites some of these classes.
    for first_label in range(0, target_len + 1, BLOCK_L):
        # Position j writes the gradient of its label's class if it is the first of that class. The
        # position after the last label serves the blank.
        j, first_ptr = first_label + tl.arange(0, BLOCK_L), index.first + n * C
        label = tl.load(labels_ptr + j, mask=j < target_len, other=-1)
        is_class = (label >= 0) & (label < C)
        position = tl.load(first_ptr + label, mask=is_class, other=-1)
        label, position = (
            tl.where(j == target_len, blank, label),
            tl.where(position == j, position, -1),
        )
        next_ptr, chunk_stride = index.next + n * max_target_len, T64 * 32
        other, posterior = position, tl.zeros([ROWS, BLOCK_L], ACC_DTYPE)
        for _ in range(max_repeats + 1):
            has_other = mask[:, None] & (other >= 0)[None, :]
            ptrs = posterior_ptrs[:, None] + chunk_offset(other, chunk_stride)[None, :]
            posterior += tl.load(ptrs, mask=has_other, other=0.0)
            other = tl.load(next_ptr + other, mask=other >= 0, other=-1)
        posterior += tl.where((j == target_len)[None, :], blank_total[:, None], 0.0)
        block_mask = mask[:, None] & ((position >= 0) | (j == target_len))[None, :]
        value = nan_mask[:, None] - posterior * coef[:, None]
        if saved.maxima is not None:
            ptrs = row_ptrs[:, None] + (label.to(tl.int64) * logits.stride_c)[None, :]
            value += scaled_softmax(ptrs, block_mask, maximum[:, None], scale[:, None], ACC_DTYPE)
        d_ptrs = d_row_ptrs[:, None] + label[None, :]
        tl.store(d_ptrs, value.to(d_ptrs.dtype.element_ty), mask=block_mask)
