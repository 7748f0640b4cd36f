"""The best path of few long sequences, parallel in time.

In max-plus arithmetic a segment is an operator too, see `segments.py`. 9 to 16 states do not fit
into lanes as those of `lanes.py` do. There the threads of a program share an operator, and each of
them takes the maxima over all states between for one row and a few columns. Once the best scores of
the states before each segment are known, a lane takes them through the segment and stores the state
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
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.memory import load_length
from .arguments import Batch
from .lanes import (
    MAX_STATES_OF_TABLE,
    lane_emissions,
    lane_index,
    lane_scores,
    lane_select,
    load_lane,
)
from .scores import fold_ends, load_end, load_rows
from .viterbi import greater

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
        tokens, _ = load_length(lengths_ptr, column % N, length, 1, 1)
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
    boundaries_ptr,  # [N, segments + 1, C] fp64
    last_ptr,  # [N] int32
    words_ptr,  # [N, T] int64
    segments,
    C: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the states at each token given those at the next, for one segment in each lane."""
    batch = Batch(*batch)
    TABLE: tl.constexpr = C * C if C <= MAX_STATES_OF_TABLE else 0
    AHEAD: tl.constexpr = 4 if C <= MAX_STATES_OF_TABLE else 1
    T, end = batch.T, batch.end
    lane = lane_index(tl.program_id(0), tl.full([], batch.N, tl.int64) * segments, LANES)
    n, segment = lane // segments, lane % segments
    tokens, _ = load_length(batch.lengths, n, T, 1, 1)
    low = segment * STEPS
    inputs = (batch.emissions.ptr + n * batch.emissions.n, batch.emissions)
    end_at = n * end.n
    x = load_lane(boundaries_ptr + (n * (segments + 1) + segment) * C, C)
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


@gluon.jit
def best_matrix_product(x, matrix, LAYOUT: gl.constexpr):
    """Return the max-plus product of two matrices `[16, 16]`, as a tree of maxima."""
    terms = gl.expand_dims(x, 2) + gl.expand_dims(matrix, 0)
    groups = gl.reshape(terms, [16, 4, 4, 16])
    best = gl.reduce(gl.reduce(groups, 2, greater), 1, greater)
    return gl.convert_layout(best, gl.SliceLayout(1, LAYOUT))


@gluon.jit
def element_index(LAYOUT: gl.constexpr):
    """Return the row and the column of each element of a matrix `[16, 16]`."""
    k = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)), 1)
    return k, gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def linear_chain_best_operators_kernel(
    batch,  # Batch, without start
    table_ptr,  # [C, C] fp64
    operators,  # Operators, written
    segments,
    STEPS: gl.constexpr,
    AHEAD: gl.constexpr,
):
    """Form the operator of a segment."""
    batch = Batch(*batch)
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 16, 8 // WARPS], [8, 1, 4], [2, 1, WARPS // 2], [2, 1, 0]
    )
    ROWS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    SCORES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    C, emissions = batch.C, batch.emissions
    n, segment = (gl.program_id(0) // segments).to(gl.int64), gl.program_id(0) % segments
    tokens, _ = load_length(batch.lengths, n, batch.T, 1, 1)
    low = gl.minimum(segment * STEPS, tokens - 1)
    num_steps = gl.minimum(STEPS, tokens - 1 - low)
    c = gl.arange(0, 16, SCORES)
    end = load_end(batch.end, n, c, C)
    row, column = element_index(COLUMNS)
    mask = (row < C) & (column < C)
    table = gl.load(table_ptr + row * C + column, mask=mask, other=-float("inf"))
    row, column = element_index(ROWS)
    x, bad = gl.where(row == column, 0.0, -float("inf")).to(gl.float64), c * 0
    score_ptr = emissions.ptr + n * emissions.n + c.to(gl.int64) * emissions.c
    score_ptr += gl.to_tensor(low).to(gl.int64) * emissions.t
    scores, _ = load_rows(score_ptr, None, 1, num_steps, emissions.t, 0, c, C, AHEAD)
    for i in range(1, num_steps + 1, AHEAD):
        following, _ = load_rows(score_ptr, None, i + AHEAD, num_steps, emissions.t, 0, c, C, AHEAD)
        for j in gl.static_range(AHEAD):
            active = i + j <= num_steps
            score = fold_ends(scores[j], low + i + j, tokens, end * 0.0, end)
            bad = gl.maximum(bad, ((score != score) & active).to(gl.int32))
            y = best_matrix_product(x, table, LAYOUT) + gl.expand_dims(score, 0)
            x = gl.where(active, gl.convert_layout(y, ROWS), x)
        scores = following
    at = n * segments + segment
    matrix_ptr = operators.matrices + at * C * C + row * C + column
    gl.store(matrix_ptr, x, mask=(row < C) & (column < C))
    offset = gl.where(gl.max(bad, axis=0) > 0, float("nan"), 0.0)
    gl.store(operators.offsets + at, offset.to(gl.float64))


@gluon.jit
def linear_chain_best_groups_kernel(
    operators,  # Operators of segments
    group_operators,  # Operators of groups, written
    C,
    segments,
    groups,
    SIZE: gl.constexpr,  # segments in a group
):
    """Form the product of the operators of a group."""
    WARPS: gl.constexpr = gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 16, 8 // WARPS], [8, 1, 4], [2, 1, WARPS // 2], [2, 1, 0]
    )
    ROWS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    n, group = (gl.program_id(0) // groups).to(gl.int64), gl.program_id(0) % groups
    first, last = group * SIZE, gl.minimum((group + 1) * SIZE, segments) - 1
    at = n * segments + first
    row, column = element_index(COLUMNS)
    element, mask = row * C + column, (row < C) & (column < C)
    matrix = gl.load(operators.matrices + at * C * C + element, mask=mask, other=-float("inf"))
    row, column = element_index(ROWS)
    x = gl.where(row == column, 0.0, -float("inf")).to(gl.float64)
    total = gl.to_tensor(0.0).to(gl.float64)
    for segment in range(first, last + 1):
        # The next operator is loaded while this one is used.
        at = n * segments + gl.minimum(segment + 1, last)
        matrix_ptr = operators.matrices + at * C * C + element
        following = gl.load(matrix_ptr, mask=mask, other=-float("inf"))
        total += gl.load(operators.offsets + n * segments + segment)
        x = gl.convert_layout(best_matrix_product(x, matrix, LAYOUT), ROWS)
        matrix = following
    at = n * groups + group
    matrix_ptr = group_operators.matrices + at * C * C + row * C + column
    gl.store(matrix_ptr, x, mask=(row < C) & (column < C))
    gl.store(group_operators.offsets + at, total)
