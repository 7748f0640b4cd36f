"""Tables of transitions and durations in fp64, in the order in which the scans read them."""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift


@triton.jit
def semi_markov_tables_kernel(
    transitions_ptr,  # [C, C]
    durations_ptr,  # [D, C]
    tables_ptr,  # fp64: [C, C] to and from, [C, C] from and to, [C, 2 * slots] durations
    C,
    D,
    slots,  # a power of 2, at least D
    trans_k,
    trans_c,
    dur_d,
    dur_c,
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
    at = source * trans_k + target * trans_c
    is_pair = i < 2 * pairs
    score = tl.load(transitions_ptr + at, mask=is_pair, other=0.0).to(tl.float64)
    c, d = (i - 2 * pairs) // (2 * slots), (2 * slots - (i - 2 * pairs) % (2 * slots)) % slots
    is_duration = (i >= 2 * pairs) & (c < C)
    at = d * dur_d + c * dur_c
    duration = tl.load(durations_ptr + at, mask=is_duration & (d < D), other=-float("inf"))
    score = tl.where(is_pair, score, duration.to(tl.float64))
    tl.store(tables_ptr + i, score, mask=is_pair | is_duration)


@triton.jit
def semi_markov_weights_kernel(
    durations_ptr,  # [D, C]
    weights_ptr,  # [4 * SLOTS + 2, C] fp64, see below
    C,
    D,
    dur_d,
    dur_c,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,  # a power of 2, at least D
):
    """Write the weights of durations, relative to the greatest of each state, and their scores.

    The rows are 2 * SLOTS of weights, 2 * SLOTS of scores, the weights of the duration 1, and the
    greatest scores. Row j of the first two has the age -j mod SLOTS, minus 1, as in the tables; the
    weights of the duration 1 are 0 there, because a new segment is not in the ring yet.
    """
    c, j = tl.arange(0, BLOCK_C)[None, :], tl.arange(0, SLOTS)[:, None]
    age = (SLOTS - j) % SLOTS
    at = age.to(tl.int64) * dur_d + c * dur_c
    scores = tl.load(durations_ptr + at, mask=(age < D) & (c < C), other=-float("inf"))
    scores = scores.to(tl.float64)
    greatest = finite_shift(tl.max(scores, axis=0))[None, :]
    weights = tl.exp(scores - greatest)
    part: tl.constexpr = 2 * SLOTS
    for copy in tl.static_range(2):
        to = weights_ptr + (copy * SLOTS + j) * C + c
        tl.store(to, tl.where(age == 0, 0.0, weights), mask=c < C)
        tl.store(to + part * C, scores, mask=c < C)
    to = weights_ptr + 2 * part * C + c + 0 * j
    tl.store(to, weights, mask=(c < C) & (age == 0))
    tl.store(to + C, greatest + 0.0 * j, mask=(c < C) & (age == 0))
