"""The kernel of divergences from a mixture for rows of 16-bit logits, with parts in registers.

As in one_pass.py, the programs of a row exchange statistics, and write the gradient in the launch
that computes the divergence. Here a program loads all of its part of both rows at once and keeps
the words, so memory is read once, and many loads are in flight. log(p / m) of each class waits in
shared memory until the divergence of the row is known, so the gradient needs neither the teacher's
logits nor a logarithm.

A word has two logits. They are taken apart into two tensors, in which their order does not matter.

All exponents are of base 2. A probability is exp2(-lost) * exp2(x * log2_scale - offset), where the
offset is the base-2 log-sum-exp of the row in fp32, and `lost` is what its rounding lost. So no
logarithm of a sum is subtracted from each class.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.math import (
    LN2,
    LOG2E,
    apply_softcap,
    finite_shift,
    log_exact,
    reciprocal,
)
from ....primitives.gpu.sync import next_part, store_pair, unpack_pair
from .plan import MIXTURE_WARPS, MIXTURE_WORDS
from .rows import (
    SMALLEST,
    approximate_log2,
    at_least,
    exponent,
    max_of_pairs,
    sum_of_pairs,
)

LOWEST = gl.constexpr(-1000.0)  # the least exponent that enters a ratio; exp2 of it is 0
VEC = gl.constexpr(MIXTURE_WORDS)
THREADS = gl.constexpr(32 * MIXTURE_WARPS)
# The layout of the words of a block, [THREADS, VEC].
LAYOUT = gl.constexpr(gl.BlockedLayout([1, MIXTURE_WORDS], [32, 1], [MIXTURE_WARPS, 1], [1, 0]))


class Numbers(NamedTuple):
    """The numbers that each class needs.

    Fields:
        cap: the soft-cap, or None.
        weight: beta.
        log2_scale: the factor of logits in exponents.
        words: the number of words of the program's part.
    """

    cap: tl.tensor
    weight: tl.tensor
    log2_scale: tl.tensor
    words: tl.tensor


@gluon.jit
def words_of_row(rows, row, first):
    """Return the address of the words of a row of `StridedRows` from a class on.

    The stride of the rows and the class are multiples of 2 * VEC.
    """
    # The compiler sees from the expression that the address is one of whole vectors.
    offset = (row * rows.row + first) // (2 * VEC) * VEC
    return rows.ptr.to(gl.pointer_type(gl.int32), bitcast=True) + offset


@gluon.jit
def first_words(k: gl.constexpr):
    """Return the index of each thread's first word in block k, `[THREADS]`."""
    return (gl.arange(0, THREADS, gl.SliceLayout(1, LAYOUT)) + k * THREADS) * VEC


@gluon.jit
def word_indices(first):
    """Return the indices of the words of a block, `[THREADS, VEC]`, from each thread's first."""
    column = gl.arange(0, VEC, gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(first, 1) + gl.expand_dims(column, 0)


@gluon.jit
def load_part(row_ptr, num_words, BLOCKS: gl.constexpr):
    """Load the words of a part of a row, a tuple of BLOCKS blocks; those past the part are 0."""
    blocks = ()
    for k in gl.static_range(BLOCKS):
        first = first_words(k)
        mask = gl.expand_dims(first < num_words, 1)
        at = row_ptr + word_indices(first)
        blocks = blocks + (gl.load(at, mask=mask, other=0, eviction_policy="evict_first"),)
    return blocks


@gluon.jit
def store_block(row_ptr, words, num_words, k: gl.constexpr):
    """Store the words of block k of a part of a row."""
    first = first_words(k)
    mask = gl.expand_dims(first < num_words, 1)
    gl.store(row_ptr + word_indices(first), words, mask=mask, cache_modifier=".cs")


@gluon.jit
def greater_bf16(a, b):
    """Return words with the greater of both logits in each half; a NaN loses."""
    asm: gl.constexpr = "max.bf16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [a, b], gl.int32, True, 1)


@gluon.jit
def greater_fp16(a, b):
    """Return the same for fp16."""
    asm: gl.constexpr = "max.f16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [a, b], gl.int32, True, 1)


@gluon.jit
def logits_of(words, cap, DTYPE: gl.constexpr):
    """Return both soft-capped logits of each word in fp32."""
    asm: gl.constexpr = (
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        if DTYPE == gl.bfloat16
        else "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}"
    )
    # If it were pure, the compiler would keep the logits, which need two registers for each word.
    low, high = gl.inline_asm_elementwise(
        asm, "=f,=f,r", [words], (gl.float32, gl.float32), False, 1
    )
    return apply_softcap(low, cap), apply_softcap(high, cap)


@gluon.jit
def words_of(low, high, DTYPE: gl.constexpr):
    """Return words of two numbers that are rounded to 16 bits."""
    asm: gl.constexpr = (
        "cvt.rn.bf16x2.f32 $0, $2, $1;" if DTYPE == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    )
    return gl.inline_asm_elementwise(asm, "=r,f,f", [low, high], gl.int32, True, 1)


class Normalizer(NamedTuple):
    """The base-2 log-sum-exp of a row, the sum of two numbers.

    Fields:
        offset: the log-sum-exp in fp32.
        lost: what its rounding lost.
    """

    offset: tl.tensor
    lost: tl.tensor


@gluon.jit
def normalizer(shift, total):
    """Return the `Normalizer` of the sum of exponentials below a shift."""
    shift, log_total = finite_shift(shift), log_exact(total) * LOG2E
    offset = shift + log_total
    part = offset - shift
    return Normalizer(offset, (shift - (offset - part)) + (log_total - part))


@gluon.jit
def merged_totals(shift, total, t_shift, t_total):
    """Return shift and total of both rows, given those of some parts, `[PARTS]`."""
    of_row, t_of_row = gl.reduce((shift, t_shift), 0, max_of_pairs)
    total *= gl.exp2(shift - finite_shift(of_row))
    t_total *= gl.exp2(t_shift - finite_shift(t_of_row))
    total, t_total = gl.reduce((total, t_total), 0, sum_of_pairs)
    return (of_row, total), (t_of_row, t_total)


@gluon.jit
def lane_sum(terms, k: gl.constexpr, numbers, BLOCKS: gl.constexpr):
    """Return each thread's sum of the terms of block k, without those past the last class."""
    total = gl.sum(terms, axis=1)
    if k == BLOCKS - 1:
        total = gl.where(first_words(k) < numbers.words, total, 0.0)
    return total


@gluon.jit
def shift_and_total(part, numbers, DTYPE: gl.constexpr):
    """Return the greatest exponent of each thread, and its sum of exponentials below that.

    The exponent is -inf for a thread without classes.
    """
    BLOCKS: gl.constexpr = len(part)
    shift = gl.full([THREADS], -float("inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    for k in gl.static_range(BLOCKS):
        greatest = gl.reduce(part[k], 1, greater_bf16 if DTYPE == gl.bfloat16 else greater_fp16)
        low, high = logits_of(greatest, numbers.cap, DTYPE)
        greatest = gl.maximum(low, high)
        if k == BLOCKS - 1:
            greatest = gl.where(first_words(k) < numbers.words, greatest, -float("inf"))
        shift = gl.maximum(shift, greatest)
    # The shift stands in each exponent as a rounded number, so no difference of shifts may have the
    # product before it is rounded, which the compiler puts there for a plain product.
    shift = gl.fma(shift, numbers.log2_scale, 0.0)
    total = gl.zeros([THREADS], gl.float32, gl.SliceLayout(1, LAYOUT))
    of_lane = gl.expand_dims(finite_shift(shift), 1)
    for k in gl.static_range(BLOCKS):
        low, high = logits_of(part[k], numbers.cap, DTYPE)
        terms = gl.exp2(exponent(low, of_lane, numbers)) + gl.exp2(exponent(high, of_lane, numbers))
        total += lane_sum(terms, k, numbers, BLOCKS)
    return shift, total


@gluon.jit
def new_ratios(BLOCKS: gl.constexpr):
    """Return shared memory for one number of each class, two tensors `[THREADS, VEC]` a block.

    Each tensor has memory of its own, since the compiler puts a barrier between stores to one.
    """
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(VEC, 1, 1, [1, 0])
    ratios = ()
    for _ in gl.static_range(2 * BLOCKS):
        ratios = ratios + (gl.allocate_shared_memory(gl.float32, [THREADS, VEC], SHARED),)
    return ratios


@gluon.jit
def ratios_of_classes(x, t, of_row, t_of_row, scales, numbers):
    """Return log2(p / m) of classes, and their terms in both divergences from the mixture m.

    p and q are without what the offsets lost; m is not, as `scales` makes up for that.
    """
    log_p = at_least(exponent(x, of_row.offset, numbers), LOWEST)
    log_q = at_least(exponent(t, t_of_row.offset, numbers), LOWEST)
    p, q = gl.exp2(log_p), gl.exp2(log_q)
    # The smallest normal number is added because the logarithm of 0 is infinite.
    log_m = approximate_log2(gl.fma(scales[1], q, gl.fma(scales[0], p, SMALLEST)))
    ratio = log_p - log_m
    return ratio, p * ratio, q * (log_q - log_m)


@gluon.jit
def divergence_of_sum(total, of_row):
    """Return a row's divergence from the mixture in units of log 2, given the sum of its terms."""
    return gl.exp2(-of_row.lost) * total - of_row.lost


@gluon.jit
def gradient_of_classes(x, ratio, factors, of_row, numbers):
    """Return the gradient in the student's logits x, given log2(p / m) and two factors of it."""
    p = gl.exp2(exponent(x, of_row.offset, numbers))
    grad = p * gl.fma(ratio, factors[0], factors[1])
    if numbers.cap is not None:
        grad *= (1.0 - x / numbers.cap) * (1.0 + x / numbers.cap)
    return grad


@gluon.jit
def load_slots(slots_ptr, splits, BLOCK_SPLITS: gl.constexpr):
    """Load the words of all parts of a row, `[BLOCK_SPLITS]`, in each warp; 0 if not written."""
    SLOTS: gl.constexpr = gl.BlockedLayout([BLOCK_SPLITS // 32], [32], [THREADS // 32], [0])
    part = gl.arange(0, BLOCK_SPLITS, SLOTS)
    at, is_part = slots_ptr + part, part < splits
    return gl.load(at, mask=is_part, other=1, volatile=True), is_part


@gluon.jit
def await_shares(slots_ptr, splits, BLOCK_SPLITS: gl.constexpr):
    """Return shifts and totals of all parts, of the student and of the teacher.

    Programs wait as in primitives/gpu/sync.py. Past the last part, shifts are -inf.
    """
    words, is_part = load_slots(slots_ptr, splits, BLOCK_SPLITS)
    t_words, _ = load_slots(slots_ptr + splits, splits, BLOCK_SPLITS)
    while gl.min(((words != 0) & (t_words != 0)).to(gl.int32), axis=0) == 0:
        words, _ = load_slots(slots_ptr, splits, BLOCK_SPLITS)
        t_words, _ = load_slots(slots_ptr + splits, splits, BLOCK_SPLITS)
    shifts, totals = unpack_pair(words)
    t_shifts, t_totals = unpack_pair(t_words)
    shifts = gl.where(is_part, shifts, -float("inf"))
    t_shifts = gl.where(is_part, t_shifts, -float("inf"))
    return shifts, totals, t_shifts, t_totals


@gluon.jit
def await_sums(slots_ptr, splits, BLOCK_SPLITS: gl.constexpr):
    """Return the sums of the row's terms in both divergences."""
    words, is_part = load_slots(slots_ptr, splits, BLOCK_SPLITS)
    while gl.min((words != 0).to(gl.int32), axis=0) == 0:
        words, _ = load_slots(slots_ptr, splits, BLOCK_SPLITS)
    terms, t_terms = unpack_pair(words)
    terms, t_terms = gl.where(is_part, terms, 0.0), gl.where(is_part, t_terms, 0.0)
    return gl.reduce((terms, t_terms), 0, sum_of_pairs)


@gluon.jit
def divergence_mixture_row_kernel(
    logits,  # StridedRows of one batch in whole vectors of words, like the next two
    teacher,  # StridedRows
    dlogits,  # StridedRows
    row_factor_ptr,  # [M] the derivative of the result in each row's loss, or None for `factor`
    slots_ptr,  # [1 + 3 * M * splits] int64, zero: the counter, then three slots for each program
    loss_ptr,  # [M]
    row_split,  # RowSplit into parts of whole vectors of words
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
    DTYPE: gl.constexpr = logits.ptr.dtype.element_ty
    classes, splits, classes_per_program = row_split
    index = next_part(slots_ptr, True)
    row, split = index // splits, (index % splits).to(gl.int32)
    on_row = gl.to_tensor(factor).to(gl.float32)
    if row_factor_ptr is not None:
        on_row = gl.load(row_factor_ptr + row).to(gl.float32)
    inverse = reciprocal(gl.to_tensor(temperature).to(gl.float32))
    first = split * classes_per_program
    numbers = Numbers(
        gl.to_tensor(softcap).to(gl.float32) if HAS_SOFTCAP else None,
        gl.to_tensor(beta).to(gl.float32),
        LOG2E * inverse,
        gl.minimum(classes_per_program, classes - first) // 2,
    )
    d_ptr = words_of_row(dlogits, row, first)
    loss = on_row * 0.0
    if on_row == 0.0:
        for k in gl.static_range(BLOCKS):
            store_block(d_ptr, gl.zeros([THREADS, VEC], gl.int32, LAYOUT), numbers.words, k)
    else:
        x_ptr, t_ptr = words_of_row(logits, row, first), words_of_row(teacher, row, first)
        grad = on_row * inverse
        row_slots = slots_ptr + 1 + row * 3 * splits
        student = load_part(x_ptr, numbers.words, BLOCKS)
        teacher_part = load_part(t_ptr, numbers.words, BLOCKS)
        share, t_share = merged_totals(
            *shift_and_total(student, numbers, DTYPE),
            *shift_and_total(teacher_part, numbers, DTYPE),
        )
        store_pair(row_slots, split, *share)
        store_pair(row_slots + splits, split, *t_share)
        share, t_share = merged_totals(*await_shares(row_slots, splits, BLOCK_SPLITS))
        of_row, t_of_row = normalizer(*share), normalizer(*t_share)
        ratios = new_ratios(BLOCKS)
        total = gl.zeros([THREADS], gl.float32, gl.SliceLayout(1, LAYOUT))
        t_total, weight = total, numbers.weight
        scales = ((1.0 - weight) * gl.exp2(-of_row.lost), weight * gl.exp2(-t_of_row.lost))
        for k in gl.static_range(BLOCKS):
            x = logits_of(student[k], numbers.cap, DTYPE)
            t = logits_of(teacher_part[k], numbers.cap, DTYPE)
            low = ratios_of_classes(x[0], t[0], of_row, t_of_row, scales, numbers)
            high = ratios_of_classes(x[1], t[1], of_row, t_of_row, scales, numbers)
            ratios[2 * k].store(low[0])
            ratios[2 * k + 1].store(high[0])
            total += lane_sum(low[1] + high[1], k, numbers, BLOCKS)
            t_total += lane_sum(low[2] + high[2], k, numbers, BLOCKS)
        terms = gl.reduce((total, t_total), 0, sum_of_pairs)
        store_pair(row_slots + 2 * splits, split, *terms)
        total, t_total = await_sums(row_slots + 2 * splits, splits, BLOCK_SPLITS)
        divergence = divergence_of_sum(total, of_row)
        t_divergence = divergence_of_sum(t_total, t_of_row)
        scale = grad * (1.0 - weight) * LN2 * gl.exp2(-of_row.lost)
        factors = (scale, -scale * (of_row.lost + divergence))
        for k in gl.static_range(BLOCKS):
            x = logits_of(student[k], numbers.cap, DTYPE)
            ratio, next_ratio = ratios[2 * k].load(LAYOUT), ratios[2 * k + 1].load(LAYOUT)
            low = gradient_of_classes(x[0], ratio, factors, of_row, numbers)
            high = gradient_of_classes(x[1], next_ratio, factors, of_row, numbers)
            store_block(d_ptr, words_of(low, high, DTYPE), numbers.words, k)
        loss = (weight * t_divergence + (1.0 - weight) * divergence) * LN2
    gl.store(loss_ptr + row, loss, mask=split == 0)
