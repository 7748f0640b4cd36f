"""The k best paths of semi-Markov chains.

The scan is that of the best path in `paths.py`, with the k best paths where it has one, so the ring
has a row for each slot and rank. A step finds the best of its ways k times, and leaves out what it
has found. Where the ring does not fit the registers of a program, PyTorch finds the paths.

Source: Schwartz and Chow, The N-best algorithm, 1990.
"""

import triton
import triton.language as tl

from ....primitives.gpu.memory import load_length
from .paths import better_of, write_segment
from .scan import Sequence, load_emission
from .scores import load_end


@triton.jit
def semi_markov_nbest_scan_kernel(
    chains,  # Chains
    weights_ptr,  # [4 * SLOTS + 2 * BLOCK_C + 2, BLOCK_C + 1] fp64, see scan.py
    ways_ptr,  # [2, T, N, C, k] int32: the state before a segment, and the age of a closed one,
    # times RANKS plus the rank of the path before
    scores_ptr,  # [k, N] fp64
    last_ptr,  # [k, N] int32: the last state times RANKS plus the rank, -1 without a path
    k,
    BLOCK_C: tl.constexpr,
    SLOTS: tl.constexpr,
    RANKS: tl.constexpr,  # a power of 2, at least k
):
    """Compute the k best scores of a sequence, and the ways of which the paths are made."""
    n = tl.program_id(0).to(tl.int64)
    # Triton 3.6 loses a stride of 1 in a tuple of a tuple in loops, so the tuples are taken out.
    emissions, starts, ends, lengths_ptr, T, N, C, D = chains
    c, ranks = tl.arange(0, BLOCK_C), tl.arange(0, RANKS)
    row = tl.arange(0, SLOTS * RANKS)[:, None]
    slot, rank = row // RANKS, row % RANKS
    before = tl.arange(0, BLOCK_C * RANKS)
    steps, invalid = load_length(lengths_ptr, n, T, 1, T)
    part = tl.full([], T, tl.int64) * N * C * k
    sequence = Sequence(emissions.ptr + n * emissions.n, emissions.t, emissions.c, steps, 0, 1, C)
    matrix_ptr = weights_ptr + (4 * SLOTS + 2) * (BLOCK_C + 1)
    matrix = tl.load(matrix_ptr + (before // RANKS)[:, None] * (BLOCK_C + 1) + c[None, :])
    states = before[:, None] + tl.zeros([BLOCK_C * RANKS, BLOCK_C], tl.int32)
    durations_ptr = weights_ptr + 2 * SLOTS * (BLOCK_C + 1) + c[None, :]
    start = tl.where(before[:, None] == 0, load_end(starts, n, c, C)[None, :], -float("inf"))
    ring = tl.full([SLOTS * RANKS, BLOCK_C], -float("inf"), tl.float64)
    alpha = tl.full([BLOCK_C, RANKS], -float("inf"), tl.float64)
    emission, following = load_emission(sequence, 0, BLOCK_C), load_emission(sequence, 1, BLOCK_C)
    for t in range(0, steps):
        after = load_emission(sequence, t + 2, BLOCK_C)
        durations = tl.load(durations_ptr + ((-t & (SLOTS - 1)) + slot) * (BLOCK_C + 1))
        to = ways_ptr + ((tl.full([], t, tl.int64) * N + n) * C + c) * k
        age = (t - slot) & (SLOTS - 1)
        entered = tl.reshape(alpha, [BLOCK_C * RANKS])[:, None] + matrix
        entered = tl.where(t == 0, start, entered)
        ring = tl.where(age == 0, -float("inf"), ring)
        for r in range(0, k):
            best, way = tl.reduce((entered, states), 0, better_of)
            tl.store(to + r, way, mask=c < C)
            ring = tl.where((age == 0) & (rank == r), best[None, :], ring)
            entered = tl.where(states == way[None, :], -float("inf"), entered)
        ring += emission.to(tl.float64)[None, :]
        closed = tl.where(age < tl.minimum(D, t + 1), ring + durations, -float("inf"))
        sizes = age * RANKS + rank + tl.zeros([SLOTS * RANKS, BLOCK_C], tl.int32)
        for r in range(0, k):
            best, way = tl.reduce((closed, sizes), 0, better_of)
            tl.store(to + part + r, way, mask=c < C)
            alpha = tl.where((ranks == r)[None, :], best[:, None], alpha)
            closed = tl.where(sizes == way[None, :], -float("inf"), closed)
        emission, following = following, after
    scores = tl.reshape(alpha + load_end(ends, n, c, C)[:, None], [BLOCK_C * RANKS])
    for r in range(0, k):
        best, last = tl.reduce((scores, before), 0, better_of)
        scores = tl.where(before == last, -float("inf"), scores)
        best += invalid
        tl.store(scores_ptr + tl.full([], r, tl.int64) * N + n, best)
        last = tl.where(best > -float("inf"), last, -1)
        tl.store(last_ptr + tl.full([], r, tl.int64) * N + n, last)


@triton.jit
def semi_markov_nbest_trace_kernel(
    ways_ptr,  # [2, T, N, C, k] int32
    last_ptr,  # [k, N] int32
    states_ptr,  # [k, T, N] int64
    starts_ptr,  # [k, T, N] bool
    lengths_ptr,  # [N] or None
    T,
    N,
    C,
    k,
    RANKS: tl.constexpr,
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
    part = tl.full([], T, tl.int64) * N * C * k
    while t >= 0:
        state = last // RANKS
        way = tl.load(ways_ptr + part + ((t * N + n) * C + state) * k + last % RANKS).to(tl.int64)
        first = t - way // RANKS
        write_segment(states_ptr + to, starts_ptr + to, N, first, t + 1 - first, state, BLOCK)
        last = tl.load(ways_ptr + ((first * N + n) * C + state) * k + way % RANKS).to(tl.int64)
        t = first - 1
