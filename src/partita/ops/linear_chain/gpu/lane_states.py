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
    lane_maxima,
    lane_product,
    lane_scores,
    lane_select,
    load_lane,
)
from .scores import load_tokens, power_of_2, transition_range


@triton.jit
def store_lane(ptr, x, mask, C: tl.constexpr):
    """Store the states of the lanes of the mask at their addresses."""
    for c in tl.static_range(C):
        tl.store(ptr + c, x[c], mask=mask)


@triton.jit
def lane_sum(x, C: tl.constexpr):
    """Return the sum over states."""
    total = x[0]
    for c in tl.static_range(1, C):
        total += x[c]
    return total


@triton.jit
def linear_chain_lane_alpha_kernel(
    emissions_ptr,  # [T, N, C]
    table_ptr,  # [C, C] fp64
    end_ptr,  # [N, C] or None
    lengths_ptr,  # [N] or None
    range_ptr,  # [parts, 2] fp64
    maxima_ptr,  # [T, N] fp64
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
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Store alpha of a segment and its scales in each lane."""
    TABLE: tl.constexpr = C * C if C <= MAX_STATES_OF_TABLE else 0
    if transition_range(range_ptr, parts, BLOCK_PARTS)[0]:
        lane = lane_index(tl.full([], N, tl.int64) * segments, LANES)
        n, segment = lane // segments, lane % segments
        tokens, _ = load_tokens(lengths_ptr, n, T)
        low = tl.minimum(segment * STEPS, tokens - 1)
        num_steps = tl.minimum(STEPS, tokens - 1 - low)
        token = (
            emissions_ptr + n * stride_n,
            end_ptr,
            n * end_n,
            tokens,
            stride_t,
            stride_c,
            end_c,
        )
        known_ptr = boundaries_ptr + (n * (segments + 1) + segment) * C
        x = load_lane(known_ptr, C)
        store_lane(states_ptr + n * C, x, segment == 0, C)
        table, exponent = load_lane(table_ptr, TABLE), tl.zeros([LANES], tl.int32)
        scores = lane_scores(token, low + 1, 1, num_steps, C, AHEAD)
        maxima = lane_maxima(maxima_ptr + n, low + 1, 1, N, num_steps, AHEAD)
        for i in range(0, tl.max(num_steps, axis=0).to(tl.int32), AHEAD):
            after, left = low + 1 + i + AHEAD, num_steps - i - AHEAD
            next_scores = lane_scores(token, after, 1, left, C, AHEAD)
            next_maxima = lane_maxima(maxima_ptr + n, after, 1, N, left, AHEAD)
            for j in tl.static_range(AHEAD):
                t, active, removed = low + 1 + i + j, i + j < num_steps, lane_exponent(x, C)
                emissions = lane_emissions(token, scores, j * C, t, C)
                y = lane_product(x, table, table_ptr, C, False, False)
                scale = power_of_2(-removed)
                y = enter_lane_tokens(y, emissions, maxima[j], scale, C, EXACT, False)
                x, exponent = lane_select(active, y, x, C), tl.where(active, removed, exponent)
                store_lane(states_ptr + (t * N + n) * C, x, active, C)
                tl.store(scales_ptr + t * N + n, exponent.to(tl.float64), mask=active)
            scores, maxima = next_scores, next_maxima
        # The next segment starts from the known state, whose power of two may be another.
        given = load_lane(known_ptr + C, C)
        ratio = tl.log2(lane_sum(x, C) / lane_sum(given, C))
        row = (low + num_steps) * N + n
        store_lane(states_ptr + row * C, given, num_steps > 0, C)
        tl.store(scales_ptr + row, exponent.to(tl.float64) + ratio, mask=num_steps > 0)


@triton.jit
def linear_chain_lane_beta_kernel(
    emissions_ptr,  # [T, N, C]
    table_ptr,  # [C, C] fp64
    end_ptr,  # [N, C] or None
    lengths_ptr,  # [N] or None
    range_ptr,  # [parts, 2] fp64
    maxima_ptr,  # [T, N] fp64
    boundaries_ptr,  # [2, N, segments + 1, C] fp64
    states_ptr,  # [2, T, N, C] fp64
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
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Store beta of a segment in each lane."""
    TABLE: tl.constexpr = C * C if C <= MAX_STATES_OF_TABLE else 0
    if transition_range(range_ptr, parts, BLOCK_PARTS)[0]:
        lane = lane_index(tl.full([], N, tl.int64) * segments, LANES)
        n, segment = lane // segments, lane % segments
        tokens, _ = load_tokens(lengths_ptr, n, T)
        low = tl.minimum(segment * STEPS, tokens - 1)
        num_steps = tl.minimum(STEPS, tokens - 1 - low)
        high = low + num_steps
        token = (
            emissions_ptr + n * stride_n,
            end_ptr,
            n * end_n,
            tokens,
            stride_t,
            stride_c,
            end_c,
        )
        known_ptr = boundaries_ptr + ((N + n) * (segments + 1) + segment + 1) * C
        x = load_lane(known_ptr, C)
        beta_ptr = states_ptr + (tl.full([], T, tl.int64) * N + n) * C
        store_lane(beta_ptr + high * N * C, x, high == tokens - 1, C)
        table = load_lane(table_ptr, TABLE)
        scores = lane_scores(token, high, -1, num_steps, C, AHEAD)
        maxima = lane_maxima(maxima_ptr + n, high, -1, N, num_steps, AHEAD)
        for i in range(0, tl.max(num_steps, axis=0).to(tl.int32), AHEAD):
            after, left = high - i - AHEAD, num_steps - i - AHEAD
            next_scores = lane_scores(token, after, -1, left, C, AHEAD)
            next_maxima = lane_maxima(maxima_ptr + n, after, -1, N, left, AHEAD)
            for j in tl.static_range(AHEAD):
                t, active = high - i - j, i + j < num_steps
                emissions = lane_emissions(token, scores, j * C, t, C)
                scale = power_of_2(-lane_exponent(x, C))
                y = enter_lane_tokens(x, emissions, maxima[j], scale, C, EXACT, False)
                y = lane_product(y, table, table_ptr, C, False, True)
                x = lane_select(active, y, x, C)
                store_lane(beta_ptr + (t - 1) * N * C, x, active, C)
            scores, maxima = next_scores, next_maxima
