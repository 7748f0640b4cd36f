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

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .scores import (
    LN2_FP64,
    LOG_SMALL,
    exp_term,
    exponent_bits,
    load_end,
    load_steps,
    log_of_number,
    log_of_sum,
    power_of_2,
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


@triton.jit
def load_emission(sequence, k, BLOCK_C: tl.constexpr):
    """Load the emissions of step k of a scan, -inf past its steps."""
    ptr, steps, t, dt, C, stride_t, stride_c = sequence
    c = tl.arange(0, BLOCK_C)
    row = tl.full([], t, tl.int64) + k * dt
    at = row * stride_t + c.to(tl.int64) * stride_c
    return tl.load(ptr + at, mask=(c < C) & (k < steps), other=-float("inf"))


@triton.jit
def load_matrix(ptr, BLOCK_C: tl.constexpr):
    """Return the scores of transitions, [from, to] in the direction of a scan, -inf outside."""
    row, column = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    return tl.load(ptr + row * (BLOCK_C + 1) + column)


@triton.jit
def load_open(sequence, ring_ptr, opened, k, D, BLOCK_C: tl.constexpr, SLOTS: tl.constexpr):
    """Return the scores of open segments by slot, with the emissions of their own steps alone."""
    ptr, _, t, dt, C, stride_t, stride_c = sequence
    c, slot = tl.arange(0, BLOCK_C)[None, :], tl.arange(0, SLOTS)[:, None]
    age = (k - slot) & (SLOTS - 1)
    inside = (age <= k) & (age < D) & (c < C)
    scores = tl.load(
        ring_ptr + slot * (BLOCK_C + 1) + c, mask=inside & (age > 0), other=-float("inf")
    )
    scores = tl.where((age == 0) & (c < C), opened[None, :], scores)
    row = tl.full([], t, tl.int64) + (k - age) * dt
    emissions = tl.load(ptr + row * stride_t + c * stride_c, mask=inside, other=0.0).to(tl.float64)
    # The slots up to that of step k have the latest steps, and those after it the ones before.
    is_late = slot <= (k & (SLOTS - 1))
    late, early = tl.where(is_late, emissions, 0.0), tl.where(is_late, 0.0, emissions)
    later = tl.sum(late, axis=0)[None, :]
    late, early = tl.cumsum(late, axis=0, reverse=True), tl.cumsum(early, axis=0, reverse=True)
    return scores + tl.where(is_late, late, early + later)


@triton.jit
def exact_step(
    k,  # the number of the step in the scan
    sequence,  # see load_emission
    tables,  # (addresses of transitions, of scores of durations and of the ring, D)
    EXACT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Take a step with logarithms, the first with the scores that stand in the row of the last.

    Returns:
        The numbers and offsets of what is opened and closed, and the scores of the open segments.
    """
    transitions_ptr, durations_ptr, ring_ptr, D = tables
    C = sequence[4]
    c, slot = tl.arange(0, BLOCK_C)[None, :], tl.arange(0, SLOTS)[:, None]
    tl.debug_barrier()  # other threads stored the scores that this one reads
    other = tl.arange(0, BLOCK_C)[:, None]
    closed_ptr = ring_ptr + SLOTS * (BLOCK_C + 1)
    closed = tl.load(closed_ptr + other, mask=other < C, other=-float("inf"))
    terms = load_matrix(transitions_ptr, BLOCK_C) + closed
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
    return (number, offset), (total, shift), scores


@triton.jit
def choose_references(opened, closed, level, transitions_ptr, EXACT: tl.constexpr, C: tl.constexpr):
    """Choose what numbers are relative to after a step with scores [C] of opened and closed.

    What is closed is relative to the level and to the opened scores, which are smoother from step
    to step. A state that is not opened takes the score at which it would have been opened.

    Returns:
        The transitions, the level, the references of what is closed and of what will be opened,
        and the numbers of what is closed.
    """
    follows = (opened > -float("inf")) & (closed > -float("inf"))
    gain = finite_shift(tl.max(tl.where(follows, closed - opened, -float("inf")), axis=0))
    score = tl.where(opened > -float("inf"), opened, closed - gain)
    highest = tl.max(score, axis=0)
    source = tl.where(score > -float("inf"), score - highest, 0.0)
    highest = tl.max(closed - source, axis=0)
    level = tl.where(highest > -float("inf"), highest, level)
    weight = weight_term(closed - source - level, EXACT)
    matrix = load_matrix(transitions_ptr, C) + source[:, None]
    target = finite_shift(tl.max(matrix, axis=0))
    return weight_term(matrix - target[None, :], EXACT), level, source, target, weight


@triton.jit
def ring_of(k, scores, opened, opened_at, otherwise, EXACT: tl.constexpr, SLOTS: tl.constexpr):
    """Return the state of a scan, see `linear_step`, after an exact step.

    The bases of states without an open segment are `otherwise`.
    """
    base = tl.max(scores, axis=0)
    is_empty = base == -float("inf")
    base = tl.where(is_empty, otherwise, base)
    ring = exp_term(scores - base[None, :], EXACT)
    is_rounded = tl.max(((ring < SMALL) & (scores > -float("inf"))).to(tl.int32), axis=0) > 0
    opened_at = tl.where(opened > -float("inf"), k, opened_at)
    opened_at = tl.where(is_empty, k - SLOTS, opened_at)
    rounded_at = tl.where(is_rounded, k, k - SLOTS)
    return ring, base, opened_at, rounded_at


@triton.jit
def add_both(a, b, c, d):
    """Add two pairs of numbers."""
    return a + c, b + d


@triton.jit
def two_sums(ring, weights, matrix, weight, BLOCK_C: tl.constexpr, SLOTS: tl.constexpr):
    """Return the sums of products over slots and over states, which are exchanged together."""
    products = ring * weights
    if SLOTS >= BLOCK_C:
        products = tl.sum(tl.reshape(products, (SLOTS // BLOCK_C, BLOCK_C, BLOCK_C)), axis=0)
        return tl.reduce((products, matrix * weight[:, None]), 0, add_both)
    else:
        return tl.sum(products, axis=0), tl.sum(matrix * weight[:, None], axis=0)


@triton.jit
def scores_of(numbers, EXACT: tl.constexpr):
    """Return the scores of numbers relative to an offset."""
    number, offset = numbers
    return log_of_number(number, EXACT) + offset


@triton.jit
def store_step(
    k,
    opened,
    closed,
    ring_ptr,
    saved,
    C,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
    SAVE: tl.constexpr,
):
    """Store what step k opened and closed."""
    # The address of the opened scores of a sequence, the first row and the direction, the size of a
    # row, and how far the closed scores are from the opened.
    saved_ptr, t, dt, row_size, to_closed = saved
    c = tl.arange(0, BLOCK_C)
    mask = (c < C) & (k >= 0)
    tl.store(ring_ptr + (k & (SLOTS - 1)) * (BLOCK_C + 1) + c, opened, mask=mask)
    tl.store(ring_ptr + SLOTS * (BLOCK_C + 1) + c, closed, mask=mask)
    if SAVE:
        row = saved_ptr + (tl.full([], t, tl.int64) + k * dt) * row_size + c
        tl.store(row, opened, mask=mask)
        tl.store(row + to_closed, closed, mask=mask)


@triton.jit
def load_factors(weights_ptr, BLOCK_C: tl.constexpr, SLOTS: tl.constexpr):
    """Return for each state the weight of the duration 1, the greatest score of its durations, and
    for how many steps the ring may be without what was rounded to 0."""
    c, slot = tl.arange(0, BLOCK_C), tl.arange(0, SLOTS)[:, None]
    ptr = weights_ptr + 4 * SLOTS * (BLOCK_C + 1) + c
    one_step, greatest = tl.load(ptr), tl.load(ptr + BLOCK_C + 1)
    scores = tl.load(weights_ptr + (2 * SLOTS + slot) * (BLOCK_C + 1) + c[None, :])
    is_small = (scores > -float("inf")) & (scores - greatest[None, :] < LOG_SMALL)
    is_rounded = tl.max(is_small.to(tl.int32), axis=0) > 0
    return one_step, greatest, tl.where(is_rounded, ALWAYS, SLOTS)


@triton.jit
def is_within(x, low, high):
    """Return which numbers are between two bounds; none for NaN."""
    return (x >= low) & (x <= high)


@triton.jit
def linear_step(
    k,  # the number of the step in the scan
    score,  # [BLOCK_C] fp64, the emissions of the step
    sums,  # [BLOCK_C] fp64 each, over the open segments in the ring and over the transitions
    state,  # see below
    references,  # [BLOCK_C] fp64 each, of the sums over the transitions and of what is closed
    factors,  # see load_factors
    EXACT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Take a step with products.

    The state of a scan is the ring, the bases, and for each state of the chain the last step at
    which a segment was opened, and the last at which a number in the ring may have become 0 by
    rounding.

    An exponent of MAX_EXPONENT takes what is opened above RING_HIGH, and closed above HIGH.

    Returns:
        The numbers and offsets of what is opened and closed, the next state, the numbers of what is
        closed relative to its references, and for which states the step is right.
    """
    older, entered = sums
    ring, base, opened_at, rounded_at = state
    slot = tl.arange(0, SLOTS)[:, None]
    gap = references[0] - base
    begun = entered * exp_term(tl.minimum(gap, MAX_EXPONENT), EXACT)
    is_dead = score == -float("inf")
    total = tl.where(is_dead, 0.0, older + begun * factors[0])
    closed_base = base + tl.where(is_dead, 0.0, score)
    gain = factors[1] + closed_base - references[1]
    weight = total * exp_term(tl.minimum(gain, MAX_EXPONENT), EXACT)
    weight = tl.where((total > 0.0) & (weight < SMALL), SMALL, weight)
    # Numbers that grow are made smaller. Segments that may be closed already bound by how much.
    bits = exponent_bits(begun) - 1023
    bound = tl.where(total > 0.0, exponent_bits(total) - 1023 + MAX_LOSS, bits)
    bits = tl.minimum(bits, bound)
    bits = tl.where((bits > MAX_BITS) & (begun <= RING_HIGH), bits, 0)
    scale = tl.where(is_dead, 0.0, power_of_2(-bits))
    ring = tl.where(slot == (k & (SLOTS - 1)), begun[None, :], ring) * scale[None, :]
    opened_at = tl.where(is_dead, k - SLOTS, tl.where(entered > 0.0, k, opened_at))
    is_rounded = (bits > 0) | ((begun < SMALL) & (entered > 0.0))
    rounded_at = tl.where(is_dead, k - SLOTS, tl.where(is_rounded, k, rounded_at))
    is_empty = k + 1 - opened_at >= SLOTS
    base = tl.where(is_empty, references[0], closed_base + bits.to(tl.float64) * LN2_FP64)
    is_known = (k - rounded_at >= factors[2]) | (k - opened_at >= SLOTS)
    is_right = is_within(total, RING_LOW, RING_HIGH) | is_dead | ((total == 0.0) & is_known)
    is_finite = tl.abs(closed_base - references[0]) < float("inf")
    is_right = is_right & (begun <= RING_HIGH) & is_finite
    is_right = is_right & (is_within(entered, LOW, HIGH) | (entered == 0.0)) & (weight <= HIGH)
    opened, closed = (entered, references[0]), (total, factors[1] + closed_base)
    return opened, closed, (ring, base, opened_at, rounded_at), weight, is_right


@triton.jit
def scan_steps(
    sequence,  # see load_emission
    saved,  # see store_step
    weights,  # (addresses of transitions, of the table of weights and of the ring, D)
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Take all steps of a scan, and return the scores of what the last one closed."""
    transitions_ptr, weights_ptr, ring_ptr, D = weights
    steps, C = sequence[1], sequence[4]
    c, slot = tl.arange(0, BLOCK_C), tl.arange(0, SLOTS)[:, None]
    tables = (transitions_ptr, weights_ptr + 2 * SLOTS * (BLOCK_C + 1), ring_ptr, D)
    factors = load_factors(weights_ptr, BLOCK_C, SLOTS)
    zeros, never = tl.zeros([BLOCK_C], tl.float64), tl.full([BLOCK_C], -SLOTS, tl.int32)
    state = (tl.zeros([SLOTS, BLOCK_C], tl.float64), zeros, never, never)
    # The first step is exact, and sets what numbers are relative to.
    matrix, source, target = tl.zeros([BLOCK_C, BLOCK_C], tl.float64), zeros, zeros
    weight, opened, closed = zeros, (zeros, zeros), (zeros, zeros)
    level, power = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    emission, following = load_emission(sequence, 0, BLOCK_C), load_emission(sequence, 1, BLOCK_C)
    for k in range(0, steps):
        after = load_emission(sequence, k + 2, BLOCK_C)
        row = (-k & (SLOTS - 1)) + slot
        durations = tl.load(weights_ptr + row * (BLOCK_C + 1) + c[None, :])
        sums = two_sums(state[0], durations, matrix, weight, BLOCK_C, SLOTS)
        # Logarithms of the step before, in the time that this step waits for its sums.
        opened_scores, closed_scores = scores_of(opened, EXACT), scores_of(closed, EXACT)
        store_step(k - 1, opened_scores, closed_scores, ring_ptr, saved, C, BLOCK_C, SLOTS, SAVE)
        references = (level + target, level + power + source)
        level += power
        opened, closed, next_state, weight, is_right = linear_step(
            k, emission.to(tl.float64), sums, state, references, factors, EXACT, BLOCK_C, SLOTS
        )
        # A branch, written as a loop of at most one turn: with the layouts of these values Triton
        # 3.6 does not compile a branch for AMD.
        is_wrong = tl.max((~is_right & (c < C)).to(tl.int32), axis=0)
        for _ in range(0, tl.where(k == 0, 1, is_wrong)):
            opened, closed, scores = exact_step(k, sequence, tables, EXACT, BLOCK_C, SLOTS)
            opened_scores, closed_scores = scores_of(opened, EXACT), scores_of(closed, EXACT)
            matrix, level, source, target, weight = choose_references(
                opened_scores, closed_scores, level, transitions_ptr, EXACT, BLOCK_C
            )
            next_state = ring_of(k, scores, opened_scores, state[2], level + target, EXACT, SLOTS)
        # Triton 3.6 removes a carried value that only sets the trip count of an inner loop, such as
        # the step of the last rounding. This use prevents that; `is_wrong` is 0 or 1.
        level = tl.where(is_wrong > 1, 0.0, level)
        state = next_state
        highest = tl.max(exponent_bits(weight), axis=0)
        is_finite = (highest > 0) & (highest < 2047)
        power = tl.where(is_finite, highest - 1023, 0).to(tl.float64) * LN2_FP64
        emission, following = following, after
    opened_scores, closed_scores = scores_of(opened, EXACT), scores_of(closed, EXACT)
    store_step(steps - 1, opened_scores, closed_scores, ring_ptr, saved, C, BLOCK_C, SLOTS, SAVE)
    return closed_scores


@triton.jit
def semi_markov_scan_kernel(
    emissions_ptr,  # [T, N, C]
    start_ptr,  # [N, C]
    end_ptr,  # [N, C]
    lengths_ptr,  # [N] or None
    weights_ptr,  # [4 * SLOTS + 2 * BLOCK_C + 2, BLOCK_C + 1] fp64, see tables.py
    ring_ptr,  # [programs, SLOTS + 1, BLOCK_C + 1] fp64: what each slot opened, what closed last
    saved_ptr,  # [4, T, N, C] fp64 if SAVE: opened and closed of alpha, closed and opened of beta
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results
    T,
    N,
    C,
    D,
    stride_t,
    stride_n,
    stride_c,
    start_n,
    start_c,
    end_n,
    end_c,
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Scan a sequence forwards and compute log Z, or with SAVE in every other program backwards."""
    is_alpha = tl.program_id(0) % 2 == 0 if SAVE else tl.program_id(0) >= 0
    n = (tl.program_id(0) // 2 if SAVE else tl.program_id(0)).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    steps, invalid = load_steps(lengths_ptr, n, T)
    end = load_end(end_ptr, n, c, C, end_n, end_c)
    first = tl.where(is_alpha, load_end(start_ptr, n, c, C, start_n, start_c), end)
    t, dt = tl.where(is_alpha, 0, steps - 1), tl.where(is_alpha, 1, -1)
    part = tl.full([], T, tl.int64) * N * C
    saved_ptr += n * C + tl.where(is_alpha, 0, 3 * part)  # to what is opened
    row_size = tl.full([], N, tl.int64) * C
    saved = (saved_ptr, t, dt, row_size, tl.where(is_alpha, part, -part))
    ring_ptr += tl.program_id(0).to(tl.int64) * (SLOTS + 1) * (BLOCK_C + 1)
    sequence = (emissions_ptr + n * stride_n, steps, t, dt, C, stride_t, stride_c)
    matrix_row = tl.where(is_alpha, 4 * SLOTS + 2, 4 * SLOTS + 2 + BLOCK_C)
    transitions_ptr = weights_ptr + matrix_row * (BLOCK_C + 1)
    weights = (transitions_ptr, weights_ptr, ring_ptr, D)
    tl.store(ring_ptr + SLOTS * (BLOCK_C + 1) + c, first, mask=c < C)
    closed = scan_steps(sequence, saved, weights, SAVE, EXACT, BLOCK_C, SLOTS)
    if is_alpha:
        store_logz(closed + end, n, invalid, logz_ptr, rounded_ptr)
