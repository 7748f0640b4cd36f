"""The kernel that computes divergence and gradient with one read of both rows and one write.

A program has a part of both rows. It reads the part for the statistics, exchanges these with the
other programs of the row (see primitives/gpu/sync.py), and reads it again from the cache for the
gradient. All exponents are of base 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    LN2,
    LOG2E,
    apply_softcap,
    finite_shift,
    log_exact,
    reciprocal,
)
from ....primitives.gpu.memory import aligned_start
from ....primitives.gpu.reduce import broadcast_lanes, by_lane, lane_max
from ....primitives.gpu.sync import collect_pairs, exchange_pairs, next_part, store_pair
from ....runtime.backend import interpreting
from .rows import MIXTURE, REVERSE

LARGEST = tl.constexpr(2.0**100)  # sums of exponentials below it overflow in no product
NOTHING = tl.constexpr(-float("inf"))  # the logit of a class that there is not
FINITE = tl.constexpr(-1e37)  # the same where logits are finite
# Hints for the L1 cache: logits stay until their last reading, and are the first to leave after it.
# Without hints, lines that nothing reads again displace those that are about to be read again.
READ_AGAIN = tl.constexpr("evict_last")
READ_LAST = tl.constexpr("evict_first")
# The interpreter calls a function of a reduction for each element, which takes it minutes.
INTERPRETED = tl.constexpr(interpreting())
SMALLEST = tl.constexpr(2.0**-126)
NO_LOG = tl.constexpr(-1000.0)  # the base-2 logarithm of a probability of 0


class PairPart(NamedTuple):
    """A part of both rows, and the options of the call.

    Fields:
        x_ptr, t_ptr: the first logits of the rows of student and teacher.
        first, last: the classes of the part.
        cap: the soft-cap, or None.
        weight: beta.
        log2_scale: the factor of logits in exponents.
    """

    x_ptr: Any
    t_ptr: Any
    first: Any
    last: Any
    cap: Any
    weight: Any
    log2_scale: Any


class PairShare(NamedTuple):
    """The statistics of both rows over some classes, `[1, LANES]` of the lanes, or numbers.

    A class has the exponent a = x * log2_scale - shift, where the shift is a rounded number. It
    stands in each exponent of the row, so the rounding cancels in probabilities.

    Fields:
        shift, total: the maximum of x * log2_scale, and the sum of the exponentials of a.
        t_shift, t_total: those of the teacher.
        weighted: for the forward KL, the sum of exp2(b) * (b - a) with the teacher's exponents b;
            for the reverse KL, of exp2(a) * (a - b); otherwise 0.
    """

    shift: Any
    total: Any
    t_shift: Any
    t_total: Any
    weighted: Any


@triton.jit
def max_of_pairs(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def sum_of_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def sum_of_triples(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def max_of_both(x, t):
    """Return two maxima by one exchange between the threads."""
    if INTERPRETED:
        return tl.max(x), tl.max(t)
    else:
        return tl.reduce((x, t), None, max_of_pairs)


@triton.jit
def sum_of_both(x, t):
    """Return two sums by one exchange between the threads."""
    if INTERPRETED:
        return tl.sum(x), tl.sum(t)
    else:
        return tl.reduce((x, t), None, sum_of_pairs)


@triton.jit
def sum_of_three(x, t, terms):
    """Return three sums by one exchange between the threads."""
    if INTERPRETED:
        return tl.sum(x), tl.sum(t), tl.sum(terms)
    else:
        return tl.reduce((x, t, terms), None, sum_of_triples)


@triton.jit
def sum_by_lane(x):
    """Return the sum of each lane, [1, LANES], of a block of `by_lane`."""
    if len(x.shape) == 2:
        return tl.sum(x, axis=1)[:, None]
    else:
        return tl.sum(tl.sum(x, axis=3), axis=1)


@triton.jit
def load_logits(
    row_ptr,
    v,
    part,
    UNMASKED: tl.constexpr,
    FILL: tl.constexpr,
    FAST: tl.constexpr,
    POLICY: tl.constexpr,
    VEC: tl.constexpr,
):
    """Load the soft-capped logits of the classes v in fp32, FILL past the last class of the part.

    With FAST bf16 becomes fp32 by one instruction for each number.
    """
    if UNMASKED:
        x = tl.load(row_ptr + v, eviction_policy=POLICY)
    else:
        is_loaded = v // VEC * VEC < part.last
        x = tl.load(row_ptr + v, mask=is_loaded, other=0.0, eviction_policy=POLICY)
    if FAST and x.dtype == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    x = apply_softcap(x.to(tl.float32), part.cap, part.cap is not None)
    return x if UNMASKED else tl.where(v < part.last, x, FILL)


@triton.jit
def load_both(
    part,
    start,
    UNMASKED: tl.constexpr,
    FILL: tl.constexpr,
    FAST: tl.constexpr,
    POLICY: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the classes of a block of the part, and the soft-capped logits of both rows."""
    v = (start + tl.arange(0, BLOCK))[None, :]
    x = load_logits(part.x_ptr, v, part, UNMASKED, FILL, FAST, POLICY, VEC)
    t = load_logits(part.t_ptr, v, part, UNMASKED, FILL, FAST, POLICY, VEC)
    return v, x, t


@triton.jit
def exponent(x, shift, part):
    """Return the exponents of classes, from their logits and the finite shift of their row."""
    return tl.fma(x, part.log2_scale, -shift)


@triton.jit
def moved_share(share, shift, t_shift, KIND: tl.constexpr):
    """Return the sums of a share relative to other shifts, which are at least its own."""
    moved = share.shift - finite_shift(shift)
    t_moved = share.t_shift - finite_shift(t_shift)
    scale, t_scale = tl.exp2(moved), tl.exp2(t_moved)
    weighted = share.weighted
    # Without classes a row has no shift. An infinite sum stays, unless its probabilities vanish.
    if KIND == REVERSE:
        apart = finite_shift(moved) - finite_shift(t_moved)
        weighted = tl.where(scale == 0.0, 0.0, scale * (weighted + share.total * apart))
    elif KIND != MIXTURE:
        apart = finite_shift(t_moved) - finite_shift(moved)
        weighted = tl.where(t_scale == 0.0, 0.0, t_scale * (weighted + share.t_total * apart))
    return share.total * scale, share.t_total * t_scale, weighted


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
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one block of classes to the statistics of the lanes, whose shifts CAREFUL updates."""
    LANES: tl.constexpr = share.shift.shape[1]
    VECTOR: tl.constexpr = 1 if LANES == 1 else VEC
    FILL: tl.constexpr = NOTHING if CAREFUL else FINITE
    _, x, t = load_both(part, start, UNMASKED, FILL, FAST, READ_AGAIN, VEC, BLOCK)
    x, t = by_lane(x, LANES, VECTOR), by_lane(t, LANES, VECTOR)
    shift, t_shift = share.shift, share.t_shift
    total, t_total, weighted = share.total, share.t_total, share.weighted
    if CAREFUL:
        x_shift, y_shift = lane_max(x) * part.log2_scale, lane_max(t) * part.log2_scale
        shift, t_shift = tl.maximum(shift, x_shift), tl.maximum(t_shift, y_shift)
        total, t_total, weighted = moved_share(share, shift, t_shift, KIND)
    a = exponent(x, broadcast_lanes(finite_shift(shift)), part)
    b = exponent(t, broadcast_lanes(finite_shift(t_shift)), part)
    e, t_e = tl.exp2(a), tl.exp2(b)
    if KIND != MIXTURE:
        weight = e if KIND == REVERSE else t_e
        terms = weight * (a - b if KIND == REVERSE else b - a)
        if CAREFUL:  # A class of probability 0 counts as 0, even with infinite logits.
            terms = tl.where(weight == 0.0, 0.0, terms)
        weighted += sum_by_lane(terms)
    return PairShare(shift, total + sum_by_lane(e), t_shift, t_total + sum_by_lane(t_e), weighted)


@triton.jit
def scan_part(
    part,
    CAREFUL: tl.constexpr,
    KIND: tl.constexpr,
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the statistics of the lanes over a part."""
    TAIL: tl.constexpr = BLOCK if LANES == 1 else LANES * VEC
    VECTOR: tl.constexpr = 1 if LANES == 1 else VEC
    zero = tl.zeros([1, LANES], tl.float32)
    shift = tl.full([1, LANES], -float("inf"), tl.float32)
    t_shift = shift
    if not CAREFUL:
        first = part.first
        _, x, t = load_both(part, first, False, NOTHING, FAST, READ_AGAIN, VEC, TAIL)
        x, t = by_lane(x, LANES, VECTOR), by_lane(t, LANES, VECTOR)
        shift, t_shift = lane_max(x) * part.log2_scale, lane_max(t) * part.log2_scale
    share = PairShare(shift, zero, t_shift, zero, zero)
    last = unmasked_end(part, BLOCK)
    for start in range(part.first, last, BLOCK):
        share = add_block(share, part, start, True, CAREFUL, KIND, FAST, VEC, BLOCK)
    for start in range(last, part.last, TAIL):
        share = add_block(share, part, start, False, CAREFUL, KIND, FAST, VEC, TAIL)
    return share


@triton.jit
def merged_shares(shares, KIND: tl.constexpr):
    """Return one `PairShare` of several."""
    shift, t_shift = max_of_both(shares.shift, shares.t_shift)
    total, t_total, weighted = moved_share(shares, shift, t_shift, KIND)
    if KIND == MIXTURE:
        total, t_total = sum_of_both(total, t_total)
        return PairShare(shift, total, t_shift, t_total, 0.0)
    else:
        total, t_total, weighted = sum_of_three(total, t_total, weighted)
        return PairShare(shift, total, t_shift, t_total, weighted)


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
    log_p = exponent(x, finite_shift(share.shift), part) - log_exact(share.total) * LOG2E
    log_q = exponent(t, finite_shift(share.t_shift), part) - log_exact(share.t_total) * LOG2E
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
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one block of classes to the divergences of both rows from their mixture."""
    _, x, t = load_both(part, start, UNMASKED, NOTHING, FAST, READ_AGAIN, VEC, BLOCK)
    p, q, ratio, t_ratio = mixture_of_block(x, t, part, share, FAST)
    return student + p * ratio, teacher + q * t_ratio


@triton.jit
def store_block(
    d_ptr,
    on_row,
    part,
    share,
    student,
    start,
    UNMASKED: tl.constexpr,
    KIND: tl.constexpr,
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the gradient of a block of the student's logits.

    `on_row` is the derivative of the result in the loss of the row, over the temperature, and
    `student` is the student's divergence from the mixture in units of log 2.
    """
    v, x, t = load_both(part, start, UNMASKED, NOTHING, FAST, READ_LAST, VEC, BLOCK)
    if KIND == MIXTURE:
        p, _, ratio, _ = mixture_of_block(x, t, part, share, FAST)
        grad = (on_row * (1.0 - part.weight) * LN2) * p * (ratio - student)
    else:
        a = exponent(x, finite_shift(share.shift), part)
        b = exponent(t, finite_shift(share.t_shift), part)
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
    grad = grad.to(d_ptr.dtype.element_ty)
    if UNMASKED:
        tl.store(d_ptr + v, grad, cache_modifier=".cs")
    else:
        tl.store(d_ptr + v, grad, mask=v // VEC * VEC < part.last, cache_modifier=".cs")


@triton.jit
def divergence_row_kernel(
    logits,  # StridedRows [M, C] of adjacent classes, like the next two
    teacher,  # StridedRows [M, C]
    dlogits,  # StridedRows [M, C]
    row_factor_ptr,  # [M] the derivative of the result in each row's loss, or None for `factor`
    slots_ptr,  # [1 + 3 * M * splits] int64, zero: the counter, then three slots for each program
    loss_ptr,  # [M]
    row_split,  # RowSplit
    factor: tl.float64,
    beta: tl.float64,
    temperature: tl.float64,
    softcap: tl.float64,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,  # at least `splits`, or 0 where a program has the whole row
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute divergence and gradient of one row with one read of both logits and one write.

    Where there are slots, programs share the row. A row whose factor is 0 is not read, and its loss
    and gradient are 0.
    """
    SHARED: tl.constexpr = slots_ptr is not None
    classes, splits, classes_per_program = row_split
    index = next_part(slots_ptr, SHARED)
    if SHARED:
        slots_ptr = slots_ptr + 1 + index // splits * 3 * splits
    row, split = index // splits, (index % splits).to(tl.int32)
    on_row = tl.full([], factor, tl.float32)
    if row_factor_ptr is not None:
        on_row = tl.load(row_factor_ptr + row).to(tl.float32)
    inverse = reciprocal(tl.full([], temperature, tl.float32))
    first = split * classes_per_program
    x_ptr = logits.ptr + aligned_start(row * logits.m, VEC)
    t_ptr = teacher.ptr + aligned_start(row * teacher.m, VEC)
    d_ptr = dlogits.ptr + aligned_start(row * dlogits.m, VEC)
    part = PairPart(
        x_ptr,
        t_ptr,
        first,
        tl.minimum(first + classes_per_program, classes),
        tl.full([], softcap, tl.float32) if HAS_SOFTCAP else None,
        tl.full([], beta, tl.float32),
        LOG2E * inverse,
    )
    grad = on_row * inverse
    loss = 0.0
    if on_row == 0.0:
        for start in range(part.first, part.last, BLOCK):
            v = start + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], d_ptr.dtype.element_ty)
            tl.store(d_ptr + v, zeros, mask=v // VEC * VEC < part.last)
    else:
        # The first scan takes the shifts from the first vector of each lane, and assumes that no
        # logit is infinite. A careful one follows where a lane has no shift, or where sums are NaN
        # or might overflow.
        share = scan_part(part, False, KIND, FAST, VEC, LANES, BLOCK)
        is_plain = (share.total < LARGEST) & (share.t_total < LARGEST)
        is_plain &= (share.shift > -float("inf")) & (share.t_shift > -float("inf"))
        is_plain &= share.weighted == share.weighted
        if tl.min(is_plain.to(tl.int32)) == 0:
            share = scan_part(part, True, KIND, FAST, VEC, LANES, BLOCK)
        share = merged_shares(share, KIND)
        if SHARED:
            valid = tl.arange(0, BLOCK_SPLITS) < splits
            store_pair(slots_ptr, split, share.shift, share.total)
            store_pair(slots_ptr + splits, split, share.t_shift, share.t_total)
            if KIND != MIXTURE:
                store_pair(slots_ptr + 2 * splits, split, share.weighted, share.weighted)
            shifts, totals = collect_pairs(slots_ptr, splits, BLOCK_SPLITS)
            t_shifts, t_totals = collect_pairs(slots_ptr + splits, splits, BLOCK_SPLITS)
            weighted = tl.zeros([BLOCK_SPLITS], tl.float32)
            if KIND != MIXTURE:
                weighted, _ = collect_pairs(slots_ptr + 2 * splits, splits, BLOCK_SPLITS)
            parts = PairShare(
                tl.where(valid, shifts, -float("inf")),
                tl.where(valid, totals, 0.0),
                tl.where(valid, t_shifts, -float("inf")),
                tl.where(valid, t_totals, 0.0),
                tl.where(valid, weighted, 0.0),
            )
            share = merged_shares(parts, KIND)
        of_student = 0.0
        last = unmasked_end(part, BLOCK)
        if KIND == MIXTURE:
            of_student = tl.zeros([1, BLOCK], tl.float32)
            of_teacher = tl.zeros([1, BLOCK], tl.float32)
            for start in range(part.first, last, BLOCK):
                of_student, of_teacher = add_mixture(
                    of_student, of_teacher, part, share, start, True, FAST, VEC, BLOCK
                )
            for start in range(last, part.last, BLOCK):
                of_student, of_teacher = add_mixture(
                    of_student, of_teacher, part, share, start, False, FAST, VEC, BLOCK
                )
            of_student, of_teacher = sum_of_both(of_student, of_teacher)
            if SHARED:
                sums_ptr = slots_ptr + 2 * splits
                xs, ts = exchange_pairs(
                    sums_ptr, split, splits, of_student, of_teacher, BLOCK_SPLITS
                )
                xs, ts = tl.where(valid, xs, 0.0), tl.where(valid, ts, 0.0)
                of_student, of_teacher = sum_of_both(xs, ts)
            loss = (part.weight * of_teacher + (1.0 - part.weight) * of_student) * LN2
        for start in range(part.first, last, BLOCK):
            store_block(d_ptr, grad, part, share, of_student, start, True, KIND, FAST, VEC, BLOCK)
        for start in range(last, part.last, BLOCK):
            store_block(d_ptr, grad, part, share, of_student, start, False, KIND, FAST, VEC, BLOCK)
        if KIND != MIXTURE:
            if split == 0:  # The KL is computed in fp64.
                total, t_total = share.total.to(tl.float64), share.t_total.to(tl.float64)
                kl = share.weighted.to(tl.float64) * 0.6931471805599453
                if KIND == REVERSE:
                    kl = kl / total + tl.log(t_total / total)
                else:
                    kl = kl / t_total + tl.log(total / t_total)
                loss = kl.to(tl.float32)
    tl.store(loss_ptr + row, loss, mask=split == 0)
