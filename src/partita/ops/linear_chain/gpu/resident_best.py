"""Best scores of dense linear chains on NVIDIA GPUs, with transitions in registers or from memory.

See `viterbi.py` for what is stored. In the scan of one program a thread holds the transitions
from every LANES-th state to a few states, as in `resident.py`. In the steps of many programs a
thread takes the maximum over every 32nd state for a few sequences and states.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .arguments import Batch
from .resident import load_rows, load_vector, row_groups
from .scores import fold_ends, load_tokens
from .steps import Step, load_scores, load_tokens_of, summed_scores
from .viterbi import middle_token


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
        tokens, _ = load_tokens(batch.lengths, n, batch.T)
        middle = middle_token(tokens, MEETS)
        t = gl.where(forwards, 0, tokens - 1).to(gl.int64)
        num_steps = gl.where(forwards, middle, tokens - 1 - middle)
        if ties_ptr is not None:
            t, num_steps = gl.to_tensor(middle).to(gl.int64), tokens - 1 - middle
        dt = gl.where(forwards, 1, -1).to(gl.int64)
        c = gl.arange(0, BLOCK_C, OUT)
        end = load_vector(batch.end, n, c, C)
        k = gl.expand_dims(gl.arange(0, BLOCK_C, IN), 1).to(gl.int64)
        o = gl.expand_dims(c, 0).to(gl.int64)
        stride_k, stride_c = transitions.k, transitions.c
        at = gl.where(forwards, k * stride_k + o * stride_c, o * stride_k + k * stride_c)
        matrix = gl.load(transitions.ptr + at, mask=(k < C) & (o < C), other=-float("inf"))
        matrix = matrix.to(gl.float64)
        score_ptr = emissions.ptr + n * emissions.n + t * emissions.t
        score_ptr += c.to(gl.int64) * emissions.c
        row, next_score = gl.to_tensor(N).to(gl.int64) * C, dt * emissions.t
        # What the scan from the end leaves at a token is stored as that of the next one.
        x_ptr = states_ptr + (t + gl.where(forwards, 0, 1)) * row + n * C + c
        y_ptr = x_ptr + row * (batch.T + 1)
        if ties_ptr is not None:
            x = gl.load(x_ptr, mask=c < C, other=-float("inf"))
        else:
            x = gl.load(score_ptr, mask=c < C, other=-float("inf"))
            start = load_vector(batch.start, n, c, C)
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
