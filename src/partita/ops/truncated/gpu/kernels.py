"""Kernels that find the threshold of each row's rules exactly, without sorting the row.

The logits that a row keeps are those of at least a threshold. The keys of the logits are integers
in the order of the numbers, so a bisection of keys finds the greatest key whose classes, and all
above it, reach a number or a probability. It runs over a tile of classes on chip:

- `truncated_stats_kernel` reads the row once, and the maximum of each group of its classes aside. A
  few groups hold all classes above a bound: the groups whose maximum is above it. They are the
  tile.
- `truncated_search_kernel` serves rows whose threshold is below that bound. A sample of the row
  gives two logits between which the threshold probably is. One more read adds up the classes above
  them, and collects those between them as the tile. The bracket moves until it has the threshold.

With `slope` = log2(e) / temperature, the exponentials are 2**u, u = slope (x - maximum).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    LN2,
    LOG2E,
    apply_softcap,
    divide,
    finite_shift,
    log_exact,
    reciprocal,
    through_softcap,
)
from ....primitives.gpu.reduce import (
    NOT_FOUND,
    add_block,
    by_lane,
    empty_state,
    lane_max,
    locate_tile,
    merge_lanes,
    tile_ptrs,
)
from ...cross_entropy.gpu.row_math import load_row_gradient


class TruncatedRow(NamedTuple):
    """A row, its rules and its statistics.

    Fields:
        index: the row.
        ptr: its first logit.
        column: the stride over classes.
        classes: the number of classes.
        softcap: the soft-cap, or None.
        slope: log2(e) / temperature.
        shift: the finite maximum of the soft-capped logits.
    """

    index: Any
    ptr: Any
    column: Any
    classes: Any
    softcap: Any
    slope: Any
    shift: Any


class Sums(NamedTuple):
    """Sums over some classes of a row.

    Fields:
        number: the number of the classes.
        mass: the sum of 2**u, in fp64.
        sum_x_exp: the sum of u 2**u, in fp64.
    """

    number: Any
    mass: Any
    sum_x_exp: Any


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
def min_p_key(row, ln_min_p, temperature, low, high, SHIFT: tl.constexpr):
    """Return the least key whose probability is at least min-p times the greatest."""
    while low < high:
        middle = (low & high) + ((low ^ high) >> 1)
        x = apply_softcap(logit_of(middle, SHIFT), row.softcap)
        passes = divide(x - row.shift, temperature) >= ln_min_p
        low, high = tl.where(passes, low, middle + 1), tl.where(passes, middle, high)
    return low


@triton.jit
def exponents(row, x):
    """Return 2**u and u of logits before soft-capping; 0 and a finite number for -inf."""
    u = (apply_softcap(x, row.softcap) - row.shift) * row.slope
    return tl.where(x > -float("inf"), tl.exp2(u), 0.0), tl.maximum(u, -10000.0)


@triton.jit
def sums_of(row, x, least):
    """Return the `Sums` of the logits of a tile that are at least `least`."""
    e, u = exponents(row, x)
    e = tl.where(x >= least, e, 0.0)
    number = tl.sum(((x >= least) & (x > -float("inf"))).to(tl.int32))
    return Sums(number, tl.sum(e.to(tl.float64)), tl.sum((e * u).to(tl.float64)))


@triton.jit
def cut_of(x, threshold, dropped):
    """Return a number between the least logit of a tile that is kept and the greatest dropped one.

    It is the threshold where the tile does not have the least one, or nothing is between the two.
    """
    kept = tl.min(tl.where((x >= threshold) & (x > -float("inf")), x, float("inf")))
    cut = 0.5 * kept + 0.5 * dropped
    return tl.where((kept < float("inf")) & (cut > dropped), cut, threshold)


@triton.jit
def load_rules(row, top_k_ptr, top_p_ptr, min_p_ptr):
    """Return the rules of a row as numbers; those without effect are 0 classes, 1 and 0."""
    top_k, top_p, min_p = row.index * 0, tl.full([], 1.0, tl.float64), tl.full([], 0.0, tl.float64)
    if top_k_ptr is not None:
        top_k = tl.load(top_k_ptr + row.index)
        top_k = tl.where(top_k < row.classes, top_k, 0)
    if top_p_ptr is not None:
        top_p = tl.load(top_p_ptr + row.index)
    if min_p_ptr is not None:
        min_p = tl.load(min_p_ptr + row.index)
    return top_k, top_p, min_p


@triton.jit
def finish_row(
    row,
    results,
    sums,
    total,
    least,
    cut,
    maximum,
    label,
    temperature,
    valid,
    ignore_index,
    KEEPS_TARGET: tl.constexpr,
):
    """Store the results of a row, given the `Sums` of what its rules keep."""
    dtype: tl.constexpr = maximum.dtype
    not_ignored = label != ignore_index
    in_range = not_ignored & (label >= 0) & (label < row.classes)
    x = tl.load(row.ptr + label * row.column, mask=in_range, other=-float("inf")).to(dtype)
    e, u = exponents(row, x)
    in_set = (x >= least) & (x > -float("inf"))
    number, mass, sum_x_exp = sums
    logprob = divide(apply_softcap(x, row.softcap) - row.shift, temperature)
    if KEEPS_TARGET:
        adds = in_range & (in_set == 0) & (x > -float("inf"))
        number += adds.to(tl.int32)
        mass += tl.where(adds, e, 0.0).to(tl.float64)
        sum_x_exp += tl.where(adds, e * u, 0.0).to(tl.float64)
        logprob = tl.where(x > -float("inf"), logprob, -float("inf"))
    else:
        logprob = tl.where(in_set, logprob, -float("inf"))
    valid &= in_range | (not_ignored == 0)
    nan_or_zero = tl.where(valid, 0.0, float("nan")).to(dtype)
    kept_sumexp = mass.to(dtype) + nan_or_zero
    log_sum, shift = log_exact(kept_sumexp), divide(row.shift, temperature)
    index = row.index
    logprob = tl.where(not_ignored, logprob - log_sum, 0.0) + nan_or_zero
    tl.store(results.logprob + index, logprob)
    tl.store(results.logsumexp + index, shift + log_exact(total) + nan_or_zero)
    tl.store(results.kept_logsumexp + index, shift + log_sum)
    entropy = log_sum - divide((sum_x_exp * LN2).to(dtype), kept_sumexp)
    tl.store(results.entropy + index, entropy)
    tl.store(results.kept + index, number.to(tl.int64))
    tl.store(results.in_set + index, valid & (in_set | (not_ignored == 0)))
    tl.store(results.threshold + index, cut)
    tl.store(results.kept_sumexp + index, kept_sumexp)


@triton.jit
def add_group_maxima(
    row, state, start, maxima_ptr, WHOLE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Add a block of the row to the state of its lanes, and store the greatest logit of each."""
    LANES: tl.constexpr = state.maximum.shape[1]
    dtype: tl.constexpr = state.maximum.dtype
    BITS: tl.constexpr = row.ptr.dtype.element_ty.primitive_bitwidth
    VECTOR: tl.constexpr = 1 if LANES == 1 else 128 // BITS
    EXACT: tl.constexpr = LANES == 1 and row.ptr.dtype.element_ty == tl.float32
    column = (start + tl.arange(0, BLOCK))[None, :]  # [1, BLOCK]
    pointers = row.ptr + column.to(tl.int64) * row.column
    if MASKED:
        raw = tl.load(pointers, mask=column < row.classes, other=-float("inf")).to(dtype)
    else:
        raw = tl.load(pointers).to(dtype)
    if not WHOLE:
        group = start // BLOCK * LANES + tl.arange(0, LANES)[None, :]
        tl.store(maxima_ptr + group, lane_max(by_lane(raw, LANES, VECTOR)))
    x = apply_softcap(raw, row.softcap)
    if MASKED:
        x = tl.where(column < row.classes, x, -float("inf"))
    return add_block(state, x, start // BLOCK, None, row.slope, False, EXACT, VECTOR)


@triton.jit
def truncated_stats_kernel(
    logits,  # StridedRows of one batch
    target_ptr,  # [M], or None for the arg-max
    top_k_ptr,  # [M] or None, like the other rules
    top_p_ptr,
    min_p_ptr,
    temperature_ptr,
    results,  # TruncatedRows [M]
    maxima_ptr,  # [M, groups], memory for the maxima of groups
    chosen_ptr,  # [M, SOME] int32, memory for the chosen groups
    classes,
    groups,
    softcap: tl.float64,
    ignore_index,
    MIN_P_FIRST: tl.constexpr,
    KEEPS_TARGET: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SHIFT: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,  # whether the tile is the whole row
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    SOME: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the statistics of one row, which is read once, and a few groups of it again.

    The number of kept classes is -1 if the threshold is not among the classes of these groups.
    """
    temperature = tl.full([], 1.0, ACC_DTYPE)
    index = tl.program_id(0).to(tl.int64)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + index).to(ACC_DTYPE)
    row = TruncatedRow(
        index,
        logits.ptr + index * logits.row,
        logits.column,
        classes,
        tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None,
        tl.full([], LOG2E, ACC_DTYPE) / temperature,
        tl.full([], 0.0, ACC_DTYPE),
    )
    top_k, top_p, min_p = load_rules(row, top_k_ptr, top_p_ptr, min_p_ptr)
    maxima_ptr += index * groups
    state = empty_state(1, LANES, ACC_DTYPE)
    unmasked = classes // BLOCK * BLOCK
    for start in range(0, unmasked, BLOCK):
        state = add_group_maxima(row, state, start, maxima_ptr, WHOLE, False, BLOCK)
    for start in range(unmasked, classes, BLOCK):
        state = add_group_maxima(row, state, start, maxima_ptr, WHOLE, True, BLOCK)
    found = merge_lanes(state, row.slope)
    maximum, total = tl.sum(found.maximum, axis=0), tl.sum(found.total, axis=0).to(ACC_DTYPE)
    row = TruncatedRow(
        index, row.ptr, row.column, classes, row.softcap, row.slope, finite_shift(maximum)
    )
    if target_ptr is not None:
        label = tl.load(target_ptr + index).to(tl.int64)
    else:  # The first block that has the maximum is read again.
        column = tl.sum(found.argmax, axis=0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(
            row.ptr + column.to(tl.int64) * row.column,
            mask=column < classes,
            other=-float("inf"),
        ).to(ACC_DTYPE)
        x = tl.where(column < classes, apply_softcap(x, row.softcap), -float("inf"))
        label = tl.min(tl.where(x == tl.max(x), column, NOT_FOUND))
        label = tl.minimum(label, classes - 1).to(tl.int64)
    lowest = key_of(tl.full([], -float("inf"), ACC_DTYPE), SHIFT)
    complete, bound, i = index >= 0, lowest, tl.arange(0, TILE)
    if WHOLE:
        column, exists = i, i < classes
    else:
        VECTOR: tl.constexpr = 128 // row.ptr.dtype.element_ty.primitive_bitwidth
        GROUP: tl.constexpr = BLOCK // LANES
        tl.debug_barrier()  # other threads stored the maxima that this one reads
        group = tl.arange(0, GROUPS)
        best = tl.load(maxima_ptr + group, mask=group < groups, other=-float("inf")).to(ACC_DTYPE)
        # The maxima of lanes, which are fewer, nearly always give a bound that is high enough.
        of_lanes = tl.max(tl.reshape(best, [GROUPS // LANES, LANES]), axis=0)
        wanted = tl.where((top_k > 0) & (top_k <= SOME), top_k, SOME // 2).to(tl.float32)
        best_key = key_of(tl.max(of_lanes), SHIFT)
        bound = find_key(of_lanes, 1.0, wanted, lowest, best_key, SHIFT)
        if tl.sum((best >= logit_of(bound, SHIFT)).to(tl.int32)) > SOME:
            bound = find_key(best, 1.0, wanted, bound, best_key, SHIFT)
        chosen = (best >= logit_of(bound, SHIFT)) & (group < groups)
        place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
        number = tl.sum(chosen.to(tl.int32))
        complete &= number <= SOME
        chosen_ptr += index * SOME
        tl.store(chosen_ptr + place, group, mask=chosen & (place < SOME))
        tl.debug_barrier()  # other threads stored the groups that this one reads
        exists = i // GROUP < tl.minimum(number, SOME)
        group = tl.load(chosen_ptr + i // GROUP, mask=exists, other=0)
        inside = i % GROUP // VECTOR * (LANES * VECTOR) + group % LANES * VECTOR + i % VECTOR
        column = group // LANES * BLOCK + inside
        exists &= column < classes
    x = tl.load(row.ptr + column.to(tl.int64) * row.column, mask=exists, other=-float("inf"))
    x = x.to(ACC_DTYPE)
    greatest = tl.max(x) if WHOLE else tl.max(best)
    all_x = x
    x = tl.where(x >= logit_of(bound, SHIFT), x, -float("inf"))
    e = exponents(row, x)[0]
    top = key_of(tl.where(greatest == greatest, greatest, 0.0), SHIFT)
    of_min_p, before = lowest, lowest
    if min_p_ptr is not None:
        if min_p > 0.0:
            ln_min_p = tl.log(min_p).to(ACC_DTYPE)
            of_min_p = min_p_key(row, ln_min_p, temperature, lowest, top, SHIFT)
        if MIN_P_FIRST:
            before = of_min_p
    if top_k_ptr is not None:
        if top_k > 0:
            complete &= top_k <= SOME
            k = top_k.to(tl.float32)
            before = tl.maximum(before, find_key(x, 1.0, k, bound, top, SHIFT))
    least = tl.maximum(before, of_min_p)
    if top_p_ptr is not None:
        if top_p < 1.0:
            of_before = tl.where(x >= logit_of(before, SHIFT), e, 0.0)
            of_tile = tl.sum(of_before)
            goal = tl.where(before == lowest, total, of_tile) * top_p.to(ACC_DTYPE)
            complete &= ((before == lowest) | (before >= bound)) & (of_tile >= goal)
            low = tl.maximum(before, bound)
            least = tl.maximum(least, find_key(x, e, goal, low, top, SHIFT))
    complete &= least >= bound
    valid = (top_p >= 0.0) & (top_p <= 1.0) & (min_p >= 0.0) & (min_p <= 1.0)
    valid &= (temperature > 0.0) & (temperature < float("inf")) & (total == total)
    tl.store(results.label + index, label)
    tl.store(results.maximum + index, maximum)
    tl.store(results.sumexp + index, total)
    if WHOLE or complete or (valid == 0):
        threshold = logit_of(least, SHIFT)
        dropped = tl.max(tl.where(all_x < threshold, all_x, -float("inf")))
        if not WHOLE:
            of_groups = tl.max(tl.where(best < logit_of(bound, SHIFT), best, -float("inf")))
            dropped = tl.maximum(dropped, of_groups)
        finish_row(
            row,
            results,
            sums_of(row, x, threshold),
            total,
            threshold,
            cut_of(x, threshold, dropped),
            maximum,
            label,
            temperature,
            valid,
            ignore_index,
            KEEPS_TARGET,
        )
    else:
        tl.store(results.threshold + index, greatest)
        tl.store(results.kept + index, -1)


@triton.jit
def find_bracket(row, sample, weight, drawn, low, high, by_mass, SHIFT: tl.constexpr):
    """Return two keys of [low, high] between which the threshold of the whole row probably is.

    `drawn` is the goal of the weights of the sample. The first key reaches it with three standard
    deviations to spare, and the last one misses it by no more than these.
    """
    # Classes below the threshold have small weights, so the sum of these varies little.
    middle = find_key(sample, weight, drawn, low, high, SHIFT)
    is_light = (sample >= logit_of(middle, SHIFT)) ^ by_mass
    variance = tl.sum(tl.where(is_light, weight * weight, 0.0))
    one = tl.where(by_mass, exponents(row, logit_of(middle, SHIFT))[0], 1.0)
    margin = 3.0 * tl.sqrt(variance) + 4.0 * one
    last = find_key(sample, weight, drawn - margin, middle, high, SHIFT)
    return find_key(sample, weight, drawn + margin, low, middle, SHIFT), last


@triton.jit
def per_lane(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Reshape a block [1, BLOCK] to [LANES, .], where each row has what one thread loads."""
    each = tl.permute(by_lane(x, LANES, VECTOR), (0, 2, 1, 3))
    return tl.reshape(each, [LANES, x.shape[1] // LANES])


@triton.jit
def collect_block(
    row,
    lanes,
    start,
    low,
    high,
    buffer_ptr,
    counts,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Add the classes of a block above `high` to `Sums` of lanes, and store those from `low` on.

    Return the sums, and each lane's number of classes from `low` to `high`. No thread waits for
    another here.
    """
    LANES: tl.constexpr = lanes.mass.shape[0]
    VECTOR: tl.constexpr = 128 // row.ptr.dtype.element_ty.primitive_bitwidth
    column = (start + tl.arange(0, BLOCK))[None, :]  # [1, BLOCK]
    pointers = row.ptr + column.to(tl.int64) * row.column
    if MASKED:  # NaN is neither above nor inside.
        x = tl.load(pointers, mask=column < row.classes, other=float("nan")).to(low.dtype)
    else:
        x = tl.load(pointers).to(low.dtype)
    x = per_lane(x, LANES, VECTOR)
    u = (apply_softcap(x, row.softcap) - row.shift) * row.slope
    above = x > high
    e = tl.where(above, tl.exp2(u), 0.0)
    inside = ((x >= low) & (x <= high)).to(tl.int32)
    slot = counts[:, None] + tl.cumsum(inside, axis=1) - 1
    lane = tl.arange(0, LANES)[:, None]
    tl.store(buffer_ptr + slot * LANES + lane, x, mask=(inside > 0) & (slot < SLOTS))
    terms = tl.where(above, e * tl.maximum(u, -10000.0), 0.0)
    sums = Sums(
        lanes.number + tl.sum(above.to(tl.int32), axis=1),
        lanes.mass + tl.sum(e, axis=1).to(tl.float64),
        lanes.sum_x_exp + tl.sum(terms, axis=1).to(tl.float64),
    )
    return sums, counts + tl.sum(inside, axis=1)


@triton.jit
def collect(
    row, low, high, buffer_ptr, LANES: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr
):
    """Return the `Sums` of the classes above `high`, and how many each lane has from `low` to it.

    The first SLOTS of these of each lane are stored in the buffer, in the order of the classes.
    """
    tl.debug_barrier()  # other threads may still read the buffer
    counts, zeros = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.float64)
    lanes = Sums(counts, zeros, zeros)
    unmasked = row.classes // BLOCK * BLOCK
    for start in range(0, unmasked, BLOCK):
        lanes, counts = collect_block(
            row, lanes, start, low, high, buffer_ptr, counts, False, BLOCK, SLOTS
        )
    for start in range(unmasked, row.classes, BLOCK):
        lanes, counts = collect_block(
            row, lanes, start, low, high, buffer_ptr, counts, True, BLOCK, SLOTS
        )
    tl.debug_barrier()  # other threads stored what this one reads
    return Sums(tl.sum(lanes.number), tl.sum(lanes.mass), tl.sum(lanes.sum_x_exp)), counts


@triton.jit
def truncated_search_kernel(
    logits,  # StridedRows of one batch
    top_k_ptr,  # [M] or None, like the other rules
    top_p_ptr,
    min_p_ptr,
    temperature_ptr,
    results,  # TruncatedRows [M]
    buffer_ptr,  # [M, SLOTS, LANES], memory for classes around the threshold
    classes,
    softcap: tl.float64,
    ignore_index,
    MIN_P_FIRST: tl.constexpr,
    KEEPS_TARGET: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SHIFT: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Find the threshold of one row whose number of kept classes is -1, and finish its statistics.

    The bracket of keys has the threshold between `low` and `high`, and each read moves one of them.
    """
    index = tl.program_id(0).to(tl.int64)
    if tl.load(results.kept + index) < 0:
        temperature = tl.full([], 1.0, ACC_DTYPE)
        if temperature_ptr is not None:
            temperature = tl.load(temperature_ptr + index).to(ACC_DTYPE)
        maximum, total = tl.load(results.maximum + index), tl.load(results.sumexp + index)
        row = TruncatedRow(
            index,
            logits.ptr + index * logits.row,
            logits.column,
            classes,
            tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None,
            tl.full([], LOG2E, ACC_DTYPE) / temperature,
            finite_shift(maximum),
        )
        top_k, top_p, min_p = load_rules(row, top_k_ptr, top_p_ptr, min_p_ptr)
        buffer_ptr += index * (SLOTS * LANES)
        lowest = key_of(tl.full([], -float("inf"), ACC_DTYPE), SHIFT)
        greatest = tl.load(results.threshold + index)
        top = key_of(greatest, SHIFT)
        of_min_p, before = lowest, lowest
        if min_p_ptr is not None:
            if min_p > 0.0:
                ln_min_p = tl.log(min_p).to(ACC_DTYPE)
                of_min_p = min_p_key(row, ln_min_p, temperature, lowest, top, SHIFT)
            if MIN_P_FIRST:
                before = of_min_p
        # The sample is cut into vectors, which lie evenly over the row.
        VECTOR: tl.constexpr = 128 // row.ptr.dtype.element_ty.primitive_bitwidth
        i, stride = tl.arange(0, SAMPLE), classes // SAMPLE * VECTOR
        column = i // VECTOR * tl.maximum(stride, VECTOR) + i % VECTOR
        share = tl.full([], SAMPLE, ACC_DTYPE) / classes
        zero = tl.full([], 0.0, tl.float64)
        sums, counts = Sums(tl.full([], 0, tl.int32), zero, zero), tl.zeros([LANES], tl.int32)
        first, last = top + 1, top  # the bracket of the latest read, which is none
        least, slot = tl.maximum(before, of_min_p), tl.arange(0, SLOTS)[:, None]
        buffer = buffer_ptr + slot * LANES + tl.arange(0, LANES)[None, :]  # [SLOTS, LANES]
        for stage in range(0, 2):
            by_mass = index * 0 + stage == 1
            goal = tl.where(by_mass, 0.0, top_k.to(ACC_DTYPE))
            low, high = lowest, top
            searches = tl.where(by_mass, top_p < 1.0, top_k > 0)
            sample = tl.load(
                row.ptr + column.to(tl.int64) * row.column, mask=column < classes, other=0.0
            )
            sample = sample.to(ACC_DTYPE)
            weight = tl.where(by_mass, exponents(row, sample)[0], 1.0)
            drawn = goal * share  # the goal of the sample
            if by_mass & searches:
                mass = total
                if before > lowest:
                    low, first, last = before, before, before - 1
                    sums, counts = collect(
                        row,
                        logit_of(before, SHIFT),
                        logit_of(before - 1, SHIFT),
                        buffer_ptr,
                        LANES,
                        BLOCK,
                        SLOTS,
                    )
                    mass = sums.mass.to(ACC_DTYPE)
                goal = top_p.to(ACC_DTYPE) * mass
                kept = sample >= logit_of(low, SHIFT)
                weight = tl.where(kept, weight, 0.0)
                drawn = tl.sum(weight) - (mass - goal) * share
            if searches & (low < high):
                first, last = find_bracket(row, sample, weight, drawn, low, high, by_mass, SHIFT)
            while searches & (low < high):
                sums, counts = collect(
                    row,
                    logit_of(first, SHIFT),
                    logit_of(last, SHIFT),
                    buffer_ptr,
                    LANES,
                    BLOCK,
                    SLOTS,
                )
                reached = tl.where(by_mass, sums.mass.to(ACC_DTYPE), sums.number.to(ACC_DTYPE))
                if reached >= goal:
                    low = last + 1
                    first, last = low, high
                else:
                    high = last
                    if tl.max(counts) > SLOTS:
                        if first == last:  # all of them are equal
                            weight_of_x = exponents(row, logit_of(first, SHIFT))[0]
                            weight_of_x = tl.where(by_mass, weight_of_x, 1.0)
                            inside = weight_of_x * tl.sum(counts).to(ACC_DTYPE)
                            low = tl.where(reached + inside >= goal, first, low)
                            high = tl.where(reached + inside >= goal, high, first - 1)
                            first, last = low, high
                        else:
                            first = (first | last) - ((first ^ last) >> 1)
                    else:
                        x = tl.load(buffer, mask=slot < counts[None, :], other=-float("inf"))
                        x = x.to(ACC_DTYPE)
                        of_x = tl.where(by_mass, exponents(row, x)[0], 1.0)
                        of_x = tl.where(slot < counts[None, :], of_x, 0.0)
                        if (reached + tl.sum(of_x) >= goal) | (first == low):
                            low = find_key(x, of_x, goal - reached, first, last, SHIFT)
                            high = low
                        else:
                            high = first - 1
                            first, last = low, high
            if searches:
                least = tl.maximum(least, low)
                before = tl.maximum(before, low)
        # The sums of the latest read serve if its bracket has the threshold.
        threshold = logit_of(least, SHIFT)
        if (least < first) | (least > last) | (tl.max(counts) > SLOTS):
            below = logit_of(tl.maximum(least - 1, lowest), SHIFT)
            sums, counts = collect(row, threshold, below, buffer_ptr, LANES, BLOCK, SLOTS)
        x = tl.load(buffer, mask=slot < counts[None, :], other=-float("inf")).to(ACC_DTYPE)
        of_x = sums_of(row, x, threshold)
        sums = Sums(
            sums.number + of_x.number, sums.mass + of_x.mass, sums.sum_x_exp + of_x.sum_x_exp
        )
        dropped = tl.max(tl.where(x < threshold, x, -float("inf")))
        cut = tl.where(dropped > -float("inf"), cut_of(x, threshold, dropped), threshold)
        finish_row(
            row,
            results,
            sums,
            total,
            threshold,
            cut,
            maximum,
            tl.load(results.label + index),
            temperature,
            index >= 0,
            ignore_index,
            KEEPS_TARGET,
        )


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
    on_label = tl.where(not_ignored, on_label, 0.0)
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
