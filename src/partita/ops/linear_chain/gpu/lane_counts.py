"""Expected counts of the transitions among few states, with one lane for each token.

See `counts.py`. A lane sums the products of its tokens for all pairs of states in registers, and
the sums of the lanes of a program are added last, in a fixed order.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .counts import split_tokens, token_of_rows
from .lanes import lane_emissions
from .scores import exp_split, transition_range


@triton.jit
def load_row(ptr, at, mask, stride, C: tl.constexpr):
    """Load one number for each state, with 0 outside of the mask."""
    x = ()
    for c in tl.static_range(C):
        x += (tl.load(ptr + at + tl.full([], c, tl.int64) * stride, mask=mask, other=0.0),)
    return x


@triton.jit
def linear_chain_lane_counts_kernel(
    emissions_ptr,  # [T, N, C]
    end_ptr,  # [N, C] or None
    lengths_ptr,  # [N] or None
    range_ptr,  # [parts, 2] fp64
    maxima_ptr,  # [T, N] fp64
    states_ptr,  # [2, T, N, C] fp64
    factors_ptr,  # [T, N] fp64
    parts_ptr,  # [groups, splits, C, C] fp64
    T,
    N,
    parts,
    splits,
    stride_t,
    stride_n,
    stride_c,
    end_n,
    end_c,
    group_stride,
    stride,
    total,
    per_split,
    C: tl.constexpr,
    EXACT: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Sum the products of a split of tokens for all pairs of states."""
    if transition_range(range_ptr, parts, BLOCK_PARTS)[0]:
        split, group = tl.program_id(0) % splits, tl.program_id(0).to(tl.int64) // splits
        base, num_tokens = split_tokens(group, split, (group_stride, stride, total, per_split), N)
        beta_ptr = states_ptr + tl.full([], T, tl.int64) * N * C
        counts = ()
        for _ in tl.static_range(C * C):
            counts += (tl.zeros([LANES], tl.float64),)
        for first in range(0, num_tokens, LANES):
            i = first + tl.arange(0, LANES)
            row = base + i.to(tl.int64) * stride
            t, n, tokens, inside = token_of_rows(lengths_ptr, row, i < num_tokens, T, N)
            scores = load_row(emissions_ptr, t * stride_t + n * stride_n, inside, stride_c, C)
            beta = load_row(beta_ptr, row * C, inside, 1, C)
            left = load_row(states_ptr, (row - N) * C, inside, 1, C)
            maximum = finite_shift(tl.load(maxima_ptr + row, mask=inside, other=0.0))
            factor = tl.load(factors_ptr + row, mask=inside, other=0.0)
            token = (emissions_ptr, end_ptr, n * end_n, tokens, stride_t, stride_c, end_c)
            scores = lane_emissions(token, scores, 0, t, C)
            entered = ()
            for c in tl.static_range(C):
                entered += (exp_split(scores[c] - maximum, EXACT) * beta[c] * factor,)
            sums = ()
            for k in tl.static_range(C):
                for c in tl.static_range(C):
                    sums += (counts[k * C + c] + left[k] * entered[c],)
            counts = sums
        at = tl.program_id(0).to(tl.int64) * C * C
        for pair in tl.static_range(C * C):
            tl.store(parts_ptr + at + pair, tl.sum(counts[pair], axis=0))
