"""Best scores of dense linear chains on NVIDIA GPUs, with transitions in registers or from memory.

See `best_steps.py` for what is stored. In the scan of one program a thread holds the transitions
from every LANES-th state to a few states, as in `resident.py`. In the steps of many programs a
thread takes the maximum over every 32nd state for a few sequences and states.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .best_steps import best_emissions, middle_token, store_best
from .resident import load_vector, row_groups
from .scores import fold_ends, load_tokens
from .steps import load_tokens_of


@gluon.jit
def greater(a, b):
    """Return the greater of two numbers. A NaN need not be preserved."""
    return gl.where(a > b, a, b)


@gluon.jit
def best_terms(terms, LANES: gl.constexpr, OUT: gl.constexpr):
    """Return the greatest term of each column."""
    best = gl.reduce(gl.reduce(row_groups(terms, LANES), 1, greater), 0, greater)
    return gl.convert_layout(gl.reduce(best, 0, greater), OUT)


@gluon.jit
def load_ahead(score_ptr, i, num_steps, stride_t, c, C, AHEAD: gl.constexpr):
    """Load the emissions of the AHEAD steps from step i, before the first is used."""
    scores = ()
    for j in gl.static_range(AHEAD):
        at = score_ptr + gl.to_tensor(i + j).to(gl.int64) * stride_t
        scores += (gl.load(at, mask=(c < C) & (i + j <= num_steps), other=-float("inf")),)
    return scores


@gluon.jit
def scan_best(
    matrix,
    x,
    end,
    score_ptr,
    x_ptr,
    y_ptr,
    sizes,
    strides,
    c,
    AHEAD: gl.constexpr,
    LANES: gl.constexpr,
    OUT: gl.constexpr,
    IN: gl.constexpr,
):
    """Take the state x through all steps, and return in which states it met a NaN.

    The sizes are the number of steps, the step of the last token or -1, and C. The strides are
    those of the emissions and the states over steps. No step enters the first token.
    """
    num_steps, last_step, C = sizes
    next_score, next_row = strides
    is_nan = (x != x).to(gl.int32)
    scores = load_ahead(score_ptr, 1, num_steps, next_score, c, C, AHEAD)
    for i in range(1, num_steps + 1, AHEAD):
        following = load_ahead(score_ptr, i + AHEAD, num_steps, next_score, c, C, AHEAD)
        for j in gl.static_range(AHEAD):
            terms = matrix + gl.expand_dims(gl.convert_layout(x, IN), 1)
            y = best_terms(terms, LANES, OUT)
            score = scores[j].to(gl.float64)
            x = y + gl.where(i + j == last_step, score + end, score)
            active = (c < C) & (i + j <= num_steps)
            is_nan = gl.maximum(is_nan, ((x != x) & active).to(gl.int32))
            at = gl.to_tensor(i + j).to(gl.int64) * next_row
            gl.store(x_ptr + at, x, mask=active)
            gl.store(y_ptr + at, y, mask=active)
        scores = following
    return is_nan


@gluon.jit
def linear_chain_resident_best_kernel(
    emissions_ptr,  # [T, N, C]
    transitions_ptr,  # [C, C]
    start_ptr,  # [N, C] or None
    end_ptr,  # [N, C] or None
    lengths_ptr,  # [N] or None
    states_ptr,  # [2, T + 1, N, C] fp64, see best_steps.py
    is_nan_ptr,  # [2, N] int32, or None with ties
    ties_ptr,  # [N] int32: sequences whose scan goes on from the middle to the end, or None
    T,
    N,
    C,
    stride_t,
    stride_n,
    stride_c,
    trans_k,
    trans_c,
    start_n,
    start_c,
    end_n,
    end_c,
    MEETS: gl.constexpr,  # whether other programs scan from the end to the middle
    AHEAD: gl.constexpr,
    LANES: gl.constexpr,
    BLOCK_C: gl.constexpr,
):
    """Scan the best scores of a sequence from its start, or in programs from N on from its end."""
    WARPS: gl.constexpr = gl.num_warps()
    OUTS: gl.constexpr = BLOCK_C * LANES // (32 * WARPS)
    PAIRS: gl.constexpr = gl.BlockedLayout([2, OUTS], [LANES, 32 // LANES], [1, WARPS], [1, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, PAIRS)
    IN: gl.constexpr = gl.SliceLayout(1, PAIRS)
    forwards, n = gl.program_id(0) < N, (gl.program_id(0) % N).to(gl.int64)
    runs = True
    if ties_ptr is not None:
        runs = gl.load(ties_ptr + n) > 0
    if runs:
        tokens, _ = load_tokens(lengths_ptr, n, T)
        middle = middle_token(tokens, MEETS)
        t = gl.where(forwards, 0, tokens - 1).to(gl.int64)
        num_steps = gl.where(forwards, middle, tokens - 1 - middle)
        if ties_ptr is not None:
            t, num_steps = gl.to_tensor(middle).to(gl.int64), tokens - 1 - middle
        dt = gl.where(forwards, 1, -1).to(gl.int64)
        c = gl.arange(0, BLOCK_C, OUT)
        end = load_vector(end_ptr, n, c, C, end_n, end_c)
        k = gl.expand_dims(gl.arange(0, BLOCK_C, IN), 1).to(gl.int64)
        o = gl.expand_dims(c, 0).to(gl.int64)
        at = gl.where(forwards, k * trans_k + o * trans_c, o * trans_k + k * trans_c)
        matrix = gl.load(transitions_ptr + at, mask=(k < C) & (o < C), other=-float("inf"))
        matrix = matrix.to(gl.float64)
        score_ptr = emissions_ptr + n * stride_n + t * stride_t + c.to(gl.int64) * stride_c
        row, next_score = gl.to_tensor(N).to(gl.int64) * C, dt * stride_t
        # What the scan from the end leaves at a token is stored as that of the next one.
        x_ptr = states_ptr + (t + gl.where(forwards, 0, 1)) * row + n * C + c
        y_ptr = x_ptr + row * (T + 1)
        if ties_ptr is not None:
            x = gl.load(x_ptr, mask=c < C, other=-float("inf"))
        else:
            x = gl.load(score_ptr, mask=c < C, other=-float("inf"))
            start = load_vector(start_ptr, n, c, C, start_n, start_c)
            x = fold_ends(x, t, tokens, start, end)
            gl.store(x_ptr, x, mask=c < C)
        last_step = gl.where(forwards, tokens - 1 - t.to(gl.int32), -1)
        sizes, strides = (num_steps, last_step, C), (next_score, dt * row)
        is_nan = scan_best(
            matrix, x, end, score_ptr, x_ptr, y_ptr, sizes, strides, c, AHEAD, LANES, OUT, IN
        )
        if ties_ptr is None:
            bad = gl.max(((matrix != matrix) & (tokens > 1)).to(gl.int32), axis=0)
            is_nan = gl.maximum(is_nan, bad)
            gl.store(is_nan_ptr + gl.program_id(0), gl.max(is_nan, axis=0))


@gluon.jit
def strided_best(
    state_ptr, step_ptr, n0, c0, sizes, strides, UNROLL: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return the best sums `[8, 8]` of states and transitions, and whether a transition is NaN."""
    STATES: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    WEIGHTS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    N, C = sizes
    trans_k, trans_c = strides
    n = n0 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, STATES)), 1).to(gl.int64)
    c = c0 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, WEIGHTS)), 1).to(gl.int64)
    k = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, STATES)), 0)
    j = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, WEIGHTS)), 0)
    best = gl.full([8, 8, 32], -float("inf"), gl.float64, LAYOUT)
    bad = gl.zeros([8, 32], gl.int32, WEIGHTS)
    state_ptr, step_ptr = state_ptr + n * C + k, step_ptr + c * trans_c
    for k0 in range(0, C, 32 * UNROLL):
        states, weights = (), ()
        for u in gl.static_range(UNROLL):
            first = k0 + 32 * u
            mask = (n < N) & (first + k < C)
            states += (gl.load(state_ptr + first, mask=mask, other=-float("inf")),)
            at = step_ptr + (first + j).to(gl.int64) * trans_k
            mask = (c < C) & (first + j < C)
            weights += (gl.load(at, mask=mask, other=-float("inf")),)
        for u in gl.static_range(UNROLL):
            bad = gl.maximum(bad, (weights[u] != weights[u]).to(gl.int32))
            steps = gl.expand_dims(weights[u].to(gl.float64), 0)
            best = greater(gl.expand_dims(states[u], 1) + steps, best)
    return gl.reduce(best, 2, greater), gl.max(bad, axis=1)


@gluon.jit(do_not_specialize=["t"])
def linear_chain_strided_best_kernel(
    emissions_ptr,  # [T, N, C]
    transitions_ptr,  # [C, C] or [T - 1, N, C, C]
    start_ptr,  # [N, C] or None
    end_ptr,  # [N, C] or None
    lengths_ptr,  # [N] or None
    states_ptr,  # [2, T + 1, N, C] fp64
    is_nan_ptr,  # [2, N] int32
    t,
    T,
    N,
    C,
    stride_t,
    stride_n,
    stride_c,
    trans_t,
    trans_n,
    trans_k,
    trans_c,
    start_n,
    start_c,
    end_n,
    end_c,
    BY_SEQUENCE: gl.constexpr,  # then a program has 1 sequence instead of 8
    UNROLL: gl.constexpr,
):
    """Enter token t for 8 states and the sequences of a program."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([2, 4, 1], [1, 1, 32], [4, 2, 1], [2, 1, 0])
    SUMS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    blocks = gl.cdiv(C, 8)
    c0, n0 = gl.program_id(0) % blocks * 8, gl.program_id(0) // blocks
    last = N
    if BY_SEQUENCE:
        last = n0 + 1
    else:
        n0 *= 8
    n = n0 + gl.arange(0, 8, gl.SliceLayout(1, SUMS)).to(gl.int64)
    c = c0 + gl.arange(0, 8, gl.SliceLayout(0, SUMS))
    tokens = load_tokens_of(lengths_ptr, n, last, T)
    strides = (stride_t, stride_n, stride_c, start_n, start_c, end_n, end_c)
    addresses = (emissions_ptr, start_ptr, end_ptr)
    score = best_emissions(addresses, t, n, tokens, c, (last, N, C), strides)
    y = gl.zeros([8, 8], gl.float64, SUMS)
    bad = gl.zeros([8, 8], gl.int32, SUMS)
    if t > 0:
        before = gl.to_tensor(t - 1).to(gl.int64)
        state_ptr = states_ptr + before * N * C
        step_ptr = transitions_ptr + before * trans_t + n0.to(gl.int64) * trans_n
        sizes, steps = (last, C), (trans_k, trans_c)
        y, nan = strided_best(state_ptr, step_ptr, n0, c0, sizes, steps, UNROLL, LAYOUT)
        nan = gl.convert_layout(nan, gl.SliceLayout(0, SUMS))
        bad = gl.expand_dims(nan, 0) | gl.zeros([8, 8], gl.int32, SUMS)
    rows = (gl.to_tensor(T).to(gl.int64) + 1) * N
    store_best(states_ptr, rows, is_nan_ptr, y, score, bad, t, n, tokens, c, (last, N, C))
