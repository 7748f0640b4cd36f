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
    ChainEdges,
    EdgeArray,
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
def store_edge_gradients(
    gradients,
    before,
    after,
    step,
    c,
    offset,
    path,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Store the gradients of the edges into the states c, [BLOCK_C].

    `before` has alpha before the step, `after` beta after it, and the gradients of the step start
    at `offset`.
    """
    scores, values, edges = step
    beta = tl.load(after.ptr + c, mask=c < edges.C, other=-float("inf"))
    beta_mean = load_mean(after, c, c < edges.C) - path.mean
    for k in range(edges.K):
        source, valid = load_source(edges, c, k)
        alpha = tl.load(before.ptr + source, mask=valid, other=-float("inf"))
        term = alpha + edge_score(scores, c, k, valid)
        value = edge_value(values, c, k, valid, 0.0)
        value += load_mean(before, source, valid) + beta_mean
        posterior = exp((term + (beta - path.logz)).to(ACC_DTYPE)) * path.grad
        edge_offset, mask = offset + c * edges.K + k, c < edges.C
        store_gradients(gradients, edge_offset, posterior, value, mask, OF_SCORES, OF_VALUES)


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
def clear_gradients(
    gradients,
    n,
    N,
    length,
    T,
    width,
    value,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Fill the gradients of the steps after the length: 0, or NaN for an invalid length."""
    for t in range(length, T):
        offset = (tl.full([], t, tl.int64) * N + n) * width
        for e0 in range(0, width, BLOCK_C):
            e = e0 + tl.arange(0, BLOCK_C)
            fill = tl.zeros([BLOCK_C], tl.float64) + value
            store_gradients(gradients, offset + e, fill, fill, e < width, OF_SCORES, OF_VALUES)


@triton.jit
def load_path(logz_ptr, mean_ptr, grad_ptr):
    """Load what the gradient needs of a chain; one without a path has no posterior."""
    grad = tl.load(grad_ptr).to(tl.float64)
    mean, logz = tl.load(mean_ptr), tl.load(logz_ptr)
    return PathMean(tl.where(logz == -float("inf"), float("inf"), logz), mean, grad)


@triton.jit
def renormalize(path, alpha_ptr, beta_ptr, C, BLOCK_C: tl.constexpr, ACC_DTYPE: tl.constexpr):
    """Compute log Z again, from alpha and beta at the same time."""
    logz = log_normalizer(alpha_ptr, beta_ptr, C, path.logz, BLOCK_C, ACC_DTYPE)
    return PathMean(logz, path.mean, path.grad)


@triton.jit
def scan_back(
    gradients,
    alphas,
    betas,
    chain,
    n,
    N,
    length,
    path,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan beta and the means onward down from the length, and store the gradients of each step.

    `alphas` are those of all times, and `betas` alternate between two rows. Returns the path with
    the log Z of the last renormalization.
    """
    C, K = chain.edges.C, chain.edges.K
    row_stride = tl.full([], N, tl.int64) * C
    for i in range(0, length):
        t = length - 1 - i
        t64 = tl.full([], t, tl.int64)
        step_scores = from_step(chain.edge_scores, t64)
        step_values = from_step(chain.edge_values, t64)
        step = StepInputs(step_scores, step_values, chain.edges)
        offset = (t64 * N + n) * C * K
        before, after = (
            states_at(alphas, t64 * row_stride),
            states_at(betas, (t + 1) % 2 * row_stride),
        )
        result = states_at(betas, t % 2 * row_stride)
        tl.debug_barrier()
        if is_renormalization_step(i):
            path = renormalize(path, before.ptr + row_stride, after.ptr, C, BLOCK_C, ACC_DTYPE)
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            store_edge_gradients(
                gradients, before, after, step, c, offset, path, OF_SCORES, OF_VALUES, ACC_DTYPE
            )
            beta, beta_mean = beta_mean_step(after, step, c, ACC_DTYPE)
            store_states(result, c, beta, beta_mean, c < C)
    return path


@triton.jit
def chain_expectation_gradient_kernel(
    grad_ptr,  # [N]
    scores_ptr,  # [T, N, C, K]
    source_ptr,  # [C, K] int32
    out_offsets_ptr,  # [C + 1] int32
    out_edges_ptr,  # [C * K] int32
    final_ptr,  # [N, C]
    lengths_ptr,  # [N] or None
    values_ptr,  # [T, N, C, K]
    last_values_ptr,  # [N, C]
    mean_ptr,  # [N] fp64
    logz_ptr,  # [N] fp64
    saved_ptr,  # [2, T + 1, N, C] fp64: alpha and means
    workspace_ptr,  # [2, 2, N, C] fp64: beta and means onward
    d_scores_ptr,  # [T, N, C, K]
    d_initial_ptr,  # [N, C]
    d_final_ptr,  # [N, C]
    d_values_ptr,  # [T, N, C, K]
    d_first_values_ptr,  # [N, C]
    d_last_values_ptr,  # [N, C]
    saved_mean_offset,
    T,
    N,
    C,
    K,
    grad_n,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    value_t,
    value_n,
    value_c,
    value_k,
    final_n,
    final_c,
    last_n,
    last_c,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan beta and the mean onward down from the length, and store the gradients of each step."""
    n = tl.program_id(0).to(tl.int64)
    length, invalid = load_length(lengths_ptr, n, T)
    scores = EdgeArray(scores_ptr + n * stride_n, stride_t, stride_c, stride_k)
    values = EdgeArray(values_ptr + n * value_n, value_t, value_c, value_k)
    edges = ChainEdges(source_ptr, out_offsets_ptr, out_edges_ptr, C, K)
    chain = StepInputs(scores, values, edges)
    path = load_path(logz_ptr + n, mean_ptr + n, grad_ptr + n * grad_n)
    row_stride = tl.full([], N, tl.int64) * C
    alphas = StatesWithMeans(saved_ptr + n * C, saved_mean_offset)
    betas = StatesWithMeans(workspace_ptr + n * C, 2 * row_stride)
    d_edges = GradientPointers(d_scores_ptr, d_values_ptr)
    clear_gradients(d_edges, n, N, length, T, C * K, invalid, OF_SCORES, OF_VALUES, BLOCK_C)
    alpha, beta = states_at(alphas, length * row_stride), states_at(betas, length % 2 * row_stride)
    final_ptr += n * final_n
    last_values_ptr += n * last_n
    store_boundary_states(beta, final_ptr, final_c, last_values_ptr, last_c, C, 0.0, BLOCK_C)
    tl.debug_barrier()
    d_last = GradientPointers(d_final_ptr, d_last_values_ptr)
    store_boundary_gradients(
        d_last, n * C, alpha, beta, C, path, OF_SCORES, OF_VALUES, BLOCK_C, ACC_DTYPE
    )
    path = scan_back(
        d_edges, alphas, betas, chain, n, N, length, path, OF_SCORES, OF_VALUES, BLOCK_C, ACC_DTYPE
    )
    tl.debug_barrier()
    d_first = GradientPointers(d_initial_ptr, d_first_values_ptr)
    store_boundary_gradients(
        d_first, n * C, alphas, betas, C, path, OF_SCORES, OF_VALUES, BLOCK_C, ACC_DTYPE
    )
