"""The derivatives of means over the paths of dense linear chains, for all tokens at the same time.

The derivative in a score is the posterior of what it scores times the difference between the mean
over the paths through it and that over all paths, see `tangent.py`.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .arguments import Batch
from .counts import split_tokens, token_of_rows
from .marginals import store_end_gradient
from .scores import exp_sum_term
from .tangent import load_values, weighted


@triton.jit
def linear_chain_state_covariances_kernel(
    grad_ptr,  # [N]
    grad_n,
    values,  # Batch, without start and end
    posteriors_ptr,  # [T, N, C] fp64
    means_ptr,  # [T, N, C] fp64
    rests_ptr,  # [T, N, C] fp64
    mean_ptr,  # [N] fp64
    gradients,  # Gradients in fp64
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the derivatives in the emissions, start and end of ROWS tokens."""
    values = Batch(*values)
    T, N, C, emissions = values.T, values.N, values.C, values.emissions
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = tl.full([], T, tl.int64) * N
    t, n, tokens, inside = token_of_rows(values.lengths, row, row < rows, T, N)
    valid = (tokens >= 1) & (tokens <= T)
    c = tl.arange(0, BLOCK_C)[None, :]
    at, mask = row[:, None] * C + c, (inside & valid)[:, None] & (c < C)
    value = (t * emissions.t + n * emissions.n)[:, None] + c.to(tl.int64) * emissions.c
    # Both means have the value of the emission.
    difference = tl.load(means_ptr + at, mask=mask, other=0.0)
    difference -= load_values(emissions.ptr, value, mask)
    difference += tl.load(rests_ptr + at, mask=mask, other=0.0)
    difference -= tl.load(mean_ptr + n, mask=row < rows, other=0.0)[:, None]
    grad = tl.load(grad_ptr + n * grad_n, mask=row < rows, other=0.0).to(tl.float64)
    posterior = tl.load(posteriors_ptr + at, mask=mask, other=0.0) * grad[:, None]
    result = tl.where(valid[:, None], weighted(posterior, difference), float("nan"))
    tl.store(gradients.emissions + at, result, mask=(row < rows)[:, None] & (c < C))
    store_end_gradient(gradients.start, result, n, c, C, (row < rows) & (t == 0))
    is_last = t == tl.where(valid, tokens - 1, 0)
    store_end_gradient(gradients.end, result, n, c, C, (row < rows) & is_last)


@triton.jit
def linear_chain_pair_covariances_kernel(
    grad_ptr,  # [N]
    grad_n,
    transitions,  # StridedSteps
    transition_values,  # StridedSteps
    lengths_ptr,  # [N] or None
    logs_ptr,  # [T, N, C] fp64
    posteriors_ptr,  # [T, N, C] fp64
    sums_ptr,  # [T, N, C] fp64
    means_ptr,  # [T, N, C] fp64
    rests_ptr,  # [T, N, C] fp64
    mean_ptr,  # [N] fp64
    result_ptr,  # [groups, splits, C, C] fp64
    T,
    N,
    C,
    groups,  # CountGroups
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the derivatives in the transitions of a split of tokens, for one tile of them."""
    tiles = tl.cdiv(C, BLOCK)
    tile, part = tl.program_id(0) % (tiles * tiles), tl.program_id(0) // (tiles * tiles)
    split, group = part % groups.splits, part.to(tl.int64) // groups.splits
    k = (tile // tiles * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    c = (tile % tiles * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    base, num_tokens = split_tokens(group, split, groups, N)
    pairs = (k < C) & (c < C)
    sums = tl.zeros([BLOCK, BLOCK], tl.float64)
    for i in range(0, num_tokens):
        row = base + tl.full([1, 1], i, tl.int64) * groups.stride
        t, n, tokens, inside = token_of_rows(lengths_ptr, row, row >= 0, T, N)
        valid = (tokens >= 1) & (tokens <= T)
        mask, at = inside & valid & (k < C), (row - N) * C + k
        state = tl.load(logs_ptr + at, mask=mask, other=-float("inf"))
        before = tl.load(means_ptr + at, mask=mask, other=0.0)
        mask, at = inside & valid & (c < C), row * C + c
        shift = finite_shift(tl.load(sums_ptr + at, mask=mask, other=0.0))
        after = tl.load(rests_ptr + at, mask=mask, other=0.0)
        after -= tl.load(mean_ptr + n, mask=inside, other=0.0)
        weights = tl.load(posteriors_ptr + at, mask=mask, other=0.0)
        weights *= tl.load(grad_ptr + n * grad_n, mask=inside, other=0.0).to(tl.float64)
        mask, at = pairs & inside & valid, k * transitions.k + c * transitions.c
        at += (t - 1) * transitions.t + n * transitions.n
        scores = tl.load(transitions.ptr + at, mask=mask, other=-float("inf")).to(tl.float64)
        at = k * transition_values.k + c * transition_values.c
        at = at + (t - 1) * transition_values.t + n * transition_values.n
        values = load_values(transition_values.ptr, at, mask) + before + after
        shares = exp_sum_term(scores + state - shift, EXACT) * weights
        sums += tl.where(valid, weighted(shares, values), float("nan"))
    at = part.to(tl.int64) * C * C + k * C + c
    tl.store(result_ptr + at, sums, mask=pairs)
