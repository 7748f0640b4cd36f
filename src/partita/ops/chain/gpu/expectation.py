"""Means over the paths of sparse linear chains: alpha with the mean of the values along the paths.

A path has a value on each of its edges, on its first state and on its last state. The value of the
path is their sum. With the posterior of the edges into a state,

    p[c, k]        = exp(alpha[t, source[c, k]] + scores[t, c, k] - alpha[t + 1, c])
    mean[t + 1, c] = sum over k of p[c, k] * (mean[t, source[c, k]] + values[t, c, k])

is the mean value of the paths that end in c. The mean over all paths weights mean[length, c] +
last_values[c] by the posterior of the final states. This is the expectation semiring; it carries
means and not sums, so that both components stay bounded. One program serves one chain.

Source: Eisner, Parameter estimation for probabilistic finite-state transducers, 2002.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, finite_shift
from .arguments import ChainEdges, StridedEdges
from .steps import (
    edge_score,
    edge_value,
    final_terms,
    from_step,
    load_length,
    load_source,
    shifted_log,
    store_boundary_scores,
)


class StepInputs(NamedTuple):
    """A chain with values, from some step on.

    Fields:
        edge_scores: the scores of the edges.
        edge_values: the values of the edges.
        edges: see `ChainEdges`.
    """

    edge_scores: StridedEdges
    edge_values: StridedEdges
    edges: ChainEdges


class StatesWithMeans(NamedTuple):
    """Alpha or beta of the states, and the mean of the values over the paths to or from each.

    Fields:
        ptr: alpha or beta, `[C]`.
        mean_offset: offset from alpha or beta to the means.
    """

    ptr: tl.tensor
    mean_offset: tl.tensor


@triton.jit
def states_at(states, offset):
    """Return the states at an offset, which is that of another time."""
    return StatesWithMeans(states.ptr + offset, states.mean_offset)


@triton.jit
def load_mean(states, c, valid):
    """Load the means of the states c, 0 where invalid."""
    return tl.load(states.ptr + states.mean_offset + c, mask=valid, other=0.0)


@triton.jit
def store_states(states, c, value, mean, mask):
    """Store alpha or beta of the states c, and their means."""
    tl.store(states.ptr + c, value, mask=mask)
    tl.store(states.ptr + states.mean_offset + c, mean, mask=mask)


@triton.jit
def store_boundary_states(
    states, boundary_ptr, boundary_c, values_ptr, values_c, C, invalid, BLOCK_C: tl.constexpr
):
    """Store the first states of a scan, with `invalid` added to their scores, and their values."""
    store_boundary_scores(states.ptr, boundary_ptr, C, boundary_c, invalid, BLOCK_C)
    means_ptr = states.ptr + states.mean_offset
    store_boundary_scores(means_ptr, values_ptr, C, values_c, 0.0, BLOCK_C)


@triton.jit
def weighted(weight, value):
    """Return weight * value in fp64, with 0 * (±inf) = 0."""
    return tl.where(weight == 0.0, 0.0, weight.to(tl.float64) * value)


@triton.jit
def alpha_mean_step(states, step, c, ACC_DTYPE: tl.constexpr):
    """Compute alpha after a step and the mean of the values over the paths into the states c.

    Each is [BLOCK_C] and fp64.
    """
    scores, values, edges = step
    maximum = tl.full(c.shape, -float("inf"), tl.float64)
    total = tl.zeros(c.shape, ACC_DTYPE)
    mean = tl.zeros(c.shape, tl.float64)
    for k in range(edges.K):
        source, valid = load_source(edges, c, k)
        alpha = tl.load(states.ptr + source, mask=valid, other=-float("inf"))
        maximum = tl.maximum(maximum, alpha + edge_score(scores, c, k, valid))
    shift = finite_shift(maximum)
    for k in range(edges.K):
        source, valid = load_source(edges, c, k)
        alpha = tl.load(states.ptr + source, mask=valid, other=-float("inf"))
        term = alpha + edge_score(scores, c, k, valid)
        value = edge_value(values, c, k, valid, 0.0)
        weight = exp((term - shift).to(ACC_DTYPE))
        total += weight
        mean += weighted(weight, value + load_mean(states, source, valid))
    return shifted_log(shift, total), tl.where(total == 0.0, 0.0, mean / total.to(tl.float64))


@triton.jit
def chain_expectation_kernel(
    scores,  # StridedEdges [T, N, C, K]
    edges,  # ChainEdges
    initial,  # StridedStates [N, C]
    final,  # StridedStates [N, C]
    lengths_ptr,  # [N] or None
    edge_values,  # StridedEdges [T, N, C, K]
    first_values,  # StridedStates [N, C]
    last_values,  # StridedStates [N, C]
    saved,  # StatesWithMeans [T + 1, N, C] fp64, or [2, N, C]
    mean_ptr,  # [N] fp64
    logz_ptr,  # [N] fp64
    T,
    N,
    SAVE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Compute the mean of the values over all paths of a chain, and log Z."""
    n, C = tl.program_id(0).to(tl.int64), edges.C
    length, invalid = load_length(lengths_ptr, n, T)
    row_stride = tl.full([], N, tl.int64) * C
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    edge_values = StridedEdges(edge_values.ptr + n * edge_values.n, *edge_values[1:])
    states = states_at(saved, n * C)
    initial_ptr = initial.ptr + n * initial.n
    first_values_ptr = first_values.ptr + n * first_values.n
    store_boundary_states(
        states, initial_ptr, initial.c, first_values_ptr, first_values.c, C, invalid, BLOCK_C
    )
    for t in range(0, length):
        row, next_row = tl.full([], t, tl.int64), tl.full([], t + 1, tl.int64)
        step = StepInputs(from_step(scores, row), from_step(edge_values, row), edges)
        if not SAVE:
            row, next_row = row % 2, next_row % 2
        before = states_at(states, row * row_stride)
        after = states_at(states, next_row * row_stride)
        tl.debug_barrier()
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            alpha, state_mean = alpha_mean_step(before, step, c, ACC_DTYPE)
            store_states(after, c, alpha, state_mean, c < C)
    tl.debug_barrier()
    last_row = tl.full([], length, tl.int64)
    if not SAVE:
        last_row = last_row % 2
    last = states_at(states, last_row * row_stride)
    final_ptr = final.ptr + n * final.n
    last_values_ptr = last_values.ptr + n * last_values.n
    lane = tl.arange(0, BLOCK_C)
    maximum = tl.full([], -float("inf"), tl.float64)
    total = tl.zeros([BLOCK_C], ACC_DTYPE)
    mean = tl.zeros([BLOCK_C], tl.float64)
    for c0 in range(0, C, BLOCK_C):
        terms = final_terms(last.ptr, final_ptr, c0 + lane, C, final.c)
        maximum = tl.maximum(maximum, tl.max(terms, axis=0))
    shift = finite_shift(maximum)
    for c0 in range(0, C, BLOCK_C):
        c = c0 + lane
        terms = final_terms(last.ptr, final_ptr, c, C, final.c)
        weight = exp((terms - shift).to(ACC_DTYPE))
        value = load_mean(last, c, c < C)
        value += tl.load(last_values_ptr + c * last_values.c, mask=c < C, other=0.0).to(tl.float64)
        total += weight
        mean += weighted(weight, value)
    sum_exp = tl.sum(total, axis=0)
    path_mean = tl.where(sum_exp == 0.0, 0.0, tl.sum(mean, axis=0) / sum_exp.to(tl.float64))
    logz = shifted_log(shift, sum_exp)
    tl.store(mean_ptr + n, path_mean + invalid)
    tl.store(logz_ptr + n, logz + invalid)
