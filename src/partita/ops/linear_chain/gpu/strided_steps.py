"""Steps of dense chains of many states on NVIDIA GPUs, without a pass through shared memory.

A thread sums over every 32nd state for a few sequences and a few states that it enters, and its
operands come straight from memory, where the weights [other state, summed state] have the summed
states side by side. See `steps.py` for the rest.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .arguments import Batch
from .resident import linear_range, load_range
from .scores import exponent_of, power_of_2
from .steps import Step, enter_tokens, load_scores, load_tokens_of, relative_scores


@gluon.jit(do_not_specialize=["i"])
def linear_chain_strided_step_kernel(
    batch,  # Batch
    weights_ptr,  # [2, C, C] fp64
    saved,  # Saved: states if SAVE and scales are written
    recent_ptr,  # [2, 2, N, C] fp64: the last two states of alpha and beta, with emissions
    i,
    SAVE: gl.constexpr,
    EXACT: gl.constexpr,
    UNROLL: gl.constexpr,
    BLOCK_PARTS: gl.constexpr,
):
    """Take step i of alpha, and of beta with SAVE, for 16 sequences and 8 states."""
    batch = Batch(*batch)
    LAYOUT: gl.constexpr = gl.BlockedLayout([4, 4, 1], [1, 1, 32], [4, 2, 1], [2, 1, 0])
    SUMS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    STATES: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    WEIGHTS: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    T, N, C = batch.T, batch.N, batch.C
    blocks_c = gl.cdiv(C, 8)
    c0, rest = gl.program_id(0) % blocks_c * 8, gl.program_id(0) // blocks_c
    direction = rest % 2 if SAVE else rest * 0
    n0 = (rest // 2 if SAVE else rest) * 16
    is_alpha = direction == 0
    row = gl.to_tensor(N).to(gl.int64) * C
    before_ptr = recent_ptr + (direction * 2 + (i + 1) % 2) * row
    after_ptr = recent_ptr + (direction * 2 + i % 2) * row
    n = n0 + gl.arange(0, 16, gl.SliceLayout(1, SUMS)).to(gl.int64)
    c = c0 + gl.arange(0, 8, gl.SliceLayout(0, SUMS))
    tokens = load_tokens_of(batch.lengths, n, N, T)
    t = gl.minimum(gl.maximum(gl.where(is_alpha, i, tokens - 1 - i), 0), T - 1)
    # What these loads bring is used after the sums, which need not wait for them. A branch on the
    # range would wait, so the sums are taken in any case, and elsewhere no sequence is stored.
    scores = load_scores(batch, saved.maxima, Step(i, is_alpha, t, n, tokens, c))
    greatest, least = load_range(saved.span, BLOCK_PARTS)
    y = gl.full([16, 8], 1.0, gl.float64, SUMS)
    scale = gl.zeros([16], gl.float64, gl.SliceLayout(1, SUMS))
    if i > 0:
        side_ptr = weights_ptr + (1 - direction) * gl.to_tensor(C).to(gl.int64) * C
        row_n = n0 + gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(1, STATES)), 1).to(gl.int64)
        row_c = c0 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, WEIGHTS)), 1).to(gl.int64)
        k = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, STATES)), 0)
        j = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, WEIGHTS)), 0)
        total = gl.zeros([16, 8, 32], gl.float64, LAYOUT)
        maxima = gl.zeros([16, 32], gl.float64, STATES)
        state_ptr = before_ptr + row_n * C + k
        side_ptr = side_ptr + row_c * C + j
        for k0 in range(0, C, 32 * UNROLL):
            states, weights = (), ()
            for u in gl.static_range(UNROLL):
                first = k0 + 32 * u
                mask = (row_n < N) & (first + k < C)
                states += (gl.load(state_ptr + first, mask=mask, other=0.0),)
                mask = (row_c < C) & (first + j < C)
                weights += (gl.load(side_ptr + first, mask=mask, other=0.0),)
            for u in gl.static_range(UNROLL):
                maxima = gl.maximum(maxima, states[u])
                total += gl.expand_dims(states[u], 1) * gl.expand_dims(weights[u], 0)
        y, maximum = gl.sum(total, axis=2), gl.max(maxima, axis=1)
        exponent = exponent_of(gl.convert_layout(maximum, gl.SliceLayout(1, SUMS)))
        y *= gl.expand_dims(power_of_2(-exponent), 1)
        scale = exponent.to(gl.float64)
    emission = relative_scores(batch, scores, EXACT)
    states_ptr = saved.states + direction * row * T
    n = gl.where(linear_range(greatest, least)[0], n, N)
    step = Step(i, is_alpha, t, n, tokens, c)
    enter_tokens(
        before_ptr, after_ptr, states_ptr, saved.scales, batch, step, y, emission, scale, SAVE
    )
