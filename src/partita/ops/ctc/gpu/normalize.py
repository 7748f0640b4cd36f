"""CTC's pass over the rows of logits: each step's log-sum-exp, and a table of emissions.

The log-sum-exp is stored as the row's maximum and the sum of exponentials relative to it. With few
classes, the scans read each logit several times; the table then contains the emission of each class
as a word, so that each exponential is computed once.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, exp_for_dtype, finite_shift
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
def table_emissions(
    x, maximum, sum_exp, priors, mask, C, limit, lane, STAR: tl.constexpr, HAS_LSE: tl.constexpr
):
    """Return the emissions of some rows, [ROWS, BLOCK_V], with the star after the classes.

    The star has the emission e**lse, or 1 for log-probabilities.
    """
    emission = emission_of(x, limit)
    if len(priors) > 0:
        mantissa, exponent = prior_emission(priors, tl.minimum(lane, C - 1), limit, False)
        emission = multiply_emissions(emission, (mantissa[None, :], exponent[None, :]), False)
    if STAR:
        is_star = mask[:, None] & (lane == C)[None, :]
        star = (mask.to(tl.float32) * 0.0 + 1.0, mask.to(tl.int32) * 0 - 127)
        if HAS_LSE:
            star = row_emission(maximum, sum_exp, limit)
        emission = (
            tl.where(is_star, star[0][:, None], emission[0]),
            tl.where(is_star, star[1][:, None], emission[1]),
        )
    return emission


@triton.jit(do_not_specialize=["num_zeros", "T", "N", "C", "stride_t", "stride_n", "prior_scale"])
def ctc_normalize_kernel(
    logits_ptr,  # [T, N, C]
    input_lengths_ptr,  # [N]
    maxima_ptr,  # [T, N] or None
    sums_ptr,  # [T, N] or None
    table_ptr,  # [N, 24 + T + 24, TABLE_WIDTH] int64, or None
    zeros_ptr,  # [num_zeros] int64, or None
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
            emission = table_emissions(
                pieces[0],  # type: ignore[misc]
                maximum,
                sum_exp,
                priors_of(priors_ptr, prior_scale),
                mask,
                C,
                limit,
                lane,
                STAR,
                maxima_ptr is not None,
            )
            index = (
                tl.multiple_of((n * (T + 2 * margin) + t + margin) * TABLE_WIDTH, 8)[:, None]
                + lane[None, :]
            )
            tl.store(
                table_ptr + index,
                pack_state(emission, False),
                mask=(t < T + margin)[:, None] & (lane < TABLE_WIDTH)[None, :],
            )
    if maxima_ptr is not None:
        tl.store(maxima_ptr + t * N + n, maximum, mask=mask)
        tl.store(sums_ptr + t * N + n, sum_exp, mask=mask)
