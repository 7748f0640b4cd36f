"""The derivatives of means over the paths of dense linear chains, for all tokens at the same time.

The derivative in a score is the posterior of what it scores times the difference between the mean
over the paths through it and that over all paths, see `tangent.py`.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .counts import split_tokens, token_of_rows
from .marginals import store_end_gradient
from .scores import exp_sum_term
from .tangent import load_values, weighted


@triton.jit
def linear_chain_state_covariances_kernel(
    grad_ptr,  # [N]
    emission_values_ptr,  # [T, N, C]
    lengths_ptr,  # [N] or None
    posteriors_ptr,  # [T, N, C] fp64
    means_ptr,  # [T, N, C] fp64
    rests_ptr,  # [T, N, C] fp64
    mean_ptr,  # [N] fp64
    d_emissions_ptr,  # [T, N, C] fp64
    d_start_ptr,  # [N, C] fp64 or None
    d_end_ptr,  # [N, C] fp64 or None
    T,
    N,
    C,
    grad_n,
    emission_t,
    emission_n,
    emission_c,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Compute the derivatives in the emissions, start and end of ROWS tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = tl.full([], T, tl.int64) * N
    t, n, tokens, inside = token_of_rows(lengths_ptr, row, row < rows, T, N)
    valid = (tokens >= 1) & (tokens <= T)
    c = tl.arange(0, BLOCK_C)[None, :]
    at, mask = row[:, None] * C + c, (inside & valid)[:, None] & (c < C)
    value = (t * emission_t + n * emission_n)[:, None] + c.to(tl.int64) * emission_c
    # Both means have the value of the emission.
    difference = tl.load(means_ptr + at, mask=mask, other=0.0) - load_values(
        emission_values_ptr, value, mask
    )
    difference += tl.load(rests_ptr + at, mask=mask, other=0.0)
    difference -= tl.load(mean_ptr + n, mask=row < rows, other=0.0)[:, None]
    grad = tl.load(grad_ptr + n * grad_n, mask=row < rows, other=0.0).to(tl.float64)
    posterior = tl.load(posteriors_ptr + at, mask=mask, other=0.0) * grad[:, None]
    result = tl.where(valid[:, None], weighted(posterior, difference), float("nan"))
    tl.store(d_emissions_ptr + at, result, mask=(row < rows)[:, None] & (c < C))
    store_end_gradient(d_start_ptr, result, n, c, C, (row < rows) & (t == 0))
    is_last = t == tl.where(valid, tokens - 1, 0)
    store_end_gradient(d_end_ptr, result, n, c, C, (row < rows) & is_last)


@triton.jit
def linear_chain_pair_covariances_kernel(
    grad_ptr,  # [N]
    transitions_ptr,  # [C, C] or [T - 1, N, C, C]
    transition_values_ptr,  # of the shape of the transitions, or [N, C, C]
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
    splits,
    grad_n,
    trans_t,
    trans_n,
    trans_k,
    trans_c,
    value_t,
    value_n,
    value_k,
    value_c,
    group_stride,
    stride,
    total,
    per_split,
    EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the derivatives in the transitions of a split of tokens, for one tile of them."""
    tiles = tl.cdiv(C, BLOCK)
    tile, part = tl.program_id(0) % (tiles * tiles), tl.program_id(0) // (tiles * tiles)
    split, group = part % splits, part.to(tl.int64) // splits
    k = (tile // tiles * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    c = (tile % tiles * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    base, num_tokens = split_tokens(group, split, (group_stride, stride, total, per_split), N)
    pairs = (k < C) & (c < C)
    sums = tl.zeros([BLOCK, BLOCK], tl.float64)
    for i in range(0, num_tokens):
        row = base + tl.full([1, 1], i, tl.int64) * stride
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
        mask, at = pairs & inside & valid, k * trans_k + c * trans_c
        at += (t - 1) * trans_t + n * trans_n
        scores = tl.load(transitions_ptr + at, mask=mask, other=-float("inf")).to(tl.float64)
        at = k * value_k + c * value_c + (t - 1) * value_t + n * value_n
        values = load_values(transition_values_ptr, at, mask) + before + after
        shares = exp_sum_term(scores + state - shift, EXACT) * weights
        sums += tl.where(valid, weighted(shares, values), float("nan"))
    at = part.to(tl.int64) * C * C + k * C + c
    tl.store(result_ptr + at, sums, mask=pairs)
