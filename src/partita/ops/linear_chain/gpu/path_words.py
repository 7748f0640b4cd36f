"""Paths of at most 16 states, traced parallel in time.

The states at a token, given each state at the next one, are a map of states to states. It has 4
bits for each state, so a word of 64 bits has it whole. A map composed of maps is such a word too:
first the maps of all segments are composed at the same time, then those of groups of segments. With
the state after the last token, which decides nothing since the map of the last token is constant,
one lane traces the groups, others the segments inside of each group, and others their tokens.
"""

import triton
import triton.language as tl

from .lanes import lane_index
from .scores import load_tokens

ALL_STATES = tl.constexpr(0x1111111111111111)  # times a state is the map of all states to it


@triton.jit
def mapped(word, state):
    """Return what a map has for a state."""
    return (word >> (4 * state)) & 15


@triton.jit
def linear_chain_word_maps_kernel(
    words_ptr,  # [columns, length] int64
    maps_ptr,  # [columns, groups] int64
    columns,
    length,
    groups,
    C: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Compose the maps of one group in each lane."""
    lane = lane_index(tl.program_id(0), tl.full([], columns, tl.int64) * groups, LANES)
    column, group = lane // groups, lane % groups
    low = group * SIZE
    states = ()
    for c in tl.static_range(C):
        states += (tl.full([LANES], c, tl.int64),)
    for i in range(1, SIZE + 1):
        at = low + SIZE - i
        active = at < length
        word = tl.load(words_ptr + column * length + at, mask=active, other=0)
        before = ()
        for c in tl.static_range(C):
            before += (tl.where(active, mapped(word, states[c]), states[c]),)
        states = before
    packed = tl.zeros([LANES], tl.int64)
    for c in tl.static_range(C):
        packed = packed | (states[c] << (4 * c))
    tl.store(maps_ptr + lane, packed)


@triton.jit
def linear_chain_trace_words_kernel(
    words_ptr,  # [columns, length] int64
    known_ptr,  # [columns, groups] int32, the states after groups, or None for one group
    states_ptr,  # [columns, length] int32, or with FINAL [samples, length, N] int64
    lengths_ptr,  # [N] or None
    score_ptr,  # [N], or None without FINAL
    columns,
    N,
    length,
    groups,
    SIZE: tl.constexpr,
    FINAL: tl.constexpr,
    LANES: tl.constexpr,
):
    """Trace one group in each lane, and store the state after each member, or with FINAL its own.

    With FINAL a state is -1 past the length, and where the score is -inf or NaN.
    """
    lane = lane_index(tl.program_id(0), tl.full([], columns, tl.int64) * groups, LANES)
    column, low = lane // groups, lane % groups * SIZE
    state = tl.zeros([LANES], tl.int64)
    if known_ptr is not None:
        state = tl.load(known_ptr + lane).to(tl.int64)
    tokens, has_path = low + SIZE, low >= 0
    if FINAL:
        tokens, _ = load_tokens(lengths_ptr, column % N, length)
        has_path = tl.load(score_ptr + column % N) > -float("inf")
    for i in range(1, SIZE + 1):
        at = low + SIZE - i
        active = at < length
        word = tl.load(words_ptr + column * length + at, mask=active, other=0)
        before = tl.where(active, mapped(word, state), state)
        if FINAL:
            row = column // N * length + at
            value = tl.where((at < tokens) & has_path, before, -1)
            tl.store(states_ptr + row * N + column % N, value, mask=active)
        else:
            tl.store(states_ptr + column * length + at, state.to(tl.int32), mask=active)
        state = before
