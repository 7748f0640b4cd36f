"""The k best paths of semi-Markov chains.

The scan is that of the best path in `paths.py`, with the k best paths where it has one, so the ring
has k numbers for each slot. They are in order, and stay so when all of them get the same score. So
a step compares the heads of these lists alone: k times it takes the best head, and the list that
had it moves up. Where the ring does not fit the registers of a program, PyTorch finds the paths.

Source: Schwartz and Chow, The N-best algorithm, 1990.
"""

import triton
import triton.language as tl

from ....primitives.gpu.memory import load_length
from .paths import better_of, write_segment
from .scan import Sequence, load_emission
from .scores import load_end

UNROLLED = tl.constexpr(8)  # of the k best; more would take the compiler too long


@triton.jit
def take_best(lists, choices, LEFT: tl.constexpr, KEPT: tl.constexpr):
    """Return the best heads of lists along axis 0 and their choices, and the lists without these.

    Of the LEFT numbers of a list, KEPT are returned. A choice is unique among the heads of a
    column, and that of the next number of its list is 1 more.
    """
    best, choice = tl.reduce((lists[0], choices), 0, better_of)
    taken, rest = choices == choice[None, :], ()
    for i in tl.static_range(1, LEFT):
        rest += (tl.where(taken, lists[i], lists[i - 1]),)
    if KEPT == LEFT:
        rest += (lists[LEFT - 1],)  # which never becomes a head, as that takes LEFT rounds
    return best, choice, rest, choices + taken.to(tl.int32)


@triton.jit
def k_best(lists, choices, ways_ptr, mask, K: tl.constexpr):
    """Return the K best numbers of K ordered numbers in each list, and store their choices."""
    best = ()
    if K <= UNROLLED:
        for r in tl.static_range(K):
            found, way, lists, choices = take_best(lists, choices, K - r, K - r - 1)
            tl.store(ways_ptr + r, way, mask=mask)
            best += (found,)
    else:
        for _ in tl.static_range(K):
            best += (tl.max(lists[0], axis=0),)
        for r in range(0, K):
            found, way, lists, choices = take_best(lists, choices, K, K)
            tl.store(ways_ptr + r, way, mask=mask)
            replaced = ()
            for i in tl.static_range(K):
                replaced += (tl.where(r == i, found, best[i]),)
            best = replaced
    return best


@triton.jit
def semi_markov_nbest_scan_kernel(
    chains,  # Chains
    weights_ptr,  # [4 * SLOTS + 2 * BLOCK_C + 2, BLOCK_C + 1] fp64, see scan.py
    ways_ptr,  # [2, T, N, C, K] int32: the state before a segment, and the age of a closed one,
    # times K plus the rank of the path before
    scores_ptr,  # [K, N] fp64
    last_ptr,  # [K, N] int32: the last state times K plus the rank, -1 without a path
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
    K: tl.constexpr,
):
    """Compute the K best scores of a sequence, and the ways of which the paths are made."""
    n = tl.program_id(0).to(tl.int64)
    # Triton 3.6 loses a stride of 1 in a tuple of a tuple in loops, so the tuples are taken out.
    emissions, starts, ends, lengths_ptr, T, N, C, D = chains
    c, slot = tl.arange(0, BLOCK_C), tl.arange(0, SLOTS)[:, None]
    steps, invalid = load_length(lengths_ptr, n, T, 1, T)
    part = tl.full([], T, tl.int64) * N * C * K
    sequence = Sequence(emissions.ptr + n * emissions.n, emissions.t, emissions.c, steps, 0, 1, C)
    matrix_ptr = weights_ptr + (4 * SLOTS + 2) * (BLOCK_C + 1)
    states = tl.arange(0, BLOCK_C)[:, None]
    matrix = tl.load(matrix_ptr + states * (BLOCK_C + 1) + c[None, :])
    states += tl.zeros([BLOCK_C, BLOCK_C], tl.int32)
    durations_ptr = weights_ptr + 2 * SLOTS * (BLOCK_C + 1) + c[None, :]
    start = tl.where(states == 0, load_end(starts, n, c, C)[None, :], -float("inf"))
    ring, alpha = (), ()
    for _ in tl.static_range(K):
        ring += (tl.full([SLOTS, BLOCK_C], -float("inf"), tl.float64),)
        alpha += (tl.full([BLOCK_C], -float("inf"), tl.float64),)
    emission, following = load_emission(sequence, 0, BLOCK_C), load_emission(sequence, 1, BLOCK_C)
    for t in range(0, steps):
        after = load_emission(sequence, t + 2, BLOCK_C)
        durations = tl.load(durations_ptr + ((-t & (SLOTS - 1)) + slot) * (BLOCK_C + 1))
        to = ways_ptr + ((tl.full([], t, tl.int64) * N + n) * C + c) * K
        age, score = (t - slot) & (SLOTS - 1), emission.to(tl.float64)[None, :]
        is_inside = age < tl.minimum(D, t + 1)
        entered = ()
        for r in tl.static_range(K):
            later = alpha[r][:, None] + matrix
            entered += (tl.where(t == 0, start if r == 0 else -float("inf"), later),)
        newest = k_best(entered, states * K, to, c < C, K)
        opened, closed = (), ()
        for r in tl.static_range(K):
            opened += (tl.where(age == 0, newest[r][None, :], ring[r]) + score,)
            closed += (tl.where(is_inside, opened[r] + durations, -float("inf")),)
        ring, choices = opened, age * K + tl.zeros([SLOTS, BLOCK_C], tl.int32)
        alpha = k_best(closed, choices, to + part, c < C, K)
        emission, following = following, after
    scores, choices = (), c[:, None] * K
    for r in tl.static_range(K):
        scores += ((alpha[r] + load_end(ends, n, c, C))[:, None],)
    for r in range(0, K):
        best, last, scores, choices = take_best(scores, choices, K, K)
        best += invalid
        to = tl.full([], r, tl.int64) * N + n + tl.arange(0, 1)
        tl.store(scores_ptr + to, best)
        tl.store(last_ptr + to, tl.where(best > -float("inf"), last, -1))


@triton.jit
def semi_markov_nbest_trace_kernel(
    ways_ptr,  # [2, T, N, C, K] int32
    last_ptr,  # [K, N] int32
    states_ptr,  # [K, T, N] int64
    starts_ptr,  # [K, T, N] bool
    lengths_ptr,  # [N] or None
    T,
    N,
    C,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the states and starts of one path, from the last segment to the first."""
    path = tl.program_id(0).to(tl.int64)
    n = path % N
    steps, _ = load_length(lengths_ptr, n, T, 1, T)
    to = path // N * T * N + n
    last = tl.load(last_ptr + path).to(tl.int64)
    t = tl.where(last < 0, -1, steps.to(tl.int64) - 1)
    write_segment(states_ptr + to, starts_ptr + to, N, t + 1, T - 1 - t, -1, BLOCK)
    part = tl.full([], T, tl.int64) * N * C * K
    while t >= 0:
        state = last // K
        way = tl.load(ways_ptr + part + ((t * N + n) * C + state) * K + last % K).to(tl.int64)
        first = t - way // K
        write_segment(states_ptr + to, starts_ptr + to, N, first, t + 1 - first, state, BLOCK)
        last = tl.load(ways_ptr + ((first * N + n) * C + state) * K + way % K).to(tl.int64)
        t = first - 1
