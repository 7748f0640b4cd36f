"""Best scores of semi-Markov chains whose open segments fit into the registers of one program.

The scan is that of `viterbi.py`, with the ring of open segments in registers, [slots, states]. It
adds the same numbers in the same order as the reference. Two maxima of a step need nothing of each
other, so they are formed together: over the states before a new segment, and over the ages of the
segments that are older. Each slot remembers the state before its segment, so a path is traced back
with one load for each segment.
"""

import triton
import triton.language as tl

from .scan import Sequence, load_emission, load_matrix
from .scores import load_end, load_steps
from .viterbi import store_best


@triton.jit
def first_is_better(a, i, b, j):
    """Return whether a score is better: NaN is best, and ties go to the lower choice."""
    a_is_nan, b_is_nan = a != a, b != b
    tie = (a == b) | (a_is_nan & b_is_nan)
    return (a > b) | (a_is_nan & ~b_is_nan) | (tie & (i < j))


@triton.jit
def better_of(a, i, b, j):
    """Return the better of two scores, and its choice."""
    first = first_is_better(a, i, b, j)
    return tl.where(first, a, b), tl.where(first, i, j)


@triton.jit
def better_of_both(a, i, x, k, b, j, y, m):
    """Return the better of two scores and its choice, for two pairs of scores."""
    first, other = first_is_better(a, i, b, j), first_is_better(x, k, y, m)
    best, choice = tl.where(first, a, b), tl.where(first, i, j)
    return best, choice, tl.where(other, x, y), tl.where(other, k, m)


@triton.jit
def semi_markov_best_scan_kernel(
    chains,  # Chains
    weights_ptr,  # [4 * SLOTS + 2 * BLOCK_C + 2, BLOCK_C + 1] fp64, see tables.py
    choices_ptr,  # [2, T, N, C] int32: the state before a segment that is closed, and its size
    score_ptr,  # [N]
    last_ptr,  # [N] int32: the last state, -1 without a path
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Compute the best score of a sequence, and the choices of which it is made."""
    n = tl.program_id(0).to(tl.int64)
    emissions, _, _, lengths_ptr, T, N, C, D = chains
    c, slot = tl.arange(0, BLOCK_C), tl.arange(0, SLOTS)[:, None]
    steps, invalid = load_steps(lengths_ptr, n, T)
    part = tl.full([], T, tl.int64) * N * C
    sequence = Sequence(emissions.ptr + n * emissions.n, emissions.t, emissions.c, steps, 0, 1, C)
    matrix = load_matrix(weights_ptr + (4 * SLOTS + 2) * (BLOCK_C + 1), BLOCK_C)
    states = tl.arange(0, BLOCK_C)[:, None] + tl.zeros([BLOCK_C, BLOCK_C], tl.int32)
    scores_ptr = weights_ptr + 2 * SLOTS * (BLOCK_C + 1)
    one_step = tl.load(scores_ptr + c)  # row 0 has the duration 1
    ring = tl.full([SLOTS, BLOCK_C], -float("inf"), tl.float64)
    before = tl.zeros([SLOTS, BLOCK_C], tl.int32)
    opened = load_end(chains.start, n, c, C)
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
        size, state_before = (
            tl.where(is_newest, 0, choice >> 8),
            tl.where(is_newest, state, choice & 255),
        )
        closed = tl.where(is_newest, closed, older)
        ring = tl.where(age == 0, newest[None, :], ring)
        before = tl.where(age == 0, state[None, :], before)
        row = choices_ptr + (tl.full([], k, tl.int64) * N + n) * C + c
        tl.store(row, state_before, mask=c < C)
        tl.store(row + part, size, mask=c < C)
        emission, following = following, after
    scores = closed + load_end(chains.end, n, c, C)
    store_best(scores, c, n, invalid, score_ptr, last_ptr)
