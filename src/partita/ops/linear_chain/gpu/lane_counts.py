"""Expected counts of the transitions among few states, with one lane for each token.

See `gradient.py`. A lane sums the products of its tokens for all pairs of states in registers, and
the sums of the lanes of a program are added last, in a fixed order.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .arguments import Batch
from .gradient import split_tokens
from .lanes import lane_emissions
from .scores import exp_split, token_of_rows, transition_range


@triton.jit
def load_row(ptr, at, mask, stride, C: tl.constexpr):
    """Load one number for each state, with 0 outside of the mask."""
    x = ()
    for c in tl.static_range(C):
        x += (tl.load(ptr + at + tl.full([], c, tl.int64) * stride, mask=mask, other=0.0),)
    return x


@triton.jit
def linear_chain_lane_counts_kernel(
    batch,  # Batch, whose start has no scores
    saved,  # Saved, without scales
    factors_ptr,  # [T, N] fp64
    counts_ptr,  # [groups, splits, C, C] fp64
    groups,  # CountGroups
    C: tl.constexpr,
    EXACT: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Sum the products of a split of tokens for all pairs of states."""
    batch = Batch(*batch)
    T, N, emissions = batch.T, batch.N, batch.emissions
    if transition_range(saved.span, BLOCK_PARTS)[0]:
        split = tl.program_id(0) % groups.splits
        group = tl.program_id(0).to(tl.int64) // groups.splits
        base, num_tokens = split_tokens(group, split, groups, N)
        beta_ptr = saved.states + tl.full([], T, tl.int64) * N * C
        counts = ()
        for _ in tl.static_range(C * C):
            counts += (tl.zeros([LANES], tl.float64),)
        for first in range(0, num_tokens, LANES):
            i = first + tl.arange(0, LANES)
            row = base + i.to(tl.int64) * groups.stride
            t, n, tokens, inside = token_of_rows(batch.lengths, row, i < num_tokens, T, N)
            at = t * emissions.t + n * emissions.n
            scores = load_row(emissions.ptr, at, inside, emissions.c, C)
            beta = load_row(beta_ptr, row * C, inside, 1, C)
            left = load_row(saved.states, (row - N) * C, inside, 1, C)
            maximum = finite_shift(tl.load(saved.maxima + row, mask=inside, other=0.0))
            factor = tl.load(factors_ptr + row, mask=inside, other=0.0)
            scores = lane_emissions(batch.end, n * batch.end.n, tokens, scores, 0, t, C)
            entered = ()
            for c in tl.static_range(C):
                entered += (exp_split(scores[c] - maximum, EXACT) * beta[c] * factor,)
            sums = ()
            for k in tl.static_range(C):
                for c in tl.static_range(C):
                    sums += (counts[k * C + c] + left[k] * entered[c],)
            counts = sums
        counts_ptr += tl.program_id(0).to(tl.int64) * C * C
        for pair in tl.static_range(C * C):
            tl.store(counts_ptr + pair, tl.sum(counts[pair], axis=0))
