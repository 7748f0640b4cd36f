"""The gradient of log Z of few long chains, parallel in time.

Alpha before and beta after each segment are known, see `segments.py`. Each row of a program takes
one segment: alpha runs through it and is stored, then beta comes back and each step stores
marginal * grad for its edges. The marginals are divided by sums over the states of the same
segment, so that only the differences between its states matter.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp
from .arguments import StridedEdges
from .segments import (
    log_of_weights,
    program_rows,
    rows_step,
    slot_score,
    slot_value,
    weight_in_sum,
    without_offset,
)
from .steps import (
    from_step,
    is_renormalization_step,
    load_length,
    load_slot,
    load_slots,
    shifted_log,
    store_marginal,
)


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
def chain_segment_gradient_kernel(
    grad,  # StridedChains [N]
    chains,  # Chains
    boundaries_ptr,  # [2, N, segments + 1, C] fp64
    alpha_ptr,  # [T, N, C] fp64, a workspace
    gradients,  # ChainGradients
    segments,
    steps,  # in a segment
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DEGREE_IN: tl.constexpr,
    DEGREE_OUT: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Store the marginals of the steps of segments, and those of the first and the last states."""
    scores, edges = chains[:2]
    lengths_ptr, T, N = chains[4:]
    C, K = edges.C, edges.K
    N64 = tl.full([], N, tl.int64)
    row, exists = program_rows(N64 * segments, ROWS)
    n, segment, c = row // segments, row % segments, tl.arange(0, BLOCK_C)[None, :]
    mask, first = exists & (c < C), segment * steps
    length, invalid = load_length(lengths_ptr, n, T)
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    known_ptr = boundaries_ptr + (n * (segments + 1) + segment) * C + c
    alpha = tl.load(known_ptr, mask=c < C, other=-float("inf"))
    known_ptr += N64 * (segments + 1) * C + C
    beta = tl.load(known_ptr, mask=c < C, other=-float("inf"))
    alpha, beta = without_offset(alpha, 1), without_offset(beta, 1)
    alpha_ptr += n * C + c
    row_stride = N64 * C
    slots = load_slots(edges, c, DEGREE_IN, False)
    for i in range(0, steps):
        t = first + i
        active = t < length
        tl.store(alpha_ptr + t * row_stride, alpha, mask=mask & active)
        step_scores = from_step(scores, t)
        alpha = rows_step(alpha, step_scores, edges, c, slots, active, DEGREE_IN, ACC_DTYPE)
    tl.debug_barrier()
    grad_logz = tl.load(grad.ptr + n * grad.n).to(ACC_DTYPE)
    log_weight = alpha + beta
    maximum = tl.max(log_weight, axis=1)[:, None]
    total = tl.sum(weight_in_sum(log_weight, maximum, ACC_DTYPE), axis=1)[:, None]
    logz = log_of_weights(maximum, total, ACC_DTYPE)
    # A chain without a path has no marginals.
    logz = tl.where(logz == -float("inf"), float("inf"), logz)
    is_last = mask & (segment == segments - 1)
    store_marginal(gradients.final_ptr + n * C + c, log_weight - logz, grad_logz, is_last)
    slots = load_slots(edges, c, DEGREE_IN, False)
    out_slots = load_slots(edges, c, DEGREE_OUT, True)
    for i in range(0, steps):
        t = first + steps - 1 - i
        active, step_scores = t < length, from_step(scores, t)
        if is_renormalization_step(i):
            weights = exp((alpha + beta - logz).to(ACC_DTYPE))
            sum_exp = tl.sum(weights, axis=1)[:, None]
            logz = tl.where(sum_exp > 0.0, shifted_log(logz, sum_exp), logz)
        stored = tl.load(alpha_ptr + t * row_stride, mask=mask & active, other=-float("inf"))
        alpha = tl.where(active, stored, alpha)
        step = (active, beta - logz, grad_logz, invalid, mask & (t < T))
        d_ptr = gradients.edges_ptr + (t * N + n) * C * K + c * K
        if DEGREE_IN > 0:
            for k in tl.static_range(DEGREE_IN):
                term = slot_value(alpha, slots[k]) + slot_score(step_scores, slots[k], active)
                store_row_marginals(d_ptr + k, term, step)
        else:
            for k in range(K):
                slot = load_slot(edges, c, k, False)
                term = slot_value(alpha, slot) + slot_score(step_scores, slot, active)
                store_row_marginals(d_ptr + k, term, step)
        beta = rows_step(
            beta, step_scores, edges, c, out_slots, active, DEGREE_OUT, ACC_DTYPE, REVERSE=True
        )
    is_first = mask & (segment == 0)
    store_marginal(gradients.initial_ptr + n * C + c, alpha + beta - logz, grad_logz, is_first)
