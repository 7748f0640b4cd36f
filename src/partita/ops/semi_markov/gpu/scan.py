"""Alpha and beta of semi-Markov chains whose open segments fit into the registers of one program.

One program scans a sequence forwards, and another scans it backwards at the same time. Both take
the same steps: segments begin with the log-sum-exp of the transitions from what was closed at the
step before, all open segments get the emissions of the step, and closing sums over their ages.

The open segments lie in a ring, blocks [states, slots]. A segment stays in its slot from its first
step on, and the scores of durations are read by the age that the slot has now. So a step moves no
score from one register to another.

Source: Sarawagi and Cohen, Semi-Markov conditional random fields for information extraction, 2004.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .scores import exp_term, load_end, load_steps, log_of_sum, log_sum_exp, store_logz


@triton.jit
def load_ahead(sequence, first, AHEAD: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load the emissions of AHEAD steps of a scan, before the first of them is used."""
    ptr, steps, t, dt, C, stride_t, stride_c = sequence
    c = tl.arange(0, BLOCK_C)
    scores = ()
    for j in tl.static_range(AHEAD):
        row = tl.full([], t, tl.int64) + (first + j) * dt
        at = row * stride_t + c.to(tl.int64) * stride_c
        inside = (c < C) & (first + j < steps)
        scores = scores + (tl.load(ptr + at, mask=inside, other=-float("inf")),)
    return scores


@triton.jit
def load_matrix(ptr, C, BLOCK_C: tl.constexpr):
    """Return a table [C, C] as a block, -inf outside."""
    r, o = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    return tl.load(ptr + r.to(tl.int64) * C + o, mask=(r < C) & (o < C), other=-float("inf"))


@triton.jit
def take_step(
    k,  # the number of the step in the scan
    emission,  # [BLOCK_C] fp64
    first,  # [BLOCK_C] fp64, the scores of the first or of the last states
    ring,  # PARTS blocks [BLOCK_C, WIDTH] fp64
    closed,  # [BLOCK_C] fp64
    transitions,  # [BLOCK_C, BLOCK_C] fp64, from the states of the columns
    durations_ptr,  # [C, 2 * PARTS * WIDTH] fp64, see tables.py
    C,
    EXACT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the scores of segments that are opened, the ring, and the scores of those closed."""
    SLOTS: tl.constexpr = PARTS * WIDTH
    c, lane = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, WIDTH)[None, :]
    at = durations_ptr + c.to(tl.int64) * (2 * SLOTS) + (-k & (SLOTS - 1)) + lane
    durations = ()
    for p in tl.static_range(PARTS):  # the loads have the time of the transitions
        durations = durations + (tl.load(at + p * WIDTH, mask=c < C, other=-float("inf")),)
    opened = tl.where(k == 0, first, log_sum_exp(transitions + closed[None, :], EXACT))
    newest = k & (SLOTS - 1)
    next_ring, terms, maximum = (), (), closed
    for p in tl.static_range(PARTS):
        scores = tl.where(p * WIDTH + lane == newest, opened[:, None], ring[p]) + emission[:, None]
        next_ring = next_ring + (scores,)
        terms = terms + (scores + durations[p],)
        maximum = tl.maximum(maximum, terms[p]) if p > 0 else terms[p]
    shift = finite_shift(tl.max(maximum, axis=1))
    total = tl.zeros([BLOCK_C, WIDTH], tl.float64)
    for p in tl.static_range(PARTS):
        total += exp_term(terms[p] - shift[:, None], EXACT)
    return opened, next_ring, log_of_sum(tl.sum(total, axis=1), EXACT) + shift


@triton.jit
def semi_markov_scan_kernel(
    emissions_ptr,  # [T, N, C]
    start_ptr,  # [N, C]
    end_ptr,  # [N, C]
    lengths_ptr,  # [N] or None
    tables_ptr,  # see tables.py
    saved_ptr,  # [4, T, N, C] fp64 if SAVE: opened and closed of alpha, closed and opened of beta
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results
    T,
    N,
    C,
    stride_t,
    stride_n,
    stride_c,
    start_n,
    start_c,
    end_n,
    end_c,
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr,  # blocks of the ring
    WIDTH: tl.constexpr,  # slots of a block: a warp has all of a state, so no sum leaves it
):
    """Scan a sequence forwards and compute log Z, or with SAVE in every other program backwards."""
    is_alpha = tl.program_id(0) % 2 == 0 if SAVE else tl.program_id(0) >= 0
    n = (tl.program_id(0) // 2 if SAVE else tl.program_id(0)).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    steps, invalid = load_steps(lengths_ptr, n, T)
    start = load_end(start_ptr, n, c, C, start_n, start_c)
    end = load_end(end_ptr, n, c, C, end_n, end_c)
    t, dt = tl.where(is_alpha, 0, steps - 1), tl.where(is_alpha, 1, -1)
    pairs = tl.full([], C, tl.int64) * C
    transitions = load_matrix(tables_ptr + tl.where(is_alpha, 0, pairs), C, BLOCK_C)
    sequence = (emissions_ptr + n * stride_n, steps, t, dt, C, stride_t, stride_c)
    part = tl.full([], T, tl.int64) * N * C
    opened_ptr = saved_ptr + tl.where(is_alpha, 0, 3 * part) + n * C + c
    closed_ptr = saved_ptr + tl.where(is_alpha, part, 2 * part) + n * C + c
    first = tl.where(is_alpha, start, end)
    ring = ()
    for _ in tl.static_range(PARTS):
        ring = ring + (tl.full([BLOCK_C, WIDTH], -float("inf"), tl.float64),)
    closed = tl.zeros([BLOCK_C], tl.float64)
    scores = load_ahead(sequence, 0, AHEAD, BLOCK_C)
    for i in range(0, steps, AHEAD):
        next_scores = load_ahead(sequence, i + AHEAD, AHEAD, BLOCK_C)
        for j in tl.static_range(AHEAD):
            active, row = i + j < steps, tl.full([], t, tl.int64) + (i + j) * dt
            opened, ring, now_closed = take_step(
                *(i + j, scores[j].to(tl.float64), first, ring, closed, transitions),
                *(tables_ptr + 2 * pairs, C, EXACT, BLOCK_C, PARTS, WIDTH),
            )
            closed = tl.where(active, now_closed, closed)
            if SAVE:
                tl.store(opened_ptr + row * N * C, opened, mask=(c < C) & active)
                tl.store(closed_ptr + row * N * C, closed, mask=(c < C) & active)
        scores = next_scores
    if is_alpha:
        store_logz(closed + end, n, invalid, logz_ptr, rounded_ptr)
