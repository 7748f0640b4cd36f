"""Log Z of sparse linear chains of any size, its gradient, and the scores of states.

Alpha and beta run at once and meet in the middle. A chain of `length` steps has the meeting point
middle = (length - 1) // 2. One program scans alpha from 0 to middle; another scans beta from length
to middle + 1. `chain_logz_kernel` then takes the step `middle` and sums exp(alpha[middle + 1] +
beta[middle + 1]) over all states. Two programs per chain halve the number of dependent steps.

With SAVE, saved[t] is alpha[t] for t <= middle and beta[t] for t > middle. For the gradient two
programs per chain continue both scans: one takes alpha from the meeting point to the end, along the
saved beta; the other takes beta from the meeting point to the start, along the saved alpha. Each
step stores marginal * grad for its edges. The middle step belongs to alpha. Every eighth step log Z
is computed again from the states at that step, so that rounding errors of alpha and beta do not
accumulate. See `steps.py` for the recursions.

`chain_scan_kernel` stores alpha or beta at all times, under Log or Max, with one program per chain.
After the length, alpha repeats its value at the length, and beta is the final scores.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp
from ....primitives.gpu.memory import load_length
from .arguments import StridedEdges
from .steps import (
    copy_states,
    from_step,
    is_renormalization_step,
    log_normalizer,
    lse_add,
    shifted_log,
    state_row,
    state_step,
    store_boundary_marginals,
    store_boundary_scores,
    store_slot_marginal,
    store_step,
)


@triton.jit
def scan_states(
    states_ptr,
    scores,
    edges,
    row_stride,
    first,
    num_steps,
    SAVE: tl.constexpr,
    DEGREE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    IS_MAX: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Store alpha after each of some steps or, with REVERSE, beta, from the states at `first`."""
    for i in range(0, num_steps):
        time = first - i if REVERSE else first + i
        next_time = time - 1 if REVERSE else time + 1
        step_scores = from_step(scores, tl.full([], next_time if REVERSE else time, tl.int64))
        state_ptr = states_ptr + state_row(time, REVERSE, SAVE) * row_stride
        next_ptr = states_ptr + state_row(next_time, REVERSE, SAVE) * row_stride
        store_step(
            next_ptr, state_ptr, step_scores, edges, DEGREE, BLOCK_C, ACC_DTYPE, IS_MAX, REVERSE
        )


@triton.jit
def chain_halves_kernel(
    chains,  # Chains
    saved_ptr,  # [T + 1, N, C] fp64, or [4, N, C]
    SAVE: tl.constexpr,
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan alpha up to the meeting point, or beta down to the state after it."""
    scores, edges, initial, final, lengths_ptr, T, N = chains
    n, C = (tl.program_id(0) // 2).to(tl.int64), edges.C
    length, invalid = load_length(lengths_ptr, n, T)
    middle = tl.maximum(length - 1, 0) // 2
    states_ptr, row_stride = saved_ptr + n * C, tl.full([], N, tl.int64) * C
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    inputs = (states_ptr, scores, edges, row_stride)
    if tl.program_id(0) % 2 == 0:
        initial_ptr = initial.ptr + n * initial.n
        alpha_ptr = states_ptr + state_row(0, False, SAVE) * row_stride
        store_boundary_scores(alpha_ptr, initial_ptr, C, initial.c, invalid, BLOCK_C)
        scan_states(*inputs, 0, middle, SAVE, UNROLL_IN, BLOCK_C, ACC_DTYPE, False, False)
    elif length > 0:
        beta_ptr = states_ptr + state_row(length, True, SAVE) * row_stride
        store_boundary_scores(beta_ptr, final.ptr + n * final.n, C, final.c, 0.0, BLOCK_C)
        num_steps = length - 1 - middle
        scan_states(*inputs, length, num_steps, SAVE, UNROLL_OUT, BLOCK_C, ACC_DTYPE, False, True)


@triton.jit
def chain_logz_kernel(
    chains,  # Chains
    saved_ptr,  # [T + 1, N, C] fp64, or [4, N, C]
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results, or None
    SAVE: tl.constexpr,
    UNROLL_IN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Compute log Z of a chain from alpha before its middle step and beta after it.

    Log Z is stored in fp64 and, if asked for, rounded.
    """
    scores, edges, initial, final, lengths_ptr, T, N = chains
    n, C = tl.program_id(0).to(tl.int64), edges.C
    length, invalid = load_length(lengths_ptr, n, T)
    middle = tl.maximum(length - 1, 0) // 2
    states_ptr, row_stride = saved_ptr + n * C, tl.full([], N, tl.int64) * C
    lane = tl.arange(0, BLOCK_C)
    maximum, rest = tl.full([BLOCK_C], -float("inf"), tl.float64), tl.zeros([BLOCK_C], ACC_DTYPE)
    alpha_ptr = states_ptr + state_row(middle, False, SAVE) * row_stride
    beta_ptr = states_ptr + state_row(middle + 1, True, SAVE) * row_stride
    scores = from_step(
        StridedEdges(scores.ptr + n * scores.n, *scores[1:]), tl.full([], middle, tl.int64)
    )
    for c0 in range(0, C, BLOCK_C):
        c = c0 + lane
        if length > 0:
            value = state_step(alpha_ptr, scores, edges, c, UNROLL_IN, ACC_DTYPE)
            value += tl.load(beta_ptr + c, mask=c < C, other=-float("inf"))
        else:
            value = tl.load(
                initial.ptr + n * initial.n + c * initial.c, mask=c < C, other=-float("inf")
            ).to(tl.float64)
            value += tl.load(final.ptr + n * final.n + c * final.c, mask=c < C, other=0.0).to(
                tl.float64
            )
        maximum, rest = lse_add(maximum, rest, tl.where(c < C, value, -float("inf")))
    greatest = tl.max(maximum, axis=0)
    shift = tl.where(greatest == -float("inf"), 0.0, greatest)
    sum_exp = tl.sum((1.0 + rest) * exp((maximum - shift).to(ACC_DTYPE)), axis=0)
    logz = shifted_log(shift, sum_exp) + invalid
    tl.store(logz_ptr + n, logz)
    if rounded_ptr is not None:
        tl.store(rounded_ptr + n, logz.to(rounded_ptr.dtype.element_ty))


@triton.jit
def chain_scan_kernel(
    chains,  # Chains
    result_ptr,  # [T + 1, N, C] fp64
    IS_MAX: tl.constexpr,
    REVERSE: tl.constexpr,
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Scan alpha from the first step to the last or, with REVERSE, beta in the other direction."""
    scores, edges, initial, final, lengths_ptr, T, N = chains
    n, C = tl.program_id(0).to(tl.int64), edges.C
    length, invalid = load_length(lengths_ptr, n, T)
    result_ptr += n * C
    row_stride = tl.full([], N, tl.int64) * C
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    inputs = (result_ptr, scores, edges, row_stride)
    if REVERSE:
        for t in range(length, T + 1):
            row_ptr = result_ptr + tl.full([], t, tl.int64) * row_stride
            store_boundary_scores(row_ptr, final.ptr + n * final.n, C, final.c, invalid, BLOCK_C)
        scan_states(*inputs, length, length, True, UNROLL_OUT, BLOCK_C, ACC_DTYPE, IS_MAX, True)
    else:
        initial_ptr = initial.ptr + n * initial.n
        store_boundary_scores(result_ptr, initial_ptr, C, initial.c, invalid, BLOCK_C)
        scan_states(*inputs, 0, length, True, UNROLL_IN, BLOCK_C, ACC_DTYPE, IS_MAX, False)
        tl.debug_barrier()
        for t in range(length, T):
            row_ptr = result_ptr + tl.full([], t + 1, tl.int64) * row_stride
            copy_states(row_ptr, result_ptr + length * row_stride, C, BLOCK_C)


@triton.jit
def continue_scan(
    states_ptr,  # [2, N, C] fp64: two rows that the states alternate between, given those at first
    saved_ptr,  # [T + 1, N, C] fp64, of the other direction
    scores,
    d_scores_ptr,
    edges,
    row_stride,
    first,
    num_steps,
    logz,
    grad,
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Continue alpha from the time `first` or, with REVERSE, beta, and store the marginals.

    Returns where the last states are.
    """
    C, K = edges.C, edges.K
    DEGREE: tl.constexpr = UNROLL_OUT if REVERSE else UNROLL_IN
    for i in range(0, num_steps):
        time = tl.full([], first - i if REVERSE else first + i, tl.int64)
        t = time - 1 if REVERSE else time
        state_ptr = states_ptr + i % 2 * row_stride
        next_ptr = states_ptr + (i + 1) % 2 * row_stride
        if is_renormalization_step(i):
            opposite_ptr = saved_ptr + time * row_stride
            logz = log_normalizer(state_ptr, opposite_ptr, C, logz, BLOCK_C, ACC_DTYPE)
        alpha_ptr = saved_ptr + t * row_stride if REVERSE else state_ptr
        beta_ptr = state_ptr if REVERSE else saved_ptr + (t + 1) * row_stride
        step_scores, d_step_ptr = from_step(scores, t), d_scores_ptr + t * row_stride * K
        for c0 in range(0, C, BLOCK_C):
            c = c0 + tl.arange(0, BLOCK_C)
            value = state_step(state_ptr, step_scores, edges, c, DEGREE, ACC_DTYPE, False, REVERSE)
            tl.store(next_ptr + c, value, mask=c < C)
            log_weight = tl.load(beta_ptr + c, mask=c < C, other=-float("inf")) - logz
            step = (d_step_ptr, alpha_ptr, step_scores, edges, c)
            if UNROLL_IN > 0:
                for k in tl.static_range(UNROLL_IN):
                    store_slot_marginal(*step, k, log_weight, grad)
            else:
                for k in range(K):
                    store_slot_marginal(*step, k, log_weight, grad)
    return states_ptr + num_steps % 2 * row_stride


@triton.jit
def chain_gradient_kernel(
    grad,  # StridedChains [N]
    chains,  # Chains
    logz_ptr,  # [N] fp64
    saved_ptr,  # [T + 1, N, C] fp64
    workspace_ptr,  # [4, N, C] fp64
    gradients,  # ChainGradients
    UNROLL_IN: tl.constexpr,
    UNROLL_OUT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    ACC_DTYPE: tl.constexpr,
):
    """Continue alpha to the end and beta to the start, and store the marginals.

    The workspace has alpha after the meeting point and beta before it, two rows for each direction.
    """
    scores, edges, initial, final, lengths_ptr, T, N = chains
    n, C, K = (tl.program_id(0) // 2).to(tl.int64), edges.C, edges.K
    length, invalid = load_length(lengths_ptr, n, T)
    middle, row_stride = tl.maximum(length - 1, 0) // 2, tl.full([], N, tl.int64) * C
    middle64 = tl.full([], middle, tl.int64)
    scores = StridedEdges(scores.ptr + n * scores.n, *scores[1:])
    d_scores_ptr = gradients.edges_ptr + n * C * K
    saved_ptr += n * C
    states_ptr = workspace_ptr + tl.program_id(0) % 2 * 2 * row_stride + n * C
    initial_ptr, final_ptr = initial.ptr + n * initial.n, final.ptr + n * final.n
    grad_logz = tl.load(grad.ptr + n * grad.n).to(ACC_DTYPE)
    logz = tl.load(logz_ptr + n)
    # A chain without a path has no marginals.
    logz = tl.where(logz == -float("inf"), float("inf"), logz)
    inputs = (states_ptr, saved_ptr, scores, d_scores_ptr, edges, row_stride, middle)
    weights = (logz, grad_logz)
    if tl.program_id(0) % 2 == 0:
        copy_states(states_ptr, saved_ptr + middle64 * row_stride, C, BLOCK_C)
        last_ptr = continue_scan(
            *inputs, length - middle, *weights, UNROLL_IN, UNROLL_OUT, BLOCK_C, ACC_DTYPE, False
        )
        # After the length the gradient is 0, or NaN for an invalid length.
        step_stride, width = row_stride * K, C * K
        for t in range(length, T):
            for e0 in range(0, width, BLOCK_C):
                e = e0 + tl.arange(0, BLOCK_C)
                values = tl.full([BLOCK_C], invalid, tl.float64).to(d_scores_ptr.dtype.element_ty)
                step_ptr = d_scores_ptr + tl.full([], t, tl.int64) * step_stride
                tl.store(step_ptr + e, values, mask=e < width)
        d_final_ptr = gradients.final_ptr + n * C
        store_boundary_marginals(d_final_ptr, final_ptr, final.c, last_ptr, C, *weights, BLOCK_C)
    else:
        if length > 0:
            beta_ptr, step_scores = (
                saved_ptr + (middle64 + 1) * row_stride,
                from_step(scores, middle64),
            )
            step = (states_ptr, beta_ptr, step_scores, edges)
            store_step(*step, UNROLL_OUT, BLOCK_C, ACC_DTYPE, False, True)
        else:
            store_boundary_scores(states_ptr, final_ptr, C, final.c, 0.0, BLOCK_C)
        first_ptr = continue_scan(
            *inputs, middle, *weights, UNROLL_IN, UNROLL_OUT, BLOCK_C, ACC_DTYPE, True
        )
        d_initial_ptr = gradients.initial_ptr + n * C
        store_boundary_marginals(
            d_initial_ptr, initial_ptr, initial.c, first_ptr, C, *weights, BLOCK_C
        )
