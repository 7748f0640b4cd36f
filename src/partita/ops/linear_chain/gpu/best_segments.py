"""The best path of few long sequences, parallel in time.

In max-plus arithmetic a segment is an operator too, see `lanes.py`. Once the best scores of the
states before each segment are known, a lane takes them through the segment and stores the state
before each state.

The states at a token, given each state at the next one, are a map of states to states. It has 4
bits for each state, so a word of 64 bits has it whole. A map composed of maps is such a word too:
first the maps of all segments are composed at the same time, then those of groups of segments. With
the state after the last token, which decides nothing since the map of the last token is constant,
one lane traces the groups, others the segments inside of each group, and others their tokens.

Scores are sums in fp64. Integers of at most 53 bits stay exact, so ties are those of a scan of one
step after the other. Other scores are added in another order than there, and may choose another
path among those whose scores differ by rounding.

Source: Särkkä and García-Fernández, Temporal parallelization of Bayesian smoothers, 2021; Forney,
The Viterbi algorithm, 1973.
"""

import triton
import triton.language as tl

from ....primitives.gpu.memory import load_matrix
from .arguments import Batch
from .lanes import (
    MAX_STATES_OF_TABLE,
    lane_emissions,
    lane_index,
    lane_scores,
    lane_select,
    load_lane,
)
from .scores import fold_ends, load_end, load_tokens

ALL_STATES = tl.constexpr(0x1111111111111111)  # times a state is the map of all states to it


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
            before += (tl.where(active, (word >> (4 * states[c])) & 15, states[c]),)
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
        before = tl.where(active, (word >> (4 * state)) & 15, state)
        if FINAL:
            row = column // N * length + at
            value = tl.where((at < tokens) & has_path, before, -1)
            tl.store(states_ptr + row * N + column % N, value, mask=active)
        else:
            tl.store(states_ptr + column * length + at, state.to(tl.int32), mask=active)
        state = before


@triton.jit
def linear_chain_best_boundaries_kernel(
    batch,  # Batch, with the emissions of first tokens
    table_ptr,  # [C, C] fp64
    operators,  # Operators
    known_ptr,  # [N, groups, C] fp64, states before groups, or None for one group
    boundaries_ptr,  # [N, segments, C] fp64, states before segments
    score_ptr,  # [N] the best score, if known is None
    last_ptr,  # [N] int32, the last state of the best path or -1, if known is None
    segments,
    groups,
    SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Scan the best scores over the operators of a group; find the last state for one group."""
    batch = Batch(*batch)
    C, emissions = batch.C, batch.emissions
    group, n = tl.program_id(0) % groups, (tl.program_id(0) // groups).to(tl.int64)
    c, none = tl.arange(0, BLOCK_C), -float("inf")
    tokens, invalid = load_tokens(batch.lengths, n, batch.T)
    first, last = group * SIZE, tl.minimum((group + 1) * SIZE, segments)
    if known_ptr is None:
        at = n * emissions.n + c.to(tl.int64) * emissions.c
        score = tl.load(emissions.ptr + at, mask=c < C, other=none)
        start, end = load_end(batch.start, n, c, C), load_end(batch.end, n, c, C)
        x = fold_ends(score, 0, tokens, start, end)
    else:
        x = tl.load(known_ptr + (n * groups + group) * C + c, mask=c < C, other=none)
    # The first state is NaN too if it has one.
    is_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
    total = tl.where(is_nan, float("nan"), 0.0).to(tl.float64)
    at = n * segments + first
    step = load_matrix(operators.matrices + at * C * C, C, C, 1, BLOCK_C, none)
    for segment in range(first, last):
        tl.store(boundaries_ptr + (n * segments + segment) * C + c, x, mask=c < C)
        total += tl.load(operators.offsets + n * segments + segment)
        # The next operator is loaded while this one is used.
        at = n * segments + tl.minimum(segment + 1, last - 1)
        following = load_matrix(operators.matrices + at * C * C, C, C, 1, BLOCK_C, none)
        x = tl.max(step + x[:, None], axis=0)
        step = following
    if known_ptr is None:
        weights = load_matrix(table_ptr, C, C, 1, BLOCK_C, 0.0)
        bad = tl.max(tl.max((weights != weights).to(tl.int32), axis=0), axis=0)
        total += tl.where((bad > 0) & (tokens > 1), float("nan"), 0.0)
        best = tl.max(x, axis=0) + total + invalid
        tl.store(score_ptr + n, best.to(score_ptr.dtype.element_ty))
        state = tl.min(tl.where(x == tl.max(x, axis=0), c, BLOCK_C), axis=0)
        tl.store(last_ptr + n, tl.where(best > none, state, -1))


@triton.jit
def best_product(x, table, table_ptr, C: tl.constexpr):
    """Return the best scores that enter each state, and the lowest states before in one word."""
    y, word = (), tl.zeros(x[0].shape, tl.int64)
    for c in tl.static_range(C):
        best, index = x[0], tl.zeros(x[0].shape, tl.int32)
        for k in tl.static_range(C):
            if C > MAX_STATES_OF_TABLE:
                weight = tl.load(table_ptr + k * C + c)
            else:
                weight = table[k * C + c]
            term = x[k] + weight
            if k > 0:
                index = tl.where(term > best, k, index)
            best = tl.where(term > best, term, best) if k > 0 else term
        y += (best,)
        word = word | (index.to(tl.int64) << (4 * c))
    return y, word


@triton.jit
def linear_chain_best_words_kernel(
    batch,  # Batch, without start
    table_ptr,  # [C, C] fp64
    boundaries_ptr,  # [N, segments, C] fp64
    last_ptr,  # [N] int32
    words_ptr,  # [N, T] int64
    segments,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    AHEAD: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the states at each token given those at the next, for one segment in each lane."""
    batch = Batch(*batch)
    TABLE: tl.constexpr = C * C if C <= MAX_STATES_OF_TABLE else 0
    T, end = batch.T, batch.end
    lane = lane_index(tl.program_id(0), tl.full([], batch.N, tl.int64) * segments, LANES)
    n, segment = lane // segments, lane % segments
    tokens, _ = load_tokens(batch.lengths, n, T)
    low = segment * STEPS
    inputs = (batch.emissions.ptr + n * batch.emissions.n, batch.emissions)
    end_at = n * end.n
    x = load_lane(boundaries_ptr + (n * segments + segment) * C, C)
    # From the last token on, each state has the last one before it.
    last = tl.maximum(tl.load(last_ptr + n), 0).to(tl.int64) * ALL_STATES
    table = load_lane(table_ptr, TABLE)
    scores = lane_scores(*inputs, low + 1, 1, tokens - 1 - low, C, AHEAD)
    for i in range(0, STEPS, AHEAD):
        left = tokens - 1 - low - i - AHEAD
        next_scores = lane_scores(*inputs, low + 1 + i + AHEAD, 1, left, C, AHEAD)
        for j in tl.static_range(AHEAD):
            t = low + 1 + i + j
            emissions = lane_emissions(end, end_at, tokens, scores, j * C, t, C)
            y, word = best_product(x, table, table_ptr, C)
            after = ()
            for c in tl.static_range(C):
                after += (y[c] + emissions[c],)
            x = lane_select(t < tokens, after, x, C)
            word = tl.where(t < tokens, word, last)
            tl.store(words_ptr + n * T + t - 1, word, mask=t <= T)
        scores = next_scores
