"""Samples of paths of dense linear chains: backward in time from alpha.

The state before a state c is drawn in proportion to alpha[t - 1, k] * exp(transitions[k, c]). The
index drawn is the number of cumulative weights that do not exceed uniform * total.

Given the uniform numbers, the state drawn before each state is a map of states to states. For few
states all maps are formed at the same time, and paths are traced through them parallel in time.

Source: Carter and Kohn, On Gibbs sampling for state space models, 1994.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from ....primitives.gpu.memory import load_length
from .lanes import lane_index
from .scores import transition_range


@triton.jit
def linear_chain_sample_kernel(
    transitions,  # StridedSteps
    lengths_ptr,  # [N] or None
    span,  # Span
    alpha_ptr,  # [T, N, C] fp64
    logz_ptr,  # [N] fp64
    uniforms,  # StridedUniforms
    states_ptr,  # [samples, T, N] int64
    T,
    N,
    C,
    samples,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Draw one path of a sequence."""
    is_linear, shift = transition_range(span, 0, BLOCK_PARTS)
    sample, n = (tl.program_id(0) % samples).to(tl.int64), tl.program_id(0) // samples
    n = n.to(tl.int64)
    tokens, _ = load_length(lengths_ptr, n, T, 1, 1)
    has_path = tl.load(logz_ptr + n) > -float("inf")
    k = tl.arange(0, BLOCK_C)
    other = tl.where(is_linear, 0.0, -float("inf"))
    from_ptr = transitions.ptr + n * transitions.n + k.to(tl.int64) * transitions.k
    uniforms_ptr = uniforms.ptr + (sample * uniforms.s + n * uniforms.n)
    states_ptr += sample * T * N + n
    state = tl.full([], 0, tl.int32)
    for i in range(0, T):
        t = tl.full([], T - 1 - i, tl.int64)
        active = t < tokens
        at = (t * N + n) * C + k
        weights = tl.load(alpha_ptr + at, mask=(k < C) & active, other=other)
        uniform = tl.load(uniforms_ptr + t * uniforms.t)
        step = tl.where(t < tokens - 1, t * transitions.t + state.to(tl.int64) * transitions.c, 0)
        mask = (k < C) & (t < tokens - 1)
        scores = tl.load(from_ptr + step, mask=mask, other=0.0).to(tl.float64)
        if is_linear:
            weights *= tl.where(mask, tl.exp(scores - shift), 1.0)
        else:
            weights += scores
            weights = tl.exp(weights - finite_shift(tl.max(weights, axis=0)))
        cumulative = tl.cumsum(weights, axis=0)
        total = tl.max(cumulative, axis=0)
        index = tl.sum((cumulative <= uniform * total).to(tl.int32), axis=0)
        # A product that rounds up to the total would pass the last index with a positive weight.
        index = tl.minimum(index, tl.max(tl.where(weights > 0.0, k, 0), axis=0))
        state = tl.where(active, index, state)
        value = tl.where(active & has_path, state, -1).to(tl.int64)
        tl.store(states_ptr + t * N, value)


@triton.jit
def lane_draw(alpha, table_ptr, c, is_last, uniform, C: tl.constexpr, IS_LOG: tl.constexpr):
    """Draw the state before a state c, or the state of the last token, in each lane."""
    terms, weights = (), ()
    for k in tl.static_range(C):
        step = tl.load(table_ptr + k * C + c)
        if IS_LOG:
            terms += (alpha[k] + tl.where(is_last, 0.0, step),)
        else:
            weights += (alpha[k] * tl.where(is_last, 1.0, step),)
    if IS_LOG:
        maximum = alpha[0] - float("inf")
        for k in tl.static_range(C):
            maximum = tl.maximum(maximum, terms[k])
        for k in tl.static_range(C):
            weights += (tl.exp(terms[k] - finite_shift(maximum)),)
    total, cumulative = weights[0], (weights[0],)  # type: ignore[misc]
    for k in tl.static_range(1, C):
        total += weights[k]
        cumulative += (total,)
    index, last = tl.zeros(uniform.shape, tl.int32), tl.zeros(uniform.shape, tl.int32)
    for k in tl.static_range(C):
        index += (cumulative[k] <= uniform * total).to(tl.int32)
        last = tl.where(weights[k] > 0.0, k, last)
    # A product that rounds up to the total would pass the last index with a positive weight.
    return tl.minimum(index, last)


@triton.jit
def linear_chain_sample_words_kernel(
    alpha_ptr,  # [T, N, C] fp64
    table_ptr,  # [C, C] fp64: transitions with IS_LOG, or exp of them
    lengths_ptr,  # [N] or None
    span,  # Span
    uniforms,  # StridedUniforms
    words_ptr,  # [samples, N, T] int64, see best_segments.py
    T,
    N,
    columns,
    C: tl.constexpr,
    IS_LOG: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Draw the state at a token for each state at the next one, in one lane."""
    if transition_range(span, 0, BLOCK_PARTS)[0] != IS_LOG:
        lane = lane_index(tl.program_id(0), tl.full([], columns, tl.int64) * T, LANES)
        column, t = lane // T, lane % T
        sample, n = column // N, column % N
        tokens, _ = load_length(lengths_ptr, n, T, 1, 1)
        at = t * uniforms.t + sample * uniforms.s + n * uniforms.n
        uniform, is_last = tl.load(uniforms.ptr + at), t == tokens - 1
        alpha = ()
        for k in tl.static_range(C):
            # Past the length there are no states, and no state is read.
            at = (t * N + n) * C + k
            alpha += (tl.load(alpha_ptr + at, mask=t < tokens, other=0.0),)
        word = tl.zeros([LANES], tl.int64)
        for c in range(0, C):
            index = lane_draw(alpha, table_ptr, c, is_last, uniform, C, IS_LOG)
            word = word | (index.to(tl.int64) << (4 * c))
        tl.store(words_ptr + lane, word)
