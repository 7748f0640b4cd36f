"""Linear scans of dense chains on NVIDIA GPUs, with layouts that keep each sum inside a warp.

The recursion is that of `scan.py`. A thread holds the transitions from every LANES-th state to a
few states. So a step reads the state from shared memory, sums inside threads and then over LANES
lanes, and puts the new state into shared memory: no sum crosses warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.memory import load_length
from .arguments import Batch
from .scores import (
    MAX_SPAN,
    exp_split,
    fold_ends,
    load_end,
    load_rows,
    power_of_2,
    scan_steps,
    state_offset,
)


@gluon.jit
def load_range(span, n, BLOCK_PARTS: gl.constexpr):
    """Load the greatest and the least transition of each part, for sequence n."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    part, ptr = gl.arange(0, BLOCK_PARTS, LAYOUT), span.ptr + n % span.sets * 2 * span.parts
    greatest = gl.load(ptr + 2 * part, mask=part < span.parts, other=-float("inf"))
    return greatest, gl.load(ptr + 2 * part + 1, mask=part < span.parts, other=float("inf"))


@gluon.jit
def linear_range(greatest, least):
    """Return whether the linear scans serve these transitions, and the greatest transition."""
    maximum = gl.max(greatest, axis=0)
    return maximum - gl.min(least, axis=0) <= MAX_SPAN, maximum


@gluon.jit
def row_groups(pairs, LANES: gl.constexpr):
    """Return pairs of states as `[groups, 4, rows, states]`, to be reduced over the first three.

    A thread has every LANES-th pair of rows. It reduces 4 rows of several groups at the same time,
    since in a single chain each sum or comparison would wait for the one before.
    """
    ROWS: gl.constexpr = pairs.shape[0]
    STATES: gl.constexpr = pairs.shape[1]
    return gl.reshape(pairs, [ROWS // (8 * LANES), 4, 2 * LANES, STATES])


@gluon.jit
def resident_step(matrix, x, LANES: gl.constexpr, OUT: gl.constexpr, IN: gl.constexpr):
    """Take a state through the transitions; return it with its exponent removed, and that."""
    x = gl.convert_layout(x, IN)
    # The order of numbers of one sign is that of their bits.
    high = (x.to(gl.int64, bitcast=True) >> 32).to(gl.int32)
    exponent = (gl.max(high, axis=0) >> 20) - 1023
    exponent = gl.where(exponent < -1000, 0, gl.minimum(exponent, 1000))
    y = matrix * gl.expand_dims(x, 1)
    if matrix.shape[0] <= 64:
        y = gl.sum(gl.sum(row_groups(y, LANES), axis=1), axis=0)
    # The partial sums of more states would not fit into the registers.
    y = gl.convert_layout(gl.sum(y, axis=0), OUT)
    return y * power_of_2(-exponent), exponent


@gluon.jit
def linear_chain_resident_scan_kernel(
    batch,  # Batch
    transitions,  # StridedSteps
    saved,  # Saved: states and scales are written
    boundaries_ptr,  # [2, N, segments + 1, C] fp64, or None
    segments,
    SAVE: gl.constexpr,
    EXACT: gl.constexpr,
    STEPS: gl.constexpr,  # of a segment, if there are boundaries
    AHEAD: gl.constexpr,
    LANES: gl.constexpr,
    BLOCK_C: gl.constexpr,
    BLOCK_PARTS: gl.constexpr,
):
    """Scan alpha of a sequence, or beta.

    With boundaries, scan a segment between states that are known, and store it.
    """
    batch = Batch(*batch)
    WARPS: gl.constexpr = gl.num_warps()
    OUTS: gl.constexpr = BLOCK_C * LANES // (32 * WARPS)
    PER: gl.constexpr = 2 if BLOCK_C >= 2 * LANES else 1
    PAIRS: gl.constexpr = gl.BlockedLayout([PER, OUTS], [LANES, 32 // LANES], [1, WARPS], [1, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, PAIRS)
    IN: gl.constexpr = gl.SliceLayout(1, PAIRS)
    T, N, C = batch.T, batch.N, batch.C
    segment, rest = gl.program_id(0) % segments, gl.program_id(0) // segments
    direction, n = rest % 2, (rest // 2).to(gl.int64)
    is_linear, shift = linear_range(*load_range(saved.span, n, BLOCK_PARTS))
    if is_linear:
        is_alpha = direction == 0
        tokens, _ = load_length(batch.lengths, n, T, 1, 1)
        low, num_steps = tokens * 0, scan_steps(tokens, is_alpha, SAVE)
        high = tokens - 1
        if boundaries_ptr is not None:
            low = gl.minimum(segment * STEPS, tokens - 1)
            high = gl.minimum(low + STEPS, tokens - 1)
            num_steps = high - low
        t = gl.where(is_alpha, low, high).to(gl.int64)
        dt = gl.where(is_alpha, 1, -1).to(gl.int64)
        c = gl.arange(0, BLOCK_C, OUT)
        start = load_end(batch.start, n, c, C)
        end = load_end(batch.end, n, c, C)
        r = gl.expand_dims(gl.arange(0, BLOCK_C, IN), 1).to(gl.int64)
        o = gl.expand_dims(c, 0).to(gl.int64)
        stride_k, stride_c = transitions.k, transitions.c
        at = gl.where(is_alpha, r * stride_k + o * stride_c, o * stride_k + r * stride_c)
        matrix_ptr = transitions.ptr + n * transitions.n
        matrix = gl.load(matrix_ptr + at, mask=(r < C) & (o < C), other=-float("inf"))
        matrix = gl.exp(matrix.to(gl.float64) - shift)
        emissions = batch.emissions
        score_ptr = emissions.ptr + n * emissions.n + t * emissions.t
        score_ptr += c.to(gl.int64) * emissions.c
        token_ptr = saved.maxima + t * N + n
        at, row = state_offset(direction, t, n, T, N, C, SAVE)
        state_ptr = saved.states + at + c
        # The scale of a step is stored at the later one of its tokens.
        scale_ptr = saved.scales + (t + direction) * N + n
        next_t, next_m, next_s = dt * emissions.t, dt * N, dt * row
        first, maxima = load_rows(score_ptr, token_ptr, 0, 0, next_t, next_m, c, C, 1)
        maximum = gl.where(maxima[0] == -float("inf"), 0.0, maxima[0])
        score = fold_ends(first[0], t, tokens, start, end) - maximum
        x, y = exp_split(score, EXACT), c.to(gl.float64) * 0.0 + 1.0
        if boundaries_ptr is not None:
            known = (direction * N + n) * (segments + 1) + segment + gl.where(is_alpha, 0, 1)
            y = gl.load(boundaries_ptr + known * C + c, mask=c < C, other=0.0)
            x = gl.where(is_alpha, y, y * x)
        is_stored = (t == gl.where(is_alpha, 0, tokens - 1)) & (c < C)
        gl.store(state_ptr, gl.where(is_alpha, x, y), mask=is_stored)
        exponent = gl.to_tensor(0)
        scores, maxima = load_rows(score_ptr, token_ptr, 1, num_steps, next_t, next_m, c, C, AHEAD)
        for i in range(1, num_steps + 1, AHEAD):
            next_scores, next_maxima = load_rows(
                score_ptr, token_ptr, i + AHEAD, num_steps, next_t, next_m, c, C, AHEAD
            )
            for j in gl.static_range(AHEAD):
                active, step = i + j <= num_steps, gl.to_tensor(i + j).to(gl.int64)
                maximum = gl.where(maxima[j] == -float("inf"), 0.0, maxima[j])
                score = fold_ends(scores[j], t + step * dt, tokens, start, end) - maximum
                y, removed = resident_step(matrix, x, LANES, OUT, IN)
                x = gl.where(active, y * exp_split(score, EXACT), x)
                exponent = gl.where(active, removed, exponent)
                state = gl.where(is_alpha, x, y)
                gl.store(state_ptr + step * next_s, state, mask=(c < C) & active)
                mask = active & (is_alpha | (not SAVE))
                gl.store(scale_ptr + step * next_m, removed.to(gl.float64), mask=mask)
            scores, maxima = next_scores, next_maxima
        if boundaries_ptr is not None:
            if is_alpha & (num_steps > 0):
                # The next segment starts from the known state, whose power of two may be another.
                known = n * (segments + 1) + segment + 1
                given = gl.load(boundaries_ptr + known * C + c, mask=c < C, other=0.0)
                ratio = gl.log2(gl.sum(x, axis=0) / gl.sum(given, axis=0))
                last = num_steps.to(gl.int64)
                gl.store(state_ptr + last * next_s, given, mask=c < C)
                gl.store(scale_ptr + last * next_m, exponent.to(gl.float64) + ratio)
