"""Tables of transitions and durations in fp64, in the order in which the scans read them."""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift


@triton.jit
def semi_markov_tables_kernel(
    transitions,  # Matrix
    durations,  # Matrix
    tables_ptr,  # fp64: [C, C] to and from, [C, C] from and to, [C, 2 * slots] durations
    C,
    D,
    slots,  # a power of 2, at least D
    BLOCK: tl.constexpr,
):
    """Copy the scores of transitions and durations to the tables.

    Entry j of a state's durations is that of the age -j mod slots, minus 1, and -inf past D. A step
    of a scan reads consecutive entries for the slots of its ring, wherever its newest slot is.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pairs = tl.full([], C, tl.int64) * C
    row, column = i % pairs // C, i % C
    is_alpha = i < pairs
    source, target = tl.where(is_alpha, column, row), tl.where(is_alpha, row, column)
    at = source * transitions.row + target * transitions.column
    is_pair = i < 2 * pairs
    score = tl.load(transitions.ptr + at, mask=is_pair, other=0.0).to(tl.float64)
    c, d = (i - 2 * pairs) // (2 * slots), (2 * slots - (i - 2 * pairs) % (2 * slots)) % slots
    is_duration = (i >= 2 * pairs) & (c < C)
    at = d * durations.row + c * durations.column
    duration = tl.load(durations.ptr + at, mask=is_duration & (d < D), other=-float("inf"))
    score = tl.where(is_pair, score, duration.to(tl.float64))
    tl.store(tables_ptr + i, score, mask=is_pair | is_duration)


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
    states of rows and to them. Row j of the first two has the age -j mod SLOTS, minus 1, as in the
    tables; the weights of the duration 1 are 0 there, because a new segment is not in the ring yet.

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
