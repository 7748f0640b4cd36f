"""Posteriors of states and expected counts of transitions, which are the gradient of log Z.

With alpha with its emission and beta without, the posterior of a state is alpha * beta over their
sum Z over the states of the token, whatever the scales of both are. The posterior of a transition
from k to c into the token t is

    alpha[t - 1, k] * exp(transitions[k, c] + e[t, c]) * beta[t, c] * 2**-scale[t] / Z[t],

because 2**-scale[t] was a factor of alpha[t]. The kernel of the states stores its last two factors.
In the log domain it stores the logarithm of their inverse.

Constant transitions have the counts exp(transitions) times the product over all tokens of alpha
before a step with the rest of the posterior after it. The product is taken in fp64 over blocks of
tokens, in a fixed order, and split over programs whose parts are added last. Few states have a lane
for each token, which sums the products of its tokens for all pairs of states in registers.

A group is what one matrix of counts sums over, and each split of it has some of its tokens. The
i-th token of a group is the row (base + group * group_stride + i * stride) of `[T * N]`.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import finite_shift
from .arguments import Batch
from .lanes import lane_emissions, load_lane
from .scores import (
    exp_split,
    exp_sum_term,
    token_of_rows,
    token_scores,
    transition_range,
)


@triton.jit
def store_end_gradient(ptr, d_emission, n, c, C, mask):
    """Store the gradient in start or end, which is that in the emission of their token."""
    if ptr is not None:
        at = n[:, None] * C + c
        tl.store(ptr + at, d_emission.to(ptr.dtype.element_ty), mask=mask[:, None] & (c < C))


@triton.jit
def linear_chain_marginals_kernel(
    grad_ptr,  # [N]
    grad_n,
    lengths_ptr,  # [N] or None
    saved,  # Saved, without maxima
    factors_ptr,  # [T, N] fp64: factors of transitions, or logarithms of their inverses
    gradients,  # Gradients
    T,
    N,
    C,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Compute the gradients in the emissions, start and end of ROWS tokens.

    Those of a sequence whose length is invalid are NaN.
    """
    # A program has tokens of sequences with the same transitions.
    sets, program = saved.span.sets, tl.program_id(0).to(tl.int64)
    is_linear, _ = transition_range(saved.span, program, BLOCK_PARTS)
    row = (program // sets * ROWS + tl.arange(0, ROWS)) * sets + program % sets
    rows = tl.full([], T, tl.int64) * N
    t, n, tokens, inside = token_of_rows(lengths_ptr, row, row < rows, T, N)
    is_valid = (tokens >= 1) & (tokens <= T)
    active = inside & is_valid & (t < tokens)
    c = tl.arange(0, BLOCK_C)[None, :]
    at, mask = row[:, None] * C + c, active[:, None] & (c < C)
    other = tl.where(is_linear, 0.0, -float("inf"))
    alpha = tl.load(saved.states + at, mask=mask, other=other)
    beta = tl.load(saved.states + rows * C + at, mask=mask, other=other)
    if is_linear:
        shift = tl.zeros([ROWS], tl.float64)
        weights = alpha * beta
    else:
        terms = alpha + beta
        shift = finite_shift(tl.max(terms, axis=1))
        weights = tl.exp(terms - shift[:, None])
    # Without a path all posteriors are 0.
    total = tl.sum(weights, axis=1)
    posterior = weights * tl.where(total == 0.0, 0.0, 1.0 / total)[:, None]
    scale = tl.load(saved.scales + row, mask=active & (t > 0), other=0.0)
    grad = tl.load(grad_ptr + n * grad_n, mask=row < rows, other=0.0).to(tl.float64)
    if is_linear:
        factor = tl.where(total == 0.0, 0.0, grad * tl.exp2(-scale) / total)
    else:
        factor = tl.where(total == 0.0, float("inf"), tl.log(total) + shift + scale)
    tl.store(factors_ptr + row, tl.where(is_valid, factor, float("nan")), mask=row < rows)
    d_emission = tl.where(is_valid[:, None], posterior * grad[:, None], float("nan"))
    value = d_emission.to(gradients.emissions.dtype.element_ty)
    tl.store(gradients.emissions + at, value, mask=(row < rows)[:, None] & (c < C))
    store_end_gradient(gradients.start, d_emission, n, c, C, (row < rows) & (t == 0))
    is_last = t == tl.where(is_valid, tokens - 1, 0)
    store_end_gradient(gradients.end, d_emission, n, c, C, (row < rows) & is_last)


@triton.jit
def split_tokens(group, split, groups, N):
    """Return the first row of a split and the number of its tokens."""
    i = split.to(tl.int64) * groups.per_split
    first = N + group * groups.group_stride + i * groups.stride
    return first, tl.minimum(groups.total - i, groups.per_split)


@triton.jit
def tile_of_program(groups, N, C, BLOCK: tl.constexpr):
    """Return the states of a tile, the number of its matrix, its first row and number of tokens."""
    tiles = tl.cdiv(C, BLOCK)
    tile, part = tl.program_id(0) % (tiles * tiles), (tl.program_id(0) // (tiles * tiles))
    split, group = part % groups.splits, part.to(tl.int64) // groups.splits
    k = tile // tiles * BLOCK + tl.arange(0, BLOCK)
    c = tile % tiles * BLOCK + tl.arange(0, BLOCK)
    base, num_tokens = split_tokens(group, split, groups, N)
    return k, c, part.to(tl.int64), base, num_tokens


@triton.jit
def entered_scores(batch, maxima_ptr, row, t, n, tokens, inside, c):
    """Return emissions and end scores of tokens relative to their maxima, `[ROWS, BLOCK_C]`."""
    mask = inside[:, None] & (c < batch.C)[None, :]
    score = token_scores(batch, t, n, tokens, c, mask, -float("inf"))
    maximum = tl.load(maxima_ptr + row, mask=inside, other=0.0)
    return score - finite_shift(maximum)[:, None]


@triton.jit
def linear_chain_counts_kernel(
    grad_ptr,  # [N]
    grad_n,
    batch,  # Batch, whose start has no scores
    transitions,  # StridedSteps
    saved,  # Saved, without scales
    factors_ptr,  # [T, N] fp64
    counts_ptr,  # [groups, splits, C, C]
    groups,  # CountGroups
    SERVES_LINEAR: tl.constexpr,  # whether this kernel takes linear arithmetic too
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Sum the products, or in the log domain the posteriors, of a split of tokens for one tile."""
    batch = Batch(*batch)
    T, N, C = batch.T, batch.N, batch.C
    part = tl.program_id(0).to(tl.int64) // (tl.cdiv(C, BLOCK) * tl.cdiv(C, BLOCK))
    is_linear, _ = transition_range(saved.span, part // groups.splits, BLOCK_PARTS)
    beta_ptr = saved.states + tl.full([], T, tl.int64) * N * C
    # Each branch computes what both of them need, so that they share no registers.
    if not is_linear:
        k, c, part, base, num_tokens = tile_of_program(groups, N, C, BLOCK)
        pair_mask = (k < C)[:, None] & (c < C)[None, :]
        counts = tl.zeros([BLOCK, BLOCK], tl.float64)
        from_ptr = transitions.ptr + k[:, None].to(tl.int64) * transitions.k
        pair_ptr = from_ptr + c[None, :].to(tl.int64) * transitions.c
        for i in range(0, num_tokens):
            row = base + tl.full([1], i, tl.int64) * groups.stride
            t, n, tokens, inside = token_of_rows(batch.lengths, row, row >= 0, T, N)
            scores = entered_scores(batch, saved.maxima, row, t, n, tokens, inside, c)
            mask = inside[:, None] & (c < C)[None, :]
            beta = tl.load(beta_ptr + row[:, None] * C + c, mask=mask, other=-float("inf"))
            entered = beta + scores
            entered -= tl.load(factors_ptr + row, mask=inside, other=0.0)[:, None]
            mask = inside[:, None] & (k < C)[:, None]
            left_ptr = saved.states + (row - N)[:, None] * C + k[:, None]
            left = tl.load(left_ptr, mask=mask, other=-float("inf"))
            step = ((t - 1) * transitions.t + n * transitions.n)[:, None]
            mask = pair_mask & inside[:, None]
            scores = tl.load(pair_ptr + step, mask=mask, other=-float("inf")).to(tl.float64)
            grad = tl.load(grad_ptr + n * grad_n, mask=inside, other=0.0).to(tl.float64)
            counts += exp_sum_term(left + scores + entered, EXACT) * grad[:, None]
        at = part * C * C + k[:, None].to(tl.int64) * C + c[None, :]
        tl.store(counts_ptr + at, counts.to(counts_ptr.dtype.element_ty), mask=pair_mask)
    elif SERVES_LINEAR:
        k, c, part, base, num_tokens = tile_of_program(groups, N, C, BLOCK)
        counts = tl.zeros([BLOCK, BLOCK], tl.float64)
        for first in range(0, num_tokens, ROWS):
            i = first + tl.arange(0, ROWS)
            row = base + i.to(tl.int64) * groups.stride
            t, n, tokens, inside = token_of_rows(batch.lengths, row, i < num_tokens, T, N)
            scores = entered_scores(batch, saved.maxima, row, t, n, tokens, inside, c)
            mask = inside[:, None] & (c < C)[None, :]
            beta = tl.load(beta_ptr + row[:, None] * C + c[None, :], mask=mask, other=0.0)
            factor = tl.load(factors_ptr + row, mask=inside, other=0.0)
            entered = exp_split(scores, EXACT) * beta * factor[:, None]
            left_ptr = saved.states + (row - N)[None, :] * C + k[:, None]
            left = tl.load(left_ptr, mask=inside[None, :] & (k < C)[:, None], other=0.0)
            counts = tl.dot(left, entered, counts, out_dtype=tl.float64)
        at = part * C * C + k[:, None].to(tl.int64) * C + c[None, :]
        tl.store(counts_ptr + at, counts, mask=(k < C)[:, None] & (c < C)[None, :])


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
    split = tl.program_id(0) % groups.splits
    group = tl.program_id(0).to(tl.int64) // groups.splits
    if transition_range(saved.span, group, BLOCK_PARTS)[0]:
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
            scores = load_lane(emissions.ptr + at, C, emissions.c, inside)
            beta = load_lane(beta_ptr + row * C, C, mask=inside)
            left = load_lane(saved.states + (row - N) * C, C, mask=inside)
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


@triton.jit
def linear_chain_sum_counts_kernel(
    transitions,  # StridedSteps
    span,  # Span
    parts_ptr,  # [groups, splits, C, C] fp64
    counts_ptr,  # [groups, C, C]
    C,
    splits,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Add the parts of the counts in the order of the splits, and multiply by exp(transitions)."""
    pairs = tl.full([], C, tl.int64) * C
    blocks = tl.cdiv(pairs, BLOCK)
    group = tl.program_id(0) // blocks
    is_linear, shift = transition_range(span, group, BLOCK_PARTS)
    pair = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK], tl.float64)
    for first in range(0, splits, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)[:, None]
        mask = (split < splits) & (pair < pairs)[None, :]
        at = (group * splits + split) * pairs + pair[None, :]
        counts += tl.sum(tl.load(parts_ptr + at, mask=mask, other=0.0), axis=0)
    at = group * transitions.n + pair // C * transitions.k + pair % C * transitions.c
    scores = tl.load(transitions.ptr + at, mask=pair < pairs, other=0.0).to(tl.float64)
    counts = tl.where(is_linear, counts * tl.exp(scores - shift), counts)
    tl.store(
        counts_ptr + group * pairs + pair,
        counts.to(counts_ptr.dtype.element_ty),
        mask=pair < pairs,
    )
