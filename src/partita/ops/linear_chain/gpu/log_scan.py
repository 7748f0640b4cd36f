"""Alpha and beta of dense linear chains in the log domain, for any number of states.

One program scans alpha of a sequence, and another scans beta at the same time. States pass from one
step to the next through memory, since the transitions of many states do not fit into registers.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .arguments import Batch
from .scan import log_sum
from .scores import exp_sum_term, fold_ends, load_end, load_tokens, transition_range


@triton.jit
def log_step(
    state_ptr, transitions_ptr, c, C, stride_r, stride_o, EXACT: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Return the log-sum-exp of state and transitions for the states c, and the offset removed."""
    maximum = tl.full(c.shape, -float("inf"), tl.float64)
    total, greatest = tl.zeros(c.shape, tl.float64), tl.full([], -float("inf"), tl.float64)
    for k0 in range(0, C, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x = tl.load(state_ptr + k, mask=k < C, other=-float("inf"))
        at = k.to(tl.int64)[:, None] * stride_r + c.to(tl.int64)[None, :] * stride_o
        mask = (k < C)[:, None] & (c < C)[None, :]
        scores = tl.load(transitions_ptr + at, mask=mask, other=-float("inf"))
        terms = scores.to(tl.float64) + x[:, None]
        larger = tl.maximum(maximum, tl.max(terms, axis=0))
        shift = finite_shift(larger)
        total *= exp_sum_term(maximum - shift, EXACT)
        total += tl.sum(exp_sum_term(terms - shift[None, :], EXACT), axis=0)
        maximum, greatest = larger, tl.maximum(greatest, tl.max(x, axis=0))
    offset = finite_shift(greatest)
    return tl.log(total) + (finite_shift(maximum) - offset), offset


@triton.jit
def linear_chain_log_scan_kernel(
    batch,  # Batch
    transitions,  # StridedSteps
    saved,  # Saved: states and scales are written if SAVE
    recent_ptr,  # [2, 2, N, C] fp64: the last two states of alpha and beta, with emissions
    logz_ptr,  # [N] fp64
    rounded_ptr,  # [N] in the dtype of results
    SAVE: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Scan alpha of a sequence and compute log Z, or with SAVE in every other program scan beta."""
    batch = Batch(*batch)
    T, N, C = batch.T, batch.N, batch.C
    emissions = batch.emissions
    if not transition_range(saved.span, BLOCK_PARTS)[0]:
        direction = tl.program_id(0) % 2 if SAVE else 0
        n = (tl.program_id(0) // 2 if SAVE else tl.program_id(0)).to(tl.int64)
        is_alpha = direction == 0
        tokens, invalid = load_tokens(batch.lengths, n, T)
        row = tl.full([], N, tl.int64) * C
        recent_ptr += direction * 2 * row + n * C
        states_ptr = saved.states + (direction * row * T + n * C)
        stride_r = tl.where(is_alpha, transitions.k, transitions.c)
        stride_o = tl.where(is_alpha, transitions.c, transitions.k)
        total = tl.full([], 0.0, tl.float64)
        for i in range(0, tokens):
            t = tl.where(is_alpha, tl.full([], i, tl.int64), tokens - 1 - i)
            maximum = tl.load(saved.maxima + t * N + n)
            total += maximum
            step_ptr = transitions.ptr + tl.where(is_alpha, t - 1, t) * transitions.t
            step_ptr += n * transitions.n
            offset = total * 0.0
            for c0 in range(0, C, BLOCK_C):
                c = c0 + tl.arange(0, BLOCK_C)
                y = tl.zeros([BLOCK_C], tl.float64)
                if i > 0:
                    before_ptr = recent_ptr + (i + 1) % 2 * row
                    y, offset = log_step(
                        before_ptr, step_ptr, c, C, stride_r, stride_o, EXACT, BLOCK_K
                    )
                at = t * emissions.t + n * emissions.n + c.to(tl.int64) * emissions.c
                score = tl.load(emissions.ptr + at, mask=c < C, other=-float("inf"))
                start = load_end(batch.start, n, c, C)
                end = load_end(batch.end, n, c, C)
                x = y + (fold_ends(score, t, tokens, start, end) - finite_shift(maximum))
                tl.store(recent_ptr + i % 2 * row + c, x, mask=c < C)
                if SAVE:
                    tl.store(states_ptr + t * row + c, tl.where(is_alpha, x, y), mask=c < C)
            total += offset
            if SAVE:
                tl.store(saved.scales + t * N + n, offset, mask=is_alpha)
            # The next step reads what other threads have stored.
            tl.debug_barrier()
        if is_alpha:
            last_ptr = recent_ptr + (tokens - 1) % 2 * row
            largest, rest = tl.full([], -float("inf"), tl.float64), tl.full([], 0.0, tl.float64)
            for c0 in range(0, C, BLOCK_C):
                c = c0 + tl.arange(0, BLOCK_C)
                part = log_sum(tl.load(last_ptr + c, mask=c < C, other=-float("inf")), True)
                shift = finite_shift(tl.maximum(largest, part))
                # A NaN is no maximum, but stays in the sum.
                rest = rest * tl.exp(largest - shift) + tl.exp(part - shift)
                largest = tl.maximum(largest, part)
            logz = total + tl.log(rest) + finite_shift(largest) + invalid
            tl.store(logz_ptr + n, logz)
            tl.store(rounded_ptr + n, logz.to(rounded_ptr.dtype.element_ty))
