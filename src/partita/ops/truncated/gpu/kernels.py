"""Kernels that find the threshold of each row's rules exactly, without sorting the row.

The logits that a row keeps are those of at least a threshold. The keys of logits are integers in
the order of the numbers, so a bisection of keys finds the greatest key whose classes, and all above
it, reach a number or a probability. It runs over a tile, the logits of a bracket of keys.

A program reads its row to take the totals, and collects the greatest classes, about a thousand, as
the first tile. A tile without the threshold says on which side of it the threshold is, and the row
is read again for another bracket: the rule and a sample of the row say where the threshold probably
is. A bracket that has too many classes is cut at one of them, as quickselect does. A short row is
one tile.

With `slope` = log2(e) / temperature, the exponentials are 2**u,
u = slope (x - shift). The weights of a search are ones or these exponentials.
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
    capped_logits,
    divide,
    finite_shift,
    log_exact,
    reciprocal,
    through_softcap,
)
from ....primitives.gpu.memory import load_vectors, prefetch_line
from ....primitives.gpu.reduce import NOT_FOUND, locate_tile, tile_ptrs
from ...cross_entropy.gpu.row_math import load_row_gradient

MARGIN = tl.constexpr(3.0)  # of a guess, in standard deviations of what the sample says


class SamplerRules(NamedTuple):
    """The numbers of the rules of each row, [M], or None."""

    top_k: Any
    top_p: Any
    min_p: Any
    temperature: Any


class TruncatedRow(NamedTuple):
    """A row and how its logits are read.

    Fields:
        index: the row.
        ptr: its first logit.
        column: the stride over classes.
        classes: the number of classes.
        softcap: the soft-cap, or None.
        temperature: the temperature.
        slope: log2(e) / temperature.
    """

    index: Any
    ptr: Any
    column: Any
    classes: Any
    softcap: Any
    temperature: Any
    slope: Any


class Reading(NamedTuple):
    """What a read of a row finds: of lanes, [LANES], or of the row.

    Fields:
        collected: the number of classes in the bracket.
        number, mass, sum_x_exp: how many classes are above it, and their sums of 2**u and u 2**u,
            in fp64; the mass is that of all classes in the read of totals.
        maximum: the maximum of the soft-capped logits.
        block: the first block that has it.
        complete: of the row, whether the buffer has all classes of the bracket.
    """

    collected: Any
    number: Any
    mass: Any
    sum_x_exp: Any
    maximum: Any
    block: Any
    complete: Any


class Sample(NamedTuple):
    """A sample of a row: the number of logits in each bin, the greatest one, a bin's width.

    The last bin has masked classes, and those that are too far below the greatest to matter.
    """

    counts: Any
    greatest: Any
    width: Any


class Tile(NamedTuple):
    """Logits on chip, which are those of the keys from `first` to `last` if it is complete.

    Each of them stands for `each` classes. Otherwise no sum over them is too great.
    """

    x: Any
    each: Any
    first: Any
    last: Any
    complete: Any


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """Return the key of a number, which has its sign and magnitude.

    SHIFT is the number of low bits that a half type does not have.
    """
    dtype: tl.constexpr = tl.int64 if x.dtype == tl.float64 else tl.int32
    magnitude = tl.abs(x).to(dtype, bitcast=True) >> SHIFT
    return tl.where(x < 0.0, -magnitude, magnitude)


@triton.jit
def logit_of(key, SHIFT: tl.constexpr):
    """Return the number of a key."""
    dtype: tl.constexpr = tl.float64 if key.dtype == tl.int64 else tl.float32
    magnitude = (tl.abs(key) << SHIFT).to(dtype, bitcast=True)
    return tl.where(key < 0, -magnitude, magnitude)


@triton.jit
def find_key(x, weight, goal, low, high, SHIFT: tl.constexpr):
    """Return the greatest key from `low` to `high` from which on the weights reach the goal.

    It is `low` if none does.
    """
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # the upper one of two
        reaches = tl.sum(tl.where(x >= logit_of(middle, SHIFT), weight, 0.0)) >= goal
        low, high = tl.where(reaches, middle, low), tl.where(reaches, high, middle - 1)
    return low


@triton.jit
def min_p_key(row, shift, ln_min_p, temperature, low, high, SHIFT: tl.constexpr):
    """Return the least key whose probability is at least min-p times the greatest."""
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        x = apply_softcap(logit_of(middle, SHIFT), row.softcap)
        passes = divide(x - shift, temperature) >= ln_min_p
        low, high = tl.where(passes, low, middle + 1), tl.where(passes, middle, high)
    return low


@triton.jit
def exponent(row, shift, x):
    """Return u of soft-capped logits, up to a constant; u of the maximum is the constant.

    One multiply-add is half of the work of a difference and a product.
    """
    if UNFUSED:
        return (x - shift) * row.slope
    else:
        return tl.fma(x, row.slope, -shift * row.slope)


@triton.jit
def exponents(row, shift, x):
    """Return 2**u and u of logits before soft-capping; 0 and a finite number for -inf."""
    u = exponent(row, shift, apply_softcap(x, row.softcap))
    return tl.where(x > -float("inf"), tl.exp2(u), 0.0), tl.maximum(u, -10000.0)


@triton.jit
def cut_of(x, threshold):
    """Return a number between the least logit of a tile that is kept and the greatest dropped one.

    It is the threshold where the tile does not have both, or nothing is between them.
    """
    dropped = tl.max(tl.where(x < threshold, x, -float("inf")))
    kept = tl.min(tl.where((x >= threshold) & (x > -float("inf")), x, float("inf")))
    cut = 0.5 * kept + 0.5 * dropped
    return tl.where((kept < float("inf")) & (cut > dropped), cut, threshold)


@triton.jit
def range_of_keys(ACC_DTYPE: tl.constexpr, SHIFT: tl.constexpr):
    """Return the keys of the least finite number and of infinity."""
    infinity = tl.full([], float("inf"), ACC_DTYPE)
    return key_of(-infinity, SHIFT) + 1, key_of(infinity, SHIFT)


@triton.jit
def greatest_key(row, maximum, lowest, highest, SHIFT: tl.constexpr):
    """Return the key of the maximum, or one above it if it is soft-capped."""
    of_maximum = key_of(tl.where(maximum == maximum, maximum, 0.0), SHIFT)
    return highest if row.softcap is not None else tl.maximum(of_maximum, lowest)


@triton.jit
def load_rules(row, rules, maximum, lowest, top, MIN_P_FIRST: tl.constexpr, SHIFT: tl.constexpr):
    """Return the rules of a row, whose keys are from `lowest` to `top`.

    These are top-k (0 for none), top-p, the key below which classes are dropped before top-p and
    that of all rules but top-k and top-p, and whether the numbers are in their ranges.
    """
    top_k, top_p, least = row.index * 0, tl.full([], 1.0, tl.float64), lowest
    valid = (row.temperature > 0.0) & (row.temperature < float("inf"))
    if rules.top_k is not None:
        top_k = tl.load(rules.top_k + row.index)
        top_k = tl.where(top_k < row.classes, top_k, 0)
    if rules.top_p is not None:
        top_p = tl.load(rules.top_p + row.index)
        valid &= (top_p >= 0.0) & (top_p <= 1.0)
    if rules.min_p is not None:
        min_p = tl.load(rules.min_p + row.index)
        valid &= (min_p >= 0.0) & (min_p <= 1.0)
        if min_p > 0.0:
            ln_min_p, greatest = tl.log(min_p).to(maximum.dtype), finite_shift(maximum)
            least = min_p_key(row, greatest, ln_min_p, row.temperature, lowest, top, SHIFT)
    return top_k, top_p, least if MIN_P_FIRST else lowest, least, valid


@triton.jit
def load_block(row, start, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Load a block of classes, [., LANES], -inf past the last one, and which of them exist."""
    exists = tl.full([1], True, tl.int1)
    where = (row.ptr + tl.arange(0, 1), row.column, start, row.classes, exists)
    x, _, mask = load_vectors(*where, MASKED, "", TILE.block, TILE)
    PER_LANE: tl.constexpr = TILE.block // TILE.lanes
    x = x.to(row.slope.dtype)
    return tl.reshape(x, [PER_LANE, TILE.lanes]), tl.reshape(mask, [PER_LANE, TILE.lanes])


@triton.constexpr_function
def collect_assembly(step):
    """Return PTX with which a thread stores those of 8 logits that are at least a bound.

    An address and a maximum are results and operands, and the bound and the logits follow. The
    addresses are `step` bytes apart and have one high word. Most warps have nothing to store.
    """
    code = ["mov.f32 m, $5;"] + [f"max.f32 m, m, ${i};" for i in range(6, 13)]
    code += ["max.f32 $1, $1, m; setp.lt.f32 p, m, $4; @p bra done; mov.b64 {low, high}, $0;"]
    for i in range(5, 13):
        code += [f"setp.ge.f32 p, ${i}, $4;", "mov.b64 address, {low, high};"]
        code += [f"@p st.global.b32 [address], ${i};", f"@p add.s32 low, low, {step};"]
    registers = "{ .reg .pred p; .reg .f32 m; .reg .b32 low, high; .reg .b64 address; "
    return registers + " ".join(code) + " mov.b64 $0, {low, high}; done: }"


@triton.constexpr_function
def bracket_assembly(step, is_first):
    """Return PTX with which a thread adds up those of 8 logits above a bracket and stores its own.

    An offset, a number and two sums are results and operands. An address, the bounds of the
    bracket, the logits and their exponents follow. Offsets from the address are `step` bytes apart.
    The sums have the order of `tl.sum`, so the second of the first two products comes first.
    """
    code = []
    for i in range(0, 8, 2):
        adds = []
        for x, u, p in ((11 + i, 19 + i, "p"), (12 + i, 20 + i, "q")):
            code += [f"setp.gt.f32 {p}, ${x}, $10; setp.ge.and.f32 inside, ${x}, $9, !{p};"]
            code += ["cvt.u64.u32 address, $0; add.s64 address, address, $8;"]
            code += [f"@inside st.global.b32 [address], ${x}; @inside add.s32 $0, $0, {step};"]
            adds += [f"ex2.approx.ftz.f32 e, ${u}; @{p} add.s32 $1, $1, 1;"]
            adds[-1] += f"@{p} add.f32 $2, $2, e; @{p} fma.rn.f32 $3, e, ${u}, $3;"
        code += adds[::-1] if is_first and i == 0 else adds
    return "{ .reg .pred p, q, inside; .reg .f32 e; .reg .b64 address; " + " ".join(code) + " }"


@triton.jit
def numbers_of_lanes(x):
    """Return the numbers of a block, [., LANES], as a tuple of [LANES]. A thread has them all."""
    bits = x.to(tl.int64 if x.dtype == tl.float64 else tl.int32, bitcast=True)
    index, found = tl.arange(0, x.shape[0])[:, None], ()
    for i in tl.static_range(x.shape[0]):
        number = tl.sum(tl.where(index == i, bits, 0), axis=0).to(x.dtype, bitcast=True)
        found = found + (number,)
    return found


@triton.jit
def store_logits(logits, low, high, ptr, place):
    """Store the logits of lanes that are in a bracket, and return the next places."""
    for i in tl.static_range(len(logits)):
        inside = (logits[i] >= low) & (logits[i] <= high)
        tl.store(ptr + place, logits[i], mask=inside)
        place += tl.where(inside, place.shape[0], 0)
    return place


@triton.jit
def read_totals(
    state, row, shift, slots, start, MASKED: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr
):
    """Add a block to the sum and the maximum of lanes, and store its classes from a bound on."""
    logit, mask = load_block(row, start, MASKED, TILE)
    x = capped_logits(logit, mask, row.softcap, logit.dtype)
    mass = state.mass + tl.sum(tl.exp2(exponent(row, shift, x)), axis=0).to(tl.float64)
    of_block, at, logits = tl.max(x, axis=0), start // TILE.block, numbers_of_lanes(logit)
    LANES: tl.constexpr = TILE.lanes
    place = tl.minimum(state.collected, SLOTS) * LANES + tl.arange(0, LANES)
    if TILE.access > 0 and row.ptr.dtype.element_ty.primitive_bitwidth == 16:
        # The block after the next one comes to the L2 cache meanwhile.
        ahead = tl.minimum(start + 2 * TILE.block, row.classes - TILE.block)
        prefetch_line(row.ptr + ahead + tl.arange(0, LANES) * logit.shape[0])
        first = (slots[0] + place).to(tl.int64)
        found = (first, tl.full([LANES], -float("inf"), tl.float32))
        ASSEMBLY: tl.constexpr = collect_assembly(4 * LANES)
        for i in tl.static_range(0, len(logits), 8):
            args = found + (slots[1],) + logits[i : i + 8]
            found = tl.inline_asm_elementwise(
                ASSEMBLY, "=&l,=&f,0,1" + ",f" * 9, args, (tl.int64, tl.float32), False, 1
            )
        number = (found[0] - first).to(tl.int32) // (4 * LANES)
        of_block = found[1] if row.softcap is None else of_block
    else:
        number = (store_logits(logits, slots[1], float("inf"), slots[0], place) - place) // LANES
    is_first = (of_block > state.maximum) | ((of_block == state.maximum) & (at < state.block))
    block, maximum = tl.where(is_first, at, state.block), tl.maximum(state.maximum, of_block)
    sums = (state.number, mass, state.sum_x_exp)
    return Reading(state.collected + number, *sums, maximum, block, 0)


@triton.jit
def read_bracket(
    state, row, shift, slots, start, MASKED: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr
):
    """Add a block's classes above the bracket to the sums of lanes, and store those in it."""
    logit, _ = load_block(row, start, MASKED, TILE)
    u, logits = exponent(row, shift, apply_softcap(logit, row.softcap)), numbers_of_lanes(logit)
    LANES: tl.constexpr = TILE.lanes
    place = tl.minimum(state.collected, SLOTS) * LANES + tl.arange(0, LANES)
    if TILE.access > 0 and logit.dtype == tl.float32:
        zeros, us = tl.zeros([LANES], tl.float32), numbers_of_lanes(u)
        found = (place * 4, zeros.to(tl.int32), zeros, zeros)
        bracket = (slots[0].to(tl.int64), slots[1], slots[2])
        KINDS: tl.constexpr = "=&r,=&r,=&f,=&f,0,1,2,3,l" + ",f" * 18
        for i in tl.static_range(0, len(logits), 8):
            args = found + bracket + logits[i : i + 8] + us[i : i + 8]
            found = tl.inline_asm_elementwise(
                bracket_assembly(4 * LANES, i == 0),
                KINDS,
                args,
                (tl.int32, tl.int32, tl.float32, tl.float32),
                False,
                1,
            )
        end, number, mass, sum_x_exp = found[0] // 4, found[1], found[2], found[3]
    else:
        above = logit > slots[2]
        u = tl.where(above, u, -10000.0)
        e = tl.exp2(u)
        number, mass = tl.sum(above.to(tl.int32), axis=0), tl.sum(e, axis=0)
        sum_x_exp = tl.sum(e * u, axis=0)
        end = store_logits(logits, slots[1], slots[2], slots[0], place)
    mass, sum_x_exp = state.mass + mass.to(tl.float64), state.sum_x_exp + sum_x_exp.to(tl.float64)
    collected, sums = state.collected + (end - place) // LANES, (state.number + number, mass)
    return Reading(collected, *sums, sum_x_exp, state.maximum, state.block, 0)


@triton.jit
def read_row(
    row,
    shift,
    first,
    last,
    buffer_ptr,
    TOTALS: tl.constexpr,
    SHIFT: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Read a row and return the `Reading`; no thread waits for another meanwhile.

    The classes of the bracket, two keys, are collected by lane, each of which has a column of
    slots. What is too much for them is counted alone. The buffer has room for one block more.

    The read of TOTALS has no upper end. Its slots are the tile, and those that are left become
    -inf. Others start at the end of the row, which the cache has. Their slots stand behind the
    tile, to which the classes are moved, or one of them if they are too many.
    """
    LANES: tl.constexpr = TILE.lanes
    SLOTS: tl.constexpr = (1 if TOTALS else 2) * CANDIDATES // LANES
    PART: tl.constexpr = min(SLOTS, 4)
    zeros, counts = tl.zeros([LANES], tl.float64), tl.zeros([LANES], tl.int32)
    maximum = tl.full([LANES], -float("inf"), row.slope.dtype)
    state = Reading(counts, counts, zeros, zeros, maximum, counts, 0)
    slots_ptr = buffer_ptr if TOTALS else buffer_ptr + CANDIDATES
    unmasked = row.classes // TILE.block * TILE.block
    read_block: tl.constexpr = read_totals if TOTALS else read_bracket
    # Beside a uniform register, ptxas would load the constant `slope` for each multiply-add.
    shift = tl.where(tl.arange(0, LANES) < row.classes, shift, 0.0)
    args = (row, shift, (slots_ptr, logit_of(first, SHIFT), logit_of(last, SHIFT)))
    tl.debug_barrier()  # other threads may still read the buffer
    if unmasked < row.classes:
        state = read_block(state, *args, unmasked, True, SLOTS, TILE)
    for start in range(0, unmasked, TILE.block):
        at = start if TOTALS else unmasked - TILE.block - start
        state = read_block(state, *args, at, False, SLOTS, TILE)
    maximum, counts = tl.max(state.maximum), state.collected
    block = tl.min(tl.where(state.maximum == maximum, state.block, NOT_FOUND))
    collected = tl.sum(counts)
    complete = (tl.max(counts) <= SLOTS) & (collected <= CANDIDATES)
    first_place, middle = tl.cumsum(counts, axis=0) - counts, collected // 2
    tl.debug_barrier()  # other threads have stored what this one reads
    for start in tl.range(0, SLOTS, PART):
        slot = start + tl.arange(0, PART)[:, None]
        places, exists = slot * LANES + tl.arange(0, LANES)[None, :], slot < counts[None, :]
        if TOTALS:
            padding = tl.full([PART, LANES], -float("inf"), maximum.dtype)
            tl.store(slots_ptr + places, padding, mask=exists == 0)
        else:
            is_pivot = (first_place <= middle) & (middle < first_place + counts)
            exists &= complete | (is_pivot[None, :] & (slot == 0))
            x = tl.load(slots_ptr + places, mask=exists)
            place = tl.where(complete, first_place[None, :] + slot, 0)
            tl.store(buffer_ptr + place, x, mask=exists)
    if TOTALS:
        collected = tl.where(complete, CANDIDATES, collected)
    tl.debug_barrier()  # other threads will read what this one has stored
    sums = tl.sum(state.number), tl.sum(state.mass), tl.sum(state.sum_x_exp)
    return Reading(collected, *sums, maximum, block, complete)


@triton.jit
def count_sample(row, SAMPLE: tl.constexpr, BINS: tl.constexpr):
    """Count a sample of the row's logits in bins of equal width below the greatest one.

    The sample consists of runs of 8 classes, which lie evenly over the row.
    """
    i = tl.arange(0, SAMPLE // 8).to(tl.int64)
    start = i * row.classes // (SAMPLE // 8) // 8 * 8
    column = start[None, :] + tl.arange(0, 8)[:, None]
    x = tl.load(row.ptr + column * row.column).to(row.slope.dtype)
    x = tl.reshape(x, [SAMPLE], can_reorder=True)
    greatest = tl.max(x)
    least = tl.min(tl.where(x > -float("inf"), x, greatest))
    width = tl.minimum(greatest - least, 32.0 / row.slope) / (BINS - 2)
    place = (greatest - x) / tl.maximum(width, 1e-30)
    place = tl.where(place < BINS - 1, place, BINS - 1.0)
    return Sample(tl.histogram(place.to(tl.int32), BINS), greatest, width)


@triton.jit
def key_of_edge(sample, edge, UP: tl.constexpr, SHIFT: tl.constexpr):
    """Return the greatest key that is not above an edge between bins, or the least not below it."""
    x = sample.greatest - edge * sample.width
    key = key_of(x, SHIFT)
    number = logit_of(key, SHIFT)
    return key + (number < x) if UP else key - (number > x)


@triton.jit
def edge_of(weights, below, level):
    """Return how many bins, with a fraction, are above the place with a weight below it.

    `below` has the weights below the upper edge of each bin. Inside of a bin they lie evenly.
    """
    bin = tl.sum((below > level).to(tl.int32)) - 1
    is_it = tl.arange(0, weights.shape[0]) == bin
    part = tl.sum(tl.where(is_it, (below - level) / tl.maximum(weights, 1e-30), 0.0))
    return bin + tl.minimum(part, 1.0)


@triton.jit
def guess_bracket(
    row,
    shift,
    sample,
    rest,
    by_mass,
    margin,
    low,
    high,
    CANDIDATES: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Return two keys of [low, high] between which a threshold of the row probably is.

    `rest` is the weight of the classes below the threshold. They are many and small, so a sample
    knows their weight well. The bracket has `margin` standard deviations on both sides, or fewer if
    the tile had no room for its classes.
    """
    BINS: tl.constexpr = sample.counts.shape[0]
    bin = tl.arange(0, BINS)
    middle = sample.greatest - (bin.to(row.slope.dtype) + 0.5) * sample.width
    weight = tl.where(bin < BINS - 1, exponents(row, shift, middle)[0], 0.0)
    weight = tl.where(by_mass, weight, 1.0)
    weights = sample.counts.to(row.slope.dtype) * weight
    below = tl.cumsum(weights, axis=0, reverse=True)
    squares = tl.cumsum(weights * weight, axis=0, reverse=True)
    size = tl.sum(sample.counts).to(row.slope.dtype)
    share = size / row.classes.to(row.slope.dtype)
    level = rest.to(row.slope.dtype) * share
    is_it = bin == tl.maximum(tl.sum((below > level).to(tl.int32)) - 1, 0)
    variance = tl.sum(tl.where(is_it, squares - below * below / size, 0.0))
    one = tl.sum(tl.where(is_it, weight, 0.0))
    deviation = tl.sqrt(tl.maximum(variance, one * one))
    room = 0.375 * CANDIDATES * share * one
    reach = margin * tl.minimum(deviation, tl.maximum(room, deviation) / MARGIN)
    edge = edge_of(weights, below, level - reach)
    first = tl.where(edge < BINS - 1, key_of_edge(sample, edge, False, SHIFT), low)
    edge = edge_of(weights, below, level + reach)
    last = tl.where(edge > 0.0, key_of_edge(sample, edge, True, SHIFT), high)
    overlaps = (first <= high) & (last >= low)
    last = tl.where(overlaps, tl.minimum(last, high), high)
    return tl.minimum(tl.where(overlaps, tl.maximum(first, low), low), last), last


@triton.jit
def locate(tile, weight, goal, above, low, high, SHIFT: tl.constexpr):
    """Find the greatest key of [low, high] from which on the weights reach a goal.

    `above` is the weight of the classes above the tile. Return whether the tile has the key, and
    the bounds of it that are known now; the key is both of them.
    """
    is_below = (above < goal) | (tile.last >= high)
    reaches = (above + tl.sum(weight) >= goal) | (tile.first <= low)
    found = is_below & tile.complete & reaches
    if found:
        first = tl.maximum(tile.first, low)
        last = tl.minimum(tl.minimum(tile.last, high), key_of(tl.max(tile.x), SHIFT))
        missing = (goal - above).to(weight.dtype)
        low = find_key(tile.x, weight, missing, first, tl.maximum(first, last), SHIFT)
        high = low
    else:
        low = tl.where(is_below, tl.where(reaches, tl.maximum(tile.first, low), low), tile.last + 1)
        end = tl.where(tile.complete, tile.first - 1, tile.last)
        high = tl.where(is_below, tl.minimum(end, high), high)
    return found, low, high


@triton.jit
def has_key(tile, key):
    """Return whether a tile has all classes of a key, and of those between it and its end."""
    return tile.complete & (key >= tile.first) & (key <= tile.last)


@triton.jit
def load_tile(buffer_ptr, found, first, last, SHIFT: tl.constexpr, CANDIDATES: tl.constexpr):
    """Load the classes that a read of the row has collected between two keys.

    If they are too many for the buffer, the least key stands for all of them.
    """
    i, complete = tl.arange(0, CANDIDATES), found.complete
    x = tl.load(buffer_ptr + i, mask=complete & (i < found.collected), other=-float("inf"))
    x = tl.where((complete == 0) & (i == 0), logit_of(first, SHIFT), x)
    each = tl.where(complete, 1, found.collected).to(x.dtype)
    return Tile(x, each, first, last, complete | (first == last))


@triton.jit
def finish_row(
    row,
    shift,
    results,
    kept,
    maximum,
    total,
    least,
    cut,
    label,
    valid,
    ignore_index,
    KEEPS_TARGET: tl.constexpr,
):
    """Store the results of a row, given the number of what its rules keep and the sums over it."""
    number, mass, sum_x_exp = kept
    dtype: tl.constexpr = maximum.dtype
    not_ignored = label != ignore_index
    in_range = not_ignored & (label >= 0) & (label < row.classes)
    x = tl.load(row.ptr + label * row.column, mask=in_range, other=-float("inf")).to(dtype)
    in_set = (x >= least) & (x > -float("inf"))
    adds = in_range & (in_set == 0) & (x > -float("inf")) & KEEPS_TARGET
    e, u = exponents(row, shift, x)
    mass += tl.where(adds, e, 0.0).to(tl.float64)
    sum_x_exp += tl.where(adds, e * u, 0.0).to(tl.float64)
    # The results are relative to the maximum of the row.
    moved = exponent(row, shift, finite_shift(maximum)).to(tl.float64)
    scale = tl.exp(-LN2 * moved)
    sum_x_exp = scale * (sum_x_exp - mass * moved)
    total, mass = (total * scale).to(dtype), mass * scale
    shift, valid = finite_shift(maximum), valid & (in_range | (not_ignored == 0))
    nan_or_zero = tl.where(valid, 0.0, float("nan")).to(dtype)
    kept_sumexp = tl.where(total == total, mass.to(dtype), float("nan")) + nan_or_zero
    logprob = divide(apply_softcap(x, row.softcap) - shift, row.temperature)
    logprob = tl.where(in_set | adds, logprob, -float("inf"))
    log_sum, shift = log_exact(kept_sumexp), divide(shift, row.temperature)
    index = row.index
    logprob = tl.where(not_ignored, logprob - log_sum, 0.0) + nan_or_zero
    entropy = log_sum - divide((sum_x_exp * LN2).to(dtype), kept_sumexp)
    tl.store(results.logprob + index, logprob)
    tl.store(results.logsumexp + index, shift + log_exact(total) + nan_or_zero)
    tl.store(results.kept_logsumexp + index, shift + log_sum)
    tl.store(results.entropy + index, entropy)
    tl.store(results.kept + index, (number + adds).to(tl.int64))
    in_set = (in_set & (total == total)) | (not_ignored == 0)
    tl.store(results.in_set + index, valid & in_set)
    tl.store(results.threshold + index, cut)
    tl.store(results.label + index, label)
    tl.store(results.maximum + index, maximum)
    tl.store(results.sumexp + index, total)
    tl.store(results.kept_sumexp + index, kept_sumexp)


@triton.jit
def truncated_stats_kernel(
    logits,  # StridedRows of one batch
    target_ptr,  # [M], or None for the arg-max
    rules,  # SamplerRules
    results,  # TruncatedRows [M]
    buffer,  # StridedRows of one batch, memory for a tile, two of slots and a block
    classes,
    softcap: tl.float64,
    ignore_index,
    MIN_P_FIRST: tl.constexpr,
    KEEPS_TARGET: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SHIFT: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,  # whether the tile is the whole row
    CANDIDATES: tl.constexpr,  # classes of a tile
    TILE: tl.constexpr,  # LaneTile
    SAMPLE: tl.constexpr,
    BINS: tl.constexpr,
):
    """Compute the statistics of one row, which is read again while no tile has its threshold."""
    index = tl.program_id(0).to(tl.int64)
    temperature = tl.full([], 1.0, ACC_DTYPE)
    if rules.temperature is not None:
        temperature = tl.load(rules.temperature + index).to(ACC_DTYPE)
    row = TruncatedRow(
        index,
        logits.ptr + index * logits.row,
        logits.column,
        classes,
        tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None,
        temperature,
        tl.full([], LOG2E, ACC_DTYPE) / temperature,
    )
    buffer_ptr = buffer.ptr + index * buffer.row
    lowest, highest = range_of_keys(ACC_DTYPE, SHIFT)
    zero, none = tl.full([], 0.0, tl.float64), tl.full([], 0, tl.int32)
    if WHOLE:
        x, mask = load_block(row, 0, True, TILE)
        capped = capped_logits(x, mask, row.softcap, ACC_DTYPE)
        maximum, block = tl.max(tl.max(capped, axis=0)), none
        shift = finite_shift(maximum)
        terms = tl.exp2(exponent(row, shift, capped))
        total = tl.sum(tl.sum(terms, axis=0).to(tl.float64))
        above = Reading(none, none, zero, zero, maximum, none, index >= 0)
        x, one = tl.reshape(x, [CANDIDATES]), tl.full([], 1.0, ACC_DTYPE)
        tile = Tile(x, one, lowest, highest, index >= 0)
    else:
        sample = count_sample(row, SAMPLE, BINS)
        # The first tile has a quarter of its size at most, so that no lane has too few slots.
        rank = CANDIDATES // 4 * SAMPLE // classes
        if rules.top_k is not None:
            top_k = tl.minimum(tl.load(rules.top_k + index), CANDIDATES).to(tl.int32)
            rank = tl.where(top_k > 0, tl.minimum(rank, 5 + 2 * top_k * SAMPLE // classes), rank)
        common = tl.cumsum(sample.counts, axis=0) < rank
        edge = tl.minimum(tl.sum(common.to(tl.int32)) + 1, BINS - 1)
        first, last = key_of_edge(sample, edge, False, SHIFT), highest
        first = tl.minimum(tl.maximum(first, lowest), highest)
        maximum = apply_softcap(sample.greatest, row.softcap)
        above = Reading(none, none, zero, zero, maximum, none, index < 0)
        shift, reads = finite_shift(maximum), 0
        # The sums overflow if the greatest logit of the sample is far below that of the row.
        while (reads < 2) & ((above.mass >= 1.0) & (above.mass <= 1e30) == 0):
            shift = finite_shift(above.maximum)
            args = (row, shift, first, last, buffer_ptr)
            above = read_row(*args, True, SHIFT, CANDIDATES, TILE)
            reads += 1
        maximum, block, total = above.maximum, above.block, above.mass
        above = Reading(above.collected, none, zero, zero, maximum, block, above.complete)
    top = greatest_key(row, maximum, lowest, highest, SHIFT)
    limits = load_rules(row, rules, maximum, lowest, top, MIN_P_FIRST, SHIFT)
    top_k, top_p, before, least, valid = limits
    low, high, goal, tries = lowest, top, top_k.to(tl.float64), 0
    # The steps: 0 finds the k-th class, 1 adds up what is left, 2 finds the threshold of its share,
    # and 3 needs the tile around the row's threshold.
    step = tl.where(valid & (total == total), 0, 4)
    while step < 4:
        if not WHOLE:
            tile = load_tile(buffer_ptr, above, first, last, SHIFT, CANDIDATES)
        if step == 0:
            found = top_k <= 0
            if top_k > 0:
                weight = tl.where(tile.x > -float("inf"), tile.each, 0.0)
                above_tile = above.number.to(tl.float64)
                found, low, high = locate(tile, weight, goal, above_tile, low, high, SHIFT)
            if found:
                before, step, tries = tl.maximum(before, low), 1, 0
                low, high = lowest, top
        if step == 1:
            if top_p >= 1.0:
                least, step = tl.maximum(least, before), 3
            elif before == lowest:
                goal, step = top_p * total, 2
            elif has_key(tile, before):
                e = exponents(row, shift, tile.x)[0]
                mass = tl.sum(tl.where(tile.x >= logit_of(before, SHIFT), e, 0.0)) * tile.each
                goal, low, step = top_p * (above.mass + mass), before, 2
        if step == 2:
            weight = exponents(row, shift, tile.x)[0] * tile.each
            found, low, high = locate(tile, weight, goal, above.mass, low, high, SHIFT)
            if found:
                least, step = tl.maximum(least, tl.maximum(before, low)), 3
        if step == 3:
            step += has_key(tile, least).to(tl.int32)
        if not WHOLE:
            if step < 4:
                is_overfull = (tile.complete == 0) & (low <= last) & (first <= high)
                tries += 1
                if (step == 1) | (step == 3):
                    first = tl.where(step == 1, before, least)
                    last = first
                elif (tries > 2) | (is_overfull & (tries > 1)):
                    if is_overfull:  # The keys are halved in turn, as a class may be no good pivot.
                        middle = (first & last) + ((first ^ last) >> 1)
                        of_class = key_of(tl.load(buffer_ptr), SHIFT)
                        first = tl.where(tries % 4 >= 2, of_class, middle)
                        last = first
                    else:
                        first, last = low, high
                else:
                    rest = tl.where(step == 2, total, classes.to(tl.float64)) - goal
                    rule = (rest, step == 2, MARGIN * tries, low, high)
                    first, last = guess_bracket(row, shift, sample, *rule, CANDIDATES, SHIFT)
                args = (row, shift, first, last, buffer_ptr)
                above = read_row(*args, False, SHIFT, CANDIDATES, TILE)
    if not WHOLE:
        tile = load_tile(buffer_ptr, above, first, last, SHIFT, CANDIDATES)
    if target_ptr is not None:
        label = tl.load(target_ptr + index).to(tl.int64)
    else:  # The first block that has the maximum is read again.
        column = block * TILE.block + tl.arange(0, TILE.block)
        pointers = row.ptr + column.to(tl.int64) * row.column
        y = tl.load(pointers, mask=column < classes, other=-float("inf")).to(ACC_DTYPE)
        y = tl.where(column < classes, apply_softcap(y, row.softcap), -float("inf"))
        label = tl.min(tl.where(y == tl.max(y), column, NOT_FOUND))
        label = tl.minimum(label, classes - 1).to(tl.int64)
    threshold = logit_of(least, SHIFT)
    kept = tile.x >= threshold
    cut = cut_of(tile.x, threshold)
    e, u = exponents(row, shift, tile.x)
    e = tl.where(kept, e * tile.each, 0.0)
    number = tl.sum(tl.where(kept & (tile.x > -float("inf")), tile.each, 0.0)).to(tl.int32)
    sums = (
        tl.where(valid & (total == total), above.number + number, 0),
        above.mass + tl.sum(e.to(tl.float64)),
        above.sum_x_exp + tl.sum((e * u).to(tl.float64)),
    )
    found = (results, sums, maximum, total, threshold, cut, label, valid, ignore_index)
    finish_row(row, shift, *found, KEEPS_TARGET)


@triton.jit(do_not_specialize=["first"])
def truncated_stats_backward_kernel(
    on_label,  # RowNumbers, the gradients of the first four results; None for zeros
    on_all,
    on_kept,
    on_entropy,
    logits,  # StridedRows, from the class `first` on
    found,  # TruncatedSums, [batches, rows]
    dlogits,  # StridedRows, which may be the logits
    rows,
    width,  # of these classes
    first,
    classes,
    softcap: tl.float64,
    ignore_index,
    KEEPS_TARGET: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute a tile of the gradient from the rows' statistics with one read and one write.

    The gradient of the log-probability is 0 where the rules drop the target and it is not kept.
    """
    softcap = tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None
    tile = locate_tile(rows, width, tl.cdiv(width, BLOCK_V), ROWS, BLOCK_V)
    index, row_mask, mask = tile.index, tile.row_mask, tile.mask
    temperature = tl.full([ROWS], 1.0, ACC_DTYPE)
    if found.temperature is not None:
        temperature = tl.load(found.temperature + index, mask=row_mask, other=1.0).to(ACC_DTYPE)
    label = tl.load(found.label + index, mask=row_mask, other=0)
    not_ignored = row_mask & (label != ignore_index)
    in_range = (label >= 0) & (label < classes)
    on_label = load_row_gradient(on_label, index, row_mask, ACC_DTYPE)
    has_logprob = not_ignored
    if not KEEPS_TARGET:
        has_logprob &= tl.load(found.in_set + index, mask=row_mask, other=0) != 0
    on_label = tl.where(has_logprob, on_label, 0.0)
    on_all = load_row_gradient(on_all, index, row_mask, ACC_DTYPE)
    on_kept = load_row_gradient(on_kept, index, row_mask, ACC_DTYPE) - on_label
    on_entropy = load_row_gradient(on_entropy, index, row_mask, ACC_DTYPE)
    least = tl.load(found.threshold + index, mask=row_mask, other=0.0)
    shift = finite_shift(tl.load(found.maximum + index, mask=row_mask, other=0.0))
    total = tl.load(found.sumexp + index, mask=row_mask, other=1.0)
    kept_total = tl.load(found.kept_sumexp + index, mask=row_mask, other=1.0)
    offset = tl.load(found.entropy + index, mask=row_mask, other=0.0) - log_exact(kept_total)
    raw = tl.load(tile_ptrs(logits, tile), mask=mask, other=-float("inf")).to(ACC_DTYPE)
    is_label = first + tile.column == label[:, None]
    kept = raw >= least[:, None]
    if KEEPS_TARGET:
        kept |= is_label & not_ignored[:, None]
    kept &= raw > -float("inf")
    x = apply_softcap(raw, softcap)
    exponent = (x - shift[:, None]) * (tl.full([], LOG2E, ACC_DTYPE) / temperature)[:, None]
    e = tl.exp2(exponent)
    # This is log p + entropy, which stays finite where p is 0.
    logp_plus_entropy = LN2 * tl.maximum(exponent, -10000.0) + offset[:, None]
    of_kept = on_kept[:, None] - on_entropy[:, None] * logp_plus_entropy
    grad = tl.where(kept, e * reciprocal(kept_total)[:, None] * of_kept, 0.0)
    grad += e * (on_all * reciprocal(total))[:, None]
    grad += tl.where(is_label, on_label[:, None], 0.0)
    grad = through_softcap(grad / temperature[:, None], x, softcap)
    # A row without an upstream gradient has none, even if its logits are NaN.
    active = tl.abs(on_label) + tl.abs(on_all) + tl.abs(on_kept) + tl.abs(on_entropy)  # [ROWS]
    grad = tl.where((kept_total == kept_total)[:, None], grad, float("nan"))
    grad = tl.where((active == 0.0)[:, None], 0.0, grad)
    grad = tl.where((not_ignored & (in_range == 0))[:, None], float("nan"), grad)
    tl.store(tile_ptrs(dlogits, tile), grad.to(dlogits.ptr.dtype.element_ty), mask=mask)
