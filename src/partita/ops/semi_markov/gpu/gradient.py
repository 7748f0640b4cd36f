"""Posteriors of semi-Markov chains from the scores that the scans store.

The posteriors of starting and of ending a segment at a step are each the exponential of a sum of
two stored scores. The posterior of a state is the sum of what started up to a step minus what ended
before it; a sequence is cut into splits, whose sums are formed first. Those of segments and
transitions are exponentials too, and their sums over the steps are formed in parts and added in a
fixed order.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.memory import load_length
from .scores import exp_term, load_total, rounded


class Splits(NamedTuple):
    """The number of splits of a sequence, and the steps of each."""

    number: tl.tensor
    steps: tl.tensor


@triton.jit
def starts_and_changes(scans, n, t, steps, total, EXACT: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the posteriors of starting a segment at steps t, and those minus of ending before."""
    _, _, saved_ptr, T, N, C = scans
    c = tl.arange(0, BLOCK_C)[None, :]
    part = tl.full([], T, tl.int64) * N * C
    row_size = tl.full([], N, tl.int64) * C
    at, mask = t * row_size + n * C + c, (t < steps) & (c < C)
    follows = mask & (t > 0)
    opened = tl.load(saved_ptr + at, mask=mask, other=-float("inf"))
    opened += tl.load(saved_ptr + 2 * part + at, mask=mask, other=0.0)
    closed = tl.load(saved_ptr + part + at - row_size, mask=follows, other=-float("inf"))
    closed += tl.load(saved_ptr + 3 * part + at - row_size, mask=follows, other=0.0)
    starts = exp_term(opened - total, EXACT)
    return starts, starts - exp_term(closed - total, EXACT)


@triton.jit
def semi_markov_changes_kernel(
    scans,  # Scans
    splits,  # Splits
    changes_ptr,  # [N, splits, C] fp64
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Sum over the steps of a split by how much the posteriors of states change."""
    program = tl.program_id(0).to(tl.int64)
    lengths_ptr, logz_ptr, _, T, _, C = scans
    n, split = program // splits.number, program % splits.number
    steps, _ = load_length(lengths_ptr, n, T, 1, T)
    total = load_total(logz_ptr, n)
    change = tl.zeros([BLOCK_C], tl.float64)
    for tile in range(0, splits.steps, ROWS):
        t = split * splits.steps + tile + tl.arange(0, ROWS)[:, None]
        changes = starts_and_changes(scans, n, t, steps, total, EXACT, BLOCK_C)[1]
        change += tl.sum(changes, axis=0)
    c = tl.arange(0, BLOCK_C)
    tl.store(changes_ptr + program * C + c, change, mask=c < C)


@triton.jit
def semi_markov_states_kernel(
    grad_ptr,  # [N]
    grad_n,
    emissions,  # Emissions
    scans,  # Scans
    splits,  # Splits
    changes_ptr,  # [N, splits, C] fp64
    d_emissions_ptr,  # [T, N, C]
    d_start_ptr,  # [N, C]
    d_end_ptr,  # [N, C]
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the gradients in emissions and in ends for a split of the steps of a sequence."""
    program = tl.program_id(0).to(tl.int64)
    n, split = program // splits.number, program % splits.number
    lengths_ptr, logz_ptr, saved_ptr, T, N, C = scans
    c = tl.arange(0, BLOCK_C)[None, :]
    steps, _ = load_length(lengths_ptr, n, T, 1, T)
    total = load_total(logz_ptr, n)
    grad = tl.load(grad_ptr + n * grad_n).to(tl.float64)
    row_size = tl.full([], N, tl.int64) * C
    covering = tl.zeros([1, BLOCK_C], tl.float64)
    for first in range(0, split, ROWS):
        before = first + tl.arange(0, ROWS)[:, None]
        at = changes_ptr + (n * splits.number + before) * C + c
        changes = tl.load(at, mask=(before < split) & (c < C), other=0.0)
        covering += tl.sum(changes, axis=0)[None, :]
    for tile in range(0, splits.steps, ROWS):
        t = split * splits.steps + tile + tl.arange(0, ROWS)[:, None]
        starts, change = starts_and_changes(scans, n, t, steps, total, EXACT, BLOCK_C)
        posterior = tl.maximum(covering + tl.cumsum(change, axis=0), 0.0)
        posterior = tl.where(change == change, posterior, change)  # the maximum of NaN is 0
        covering += tl.sum(change, axis=0)[None, :]
        score_at = t * emissions.t + n * emissions.n + c.to(tl.int64) * emissions.c
        mask = (t < steps) & (c < C)
        score = tl.load(emissions.ptr + score_at, mask=mask, other=-float("inf"))
        # What rounding leaves of a state that is impossible would make 0 times -inf infinite.
        posterior = tl.where(score == -float("inf"), 0.0, posterior)
        # The sum is 1 but for the rounding errors of scores, which grow with log Z.
        normalizer = tl.sum(posterior, axis=1)[:, None]
        gradient = grad * posterior / tl.where(normalizer > 0.0, normalizer, 1.0)
        gradient = tl.where(t < steps, tl.where(total == total, gradient, total), 0.0)
        gradient = rounded(gradient, d_emissions_ptr.dtype.element_ty)
        to = d_emissions_ptr + t * row_size + n * C + c
        tl.store(to, gradient, mask=(t < T) & (c < C))
        d_start = rounded(grad * starts, d_start_ptr.dtype.element_ty)
        tl.store(d_start_ptr + n * C + c + 0 * t, d_start, mask=(t == 0) & (c < C))
    c = tl.arange(0, BLOCK_C)
    at = (steps - 1) * row_size + n * C + c
    part, mask = tl.full([], T, tl.int64) * N * C, (c < C) & (split == 0)
    last = tl.load(saved_ptr + part + at, mask=mask, other=0.0)
    last += tl.load(saved_ptr + 3 * part + at, mask=mask, other=0.0)
    d_end = rounded(grad * exp_term(last - total, EXACT), d_end_ptr.dtype.element_ty)
    tl.store(d_end_ptr + n * C + c, d_end, mask=mask)


@triton.jit
def semi_markov_segments_kernel(
    emissions,  # Emissions
    durations,  # Matrix
    scans,  # Scans
    splits,  # Splits
    result_ptr,  # [T, D, N, C] if SEGMENTS, otherwise [N, splits, D, C] fp64
    D,
    SEGMENTS: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write the posteriors of segments by last step, or their sums over the steps of a split."""
    program = tl.program_id(0).to(tl.int64)
    lengths_ptr, logz_ptr, saved_ptr, T, N, C = scans
    n, split = program // splits.number % N, program % splits.number
    c = program // splits.number // N * BLOCK_C + tl.arange(0, BLOCK_C)
    column = c[None, :]
    steps, invalid = load_length(lengths_ptr, n, T, 1, T)
    total = load_total(logz_ptr, n)
    part = tl.full([], T, tl.int64) * N * C
    row_size = tl.full([], N, tl.int64) * C
    for tile in range(0, splits.steps, ROWS):
        t = split * splits.steps + tile + tl.arange(0, ROWS)[:, None]
        at, ends = t * row_size + n * C + column, (t < steps) & (column < C)
        # The score of what follows, and of the steps of the segment, minus log Z.
        score = tl.load(saved_ptr + 3 * part + at, mask=ends, other=-float("inf")) - total
        for d in range(0, D):
            first, mask = t - d, ends & (t >= d)
            step_at = first * emissions.t + n * emissions.n + column * emissions.c
            score += tl.load(emissions.ptr + step_at, mask=mask, other=0.0).to(tl.float64)
            opened = tl.load(saved_ptr + at - d * row_size, mask=mask, other=-float("inf"))
            duration_at = durations.ptr + tl.full([], d, tl.int64) * durations.row
            duration_at += c * durations.column
            duration = tl.load(duration_at, mask=c < C, other=0.0).to(tl.float64)
            posterior = exp_term(score + (opened + duration[None, :]), EXACT)
            posterior = tl.where(total == total, posterior, total)
            posterior = tl.where(mask, posterior, 0.0) + invalid
            if SEGMENTS:
                to = ((t * D + d) * N + n) * C + column
                value = rounded(posterior, result_ptr.dtype.element_ty)
                tl.store(result_ptr + to, value, mask=(t < T) & (column < C))
            else:
                to = result_ptr + ((n * splits.number + split) * D + d) * C + c
                so_far = tl.load(to, mask=(c < C) & (tile > 0), other=0.0)
                tl.store(to, so_far + tl.sum(posterior, axis=0), mask=c < C)
        tl.debug_barrier()  # the next tile reads what other threads stored


@triton.jit
def semi_markov_pairs_kernel(
    transitions,  # Matrix
    scans,  # Scans
    splits,  # Splits
    pairs_ptr,  # [N, splits, C, C] fp64
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the posteriors of transitions over the steps of a split for a tile of pairs."""
    program = tl.program_id(0).to(tl.int64)
    lengths_ptr, logz_ptr, saved_ptr, T, N, C = scans
    n, split = program // splits.number % N, program % splits.number
    tile = program // splits.number // N
    tiles = tl.cdiv(C, BLOCK)
    k = (tile // tiles * BLOCK + tl.arange(0, BLOCK))[:, None]
    c = (tile % tiles * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = (k < C) & (c < C)
    at = k * transitions.row + c * transitions.column
    score = tl.load(transitions.ptr + at, mask=mask, other=-float("inf")).to(tl.float64)
    steps, invalid = load_length(lengths_ptr, n, T, 1, T)
    score -= load_total(logz_ptr, n)
    part = tl.full([], T, tl.int64) * N * C
    row_size = tl.full([], N, tl.int64) * C
    sums = tl.zeros([BLOCK, BLOCK], tl.float64)
    first = split * splits.steps
    for t in range(tl.maximum(first, 1), tl.minimum(first + splits.steps, steps)):
        row = saved_ptr + t * row_size + n * C
        alpha = tl.load(row + part - row_size + k, mask=k < C, other=-float("inf"))
        opened = tl.load(row + 2 * part + c, mask=c < C, other=-float("inf"))
        sums += exp_term(alpha + opened + score, EXACT)
    sums += invalid  # Without a step the sum of an invalid sequence is NaN too.
    tl.store(pairs_ptr + ((n * splits.number + split) * C + k) * C + c, sums, mask=mask)


@triton.jit
def semi_markov_sum_kernel(
    grad_ptr,  # [N]
    grad_n,
    parts_ptr,  # [N, splits, columns] fp64
    result_ptr,  # [groups, columns]
    N,
    splits,
    columns,
    groups,  # 1, or N for a sum of each sequence
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the parts of all sequences, or of each, times the upstream gradient of each sequence."""
    blocks = tl.cdiv(columns, BLOCK)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) % blocks * BLOCK + tl.arange(0, BLOCK)
    rows = tl.full([], N, tl.int64) * splits // groups
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, rows, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        inside = row < rows
        row = group * rows + row
        grad = tl.load(grad_ptr + row // splits * grad_n, mask=inside, other=0.0).to(tl.float64)
        at = parts_ptr + row[:, None] * columns + column[None, :]
        parts = tl.load(at, mask=inside[:, None] & (column < columns)[None, :], other=0.0)
        total += tl.sum(parts * grad[:, None], axis=0)
    to = result_ptr + group * columns + column
    tl.store(to, rounded(total, result_ptr.dtype.element_ty), mask=column < columns)
