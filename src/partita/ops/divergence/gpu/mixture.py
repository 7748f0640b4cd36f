"""The kernel of divergences from a mixture for rows of 16-bit logits, with parts in registers.

As in one_pass.py, the programs of a row exchange statistics, and write the gradient in the launch
that computes the divergence. Here a program loads all of its part of both rows at once and keeps
the words, so memory is read once, and many loads are in flight. log(p / m) of each class waits in
shared memory until the divergence of the row is known, so the gradient needs neither the teacher's
logits nor a logarithm.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.math import LN2, LOG2E, reciprocal
from ....primitives.gpu.sync import next_part, store_pair, unpack_pair
from .mixture_part import (
    divergence_of_sum,
    mix_part,
    normalizer,
    normalizers,
    shift_and_total,
    store_gradient,
    store_zeros,
)
from .pair_part import sum_of_pairs
from .words import VEC, Numbers, load_part, words_of_row


class RowSplit(NamedTuple):
    """The program's part of its row.

    Fields:
        slots_ptr: the row's words of the exchange, `[3, splits]`.
        split, splits: the program's part, and the number of parts.
    """

    slots_ptr: tl.tensor
    split: tl.tensor
    splits: tl.tensor


@gluon.jit
def send_pair(row_split, field: gl.constexpr, pair):
    """Give a pair of numbers to the other programs of the row."""
    store_pair(row_split.slots_ptr + field * row_split.splits, row_split.split, *pair)


@gluon.jit
def load_slots(row_split, field: gl.constexpr, BLOCK_SPLITS: gl.constexpr):
    """Load the words of all parts of the row, `[BLOCK_SPLITS]`, in each warp; 0 if not written."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([BLOCK_SPLITS // 32], [32], [gl.num_warps()], [0])
    part = gl.arange(0, BLOCK_SPLITS, LAYOUT)
    at = row_split.slots_ptr + field * row_split.splits + part
    return gl.load(
        at, mask=part < row_split.splits, other=1, volatile=True
    ), part < row_split.splits


@gluon.jit
def await_shares(row_split, BLOCK_SPLITS: gl.constexpr):
    """Return shifts and totals of all parts, of the student and of the teacher.

    Programs wait as in primitives/gpu/sync.py. Past the last part, shifts are -inf.
    """
    words, is_part = load_slots(row_split, 0, BLOCK_SPLITS)
    t_words, _ = load_slots(row_split, 1, BLOCK_SPLITS)
    while gl.min(((words != 0) & (t_words != 0)).to(gl.int32), axis=0) == 0:
        words, _ = load_slots(row_split, 0, BLOCK_SPLITS)
        t_words, _ = load_slots(row_split, 1, BLOCK_SPLITS)
    shifts, totals = unpack_pair(words)
    t_shifts, t_totals = unpack_pair(t_words)
    shifts = gl.where(is_part, shifts, -float("inf"))
    t_shifts = gl.where(is_part, t_shifts, -float("inf"))
    return shifts, totals, t_shifts, t_totals


@gluon.jit
def await_sums(row_split, BLOCK_SPLITS: gl.constexpr):
    """Return the sums of the row's terms in both divergences."""
    words, is_part = load_slots(row_split, 2, BLOCK_SPLITS)
    while gl.min((words != 0).to(gl.int32), axis=0) == 0:
        words, _ = load_slots(row_split, 2, BLOCK_SPLITS)
    terms, t_terms = unpack_pair(words)
    terms, t_terms = gl.where(is_part, terms, 0.0), gl.where(is_part, t_terms, 0.0)
    return gl.reduce((terms, t_terms), 0, sum_of_pairs)


@gluon.jit
def new_ratios(BLOCKS: gl.constexpr):
    """Return shared memory for one number of each class, two tensors `[THREADS, VEC]` a block.

    Each tensor has memory of its own, since the compiler puts a barrier between stores to one.
    """
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(VEC, 1, 1, [1, 0])
    ratios = ()
    for _ in gl.static_range(2 * BLOCKS):
        memory = gl.allocate_shared_memory(gl.float32, [32 * gl.num_warps(), VEC], LAYOUT)
        ratios = ratios + (memory,)
    return ratios


@gluon.jit
def mixture_of_row(
    x_ptr,
    t_ptr,
    d_ptr,
    on_row,
    row_split,
    numbers,
    DTYPE: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    BLOCK_SPLITS: gl.constexpr,
    BLOCKS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Return the divergence of a row, and store the gradient of this program's part of it."""
    x = load_part(x_ptr, numbers.words, BLOCKS, LAYOUT)
    t = load_part(t_ptr, numbers.words, BLOCKS, LAYOUT)
    share, t_share = normalizers(
        *shift_and_total(x, numbers, DTYPE, HAS_SOFTCAP, BLOCKS, LAYOUT),
        *shift_and_total(t, numbers, DTYPE, HAS_SOFTCAP, BLOCKS, LAYOUT),
    )
    send_pair(row_split, 0, share)
    send_pair(row_split, 1, t_share)
    share, t_share = normalizers(*await_shares(row_split, BLOCK_SPLITS))
    of_row, t_of_row = normalizer(*share), normalizer(*t_share)
    ratios = new_ratios(BLOCKS)
    terms = mix_part(x, t, ratios, of_row, t_of_row, numbers, DTYPE, HAS_SOFTCAP, BLOCKS, LAYOUT)
    send_pair(row_split, 2, terms)
    total, t_total = await_sums(row_split, BLOCK_SPLITS)
    divergence = divergence_of_sum(total, of_row)
    t_divergence = divergence_of_sum(t_total, t_of_row)
    store_gradient(
        x, ratios, d_ptr, on_row, divergence, of_row, numbers, DTYPE, HAS_SOFTCAP, BLOCKS, LAYOUT
    )
    return (numbers.weight * t_divergence + (1.0 - numbers.weight) * divergence) * LN2


@gluon.jit
def divergence_mixture_row_kernel(
    logits_ptr,  # [M, C]
    teacher_ptr,  # [M, C]
    row_factor_ptr,  # [M] the derivative of the result in each row's loss, or None for `factor`
    slots_ptr,  # [1 + 3 * M * splits] int64, zero: the counter, then three slots for each program
    loss_ptr,  # [M]
    dlogits_ptr,  # [M, C]
    classes,
    splits,  # programs that share a row
    classes_per_program,  # a multiple of 2 * VEC
    logits_row,  # strides, multiples of 2 * VEC
    teacher_row,
    dlogits_row,
    factor: gl.float64,
    beta: gl.float64,
    temperature: gl.float64,
    softcap: gl.float64,
    HAS_SOFTCAP: gl.constexpr,
    BLOCK_SPLITS: gl.constexpr,
    BLOCKS: gl.constexpr,  # of a part
):
    """Compute divergence and gradient of one row with one read of both logits and one write.

    A row whose factor is 0 is not read, and its loss and gradient are 0.
    """
    DTYPE: gl.constexpr = logits_ptr.dtype.element_ty
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, VEC], [32, 1], [gl.num_warps(), 1], [1, 0])
    index = next_part(slots_ptr, True)
    row, split = index // splits, (index % splits).to(gl.int32)
    on_row = gl.to_tensor(factor).to(gl.float32)
    if row_factor_ptr is not None:
        on_row = gl.load(row_factor_ptr + row).to(gl.float32)
    inverse = reciprocal(gl.to_tensor(temperature).to(gl.float32))
    first = split * classes_per_program
    numbers = Numbers(
        gl.to_tensor(softcap).to(gl.float32),
        gl.to_tensor(beta).to(gl.float32),
        LOG2E * inverse,
        gl.minimum(classes_per_program, classes - first) // 2,
    )
    d_ptr = words_of_row(dlogits_ptr, row, dlogits_row, first)
    loss = on_row * 0.0
    if on_row == 0.0:
        store_zeros(d_ptr, numbers, BLOCKS, LAYOUT)
    else:
        loss = mixture_of_row(
            words_of_row(logits_ptr, row, logits_row, first),
            words_of_row(teacher_ptr, row, teacher_row, first),
            d_ptr,
            on_row * inverse,
            RowSplit(slots_ptr + 1 + row * 3 * splits, split, splits),
            numbers,
            DTYPE,
            HAS_SOFTCAP,
            BLOCK_SPLITS,
            BLOCKS,
            LAYOUT,
        )
    gl.store(loss_ptr + row, loss, mask=split == 0)
