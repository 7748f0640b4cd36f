"""Log Z and its gradient for small batches of short sequences, in one launch each.

The host takes longer to launch a kernel than such a batch takes a GPU. So one kernel does what the
kernels of `prepare.py` and `scan.py` do: each program finds the range of the transitions and the
maxima of its tokens, and takes the linear or the log domain. Another kernel does what those of
`marginals.py` and `counts.py` do. It needs no partial sums, because a program sums over all tokens.
"""

import triton
import triton.language as tl

from .counts import entered_scores
from .marginals import gradient_of_rows, store_gradients
from .scan import scan_sequence
from .scores import MAX_SPAN, exp_split, exp_sum_term, transition_range


@triton.jit
def range_of_matrix(transitions_ptr, C, trans_k, trans_c, BLOCK_C: tl.constexpr):
    """Return the greatest and the least transition."""
    k, c = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    at = k.to(tl.int64) * trans_k + c.to(tl.int64) * trans_c
    inside = (k < C) & (c < C)
    scores = tl.load(transitions_ptr + at, mask=inside, other=-float("inf")).to(tl.float64)
    greatest = tl.max(tl.max(scores, axis=1), axis=0)
    return greatest, tl.min(tl.min(tl.where(inside, scores, float("inf")), axis=1), axis=0)


@triton.jit
def linear_chain_short_scan_kernel(
    emissions_ptr,  # [T, N, C]
    transitions_ptr,  # [C, C]
    start_ptr,  # [N, C] or None
    end_ptr,  # [N, C] or None
    lengths_ptr,  # [N] or None
    range_ptr,  # [1, 2] fp64, if SAVE
    maxima_ptr,  # [T, N] fp64, if SAVE
    states_ptr,  # [2, T, N, C] fp64: alpha and beta, if SAVE
    scales_ptr,  # [T, N] fp64: the exponents or offsets of alpha, if SAVE
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results
    T,
    N,
    C,
    stride_t,
    stride_n,
    stride_c,
    trans_k,
    trans_c,
    start_n,
    start_c,
    end_n,
    end_c,
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Scan a sequence in one direction, and store what the gradient needs."""
    greatest, least = range_of_matrix(transitions_ptr, C, trans_k, trans_c, BLOCK_C)
    if SAVE:
        tl.store(range_ptr, greatest, mask=tl.program_id(0) == 0)
        tl.store(range_ptr + 1, least, mask=tl.program_id(0) == 0)
    chain = (emissions_ptr, transitions_ptr, start_ptr, end_ptr, lengths_ptr)
    stored = (None, maxima_ptr, states_ptr, scales_ptr)
    results, sizes = (logz_ptr, rounded_ptr), (T, N, C)
    strides = (stride_t, stride_n, stride_c, 0, 0, trans_k, trans_c)
    strides = strides + (start_n, start_c, end_n, end_c)
    data = (chain, stored, results, sizes, strides)
    if greatest - least <= MAX_SPAN:
        scan_sequence(*data, greatest, False, True, SAVE, EXACT, AHEAD, BLOCK_C)
    else:
        # Half of the first call is spent on compiling the scans. A step in the log domain takes
        # longer than a load, so it is enough to load one step ahead.
        scan_sequence(*data, greatest, True, True, SAVE, EXACT, 1, BLOCK_C)


@triton.jit
def linear_chain_short_gradient_kernel(
    grad_ptr,  # [N]
    emissions_ptr,  # [T, N, C]
    transitions_ptr,  # [C, C]
    end_ptr,  # [N, C] or None
    lengths_ptr,  # [N] or None
    range_ptr,  # [1, 2] fp64
    maxima_ptr,  # [T, N] fp64
    states_ptr,  # [2, T, N, C] fp64
    scales_ptr,  # [T, N] fp64
    d_emissions_ptr,  # [T, N, C]
    d_transitions_ptr,  # [C, C]
    d_start_ptr,  # [N, C] or None
    d_end_ptr,  # [N, C] or None
    T,
    N,
    C,
    grad_n,
    stride_t,
    stride_n,
    stride_c,
    trans_k,
    trans_c,
    end_n,
    end_c,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the gradient in the transitions from a state, and every C-th block of the others."""
    is_linear, shift = transition_range(range_ptr, 1, 1)
    k, c, rows = tl.program_id(0), tl.arange(0, BLOCK_C), tl.full([], T, tl.int64) * N
    at = k.to(tl.int64) * trans_k + c.to(tl.int64) * trans_c
    scores = tl.load(transitions_ptr + at, mask=c < C, other=-float("inf")).to(tl.float64)
    other = tl.where(is_linear, 0.0, -float("inf"))
    counts, sizes = tl.zeros([ROWS, BLOCK_C], tl.float64), (T, N, C)
    inputs = (grad_ptr, lengths_ptr, states_ptr, scales_ptr)
    gradients = (d_emissions_ptr, d_start_ptr, d_end_ptr)
    for block in range(0, tl.cdiv(rows, ROWS)):
        row = tl.full([], block, tl.int64) * ROWS + tl.arange(0, ROWS)
        d_emission, factor, token, grad = gradient_of_rows(
            *inputs, row, sizes, grad_n, is_linear, BLOCK_C
        )
        t, n, tokens, inside, active = token
        store_gradients(gradients, d_emission, row, token, C, block % C == k, BLOCK_C)
        entered = active & (t > 0)
        relative = entered_scores(
            emissions_ptr,
            end_ptr,
            maxima_ptr,
            (t, n, tokens, entered),
            row,
            c,
            C,
            (stride_t, stride_n, stride_c, end_n, end_c),
        )
        mask = entered[:, None] & (c < C)[None, :]
        beta = tl.load(states_ptr + (rows + row)[:, None] * C + c[None, :], mask=mask, other=other)
        left = tl.load(states_ptr + (row - N) * C + k, mask=entered, other=other)
        if is_linear:
            term = left[:, None] * (exp_split(relative, EXACT) * beta * factor[:, None])
        else:
            score = (left - factor)[:, None] + scores[None, :] + relative + beta
            term = exp_sum_term(score, EXACT) * grad[:, None]
        # An invalid length is 0 here, and its factor is NaN. Tokens past a length have to be left
        # out, because an infinite transition or a gradient of NaN makes their terms NaN.
        is_term = entered | (inside & (t > 0) & (tokens < 1))
        counts += tl.where(is_term[:, None], term, 0.0)
    total = tl.sum(counts, axis=0)
    total = tl.where(is_linear, total * tl.exp(scores - shift), total)
    at = d_transitions_ptr + k.to(tl.int64) * C + c
    tl.store(at, total.to(d_transitions_ptr.dtype.element_ty), mask=c < C)
