"""The best path of dense linear chains: a scan in max-plus arithmetic, then the way back.

The scan stores the best state before each state. A path is then traced in segments: for each state
at the end of a segment, one program finds the state at its start, and with these maps every segment
is traced at the same time.

Source: Forney, The Viterbi algorithm, 1973.
"""

import triton
import triton.language as tl

from ....primitives.gpu.memory import load_matrix
from .arguments import Batch
from .best_steps import middle_token
from .scores import fold_ends, load_end, load_tokens


@triton.jit
def linear_chain_viterbi_kernel(
    batch,  # Batch
    transitions,  # StridedSteps
    previous_ptr,  # [T, N, C] int16: the best states before each state
    score_ptr,  # [N]
    last_ptr,  # [N] int32: the last state of the best path, or -1
    BLOCK_C: tl.constexpr,
):
    """Find the best score of a sequence, and the best state before each state."""
    batch = Batch(*batch)
    C, emissions = batch.C, batch.emissions
    n, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_C)
    row = tl.full([], batch.N, tl.int64) * C
    tokens, invalid = load_tokens(batch.lengths, n, batch.T)
    x, is_nan = tl.zeros([BLOCK_C], tl.float64), tl.zeros([BLOCK_C], tl.int32)
    transitions_ptr = transitions.ptr + n * transitions.n
    emissions_ptr = emissions.ptr + n * emissions.n
    start, end = load_end(batch.start, n, lane, C), load_end(batch.end, n, lane, C)
    score = tl.load(emissions_ptr + lane * emissions.c, mask=lane < C, other=-float("inf"))
    x = fold_ends(score, 0, tokens, start, end)
    is_nan = (x != x).to(tl.int32)
    at = tl.minimum(1, tokens - 1) * tl.full([], 1, tl.int64) * emissions.t + lane * emissions.c
    score = tl.load(emissions_ptr + at, mask=lane < C, other=-float("inf"))
    for t in range(1, tokens):
        step_ptr = transitions_ptr + tl.full([], t - 1, tl.int64) * transitions.t
        matrix = load_matrix(step_ptr, C, transitions.k, transitions.c, BLOCK_C, -float("inf"))
        matrix = matrix.to(tl.float64)
        is_nan = tl.maximum(is_nan, tl.max((matrix != matrix).to(tl.int32), axis=0))
        at = tl.full([], tl.minimum(t + 1, tokens - 1), tl.int64) * emissions.t
        at += lane * emissions.c
        ahead = tl.load(emissions_ptr + at, mask=lane < C, other=-float("inf"))
        terms = matrix + x[:, None]
        y = tl.max(terms, axis=0)
        # The lowest state that attains the best score; where that is -inf, any.
        is_best = (terms == y[None, :]) & (y[None, :] > -float("inf"))
        index = tl.min(tl.where(is_best, lane[:, None], 2147483647), axis=0)
        at = tl.full([], t, tl.int64) * row + n * C + lane
        tl.store(previous_ptr + at, tl.minimum(index, C - 1), mask=lane < C)
        x = y + fold_ends(score, t, tokens, start, end)
        is_nan = tl.maximum(is_nan, (x != x).to(tl.int32))
        score = ahead
    best, last = tl.max(x, axis=0), tl.argmax(x, axis=0)
    best = tl.where(tl.max(is_nan, axis=0) > 0, float("nan"), best) + invalid
    tl.store(score_ptr + n, best.to(score_ptr.dtype.element_ty))
    tl.store(last_ptr + n, tl.where(best > -float("inf"), last, -1))


@triton.jit
def segment_tokens(lengths_ptr, n, T, segment, is_after, STEPS: tl.constexpr, MEETS: tl.constexpr):
    """Return the first token whose map a segment takes, the direction, and the number of maps.

    Segments are counted from the last token on, or from the middle on in both directions.
    """
    tokens, _ = load_tokens(lengths_ptr, n, T)
    middle, low = middle_token(tokens, MEETS), segment * STEPS
    first = tl.where(is_after, middle + 1 + low, middle - low)
    left = tl.where(is_after, tokens - 1 - middle, middle) - low
    num_steps = tl.maximum(tl.minimum(STEPS, left), 0)
    return first, tl.where(is_after, 1, -1), num_steps, tokens, middle


@triton.jit
def linear_chain_path_maps_kernel(
    previous_ptr,  # [T, N, C]
    lengths_ptr,  # [N] or None
    ties_ptr,  # [N] int32: the sequences to take, or None for all
    maps_ptr,  # [N, segments, C] int32
    T,
    N,
    C,
    segments,
    STEPS: tl.constexpr,
    MEETS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Find the state at one end of a segment for each state at the other.

    With MEETS the second half of the segments follows the middle.
    """
    blocks = tl.cdiv(C, BLOCK_C)
    c = tl.program_id(0) % blocks * BLOCK_C + tl.arange(0, BLOCK_C)
    segment, n = tl.program_id(0) // blocks % segments, tl.program_id(0) // blocks // segments
    n = n.to(tl.int64)
    runs = True
    if ties_ptr is not None:
        runs = tl.load(ties_ptr + n) > 0
    if runs:
        half = segments // 2 if MEETS else segments
        t, dt, num_steps, _, _ = segment_tokens(
            lengths_ptr, n, T, segment % half, segment >= half, STEPS, MEETS
        )
        state = tl.minimum(c, C - 1)
        for i in range(0, num_steps):
            row = tl.full([], t + i * dt, tl.int64) * N + n
            state = tl.load(previous_ptr + row * C + state).to(tl.int32)
        tl.store(maps_ptr + (n * segments + segment) * C + c, state, mask=c < C)


@triton.jit
def linear_chain_trace_kernel(
    previous_ptr,  # [T, N, C]
    lengths_ptr,  # [N] or None
    ties_ptr,  # [N] int32: the sequences to take, or None for all
    maps_ptr,  # [N, segments, C] int32
    last_ptr,  # [N] int32: the state at the last token, or at the middle
    states_ptr,  # [T, N] int64
    T,
    N,
    C,
    segments,
    STEPS: tl.constexpr,
    MEETS: tl.constexpr,
):
    """Trace the best path through a segment, from a known state by way of the maps."""
    segment, n = tl.program_id(0) % segments, (tl.program_id(0) // segments).to(tl.int64)
    runs = True
    if ties_ptr is not None:
        runs = tl.load(ties_ptr + n) > 0
    if runs:
        half = segments // 2 if MEETS else segments
        t, dt, num_steps, tokens, middle = segment_tokens(
            lengths_ptr, n, T, segment % half, segment >= half, STEPS, MEETS
        )
        last = tl.load(last_ptr + n)
        has_path, state = last >= 0, tl.maximum(last, 0)
        if segment == 0:
            row = tl.full([], middle, tl.int64) * N + n
            tl.store(states_ptr + row, state.to(tl.int64), mask=has_path)
        for i in range(segment // half * half, segment):
            state = tl.load(maps_ptr + (n * segments + i) * C + state)
        # The tokens past the length, and those of a sequence without a path.
        past = segment * STEPS + tl.arange(0, STEPS)
        at = past.to(tl.int64) * N + n
        tl.store(states_ptr + at, -1, mask=(past < T) & ((past >= tokens) | (last < 0)))
        for i in range(0, num_steps):
            row = tl.full([], t + i * dt, tl.int64) * N + n
            state = tl.load(previous_ptr + row * C + state).to(tl.int32)
            state_ptr = states_ptr + row - tl.where(dt < 0, N, 0)
            tl.store(state_ptr, state.to(tl.int64), mask=has_path)
