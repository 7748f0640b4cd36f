"""Alpha and beta of semi-Markov chains whose open segments fit into the registers of one program.

One program scans a sequence forwards, and another scans it backwards at the same time. Both take
the same steps: segments begin with the log-sum-exp of the transitions from what was closed at the
step before, all open segments get the emissions of the step, and closing sums over their ages.

The open segments of a state lie in a ring, [slots, states], where a segment stays in its slot. The
ring has numbers relative to a score for each state, its base. All open segments of a state get the
same emission, so a step adds it to the base and leaves the ring as it is. What was closed has
numbers relative to one score, the level. With the exponentials of transitions and durations, a step
is two sums of products. It has no maximum and no logarithm that the next step would wait for.

Numbers of fp64 do not hold all scores. So each step looks at its sums, and where one of them is so
small that what was rounded could matter, or so large that it nears infinity, the step is done again
with logarithms, from the scores that the segments had when they were opened. Such a step also
chooses what the numbers are relative to. In a chain from left to right the states drift apart, so
what is closed and what is opened have references for each state beside the level.

A sum of 0 is no reason for such a step if all of its terms are impossible. Transitions and what was
closed are therefore 0 only if they are impossible, and at least SMALL otherwise. The ring may round
a segment to 0; each state remembers when that last happened.

Source: Sarawagi and Cohen, Semi-Markov conditional random fields for information extraction, 2004.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from ....primitives.gpu.memory import load_length
from .scores import (
    LN2_FP64,
    LOG_SMALL,
    exp_term,
    exponent_bits,
    load_end,
    log_of_sum,
    scores_of,
    store_logz,
    weight_term,
)

# Sums over transitions have factors of at least SMALL, or 0. Beside a sum of at least LOW it is
# below the rounding error that smaller factors became SMALL, as long as no factor is above HIGH.
LOW = tl.constexpr(5.795634610449096e-70)  # 2**-230
HIGH = tl.constexpr(1.6069380442589903e60)  # 2**200
SMALL = tl.constexpr(3.054936363499605e-151)  # 2**-500
# Products over the ring that are below 2**-1022 become 0. Beside a sum of at least RING_LOW that is
# below its rounding error, as long as no number in the ring is above RING_HIGH.
RING_LOW = tl.constexpr(2.409919865102884e-181)  # 2**-600
RING_HIGH = tl.constexpr(2.037035976334486e90)  # 2**300
MAX_BITS = tl.constexpr(32)  # What is opened may be 2**MAX_BITS before its state is made smaller.
MAX_LOSS = tl.constexpr(500)  # That leaves the sum over the ring at least at 2**-MAX_LOSS.
MAX_EXPONENT = tl.constexpr(700.0)  # of e**x
ALWAYS = tl.constexpr(2**30)  # steps


class Sequence(NamedTuple):
    """The emissions of one sequence in the order of a scan.

    Fields:
        ptr, stride_t, stride_c: the emissions `[T, C]`.
        steps, t, dt: the number of steps, the row of the first, and 1 or -1 to the next.
        C: states.
    """

    ptr: tl.tensor
    stride_t: tl.tensor
    stride_c: tl.tensor
    steps: tl.tensor
    t: tl.tensor
    dt: tl.tensor
    C: tl.tensor


class ScanState(NamedTuple):
    """The open segments after a step; all but the ring are `[BLOCK_C]`.

    Fields:
        ring: `[SLOTS, BLOCK_C]` fp64.
        base: fp64, the score that the numbers of the ring are relative to.
        opened_at: the last step at which a segment was opened.
        rounded_at: the last step at which a number in the ring may have become 0 by rounding.
    """

    ring: tl.tensor
    base: tl.tensor
    opened_at: tl.tensor
    rounded_at: tl.tensor


class SavedRows(NamedTuple):
    """The rows in which a scan of one sequence stores what it opened and closed.

    Fields:
        ptr: the opened scores `[T, C]` fp64.
        row_size: how far the rows are apart.
        to_closed: how far the closed scores are from the opened.
    """

    ptr: tl.tensor
    row_size: tl.tensor
    to_closed: tl.tensor


@triton.jit
def semi_markov_weights_kernel(
    transitions,  # Matrix
    durations,  # Matrix
    weights_ptr,  # [4 * SLOTS + 2 * BLOCK_C + 2, BLOCK_C + 1] fp64, see below
    C,
    D,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of 2, at least D
):
    """Write what the scans in registers read: weights of durations, and scores.

    The rows are 2 * SLOTS of weights relative to the greatest of each state, 2 * SLOTS of scores,
    the weights of the duration 1, the greatest scores, and the scores of transitions from the
    states of rows and to them. Row j of the first two has the age -j mod SLOTS, minus 1, so that a
    step reads consecutive rows wherever its newest slot is; the weights of the duration 1 are 0
    there, because a new segment is not in the ring yet.

    Past the states are weights of 0 and scores of -inf, so that reading a row needs no mask. A row
    has an odd number of elements: from aligned rows a thread would load several states at once,
    which costs the sums over slots more than it saves.
    """
    c, j = tl.arange(0, BLOCK_C)[None, :], tl.arange(0, SLOTS)[:, None]
    age = (SLOTS - j) % SLOTS
    at = age.to(tl.int64) * durations.row + c * durations.column
    scores = tl.load(durations.ptr + at, mask=(age < D) & (c < C), other=-float("inf"))
    scores = scores.to(tl.float64)
    greatest = finite_shift(tl.max(scores, axis=0))[None, :]
    weights = tl.exp(scores - greatest)
    part: tl.constexpr = 2 * SLOTS
    for copy in tl.static_range(2):
        to = weights_ptr + (copy * SLOTS + j) * (BLOCK_C + 1) + c
        tl.store(to, tl.where(age == 0, 0.0, weights))
        tl.store(to + part * (BLOCK_C + 1), scores)
    to = weights_ptr + 2 * part * (BLOCK_C + 1) + c + 0 * j
    tl.store(to, weights, mask=age == 0)
    tl.store(to + BLOCK_C + 1, greatest + 0.0 * j, mask=age == 0)
    to = weights_ptr + (2 * part + 2) * (BLOCK_C + 1)
    row, column = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    mask = (row < C) & (column < C)
    for is_beta in tl.static_range(2):
        source, target = (column, row) if is_beta else (row, column)
        at = source.to(tl.int64) * transitions.row + target.to(tl.int64) * transitions.column
        scores = tl.load(transitions.ptr + at, mask=mask, other=-float("inf")).to(tl.float64)
        tl.store(to + (is_beta * BLOCK_C + row) * (BLOCK_C + 1) + column, scores)


@triton.jit
def load_emission(sequence, k, BLOCK_C: tl.constexpr):
    """Load the emissions of step k of a scan, -inf past its steps."""
    c = tl.arange(0, BLOCK_C)
    row = tl.full([], sequence.t, tl.int64) + k * sequence.dt
    at = row * sequence.stride_t + c.to(tl.int64) * sequence.stride_c
    mask = (c < sequence.C) & (k < sequence.steps)
    return tl.load(sequence.ptr + at, mask=mask, other=-float("inf"))


@triton.jit
def load_open(sequence, ring_ptr, opened, k, D, BLOCK_C: tl.constexpr, SLOTS: tl.constexpr):
    """Return the scores of open segments by slot, with the emissions of their own steps alone."""
    C = sequence.C
    c, slot = tl.arange(0, BLOCK_C)[None, :], tl.arange(0, SLOTS)[:, None]
    age = (k - slot) & (SLOTS - 1)
    inside = (age <= k) & (age < D) & (c < C)
    scores = tl.load(
        ring_ptr + slot * (BLOCK_C + 1) + c, mask=inside & (age > 0), other=-float("inf")
    )
    scores = tl.where((age == 0) & (c < C), opened[None, :], scores)
    row = tl.full([], sequence.t, tl.int64) + (k - age) * sequence.dt
    at = sequence.ptr + row * sequence.stride_t + c * sequence.stride_c
    emissions = tl.load(at, mask=inside, other=0.0).to(tl.float64)
    # The slots up to that of step k have the latest steps, and those after it the ones before.
    is_late = slot <= (k & (SLOTS - 1))
    late, early = tl.where(is_late, emissions, 0.0), tl.where(is_late, 0.0, emissions)
    later = tl.sum(late, axis=0)[None, :]
    late, early = tl.cumsum(late, axis=0, reverse=True), tl.cumsum(early, axis=0, reverse=True)
    return scores + tl.where(is_late, late, early + later)


@triton.jit
def exact_step(
    k,  # the number of the step in the scan
    sequence,  # Sequence
    transitions_ptr,  # scores, [from, to] in the direction of the scan
    durations_ptr,  # scores
    ring_ptr,
    opened_at,  # [BLOCK_C], see ScanState
    level,
    D,
    EXACT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Take a step with logarithms, and choose what numbers are relative to after it.

    The first step takes the scores that stand in the row of the last. What is closed is relative to
    the level and to the opened scores, which are smoother from step to step. A state that is not
    opened takes the score at which it would have been opened.

    Returns:
        The numbers and offsets of what is opened and closed, the `ScanState`, the transitions, the
        level, the references of what is closed and of what will be opened, and the numbers of what
        is closed.
    """
    C = sequence.C
    c, slot = tl.arange(0, BLOCK_C)[None, :], tl.arange(0, SLOTS)[:, None]
    tl.debug_barrier()  # other threads stored the scores that this one reads
    other = tl.arange(0, BLOCK_C)[:, None]
    closed_ptr = ring_ptr + SLOTS * (BLOCK_C + 1)
    closed = tl.load(closed_ptr + other, mask=other < C, other=-float("inf"))
    matrix_ptr = transitions_ptr + other * (BLOCK_C + 1) + c
    terms = tl.load(matrix_ptr) + closed
    shift = finite_shift(tl.max(terms, axis=0))
    total = tl.sum(exp_term(terms - shift[None, :], EXACT), axis=0)
    first = tl.load(
        closed_ptr + tl.arange(0, BLOCK_C), mask=tl.arange(0, BLOCK_C) < C, other=-float("inf")
    )
    number, offset = tl.where(k == 0, 1.0, total), tl.where(k == 0, first, shift)
    opened = log_of_sum(number, EXACT) + offset
    scores = load_open(sequence, ring_ptr, opened, k, D, BLOCK_C, SLOTS)
    at = durations_ptr + ((-k & (SLOTS - 1)) + slot) * (BLOCK_C + 1) + c
    is_open = ((k - slot) & (SLOTS - 1)) <= k
    terms = tl.where(is_open, scores + tl.load(at), -float("inf"))
    shift = finite_shift(tl.max(terms, axis=0))
    total = tl.sum(exp_term(terms - shift[None, :], EXACT), axis=0)
    tl.debug_barrier()  # the next step stores to what was read
    numbers = (number, offset), (total, shift)
    opened, closed = scores_of(numbers[0], EXACT), scores_of(numbers[1], EXACT)
    follows = (opened > -float("inf")) & (closed > -float("inf"))
    gain = finite_shift(tl.max(tl.where(follows, closed - opened, -float("inf")), axis=0))
    score = tl.where(opened > -float("inf"), opened, closed - gain)
    highest = tl.max(score, axis=0)
    source = tl.where(score > -float("inf"), score - highest, 0.0)
    highest = tl.max(closed - source, axis=0)
    level = tl.where(highest > -float("inf"), highest, level)
    weight = weight_term(closed - source - level, EXACT)
    matrix = tl.load(matrix_ptr) + source[:, None]
    target = finite_shift(tl.max(matrix, axis=0))
    matrix = weight_term(matrix - target[None, :], EXACT)
    base = tl.max(scores, axis=0)
    is_empty = base == -float("inf")
    base = tl.where(is_empty, level + target, base)
    ring = exp_term(scores - base[None, :], EXACT)
    is_rounded = tl.max(((ring < SMALL) & (scores > -float("inf"))).to(tl.int32), axis=0) > 0
    opened_at = tl.where(opened > -float("inf"), k, opened_at)
    opened_at = tl.where(is_empty, k - SLOTS, opened_at)
    rounded_at = tl.where(is_rounded, k, k - SLOTS)
    state = ScanState(ring, base, opened_at, rounded_at)
    return numbers, state, matrix, level, source, target, weight


@triton.jit
def add_both(a, b, c, d):
    """Add two pairs of numbers."""
    return a + c, b + d


@triton.jit
def store_step(
    k,
    scores,  # [BLOCK_C] fp64 each, of what the step opened and closed
    ring_ptr,
    sequence,  # Sequence
    saved,  # SavedRows
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
    SAVE: tl.constexpr,
):
    """Store what step k opened and closed."""
    opened, closed = scores
    c = tl.arange(0, BLOCK_C)
    mask = (c < sequence.C) & (k >= 0)
    tl.store(ring_ptr + (k & (SLOTS - 1)) * (BLOCK_C + 1) + c, opened, mask=mask)
    tl.store(ring_ptr + SLOTS * (BLOCK_C + 1) + c, closed, mask=mask)
    if SAVE:
        row = tl.full([], sequence.t, tl.int64) + k * sequence.dt
        at = saved.ptr + row * saved.row_size + c
        tl.store(at, opened, mask=mask)
        tl.store(at + saved.to_closed, closed, mask=mask)


@triton.jit
def linear_step(
    k,  # the number of the step in the scan
    score,  # [BLOCK_C] fp64, the emissions of the step
    sums,  # [BLOCK_C] fp64 each, over the open segments in the ring and over the transitions
    state,  # ScanState
    references,  # [BLOCK_C] fp64 each, of the sums over the transitions and of what is closed
    one_step,  # [BLOCK_C] fp64, the weight of the duration 1
    greatest,  # [BLOCK_C] fp64, the greatest score of the durations
    memory,  # [BLOCK_C], for how many steps the ring may be without what was rounded to 0
    EXACT: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Take a step with products.

    An exponent of MAX_EXPONENT takes what is opened above RING_HIGH, and closed above HIGH.

    Returns:
        The numbers and offsets of what is opened and closed, the next state, the numbers of what is
        closed relative to its references, and for which states the step is right.
    """
    older, entered = sums
    ring, base, opened_at, rounded_at = state
    opened_base, source_base = references
    slot = tl.arange(0, SLOTS)[:, None]
    gap = opened_base - base
    begun = entered * exp_term(tl.minimum(gap, MAX_EXPONENT), EXACT)
    is_dead = score == -float("inf")
    total = tl.where(is_dead, 0.0, older + begun * one_step)
    closed_base = base + tl.where(is_dead, 0.0, score)
    gain = greatest + closed_base - source_base
    weight = total * exp_term(tl.minimum(gain, MAX_EXPONENT), EXACT)
    weight = tl.where((total > 0.0) & (weight < SMALL), SMALL, weight)
    # Numbers that grow are made smaller. Segments that may be closed already bound by how much.
    bits = exponent_bits(begun) - 1023
    bound = tl.where(total > 0.0, exponent_bits(total) - 1023 + MAX_LOSS, bits)
    bits = tl.minimum(bits, bound)
    bits = tl.where((bits > MAX_BITS) & (begun <= RING_HIGH), bits, 0)
    power = ((-bits + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)  # 2**-bits
    scale = tl.where(is_dead, 0.0, power)
    ring = tl.where(slot == (k & (SLOTS - 1)), begun[None, :], ring) * scale[None, :]
    opened_at = tl.where(is_dead, k - SLOTS, tl.where(entered > 0.0, k, opened_at))
    is_rounded = (bits > 0) | ((begun < SMALL) & (entered > 0.0))
    rounded_at = tl.where(is_dead, k - SLOTS, tl.where(is_rounded, k, rounded_at))
    is_empty = k + 1 - opened_at >= SLOTS
    base = tl.where(is_empty, opened_base, closed_base + bits.to(tl.float64) * LN2_FP64)
    is_known = (k - rounded_at >= memory) | (k - opened_at >= SLOTS)
    is_right = (total >= RING_LOW) & (total <= RING_HIGH)
    is_right = is_right | is_dead | ((total == 0.0) & is_known)
    is_finite = tl.abs(closed_base - opened_base) < float("inf")
    is_right = is_right & (begun <= RING_HIGH) & is_finite
    is_in_range = (entered >= LOW) & (entered <= HIGH)
    is_right = is_right & (is_in_range | (entered == 0.0)) & (weight <= HIGH)
    opened, closed = (entered, opened_base), (total, greatest + closed_base)
    return opened, closed, ScanState(ring, base, opened_at, rounded_at), weight, is_right


@triton.jit
def semi_markov_scan_kernel(
    chains,  # Chains
    weights_ptr,  # [4 * SLOTS + 2 * BLOCK_C + 2, BLOCK_C + 1] fp64, as stored above
    ring_ptr,  # [programs, SLOTS + 1, BLOCK_C + 1] fp64: what each slot opened, what closed last
    saved_ptr,  # [4, T, N, C] fp64 if SAVE, see Scans
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Scan a sequence forwards and compute log Z, or with SAVE in every other program backwards."""
    is_alpha = tl.program_id(0) % 2 == 0 if SAVE else tl.program_id(0) >= 0
    n = (tl.program_id(0) // 2 if SAVE else tl.program_id(0)).to(tl.int64)
    emissions, C, D = chains.emissions, chains.C, chains.D
    c = tl.arange(0, BLOCK_C)
    steps, invalid = load_length(chains.lengths, n, chains.T, 1, chains.T)
    end = load_end(chains.end, n, c, C)
    first = tl.where(is_alpha, load_end(chains.start, n, c, C), end)
    t, dt = tl.where(is_alpha, 0, steps - 1), tl.where(is_alpha, 1, -1)
    part = tl.full([], chains.T, tl.int64) * chains.N * C
    saved_ptr += n * C + tl.where(is_alpha, 0, 3 * part)  # to what is opened
    row_size = tl.full([], chains.N, tl.int64) * C
    saved = SavedRows(saved_ptr, row_size, tl.where(is_alpha, part, -part))
    ring_ptr += tl.program_id(0).to(tl.int64) * (SLOTS + 1) * (BLOCK_C + 1)
    sequence = Sequence(emissions.ptr + n * emissions.n, emissions.t, emissions.c, steps, t, dt, C)
    matrix_row = tl.where(is_alpha, 4 * SLOTS + 2, 4 * SLOTS + 2 + BLOCK_C)
    transitions_ptr = weights_ptr + matrix_row * (BLOCK_C + 1)
    tl.store(ring_ptr + SLOTS * (BLOCK_C + 1) + c, first, mask=c < C)
    slot = tl.arange(0, SLOTS)[:, None]
    durations_ptr = weights_ptr + 2 * SLOTS * (BLOCK_C + 1)
    factors_ptr = weights_ptr + 4 * SLOTS * (BLOCK_C + 1) + c
    one_step, greatest = tl.load(factors_ptr), tl.load(factors_ptr + BLOCK_C + 1)
    durations = tl.load(weights_ptr + (2 * SLOTS + slot) * (BLOCK_C + 1) + c[None, :])
    is_small = (durations > -float("inf")) & (durations - greatest[None, :] < LOG_SMALL)
    memory = tl.where(tl.max(is_small.to(tl.int32), axis=0) > 0, ALWAYS, SLOTS)
    zeros, never = tl.zeros([BLOCK_C], tl.float64), tl.full([BLOCK_C], -SLOTS, tl.int32)
    state = ScanState(tl.zeros([SLOTS, BLOCK_C], tl.float64), zeros, never, never)
    # The first step is exact, and sets what numbers are relative to.
    matrix, source, target = tl.zeros([BLOCK_C, BLOCK_C], tl.float64), zeros, zeros
    weight, opened, closed = zeros, (zeros, zeros), (zeros, zeros)
    level, power = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    emission, following = load_emission(sequence, 0, BLOCK_C), load_emission(sequence, 1, BLOCK_C)
    for k in range(0, steps):
        after = load_emission(sequence, k + 2, BLOCK_C)
        row = (-k & (SLOTS - 1)) + slot
        older = state.ring * tl.load(weights_ptr + row * (BLOCK_C + 1) + c[None, :])
        if SLOTS >= BLOCK_C:  # both sums are exchanged together
            older = tl.sum(tl.reshape(older, (SLOTS // BLOCK_C, BLOCK_C, BLOCK_C)), axis=0)
            sums = tl.reduce((older, matrix * weight[:, None]), 0, add_both)
        else:
            sums = tl.sum(older, axis=0), tl.sum(matrix * weight[:, None], axis=0)
        # Logarithms of the step before, in the time that this step waits for its sums.
        before = scores_of(opened, EXACT), scores_of(closed, EXACT)
        store_step(k - 1, before, ring_ptr, sequence, saved, BLOCK_C, SLOTS, SAVE)
        references = (level + target, level + power + source)
        level += power
        score = emission.to(tl.float64)
        opened, closed, next_state, weight, is_right = linear_step(
            k, score, sums, state, references, one_step, greatest, memory, EXACT, SLOTS
        )
        # A branch, written as a loop of at most one turn: with the layouts of these values Triton
        # 3.6 does not compile a branch for AMD.
        is_wrong = tl.max((~is_right & (c < C)).to(tl.int32), axis=0)
        for _ in range(0, tl.where(k == 0, 1, is_wrong)):
            inputs = (sequence, transitions_ptr, durations_ptr, ring_ptr, state.opened_at, level)
            numbers, next_state, matrix, level, source, target, weight = exact_step(
                k, *inputs, D, EXACT, BLOCK_C, SLOTS
            )
            opened, closed = numbers
        # Triton 3.6 removes a carried value that only sets the trip count of an inner loop, such as
        # the step of the last rounding. This use prevents that; `is_wrong` is 0 or 1.
        level = tl.where(is_wrong > 1, 0.0, level)
        state = next_state
        highest = tl.max(exponent_bits(weight), axis=0)
        is_finite = (highest > 0) & (highest < 2047)
        power = tl.where(is_finite, highest - 1023, 0).to(tl.float64) * LN2_FP64
        emission, following = following, after
    last = scores_of(opened, EXACT), scores_of(closed, EXACT)
    store_step(steps - 1, last, ring_ptr, sequence, saved, BLOCK_C, SLOTS, SAVE)
    if is_alpha:
        store_logz(last[1] + end, n, invalid, logz_ptr, rounded_ptr)
