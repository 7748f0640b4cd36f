"""Scans of few long sequences, parallel in time: sums of paths, or with MAX_PLUS best paths.

The steps of a segment are one operator M on states: alpha after it is alpha before it times M, and
beta before it is M times beta after it. Each row of M has a power of two of its own, since rows may
differ by more than fp64 holds. In max-plus arithmetic a sum is a maximum, a product is a sum, and
no number is scaled, so scores that are integers stay exact.

First the operators of all segments are formed at the same time, then those of groups of segments.
One program scans the groups in either direction, others the segments inside of each group, and then
all states at the boundaries of segments are known. Here are operators of 9 to 16 states, and what
all scans share. Lanes form those of fewer states, see `lanes.py`, and in max-plus arithmetic those
of 9 to 16 states are in `best_segments.py`.

Source: Särkkä and García-Fernández, Temporal parallelization of Bayesian smoothers, 2021.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from ....primitives.gpu.memory import load_length, load_matrix
from .arguments import Batch
from .scores import (
    LN2_FP64,
    exp_split,
    exponent_of,
    fold_ends,
    load_end,
    load_rows,
    loaded_to_fp64,
    power_of_2,
    transition_range,
)


@triton.jit
def identity(BLOCK_C: tl.constexpr):
    """Return the operator of no step."""
    k, c = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    return tl.where(k == c, 1.0, 0.0).to(tl.float64)


@triton.jit
def store_operator(operators, at, matrix, exponents, total, C, BLOCK_C: tl.constexpr):
    """Store an operator, the exponents of its rows, and its offset."""
    k, c = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_C)
    mask = (k < C)[:, None] & (c < C)[None, :]
    tl.store(operators.matrices + at * C * C + k[:, None] * C + c[None, :], matrix, mask=mask)
    tl.store(operators.exponents + at * C + k, exponents, mask=k < C)
    tl.store(operators.offsets + at, total)


@triton.jit
def scaled_exponents(exponents):
    """Return factors 2**(exponents - greatest), and the greatest exponent."""
    greatest = tl.max(exponents, axis=0)
    return power_of_2(tl.maximum(exponents - greatest, -1022.0).to(tl.int32)), greatest


@triton.jit
def load_operator(operators, at, C, step_k, step_c, BLOCK_C: tl.constexpr):
    """Return an operator [summed state, other state], the exponents of its rows, and its offset."""
    c, matrix_ptr = tl.arange(0, BLOCK_C), operators.matrices + at * C * C
    if operators.exponents is None:
        matrix = load_matrix(matrix_ptr, C, step_k, step_c, BLOCK_C, -float("inf"))
        exponents = tl.zeros([BLOCK_C], tl.float64)
    else:
        matrix = load_matrix(matrix_ptr, C, step_k, step_c, BLOCK_C, 0.0)
        exponents = tl.load(operators.exponents + at * C + c, mask=c < C, other=-float("inf"))
    return matrix, exponents, tl.load(operators.offsets + at)


@triton.jit
def linear_chain_operators_kernel(
    batch,  # Batch, without start
    transitions,  # StridedSteps
    span,  # Span
    maxima_ptr,  # [T, N] fp64
    operators,  # Operators, written
    segments,
    STEPS: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Form the operator of a segment."""
    batch = Batch(*batch)
    T, N, C, emissions = batch.T, batch.N, batch.C, batch.emissions
    n, segment = (tl.program_id(0) // segments).to(tl.int64), tl.program_id(0) % segments
    is_linear, shift = transition_range(span, n, BLOCK_PARTS)
    if is_linear:
        tokens, _ = load_length(batch.lengths, n, T, 1, 1)
        c = tl.arange(0, BLOCK_C)
        end = loaded_to_fp64(load_end(batch.end, n, c, C))
        low = tl.minimum(segment * STEPS, tokens - 1)
        num_steps = tl.minimum(STEPS, tokens - 1 - low)
        matrix_ptr = transitions.ptr + n * transitions.n
        weights = load_matrix(matrix_ptr, C, transitions.k, transitions.c, BLOCK_C, -float("inf"))
        weights = tl.exp(loaded_to_fp64(weights) - shift)
        matrix, exponents = identity(BLOCK_C), tl.zeros([BLOCK_C], tl.float64)
        total = shift * num_steps
        start_at = tl.cast(low, tl.int64)
        score_ptr = emissions.ptr + n * emissions.n + start_at * emissions.t
        score_ptr += c.to(tl.int64) * emissions.c
        inputs = (score_ptr, maxima_ptr + start_at * N + n)
        for first in range(1, num_steps + 1, AHEAD):
            scores, maxima = load_rows(*inputs, first, num_steps, emissions.t, N, c, C, AHEAD)
            for j in tl.static_range(AHEAD):
                t, inside = low + first + j, first + j <= num_steps
                score = fold_ends(loaded_to_fp64(scores[j]), t, tokens, end, end)
                score -= finite_shift(maxima[j])
                removed = exponent_of(tl.max(matrix, axis=1))
                after = tl.dot(matrix, weights, out_dtype=tl.float64)
                after *= exp_split(score, EXACT)[None, :] * power_of_2(-removed)[:, None]
                matrix = tl.where(inside, after, matrix)
                exponents += tl.where(inside, removed.to(tl.float64), 0.0)
                total += maxima[j]
        at = n * segments + segment
        store_operator(operators, at, matrix, exponents, total, C, BLOCK_C)


@triton.jit
def linear_chain_group_operators_kernel(
    span,  # Span
    operators,  # Operators of segments
    group_operators,  # Operators of groups, written
    C,
    segments,
    groups,
    SIZE: tl.constexpr,  # segments in a group
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Form the operator of a group of segments, the product of theirs."""
    n, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    if transition_range(span, n, BLOCK_PARTS)[0]:
        matrix, exponents = identity(BLOCK_C), tl.zeros([BLOCK_C], tl.float64)
        total = tl.full([], 0.0, tl.float64)
        last = tl.minimum((group + 1) * SIZE, segments) - 1
        at = n * segments + group * SIZE
        step, powers, offset = load_operator(operators, at, C, C, 1, BLOCK_C)
        for segment in range(group * SIZE, last + 1):
            # The next operator is loaded while this one is used.
            at = n * segments + tl.minimum(segment + 1, last)
            next_step, next_powers, next_offset = load_operator(operators, at, C, C, 1, BLOCK_C)
            factors, greatest = scaled_exponents(powers)
            removed = exponent_of(tl.max(matrix, axis=1))
            after = tl.dot(matrix, step * factors[:, None], out_dtype=tl.float64)
            matrix = after * power_of_2(-removed)[:, None]
            exponents += removed.to(tl.float64) + greatest
            total += offset
            step, powers, offset = next_step, next_powers, next_offset
        at = n * groups + group
        store_operator(group_operators, at, matrix, exponents, total, C, BLOCK_C)


@triton.jit
def linear_chain_boundaries_kernel(
    batch,  # Batch
    transitions,  # StridedSteps, which are read with MAX_PLUS
    span,  # Span, which counts without MAX_PLUS
    maxima_ptr,  # [T, N] fp64, or None with MAX_PLUS
    operators,  # Operators
    known_ptr,  # [DIRECTIONS, N, groups + 1, C] fp64, states between groups, or None for one group
    boundaries_ptr,  # [DIRECTIONS, N, segments + 1, C] fp64
    logz_ptr,  # [N] fp64, if known is None; or None with MAX_PLUS
    rounded_ptr,  # [N] log Z or the best score, if known is None
    last_ptr,  # [N] int32 with MAX_PLUS, the last state of the best path or -1, if known is None
    segments,
    groups,
    SIZE: tl.constexpr,
    DIRECTIONS: tl.constexpr,  # 2, or 1 for alpha alone
    EXACT: tl.constexpr,
    MAX_PLUS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Scan alpha or beta over the operators of a group, and compute log Z if there is one group."""
    batch = Batch(*batch)
    T, N, C, emissions = batch.T, batch.N, batch.C, batch.emissions
    group, rest = tl.program_id(0) % groups, tl.program_id(0) // groups
    n, direction = (rest // DIRECTIONS).to(tl.int64), rest % DIRECTIONS
    if transition_range(span, n, BLOCK_PARTS, MAX_PLUS)[0]:
        is_alpha, c = direction == 0, tl.arange(0, BLOCK_C)
        tokens, invalid = load_length(batch.lengths, n, T, 1, 1)
        first, last = group * SIZE, tl.minimum((group + 1) * SIZE, segments)
        total, powers = tl.full([], 0.0, tl.float64), tl.full([], 0.0, tl.float64)
        if known_ptr is None:
            score_ptr = emissions.ptr + n * emissions.n + c.to(tl.int64) * emissions.c
            score = tl.load(score_ptr, mask=c < C, other=-float("inf"))
            start, end = load_end(batch.start, n, c, C), load_end(batch.end, n, c, C)
            x = fold_ends(score, 0, tokens, start, end)
            if MAX_PLUS:
                # No comparison finds a NaN of the first state.
                is_nan = tl.max((x != x).to(tl.int32), axis=0) > 0
                total = tl.where(is_nan, float("nan"), total)
            else:
                total = tl.load(maxima_ptr + n)
                x = exp_split(x - finite_shift(total), EXACT)
                x = tl.where(is_alpha, x, tl.where(c < C, 1.0, 0.0))
        else:
            state = (direction * N + n) * (groups + 1) + group + direction
            other = -float("inf") if MAX_PLUS else 0.0
            x = tl.load(known_ptr + state * C + c, mask=c < C, other=other)
        row_ptr = boundaries_ptr + (direction * N + n) * (segments + 1) * C + c
        step_k, step_c = tl.where(is_alpha, C, 1), tl.where(is_alpha, 1, C)
        at = n * segments + tl.where(is_alpha, first, last - 1)
        step, exponents, offset = load_operator(operators, at, C, step_k, step_c, BLOCK_C)
        for i in range(0, last - first):
            segment = tl.where(is_alpha, first + i, last - 1 - i)
            tl.store(row_ptr + (segment + direction) * C, x, mask=c < C)
            # The next operator is loaded while this one is used.
            at = n * segments + tl.where(
                is_alpha, tl.minimum(segment + 1, last - 1), tl.maximum(segment - 1, first)
            )
            next_step, next_exponents, next_offset = load_operator(
                operators, at, C, step_k, step_c, BLOCK_C
            )
            if MAX_PLUS:
                x = tl.max(step + x[:, None], axis=0)
            else:
                factors, greatest = scaled_exponents(exponents)
                removed = exponent_of(tl.max(x, axis=0))
                x = tl.where(is_alpha, x * factors, x)
                y = tl.sum(step * x[:, None], axis=0) * power_of_2(-removed)
                x = tl.where(is_alpha, y, y * factors)
                powers += removed.to(tl.float64) + greatest
            total += offset
            step, exponents, offset = next_step, next_exponents, next_offset
        is_edge = tl.where(is_alpha, last == segments, first == 0)
        tl.store(row_ptr + tl.where(is_alpha, last, first) * C, x, mask=(c < C) & is_edge)
        if known_ptr is None:
            if MAX_PLUS:
                weights = load_matrix(
                    transitions.ptr, C, transitions.k, transitions.c, BLOCK_C, 0.0
                )
                is_nan = tl.max(tl.max((weights != weights).to(tl.int32), axis=0), axis=0) > 0
                total += tl.where(is_nan & (tokens > 1), float("nan"), 0.0)
                greatest = tl.max(x, axis=0)
                best = greatest + total + invalid
                state = tl.min(tl.where(x == greatest, c, BLOCK_C), axis=0)
                tl.store(last_ptr + n, tl.where(best > -float("inf"), state, -1))
                tl.store(rounded_ptr + n, best.to(rounded_ptr.dtype.element_ty))
            elif is_alpha:
                logz = total + powers * LN2_FP64 + tl.log(tl.sum(x, axis=0)) + invalid
                tl.store(logz_ptr + n, logz)
                tl.store(rounded_ptr + n, logz.to(rounded_ptr.dtype.element_ty))
