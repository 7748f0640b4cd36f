"""The states of segments of few states in linear arithmetic, with one lane for each segment.

The states at the boundaries of segments are known, see `segments.py`. A lane takes the state before
its segment through the steps, or for beta the state after it.
"""

import triton
import triton.language as tl

from .arguments import Batch
from .lanes import (
    MAX_STATES_OF_TABLE,
    enter_lane_tokens,
    lane_emissions,
    lane_exponent,
    lane_index,
    lane_maximum,
    lane_product,
    lane_select,
    lane_tokens,
    load_lane,
)
from .scores import load_tokens, power_of_2, transition_range


@triton.jit
def store_lane(ptr, x, mask, C: tl.constexpr, WIDTH: tl.constexpr):
    """Store the states of the lanes of the mask at their addresses, WIDTH states at once.

    C is a multiple of the width. The states of a token start on 16 bytes if it is even.
    """
    lane = tl.max_contiguous(ptr[:, None] + tl.arange(0, WIDTH)[None, :], [1, WIDTH])
    for c in tl.static_range(0, C, WIDTH):
        if WIDTH == 1:
            tl.store(ptr + c, x[c], mask=mask)
        else:
            states = tl.join(x[c], x[c + 1])
            if WIDTH == 4:
                pairs = tl.join(tl.join(x[c], x[c + 2]), tl.join(x[c + 1], x[c + 3]))
                states = tl.reshape(pairs, [ptr.shape[0], 4])
            tl.store(tl.multiple_of(lane + c, [1, 16]), states, mask=mask[:, None])


@triton.jit
def lane_sum(x, C: tl.constexpr):
    """Return the sum over states."""
    total = x[0]
    for c in tl.static_range(1, C):
        total += x[c]
    return total


@triton.jit
def linear_chain_lane_states_kernel(
    batch,  # Batch, without start
    table_ptr,  # [2, C, C] fp64, exp of the transitions, and the same transposed
    boundaries_ptr,  # [2, N, segments + 1, C] fp64
    saved,  # Saved, without maxima: states and scales are written
    segments,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
    STORED: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Store alpha of a segment in each lane, or in the second half of the programs beta.

    A state x includes the emission of its token, and y does not, see `scan.py`.
    """
    batch = Batch(*batch)
    TABLE: tl.constexpr = C * C if C <= MAX_STATES_OF_TABLE else 0
    T, N, end = batch.T, batch.N, batch.end
    if transition_range(saved.span, BLOCK_PARTS)[0]:
        half, lanes = tl.num_programs(0) // 2, tl.full([], N, tl.int64) * segments
        lane, is_alpha = lane_index(tl.program_id(0) % half, lanes, LANES), tl.program_id(0) < half
        n, segment = lane // segments, lane % segments
        tokens, _ = load_tokens(batch.lengths, n, T)
        low = tl.minimum(segment * STEPS, tokens - 1)
        num_steps = tl.minimum(STEPS, tokens - 1 - low)
        t, dt = tl.where(is_alpha, low, low + num_steps), tl.where(is_alpha, 1, -1).to(tl.int64)
        inputs = (batch.emissions.ptr + n * batch.emissions.n, batch.emissions)
        end_at = n * end.n
        matrix_ptr = table_ptr + tl.where(is_alpha, 0, C * C)
        table = load_lane(matrix_ptr, TABLE)
        # Beta follows alpha in the states, and so it does in the boundaries.
        known_ptr = boundaries_ptr + (n * (segments + 1) + segment) * C
        known_ptr += tl.where(is_alpha, 0, (lanes + N + 1) * C)
        alpha_ptr = saved.states + n * C + tl.where(is_alpha, 0, tl.full([], T, tl.int64) * N * C)
        given, exponent = load_lane(known_ptr, C), tl.zeros([LANES], tl.int32)
        at, is_end = t * N, tl.where(is_alpha, segment == 0, t == tokens - 1)
        store_lane(alpha_ptr + at * C, given, is_end, C, STORED)
        loaded = lane_tokens(*inputs, t, dt, num_steps, C, 1, WIDTH)
        first = lane_emissions(end, end_at, tokens, loaded, 0, t, C)
        x = enter_lane_tokens(given, first, lane_maximum(first, C), 1.0, C, EXACT, False)
        x = lane_select(is_alpha, given, x, C)
        scores = lane_tokens(*inputs, t + dt, dt, num_steps, C, AHEAD, WIDTH)
        for i in range(1, tl.max(num_steps, axis=0).to(tl.int32) + 1, AHEAD):
            at, left = t + (i + AHEAD) * dt, num_steps - (i + AHEAD - 1)
            next_scores = lane_tokens(*inputs, at, dt, left, C, AHEAD, WIDTH)
            for j in tl.static_range(AHEAD):
                at, active = t + (i + j) * dt, i + j <= num_steps
                emissions = lane_emissions(end, end_at, tokens, scores, j * C, at, C)
                removed, y = lane_exponent(x, C), lane_product(x, table, matrix_ptr, C, False)
                maximum, scale = lane_maximum(emissions, C), power_of_2(-removed)
                after = enter_lane_tokens(y, emissions, maximum, scale, C, EXACT, False)
                stored = lane_select(is_alpha, after, y, C)
                store_lane(alpha_ptr + at * N * C, stored, active, C, STORED)
                x = lane_select(active, after, x, C)
                exponent = tl.where(active, removed, exponent)
                tl.store(saved.scales + n + at * N, exponent.to(tl.float64), mask=active & is_alpha)
            scores = next_scores
        if is_alpha:
            at, known = (low + num_steps) * N, load_lane(known_ptr + C, C)
            # The next segment starts from the known state, whose power of two may be another.
            store_lane(alpha_ptr + at * C, known, num_steps > 0, C, STORED)
            power = exponent.to(tl.float64) + tl.log2(lane_sum(x, C) / lane_sum(known, C))
            tl.store(saved.scales + n + at, power, mask=num_steps > 0)
