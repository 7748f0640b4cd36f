"""Kernels of the terms of a distillation loss: two scans of both rows, and the gradient.

Rows may be all logits or those of a chunk of classes. The rows are read, and their exponents kept
to base 2, as those of divergences are; see ops/divergence/gpu/rows.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, finite_shift, log_exact, reciprocal
from ....primitives.gpu.memory import aligned_start
from ....primitives.gpu.reduce import (
    LOADED_SEGMENTS,
    NOT_FOUND,
    is_last_program,
    load_capped,
    load_segment,
    max_of_lanes,
    of_lanes,
    store_segment,
    sum_of_lanes,
)
from ...divergence.gpu.rows import (
    MIXTURE,
    NO_LOG,
    NOTHING,
    READ_AGAIN,
    REVERSE,
    SMALLEST,
    PairPart,
    PairShare,
    at_least,
    exponent,
    load_both,
    locate_pair,
    moved_share,
    shift_of,
    unmasked_end,
)
from ..common import STATE_WORDS

WORDS = tl.constexpr(STATE_WORDS)  # the stride of the rows of `RowState`
TERMS = tl.constexpr(5)


class Share(NamedTuple):
    """The statistics of both rows over some classes, `[1, LANES]` of the lanes, or numbers.

    The first seven are those of `RowState`, with exponents to base 2, and 0 where no term needs
    them.

    Fields:
        block: the first block of classes that has the teacher's maximum.
    """

    maximum: Any
    total: Any
    plain: Any
    t_maximum: Any
    t_total: Any
    forward: Any
    reverse: Any
    block: Any


@triton.jit
def moved(share, maximum, t_maximum, part, PLAIN: tl.constexpr, NAMED: tl.constexpr):
    """Return a share relative to other maxima, which are at least its own."""
    statistics = (share.maximum, share.total, share.t_maximum, share.t_total)
    maxima = (maximum, t_maximum, part)
    pair = moved_share(PairShare(*statistics, share.forward), *maxima, 0 if NAMED.kl else MIXTURE)
    plain, reverse = share.plain, share.reverse
    if NAMED.reverse_kl:
        reverse = moved_share(PairShare(*statistics, reverse), *maxima, REVERSE).weighted
    if PLAIN:
        plain *= tl.exp2((share.maximum - finite_shift(maximum)) * LOG2E)
    totals = (pair.total, plain, t_maximum, pair.t_total)
    return Share(maximum, *totals, pair.weighted, reverse, share.block)


@triton.jit
def add_block(
    share,
    part,
    start,
    UNMASKED: tl.constexpr,
    PLAIN: tl.constexpr,
    NAMED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add one block of classes to the statistics of the lanes."""
    _, x, t = load_both(part, start, UNMASKED, NOTHING, READ_AGAIN, BLOCK, TILE)
    maximum = tl.maximum(share.maximum, max_of_lanes(x))
    t_maximum = tl.maximum(share.t_maximum, max_of_lanes(t))
    block = tl.where(t_maximum > share.t_maximum, start // TILE.block, share.block).to(tl.int32)
    share = moved(share, maximum, t_maximum, part, PLAIN, NAMED)
    a = exponent(x, of_lanes(shift_of(maximum, part)), part)
    b = exponent(t, of_lanes(shift_of(t_maximum, part)), part)
    e, f = tl.exp2(a), tl.exp2(b)
    dtype: tl.constexpr = share.total.dtype
    plain, forward, reverse = share.plain, share.forward, share.reverse
    if PLAIN:
        plain += sum_of_lanes(tl.exp2((x - of_lanes(finite_shift(maximum))) * LOG2E), dtype)
    # A class of probability 0 counts as 0, even with infinite logits.
    if NAMED.kl:
        forward += sum_of_lanes(tl.where(f == 0.0, 0.0, f * (b - a)), dtype)
    if NAMED.reverse_kl:
        reverse += sum_of_lanes(tl.where(e == 0.0, 0.0, e * (a - b)), dtype)
    total = share.total + sum_of_lanes(e, dtype)
    t_total = share.t_total + sum_of_lanes(f, dtype)
    return Share(maximum, total, plain, t_maximum, t_total, forward, reverse, block)


@triton.jit
def no_share(TILE: tl.constexpr, ACC_DTYPE: tl.constexpr, SUM_DTYPE: tl.constexpr):
    """Return the statistics of the lanes over no classes, with sums of a dtype."""
    maximum = tl.full([1, TILE.lanes], -float("inf"), ACC_DTYPE)
    zero = tl.full([1, TILE.lanes], 0.0, SUM_DTYPE)
    block = tl.full([1, TILE.lanes], 0, tl.int32)
    return Share(maximum, zero, zero, maximum, zero, zero, zero, block)


@triton.jit
def scan_part(
    part, PLAIN: tl.constexpr, NAMED: tl.constexpr, TILE: tl.constexpr, SUM_DTYPE: tl.constexpr
):
    """Return the statistics of the lanes over a part, with sums of a dtype."""
    # Blocks at the end are smaller: a vector of each lane, or the same number of small vectors.
    TAIL: tl.constexpr = min(TILE.block, TILE.lanes * max(TILE.vector, 4))
    share, unmasked = (
        no_share(TILE, part.log2_scale.dtype, SUM_DTYPE),
        unmasked_end(part, TILE.block),
    )
    for start in range(part.first, unmasked, TILE.block):
        share = add_block(share, part, start, True, PLAIN, NAMED, TILE.block, TILE)
    for start in range(unmasked, part.last, TAIL):
        share = add_block(share, part, start, False, PLAIN, NAMED, TAIL, TILE)
    return share


@triton.jit
def joined(share, found, part, PLAIN: tl.constexpr, NAMED: tl.constexpr):
    """Return one share of two, of which the first has sums in fp64 and earlier classes."""
    maximum = tl.maximum(share.maximum, found.maximum)
    t_maximum = tl.maximum(share.t_maximum, found.t_maximum)
    block = tl.where(found.t_maximum > share.t_maximum, found.block, share.block)
    share = moved(share, maximum, t_maximum, part, PLAIN, NAMED)
    found = moved(found, maximum, t_maximum, part, PLAIN, NAMED)
    return Share(
        maximum,
        share.total + found.total.to(tl.float64),
        share.plain + found.plain.to(tl.float64),
        t_maximum,
        share.t_total + found.t_total.to(tl.float64),
        share.forward + found.forward.to(tl.float64),
        share.reverse + found.reverse.to(tl.float64),
        block,
    )


@triton.jit
def merged(shares, part, PLAIN: tl.constexpr, NAMED: tl.constexpr):
    """Return one share of those of the lanes."""
    maximum, t_maximum = tl.max(shares.maximum), tl.max(shares.t_maximum)
    block = tl.min(tl.where(shares.t_maximum == t_maximum, shares.block, NOT_FOUND))
    share = moved(shares, maximum, t_maximum, part, PLAIN, NAMED)
    totals = (tl.sum(share.total), tl.sum(share.plain), t_maximum, tl.sum(share.t_total))
    return Share(maximum, *totals, tl.sum(share.forward), tl.sum(share.reverse), block)


@triton.jit
def lowest_argmax(part, share, BLOCK: tl.constexpr):
    """Return the lowest class that has the teacher's maximum, from one more read of its block.

    If all logits are NaN, it is the last class.
    """
    column = share.block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < part.last
    t = load_capped(part.t_ptr + column * part.t_stride, mask, part.cap, share.t_maximum.dtype)
    sought = share.t_maximum
    if part.cap is not None:  # Another copy of the code may round a tanh differently.
        sought = tl.max(t)
    return tl.min(tl.where(mask & (t == sought), column, part.last - 1))


@triton.jit
def load_share(state, row, seen, UNIT: tl.constexpr, SUM_DTYPE: tl.constexpr):
    """Load the statistics of a row, with sums of a dtype; those of no classes if not `seen`.

    The sums of exponents are to base 2 for the unit log2(e), and natural for 1.
    """
    at = row * WORDS
    return Share(
        tl.load(state.maximum + at, mask=seen, other=-float("inf")),
        tl.load(state.sumexp + at, mask=seen, other=0.0).to(SUM_DTYPE),
        tl.load(state.plain_sumexp + at, mask=seen, other=0.0).to(SUM_DTYPE),
        tl.load(state.teacher_maximum + at, mask=seen, other=-float("inf")),
        tl.load(state.teacher_sumexp + at, mask=seen, other=0.0).to(SUM_DTYPE),
        tl.load(state.forward + at, mask=seen, other=0.0).to(SUM_DTYPE) * UNIT,
        tl.load(state.reverse + at, mask=seen, other=0.0).to(SUM_DTYPE) * UNIT,
        0,
    )


@triton.jit
def store_share(state, share, plain, row, stores):
    """Store the statistics of a row, without a mixture."""
    dtype: tl.constexpr = state.maximum.dtype.element_ty
    at = row * WORDS
    tl.store(state.maximum + at, share.maximum, mask=stores)
    tl.store(state.sumexp + at, share.total.to(dtype), mask=stores)
    tl.store(state.plain_sumexp + at, plain.to(dtype), mask=stores)
    tl.store(state.teacher_maximum + at, share.t_maximum, mask=stores)
    tl.store(state.teacher_sumexp + at, share.t_total.to(dtype), mask=stores)
    tl.store(state.forward + at, (share.forward * LN2).to(dtype), mask=stores)
    tl.store(state.reverse + at, (share.reverse * LN2).to(dtype), mask=stores)
    for i in tl.static_range(8, WORDS):
        tl.store(state.maximum + at + i, 0.0, mask=stores)


@triton.jit
def label_of(target_ptr, row, vocabulary, ignore_index):
    """Return the label of a row, whether it counts, and whether it counts and is no class."""
    label = tl.load(target_ptr + row).to(tl.int64)
    valid = label != ignore_index
    return label, valid, valid & ((label < 0) | (label >= vocabulary))


@triton.jit(do_not_specialize=["first", "vocabulary", "ignore_index"])
def distillation_accumulate_kernel(
    logits,  # StridedRows of one batch, from the class `first` on
    teacher,  # StridedRows of one batch
    target_ptr,  # [M] int64, or None without the term `hard`
    terms_ptr,  # [M, 5]
    state,  # RowState, [M] each, WORDS apart
    argmax_ptr,  # [M] int64
    segments,  # Segments
    classes,
    first,  # the number of classes that the state has seen, which is not read if that is 0
    vocabulary,  # the number of all classes
    temperature: tl.float64,
    softcap: tl.float64,
    ignore_index,
    PLAIN: tl.constexpr,  # whether `hard` needs a sum of its own, as the temperature is not 1
    NAMED: tl.constexpr,  # Terms: which are computed
    HAS_SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Update the state of two rows, and the terms that need one read, with these classes."""
    ACC_DTYPE: tl.constexpr = state.maximum.dtype.element_ty
    row = (tl.program_id(0) // segments.programs).to(tl.int64)
    split = tl.program_id(0) % segments.programs
    cap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    pair = locate_pair(logits, teacher, row, 0, classes, 0.0, temperature, ACC_DTYPE)
    part = PairPart(*pair, logits.column, teacher.column, cap)  # type: ignore[call-arg]
    stores = True
    if not TILE.has_segments:
        share = scan_part(part, PLAIN, NAMED, TILE, tl.float64)
    else:
        KEPT: tl.constexpr = (True, True, PLAIN, True, True, NAMED.kl, NAMED.reverse_kl, True)
        share = no_share(TILE, ACC_DTYPE, tl.float64)
        start_of_share = split.to(classes.dtype) * segments.share
        end_of_share = tl.minimum(start_of_share + segments.share, segments.number)
        for s in range(start_of_share, end_of_share):
            start = s * segments.size
            end = start + tl.minimum(segments.size, classes - start)
            own = locate_pair(logits, teacher, row, start, end, 0.0, temperature, ACC_DTYPE)
            piece = PairPart(*own, logits.column, teacher.column, cap)  # type: ignore[call-arg]
            found = scan_part(piece, PLAIN, NAMED, TILE, ACC_DTYPE)
            if segments.slots is None:
                share = joined(share, found, part, PLAIN, NAMED)
            else:
                store_segment(found, segments, row, s, KEPT)
        if segments.slots is not None:
            stores = is_last_program(segments, row)
            empty = no_share(TILE, ACC_DTYPE, ACC_DTYPE)
            for s in range(0, tl.where(stores, segments.number, 0), LOADED_SEGMENTS):
                for i in tl.static_range(LOADED_SEGMENTS):
                    found = load_segment(empty, segments, row, s + i, KEPT)
                    share = joined(share, Share(*found), part, PLAIN, NAMED)
    share = merged(share, part, PLAIN, NAMED)
    before = load_share(state, row, first > 0, LOG2E, tl.float64)
    is_higher = (first == 0) | (share.t_maximum > before.t_maximum)
    argmax = first + lowest_argmax(part, share, TILE.block)
    tl.store(argmax_ptr + row, argmax, mask=is_higher & stores)
    share = joined(before, share, part, PLAIN, NAMED)
    hard = share.total * 0.0
    kl, reverse = hard, hard
    plain = share.plain if PLAIN else share.total
    if NAMED.hard:
        label, valid, invalid = label_of(target_ptr, row, vocabulary, ignore_index)
        inside = (label >= first) & (label < first + classes)
        x_ptr = part.x_ptr + (label - first) * part.x_stride
        x = load_capped(x_ptr, inside, cap, ACC_DTYPE)
        x = tl.maximum(x, tl.load(state.label + row * WORDS, mask=first > 0, other=-float("inf")))
        tl.store(state.label + row * WORDS, x, mask=stores)
        hard = tl.log(plain) + (finite_shift(share.maximum) - x).to(tl.float64)
        hard = tl.where(invalid, float("nan"), tl.where(valid, hard, 0.0))
    log_ratio = tl.log(share.total / share.t_total)
    if NAMED.kl:
        kl = share.forward * LN2 / share.t_total + log_ratio
    if NAMED.reverse_kl:
        reverse = share.reverse * LN2 / share.total - log_ratio
    store_share(state, share, plain, row, stores)
    terms_ptr += row * TERMS
    tl.store(terms_ptr, hard.to(ACC_DTYPE), mask=stores)
    tl.store(terms_ptr + 1, kl.to(ACC_DTYPE), mask=stores)
    tl.store(terms_ptr + 2, reverse.to(ACC_DTYPE), mask=stores)
    tl.store(terms_ptr + 3, 0.0, mask=stores)
    tl.store(terms_ptr + 4, 0.0, mask=stores)


class Normalized(NamedTuple):
    """Some classes of both rows: exponents to base 2, and probabilities, which the sums divide."""

    a: Any
    b: Any
    p: Any
    q: Any


@triton.jit
def normalized(x, t, part, share):
    """Return some classes of both rows as `Normalized`, from the logits of both."""
    a = exponent(x, shift_of(share.maximum, part), part)
    b = exponent(t, shift_of(share.t_maximum, part), part)
    p, q = tl.exp2(a) * reciprocal(share.total), tl.exp2(b) * reciprocal(share.t_total)
    return Normalized(a, b, p, q)


@triton.jit
def sign_of(p, q):
    """Return the sign of p - q."""
    return tl.where(p > q, 1.0, tl.where(p < q, -1.0, 0.0))


@triton.jit
def log_of_mixture(of, part):
    """Return the base-2 logarithm of the mixture, with the smallest normal number below that."""
    return tl.log2(at_least(part.weight * of.q + (1.0 - part.weight) * of.p, SMALLEST))


@triton.jit
def add_mixture(
    sums, part, share, start, UNMASKED: tl.constexpr, NAMED: tl.constexpr, TILE: tl.constexpr
):
    """Add one block of classes to the lanes' last four fields of `RowState`, to base 2."""
    _, x, t = load_both(part, start, UNMASKED, NOTHING, READ_AGAIN, TILE.block, TILE)
    student, teacher, distance, sign = sums
    of = normalized(x, t, part, share)
    dtype: tl.constexpr = student.dtype
    if NAMED.jsd:
        log_m = log_of_mixture(of, part)
        log_p = at_least(of.a - log_exact(share.total) * LOG2E, NO_LOG)
        log_q = at_least(of.b - log_exact(share.t_total) * LOG2E, NO_LOG)
        student += sum_of_lanes(of.p * (log_p - log_m), dtype)
        teacher += sum_of_lanes(of.q * (log_q - log_m), dtype)
    if NAMED.tv:
        distance += sum_of_lanes(tl.abs(of.p - of.q), dtype)
        sign += sum_of_lanes(of.p * sign_of(of.p, of.q), dtype)
    return student, teacher, distance, sign


@triton.jit
def mixture_of_part(part, share, NAMED: tl.constexpr, TILE: tl.constexpr):
    """Return the lanes' last four fields of `RowState` over a part, to base 2."""
    zeros = tl.full([1, TILE.lanes], 0.0, part.log2_scale.dtype)
    sums, unmasked = (zeros, zeros, zeros, zeros), unmasked_end(part, TILE.block)
    for start in range(part.first, unmasked, TILE.block):
        sums = add_mixture(sums, part, share, start, True, NAMED, TILE)
    for start in range(unmasked, part.last, TILE.block):
        sums = add_mixture(sums, part, share, start, False, NAMED, TILE)
    return sums


@triton.jit
def added(sums, found):
    """Return four sums in fp64 with others of the same lanes added."""
    a, b, c, d = sums
    e, f, g, h = found
    a, b = a + e.to(tl.float64), b + f.to(tl.float64)
    return a, b, c + g.to(tl.float64), d + h.to(tl.float64)


@triton.jit(do_not_specialize=["first"])
def distillation_mixture_kernel(
    logits,  # StridedRows of one batch
    teacher,  # StridedRows of one batch
    terms_ptr,  # [M, 5]
    state,  # RowState, [M] each, WORDS apart
    segments,  # Segments
    classes,
    first,  # the number of classes that the last four fields have seen
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    NAMED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Add these classes to the terms that need the normalisers of both rows."""
    ACC_DTYPE: tl.constexpr = state.maximum.dtype.element_ty
    row = (tl.program_id(0) // segments.programs).to(tl.int64)
    split = tl.program_id(0) % segments.programs
    cap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    pair = locate_pair(logits, teacher, row, 0, classes, beta, temperature, ACC_DTYPE)
    part = PairPart(*pair, logits.column, teacher.column, cap)  # type: ignore[call-arg]
    share = load_share(state, row, True, 1.0, ACC_DTYPE)
    zeros, stores = tl.full([1, TILE.lanes], 0.0, ACC_DTYPE), True
    zero = zeros.to(tl.float64)
    sums = (zero, zero, zero, zero)
    if not TILE.has_segments:
        sums = added(sums, mixture_of_part(part, share, NAMED, TILE))
    else:
        KEPT: tl.constexpr = (NAMED.jsd, NAMED.jsd, NAMED.tv, NAMED.tv)
        start_of_share = split.to(classes.dtype) * segments.share
        end_of_share = tl.minimum(start_of_share + segments.share, segments.number)
        for s in range(start_of_share, end_of_share):
            start = s * segments.size
            end = start + tl.minimum(segments.size, classes - start)
            own = locate_pair(logits, teacher, row, start, end, beta, temperature, ACC_DTYPE)
            piece = PairPart(*own, logits.column, teacher.column, cap)  # type: ignore[call-arg]
            found = mixture_of_part(piece, share, NAMED, TILE)
            if segments.slots is None:
                sums = added(sums, found)
            else:
                store_segment(found, segments, row, s, KEPT)
        if segments.slots is not None:
            stores = is_last_program(segments, row)
            for s in range(0, tl.where(stores, segments.number, 0), LOADED_SEGMENTS):
                for i in tl.static_range(LOADED_SEGMENTS):
                    empty = (zeros, zeros, zeros, zeros)
                    found = load_segment(empty, segments, row, s + i, KEPT)
                    sums = added(sums, found)
    at, seen = row * WORDS, first > 0
    student, teacher_sum, distance, sign = sums
    of_student = (tl.sum(student) * LN2).to(ACC_DTYPE)
    of_teacher = (tl.sum(teacher_sum) * LN2).to(ACC_DTYPE)
    of_student += tl.load(state.student + at, mask=seen, other=0.0)
    of_teacher += tl.load(state.teacher + at, mask=seen, other=0.0)
    total = tl.sum(distance).to(ACC_DTYPE)
    total += tl.load(state.distance + at, mask=seen, other=0.0)
    signs = tl.sum(sign).to(ACC_DTYPE) + tl.load(state.sign + at, mask=seen, other=0.0)
    tl.store(state.student + at, of_student, mask=stores)
    tl.store(state.teacher + at, of_teacher, mask=stores)
    tl.store(state.distance + at, total, mask=stores)
    tl.store(state.sign + at, signs, mask=stores)
    jsd = part.weight * of_teacher + (1.0 - part.weight) * of_student
    tl.store(terms_ptr + row * TERMS + 3, jsd, mask=stores)
    tl.store(terms_ptr + row * TERMS + 4, 0.5 * total, mask=stores)


@triton.jit
def times(factor, values):
    """Return the product, 0 for a factor of 0 and any values."""
    return tl.where(factor == 0.0, 0.0, factor * values)


@triton.jit(do_not_specialize=["first", "vocabulary", "ignore_index"])
def distillation_gradient_kernel(
    grad_ptr,  # [M, 5]
    logits,  # StridedRows of one batch, from the class `first` on
    teacher,  # StridedRows of one batch
    target_ptr,  # [M] int64, or None without the term `hard`
    state,  # RowState, [M] each, WORDS apart
    dlogits,  # StridedRows of adjacent classes; may be the logits
    classes,
    first,
    vocabulary,  # the number of all classes
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    ignore_index,
    PLAIN: tl.constexpr,
    NAMED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Compute a block of the gradient of the student's logits with two reads and one write."""
    ACC_DTYPE: tl.constexpr = state.maximum.dtype.element_ty
    blocks = tl.cdiv(classes, TILE.block)
    row, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * TILE.block
    cap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    pair = locate_pair(logits, teacher, row, 0, classes, beta, temperature, ACC_DTYPE)
    part = PairPart(*pair, logits.column, teacher.column, cap)  # type: ignore[call-arg]
    v, x, t = load_both(part, start, False, NOTHING, "", TILE.block, TILE)
    share, at = load_share(state, row, True, 1.0, ACC_DTYPE), row * WORDS
    of, active = normalized(x, t, part, share), tl.zeros([], ACC_DTYPE)
    grad, grad_ptr = tl.zeros_like(x), grad_ptr + row * TERMS
    inverse = reciprocal(tl.full([], temperature, ACC_DTYPE))
    if NAMED.kl:
        on_kl = tl.load(grad_ptr + 1).to(ACC_DTYPE) * inverse
        active += tl.abs(on_kl)
        grad += times(on_kl, of.p - of.q)
    if NAMED.reverse_kl:
        on_reverse = tl.load(grad_ptr + 2).to(ACC_DTYPE) * inverse
        active += tl.abs(on_reverse)
        # The logarithms of the sums cancel between the ratio of a class and its mean.
        mean = share.reverse * reciprocal(share.total)
        terms = of.p * ((of.a - of.b) * LN2 - mean)
        grad += times(on_reverse, tl.where(of.p == 0.0, 0.0, terms))
    if NAMED.jsd:
        on_jsd = tl.load(grad_ptr + 3).to(ACC_DTYPE) * inverse
        active += tl.abs(on_jsd)
        log_p = at_least(of.a - log_exact(share.total) * LOG2E, NO_LOG)
        ratio = (log_p - log_of_mixture(of, part)) * LN2 - tl.load(state.student + at)
        grad += times(on_jsd * (1.0 - part.weight), of.p * ratio)
    if NAMED.tv:
        on_tv = tl.load(grad_ptr + 4).to(ACC_DTYPE) * inverse
        active += tl.abs(on_tv)
        grad += times(0.5 * on_tv, of.p * (sign_of(of.p, of.q) - tl.load(state.sign + at)))
    if NAMED.hard:
        label, valid, invalid = label_of(target_ptr, row, vocabulary, ignore_index)
        on_hard = tl.where(valid, tl.load(grad_ptr).to(ACC_DTYPE), 0.0)
        on_hard = tl.where(invalid & (on_hard != 0.0), float("nan"), on_hard)
        active += tl.abs(on_hard)
        p = of.p
        if PLAIN:
            below = (x - finite_shift(share.maximum)) * LOG2E
            p = tl.exp2(below) * reciprocal(share.plain)
        grad += times(on_hard, p - tl.where(v + first == label, 1.0, 0.0))
    if cap is not None:
        grad *= (1.0 - x / cap) * (1.0 + x / cap)
    # The padding of a row becomes 0, which products on some devices read.
    grad = tl.where(active == 0.0, 0.0, tl.where(v < classes, grad, 0.0))
    ptrs = dlogits.ptr + aligned_start(row * dlogits.row, TILE.vector) + v
    is_stored = v // TILE.vector * TILE.vector < classes
    tl.store(ptrs, grad.to(dlogits.ptr.dtype.element_ty), mask=is_stored)
