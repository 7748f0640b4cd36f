"""CTC's pass over the rows of logits: each step's log-sum-exp, and a table of emissions.

The log-sum-exp is stored as the row's maximum and the sum of exponentials relative to it. With few
classes, the scans read each logit several times; the table then contains the emission of each class
as a word, so that each exponential is computed once.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, exp_for_dtype, finite_shift
from .lattice import INVALID
from .scores import prior_emission, priors_of, row_emission
from .state import emission_of, multiply_emissions, pack_state


@triton.jit
def fill_zeros(zeros_ptr, num_zeros, BLOCK: tl.constexpr):
    """Zero this program's share of the words that the next scan needs; a fill costs a launch."""
    share = tl.cdiv(num_zeros, tl.num_programs(0))
    for first in range(
        tl.program_id(0).to(tl.int64) * share,
        tl.minimum((tl.program_id(0) + 1).to(tl.int64) * share, num_zeros),
        BLOCK,
    ):
        word = first + tl.arange(0, BLOCK)
        tl.store(zeros_ptr + word, tl.zeros([BLOCK], tl.int64), mask=word < num_zeros)


@triton.jit
def with_star(emission, maximum, sum_exp, is_star, limit, HAS_LSE: tl.constexpr):
    """Return emissions [ROWS, BLOCK_V] with the star's: e**lse, or 1 for log-probabilities."""
    mantissa, exponent = (emission[1] * 0).to(tl.float32) + 1.0, emission[1] * 0 - 127
    if HAS_LSE:
        star = row_emission(maximum, sum_exp, limit)
        mantissa, exponent = star[0][:, None], star[1][:, None]
    return tl.where(is_star, mantissa, emission[0]), tl.where(is_star, exponent, emission[1])


@triton.jit
def with_priors(emission, priors, v, limit):
    """Return the emissions [ROWS, BLOCK_V] of the classes v with their priors, if there are any."""
    if len(priors) > 0:
        mantissa, exponent = prior_emission(priors, v, limit, False)
        emission = multiply_emissions(emission, (mantissa[None, :], exponent[None, :]), False)
    return emission


@triton.jit
def store_emissions(
    table_ptr, emission, n, t, T, lane, margin: tl.constexpr, TABLE_WIDTH: tl.constexpr
):
    """Store the emissions of some rows in the table, which has rows before and after its steps."""
    index = (
        tl.multiple_of((n * (T + 2 * margin) + t + margin) * TABLE_WIDTH, 8)[:, None]
        + lane[None, :]
    )
    tl.store(
        table_ptr + index,
        pack_state(emission, False),
        mask=(t < T + margin)[:, None] & (lane < TABLE_WIDTH)[None, :],
    )


@triton.jit(do_not_specialize=["num_zeros", "T", "N", "C", "stride_t", "stride_n", "prior_scale"])
def ctc_normalize_kernel(
    logits_ptr,  # [T, N, C]
    input_lengths_ptr,  # [N]
    maxima_ptr,  # [T, N] or None
    sums_ptr,  # [T, N] or None
    table_ptr,  # [N, 24 + T + 24, TABLE_WIDTH] int64, or None
    zeros_ptr,  # [num_zeros] int64, or None
    flags_ptr,  # [N] int64, which get INVALID for a row without a log-sum-exp, or None
    priors_ptr,  # [C], or None without priors or without a table
    num_zeros,
    T,
    N,
    C,
    limit,
    stride_t,
    stride_n,
    stride_c,
    prior_scale,  # the bits of an fp64 number, or None without priors
    ACC_DTYPE: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,  # row length of the table, or 0
    STAR: tl.constexpr,  # whether the table has the star after the classes
    VEC: tl.constexpr,  # classes that are aligned together
    PIECES: tl.constexpr,  # blocks of classes that are loaded together
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute the maximum and the sum of exponentials of some rows, and their emissions.

    Rows of the table outside of the steps get the emission 0. The kernel also zeroes the words that
    the next scan needs.
    """
    if zeros_ptr is not None:
        fill_zeros(zeros_ptr, num_zeros, 512)
    margin: tl.constexpr = 24 if TABLE_WIDTH else 0  # rows before and after the table's steps
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, n, lane = (
        (row // N).to(tl.int64) - margin,
        (row % N).to(tl.int64),
        tl.arange(0, BLOCK_V),
    )
    mask = (t >= 0) & (t < T) & (t < tl.load(input_lengths_ptr + n))
    source_ptr = logits_ptr + tl.multiple_of(t * stride_t + n * stride_n, VEC)[:, None]
    maximum, sum_exp = tl.full([ROWS], -float("inf"), ACC_DTYPE), tl.zeros([ROWS], ACC_DTYPE)
    for first in range(0, C, PIECES * BLOCK_V):
        pieces, new_maximum = (), maximum
        for i in tl.static_range(PIECES):
            v = first + i * BLOCK_V + lane
            piece_mask = mask[:, None] & (v // VEC * VEC < C)[None, :]
            x = tl.load(
                source_ptr + v.to(tl.int64)[None, :] * stride_c,
                mask=piece_mask,
                other=-float("inf"),
            )
            pieces = pieces + (x.to(ACC_DTYPE),)
        if maxima_ptr is not None:
            for i in tl.static_range(PIECES):
                new_maximum = tl.maximum(new_maximum, tl.max(pieces[i], axis=1))
            shift = finite_shift(new_maximum)
            sum_exp = sum_exp * exp(maximum - shift)
            for i in tl.static_range(PIECES):
                sum_exp += tl.sum(exp_for_dtype(pieces[i] - shift[:, None], ACC_DTYPE), axis=1)
            maximum = new_maximum
        if TABLE_WIDTH:
            emission = emission_of(pieces[0], limit)  # type: ignore[misc]
            priors = priors_of(priors_ptr, prior_scale)
            emission = with_priors(emission, priors, tl.minimum(lane, C - 1), limit)
            if STAR:
                is_star = mask[:, None] & (lane == C)[None, :]
                has_lse: tl.constexpr = maxima_ptr is not None
                emission = with_star(emission, maximum, sum_exp, is_star, limit, has_lse)
            store_emissions(table_ptr, emission, n, t, T, lane, margin, TABLE_WIDTH)
    if maxima_ptr is not None:
        tl.store(maxima_ptr + t * N + n, maximum, mask=mask)
        tl.store(sums_ptr + t * N + n, sum_exp, mask=mask)
    if flags_ptr is not None:
        # The sum is NaN, or 0 where all logits are -inf.
        flag = tl.full([ROWS], INVALID, tl.int64)
        tl.atomic_or(flags_ptr + n, flag, mask=mask & ~(sum_exp > 0.0), sem="relaxed")
