"""The states of segments of few states in linear arithmetic, with one lane for each segment.

The states at the boundaries of segments are known, see `segments.py`. A lane takes the state before
its segment through the steps, or for beta the state after it.
"""

import triton
import triton.language as tl

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
def lane_step(x, emissions, table, table_ptr, C: tl.constexpr, EXACT: tl.constexpr):
    """Return the states after a step without and with the emissions, and the exponent of x.

    The power of two of that exponent is removed from the states with emissions.
    """
    removed, y = lane_exponent(x, C), lane_product(x, table, table_ptr, C, False)
    maximum, scale = lane_maximum(emissions, C), power_of_2(-removed)
    return y, enter_lane_tokens(y, emissions, maximum, scale, C, EXACT, False), removed


@triton.jit
def linear_chain_lane_states_kernel(
    emissions_ptr,  # [T, N, C]
    table_ptr,  # [2, C, C] fp64, exp of the transitions, and the same transposed
    end_ptr,  # [N, C] or None
    lengths_ptr,  # [N] or None
    range_ptr,  # [parts, 2] fp64
    boundaries_ptr,  # [2, N, segments + 1, C] fp64
    states_ptr,  # [2, T, N, C] fp64
    scales_ptr,  # [T, N] fp64
    T,
    N,
    parts,
    segments,
    stride_t,
    stride_n,
    stride_c,
    end_n,
    end_c,
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
    TABLE: tl.constexpr = C * C if C <= MAX_STATES_OF_TABLE else 0
    if transition_range(range_ptr, parts, BLOCK_PARTS)[0]:
        half, lanes = tl.num_programs(0) // 2, tl.full([], N, tl.int64) * segments
        lane, is_alpha = lane_index(tl.program_id(0) % half, lanes, LANES), tl.program_id(0) < half
        n, segment = lane // segments, lane % segments
        tokens, _ = load_tokens(lengths_ptr, n, T)
        low = tl.minimum(segment * STEPS, tokens - 1)
        num_steps = tl.minimum(STEPS, tokens - 1 - low)
        t, dt = tl.where(is_alpha, low, low + num_steps), tl.where(is_alpha, 1, -1).to(tl.int64)
        score_ptr = emissions_ptr + n * stride_n
        inputs = (score_ptr, end_ptr, n * end_n, tokens, stride_t, stride_c, end_c)
        matrix_ptr = table_ptr + tl.where(is_alpha, 0, C * C)
        table = load_lane(matrix_ptr, TABLE)
        # Beta follows alpha in the states, and so it does in the boundaries.
        known_ptr = boundaries_ptr + (n * (segments + 1) + segment) * C
        known_ptr += tl.where(is_alpha, 0, (lanes + N + 1) * C)
        alpha_ptr = states_ptr + n * C + tl.where(is_alpha, 0, tl.full([], T, tl.int64) * N * C)
        y, exponent = load_lane(known_ptr, C), tl.zeros([LANES], tl.int32)
        at, is_end = t * N, tl.where(is_alpha, segment == 0, t == tokens - 1)
        store_lane(alpha_ptr + at * C, y, is_end, C, STORED)
        first = lane_emissions(inputs, lane_tokens(inputs, t, dt, num_steps, C, 1, WIDTH), 0, t, C)
        x = enter_lane_tokens(y, first, lane_maximum(first, C), 1.0, C, EXACT, False)
        x = lane_select(is_alpha, y, x, C)
        scores = lane_tokens(inputs, t + dt, dt, num_steps, C, AHEAD, WIDTH)
        for i in range(1, tl.max(num_steps, axis=0).to(tl.int32) + 1, AHEAD):
            at, left = t + (i + AHEAD) * dt, num_steps - (i + AHEAD - 1)
            next_scores = lane_tokens(inputs, at, dt, left, C, AHEAD, WIDTH)
            for j in tl.static_range(AHEAD):
                at, active = t + (i + j) * dt, i + j <= num_steps
                emissions = lane_emissions(inputs, scores, j * C, at, C)
                y, after, removed = lane_step(x, emissions, table, matrix_ptr, C, EXACT)
                stored = lane_select(is_alpha, after, y, C)
                store_lane(alpha_ptr + at * N * C, stored, active, C, STORED)
                x = lane_select(active, after, x, C)
                exponent = tl.where(active, removed, exponent)
                tl.store(scales_ptr + n + at * N, exponent.to(tl.float64), mask=active & is_alpha)
            scores = next_scores
        if is_alpha:
            at, known = (low + num_steps) * N, load_lane(known_ptr + C, C)
            # The next segment starts from the known state, whose power of two may be another.
            store_lane(alpha_ptr + at * C, known, num_steps > 0, C, STORED)
            power = exponent.to(tl.float64) + tl.log2(lane_sum(x, C) / lane_sum(known, C))
            tl.store(scales_ptr + n + at, power, mask=num_steps > 0)
