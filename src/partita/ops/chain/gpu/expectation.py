"""Means over the paths of sparse linear chains: alpha with the mean of the values along the paths.

A path has a value on each of its edges, on its first state and on its last state. The value of the
path is their sum. With the posterior of the edges into a state,

    p[c, k]        = exp(alpha[t, source[c, k]] + scores[t, c, k] - alpha[t + 1, c])
    mean[t + 1, c] = sum over k of p[c, k] * (mean[t, source[c, k]] + values[t, c, k])

is the mean value of the paths that end in c. The mean over all paths weights mean[length, c] +
last_values[c] by the posterior of the final states. This is the expectation semiring; it carries
means and not sums, so that both components stay bounded. One program serves one chain.

The forward pass saves alpha and the mean of the values over the paths into each state. The gradient
scans beta down from the length, with the mean of the values over the paths onward from each state.
For an edge with posterior p and value v,

    through          = mean into its source + v + mean onward from the state that it enters
    d mean / d score = p * (through - mean over all paths)

The same holds for initial and final scores, with the posteriors of the first and last states.
Every eighth step log Z is computed again from the states at that step, so that rounding errors of
alpha and beta do not accumulate.

Sources: Eisner, Parameter estimation for probabilistic finite-state transducers, 2002; Li and
Eisner, First- and second-order expectation semirings, 2009.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, finite_shift, weighted
from ....primitives.gpu.memory import load_length
from .arguments import StridedEdges
from .steps import (
    edge_score,
    final_terms,
    from_step,
    is_renormalization_step,
    load_slot,
    load_state,
    log_normalizer,
    shifted_log,
    slot_count,
    store_boundary_scores,
)


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
def load_slot_block(edges, c, j0, BLOCK_K: tl.constexpr, REVERSE: tl.constexpr):
    """Load BLOCK_K slots of the states c from the j0-th on, [BLOCK_C, BLOCK_K]."""
    j, c = (j0 + tl.arange(0, BLOCK_K))[None, :], c[:, None]
    if not REVERSE:  # Past the last edge of a state, C stands for the state, which has no edges.
        c = tl.where(j < edges.K, c, edges.C)
    return load_slot(edges, c, j, REVERSE)


@triton.jit
def mean_step(
    states,
    scores,
    values,
    edges,
    c,
    BLOCK_K: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Compute alpha after a step and the mean of the values over the paths into the states c.

    With REVERSE, compute beta before the step and the mean of the values over the paths onward.
    Each is [BLOCK_C] and fp64. The edges of a block are loaded together, so that they are waited
    for once.
    """
    maximum = tl.full(c.shape, -float("inf"), tl.float64)
    total = tl.zeros(c.shape, ACC_DTYPE)
    mean = tl.zeros(c.shape, tl.float64)
    for j0 in range(0, slot_count(edges, c, REVERSE), BLOCK_K):
        slot = load_slot_block(edges, c, j0, BLOCK_K, REVERSE)  # [BLOCK_C, BLOCK_K]
        neighbor, target, k = slot
        term = load_state(states.ptr, slot) + edge_score(scores, target, k, neighbor >= 0)
        value = edge_score(values, target, k, neighbor >= 0, 0.0)
        value += load_mean(states, neighbor, neighbor >= 0)
        before, maximum = maximum, tl.maximum(maximum, tl.max(term, axis=1))
        shift = finite_shift(maximum)
        scale = exp((before - shift).to(ACC_DTYPE))
        weight = exp((term - shift[:, None]).to(ACC_DTYPE))
        total = total * scale + tl.sum(weight, axis=1)
        mean = weighted(scale, mean) + tl.sum(weighted(weight, value), axis=1)
    alpha = shifted_log(finite_shift(maximum), total)
    return alpha, tl.where(total == 0.0, 0.0, mean / total.to(tl.float64))


@triton.jit
def chain_expectation_kernel(
    chains,  # Chains
    edge_values,  # StridedEdges [T, N, C, K]
    first_values,  # StridedStates [N, C]
    last_values,  # StridedStates [N, C]
    saved,  # StatesWithMeans [T + 1, N, C] fp64, or [2, N, C]
    mean_ptr,  # [N] fp64
    logz_ptr,  # [N] fp64
    SAVE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Compute the mean of the values over all paths of a chain, and log Z."""
    scores, edges, initial, final, lengths_ptr, T, N = chains
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
        step = (from_step(scores, row), from_step(edge_values, row), edges)
        if not SAVE:
            row, next_row = row % 2, next_row % 2
        before = states_at(states, row * row_stride)
        after = states_at(states, next_row * row_stride)
        tl.debug_barrier()
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            alpha, state_mean = mean_step(before, *step, c, BLOCK_K, ACC_DTYPE, False)
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


@triton.jit
def store_boundary_gradients(
    ptr, alpha, beta, C, logz, mean, grad, BLOCK_C: tl.constexpr, ACC_DTYPE: tl.constexpr
):
    """Store the gradients in the scores of the first or last states."""
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        log_weight = tl.load(alpha.ptr + c, mask=c < C, other=-float("inf"))
        log_weight += tl.load(beta.ptr + c, mask=c < C, other=0.0)
        value = load_mean(alpha, c, c < C) + load_mean(beta, c, c < C) - mean
        posterior = exp((log_weight - logz).to(ACC_DTYPE)) * grad
        tl.store(ptr + c, weighted(posterior, value).to(ptr.dtype.element_ty), mask=c < C)


@triton.jit
def chain_expectation_gradient_kernel(
    grad,  # StridedChains [N]
    chains,  # Chains
    edge_values,  # StridedEdges [T, N, C, K]
    last_values,  # StridedStates [N, C]
    mean_ptr,  # [N] fp64
    logz_ptr,  # [N] fp64
    saved,  # StatesWithMeans [T + 1, N, C] fp64: alpha
    workspace_ptr,  # [2, 2, N, C] fp64: beta and means onward, two rows of each
    gradients,  # ChainGradients
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan beta and the mean onward down from the length, and store the gradients of each step."""
    scores, edges = chains[:2]
    final, lengths_ptr, T, N = chains[3:]
    n, C, K = tl.program_id(0).to(tl.int64), edges.C, edges.K
    length, invalid = load_length(lengths_ptr, n, T)
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    edge_values = StridedEdges(edge_values.ptr + n * edge_values.n, *edge_values[1:])
    grad_mean = tl.load(grad.ptr + n * grad.n).to(tl.float64)
    mean, logz = tl.load(mean_ptr + n), tl.load(logz_ptr + n)
    # A chain without a path has no posterior.
    logz = tl.where(logz == -float("inf"), float("inf"), logz)
    row_stride = tl.full([], N, tl.int64) * C
    alphas = states_at(saved, n * C)
    betas = StatesWithMeans(workspace_ptr + n * C, 2 * row_stride)
    d_edges_ptr, width = gradients.edges_ptr, C * K
    dtype: tl.constexpr = d_edges_ptr.dtype.element_ty
    # After the length the gradients are 0, or NaN for an invalid length.
    for t in range(length, T):
        row_ptr = d_edges_ptr + (tl.full([], t, tl.int64) * N + n) * width
        for e0 in range(0, width, BLOCK_C):
            e = e0 + tl.arange(0, BLOCK_C)
            fill = tl.full([BLOCK_C], invalid, tl.float64).to(dtype)
            tl.store(row_ptr + e, fill, mask=e < width)
    last_alpha = states_at(alphas, length * row_stride)
    last_beta = states_at(betas, length % 2 * row_stride)
    final_ptr = final.ptr + n * final.n
    last_values_ptr = last_values.ptr + n * last_values.n
    store_boundary_states(
        last_beta, final_ptr, final.c, last_values_ptr, last_values.c, C, 0.0, BLOCK_C
    )
    tl.debug_barrier()
    ends = (last_alpha, last_beta, C, logz, mean, grad_mean)
    store_boundary_gradients(gradients.final_ptr + n * C, *ends, BLOCK_C, ACC_DTYPE)
    for i in range(0, length):
        t = length - 1 - i
        t64 = tl.full([], t, tl.int64)
        step_scores, step_values = from_step(scores, t64), from_step(edge_values, t64)
        row_ptr = d_edges_ptr + (t64 * N + n) * width
        before = states_at(alphas, t64 * row_stride)
        after = states_at(betas, (t + 1) % 2 * row_stride)
        result = states_at(betas, t % 2 * row_stride)
        tl.debug_barrier()
        if is_renormalization_step(i):
            next_alpha_ptr = before.ptr + row_stride
            logz = log_normalizer(next_alpha_ptr, after.ptr, C, logz, BLOCK_C, ACC_DTYPE)
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            beta = tl.load(after.ptr + c, mask=c < C, other=-float("inf"))
            beta_mean = load_mean(after, c, c < C) - mean
            for k0 in range(0, K, BLOCK_K):
                source, target, k = load_slot_block(edges, c, k0, BLOCK_K, False)
                valid = source >= 0
                alpha = tl.load(before.ptr + source, mask=valid, other=-float("inf"))
                term = alpha + edge_score(step_scores, target, k, valid)
                value = edge_score(step_values, target, k, valid, 0.0)
                value += load_mean(before, source, valid) + beta_mean[:, None]
                posterior = exp((term + (beta - logz)[:, None]).to(ACC_DTYPE)) * grad_mean
                gradient = weighted(posterior, value).to(dtype)
                tl.store(row_ptr + target * K + k, gradient, mask=target < C)
            step = (step_scores, step_values, edges)
            next_beta, next_mean = mean_step(after, *step, c, BLOCK_K, ACC_DTYPE, True)
            store_states(result, c, next_beta, next_mean, c < C)
    tl.debug_barrier()
    ends = (alphas, betas, C, logz, mean, grad_mean)
    store_boundary_gradients(gradients.initial_ptr + n * C, *ends, BLOCK_C, ACC_DTYPE)
