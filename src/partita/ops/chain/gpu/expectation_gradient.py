"""The gradient of the mean over paths of sparse linear chains.

The forward pass (`expectation.py`) saves alpha and the mean of the values over the paths into
each state. Here one program per chain scans beta down from the length, with the mean of the
values over the paths onward from each state. For an edge with posterior p and value v,

    through          = mean into its source + v + mean onward from the state that it enters
    d mean / d value = p
    d mean / d score = p * (through - mean over all paths)

The same holds for initial and final scores, with the posteriors of the first and last states.
Every eighth step log Z is computed again from the states at that step, so that rounding errors of
alpha and beta do not accumulate.

Source: Li and Eisner, First- and second-order expectation semirings, 2009.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, finite_shift
from .arguments import StridedEdges
from .expectation import (
    StatesWithMeans,
    StepInputs,
    load_mean,
    states_at,
    store_boundary_states,
    store_states,
    weighted,
)
from .steps import (
    edge_score,
    edge_value,
    from_step,
    is_renormalization_step,
    load_length,
    load_source,
    log_normalizer,
    out_degree,
    shifted_log,
)


class PathMean(NamedTuple):
    """What the gradient needs of a chain as a whole.

    Fields:
        logz: log Z.
        mean: the mean of the values over all paths.
        grad: the gradient of that mean.
    """

    logz: tl.tensor
    mean: tl.tensor
    grad: tl.tensor


class GradientPointers(NamedTuple):
    """The memory for the gradients of edges, or of the first or last states, of a chain.

    Fields:
        scores_ptr: the gradient of their scores.
        values_ptr: the gradient of their values.
    """

    scores_ptr: tl.tensor
    values_ptr: tl.tensor


@triton.jit
def beta_mean_step(states, step, s, ACC_DTYPE: tl.constexpr):
    """Compute beta before a step and the mean of the values over the paths onward from s.

    Each is [BLOCK_C] and fp64.
    """
    scores, values, edges = step
    K = edges.K
    maximum = tl.full(s.shape, -float("inf"), tl.float64)
    total = tl.zeros(s.shape, ACC_DTYPE)
    mean = tl.zeros(s.shape, tl.float64)
    start, degree = out_degree(edges, s)
    for j in range(tl.max(degree, axis=0)):
        edge = tl.load(edges.out_edges_ptr + start + j, mask=j < degree, other=0)
        beta = tl.load(states.ptr + edge // K, mask=j < degree, other=-float("inf"))
        score = edge_score(scores, edge // K, edge % K, j < degree)
        maximum = tl.maximum(maximum, beta + score)
    shift = finite_shift(maximum)
    for j in range(tl.max(degree, axis=0)):
        edge = tl.load(edges.out_edges_ptr + start + j, mask=j < degree, other=0)
        beta = tl.load(states.ptr + edge // K, mask=j < degree, other=-float("inf"))
        term = beta + edge_score(scores, edge // K, edge % K, j < degree)
        value = edge_value(values, edge // K, edge % K, j < degree, 0.0)
        weight = exp((term - shift).to(ACC_DTYPE))
        total += weight
        mean += weighted(weight, value + load_mean(states, edge // K, j < degree))
    return shifted_log(shift, total), tl.where(total == 0.0, 0.0, mean / total.to(tl.float64))


@triton.jit
def store_gradients(
    gradients,
    offset,
    posterior,
    value,
    valid,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
):
    """Store the gradients of edges or states.

    The gradient of a value is the posterior. The gradient of a score is the posterior times
    `value`, which is the mean of the paths through the edge or state minus the mean of all paths.
    """
    scores_ptr, values_ptr = gradients
    if OF_SCORES:
        grad = weighted(posterior, value).to(scores_ptr.dtype.element_ty)
        tl.store(scores_ptr + offset, grad, mask=valid)
    if OF_VALUES:
        tl.store(values_ptr + offset, posterior.to(values_ptr.dtype.element_ty), mask=valid)


@triton.jit
def store_boundary_gradients(
    gradients,
    offset,
    alpha,
    beta,
    C,
    path,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Store the gradients of the first or last states, at `offset`."""
    for c0 in range(0, C, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        log_weight = tl.load(alpha.ptr + c, mask=c < C, other=-float("inf"))
        log_weight += tl.load(beta.ptr + c, mask=c < C, other=0.0)
        value = load_mean(alpha, c, c < C) + load_mean(beta, c, c < C) - path.mean
        posterior = exp((log_weight - path.logz).to(ACC_DTYPE)) * path.grad
        store_gradients(gradients, offset + c, posterior, value, c < C, OF_SCORES, OF_VALUES)


@triton.jit
def chain_expectation_gradient_kernel(
    grad,  # StridedChains [N]
    scores,  # StridedEdges [T, N, C, K]
    edges,  # ChainEdges
    final,  # StridedStates [N, C]
    lengths_ptr,  # [N] or None
    edge_values,  # StridedEdges [T, N, C, K]
    last_values,  # StridedStates [N, C]
    mean_ptr,  # [N] fp64
    logz_ptr,  # [N] fp64
    saved,  # StatesWithMeans [T + 1, N, C] fp64: alpha
    workspace_ptr,  # [2, 2, N, C] fp64: beta and means onward, two rows of each
    d_scores,  # ChainGradients
    d_values,  # ChainGradients
    T,
    N,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan beta and the mean onward down from the length, and store the gradients of each step."""
    n, C, K = tl.program_id(0).to(tl.int64), edges.C, edges.K
    length, invalid = load_length(lengths_ptr, n, T)
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    edge_values = StridedEdges(edge_values.ptr + n * edge_values.n, *edge_values[1:])
    logz_ptr += n
    mean_ptr += n
    grad_mean = tl.load(grad.ptr + n * grad.n).to(tl.float64)
    mean, logz = tl.load(mean_ptr), tl.load(logz_ptr)
    # A chain without a path has no posterior.
    path = PathMean(tl.where(logz == -float("inf"), float("inf"), logz), mean, grad_mean)
    row_stride = tl.full([], N, tl.int64) * C
    alphas = states_at(saved, n * C)
    betas = StatesWithMeans(workspace_ptr + n * C, 2 * row_stride)
    d_edges = GradientPointers(d_scores.edges_ptr, d_values.edges_ptr)
    # After the length the gradients are 0, or NaN for an invalid length.
    width = C * K
    for t in range(length, T):
        offset = (tl.full([], t, tl.int64) * N + n) * width
        for e0 in range(0, width, BLOCK_C):
            e = e0 + tl.arange(0, BLOCK_C)
            fill = tl.zeros([BLOCK_C], tl.float64) + invalid
            store_gradients(d_edges, offset + e, fill, fill, e < width, OF_SCORES, OF_VALUES)
    last_alpha = states_at(alphas, length * row_stride)
    last_beta = states_at(betas, length % 2 * row_stride)
    final_ptr = final.ptr + n * final.n
    last_values_ptr = last_values.ptr + n * last_values.n
    store_boundary_states(
        last_beta, final_ptr, final.c, last_values_ptr, last_values.c, C, 0.0, BLOCK_C
    )
    tl.debug_barrier()
    d_last = GradientPointers(d_scores.final_ptr, d_values.final_ptr)
    store_boundary_gradients(
        d_last, n * C, last_alpha, last_beta, C, path, OF_SCORES, OF_VALUES, BLOCK_C, ACC_DTYPE
    )
    for i in range(0, length):
        t = length - 1 - i
        t64 = tl.full([], t, tl.int64)
        step_scores, step_values = from_step(scores, t64), from_step(edge_values, t64)
        step = StepInputs(step_scores, step_values, edges)
        offset = (t64 * N + n) * C * K
        before = states_at(alphas, t64 * row_stride)
        after = states_at(betas, (t + 1) % 2 * row_stride)
        result = states_at(betas, t % 2 * row_stride)
        tl.debug_barrier()
        if is_renormalization_step(i):
            next_alpha_ptr = before.ptr + row_stride
            logz = log_normalizer(next_alpha_ptr, after.ptr, C, path.logz, BLOCK_C, ACC_DTYPE)
            path = PathMean(logz, path.mean, path.grad)
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            beta = tl.load(after.ptr + c, mask=c < C, other=-float("inf"))
            beta_mean = load_mean(after, c, c < C) - path.mean
            for k in range(K):
                source, valid = load_source(edges, c, k)
                alpha = tl.load(before.ptr + source, mask=valid, other=-float("inf"))
                term = alpha + edge_score(step_scores, c, k, valid)
                value = edge_value(step_values, c, k, valid, 0.0)
                value += load_mean(before, source, valid) + beta_mean
                posterior = exp((term + (beta - path.logz)).to(ACC_DTYPE)) * path.grad
                edge_offset, mask = offset + c * K + k, c < C
                store_gradients(d_edges, edge_offset, posterior, value, mask, OF_SCORES, OF_VALUES)
            next_beta, next_mean = beta_mean_step(after, step, c, ACC_DTYPE)
            store_states(result, c, next_beta, next_mean, c < C)
    tl.debug_barrier()
    d_first = GradientPointers(d_scores.initial_ptr, d_values.initial_ptr)
    store_boundary_gradients(
        d_first, n * C, alphas, betas, C, path, OF_SCORES, OF_VALUES, BLOCK_C, ACC_DTYPE
    )
