"""Samples of paths of semi-Markov chains, drawn from their end with the scores of the scan."""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .scores import load_steps
from .viterbi import write_segment


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
    steps, _ = load_steps(lengths_ptr, n, T)
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
