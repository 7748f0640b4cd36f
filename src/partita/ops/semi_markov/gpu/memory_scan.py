"""Alpha and beta, or best scores, of semi-Markov chains with many states or durations.

The open segments of a state have a row for each slot of a ring in memory, and a program takes them
a block of states and a block of ages at a time. The steps are those of `scan.py`. Under Max they
are those of `paths.py`, which add the same numbers in the same order as the reference.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from ....primitives.gpu.memory import load_length
from .paths import better, store_best
from .scores import exp_term, load_end, log_of_sum, store_logz


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
def no_terms(BLOCK: tl.constexpr, IS_MAX: tl.constexpr):
    """Return the greatest of no terms, and their sum relative to it or, under Max, the choice."""
    return (
        tl.full([BLOCK], -float("inf"), tl.float64),
        tl.zeros([BLOCK], tl.int32 if IS_MAX else tl.float64),
    )


@triton.jit
def add_block(maximum, rest, terms, index, EXACT: tl.constexpr, IS_MAX: tl.constexpr):
    """Add the rows of a block, whose columns have an index, to what `no_terms` starts."""
    if IS_MAX:
        return better(maximum, rest, terms, index, 1)
    else:
        higher = tl.maximum(maximum, tl.max(terms, axis=1))
        shift = finite_shift(higher)
        total = rest * exp_term(maximum - shift, EXACT)
        return higher, total + tl.sum(exp_term(terms - shift[:, None], EXACT), axis=1)


@triton.jit
def semi_markov_memory_scan_kernel(
    chains,  # Chains
    tables_ptr,  # see `semi_markov_tables_kernel`
    slots,
    ring_ptr,  # [programs, D + 2, C] fp64: the open segments, and what two steps closed
    saved_ptr,  # [4, T, N, C] fp64 if SAVE, see Scans; under Max choices, see paths.py
    logz_ptr,  # [N] fp64, or under Max the last state, int32, -1 without a path
    rounded_ptr,  # [N] in the dtype of results, log Z or the best score
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    IS_MAX: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_ALL: tl.constexpr,  # all states
):
    """Scan a sequence forwards and compute log Z, or with SAVE in every other program backwards.

    Under Max, compute the best score and the choices of which it is made.
    """
    BOTH: tl.constexpr = SAVE and not IS_MAX
    is_alpha = tl.program_id(0) % 2 == 0 if BOTH else tl.program_id(0) >= 0
    n = (tl.program_id(0) // 2 if BOTH else tl.program_id(0)).to(tl.int64)
    # Triton 3.6 loses a stride of 1 in a tuple of a tuple in loops, so the tuples are taken out.
    emissions, starts, ends, lengths_ptr, T, N, C, D = chains
    steps, invalid = load_length(lengths_ptr, n, T, 1, T)
    pairs, part = tl.full([], C, tl.int64) * C, tl.full([], T, tl.int64) * N * C
    ring_ptr += tl.program_id(0).to(tl.int64) * (D + 2) * C
    recent_ptr = ring_ptr + tl.full([], D, tl.int64) * C
    opened_ptr = saved_ptr + tl.where(is_alpha, 0, 3 * part) + n * C
    closed_ptr = saved_ptr + tl.where(is_alpha, part, 2 * part) + n * C
    for k in range(0, steps):
        row = tl.where(is_alpha, k, steps - 1 - k).to(tl.int64)
        for block in range(0, C, BLOCK_C):
            c = block + tl.arange(0, BLOCK_C)
            start, end = load_end(starts, n, c, C), load_end(ends, n, c, C)
            opened, state = tl.where(is_alpha, start, end), no_terms(BLOCK_C, IS_MAX)[1]
            if k > 0:  # the sum over the transitions to the states c
                table_ptr = tables_ptr + tl.where(is_alpha, 0, pairs)
                before_ptr = recent_ptr + (k - 1) % 2 * C
                opened, state = no_terms(BLOCK_C, IS_MAX)
                for first in range(0, C, BLOCK_K):
                    other = first + tl.arange(0, BLOCK_K)[None, :]
                    at = c[:, None].to(tl.int64) * C + other
                    mask = (c[:, None] < C) & (other < C)
                    terms = tl.load(table_ptr + at, mask=mask, other=-float("inf"))
                    terms += tl.load(before_ptr + other, mask=other < C, other=0.0)
                    opened, state = add_block(opened, state, terms, other, EXACT, IS_MAX)
                if not IS_MAX:
                    opened = log_of_sum(state, EXACT) + opened  # -inf without a term
            step = n * emissions.n + row * emissions.t + c.to(tl.int64) * emissions.c
            emission = tl.load(emissions.ptr + step, mask=c < C, other=-float("inf")).to(tl.float64)
            # The emissions are added to the open segments, whose sum is what closes.
            durations_ptr = tables_ptr + 2 * pairs
            closed, size = no_terms(BLOCK_C, IS_MAX)
            for first in range(0, tl.minimum(k + 1, D), BLOCK_K):
                age = first + tl.arange(0, BLOCK_K)[None, :]
                mask = (c[:, None] < C) & (age < D) & (age <= k)
                slot = (k - age + D) % D  # ages above k have no slot
                at = ring_ptr + slot.to(tl.int64) * C + c[:, None]
                ring = tl.load(at, mask=mask & (age > 0), other=-float("inf"))
                ring = tl.where(age == 0, opened[:, None], ring) + emission[:, None]
                tl.store(at, ring, mask=mask)
                at = durations_ptr + c[:, None].to(tl.int64) * (2 * slots) + slots - age
                durations = tl.load(at, mask=mask, other=-float("inf"))
                closed, size = add_block(closed, size, ring + durations, age, EXACT, IS_MAX)
            if not IS_MAX:
                closed = log_of_sum(size, EXACT) + closed
            tl.store(recent_ptr + k % 2 * C + c, closed, mask=c < C)
            if SAVE:
                at = row * N * C + c
                tl.store(opened_ptr + at, state if IS_MAX else opened, mask=c < C)
                tl.store(closed_ptr + at, size if IS_MAX else closed, mask=c < C)
        tl.debug_barrier()  # the next step reads what other threads stored
    if is_alpha:
        c = tl.arange(0, BLOCK_ALL)
        closed = tl.load(recent_ptr + (steps - 1) % 2 * C + c, mask=c < C, other=-float("inf"))
        scores = closed + load_end(ends, n, c, C)
        if IS_MAX:
            store_best(scores, c, n, invalid, rounded_ptr, logz_ptr)
        else:
            store_logz(scores, n, invalid, logz_ptr, rounded_ptr)
