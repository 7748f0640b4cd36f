"""The way along best paths and samples of dense linear chains, parallel in time.

The state at a token follows from that at the next one by a map of states to states. Where a path is
known at a middle token first, the states after it follow from those before. Maps of tokens are
composed to maps of groups at the same time, and those to maps of greater groups, until few are
left. Then all groups of a level are traced at the same time: first the greatest, last the tokens.

Up to 16 states a map has 4 bits for each state, so a word of 64 bits has it whole, and no load
waits for the one before. There are such maps for all tokens: the last ones lead from any state to
the last state of the path. A map of more states is an array, and the last state is known.

Source: Särkkä and García-Fernández, Temporal parallelization of Bayesian smoothers, 2021; Forney,
The Viterbi algorithm, 1973.
"""

import triton
import triton.language as tl

from .best_steps import middle_token
from .lanes import lane_index
from .scores import load_tokens


@triton.jit
def follow(maps_ptr, at, state, moves, C, WORDS: tl.constexpr):
    """Return the states that the maps number `at` lead to, or where nothing moves the same ones."""
    if WORDS:
        word = tl.load(maps_ptr + at, mask=moves, other=0)
        after = (word >> (4 * state)) & 15
    else:
        after = tl.load(maps_ptr + (at * C + state), mask=moves, other=0).to(tl.int64)
    return tl.where(moves, after, state)


@triton.jit
def member(
    lengths_ptr,  # [N] or None
    lane,  # of [directions, columns, groups]
    i,
    columns,
    N,
    length,
    groups,
    SIZE: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    MEETS: tl.constexpr,
):
    """Return the place of member i on the way through a group, the number of its map, and masks.

    Returns:
        The place, the number, whether there is a map in the direction of the lane, and whether the
        direction has the member's state. With MEETS the second direction follows the middle token.
    """
    line, group = lane // groups, lane % groups
    forwards = line >= columns
    at = group * SIZE + tl.where(forwards, i, SIZE - 1 - i)
    number, moves, has_state = line * length + at, at < length, at < length
    if OF_TOKENS and not WORDS:
        n = line % N
        tokens, _ = load_tokens(lengths_ptr, n, length)
        middle = middle_token(tokens, MEETS)
        number = at * N + n
        moves = tl.where(forwards, (at > middle) & (at < tokens), at < middle)
        if MEETS:
            has_state = has_state & ((at > middle) == forwards)
    return at, number, moves, has_state


@triton.jit
def linear_chain_group_maps_kernel(
    maps_ptr,  # [T, N, C] int16 with OF_TOKENS, else [lines, length, C]; words have no C
    lengths_ptr,  # [N] or None
    group_maps_ptr,  # [lines, groups, C]
    columns,
    N,
    length,
    groups,
    C,
    SIZE: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    MEETS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compose the maps of the members of LANES groups. A line is a path in one direction."""
    lines = tl.full([], columns, tl.int64) * (2 if MEETS else 1)
    lane = lane_index(tl.program_id(0), lines * groups, LANES)[:, None]
    c = tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    state = tl.minimum(c, C - 1) + lane * 0
    for i in range(0, SIZE):
        _, number, moves, _ = member(
            lengths_ptr, lane, i, columns, N, length, groups, SIZE, OF_TOKENS, WORDS, MEETS
        )
        state = follow(maps_ptr, number, state, moves, C, WORDS)
    if WORDS:
        word = tl.sum(tl.where(c < C, state << (4 * c), 0), axis=1)
        tl.store(group_maps_ptr + lane, word[:, None])
    else:
        at = group_maps_ptr + (lane * C + c)
        tl.store(at, state.to(group_maps_ptr.dtype.element_ty), mask=c < C)


@triton.jit
def linear_chain_trace_kernel(
    maps_ptr,  # as in `linear_chain_group_maps_kernel`
    group_maps_ptr,  # [lines, groups, C], if the states after groups are not known; or None
    known_ptr,  # [lines, groups] int32, the states after groups, or None
    last_ptr,  # [N] int32, the last state, or that at the middle; None for words
    lengths_ptr,  # [N] or None
    score_ptr,  # [N]; a sequence whose score is -inf or NaN has no path
    ties_ptr,  # [N] int32: the sequences to trace, or None for all
    states_ptr,  # [columns / N, T, N] int64 with OF_TOKENS, else [lines, length] int32
    columns,
    N,
    length,
    groups,
    C,
    SIZE: tl.constexpr,
    OF_TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
    MEETS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Trace a group in each lane. Store the state after each member, or with OF_TOKENS its own."""
    lines = tl.full([], columns, tl.int64) * (2 if MEETS else 1)
    lane = lane_index(tl.program_id(0), lines * groups, LANES)
    line, n = lane // groups, lane // groups % N
    state = tl.zeros([LANES], tl.int64)
    if known_ptr is not None:
        state = tl.load(known_ptr + lane).to(tl.int64)
    else:
        if last_ptr is not None:
            state = tl.maximum(tl.load(last_ptr + n), 0).to(tl.int64)
        if group_maps_ptr is not None:
            forwards, group = line >= columns, lane % groups
            for i in range(0, groups):
                before = tl.where(forwards, i, groups - 1 - i)
                passed = tl.where(forwards, before < group, before > group)
                state = follow(group_maps_ptr, line * groups + before, state, passed, C, WORDS)
    tokens, has_path = lane, lane >= 0
    if OF_TOKENS:
        tokens, _ = load_tokens(lengths_ptr, n, length)
        has_path = tl.load(score_ptr + n) > -float("inf")
    is_traced = lane >= 0
    if ties_ptr is not None:
        is_traced = tl.load(ties_ptr + n) > 0
    for i in range(0, SIZE):
        at, number, moves, has_state = member(
            lengths_ptr, lane, i, columns, N, length, groups, SIZE, OF_TOKENS, WORDS, MEETS
        )
        after = follow(maps_ptr, number, state, moves, C, WORDS)
        if OF_TOKENS:
            row = (line % columns // N * length + at) * N + n
            value = tl.where((at < tokens) & has_path, after, -1)
            tl.store(states_ptr + row, value, mask=has_state & is_traced)
        else:
            tl.store(states_ptr + number, state.to(tl.int32), mask=has_state)
        state = after
