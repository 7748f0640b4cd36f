"""Log Z and its gradient for small batches of short sequences, in one launch each.

The host takes longer to launch a kernel than such a batch takes a GPU. So one kernel does what the
kernels of `scan.py` do: each program finds the range of the transitions and the maxima of its
tokens, and takes the linear or the log domain. Another kernel does what those of `marginals.py` and
`counts.py` do. It needs no partial sums, because a program sums over all tokens.
"""

import triton
import triton.language as tl

from .arguments import Batch, StridedSteps
from .counts import entered_scores
from .marginals import gradient_of_rows, store_gradients
from .scan import scan_sequence
from .scores import MAX_SPAN, exp_split, exp_sum_term, transition_range


@triton.jit
def linear_chain_short_scan_kernel(
    batch,  # Batch
    transitions,  # StridedPairs
    saved,  # Saved, written if SAVE
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Scan a sequence in one direction, and store what the gradient needs."""
    batch = Batch(*batch)
    k, c = tl.arange(0, BLOCK_C)[:, None], tl.arange(0, BLOCK_C)[None, :]
    at = k.to(tl.int64) * transitions.k + c.to(tl.int64) * transitions.c
    inside = (k < batch.C) & (c < batch.C)
    scores = tl.load(transitions.ptr + at, mask=inside, other=-float("inf")).to(tl.float64)
    greatest = tl.max(tl.max(scores, axis=1), axis=0)
    least = tl.min(tl.min(tl.where(inside, scores, float("inf")), axis=1), axis=0)
    if SAVE:
        tl.store(saved.span.ptr, greatest, mask=tl.program_id(0) == 0)
        tl.store(saved.span.ptr + 1, least, mask=tl.program_id(0) == 0)
    steps = StridedSteps(transitions.ptr, 0, 0, transitions.k, transitions.c)
    data = (batch, steps, saved, logz_ptr, rounded_ptr, None, greatest)
    if greatest - least <= MAX_SPAN:
        scan_sequence(*data, False, True, SAVE, EXACT, AHEAD, BLOCK_C)
    else:
        # Half of the first call is spent on compiling the scans. A step in the log domain takes
        # longer than a load, so it is enough to load one step ahead.
        scan_sequence(*data, True, True, SAVE, EXACT, 1, BLOCK_C)


@triton.jit
def linear_chain_short_gradient_kernel(
    grad_ptr,  # [N]
    grad_n,
    batch,  # Batch, without start
    transitions,  # StridedPairs
    saved,  # Saved
    gradients,  # Gradients
    d_transitions_ptr,  # [C, C]
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the gradient in the transitions from a state, and every C-th block of the others."""
    batch = Batch(*batch)
    T, N, C = batch.T, batch.N, batch.C
    is_linear, shift = transition_range(saved.span, 1)
    k, c, rows = tl.program_id(0), tl.arange(0, BLOCK_C), tl.full([], T, tl.int64) * N
    at = k.to(tl.int64) * transitions.k + c.to(tl.int64) * transitions.c
    scores = tl.load(transitions.ptr + at, mask=c < C, other=-float("inf")).to(tl.float64)
    other = tl.where(is_linear, 0.0, -float("inf"))
    counts = tl.zeros([ROWS, BLOCK_C], tl.float64)
    for block in range(0, tl.cdiv(rows, ROWS)):
        row = tl.full([], block, tl.int64) * ROWS + tl.arange(0, ROWS)
        d_emission, factor, token, grad = gradient_of_rows(
            grad_ptr, grad_n, batch.lengths, saved, row, T, N, C, is_linear, BLOCK_C
        )
        store_gradients(gradients, d_emission, row, token, C, block % C == k, BLOCK_C)
        t, n, tokens, inside, active = token
        entered = active & (t > 0)
        relative = entered_scores(batch, saved.maxima, row, t, n, tokens, entered, c)
        mask = entered[:, None] & (c < C)[None, :]
        beta_ptr = saved.states + (rows + row)[:, None] * C + c[None, :]
        beta = tl.load(beta_ptr, mask=mask, other=other)
        left = tl.load(saved.states + (row - N) * C + k, mask=entered, other=other)
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
