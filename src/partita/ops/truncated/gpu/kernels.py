"""Kernels that find the threshold of each row's rules exactly, without sorting the row.

The logits that a row keeps are those of at least a threshold.

- `truncated_read_kernel` takes the totals of a row with one read. For a row with top-k, this read
  also collects the top classes, about 500, as the first tile. Otherwise the rule and a sample of
  the row say between which keys the threshold probably is. A second read adds up the classes above
  them, and collects those between them.
- `truncated_stats_kernel` searches the tile. A tile without the threshold says on which side of it
  the threshold is. A second launch reads such a row again, with a wider bracket from the sample at
  first. If that does not help, a read cuts the keys into eight parts and finds the one with the
  threshold.

A short row is one tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import (
    LN2,
    LOG2E,
    apply_softcap,
    capped_logits,
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
from .search import (
    MARGIN,
    Reading,
    Tile,
    TruncatedRow,
    count_sample,
    cut_of,
    exponent,
    exponents,
    greatest_key,
    guess_bracket,
    has_key,
    key_of_edge,
    load_block,
    load_rules,
    load_tile,
    locate,
    logit_of,
    narrow,
    range_of_keys,
    read_row,
)

IS_LEFT = tl.constexpr(2)  # is added to the mark of rows that the second launch serves


class SearchMemory(NamedTuple):
    """What the first kernel leaves to the second one.

    Fields:
        candidates: logits of the tile, [M, slots of all lanes and a block].
        keys: the first and last key of the tile, and of the last `Reading` the numbers `collected`,
            `complete`, `block` and `number`, [M, 6] int64.
        sums: the shift, the total, and `mass` and `sum_x_exp` of that reading, [M, 4] fp64.
    """

    candidates: Any
    keys: Any
    sums: Any


@triton.jit
def finish_row(
    row,
    shift,
    results,
    kept,
    total,
    least,
    cut,
    label,
    valid,
    ignore_index,
    KEEPS_TARGET: tl.constexpr,
):
    """Store the results of a row, given the sums over what its rules keep as a `Reading`."""
    _, number, mass, sum_x_exp, maximum, _, _ = kept
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
    kept_sumexp = mass.to(dtype) + nan_or_zero
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
    tl.store(results.in_set + index, valid & (in_set | (not_ignored == 0)))
    tl.store(results.threshold + index, cut)
    tl.store(results.label + index, label)
    tl.store(results.maximum + index, maximum)
    tl.store(results.sumexp + index, total)
    tl.store(results.kept_sumexp + index, kept_sumexp)


@triton.jit
def truncated_read_kernel(
    logits,  # StridedRows of one batch
    rules,  # SamplerRules
    results,  # TruncatedRows [M], of which the maximum is stored
    memory,  # SearchMemory
    classes,
    softcap: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    MIN_P_FIRST: tl.constexpr,
    SHIFT: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    CANDIDATES: tl.constexpr,  # classes of a tile
    TILE: tl.constexpr,  # LaneTile
    SAMPLE: tl.constexpr,
    BINS: tl.constexpr,
):
    """Take the totals of one row, and collect the tile that probably has its threshold.

    With top-k that may be the greatest classes, which the first read collects.
    """
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
    HAS_TOP_K: tl.constexpr = rules.top_k is not None
    buffer_ptr = memory.candidates.ptr + index * memory.candidates.row
    lowest, highest = range_of_keys(ACC_DTYPE, SHIFT)
    sample = count_sample(row, SAMPLE, BINS)
    # The tile of top-k has an eighth of its size, so that no lane has too few slots.
    common = CANDIDATES // 8 * SAMPLE // classes
    common = tl.sum((tl.cumsum(sample.counts, axis=0) < common).to(tl.int32)) + 1
    first = tl.where(common < BINS, key_of_edge(sample, common, False, SHIFT), lowest)
    first, last = tl.minimum(tl.maximum(first, lowest), highest), highest
    maximum = apply_softcap(sample.greatest, row.softcap)
    shift, zero, reads = finite_shift(maximum), tl.full([], 0.0, tl.float64), 0
    none = tl.full([], 0, tl.int32)
    found = Reading(none, none, zero, zero, maximum, none, index < 0)
    # The sums overflow if the greatest logit of the sample is far below that of the row.
    while (reads < 2) & ((found.mass >= 1.0) & (found.mass <= 1e30) == 0):
        shift = finite_shift(found.maximum)
        args = (row, shift, first, last, buffer_ptr)
        found = read_row(*args, True, HAS_TOP_K, SHIFT, CANDIDATES, TILE)
        reads += 1
    maximum, block, total = found.maximum, found.block, found.mass
    top = greatest_key(row, maximum, lowest, highest, SHIFT)
    limits = load_rules(row, rules, maximum, lowest, top, MIN_P_FIRST, SHIFT)
    is_found, by_mass = index < 0, limits.top_k <= 0
    if HAS_TOP_K:
        first, last = tl.minimum(first, top), top
        is_found = found.complete & (limits.top_k > 0) & (found.number >= limits.top_k)
        found = Reading(found.collected, none, zero, zero, maximum, none, found.complete)
    if is_found == 0:
        rest = tl.where(
            by_mass, total * (1.0 - limits.top_p), (classes - limits.top_k).to(tl.float64)
        )
        # Without top-p, or if it follows min-p, the first sums to know are those from a key.
        key = tl.where(limits.top_p < 1.0, limits.before, limits.least)
        is_known = by_mass & ((limits.top_p >= 1.0) | (limits.before > lowest))
        low, high = tl.where(is_known, key, lowest), tl.where(is_known, key, top)
        bounds = (by_mass, MARGIN, low, high)
        first, last = guess_bracket(row, shift, sample, rest, *bounds, CANDIDATES, SAMPLE, SHIFT)
        args = (row, shift, first, last, buffer_ptr)
        found = read_row(*args, False, True, SHIFT, CANDIDATES, TILE)
    keys, sums = memory.keys + index * 6, memory.sums + index * 4
    tl.store(keys, first.to(tl.int64))
    tl.store(keys + 1, last.to(tl.int64))
    tl.store(keys + 2, found.collected.to(tl.int64))
    tl.store(keys + 3, found.complete.to(tl.int64))
    tl.store(keys + 4, block.to(tl.int64))
    tl.store(keys + 5, tl.zeros_like(index) + found.number)
    tl.store(sums, shift.to(tl.float64))
    tl.store(sums + 1, total)
    tl.store(sums + 2, found.mass)
    tl.store(sums + 3, found.sum_x_exp)
    tl.store(results.maximum + index, maximum)


@triton.jit
def truncated_stats_kernel(
    logits,  # StridedRows of one batch
    target_ptr,  # [M], or None for the arg-max
    rules,  # SamplerRules
    results,  # TruncatedRows [M]
    memory,  # SearchMemory
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
    READS: tl.constexpr,  # whether this launch is for the rows that are left
):
    """Compute the statistics of one row, given the tile that probably has its threshold.

    A row whose tile does not have it is left to a second launch, which reads it again.
    """
    index = tl.program_id(0).to(tl.int64)
    if READS:
        if tl.load(memory.keys + index * 6 + 3) < IS_LEFT:
            return
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
    lowest, highest = range_of_keys(ACC_DTYPE, SHIFT)
    if WHOLE:
        x, mask = load_block(row, 0, True, TILE)
        capped = capped_logits(x, mask, row.softcap, ACC_DTYPE)
        maximum, zero = tl.max(tl.max(capped, axis=0)), tl.full([], 0.0, tl.float64)
        shift = finite_shift(maximum)
        terms = tl.exp2(exponent(row, shift, capped))
        total = tl.sum(tl.sum(terms, axis=0).to(tl.float64))
        none = tl.full([], 0, tl.int32)
        above = Reading(none, none, zero, zero, maximum, none, index >= 0)
        x, one = tl.reshape(x, [CANDIDATES]), tl.full([], 1.0, ACC_DTYPE)
        tile = Tile(x, one, lowest, highest, index >= 0)
    else:
        buffer_ptr = memory.candidates.ptr + index * memory.candidates.row
        keys, sums = memory.keys + index * 6, memory.sums + index * 4
        first, last = tl.load(keys).to(lowest.dtype), tl.load(keys + 1).to(lowest.dtype)
        shift, total = tl.load(sums).to(ACC_DTYPE), tl.load(sums + 1)
        above = Reading(
            tl.load(keys + 2).to(tl.int32),
            tl.load(keys + 5).to(tl.int32),
            tl.load(sums + 2),
            tl.load(sums + 3),
            tl.load(results.maximum + index),
            tl.load(keys + 4).to(tl.int32),
            tl.load(keys + 3) % IS_LEFT != 0,
        )
    maximum, block = above.maximum, above.block
    top = greatest_key(row, maximum, lowest, highest, SHIFT)
    limits = load_rules(row, rules, maximum, lowest, top, MIN_P_FIRST, SHIFT)
    before, least, top_p = limits.before, limits.least, limits.top_p
    valid = limits.valid & (total == total)
    low, high, goal, tries = lowest, top, limits.top_k.to(tl.float64), 1
    # The steps: 0 finds the k-th class, 1 adds up what is left, 2 finds the threshold of its share,
    # and 3 needs the tile around the row's threshold.
    step = tl.where(valid, 0, 4)
    while step < 4:
        if not WHOLE:
            tile = load_tile(buffer_ptr, above, first, last, SHIFT, CANDIDATES)
        if step == 0:
            found = limits.top_k <= 0
            if limits.top_k > 0:
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
        if not (WHOLE or READS):
            if step < 4:
                tl.store(keys + 3, above.complete.to(tl.int64) + IS_LEFT)
                step = 4
        if READS:
            if step < 4:
                is_overfull = (tile.complete == 0) & (low <= last) & (first <= high)
                tries += 1
                if (step == 1) | (step == 3):
                    first = tl.where(step == 1, before, least)
                    last = first
                elif is_overfull | (tries > 2):
                    reads = 0
                    while (reads < 3) & (low < high):
                        low, high = narrow(row, shift, goal, step == 2, low, high, SHIFT, TILE)
                        reads += 1
                    first, last = low, high
                else:
                    sample = count_sample(row, SAMPLE, BINS)
                    rest = tl.where(step == 2, total, classes.to(tl.float64)) - goal
                    bounds = (step == 2, MARGIN * tries, low, high)
                    first, last = guess_bracket(
                        row, shift, sample, rest, *bounds, CANDIDATES, SAMPLE, SHIFT
                    )
                args = (row, shift, first, last, buffer_ptr)
                above = read_row(*args, False, True, SHIFT, CANDIDATES, TILE)
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
    kept_number = tl.sum(tl.where(kept & (tile.x > -float("inf")), tile.each, 0.0)).to(tl.int32)
    kept = Reading(
        0,
        tl.where(valid, above.number + kept_number, 0),
        above.mass + tl.sum(e.to(tl.float64)),
        above.sum_x_exp + tl.sum((e * u).to(tl.float64)),
        maximum,
        0,
        valid,
    )
    sums = (results, kept, total, threshold, cut, label, valid, ignore_index)
    finish_row(row, shift, *sums, KEEPS_TARGET)


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
