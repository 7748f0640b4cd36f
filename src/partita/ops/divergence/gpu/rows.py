"""Kernels of the terms of two rows: statistics, terms that need normalisers first, the gradient.

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
    NOT_FOUND,
    is_last_program,
    load_capped,
    load_segment,
    max_of_lanes,
    of_lanes,
    store_segment,
    sum_of_lanes,
)

# The terms but `hard`, whose gradients `gradient_of_block` computes.
FORWARD, REVERSE, MIXTURE, VARIATION = (tl.constexpr(i) for i in range(4))
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


class Scan(NamedTuple):
    """What a scan of both rows computes beside maxima and sums; see `PairShare`."""

    forward: bool
    reverse: bool
    plain: bool
    best: bool


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
        forward: the sum of exp2(b) * (b - a) with the teacher's exponents b.
        reverse: the sum of exp2(a) * (a - b).
        plain: the sum of exp(x - maximum).
        best: the first block of classes that has the teacher's maximum.

    The last four are 0 where `Scan` does not name them.
    """

    maximum: Any
    total: Any
    t_maximum: Any
    t_total: Any
    forward: Any
    reverse: Any
    plain: Any
    best: Any


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
def moved_share(share, maximum, t_maximum, part, SCAN: tl.constexpr):
    """Return a share relative to other maxima, which are at least its own."""
    moved = rounded_product(share.maximum, part.log2_scale) - shift_of(maximum, part)
    t_moved = rounded_product(share.t_maximum, part.log2_scale) - shift_of(t_maximum, part)
    scale, t_scale = tl.exp2(moved), tl.exp2(t_moved)
    forward, reverse, plain = share.forward, share.reverse, share.plain
    # Without classes a row has no shift. An infinite sum stays, unless its probabilities vanish.
    if SCAN.reverse:
        apart = finite_shift(moved) - finite_shift(t_moved)
        reverse = tl.where(scale == 0.0, 0.0, scale * (reverse + share.total * apart))
    if SCAN.forward:
        apart = finite_shift(t_moved) - finite_shift(moved)
        forward = tl.where(t_scale == 0.0, 0.0, t_scale * (forward + share.t_total * apart))
    if SCAN.plain:
        plain *= tl.exp2((share.maximum - finite_shift(maximum)) * LOG2E)
    totals = (maximum, share.total * scale, t_maximum, share.t_total * t_scale)
    return PairShare(*totals, forward, reverse, plain, share.best)


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
    SCAN: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add one block of classes to the statistics of the lanes, whose maxima CAREFUL updates."""
    FILL: tl.constexpr = NOTHING if CAREFUL else FINITE
    _, x, t = load_both(part, start, UNMASKED, FILL, READ_AGAIN, BLOCK, TILE)
    best = share.best
    if CAREFUL:
        maximum = tl.maximum(share.maximum, max_of_lanes(x))
        t_maximum = tl.maximum(share.t_maximum, max_of_lanes(t))
        if SCAN.best:
            best = tl.where(t_maximum > share.t_maximum, start // TILE.block, best).to(tl.int32)
        share = moved_share(share, maximum, t_maximum, part, SCAN)
    a = exponent(x, of_lanes(shift_of(share.maximum, part)), part)
    b = exponent(t, of_lanes(shift_of(share.t_maximum, part)), part)
    e, t_e = tl.exp2(a), tl.exp2(b)
    dtype: tl.constexpr = share.total.dtype
    total = share.total + sum_of_lanes(e, dtype)
    t_total = share.t_total + sum_of_lanes(t_e, dtype)
    forward, reverse, plain = share.forward, share.reverse, share.plain
    if SCAN.forward:
        forward += sum_of_lanes(weighed(t_e, b - a, CAREFUL), dtype)
    if SCAN.reverse:
        reverse += sum_of_lanes(weighed(e, a - b, CAREFUL), dtype)
    if SCAN.plain:
        below = (x - of_lanes(finite_shift(share.maximum))) * LOG2E
        plain += sum_of_lanes(tl.exp2(below), dtype)
    totals = (share.maximum, total, share.t_maximum, t_total)
    return PairShare(*totals, forward, reverse, plain, best)


@triton.jit
def weighed(weight, values, CAREFUL: tl.constexpr):
    """Return the product; a class of probability 0 counts as 0, even with infinite logits."""
    terms = weight * values
    return tl.where(weight == 0.0, 0.0, terms) if CAREFUL else terms


@triton.jit
def no_share(TILE: tl.constexpr, ACC_DTYPE: tl.constexpr, SUM_DTYPE: tl.constexpr):
    """Return the statistics of the lanes over no classes, with sums of a dtype."""
    maximum = tl.full([1, TILE.lanes], -float("inf"), ACC_DTYPE)
    zero = tl.full([1, TILE.lanes], 0.0, SUM_DTYPE)
    best = tl.full([1, TILE.lanes], 0, tl.int32)
    return PairShare(maximum, zero, maximum, zero, zero, zero, zero, best)


@triton.jit
def scan_part(
    part,
    CAREFUL: tl.constexpr,
    SCAN: tl.constexpr,
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
        maxima = (max_of_lanes(x), zero, max_of_lanes(t), zero)
        share = PairShare(*maxima, zero, zero, zero, share.best)
    unmasked = unmasked_end(part, TILE.block)
    for start in range(part.first, unmasked, TILE.block):
        share = add_block(share, part, start, True, CAREFUL, SCAN, TILE.block, TILE)
    for start in range(unmasked, part.last, TAIL):
        share = add_block(share, part, start, False, CAREFUL, SCAN, TAIL, TILE)
    return share


@triton.jit
def joined_shares(share, found, part, SCAN: tl.constexpr):
    """Return one `PairShare` of two, of which the first has sums in fp64 and earlier classes."""
    maximum = tl.maximum(share.maximum, found.maximum)
    t_maximum = tl.maximum(share.t_maximum, found.t_maximum)
    best = share.best
    if SCAN.best:
        best = tl.where(found.t_maximum > share.t_maximum, found.best, best)
    share = moved_share(share, maximum, t_maximum, part, SCAN)
    found = moved_share(found, maximum, t_maximum, part, SCAN)
    total = share.total + found.total.to(tl.float64)
    t_total = share.t_total + found.t_total.to(tl.float64)
    forward, reverse, plain = share.forward, share.reverse, share.plain
    if SCAN.forward:
        forward += found.forward.to(tl.float64)
    if SCAN.reverse:
        reverse += found.reverse.to(tl.float64)
    if SCAN.plain:
        plain += found.plain.to(tl.float64)
    return PairShare(maximum, total, t_maximum, t_total, forward, reverse, plain, best)


@triton.jit
def merged_shares(shares, part, SCAN: tl.constexpr):
    """Return one `PairShare` of several."""
    maximum, t_maximum, best = tl.max(shares.maximum), tl.max(shares.t_maximum), 0
    if SCAN.best:
        best = tl.min(tl.where(shares.t_maximum == t_maximum, shares.best, NOT_FOUND))
    moved = moved_share(shares, maximum, t_maximum, part, SCAN)
    total, t_total = tl.sum(moved.total), tl.sum(moved.t_total)
    forward = tl.sum(moved.forward) if SCAN.forward else 0.0
    reverse = tl.sum(moved.reverse) if SCAN.reverse else 0.0
    plain = tl.sum(moved.plain) if SCAN.plain else 0.0
    return PairShare(maximum, total, t_maximum, t_total, forward, reverse, plain, best)


@triton.jit
def divergence_of_share(share, KIND: tl.constexpr):
    """Return the KL of a row from its statistics, in fp64."""
    total, t_total = share.total.to(tl.float64), share.t_total.to(tl.float64)
    weighted = share.reverse if KIND == REVERSE else share.forward
    mean, ratio = weighted.to(tl.float64) * 0.6931471805599453, t_total / total
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
def sign_of(p, q):
    """Return the sign of p - q."""
    return tl.where(p > q, 1.0, tl.where(p < q, -1.0, 0.0))


@triton.jit
def add_mixture(
    sums,
    part,
    share,
    start,
    UNMASKED: tl.constexpr,
    FAST: tl.constexpr,
    TV: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add one block of classes to the lanes' sums; see `mixture_of_part`."""
    _, x, t = load_both(part, start, UNMASKED, NOTHING, READ_AGAIN, TILE.block, TILE)
    p, q, ratio, t_ratio = mixture_of_block(x, t, part, share, FAST)
    dtype: tl.constexpr = sums[0].dtype
    found = (sums[0] + sum_of_lanes(p * ratio, dtype), sums[1] + sum_of_lanes(q * t_ratio, dtype))
    if TV:
        distance = sums[2] + sum_of_lanes(tl.abs(p - q), dtype)
        found = found + (distance, sums[3] + sum_of_lanes(p * sign_of(p, q), dtype))
    return found


@triton.jit
def mixture_of_part(part, share, FAST: tl.constexpr, TV: tl.constexpr, TILE: tl.constexpr):
    """Return the lanes' divergences of student and teacher from their mixture over a part.

    With TV the sums of |p - q| and of p * sign(p - q) follow.
    """
    zero = tl.full([1, TILE.lanes], 0.0, part.log2_scale.dtype)
    sums, unmasked = (zero, zero), unmasked_end(part, TILE.block)
    if TV:
        sums = sums + sums
    for start in range(part.first, unmasked, TILE.block):
        sums = add_mixture(sums, part, share, start, True, FAST, TV, TILE)
    for start in range(unmasked, part.last, TILE.block):
        sums = add_mixture(sums, part, share, start, False, FAST, TV, TILE)
    return sums


@triton.jit
def added_sums(sums, found):
    """Return sums in fp64 with others of the same lanes added."""
    total = ()
    for i in tl.static_range(len(sums)):
        total = total + (sums[i] + found[i].to(tl.float64),)
    return total


@triton.jit
def gradient_of_block(x, t, on_row, part, share, student, KIND: tl.constexpr, FAST: tl.constexpr):
    """Return the gradient of a block of the student's logits through a term that is not `hard`.

    `on_row` is the derivative of the result in the term of the row, over the temperature, and
    `student` is the student's divergence from the mixture in units of log 2, or for the total
    variation the mean of sign(p - q).
    """
    if KIND == MIXTURE:
        p, _, ratio, _ = mixture_of_block(x, t, part, share, FAST)
        grad = (on_row * (1.0 - part.weight) * LN2) * p * (ratio - student)
    elif KIND == VARIATION:
        p, q, _, _ = mixture_of_block(x, t, part, share, FAST)
        grad = (0.5 * on_row) * p * (sign_of(p, q) - student)
    else:
        a = exponent(x, shift_of(share.maximum, part), part)
        b = exponent(t, shift_of(share.t_maximum, part), part)
        e = tl.exp2(a)
        on_student = on_row * reciprocal(share.total)
        if KIND == REVERSE:
            # The logarithms of the sums cancel between the ratio of a class and its mean.
            terms = e * (a - b - share.reverse * reciprocal(share.total))
            grad = (on_student * LN2) * tl.where(e == 0.0, 0.0, terms)
        else:
            grad = e * on_student - tl.exp2(b) * (on_row * reciprocal(share.t_total))
    return through_softcap(grad, x, part)


@triton.jit
def through_softcap(grad, x, part):
    """Return the gradient of logits from that of their soft-capped values x."""
    if part.cap is not None:
        grad *= (1.0 - x / part.cap) * (1.0 + x / part.cap)
    return grad


@triton.jit
def label_of(target_ptr, row, vocabulary, ignore_index):
    """Return the label of a row, whether it counts, and whether it counts and is no class."""
    label = tl.load(target_ptr + row).to(tl.int64)
    valid = label != ignore_index
    return label, valid, valid & ((label < 0) | (label >= vocabulary))


@triton.jit
def lowest_argmax(part, share, BLOCK: tl.constexpr):
    """Return the lowest class that has the teacher's maximum, from one more read of its block.

    If all logits are NaN, it is the last class.
    """
    column = share.best.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = column < part.last
    t = load_capped(part.t_ptr + column * part.t_stride, mask, part.cap, share.t_maximum.dtype)
    sought = share.t_maximum
    if part.cap is not None:  # Another copy of the code may round a tanh differently.
        sought = tl.max(t)
    return tl.min(tl.where(mask & (t == sought), column, part.last - 1))


@triton.jit(do_not_specialize=["first", "vocabulary", "ignore_index"])
def divergence_accumulate_kernel(
    logits,  # StridedRows of one batch, from the class `first` on
    teacher,  # StridedRows of one batch
    target_ptr,  # [M] int64, or None without the term `hard`
    terms,  # Terms: [M] each, NUM_TERMS apart, or None
    statistics,  # PairStatistics [M]
    means,  # Means: [M] each, NUM_MEANS apart, or None
    sums,  # Sums [M], or None
    argmax_ptr,  # [M] int64, unused unless it is wanted
    segments,  # Segments
    classes,
    first,  # the number of classes that the state has seen, which is not read if that is 0
    vocabulary,  # the number of all classes
    temperature: tl.float64,
    softcap: tl.float64,
    ignore_index,
    SCAN: tl.constexpr,  # Scan
    NUM_TERMS: tl.constexpr,
    NUM_MEANS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Update the state of two rows, and the terms that need one read, with these classes."""
    ACC_DTYPE: tl.constexpr = statistics.maximum.dtype.element_ty
    row = (tl.program_id(0) // segments.programs).to(tl.int64)
    split = tl.program_id(0) % segments.programs
    cap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    pair = locate_pair(logits, teacher, row, 0, classes, 0.0, temperature, ACC_DTYPE)
    part = PairPart(*pair, logits.column, teacher.column, cap)  # type: ignore[call-arg]
    stores = True
    if not TILE.has_segments:
        share = scan_part(part, True, SCAN, TILE, tl.float64)
    else:
        KEPT: tl.constexpr = (True, True, True, True, SCAN[0], SCAN[1], SCAN[2], SCAN[3])
        share = no_share(TILE, ACC_DTYPE, tl.float64)
        first_segment = split.to(classes.dtype) * segments.share
        for s in range(first_segment, tl.minimum(first_segment + segments.share, segments.number)):
            start = s * segments.size
            end = start + tl.minimum(segments.size, classes - start)
            own = locate_pair(logits, teacher, row, start, end, 0.0, temperature, ACC_DTYPE)
            piece = PairPart(*own, logits.column, teacher.column, cap)  # type: ignore[call-arg]
            found = scan_part(piece, True, SCAN, TILE, ACC_DTYPE)
            if segments.slots is None:
                share = joined_shares(share, found, part, SCAN)
            else:
                store_segment(found, segments, row, s, KEPT)
        if segments.slots is not None:
            stores = is_last_program(segments, row)
            empty = no_share(TILE, ACC_DTYPE, ACC_DTYPE)
            for s in range(0, tl.where(stores, segments.number, 0), LOADED_SEGMENTS):
                for i in tl.static_range(LOADED_SEGMENTS):
                    found = load_segment(empty, segments, row, s + i, KEPT)
                    share = joined_shares(share, PairShare(*found), part, SCAN)
    share = merged_shares(share, part, SCAN)
    seen, at, at_mean = first > 0, row * NUM_TERMS, row * NUM_MEANS
    if SCAN.best:
        before = tl.load(statistics.teacher_maximum + row, mask=seen, other=-float("inf"))
        is_best = (first == 0) | (share.t_maximum > before)
        best = first + lowest_argmax(part, share, TILE.block)
        tl.store(argmax_ptr + row, best, mask=stores & is_best)
    before = PairShare(
        tl.load(statistics.maximum + row, mask=seen, other=-float("inf")),
        tl.load(statistics.total + row, mask=seen, other=0.0).to(tl.float64),
        tl.load(statistics.teacher_maximum + row, mask=seen, other=-float("inf")),
        tl.load(statistics.teacher_total + row, mask=seen, other=0.0).to(tl.float64),
        load_sum(sums.forward, row, seen) * part.log2_scale,
        load_sum(sums.reverse, row, seen) * part.log2_scale,
        load_sum(means.plain, at_mean, seen),
        0,
    )
    share = joined_shares(before, share, part, SCAN)
    if SCAN.forward:
        kl = divergence_of_share(share, FORWARD).to(ACC_DTYPE)
        weighted = (share.forward / part.log2_scale).to(ACC_DTYPE)
        tl.store(terms.kl + at, kl, mask=stores)
        tl.store(sums.forward + row, weighted, mask=stores)
    if SCAN.reverse:
        kl = divergence_of_share(share, REVERSE).to(ACC_DTYPE)
        weighted = (share.reverse / part.log2_scale).to(ACC_DTYPE)
        tl.store(terms.reverse_kl + at, kl, mask=stores)
        tl.store(sums.reverse + row, weighted, mask=stores)
    if SCAN.plain:
        tl.store(means.plain + at_mean, share.plain.to(ACC_DTYPE), mask=stores)
    if terms.hard is not None:
        label, valid, invalid = label_of(target_ptr, row, vocabulary, ignore_index)
        inside = (label >= first) & (label < first + classes)
        x = load_capped(part.x_ptr + (label - first) * part.x_stride, inside, cap, ACC_DTYPE)
        x = tl.maximum(x, tl.load(sums.label + row, mask=seen, other=-float("inf")))
        # Each sum has its own shift, of which a great one is rounded before it is taken off.
        if SCAN.plain:
            hard = tl.log(share.plain) + (finite_shift(share.maximum) - x).to(tl.float64)
        else:
            u = exponent(x, shift_of(share.maximum, part), part)
            hard = tl.log(share.total) - u.to(tl.float64) * LN2
        hard = tl.where(invalid, float("nan"), tl.where(valid, hard, 0.0))
        tl.store(terms.hard + at, hard.to(ACC_DTYPE), mask=stores)
        tl.store(sums.label + row, x, mask=stores)
    tl.store(statistics.maximum + row, share.maximum, mask=stores)
    tl.store(statistics.total + row, share.total.to(ACC_DTYPE), mask=stores)
    tl.store(statistics.teacher_maximum + row, share.t_maximum, mask=stores)
    tl.store(statistics.teacher_total + row, share.t_total.to(ACC_DTYPE), mask=stores)


@triton.jit
def load_sum(ptr, at, seen):
    """Load a sum in fp64; 0 if there is none, or if no classes were seen."""
    if ptr is None:
        return tl.full([], 0.0, tl.float64)
    else:
        return tl.load(ptr + at, mask=seen, other=0.0).to(tl.float64)


@triton.jit
def load_share(statistics, row):
    """Load the maxima and sums of both rows."""
    maximum, total = tl.load(statistics.maximum + row), tl.load(statistics.total + row)
    t_maximum = tl.load(statistics.teacher_maximum + row)
    t_total = tl.load(statistics.teacher_total + row)
    return PairShare(maximum, total, t_maximum, t_total, 0.0, 0.0, 0.0, 0)


@triton.jit(do_not_specialize=["first"])
def divergence_mixture_kernel(
    logits,  # StridedRows of one batch
    teacher,  # StridedRows of one batch
    terms,  # Terms: [M] each, NUM_TERMS apart, or None
    statistics,  # PairStatistics [M]
    means,  # Means: [M] each, NUM_MEANS apart, or None
    segments,  # Segments
    classes,
    first,  # the number of classes that these terms and means have seen
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    NUM_TERMS: tl.constexpr,
    NUM_MEANS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Add these classes to the terms and means that need the normalisers of both rows."""
    ACC_DTYPE: tl.constexpr = statistics.maximum.dtype.element_ty
    TV: tl.constexpr = terms.tv is not None
    row = (tl.program_id(0) // segments.programs).to(tl.int64)
    split = tl.program_id(0) % segments.programs
    cap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    pair = locate_pair(logits, teacher, row, 0, classes, beta, temperature, ACC_DTYPE)
    part = PairPart(*pair, logits.column, teacher.column, cap)  # type: ignore[call-arg]
    share = load_share(statistics, row)
    stores = True
    if not TILE.has_segments:
        sums = mixture_of_part(part, share, False, TV, TILE)
    else:
        KEPT: tl.constexpr = (True, True, True, True)
        zeros = tl.full([1, TILE.lanes], 0.0, ACC_DTYPE)
        zero = zeros.to(tl.float64)
        empty, sums = (zeros, zeros), (zero, zero)
        if TV:
            empty, sums = empty + empty, sums + sums
        first_segment = split.to(classes.dtype) * segments.share
        for s in range(first_segment, tl.minimum(first_segment + segments.share, segments.number)):
            start = s * segments.size
            end = start + tl.minimum(segments.size, classes - start)
            own = locate_pair(logits, teacher, row, start, end, beta, temperature, ACC_DTYPE)
            piece = PairPart(*own, logits.column, teacher.column, cap)  # type: ignore[call-arg]
            found = mixture_of_part(piece, share, False, TV, TILE)
            if segments.slots is None:
                sums = added_sums(sums, found)
            else:
                store_segment(found, segments, row, s, KEPT)
        if segments.slots is not None:
            stores = is_last_program(segments, row)
            for s in range(0, tl.where(stores, segments.number, 0), LOADED_SEGMENTS):
                for i in tl.static_range(LOADED_SEGMENTS):
                    sums = added_sums(sums, load_segment(empty, segments, row, s + i, KEPT))
    seen, at, at_mean = first > 0, row * NUM_TERMS, row * NUM_MEANS
    if terms.jsd is not None:
        student_term = tl.sum(sums[0]).to(ACC_DTYPE)
        teacher_term = tl.sum(sums[1]).to(ACC_DTYPE)
        loss = tl.load(terms.jsd + at, mask=seen, other=0.0)
        student = tl.load(means.student + at_mean, mask=seen, other=0.0)
        student_term, teacher_term = student_term * LN2, teacher_term * LN2
        loss += part.weight * teacher_term + (1.0 - part.weight) * student_term
        tl.store(terms.jsd + at, loss, mask=stores)
        tl.store(means.student + at_mean, student + student_term, mask=stores)
    if TV:
        distance = tl.load(terms.tv + at, mask=seen, other=0.0)
        sign = tl.load(means.sign + at_mean, mask=seen, other=0.0)
        distance += 0.5 * tl.sum(sums[2]).to(ACC_DTYPE)
        tl.store(terms.tv + at, distance, mask=stores)
        tl.store(means.sign + at_mean, sign + tl.sum(sums[3]).to(ACC_DTYPE), mask=stores)


@triton.jit
def add_gradient(total, grad, on_row, exists):
    """Add the gradient of one term, or return it if the total is None.

    A factor of 0 stands for a term that the row does not have. The padding of a row becomes 0,
    which products on some devices read.
    """
    grad = tl.where(on_row == 0.0, 0.0, tl.where(exists, grad, 0.0))
    return grad if total is None else total + grad


@triton.jit
def add_term(total, grad_ptr, mean, x, t, part, share, exists, KIND: tl.constexpr):
    """Add the gradient of a term that is not `hard`; see `gradient_of_block` for its mean."""
    on_row = tl.load(grad_ptr).to(part.log2_scale.dtype)
    on_logits = on_row * part.log2_scale * LN2
    grad = gradient_of_block(x, t, on_logits, part, share, mean, KIND, False)
    return add_gradient(total, grad, on_row, exists)


@triton.jit(do_not_specialize=["first", "vocabulary", "ignore_index"])
def divergence_gradient_kernel(
    grads,  # Terms: [M] each, NUM_TERMS apart, or None
    logits,  # StridedRows of one batch, from the class `first` on
    teacher,  # StridedRows of one batch
    target_ptr,  # [M] int64, or None without the term `hard`
    terms,  # Terms, as the gradients
    statistics,  # PairStatistics [M]
    means,  # Means: [M] each, NUM_MEANS apart, or None
    dlogits,  # StridedRows of adjacent classes; may be the logits
    classes,
    first,
    vocabulary,  # the number of all classes
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    ignore_index,
    NUM_TERMS: tl.constexpr,
    NUM_MEANS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,  # LaneTile
):
    """Compute a block of the gradient of the student's logits with two reads and one write."""
    ACC_DTYPE: tl.constexpr = statistics.maximum.dtype.element_ty
    blocks = tl.cdiv(classes, TILE.block)
    row, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * TILE.block
    at, at_mean = row * NUM_TERMS, row * NUM_MEANS
    cap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    pair = locate_pair(logits, teacher, row, 0, classes, beta, temperature, ACC_DTYPE)
    part = PairPart(*pair, logits.column, teacher.column, cap)  # type: ignore[call-arg]
    v, x, t = load_both(part, start, False, NOTHING, "", TILE.block, TILE)
    share, grad, exists = load_share(statistics, row), None, v < classes
    if grads.reverse_kl is not None:  # what the scan has found, from the KL
        mean = tl.load(terms.reverse_kl + at) - (log_exact(share.t_total) - log_exact(share.total))
        totals = (share.maximum, share.total, share.t_maximum, share.t_total)
        share = PairShare(*totals, 0.0, mean * LOG2E * share.total, 0.0, 0)
        grad = add_term(grad, grads.reverse_kl + at, 0.0, x, t, part, share, exists, REVERSE)
    if grads.kl is not None:
        grad = add_term(grad, grads.kl + at, 0.0, x, t, part, share, exists, FORWARD)
    if grads.jsd is not None:
        mean = tl.load(means.student + at_mean) * LOG2E
        grad = add_term(grad, grads.jsd + at, mean, x, t, part, share, exists, MIXTURE)
    if grads.tv is not None:
        mean = tl.load(means.sign + at_mean)
        grad = add_term(grad, grads.tv + at, mean, x, t, part, share, exists, VARIATION)
    if grads.hard is not None:
        label, valid, invalid = label_of(target_ptr, row, vocabulary, ignore_index)
        on_row = tl.where(valid, tl.load(grads.hard + at).to(ACC_DTYPE), 0.0)
        on_row = tl.where(invalid & (on_row != 0.0), float("nan"), on_row)
        if means.plain is None:
            p = tl.exp2(exponent(x, shift_of(share.maximum, part), part)) * reciprocal(share.total)
        else:
            p = tl.exp2((x - finite_shift(share.maximum)) * LOG2E)
            p *= reciprocal(tl.load(means.plain + at_mean))
        term = through_softcap(on_row * (p - tl.where(v + first == label, 1.0, 0.0)), x, part)
        grad = add_gradient(grad, term, on_row, exists)
    ptrs = dlogits.ptr + aligned_start(row * dlogits.row, TILE.vector) + v
    is_stored = v // TILE.vector * TILE.vector < classes
    grad = grad.to(dlogits.ptr.dtype.element_ty)  # type: ignore[union-attr]
    tl.store(ptrs, grad, mask=is_stored)
