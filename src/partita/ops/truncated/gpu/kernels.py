"""Kernels that find the threshold of each row's rules exactly, without sorting the row.

The logits that a row keeps are those of at least a threshold. The keys of the logits are integers
in the order of the numbers, so a bisection of keys finds the greatest key whose classes, and all
above it, reach a number or a probability. It runs over a tile of classes on chip:

- `truncated_totals_kernel` reads the row once. A sample of it says which logit about a thousand
  classes reach. They are the first tile, which has the threshold of most rules.
- `truncated_stats_kernel` searches the tile. Where the threshold is below it, the sample and the
  row's sum give two logits between which the threshold probably is. One more read adds up the
  classes above them, and collects those between them as the next tile.

A short row is one tile. With `slope` = log2(e) / temperature, the exponentials are 2**u,
u = slope (x - shift).
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
    divide,
    finite_shift,
    log_exact,
    reciprocal,
    through_softcap,
)
from ....primitives.gpu.reduce import (
    NOT_FOUND,
    locate_tile,
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
    """

    index: Any
    ptr: Any
    column: Any
    classes: Any
    softcap: Any
    slope: Any


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


class Lanes(NamedTuple):
    """What each lane knows of the classes that it has read, [LANES].

    Fields:
        counts: the number of classes in the bracket.
        number, mass, sum_x_exp: the `Sums` of the classes above it; mass that of all at first.
        maximum: the maximum of the soft-capped logits.
        block: the first block that has it.
    """

    counts: Any
    number: Any
    mass: Any
    sum_x_exp: Any
    maximum: Any
    block: Any


class Sample(NamedTuple):
    """A sample of a row: the number of logits in each bin, the greatest one, a bin's width."""

    counts: Any
    greatest: Any
    width: Any


class Tile(NamedTuple):
    """Logits on chip, which are those of the keys from `first` to `last` if it is complete.

    Each of them stands for `each` classes.
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
    shift,
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
    in_set = (x >= least) & (x > -float("inf"))
    adds = in_range & (in_set == 0) & (x > -float("inf")) & KEEPS_TARGET
    e, u = exponents(row, shift, x)
    number, mass, sum_x_exp = sums
    mass += tl.where(adds, e, 0.0).to(tl.float64)
    sum_x_exp += tl.where(adds, e * u, 0.0).to(tl.float64)
    # The results are relative to the maximum of the row.
    moved = exponent(row, shift, finite_shift(maximum)).to(tl.float64)
    scale = tl.exp(-LN2 * moved)
    sum_x_exp = scale * (sum_x_exp - mass * moved)
    total, mass = (total * scale).to(dtype), mass * scale
    shift, valid = finite_shift(maximum), valid & (in_range | (not_ignored == 0))
    nan_or_zero = tl.where(valid, 0.0, float("nan")).to(dtype)
    kept_sumexp = mass.to(dtype) + nan_or_zero
    logprob = divide(apply_softcap(x, row.softcap) - shift, temperature)
    logprob = tl.where(in_set | adds, logprob, -float("inf"))
    log_sum, shift = log_exact(kept_sumexp), divide(shift, temperature)
    index = row.index
    logprob = tl.where(not_ignored, logprob - log_sum, 0.0) + nan_or_zero
    entropy = log_sum - divide((sum_x_exp * LN2).to(dtype), kept_sumexp)
    tl.store(results.logprob + index, logprob)
    tl.store(results.logsumexp + index, shift + log_exact(total) + nan_or_zero)
    tl.store(results.kept_logsumexp + index, shift + log_sum)
    tl.store(results.entropy + index, entropy)
    tl.store(results.kept + index, (number + adds).to(tl.int64))
    tl.store(results.in_set + index, valid & (in_set | (not_ignored == 0)))
    tl.store(results.threshold + index, cut)
    tl.store(results.label + index, label)
    tl.store(results.maximum + index, maximum)
    tl.store(results.sumexp + index, total)
    tl.store(results.kept_sumexp + index, kept_sumexp)


@triton.jit
def by_thread(x, LANES: tl.constexpr, VECTOR: tl.constexpr):
    """Reshape a block of classes to [., LANES], where each lane has what one thread loads.

    Triton gives a lane to a thread if it is the last axis, and then a scan is one of its registers.
    """
    x = tl.reshape(x, [x.shape[0] // (LANES * VECTOR), LANES, VECTOR])
    return tl.reshape(tl.permute(x, (0, 2, 1)), [x.shape[0] * VECTOR, LANES])


@triton.jit
def read_block(
    row,
    shift,
    state,
    start,
    bracket,
    buffer_ptr,
    FIRST: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Add a block of classes to the state of lanes, and collect its classes of the bracket."""
    LANES: tl.constexpr = state.counts.shape[0]
    counts, number, mass, sum_x_exp, maximum, block = state
    low, high = bracket
    column = start + tl.arange(0, BLOCK)
    pointers = row.ptr + column.to(tl.int64) * row.column
    if MASKED:
        raw = tl.load(pointers, mask=column < row.classes, other=-float("inf"))
    else:
        raw = tl.load(pointers)
    raw = by_thread(raw, LANES, VECTOR)
    logit = raw.to(low.dtype)
    x = apply_softcap(logit, row.softcap)
    if MASKED and row.softcap is not None:
        x = tl.where(by_thread(column < row.classes, LANES, VECTOR), x, -float("inf"))
    u = exponent(row, shift, x)
    if FIRST:
        inside = logit >= low
        of_block, at = tl.max(x, axis=0), start // BLOCK
        is_first = (of_block > maximum) | ((of_block == maximum) & (at < block))
        block = tl.where(is_first, at, block)
        maximum = tl.maximum(maximum, of_block)
        mass += tl.sum(tl.exp2(u), axis=0).to(tl.float64)
    else:
        above = logit > high
        inside = (logit >= low) & (above == 0)
        u = tl.where(above, u, -10000.0)
        e = tl.exp2(u)
        number += tl.sum(above.to(tl.int32), axis=0)
        mass += tl.sum(e, axis=0).to(tl.float64)
        sum_x_exp += tl.sum(e * u, axis=0).to(tl.float64)
    # The buffer has room for one block more than its slots. Offsets are in bytes, which saves the
    # multiplications. Triton gives threads the last axis of a scan, and the first one of a store
    # whose addresses it does not know.
    BYTES: tl.constexpr = LANES * raw.dtype.primitive_bitwidth // 8
    used = tl.minimum(counts, SLOTS) * LANES + tl.arange(0, LANES)
    used = (buffer_ptr + used).to(tl.pointer_type(tl.uint8), bitcast=True) - BYTES
    step = tl.where(inside, BYTES, 0)
    place = used[:, None] + tl.trans(tl.cumsum(step, axis=0)).to(tl.uint32)
    place = place.to(tl.pointer_type(raw.dtype), bitcast=True)
    tl.store(place, tl.trans(raw), mask=tl.trans(inside))
    counts += tl.sum(step, axis=0) // BYTES
    return Lanes(counts, number, mass, sum_x_exp, maximum, block)


@triton.jit
def read_row(
    row,
    shift,
    bracket,
    buffer_ptr,
    FIRST: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Read a row and return the state of `Lanes`; no thread waits for another meanwhile.

    Classes of the bracket, two logits, are stored in the buffer, where each lane has a column of
    SLOTS. What is too much for it is counted alone. The first read takes the totals, and its
    bracket has no upper end. Later ones start at the end of the row.
    """
    tl.debug_barrier()  # other threads may still read the buffer
    zeros, counts = tl.zeros([LANES], tl.float64), tl.zeros([LANES], tl.int32)
    maximum = tl.full([LANES], -float("inf"), row.slope.dtype)
    state = Lanes(counts, counts, zeros, zeros, maximum, counts)
    args = (bracket, buffer_ptr)
    unmasked = row.classes // BLOCK * BLOCK
    for start in range(unmasked, row.classes, BLOCK):
        state = read_block(row, shift, state, start, *args, FIRST, True, BLOCK, SLOTS, VECTOR)
    for start in range(0, unmasked, BLOCK):
        at = start if FIRST else unmasked - BLOCK - start
        state = read_block(row, shift, state, at, *args, FIRST, False, BLOCK, SLOTS, VECTOR)
    tl.debug_barrier()  # other threads stored what this one reads
    return state


@triton.jit
def count_sample(row, SAMPLE: tl.constexpr, BINS: tl.constexpr):
    """Count a sample of the row's logits in bins of equal width below the greatest one.

    The sample is cut into runs of 16 classes, which lie evenly over the row. The last bin has all
    that is below it too.
    """
    i = tl.arange(0, SAMPLE)
    column = i // 16 * (row.classes // SAMPLE * 16) + i % 16
    x = tl.load(row.ptr + column.to(tl.int64) * row.column).to(row.slope.dtype)
    greatest = tl.max(x)
    least = tl.min(tl.where(x > -float("inf"), x, greatest))
    width = tl.minimum(greatest - least, 32.0 / row.slope) / (BINS - 1)
    place = (greatest - x) / tl.maximum(width, 1e-30)
    place = tl.where(place < BINS - 1, place, BINS - 1.0)
    return Sample(tl.histogram(place.to(tl.int32), BINS), greatest, width)


@triton.jit
def key_of_edge(sample, bin, UP: tl.constexpr, SHIFT: tl.constexpr):
    """Return the greatest key that is not above the upper edge of a bin, or the least not below."""
    edge = sample.greatest - bin * sample.width
    key = key_of(edge, SHIFT)
    if UP:
        return key + (logit_of(key, SHIFT) < edge)
    else:
        return key - (logit_of(key, SHIFT) > edge)


@triton.jit
def guess_bracket(row, shift, sample, goal, rest, margin, low, high, by_mass, SHIFT: tl.constexpr):
    """Return two keys of [low, high] between which a threshold of the row probably is.

    `goal` and `rest` are the weights of the sample from the threshold on and below it, and the
    bracket has `margin` standard deviations of the sample's sums on both sides. Masses are compared
    below the threshold, where they vary less.
    """
    BINS: tl.constexpr = sample.counts.shape[0]
    bin = tl.arange(0, BINS)
    middle = sample.greatest - (bin.to(row.slope.dtype) + 0.5) * sample.width
    weight = tl.where(by_mass, exponents(row, shift, middle)[0], 1.0)
    weights = sample.counts.to(row.slope.dtype) * weight
    from_here, squares = tl.cumsum(weights, axis=0), tl.cumsum(weights * weight, axis=0)
    below, squares_below = tl.sum(weights) - from_here, tl.sum(weights * weight) - squares
    spare = tl.where(by_mass, rest - below, from_here - goal)
    variance = tl.where(by_mass, squares_below, squares)
    margin *= tl.sqrt(tl.maximum(variance, 0.0))
    enough = tl.min(tl.where(spare >= margin, bin, BINS - 1))
    too_few = tl.min(tl.where(spare > -margin, bin, BINS - 1))
    # Inside of a bin, the weights lie evenly.
    weights = tl.maximum(weights, 1e-30)
    part = tl.sum(tl.where(bin == enough, (spare - margin) / weights, 0.0))
    edge = enough + 1 - tl.minimum(tl.maximum(part, 0.0), 1.0)
    first = tl.where(enough < BINS - 1, key_of_edge(sample, edge, False, SHIFT), low)
    part = tl.sum(tl.where(bin == too_few, (spare + margin) / weights, 0.0))
    edge = too_few + 1 - tl.minimum(tl.maximum(part, 0.0), 1.0)
    last = tl.where(edge > 0.0, key_of_edge(sample, edge, True, SHIFT), high)
    overlaps = (first <= high) & (last >= low)
    last = tl.where(overlaps, tl.minimum(last, high), high)
    return tl.minimum(tl.where(overlaps, tl.maximum(first, low), low), last), last


@triton.jit
def locate(tile, weight, goal, above, low, high, SHIFT: tl.constexpr):
    """Find the greatest key of [low, high] from which on the weights reach a goal.

    `above` is the weight of the classes above the bracket. Return whether the tile has the key, and
    the bounds of it that are known now; the key is both of them.
    """
    is_below = (above < goal) | (tile.last >= high)
    reaches = (above + tl.sum(weight) >= goal) | (tile.first <= low)
    found = is_below & tile.complete & reaches
    if found:
        first = tl.maximum(tile.first, low)
        last = tl.minimum(tl.minimum(tile.last, high), key_of(tl.max(tile.x), SHIFT))
        low = find_key(tile.x, weight, goal - above, first, tl.maximum(first, last), SHIFT)
        high = low
    else:
        low = tl.where(is_below, low, tile.last + 1)
        end = tl.where(tile.complete, tile.first - 1, tile.last)
        high = tl.where(is_below, tl.minimum(end, high), high)
    return found, low, high


@triton.jit
def has_key(tile, key):
    """Return whether a tile has all classes of a key, and of those between it and its end."""
    return tile.complete & (key >= tile.first) & (key <= tile.last)


@triton.jit
def load_tile(buffer_ptr, counts, first, last, ACC_DTYPE: tl.constexpr, SHIFT, TILE: tl.constexpr):
    """Load what a read of the row has collected between two keys.

    If it is too much for the buffer but all equal, one class stands for all of them.
    """
    SLOTS: tl.constexpr = TILE // counts.shape[0]
    i, complete = tl.arange(0, TILE), tl.max(counts) <= SLOTS
    exists = tl.reshape(tl.arange(0, SLOTS)[:, None] < counts[None, :], [TILE])
    x = tl.load(buffer_ptr + i, mask=exists, other=-float("inf")).to(ACC_DTYPE)
    equal, each = (complete == 0) & (first == last), tl.full([], 1.0, ACC_DTYPE)
    if equal:
        x = tl.where(i == 0, logit_of(first, SHIFT), -float("inf"))
        each = tl.sum(counts).to(ACC_DTYPE)
    return Tile(x, each, first, last, complete | equal)


@triton.jit
def truncated_totals_kernel(
    logits,  # StridedRows of one batch
    temperature_ptr,  # [M] or None
    results,  # TruncatedRows [M], for what the search starts from
    buffer_ptr,  # [M, TILE + BLOCK], memory for the classes of a bracket
    counts_ptr,  # [M, LANES] int32, memory for the number of them that each lane has
    sample_ptr,  # [M, BINS] int32, memory for the counts of a sample
    classes,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    SHIFT: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SAMPLE: tl.constexpr,
    BINS: tl.constexpr,
    COMMON: tl.constexpr,  # classes of the sample from which on the read collects
):
    """Read one row, take its maximum and the sum of its exponentials, and collect its top classes.

    A sample says which classes these are. The results' memory has what the search starts from.
    """
    index = tl.program_id(0).to(tl.int64)
    temperature = tl.full([], 1.0, ACC_DTYPE)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + index).to(ACC_DTYPE)
    row = TruncatedRow(
        index,
        logits.ptr + index * logits.row,
        logits.column,
        classes,
        tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None,
        tl.full([], LOG2E, ACC_DTYPE) / temperature,
    )
    buffer_ptr += index * (TILE + BLOCK)
    lowest, highest = range_of_keys(ACC_DTYPE, SHIFT)
    sample = count_sample(row, SAMPLE, BINS)
    common = tl.sum((tl.cumsum(sample.counts, axis=0) < COMMON).to(tl.int32))
    first = key_of_edge(sample, common + 1, False, SHIFT)
    first = tl.minimum(tl.maximum(first, lowest), highest)
    tl.store(sample_ptr + index * BINS + tl.arange(0, BINS), sample.counts)
    tl.store(results.threshold + index, sample.greatest)
    tl.store(results.kept_sumexp + index, sample.width)
    tl.store(results.kept + index, first.to(tl.int64))
    maximum = apply_softcap(sample.greatest, row.softcap)
    total, reads = tl.full([], 0.0, tl.float64), tl.full([], 0, tl.int32)
    # The sums overflow if the greatest logit of the sample is far below that of the row.
    while (reads < 2) & ((total >= 1.0) & (total <= 1e30) == 0):
        shift = finite_shift(maximum)
        bracket = (logit_of(first, SHIFT), logit_of(highest, SHIFT))
        state = read_row(row, shift, bracket, buffer_ptr, True, LANES, BLOCK, TILE // LANES, VECTOR)
        tl.store(counts_ptr + index * LANES + tl.arange(0, LANES), state.counts)
        maximum, total = tl.max(state.maximum), tl.sum(state.mass)
        block = tl.min(tl.where(state.maximum == maximum, state.block, NOT_FOUND))
        tl.store(results.label + index, block.to(tl.int64))
        tl.store(results.entropy + index, shift)
        reads += 1
    tl.store(results.maximum + index, maximum)
    tl.store(results.sumexp + index, total.to(ACC_DTYPE))


@triton.jit
def truncated_stats_kernel(
    logits,  # StridedRows of one batch
    target_ptr,  # [M], or None for the arg-max
    top_k_ptr,  # [M] or None, like the other rules
    top_p_ptr,
    min_p_ptr,
    temperature_ptr,
    results,  # TruncatedRows [M]
    buffer_ptr,  # as in `truncated_totals_kernel`
    counts_ptr,
    sample_ptr,
    classes,
    softcap: tl.float64,
    ignore_index,
    MIN_P_FIRST: tl.constexpr,
    KEEPS_TARGET: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    SHIFT: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    WHOLE: tl.constexpr,  # whether the tile is the whole row
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    SAMPLE: tl.constexpr,
    BINS: tl.constexpr,
    MARGIN: tl.constexpr,  # of the first guess from the sample, in standard deviations
):
    """Compute the statistics of one row, which is read again while no tile has its threshold."""
    index = tl.program_id(0).to(tl.int64)
    temperature = tl.full([], 1.0, ACC_DTYPE)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + index).to(ACC_DTYPE)
    row = TruncatedRow(
        index,
        logits.ptr + index * logits.row,
        logits.column,
        classes,
        tl.full([], softcap, ACC_DTYPE) if HAS_SOFTCAP else None,
        tl.full([], LOG2E, ACC_DTYPE) / temperature,
    )
    top_k, top_p, min_p = load_rules(row, top_k_ptr, top_p_ptr, min_p_ptr)
    lowest, last = range_of_keys(ACC_DTYPE, SHIFT)
    if WHOLE:
        i, first, block = tl.arange(0, TILE), lowest, 0
        pointers = row.ptr + i.to(tl.int64) * row.column
        x = tl.load(pointers, mask=i < classes, other=-float("inf")).to(ACC_DTYPE)
        capped = tl.where(i < classes, apply_softcap(x, row.softcap), -float("inf"))
        maximum = tl.max(capped)
        shift = finite_shift(maximum)
        total = tl.sum(tl.exp2(exponent(row, shift, capped)).to(tl.float64))
        tile = Tile(x, tl.full([], 1.0, ACC_DTYPE), first, last, index >= 0)
    else:
        buffer_ptr += index * (TILE + BLOCK)
        maximum, shift = tl.load(results.maximum + index), tl.load(results.entropy + index)
        total = tl.load(results.sumexp + index).to(tl.float64)
        first = tl.load(results.kept + index).to(lowest.dtype)
        block = tl.load(results.label + index).to(tl.int32)
        counts = tl.load(counts_ptr + index * LANES + tl.arange(0, LANES))
    of_min_p, top = lowest, last
    if not HAS_SOFTCAP:
        top = key_of(tl.where(maximum == maximum, maximum, 0.0), SHIFT)
    if min_p_ptr is not None:
        if min_p > 0.0:
            ln_min_p, greatest = tl.log(min_p).to(ACC_DTYPE), finite_shift(maximum)
            of_min_p = min_p_key(row, greatest, ln_min_p, temperature, lowest, top, SHIFT)
    before, least = of_min_p if MIN_P_FIRST else lowest, of_min_p
    valid = (top_p >= 0.0) & (top_p <= 1.0) & (min_p >= 0.0) & (min_p <= 1.0)
    valid &= (temperature > 0.0) & (temperature < float("inf")) & (total == total)
    zero = tl.full([], 0.0, tl.float64)
    above = Sums(tl.full([], 0, tl.int32), zero, zero)
    low, high, goal, margin = lowest, top, top_k.to(ACC_DTYPE), tl.full([], MARGIN, ACC_DTYPE)
    none = last  # the lower end of the latest guess, where there is none yet
    floor = none
    # The steps: 0 finds the k-th class, 1 adds up what is left, 2 finds the threshold of its share,
    # and 3 needs the tile around the row's threshold.
    step = tl.where(valid, 0, 4)
    while step < 4:
        if not WHOLE:
            tile = load_tile(buffer_ptr, counts, first, last, ACC_DTYPE, SHIFT, TILE)
        if step == 0:
            found = top_k <= 0
            if top_k > 0:
                number = tl.where(tile.x > -float("inf"), tile.each, 0.0)
                above_tile = above.number.to(ACC_DTYPE)
                found, low, high = locate(tile, number, goal, above_tile, low, high, SHIFT)
            if found:
                before, step = tl.maximum(before, low), 1
                low, high, floor = lowest, top, none
        if step == 1:
            if top_p >= 1.0:
                least, step = tl.maximum(least, before), 3
            elif before == lowest:
                goal, step = (top_p * total).to(ACC_DTYPE), 2
            elif has_key(tile, before):
                e = exponents(row, shift, tile.x)[0]
                mass = tl.sum(tl.where(tile.x >= logit_of(before, SHIFT), e, 0.0)) * tile.each
                goal, low, step = (top_p * (above.mass + mass)).to(ACC_DTYPE), before, 2
        if step == 2:
            e, above_tile = exponents(row, shift, tile.x)[0] * tile.each, above.mass.to(ACC_DTYPE)
            found, low, high = locate(tile, e, goal, above_tile, low, high, SHIFT)
            if found:
                least, step = tl.maximum(least, tl.maximum(before, low)), 3
        if step == 3:
            step += has_key(tile, least).to(tl.int32)
        if not WHOLE:
            if step < 4:
                # A guess whose classes are too many is cut, and its upper half is read first.
                if (step == 1) | (step == 3):
                    first = tl.where(step == 1, before, least)
                    last = first
                elif (floor <= high) & (low <= last) & (tile.complete == 0):
                    first = (first | last) - ((first ^ last) >> 1)
                elif (floor <= high) & (high < first):
                    first, last = floor, high
                else:
                    share = tl.full([], SAMPLE, ACC_DTYPE) / classes
                    rest = (total.to(ACC_DTYPE) - goal) * share
                    in_bins = tl.load(sample_ptr + index * BINS + tl.arange(0, BINS))
                    greatest = tl.load(results.threshold + index)
                    sample = Sample(in_bins, greatest, tl.load(results.kept_sumexp + index))
                    first, last = guess_bracket(
                        row, shift, sample, goal * share, rest, margin, low, high, step == 2, SHIFT
                    )
                    floor, margin = first, 2.0 * margin
                bracket = (logit_of(first, SHIFT), logit_of(last, SHIFT))
                state = read_row(
                    row, shift, bracket, buffer_ptr, False, LANES, BLOCK, TILE // LANES, VECTOR
                )
                counts, mass = state.counts, tl.sum(state.mass)
                above = Sums(tl.sum(state.number), mass, tl.sum(state.sum_x_exp))
    if not WHOLE:
        tile = load_tile(buffer_ptr, counts, first, last, ACC_DTYPE, SHIFT, TILE)
    if target_ptr is not None:
        label = tl.load(target_ptr + index).to(tl.int64)
    else:  # The first block that has the maximum is read again.
        column = block * BLOCK + tl.arange(0, BLOCK)
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
    sums = Sums(
        tl.where(valid, above.number + number, 0),
        above.mass + tl.sum(e.to(tl.float64)),
        above.sum_x_exp + tl.sum((e * u).to(tl.float64)),
    )
    finish_row(
        row,
        shift,
        results,
        sums,
        total,
        threshold,
        cut,
        maximum,
        label,
        temperature,
        valid,
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
