"""Alpha and beta of dense linear chains whose transitions fit into the registers of one program.

One program scans alpha of a sequence, and another scans beta at the same time. A state x of alpha
includes the emission of its token, and y does not:

    y[t, c] = sum over k: x[t - 1, k] * exp(transitions[k, c]),   x[t, c] = y[t, c] * exp(e[t, c]).

Beta runs in the other direction over the transposed transitions. Alpha is stored as x and beta as
y, so their product is the posterior of a state times a factor of the token. The emissions e are
relative to each token's maximum, and the transitions to theirs.

Each step is scaled by a power of two that the state before it gives, so that finding it takes no
time between steps. The exponent is stored for the gradient: see `marginals.py`.

Source: Rabiner, A tutorial on hidden Markov models, 1989, with a power of two for the scale.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .scores import (
    LN2_FP64,
    exp_sum_term,
    exponent_of,
    fold_ends,
    load_end,
    load_tokens,
    power_of_2,
    relative_emission,
    transition_range,
)


@triton.jit
def load_matrix(ptr, C, stride_r, stride_o, shift, IS_LOG: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return the transitions of a scan, or with strides exchanged, the transposed ones.

    A linear scan gets exp(transitions - shift) in fp64. The states that a step leaves are along
    axis FROM. Triton does not know which of the strides is 1, and divides axis 0 among the threads
    of a warp. So a thread enters one state, and few threads share the sum over those that it
    leaves. The smallest matrices have no more elements than threads, so this order does not matter
    to them, but with the other one their sums have the layout of vectors.
    """
    FROM: tl.constexpr = 1 if BLOCK_C > 4 else 0
    r = tl.expand_dims(tl.arange(0, BLOCK_C), 1 - FROM)
    o = tl.expand_dims(tl.arange(0, BLOCK_C), FROM)
    at = r.to(tl.int64) * stride_r + o.to(tl.int64) * stride_o
    scores = tl.load(ptr + at, mask=(r < C) & (o < C), other=-float("inf"))
    if IS_LOG:
        return scores
    else:
        return tl.exp(scores.to(tl.float64) - shift)


@triton.jit
def chain_step(matrix, x, EXACT: tl.constexpr, IS_LOG: tl.constexpr):
    """Take a state through the transitions, and return it with the exponent or offset removed."""
    FROM: tl.constexpr = 1 if x.shape[0] > 4 else 0  # as in `load_matrix`
    if IS_LOG:
        terms = matrix.to(tl.float64) + tl.expand_dims(x, 1 - FROM)
        maximum = finite_shift(tl.max(terms, axis=FROM))
        total = tl.sum(exp_sum_term(terms - tl.expand_dims(maximum, FROM), EXACT), axis=FROM)
        offset = finite_shift(tl.max(x, axis=0))
        return tl.log(total) + (maximum - offset), offset
    else:
        exponent = exponent_of(tl.max(x, axis=0))
        y = tl.sum(matrix * tl.expand_dims(x, 1 - FROM), axis=FROM)
        return y * power_of_2(-exponent), exponent.to(tl.float64)


@triton.jit
def log_sum(x, IS_LOG: tl.constexpr):
    """Return the logarithm of the sum over states."""
    if IS_LOG:
        maximum = finite_shift(tl.max(x, axis=0))
        return tl.log(tl.sum(tl.exp(x - maximum), axis=0)) + maximum
    else:
        return tl.log(tl.sum(x, axis=0))


@triton.jit
def with_emission(y, emission, IS_LOG: tl.constexpr):
    """Return states with the emission of their token."""
    if IS_LOG:
        return y + emission
    else:
        return y * emission


@triton.jit
def load_ahead(inputs, interval, i, AHEAD: tl.constexpr, BLOCK_C: tl.constexpr):
    """Load the emissions and maxima of the AHEAD steps from step i, before the first is used.

    Without an address of the maxima these are 0.
    """
    score_ptr, maxima_ptr, C, N, stride_t, stride_c = inputs
    t, dt, num_steps = interval
    c = tl.arange(0, BLOCK_C)
    scores, maxima = (), ()
    for j in tl.static_range(AHEAD):
        row = tl.full([], t, tl.int64) + (i + j) * dt
        inside = i + j <= num_steps
        at = row * stride_t + c.to(tl.int64) * stride_c
        scores = scores + (tl.load(score_ptr + at, mask=(c < C) & inside, other=-float("inf")),)
        if maxima_ptr is None:
            maxima = maxima + (tl.full([], 0.0, tl.float64),)
        else:
            maxima = maxima + (tl.load(maxima_ptr + row * N, mask=inside, other=0.0),)
    return scores, maxima


@triton.jit
def maximum_of_token(maxima_ptr, loaded, score, active):
    """Return the maximum of a token, which was loaded unless there is no address of the maxima."""
    if maxima_ptr is None:
        return tl.where(active, tl.max(score, axis=0), 0.0)
    else:
        return loaded


@triton.jit
def first_emission(
    inputs, ends, t, EXACT: tl.constexpr, IS_LOG: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Return the emissions of token t, and their maximum."""
    scores, maxima = load_ahead(inputs, (t, 0, 0), 0, 1, BLOCK_C)
    tokens, start, end = ends
    score = fold_ends(scores[0], t, tokens, start, end)
    maximum = maximum_of_token(inputs[1], maxima[0], score, True)
    return relative_emission(score, maximum, EXACT, IS_LOG), maximum


@triton.jit
def scan_steps(
    inputs,  # (emissions of the sequence, maxima of the sequence, C, N, stride_t, stride_c)
    transitions,  # (address, or of the sequence, stride_t, stride of the reduced states, of others)
    ends,  # (tokens, start [BLOCK_C], end [BLOCK_C])
    interval,  # (first token, 1 for alpha or -1 for beta, number of steps)
    results,  # (address of the states of the first token, of the scales, of maxima or None)
    x,  # [BLOCK_C] fp64, the state of the first token with its emission
    shift,  # the greatest transition
    IS_LOG: tl.constexpr,
    CONSTANT: tl.constexpr,
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Take the steps of a scan, and store the states.

    Returns:
        The last state, the sum of the maxima of the tokens after the first, and that of the scales.
    """
    C, N = inputs[2], inputs[3]
    transitions_ptr, trans_t, stride_r, stride_o = transitions
    tokens, start, end = ends
    t, dt, num_steps = interval
    states_ptr, scales_ptr, new_maxima_ptr = results
    c = tl.arange(0, BLOCK_C)
    if CONSTANT:
        matrix = load_matrix(transitions_ptr, C, stride_r, stride_o, shift, IS_LOG, BLOCK_C)
    total, scale_sum = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
    scores, maxima = load_ahead(inputs, interval, 1, AHEAD, BLOCK_C)
    for first in range(1, num_steps + 1, AHEAD):
        next_scores, next_maxima = load_ahead(inputs, interval, first + AHEAD, AHEAD, BLOCK_C)
        for j in tl.static_range(AHEAD):
            active = first + j <= num_steps
            row = tl.full([], t, tl.int64) + (first + j) * dt
            score = fold_ends(scores[j], row, tokens, start, end)
            maximum = maximum_of_token(inputs[1], maxima[j], score, active)
            emission = relative_emission(score, maximum, EXACT, IS_LOG)
            if not CONSTANT:
                entered = tl.where(active, tl.where(dt > 0, row - 1, row), 0)
                step_ptr = transitions_ptr + entered * trans_t
                matrix = load_matrix(step_ptr, C, stride_r, stride_o, shift, IS_LOG, BLOCK_C)
            y, scale = chain_step(matrix, x, EXACT, IS_LOG)
            x = tl.where(active, with_emission(y, emission, IS_LOG), x)
            total += maximum
            scale_sum += tl.where(active, scale, 0.0)
            if SAVE:
                state = tl.where(dt > 0, x, y)
                tl.store(states_ptr + row * N * C + c, state, mask=(c < C) & active)
                tl.store(scales_ptr + row * N, scale, mask=active & (dt > 0))
                if new_maxima_ptr is not None:
                    tl.store(new_maxima_ptr + row * N, maximum, mask=active & (dt > 0))
        scores, maxima = next_scores, next_maxima
    return x, total, scale_sum


@triton.jit
def scan_sequence(
    chain,  # (addresses of emissions, transitions, start, end, lengths)
    stored,  # (addresses of maxima to read and to write, each or None, states, scales)
    results,  # (addresses of log Z and of log Z in the dtype of results)
    sizes,  # (T, N, C)
    strides,  # (of emissions, transitions, start, end: all of their dimensions)
    shift,  # the greatest transition
    IS_LOG: tl.constexpr,
    CONSTANT: tl.constexpr,
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Scan alpha of a sequence and compute log Z, or with SAVE in every other program scan beta."""
    emissions_ptr, transitions_ptr, start_ptr, end_ptr, lengths_ptr = chain
    maxima_ptr, new_maxima_ptr, states_ptr, scales_ptr = stored
    T, N, C = sizes
    stride_t, stride_n, stride_c, trans_t, trans_n, trans_k, trans_c = strides[:7]
    start_n, start_c, end_n, end_c = strides[7:]
    is_alpha = tl.program_id(0) % 2 == 0 if SAVE else tl.program_id(0) >= 0
    n = (tl.program_id(0) // 2 if SAVE else tl.program_id(0)).to(tl.int64)
    c, rows = tl.arange(0, BLOCK_C), tl.full([], T, tl.int64) * N
    tokens, invalid = load_tokens(lengths_ptr, n, T)
    start = load_end(start_ptr, n, c, C, start_n, start_c)
    end = load_end(end_ptr, n, c, C, end_n, end_c)
    ends = (tokens, start, end)
    if maxima_ptr is not None:
        maxima_ptr += n
    inputs = (emissions_ptr + n * stride_n, maxima_ptr, C, N, stride_t, stride_c)
    t = tl.where(is_alpha, 0, tokens - 1)
    emission, maximum = first_emission(inputs, ends, t, EXACT, IS_LOG, BLOCK_C)
    y = tl.full([BLOCK_C], 0.0 if IS_LOG else 1.0, tl.float64)
    x = with_emission(y, emission, IS_LOG)
    if SAVE:
        states_ptr += tl.where(is_alpha, n, rows + n) * C
        scales_ptr += n
        at = states_ptr + tl.full([], t, tl.int64) * N * C + c
        tl.store(at, tl.where(is_alpha, x, y), mask=c < C)
        if new_maxima_ptr is not None:
            new_maxima_ptr += n
            tl.store(new_maxima_ptr, maximum, mask=is_alpha)
    stride_r = tl.where(is_alpha, trans_k, trans_c)
    stride_o = tl.where(is_alpha, trans_c, trans_k)
    x, total, scale_sum = scan_steps(
        inputs,
        (transitions_ptr + n * trans_n, trans_t, stride_r, stride_o),
        ends,
        (t, tl.where(is_alpha, 1, -1), tokens - 1),
        (states_ptr, scales_ptr, new_maxima_ptr),
        x,
        shift,
        IS_LOG,
        CONSTANT,
        SAVE,
        EXACT,
        AHEAD,
        BLOCK_C,
    )
    if is_alpha:
        if not IS_LOG:
            scale_sum = scale_sum * LN2_FP64 + shift * (tokens - 1)
        logz = maximum + total + scale_sum + log_sum(x, IS_LOG) + invalid
        tl.store(results[0] + n, logz)
        tl.store(results[1] + n, logz.to(results[1].dtype.element_ty))


@triton.jit
def linear_chain_scan_kernel(
    emissions_ptr,  # [T, N, C]
    transitions_ptr,  # [C, C], or [T - 1, N, C, C] unless CONSTANT
    start_ptr,  # [N, C] or None
    end_ptr,  # [N, C] or None
    lengths_ptr,  # [N] or None
    range_ptr,  # [parts, 2] fp64
    maxima_ptr,  # [T, N] fp64
    states_ptr,  # [2, T, N, C] fp64: alpha and beta, if SAVE
    scales_ptr,  # [T, N] fp64: the exponents or offsets of alpha, if SAVE
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results
    T,
    N,
    C,
    parts,
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
    IS_LOG: tl.constexpr,
    CONSTANT: tl.constexpr,
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Scan a sequence in one direction, if the transitions are for this arithmetic."""
    is_linear, shift = transition_range(range_ptr, parts, BLOCK_PARTS)
    if is_linear != IS_LOG:
        strides = (stride_t, stride_n, stride_c, trans_t, trans_n, trans_k, trans_c)
        strides = strides + (start_n, start_c, end_n, end_c)
        scan_sequence(
            (emissions_ptr, transitions_ptr, start_ptr, end_ptr, lengths_ptr),
            (maxima_ptr, None, states_ptr, scales_ptr),
            (logz_ptr, rounded_ptr),
            (T, N, C),
            strides,
            shift,
            IS_LOG,
            CONSTANT,
            SAVE,
            EXACT,
            AHEAD,
            BLOCK_C,
        )
