"""The best path of semi-Markov chains, and samples of paths.

The scan of best scores is that of `scan.py` with maxima, so it adds the same numbers in the same
order as the reference. Its ring of open segments, [slots, states], stays in the registers of one
program. Where it does not fit, `memory_scan.py` stores the same choices. Samples are drawn from
their end with the scores that the scan of log Z stores.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from ....primitives.gpu.memory import load_length
from .scan import Sequence, load_emission
from .scores import load_end, rounded


@triton.jit
def better_of(a, i, b, j):
    """Return the better score and its choice: NaN is best, and ties go to the lower choice."""
    a_is_nan, b_is_nan = a != a, b != b
    tie = (a == b) | (a_is_nan & b_is_nan)
    first = (a > b) | (a_is_nan & ~b_is_nan) | (tie & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def better_of_both(a, i, x, k, b, j, y, m):
    """Do what `better_of` does for two pairs of scores."""
    return better_of(a, i, b, j) + better_of(x, k, y, m)


@triton.jit
def better(best, choice, scores, index, axis: tl.constexpr):
    """Return the best scores so far and their choices, given the scores of further choices."""
    found, lowest = tl.reduce((scores, tl.broadcast_to(index, scores.shape)), axis, better_of)
    return better_of(best, choice, found, lowest)


@triton.jit
def store_best(scores, c, n, invalid, score_ptr, last_ptr):
    """Store the best score of the states in which the paths end, and the state."""
    best = tl.full([1], -float("inf"), tl.float64)
    best, last = better(best, tl.full([1], -1, tl.int32), scores[None, :], c[None, :], 1)
    best = tl.sum(best, axis=0) + invalid
    last = tl.where(best > -float("inf"), tl.sum(last, axis=0), -1)
    tl.store(score_ptr + n, rounded(best, score_ptr.dtype.element_ty))
    tl.store(last_ptr + n, last)


@triton.jit
def semi_markov_best_scan_kernel(
    chains,  # Chains
    weights_ptr,  # [4 * SLOTS + 2 * BLOCK_C + 2, BLOCK_C + 1] fp64, see scan.py
    choices_ptr,  # [2, T, N, C] int32: the state before a segment that is closed, and its size
    score_ptr,  # [N]
    last_ptr,  # [N] int32: the last state, -1 without a path
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Compute the best score of a sequence, and the choices of which it is made.

    Two maxima of a step need nothing of each other, so they are formed together: over the states
    before a new segment, and over the ages of the segments that are older. Each slot remembers the
    state before its segment, so a path is traced back with one load for each segment.
    """
    n = tl.program_id(0).to(tl.int64)
    # Triton 3.6 loses a stride of 1 in a tuple of a tuple in loops, so the tuples are taken out.
    emissions, starts, ends, lengths_ptr, T, N, C, D = chains
    c, slot = tl.arange(0, BLOCK_C), tl.arange(0, SLOTS)[:, None]
    steps, invalid = load_length(lengths_ptr, n, T, 1, T)
    part = tl.full([], T, tl.int64) * N * C
    sequence = Sequence(emissions.ptr + n * emissions.n, emissions.t, emissions.c, steps, 0, 1, C)
    states = tl.arange(0, BLOCK_C)[:, None]
    matrix_ptr = weights_ptr + (4 * SLOTS + 2) * (BLOCK_C + 1)
    matrix = tl.load(matrix_ptr + states * (BLOCK_C + 1) + c[None, :])
    states += tl.zeros([BLOCK_C, BLOCK_C], tl.int32)
    scores_ptr = weights_ptr + 2 * SLOTS * (BLOCK_C + 1)
    one_step = tl.load(scores_ptr + c)  # row 0 has the duration 1
    ring = tl.full([SLOTS, BLOCK_C], -float("inf"), tl.float64)
    before = tl.zeros([SLOTS, BLOCK_C], tl.int32)
    opened = load_end(starts, n, c, C)
    closed, state = tl.zeros([BLOCK_C], tl.float64), tl.zeros([BLOCK_C], tl.int32)
    emission, following = load_emission(sequence, 0, BLOCK_C), load_emission(sequence, 1, BLOCK_C)
    for k in range(0, steps):
        after = load_emission(sequence, k + 2, BLOCK_C)
        score, age = emission.to(tl.float64), (k - slot) & (SLOTS - 1)
        at = scores_ptr + ((-k & (SLOTS - 1)) + slot) * (BLOCK_C + 1) + c[None, :]
        durations = tl.load(at)
        ring += score[None, :]
        is_older = (age > 0) & (age < tl.minimum(D, k + 1))
        older = tl.where(is_older, ring + durations, -float("inf"))
        # The choice orders segments by their age. It has the state before, which is below 2**8.
        choice = (age << 8) | before
        entered = matrix + closed[:, None]
        if SLOTS >= BLOCK_C:
            shape: tl.constexpr = (SLOTS // BLOCK_C, BLOCK_C, BLOCK_C)
            parts = (tl.reshape(older, shape), tl.reshape(choice, shape))
            older, choice = tl.reduce(parts, 0, better_of)
            older, choice, entered, previous = tl.reduce(
                (older, choice, entered, states), 0, better_of_both
            )
        else:
            older, choice = tl.reduce((older, choice), 0, better_of)
            entered, previous = tl.reduce((entered, states), 0, better_of)
        opened = tl.where(k == 0, opened, entered)
        state = tl.where(k == 0, 0, previous)
        newest = opened + score
        closed = newest + one_step
        is_newest = (closed >= older) | (closed != closed)
        size = tl.where(is_newest, 0, choice >> 8)
        state_before = tl.where(is_newest, state, choice & 255)
        closed = tl.where(is_newest, closed, older)
        ring = tl.where(age == 0, newest[None, :], ring)
        before = tl.where(age == 0, state[None, :], before)
        row = choices_ptr + (tl.full([], k, tl.int64) * N + n) * C + c
        tl.store(row, state_before, mask=c < C)
        tl.store(row + part, size, mask=c < C)
        emission, following = following, after
    scores = closed + load_end(ends, n, c, C)
    store_best(scores, c, n, invalid, score_ptr, last_ptr)


@triton.jit
def semi_markov_trace_kernel(
    choices_ptr,  # [2, T, N, C] int32: states before segments, and the sizes of those closed
    last_ptr,  # [N] int32
    states_ptr,  # [T, N] int64
    starts_ptr,  # [T, N] bool
    lengths_ptr,  # [N] or None
    T,
    N,
    C,
    BY_END: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the states and starts of the best path, from the last segment to the first.

    The states before segments are in the rows of their last steps with BY_END, else of their first.
    """
    n = tl.program_id(0).to(tl.int64)
    steps, _ = load_length(lengths_ptr, n, T, 1, T)
    part = tl.full([], T, tl.int64) * N * C
    state, t = tl.load(last_ptr + n).to(tl.int64), steps.to(tl.int64) - 1
    t = tl.where(state < 0, -1, t)
    write_segment(states_ptr + n, starts_ptr + n, N, t + 1, T - 1 - t, -1, BLOCK)
    at, mask = choices_ptr + (t * N + n) * C + state, t >= 0
    size = tl.load(at + part, mask=mask, other=0).to(tl.int64) + 1
    before = tl.load(at, mask=mask, other=0).to(tl.int64)
    while t >= 0:
        first, this_size, this_state = t + 1 - size, size, state
        if not BY_END:
            before = tl.load(choices_ptr + (first * N + n) * C + state).to(tl.int64)
        state, t = before, first - 1
        # The next segment is loaded while this one is written.
        at, mask = choices_ptr + (t * N + n) * C + state, t >= 0
        size = tl.load(at + part, mask=mask, other=0).to(tl.int64) + 1
        if BY_END:
            before = tl.load(at, mask=mask, other=0).to(tl.int64)
        write_segment(states_ptr + n, starts_ptr + n, N, first, this_size, this_state, BLOCK)


@triton.jit
def write_segment(states_ptr, starts_ptr, N, first, size, state, BLOCK: tl.constexpr):
    """Write a segment of a path, or with the state -1 what is no path."""
    lane = tl.arange(0, BLOCK)
    for i in range(0, size, BLOCK):
        at = (first + i + lane).to(tl.int64) * N
        inside = i + lane < size
        tl.store(states_ptr + at, tl.zeros([BLOCK], tl.int64) + state, mask=inside)
        tl.store(starts_ptr + at, (i + lane == 0) & (state >= 0), mask=inside)


@triton.jit
def draw(terms, index, uniform):
    """Draw an index with probabilities proportional to exp(terms), [BLOCK]; terms may be -inf."""
    weights = tl.exp(terms - finite_shift(tl.max(terms, axis=0)))
    cumulative = tl.cumsum(weights, axis=0)
    chosen = tl.sum((cumulative <= uniform * tl.max(cumulative, axis=0)).to(tl.int64), axis=0)
    # A product that rounds up to the total would pass the last index with a positive weight.
    return tl.minimum(chosen, tl.max(tl.where(weights > 0.0, index, 0), axis=0).to(tl.int64))


@triton.jit
def semi_markov_sample_kernel(
    emissions,  # Emissions
    transitions,  # Matrix
    durations,  # Matrix
    end,  # Matrix
    scans,  # Scans
    uniforms_ptr,  # [T, 2, k, N] fp64
    states_ptr,  # [k, T, N] int64
    starts_ptr,  # [k, T, N] bool
    D,
    samples,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Draw one path of one sequence: the last state and its duration, then those before."""
    lengths_ptr, logz_ptr, saved_ptr, T, N, C = scans
    n, k = (tl.program_id(0) % N).to(tl.int64), (tl.program_id(0) // N).to(tl.int64)
    c, d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    steps, _ = load_length(lengths_ptr, n, T, 1, T)
    row_size, part = tl.full([], N, tl.int64) * C, tl.full([], T, tl.int64) * N * C
    path = k * T * N + n
    has_path = tl.load(logz_ptr + n) > -float("inf")  # False for NaN
    t = tl.where(has_path, steps.to(tl.int64) - 1, -1)
    write_segment(states_ptr + path, starts_ptr + path, N, t + 1, T - 1 - t, -1, BLOCK_D)
    follows = tl.load(end.ptr + n * end.row + c.to(tl.int64) * end.column, mask=c < C, other=0.0)
    follows = follows.to(tl.float64)
    while t >= 0:
        uniform_ptr = uniforms_ptr + (2 * t * samples + k) * N + n
        alpha_at = part + t * row_size + n * C + c
        alpha = tl.load(saved_ptr + alpha_at, mask=c < C, other=-float("inf"))
        state = draw(alpha + follows, c, tl.load(uniform_ptr))
        inside = (d < D) & (d <= t)
        at = n * emissions.n + (t - d) * emissions.t + state * emissions.c
        emitted = tl.load(emissions.ptr + at, mask=inside, other=0.0).to(tl.float64)
        opened_at = (t - d) * row_size + n * C + state
        terms = tl.load(saved_ptr + opened_at, mask=inside, other=-float("inf"))
        duration_at = d.to(tl.int64) * durations.row + state * durations.column
        duration = tl.load(durations.ptr + duration_at, mask=inside, other=0.0).to(tl.float64)
        terms += tl.cumsum(emitted, axis=0) + duration
        size = draw(terms, d, tl.load(uniform_ptr + tl.full([], samples, tl.int64) * N)) + 1
        first = t + 1 - size
        write_segment(states_ptr + path, starts_ptr + path, N, first, size, state, BLOCK_D)
        at = c.to(tl.int64) * transitions.row + state * transitions.column
        follows = tl.load(transitions.ptr + at, mask=c < C, other=0.0).to(tl.float64)
        t = first - 1
