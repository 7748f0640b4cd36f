"""The gradient of log Z of few long chains, parallel in time.

Alpha before and beta after each segment are known, see `segments.py`. Each row of a program takes
one segment: alpha runs through it and is stored, then beta comes back and each step stores
marginal * grad for its edges. The marginals are divided by sums over the states of the same
segment, so that only the differences between its states matter.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp
from .segment_steps import (
    load_slot,
    load_slots,
    log_of_weights,
    rows_step,
    slot_score,
    slot_value,
    weight_in_sum,
    without_offset,
)
from .segments import program_rows
from .steps import (
    ChainEdges,
    EdgeArray,
    from_step,
    is_renormalization_step,
    load_length,
    shifted_log,
    store_marginal,
)


@triton.jit
def scan_alpha(
    x,
    alpha_ptr,
    row_stride,
    scores,
    edges,
    c,
    span,
    mask,
    DEGREE: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Store alpha before each step of the segments; return alpha after them.

    `span` has the first step of each row, the number of steps, and the lengths of the chains.
    """
    first, steps, length = span
    slots = load_slots(edges, c, DEGREE, False)
    for i in range(0, steps):
        t = first + i
        active = t < length
        tl.store(alpha_ptr + t * row_stride, x, mask=mask & active)
        x = rows_step(x, from_step(scores, t), edges, c, slots, active, DEGREE, ACC_DTYPE)
    return x


@triton.jit
def rows_log_sum(x, ACC_DTYPE: tl.constexpr):
    """Return the log-sum-exp of each row, `[ROWS, 1]` fp64."""
    maximum = tl.max(x, axis=1)[:, None]
    weights = weight_in_sum(x, maximum, ACC_DTYPE)
    return log_of_weights(maximum, tl.sum(weights, axis=1)[:, None], ACC_DTYPE)


@triton.jit
def renormalized(logz, weights, ACC_DTYPE: tl.constexpr):
    """Return log sum exp of each row of weights, given its approximate value, see `steps.py`."""
    total = tl.sum(exp((weights - logz).to(ACC_DTYPE)), axis=1)[:, None]
    return tl.where(total > 0.0, shifted_log(logz, total), logz)


@triton.jit
def store_row_marginals(d_ptr, term, step):
    """Store the marginals of an edge into each state, given alpha plus score.

    `step` has, for the rows of a program, whether the step is active, beta - log Z, the gradient of
    log Z, the value after a length, which is 0 or NaN, and the mask of what is stored.
    """
    active, log_weight, grad, inactive_value, mask = step
    marginal = exp((term + log_weight).to(grad.dtype)) * grad
    marginal = tl.where(active, marginal, inactive_value)
    tl.store(d_ptr, marginal.to(d_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_step_marginals(d_ptr, alpha, scores, edges, c, slots, step, DEGREE: tl.constexpr):
    """Store the marginals of the edges of a step; `step` is described in `store_row_marginals`."""
    active = step[0]
    d_ptr += c * edges.K
    if DEGREE > 0:
        for k in tl.static_range(DEGREE):
            term = slot_value(alpha, slots[k]) + slot_score(scores, slots[k], active)
            store_row_marginals(d_ptr + k, term, step)
    else:
        for k in range(edges.K):
            slot = load_slot(edges, c, k, False)
            term = slot_value(alpha, slot) + slot_score(scores, slot, active)
            store_row_marginals(d_ptr + k, term, step)


@triton.jit
def chain_segment_gradient_kernel(
    grad_ptr,  # [N]
    scores_ptr,  # [T, N, C, K]
    source_ptr,  # [C, K] int32
    out_offsets_ptr,  # [C + 1] int32
    out_edges_ptr,  # [C * K] int32
    lengths_ptr,  # [N] or None
    boundaries_ptr,  # [2, N, segments + 1, C] fp64
    alpha_ptr,  # [T, N, C] fp64, a workspace
    d_scores_ptr,  # [T, N, C, K]
    d_initial_ptr,  # [N, C]
    d_final_ptr,  # [N, C]
    T,
    N,
    C,
    K,
    segments,
    steps,  # in a segment
    grad_n,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DEGREE_IN: tl.constexpr,
    DEGREE_OUT: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Store the marginals of the steps of segments, and those of the first and the last states."""
    N64 = tl.full([], N, tl.int64)
    row, exists = program_rows(N64 * segments, ROWS)
    n, segment, c = row // segments, row % segments, tl.arange(0, BLOCK_C)[None, :]
    mask, first = exists & (c < C), segment * steps
    length, invalid = load_length(lengths_ptr, n, T)
    edges = ChainEdges(source_ptr, out_offsets_ptr, out_edges_ptr, C, K)
    scores = EdgeArray(scores_ptr + n * stride_n, stride_t, stride_c, stride_k)
    known_ptr = boundaries_ptr + (n * (segments + 1) + segment) * C + c
    alpha = tl.load(known_ptr, mask=c < C, other=-float("inf"))
    known_ptr += N64 * (segments + 1) * C + C
    beta = tl.load(known_ptr, mask=c < C, other=-float("inf"))
    alpha, beta = without_offset(alpha, 1), without_offset(beta, 1)
    alpha_ptr += n * C + c
    span, row_stride = (first, steps, length), N64 * C
    alpha = scan_alpha(
        alpha, alpha_ptr, row_stride, scores, edges, c, span, mask, DEGREE_IN, ACC_DTYPE
    )
    tl.debug_barrier()
    grad = tl.load(grad_ptr + n * grad_n).to(ACC_DTYPE)
    logz = rows_log_sum(alpha + beta, ACC_DTYPE)
    # A chain without a path has no marginals.
    logz = tl.where(logz == -float("inf"), float("inf"), logz)
    is_last = mask & (segment == segments - 1)
    store_marginal(d_final_ptr + n * C + c, alpha + beta - logz, grad, is_last)
    slots = load_slots(edges, c, DEGREE_IN, False)
    out_slots = load_slots(edges, c, DEGREE_OUT, True)
    for i in range(0, steps):
        t = first + steps - 1 - i
        active, step_scores = t < length, from_step(scores, t)
        if is_renormalization_step(i):
            logz = renormalized(logz, alpha + beta, ACC_DTYPE)
        stored = tl.load(alpha_ptr + t * row_stride, mask=mask & active, other=-float("inf"))
        alpha = tl.where(active, stored, alpha)
        step = (active, beta - logz, grad, invalid, mask & (t < T))
        d_ptr = d_scores_ptr + (t * N + n) * C * K
        store_step_marginals(d_ptr, alpha, step_scores, edges, c, slots, step, DEGREE_IN)
        beta = rows_step(
            beta, step_scores, edges, c, out_slots, active, DEGREE_OUT, ACC_DTYPE, REVERSE=True
        )
    is_first = mask & (segment == 0)
    store_marginal(d_initial_ptr + n * C + c, alpha + beta - logz, grad, is_first)
