"""Kernels of divergences: statistics of two rows, the divergence of the mixture, the gradient.

Rows may be all logits or those of a chunk of classes. The device functions serve the kernel of one
pass too. All exponents are of base 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    LN2,
    LOG2E,
    UNFUSED,
    apply_softcap,
    finite_shift,
    log_exact,
    reciprocal,
    rounded_product,
)
from ....primitives.gpu.memory import aligned_start, load_vectors
from ....primitives.gpu.reduce import (
    LOADED_SEGMENTS,
    is_last_program,
    load_segment,
    max_of_lanes,
    of_lanes,
    store_segment,
    sum_of_lanes,
)

REVERSE, MIXTURE = tl.constexpr(1), tl.constexpr(2)
NOTHING = tl.constexpr(-float("inf"))  # the logit of a class that there is not
FINITE = tl.constexpr(-1e37)  # the same where logits are finite
# Hints for the L1 cache: logits stay until their last reading, and are the first to leave after it.
# Without hints, lines that nothing reads again displace those that are about to be read again.
READ_AGAIN = tl.constexpr("evict_last")
READ_LAST = tl.constexpr("evict_first")
SMALLEST = tl.constexpr(2.0**-126)
NO_LOG = tl.constexpr(-1000.0)  # the base-2 logarithm of a probability of 0


class RowSplit(NamedTuple):
    """The classes of a row, the programs that share it, and the classes of each but the last."""

    classes: Any
    splits: Any
    classes_per_program: Any


class PairStatistics(NamedTuple):
    """Maximum and sum of exponentials of the student's row and of the teacher's, `[M]`."""

    maximum: Any
    total: Any
    teacher_maximum: Any
    teacher_total: Any


class PairPart(NamedTuple):
    """A part of both rows, and the options of the call.

    Fields:
        x_ptr, t_ptr: the first logits of the rows of student and teacher.
        first, last: the classes of the part.
        weight: beta.
        log2_scale: the factor of logits in exponents.
        x_stride, t_stride: the strides of both rows over classes.
        cap: the soft-cap, or None.
    """

    x_ptr: Any
    t_ptr: Any
    first: Any
    last: Any
    weight: Any
    log2_scale: Any
    x_stride: Any
    t_stride: Any
    cap: Any


class PairShare(NamedTuple):
    """The statistics of both rows over some classes, `[1, LANES]` of the lanes, or numbers.

    A class has the exponent a = x * log2_scale - shift, where the shift is the rounded product of
    maximum and log2_scale. It stands in each exponent of the row, so the rounding cancels in
    probabilities.

    Fields:
        maximum, total: the maximum of x, and the sum of the exponentials of a.
        t_maximum, t_total: those of the teacher.
        weighted: for the forward KL, the sum of exp2(b) * (b - a) with the teacher's exponents b;
            for the reverse KL, of exp2(a) * (a - b); otherwise 0.
    """

    maximum: Any
    total: Any
    t_maximum: Any
    t_total: Any
    weighted: Any


@triton.jit
def locate_pair(logits, teacher, row, first, last, beta, temperature, ACC_DTYPE: tl.constexpr):
    """Return the first fields of a `PairPart`: a function can return no None and no constant."""
    return (
        logits.ptr + row * logits.row,
        teacher.ptr + row * teacher.row,
        first,
        last,
        tl.full([], beta, ACC_DTYPE),
        reciprocal(tl.full([], temperature, ACC_DTYPE)) * LOG2E,
    )


@triton.jit
def max_of_pairs(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def sum_of_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def load_both(
    part,
    start,
    UNMASKED: tl.constexpr,
    FILL: tl.constexpr,
    POLICY: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the classes of a block of the part, and the soft-capped logits of both rows.

    Those past the last class of the part are FILL.
    """
    x_ptrs, t_ptrs = part.x_ptr + tl.arange(0, 1), part.t_ptr + tl.arange(0, 1)
    at = (start, part.last, tl.full([1], True, tl.int1))
    x, v, mask = load_vectors(x_ptrs, part.x_stride, *at, not UNMASKED, POLICY, BLOCK, TILE)
    t, _, _ = load_vectors(t_ptrs, part.t_stride, *at, not UNMASKED, POLICY, BLOCK, TILE)
    x = apply_softcap(x.to(part.log2_scale.dtype), part.cap)
    t = apply_softcap(t.to(part.log2_scale.dtype), part.cap)
    if not UNMASKED:
        x, t = tl.where(mask, x, FILL), tl.where(mask, t, FILL)
    return v, x, t


@triton.jit
def exponent(x, shift, part):
    """Return the exponents of classes, from their logits and the finite shift of their row."""
    if UNFUSED:  # In fp64 the product has all digits, as in a multiply-add.
        return (x.to(tl.float64) * part.log2_scale - shift).to(x.dtype)
    else:
        return tl.fma(x, part.log2_scale, -shift)


@triton.jit
def shift_of(maximum, part):
    """Return the shift of exponents, 0 for the maximum -inf."""
    return rounded_product(finite_shift(maximum), part.log2_scale)


@triton.jit
def moved_share(share, maximum, t_maximum, part, KIND: tl.constexpr):
    """Return a share relative to other maxima, which are at least its own."""
    moved = rounded_product(share.maximum, part.log2_scale) - shift_of(maximum, part)
    t_moved = rounded_product(share.t_maximum, part.log2_scale) - shift_of(t_maximum, part)
    scale, t_scale = tl.exp2(moved), tl.exp2(t_moved)
    weighted = share.weighted
    # Without classes a row has no shift. An infinite sum stays, unless its probabilities vanish.
    if KIND == REVERSE:
        apart = finite_shift(moved) - finite_shift(t_moved)
        weighted = tl.where(scale == 0.0, 0.0, scale * (weighted + share.total * apart))
    elif KIND != MIXTURE:
        apart = finite_shift(t_moved) - finite_shift(moved)
        weighted = tl.where(t_scale == 0.0, 0.0, t_scale * (weighted + share.t_total * apart))
    return PairShare(maximum, share.total * scale, t_maximum, share.t_total * t_scale, weighted)


@triton.jit
def unmasked_end(part, BLOCK: tl.constexpr):
    """Return the end of the blocks of a part that need no mask."""
    return part.first + tl.maximum(part.last - part.first, 0) // BLOCK * BLOCK


@triton.jit
def add_block(
    share,
    part,
    start,
    UNMASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add one block of classes to the statistics of the lanes, whose maxima CAREFUL updates."""
    FILL: tl.constexpr = NOTHING if CAREFUL else FINITE
    _, x, t = load_both(part, start, UNMASKED, FILL, READ_AGAIN, BLOCK, TILE)
    if CAREFUL:
        maximum = tl.maximum(share.maximum, max_of_lanes(x))
        t_maximum = tl.maximum(share.t_maximum, max_of_lanes(t))
        share = moved_share(share, maximum, t_maximum, part, KIND)
    a = exponent(x, of_lanes(shift_of(share.maximum, part)), part)
    b = exponent(t, of_lanes(shift_of(share.t_maximum, part)), part)
    e, t_e = tl.exp2(a), tl.exp2(b)
    dtype: tl.constexpr = share.total.dtype
    total = share.total + sum_of_lanes(e, dtype)
    t_total = share.t_total + sum_of_lanes(t_e, dtype)
    weighted = share.weighted
    if KIND != MIXTURE:
        weight = e if KIND == REVERSE else t_e
        terms = weight * (a - b if KIND == REVERSE else b - a)
        if CAREFUL:  # A class of probability 0 counts as 0, even with infinite logits.
            terms = tl.where(weight == 0.0, 0.0, terms)
        weighted += sum_of_lanes(terms, dtype)
    return PairShare(share.maximum, total, share.t_maximum, t_total, weighted)


@triton.jit
def no_share(TILE: tl.constexpr, ACC_DTYPE: tl.constexpr, SUM_DTYPE: tl.constexpr):
    """Return the statistics of the lanes over no classes, with sums of a dtype."""
    maximum = tl.full([1, TILE.lanes], -float("inf"), ACC_DTYPE)
    zero = tl.full([1, TILE.lanes], 0.0, SUM_DTYPE)
    return PairShare(maximum, zero, maximum, zero, zero)


@triton.jit
def scan_part(
    part,
    CAREFUL: tl.constexpr,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
):
    """Return the statistics of the lanes over a part, with sums of a dtype."""
    # Blocks at the end are smaller: a vector of each lane, or the same number of small vectors.
    TAIL: tl.constexpr = min(TILE.block, TILE.lanes * max(TILE.vector, 4))
    share = no_share(TILE, part.log2_scale.dtype, SUM_DTYPE)
    if not CAREFUL:
        first, zero = part.first, share.total
        _, x, t = load_both(part, first, False, NOTHING, READ_AGAIN, TAIL, TILE)
        share = PairShare(max_of_lanes(x), zero, max_of_lanes(t), zero, zero)
    unmasked = unmasked_end(part, TILE.block)
    for start in range(part.first, unmasked, TILE.block):
        share = add_block(share, part, start, True, CAREFUL, KIND, TILE.block, TILE)
    for start in range(unmasked, part.last, TAIL):
        share = add_block(share, part, start, False, CAREFUL, KIND, TAIL, TILE)
    return share


@triton.jit
def joined_shares(share, found, part, KIND: tl.constexpr):
    """Return one `PairShare` of two, of which the first has sums in fp64."""
    maximum = tl.maximum(share.maximum, found.maximum)
    t_maximum = tl.maximum(share.t_maximum, found.t_maximum)
    share = moved_share(share, maximum, t_maximum, part, KIND)
    found = moved_share(found, maximum, t_maximum, part, KIND)
    total = share.total + found.total.to(tl.float64)
    t_total = share.t_total + found.t_total.to(tl.float64)
    weighted = share.weighted + found.weighted.to(tl.float64)
    return PairShare(maximum, total, t_maximum, t_total, weighted)


@triton.jit
def merged_shares(shares, part, KIND: tl.constexpr):
    """Return one `PairShare` of several."""
    maximum, t_maximum = tl.max(shares.maximum), tl.max(shares.t_maximum)
    moved = moved_share(shares, maximum, t_maximum, part, KIND)
    total, t_total, weighted = tl.sum(moved.total), tl.sum(moved.t_total), 0.0
    if KIND != MIXTURE:
        weighted = tl.sum(moved.weighted)
    return PairShare(maximum, total, t_maximum, t_total, weighted)


@triton.jit
def divergence_of_share(share, KIND: tl.constexpr):
    """Return the KL of a row from its statistics, in fp64."""
    total, t_total = share.total.to(tl.float64), share.t_total.to(tl.float64)
    mean, ratio = share.weighted.to(tl.float64) * 0.6931471805599453, t_total / total
    if KIND == REVERSE:
        return mean / total + tl.log(ratio)
    else:
        return mean / t_total - tl.log(ratio)


@triton.jit
def at_least(x, bound):
    """Return the greater of x and a bound, and NaN for NaN."""
    return tl.maximum(x, bound, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def approximate_log2(x):
    """Return the base-2 logarithm of normal numbers by one instruction of NVIDIA's GPUs."""
    return tl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def mixture_of_block(x, t, part, share, FAST: tl.constexpr):
    """Return p, q, log2(p / m) and log2(q / m), where m is the mixture; finite if p or q is 0.

    The smallest normal number stands for all m below it.
    """
    log_p = exponent(x, shift_of(share.maximum, part), part) - log_exact(share.total) * LOG2E
    log_q = exponent(t, shift_of(share.t_maximum, part), part) - log_exact(share.t_total) * LOG2E
    p, q = tl.exp2(log_p), tl.exp2(log_q)
    m = at_least(part.weight * q + (1.0 - part.weight) * p, SMALLEST)
    log_m = approximate_log2(m) if FAST else tl.log2(m)
    return p, q, at_least(log_p, NO_LOG) - log_m, at_least(log_q, NO_LOG) - log_m


@triton.jit
def add_mixture(
    student,
    teacher,
    part,
    share,
    start,
    UNMASKED: tl.constexpr,
    FAST: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add one block of classes to the lanes' divergences of both rows from their mixture."""
    _, x, t = load_both(part, start, UNMASKED, NOTHING, READ_AGAIN, TILE.block, TILE)
    p, q, ratio, t_ratio = mixture_of_block(x, t, part, share, FAST)
    dtype: tl.constexpr = student.dtype
    return student + sum_of_lanes(p * ratio, dtype), teacher + sum_of_lanes(q * t_ratio, dtype)


@triton.jit
def mixture_of_part(part, share, FAST: tl.constexpr, TILE: tl.constexpr):
    """Return the lanes' divergences of student and teacher from their mixture over a part."""
    student = tl.full([1, TILE.lanes], 0.0, part.log2_scale.dtype)
    teacher, unmasked = student, unmasked_end(part, TILE.block)
    for start in range(part.first, unmasked, TILE.block):
        student, teacher = add_mixture(student, teacher, part, share, start, True, FAST, TILE)
    for start in range(unmasked, part.last, TILE.block):
        student, teacher = add_mixture(student, teacher, part, share, start, False, FAST, TILE)
    return student, teacher


@triton.jit
def gradient_of_block(x, t, on_row, part, share, student, KIND: tl.constexpr, FAST: tl.constexpr):
    """Return the gradient of a block of the student's logits.

    `on_row` is the derivative of the result in the loss of the row, over the temperature, and
    `student` is the student's divergence from the mixture in units of log 2.
    """
    if KIND == MIXTURE:
        p, _, ratio, _ = mixture_of_block(x, t, part, share, FAST)
        grad = (on_row * (1.0 - part.weight) * LN2) * p * (ratio - student)
    else:
        a = exponent(x, shift_of(share.maximum, part), part)
        b = exponent(t, shift_of(share.t_maximum, part), part)
        e = tl.exp2(a)
        on_student = on_row * reciprocal(share.total)
        if KIND == REVERSE:
            # The logarithms of the sums cancel between the ratio of a class and its mean.
            terms = e * (a - b - share.weighted * reciprocal(share.total))
            grad = (on_student * LN2) * tl.where(e == 0.0, 0.0, terms)
        else:
            grad = e * on_student - tl.exp2(b) * (on_row * reciprocal(share.t_total))
    if part.cap is not None:
        grad *= (1.0 - x / part.cap) * (1.0 + x / part.cap)
    return grad


@triton.jit(do_not_specialize=["num_seen"])
def divergence_accumulate_kernel(
    logits,  # StridedRows of one batch
    teacher,  # StridedRows of one batch
    kl_ptr,  # [M]
    student_ptr,  # [M]: KL(student ‖ teacher) for the reverse KL, otherwise 0
    statistics,  # PairStatistics [M]
    weighted_ptr,  # [M], as in `DivergenceState`
    segments,  # Segments
    classes,
    num_seen,  # the number of classes that the state has seen, which is not read if that is 0
    temperature: tl.float64,
    softcap: tl.float64,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Update the state of two rows, and their KL, with one read of these classes."""
    ACC_DTYPE: tl.constexpr = statistics.maximum.dtype.element_ty
    row = (tl.program_id(0) // segments.programs).to(tl.int64)
    split = tl.program_id(0) % segments.programs
    cap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    pair = locate_pair(logits, teacher, row, 0, classes, 0.0, temperature, ACC_DTYPE)
    part = PairPart(*pair, logits.column, teacher.column, cap)  # type: ignore[call-arg]
    stores = True
    if not TILE.has_segments:
        share = scan_part(part, True, KIND, TILE, tl.float64)
    else:
        KEPT: tl.constexpr = (True, True, True, True, True)
        share = no_share(TILE, ACC_DTYPE, tl.float64)
        first = split.to(classes.dtype) * segments.share
        for s in range(first, tl.minimum(first + segments.share, segments.number)):
            start = s * segments.size
            end = start + tl.minimum(segments.size, classes - start)
            own = locate_pair(logits, teacher, row, start, end, 0.0, temperature, ACC_DTYPE)
            piece = PairPart(*own, logits.column, teacher.column, cap)  # type: ignore[call-arg]
            found = scan_part(piece, True, KIND, TILE, ACC_DTYPE)
            if segments.slots is None:
                share = joined_shares(share, found, part, KIND)
            else:
                store_segment(found, segments, row, s, KEPT)
        if segments.slots is not None:
            stores = is_last_program(segments, row)
            empty = no_share(TILE, ACC_DTYPE, ACC_DTYPE)
            for s in range(0, tl.where(stores, segments.number, 0), LOADED_SEGMENTS):
                for i in tl.static_range(LOADED_SEGMENTS):
                    found = load_segment(empty, segments, row, s + i, KEPT)
                    share = joined_shares(share, PairShare(*found), part, KIND)
    share = merged_shares(share, part, KIND)
    seen = num_seen > 0
    before = PairShare(
        tl.load(statistics.maximum + row, mask=seen, other=-float("inf")),
        tl.load(statistics.total + row, mask=seen, other=0.0).to(tl.float64),
        tl.load(statistics.teacher_maximum + row, mask=seen, other=-float("inf")),
        tl.load(statistics.teacher_total + row, mask=seen, other=0.0).to(tl.float64),
        tl.load(weighted_ptr + row, mask=seen, other=0.0).to(tl.float64) * part.log2_scale,
    )
    share = joined_shares(before, share, part, KIND)
    kl = divergence_of_share(share, KIND).to(ACC_DTYPE)
    weighted = (share.weighted / part.log2_scale).to(ACC_DTYPE)
    tl.store(kl_ptr + row, kl, mask=stores)
    tl.store(student_ptr + row, kl if KIND == REVERSE else tl.zeros_like(kl), mask=stores)
    tl.store(statistics.maximum + row, share.maximum, mask=stores)
    tl.store(statistics.total + row, share.total.to(ACC_DTYPE), mask=stores)
    tl.store(statistics.teacher_maximum + row, share.t_maximum, mask=stores)
    tl.store(statistics.teacher_total + row, share.t_total.to(ACC_DTYPE), mask=stores)
    tl.store(weighted_ptr + row, weighted, mask=stores)


@triton.jit
def load_share(statistics, row):
    """Load the statistics of a row of the student and of the teacher."""
    return PairShare(
        tl.load(statistics.maximum + row),
        tl.load(statistics.total + row),
        tl.load(statistics.teacher_maximum + row),
        tl.load(statistics.teacher_total + row),
        0.0,
    )


@triton.jit(do_not_specialize=["num_seen"])
def divergence_mixture_kernel(
    logits,  # StridedRows of one batch
    teacher,  # StridedRows of one batch
    loss_ptr,  # [M]
    student_ptr,  # [M]
    statistics,  # PairStatistics [M]
    segments,  # Segments
    classes,
    num_seen,  # the number of classes that the divergences have seen
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Add these classes to the divergences of teacher and student from their mixture."""
    ACC_DTYPE: tl.constexpr = statistics.maximum.dtype.element_ty
    row = (tl.program_id(0) // segments.programs).to(tl.int64)
    split = tl.program_id(0) % segments.programs
    cap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    pair = locate_pair(logits, teacher, row, 0, classes, beta, temperature, ACC_DTYPE)
    part = PairPart(*pair, logits.column, teacher.column, cap)  # type: ignore[call-arg]
    share = load_share(statistics, row)
    stores = True
    if not TILE.has_segments:
        student_term, teacher_term = mixture_of_part(part, share, False, TILE)
    else:
        KEPT: tl.constexpr = (True, True)
        zeros = tl.full([1, TILE.lanes], 0.0, ACC_DTYPE)
        student_term = zeros.to(tl.float64)
        teacher_term = student_term
        first = split.to(classes.dtype) * segments.share
        for s in range(first, tl.minimum(first + segments.share, segments.number)):
            start = s * segments.size
            end = start + tl.minimum(segments.size, classes - start)
            own = locate_pair(logits, teacher, row, start, end, beta, temperature, ACC_DTYPE)
            piece = PairPart(*own, logits.column, teacher.column, cap)  # type: ignore[call-arg]
            found = mixture_of_part(piece, share, False, TILE)
            if segments.slots is None:
                student_term += found[0].to(tl.float64)
                teacher_term += found[1].to(tl.float64)
            else:
                store_segment(found, segments, row, s, KEPT)
        if segments.slots is not None:
            stores = is_last_program(segments, row)
            for s in range(0, tl.where(stores, segments.number, 0), LOADED_SEGMENTS):
                for i in tl.static_range(LOADED_SEGMENTS):
                    found = load_segment((zeros, zeros), segments, row, s + i, KEPT)
                    student_term += found[0].to(tl.float64)
                    teacher_term += found[1].to(tl.float64)
    student_term = tl.sum(student_term).to(ACC_DTYPE)
    teacher_term = tl.sum(teacher_term).to(ACC_DTYPE)
    seen = num_seen > 0
    loss = tl.load(loss_ptr + row, mask=seen, other=0.0)
    student = tl.load(student_ptr + row, mask=seen, other=0.0)
    student_term, teacher_term = student_term * LN2, teacher_term * LN2
    loss += part.weight * teacher_term + (1.0 - part.weight) * student_term
    tl.store(loss_ptr + row, loss, mask=stores)
    tl.store(student_ptr + row, student + student_term, mask=stores)


@triton.jit
def divergence_gradient_kernel(
    grad_ptr,  # [M]
    logits,  # StridedRows of one batch
    teacher,  # StridedRows of one batch
    student_ptr,  # [M]
    statistics,  # PairStatistics [M]
    dlogits,  # StridedRows of adjacent classes; may be the logits
    classes,
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Compute a block of the gradient of the student's logits with two reads and one write."""
    ACC_DTYPE: tl.constexpr = statistics.maximum.dtype.element_ty
    blocks = tl.cdiv(classes, TILE.block)
    row, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * TILE.block
    cap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    pair = locate_pair(logits, teacher, row, 0, classes, beta, temperature, ACC_DTYPE)
    part = PairPart(*pair, logits.column, teacher.column, cap)  # type: ignore[call-arg]
    v, x, t = load_both(part, start, False, NOTHING, "", TILE.block, TILE)
    share, student = load_share(statistics, row), tl.load(student_ptr + row)
    if KIND == REVERSE:  # what the scan has found, from the KL
        mean = student - (log_exact(share.t_total) - log_exact(share.total))
        share = PairShare(
            share.maximum, share.total, share.t_maximum, share.t_total, mean * LOG2E * share.total
        )
    on_row = tl.load(grad_ptr + row).to(ACC_DTYPE)
    on_logits = on_row * part.log2_scale * LN2
    grad = gradient_of_block(x, t, on_logits, part, share, student * LOG2E, KIND, False)
    # The padding of a row becomes 0, which products on some devices read.
    grad = tl.where(on_row == 0.0, 0.0, tl.where(v < classes, grad, 0.0))
    ptrs = dlogits.ptr + aligned_start(row * dlogits.row, TILE.vector) + v
    is_stored = v // TILE.vector * TILE.vector < classes
    tl.store(ptrs, grad.to(dlogits.ptr.dtype.element_ty), mask=is_stored)
