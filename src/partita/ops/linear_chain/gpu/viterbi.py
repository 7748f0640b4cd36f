"""The best path of dense linear chains: a scan in max-plus arithmetic, then the way back.

The scan of few states stores the best state before each state. Other scans store the best score of
each state with and without the emission of its token, and no index, because steps run one after the
other. The state before a state is then the lowest one whose sum is the best score. Up to 128 states
it is found for all states and tokens at the same time. Among more it is found for the states of the
best path alone, one after the other. In the scan of one program a thread holds the transitions from
every LANES-th state to a few states, as in `resident.py`. In the steps of many programs a thread
takes the maximum over every 32nd state for a few sequences and states.

With the state before each state a path is traced in segments: for each state at the end of a
segment, one program finds the state at its start, and with these maps every segment is traced at
the same time.

Source: Forney, The Viterbi algorithm, 1973.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.memory import load_length, load_matrix
from .arguments import Batch
from .resident import row_groups
from .scores import fold_ends, load_end, load_rows
from .steps import Step, load_scores, load_tokens_of, summed_scores


@triton.jit
def middle_token(tokens, MEETS: tl.constexpr):
    """Return the token at which the scans from both ends meet, or else the last one."""
    if MEETS:
        return tokens // 2
    else:
        return tokens - 1


@gluon.jit
def greater(a, b):
    """Return the greater of two numbers. A NaN need not be preserved."""
    return gl.where(a > b, a, b)


@gluon.jit
def linear_chain_resident_best_kernel(
    batch,  # Batch
    transitions,  # StridedSteps
    states_ptr,  # [2, T + 1, N, C] fp64, see viterbi.py
    is_nan_ptr,  # [2, N] int32, or None with ties
    ties_ptr,  # [N] int32: sequences whose scan goes on from the middle to the end, or None
    MEETS: gl.constexpr,  # whether other programs scan from the end to the middle
    AHEAD: gl.constexpr,
    LANES: gl.constexpr,
    BLOCK_C: gl.constexpr,
):
    """Scan the best scores of a sequence from its start, or in programs from N on from its end."""
    batch = Batch(*batch)
    WARPS: gl.constexpr = gl.num_warps()
    OUTS: gl.constexpr = BLOCK_C * LANES // (32 * WARPS)
    PAIRS: gl.constexpr = gl.BlockedLayout([2, OUTS], [LANES, 32 // LANES], [1, WARPS], [1, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, PAIRS)
    IN: gl.constexpr = gl.SliceLayout(1, PAIRS)
    N, C, emissions = batch.N, batch.C, batch.emissions
    forwards, n = gl.program_id(0) < N, (gl.program_id(0) % N).to(gl.int64)
    runs = True
    if ties_ptr is not None:
        runs = gl.load(ties_ptr + n) > 0
    if runs:
        tokens, _ = load_length(batch.lengths, n, batch.T, 1, 1)
        middle = middle_token(tokens, MEETS)
        t = gl.where(forwards, 0, tokens - 1).to(gl.int64)
        num_steps = gl.where(forwards, middle, tokens - 1 - middle)
        if ties_ptr is not None:
            t, num_steps = gl.to_tensor(middle).to(gl.int64), tokens - 1 - middle
        dt = gl.where(forwards, 1, -1).to(gl.int64)
        c = gl.arange(0, BLOCK_C, OUT)
        end = load_end(batch.end, n, c, C)
        k = gl.expand_dims(gl.arange(0, BLOCK_C, IN), 1).to(gl.int64)
        o = gl.expand_dims(c, 0).to(gl.int64)
        stride_k, stride_c = transitions.k, transitions.c
        at = gl.where(forwards, k * stride_k + o * stride_c, o * stride_k + k * stride_c)
        matrix = gl.load(transitions.ptr + at, mask=(k < C) & (o < C), other=-float("inf"))
        matrix = matrix.to(gl.float64)
        score_ptr = emissions.ptr + n * emissions.n + t * emissions.t
        score_ptr += c.to(gl.int64) * emissions.c
        row, next_score = gl.to_tensor(N).to(gl.int64) * C, dt * emissions.t
        # The scan from the end stores the state of a token as that of the next token.
        x_ptr = states_ptr + (t + gl.where(forwards, 0, 1)) * row + n * C + c
        y_ptr = x_ptr + row * (batch.T + 1)
        if ties_ptr is not None:
            x = gl.load(x_ptr, mask=c < C, other=-float("inf"))
        else:
            x = gl.load(score_ptr, mask=c < C, other=-float("inf"))
            start = load_end(batch.start, n, c, C)
            x = fold_ends(x, t, tokens, start, end)
            gl.store(x_ptr, x, mask=c < C)
        # No step enters the first token.
        last_step, next_row = gl.where(forwards, tokens - 1 - t.to(gl.int32), -1), dt * row
        is_nan = (x != x).to(gl.int32)
        scores, _ = load_rows(score_ptr, None, 1, num_steps, next_score, 0, c, C, AHEAD)
        for i in range(1, num_steps + 1, AHEAD):
            following, _ = load_rows(
                score_ptr, None, i + AHEAD, num_steps, next_score, 0, c, C, AHEAD
            )
            for j in gl.static_range(AHEAD):
                terms = matrix + gl.expand_dims(gl.convert_layout(x, IN), 1)
                y = gl.reduce(gl.reduce(row_groups(terms, LANES), 1, greater), 0, greater)
                y = gl.convert_layout(gl.reduce(y, 0, greater), OUT)
                score = scores[j].to(gl.float64)
                x = y + gl.where(i + j == last_step, score + end, score)
                active = (c < C) & (i + j <= num_steps)
                is_nan = gl.maximum(is_nan, ((x != x) & active).to(gl.int32))
                step_at = gl.to_tensor(i + j).to(gl.int64) * next_row
                gl.store(x_ptr + step_at, x, mask=active)
                gl.store(y_ptr + step_at, y, mask=active)
            scores = following
        if ties_ptr is None:
            bad = gl.max(((matrix != matrix) & (tokens > 1)).to(gl.int32), axis=0)
            is_nan = gl.maximum(is_nan, bad)
            gl.store(is_nan_ptr + gl.program_id(0), gl.max(is_nan, axis=0))


@gluon.jit(do_not_specialize=["t"])
def linear_chain_strided_best_kernel(
    batch,  # Batch
    transitions,  # StridedSteps
    states_ptr,  # [2, T + 1, N, C] fp64
    is_nan_ptr,  # [2, N] int32
    t,
    BY_SEQUENCE: gl.constexpr,  # then a program has 1 sequence instead of 8
    UNROLL: gl.constexpr,
):
    """Enter token t for 8 states and the sequences of a program."""
    batch = Batch(*batch)
    LAYOUT: gl.constexpr = gl.BlockedLayout([2, 4, 1], [1, 1, 32], [4, 2, 1], [2, 1, 0])
    SUMS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    STATES: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    WEIGHTS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    N, C = batch.N, batch.C
    blocks = gl.cdiv(C, 8)
    c0, n0 = gl.program_id(0) % blocks * 8, gl.program_id(0) // blocks
    after = N
    if BY_SEQUENCE:
        after = n0 + 1
    else:
        n0 *= 8
    n = n0 + gl.arange(0, 8, gl.SliceLayout(1, SUMS)).to(gl.int64)
    c = c0 + gl.arange(0, 8, gl.SliceLayout(0, SUMS))
    n = gl.where(n < after, n, N)
    tokens = load_tokens_of(batch.lengths, n, N, batch.T)
    step = Step(t, 0, n * 0 + t, n, tokens, c)
    scores = load_scores(batch, None, step)
    y = gl.zeros([8, 8], gl.float64, SUMS)
    bad = gl.zeros([8, 8], gl.int32, SUMS)
    if t > 0:
        before = gl.to_tensor(t - 1).to(gl.int64)
        state_ptr = states_ptr + before * N * C
        step_ptr = transitions.ptr + before * transitions.t + n0.to(gl.int64) * transitions.n
        row_n = n0 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, STATES)), 1).to(gl.int64)
        row_c = c0 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, WEIGHTS)), 1).to(gl.int64)
        k = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, STATES)), 0)
        j = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, WEIGHTS)), 0)
        best = gl.full([8, 8, 32], -float("inf"), gl.float64, LAYOUT)
        nan = gl.zeros([8, 32], gl.int32, WEIGHTS)
        state_ptr, step_ptr = state_ptr + row_n * C + k, step_ptr + row_c * transitions.c
        for k0 in range(0, C, 32 * UNROLL):
            states, weights = (), ()
            for u in gl.static_range(UNROLL):
                first = k0 + 32 * u
                mask = (row_n < after) & (first + k < C)
                states += (gl.load(state_ptr + first, mask=mask, other=-float("inf")),)
                at = step_ptr + (first + j).to(gl.int64) * transitions.k
                mask = (row_c < C) & (first + j < C)
                weights += (gl.load(at, mask=mask, other=-float("inf")),)
            for u in gl.static_range(UNROLL):
                nan = gl.maximum(nan, (weights[u] != weights[u]).to(gl.int32))
                steps = gl.expand_dims(weights[u].to(gl.float64), 0)
                best = greater(gl.expand_dims(states[u], 1) + steps, best)
        y = gl.reduce(best, 2, greater)
        entered = gl.convert_layout(gl.max(nan, axis=1), gl.SliceLayout(0, SUMS))
        bad = gl.expand_dims(entered, 0) | gl.zeros([8, 8], gl.int32, SUMS)
    mask = gl.expand_dims((n < N) & (t < tokens), 1) & gl.expand_dims(c < C, 0)
    x, row = y + summed_scores(batch, scores), gl.to_tensor(N).to(gl.int64) * C
    x_ptr = states_ptr + (t * row + gl.expand_dims(n * C, 1) + gl.expand_dims(c, 0))
    gl.store(x_ptr, x, mask=mask)
    gl.store(x_ptr + (batch.T + 1) * row, y, mask=mask)
    is_nan = ((x != x) | (bad > 0)) & mask
    # All programs that store here store the same.
    gl.store(is_nan_ptr + n, 1, mask=gl.max(is_nan.to(gl.int32), axis=1) > 0)


@triton.jit
def linear_chain_best_last_kernel(
    states_ptr,  # [2, T + 1, N, C] fp64
    lengths_ptr,  # [N] or None
    is_nan_ptr,  # [2, N] int32
    score_ptr,  # [N]
    last_ptr,  # [N] int32: the last state of the best path, or that in the middle, or -1
    ties_ptr,  # [N] int32: whether several states have the best score, or None
    T,
    N,
    C,
    MEETS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Find the best score of a sequence and the lowest state that has it.

    With MEETS the ties are written, otherwise this is done for the sequences with ties alone.
    """
    n, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_C)
    runs = True
    if ties_ptr is not None and not MEETS:
        runs = tl.load(ties_ptr + n) > 0
    if runs:
        tokens, invalid = load_length(lengths_ptr, n, T, 1, 1)
        middle = middle_token(tokens, MEETS)
        at = (tl.full([], 1, tl.int64) * middle * N + n) * C + c
        x = tl.load(states_ptr + at, mask=c < C, other=-float("inf"))
        is_nan = tl.load(is_nan_ptr + n)
        if MEETS:
            rows = (tl.full([], T, tl.int64) + 1) * N
            inside = (c < C) & (middle < tokens - 1)
            x += tl.load(states_ptr + (rows + N) * C + at, mask=inside, other=0.0)
            is_nan = tl.maximum(is_nan, tl.load(is_nan_ptr + N + n))
        best = tl.max(x, axis=0)
        last = tl.min(tl.where(x == best, c, BLOCK_C), axis=0)
        number = tl.sum(((x == best) & (c < C)).to(tl.int32), axis=0)
        best = tl.where(is_nan > 0, float("nan"), best) + invalid
        tl.store(score_ptr + n, best.to(score_ptr.dtype.element_ty))
        tl.store(last_ptr + n, tl.where(best > -float("inf"), last, -1))
        if MEETS:
            tl.store(ties_ptr + n, ((number > 1) & (best > -float("inf"))).to(tl.int32))


@triton.jit
def linear_chain_best_states_kernel(
    transitions,  # StridedSteps, with MEETS `[2, C, C]` with the same transposed
    states_ptr,  # [2, T + 1, N, C] fp64
    previous_ptr,  # [T, N, C] int16: the best states before each state
    lengths_ptr,  # [N] or None
    ties_ptr,  # [N] int32, if this is for what follows the middle of sequences with ties
    T,
    N,
    C,
    MEETS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Find the lowest state before each state of ROWS tokens that attains the best score.

    With MEETS, the second half of the programs finds the states at the tokens after the middle
    given each state before. Where no score is greater than -inf, or past a length, it is any state.
    """
    transitions_ptr, blocks = transitions.ptr, tl.cdiv(C, BLOCK_C)
    rows = tl.full([], T, tl.int64) * N
    program = tl.program_id(0)
    forwards, from_row = True, tl.full([], N, tl.int64)
    if MEETS:
        forwards = program < tl.num_programs(0) // 2
        program = program % (tl.num_programs(0) // 2)
        from_row = tl.where(forwards, from_row, -from_row)
        transitions_ptr += tl.where(forwards, 0, C * C)
    c = (program % blocks * BLOCK_C + tl.arange(0, BLOCK_C))[None, :]
    row = (program.to(tl.int64) // blocks * ROWS + N + tl.arange(0, ROWS))[:, None]
    active = row < rows
    if MEETS or ties_ptr is not None:
        tokens = load_tokens_of(lengths_ptr, row % N, N, T)
        after, active = row // N > middle_token(tokens, True), active & (row // N < tokens)
        if ties_ptr is not None:
            active = active & after & (tl.load(ties_ptr + row % N) > 0)
        else:
            active = active & (after != forwards)
    if tl.max(tl.max(active.to(tl.int32), axis=1), axis=0) > 0:
        mask = active & (c < C)
        y = tl.load(states_ptr + (rows + N) * C + row * C + c, mask=mask, other=0.0)
        before_ptr = states_ptr + (row - from_row) * C
        step_ptr = transitions_ptr + c.to(tl.int64) * transitions.c
        index = tl.full([ROWS, BLOCK_C], C - 1, tl.int32)
        for first in range(0, C, UNROLL):
            for j in tl.static_range(UNROLL):
                k = C - 1 - first - j
                x = tl.load(before_ptr + k, mask=active & (k >= 0), other=float("nan"))
                at = step_ptr + tl.full([], k, tl.int64) * transitions.k
                weight = tl.load(at, mask=(c < C) & (k >= 0), other=0.0).to(tl.float64)
                index = tl.where(x + weight == y, k, index)
        tl.store(previous_ptr + row * C + c, index, mask=mask)


@triton.jit
def linear_chain_best_trace_kernel(
    transitions,  # StridedSteps
    states_ptr,  # [2, T + 1, N, C] fp64
    lengths_ptr,  # [N] or None
    last_ptr,  # [N] int32: the last state of the best path, or -1
    path_ptr,  # [T, N] int64
    T,
    N,
    C,
    BLOCK_C: tl.constexpr,
):
    """Trace the best path of a sequence: before each state, the lowest that attains its score."""
    n, k = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_C)
    tokens, _ = load_length(lengths_ptr, n, T, 1, 1)
    state = tl.load(last_ptr + n)
    # Without a path, no token has a state.
    known = tl.where(state >= 0, tokens, 0)
    for first in range(0, T, BLOCK_C):
        t = first + k
        tl.store(path_ptr + t.to(tl.int64) * N + n, -1, mask=(t >= known) & (t < T))
    row = tl.full([], N, tl.int64) * C
    states_ptr += n * C
    from_ptr = transitions.ptr + (n * transitions.n + k.to(tl.int64) * transitions.k)
    x = tl.load(states_ptr + (tokens - 2) * row + k, mask=(k < C) & (known > 1), other=0.0)
    for i in range(0, known):
        t = tokens - 1 - i
        tl.store(path_ptr + tl.full([], t, tl.int64) * N + n, state.to(tl.int64))
        # The scores of the token before the last one do not depend on the state.
        ahead = tl.load(states_ptr + (t - 2) * row + k, mask=(k < C) & (t > 1), other=0.0)
        y = tl.load(states_ptr + (row + T * row) + t * row + state)
        step_ptr = from_ptr + tl.full([], t - 1, tl.int64) * transitions.t
        at = step_ptr + state.to(tl.int64) * transitions.c
        weight = tl.load(at, mask=(k < C) & (t > 0), other=0.0).to(tl.float64)
        state = tl.min(tl.where((x + weight == y) & (k < C), k, C - 1), axis=0)
        x = ahead


@triton.jit
def linear_chain_best_ties_kernel(
    table_ptr,  # [2, C, C]
    states_ptr,  # [2, T + 1, N, C] fp64
    path_ptr,  # [T, N] int64
    lengths_ptr,  # [N] or None
    ties_ptr,  # [N] int32
    T,
    N,
    C,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Store 1 for a sequence whose path after its middle could go on in several best ways."""
    row = tl.program_id(0).to(tl.int64) * ROWS + N + tl.arange(0, ROWS)
    rows, c = tl.full([], T, tl.int64) * N, tl.arange(0, BLOCK_C)
    n, t = row % N, row // N
    tokens = load_tokens_of(lengths_ptr, n, N, T)
    active = (row < rows) & (t < tokens) & (t > middle_token(tokens, True))
    k = tl.load(path_ptr + row - N, mask=active, other=-1)
    active = active & (k >= 0)
    mask = active[:, None] & (c < C)[None, :]
    y = tl.load(states_ptr + (rows + N + row) * C + k, mask=active, other=0.0)
    x = tl.load(states_ptr + ((row + N) * C)[:, None] + c[None, :], mask=mask, other=0.0)
    weight = tl.load(table_ptr + (k * C)[:, None] + c[None, :], mask=mask, other=0.0)
    is_best = (x + weight.to(tl.float64) == y[:, None]) & mask
    number = tl.sum(is_best.to(tl.int32), axis=1)
    # All programs that store here store the same.
    tl.store(ties_ptr + n, 1, mask=number > 1)


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
    tokens, invalid = load_length(batch.lengths, n, batch.T, 1, 1)
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
    tokens, _ = load_length(lengths_ptr, n, T, 1, 1)
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
