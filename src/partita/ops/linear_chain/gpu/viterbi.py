"""The best score of dense linear chains, and the best state before each state, in one scan.

Source: Forney, The Viterbi algorithm, 1973.
"""

import triton
import triton.language as tl

from ....primitives.gpu.memory import load_matrix
from .arguments import Batch
from .scores import fold_ends, load_end, load_tokens


@triton.jit
def linear_chain_viterbi_kernel(
    batch,  # Batch
    transitions,  # StridedSteps
    previous_ptr,  # [T, N, C] int16: the best state at a token for each state at the next one
    score_ptr,  # [N]
    last_ptr,  # [N] int32: the last state of the best path, or -1
    BLOCK_C: tl.constexpr,
):
    """Find the best score of a sequence, and the best state before each state."""
    batch = Batch(*batch)
    C, emissions = batch.C, batch.emissions
    n, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_C)
    row = tl.full([], batch.N, tl.int64) * C
    tokens, invalid = load_tokens(batch.lengths, n, batch.T)
    x, is_nan = tl.zeros([BLOCK_C], tl.float64), tl.zeros([BLOCK_C], tl.int32)
    transitions_ptr = transitions.ptr + n * transitions.n
    emissions_ptr = emissions.ptr + n * emissions.n
    start, end = load_end(batch.start, n, lane, C), load_end(batch.end, n, lane, C)
    score = tl.load(emissions_ptr + lane * emissions.c, mask=lane < C, other=-float("inf"))
    x = fold_ends(score, 0, tokens, start, end)
    is_nan = (x != x).to(tl.int32)
    at = tl.minimum(1, tokens - 1) * tl.full([], 1, tl.int64) * emissions.t + lane * emissions.c
    score = tl.load(emissions_ptr + at, mask=lane < C, other=-float("inf"))
    for t in range(1, tokens):
        step_ptr = transitions_ptr + tl.full([], t - 1, tl.int64) * transitions.t
        matrix = load_matrix(step_ptr, C, transitions.k, transitions.c, BLOCK_C, -float("inf"))
        matrix = matrix.to(tl.float64)
        is_nan = tl.maximum(is_nan, tl.max((matrix != matrix).to(tl.int32), axis=0))
        at = tl.full([], tl.minimum(t + 1, tokens - 1), tl.int64) * emissions.t
        at += lane * emissions.c
        ahead = tl.load(emissions_ptr + at, mask=lane < C, other=-float("inf"))
        terms = matrix + x[:, None]
        y = tl.max(terms, axis=0)
        # The lowest state that attains the best score; where that is -inf, any.
        is_best = (terms == y[None, :]) & (y[None, :] > -float("inf"))
        index = tl.min(tl.where(is_best, lane[:, None], 2147483647), axis=0)
        at = tl.full([], t - 1, tl.int64) * row + n * C + lane
        tl.store(previous_ptr + at, tl.minimum(index, C - 1), mask=lane < C)
        x = y + fold_ends(score, t, tokens, start, end)
        is_nan = tl.maximum(is_nan, (x != x).to(tl.int32))
        score = ahead
    best, last = tl.max(x, axis=0), tl.argmax(x, axis=0)
    best = tl.where(tl.max(is_nan, axis=0) > 0, float("nan"), best) + invalid
    tl.store(score_ptr + n, best.to(score_ptr.dtype.element_ty))
    tl.store(last_ptr + n, tl.where(best > -float("inf"), last, -1))
