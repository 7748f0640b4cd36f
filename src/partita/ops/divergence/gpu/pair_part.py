"""A part of both rows of a divergence: its loads, and the statistics of its classes.

The statistics of a part are exchanged with the other programs of the row; see
primitives/gpu/sync.py. All exponents are of base 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import apply_softcap, finite_shift
from ....primitives.gpu.reduce import broadcast_lanes, by_lane, lane_max
from ....primitives.gpu.sync import collect_pairs, exchange_pairs, store_pair
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


class PairPart(NamedTuple):
    """A part of both rows, and the options of the call.

    Fields:
        x_ptr, t_ptr, d_ptr: the first logits of student and teacher, and the first gradient.
        first, last: the classes of the part.
        cap: the soft-cap.
        weight: beta.
        log2_scale: the factor of logits in exponents.
        on_row: the derivative of the result in the loss of the row, over the temperature.
    """

    x_ptr: Any
    t_ptr: Any
    d_ptr: Any
    first: Any
    last: Any
    cap: Any
    weight: Any
    log2_scale: Any
    on_row: Any


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
def in_fp32(x, FAST: tl.constexpr):
    """Return logits in fp32; with FAST bf16 becomes fp32 by one instruction for each number."""
    if FAST and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=r,=r,r",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(tl.float32)


@triton.jit
def load_logits(
    row_ptr,
    v,
    part,
    UNMASKED: tl.constexpr,
    FILL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    POLICY: tl.constexpr,
    VEC: tl.constexpr,
):
    """Load the soft-capped logits of the classes v, FILL past the last class of the part."""
    if UNMASKED:
        x = tl.load(row_ptr + v, eviction_policy=POLICY)
        return apply_softcap(in_fp32(x, FAST), part.cap, HAS_SOFTCAP)
    else:
        is_loaded = v // VEC * VEC < part.last
        x = tl.load(row_ptr + v, mask=is_loaded, other=0.0, eviction_policy=POLICY)
        x = apply_softcap(in_fp32(x, FAST), part.cap, HAS_SOFTCAP)
        return tl.where(v < part.last, x, FILL)


@triton.jit
def load_both(
    part,
    start,
    UNMASKED: tl.constexpr,
    FILL: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    POLICY: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the classes of a block of the part, and the soft-capped logits of both rows."""
    v = (start + tl.arange(0, BLOCK))[None, :]
    x = load_logits(part.x_ptr, v, part, UNMASKED, FILL, HAS_SOFTCAP, FAST, POLICY, VEC)
    t = load_logits(part.t_ptr, v, part, UNMASKED, FILL, HAS_SOFTCAP, FAST, POLICY, VEC)
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
def lane_shifts(x, t, part):
    """Return the maxima of the lanes' exponents in both rows, [1, LANES]."""
    return lane_max(x) * part.log2_scale, lane_max(t) * part.log2_scale


@triton.jit
def add_block(
    share,
    part,
    start,
    UNMASKED: tl.constexpr,
    CAREFUL: tl.constexpr,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one block of classes to the statistics of the lanes, whose shifts CAREFUL updates."""
    LANES: tl.constexpr = share.shift.shape[1]
    VECTOR: tl.constexpr = 1 if LANES == 1 else VEC
    FILL: tl.constexpr = NOTHING if CAREFUL else FINITE
    _, x, t = load_both(part, start, UNMASKED, FILL, HAS_SOFTCAP, FAST, READ_AGAIN, VEC, BLOCK)
    x, t = by_lane(x, LANES, VECTOR), by_lane(t, LANES, VECTOR)
    shift, t_shift = share.shift, share.t_shift
    total, t_total, weighted = share.total, share.t_total, share.weighted
    if CAREFUL:
        x_shift, y_shift = lane_shifts(x, t, part)
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
    HAS_SOFTCAP: tl.constexpr,
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
        _, x, t = load_both(part, first, False, NOTHING, HAS_SOFTCAP, FAST, READ_AGAIN, VEC, TAIL)
        shift, t_shift = lane_shifts(by_lane(x, LANES, VECTOR), by_lane(t, LANES, VECTOR), part)
    share = PairShare(shift, zero, t_shift, zero, zero)
    last = unmasked_end(part, BLOCK)
    for start in range(part.first, last, BLOCK):
        share = add_block(share, part, start, True, CAREFUL, KIND, HAS_SOFTCAP, FAST, VEC, BLOCK)
    for start in range(last, part.last, TAIL):
        share = add_block(share, part, start, False, CAREFUL, KIND, HAS_SOFTCAP, FAST, VEC, TAIL)
    return share


@triton.jit
def part_statistics(
    part,
    KIND: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    FAST: tl.constexpr,
    VEC: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the `PairShare` of a part.

    The first scan takes the shifts from the first vector of each lane, and no logit is infinite. A
    careful scan follows where a lane has no shift, or where sums are NaN or might overflow.
    """
    share = scan_part(part, False, KIND, HAS_SOFTCAP, FAST, VEC, LANES, BLOCK)
    is_plain = (share.total < LARGEST) & (share.t_total < LARGEST)
    is_plain &= (share.shift > -float("inf")) & (share.t_shift > -float("inf"))
    is_plain &= share.weighted == share.weighted
    if tl.min(is_plain.to(tl.int32)) == 0:
        share = scan_part(part, True, KIND, HAS_SOFTCAP, FAST, VEC, LANES, BLOCK)
    return merged_shares(share, KIND)


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
def exchange_shares(
    share, slots_ptr, split, splits, KIND: tl.constexpr, BLOCK_SPLITS: tl.constexpr
):
    """Return the `PairShare` of a row from those of its parts, which programs exchange."""
    store_pair(slots_ptr, split, share.shift, share.total)
    store_pair(slots_ptr + splits, split, share.t_shift, share.t_total)
    if KIND != MIXTURE:
        store_pair(slots_ptr + 2 * splits, split, share.weighted, share.weighted)
    shifts, totals = collect_pairs(slots_ptr, splits, BLOCK_SPLITS)
    t_shifts, t_totals = collect_pairs(slots_ptr + splits, splits, BLOCK_SPLITS)
    weighted = tl.zeros([BLOCK_SPLITS], tl.float32)
    if KIND != MIXTURE:
        weighted, _ = collect_pairs(slots_ptr + 2 * splits, splits, BLOCK_SPLITS)
    valid = tl.arange(0, BLOCK_SPLITS) < splits
    parts = PairShare(
        tl.where(valid, shifts, -float("inf")),
        tl.where(valid, totals, 0.0),
        tl.where(valid, t_shifts, -float("inf")),
        tl.where(valid, t_totals, 0.0),
        tl.where(valid, weighted, 0.0),
    )
    return merged_shares(parts, KIND)


@triton.jit
def exchange_sums(slots_ptr, split, splits, x, t, BLOCK_SPLITS: tl.constexpr):
    """Return the sums of two numbers over the programs that share a row."""
    xs, ts = exchange_pairs(slots_ptr, split, splits, x, t, BLOCK_SPLITS)
    valid = tl.arange(0, BLOCK_SPLITS) < splits
    return sum_of_both(tl.where(valid, xs, 0.0), tl.where(valid, ts, 0.0))
