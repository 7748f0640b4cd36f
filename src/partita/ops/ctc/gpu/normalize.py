"""CTC's pass over the rows of logits: each step's log-sum-exp, and a table of emissions.

The log-sum-exp is stored as the row's maximum and the sum of exponentials relative to it. With few
classes, the scans read each logit several times; the table then contains the emission of each class
as a word, so that each exponential is computed once.
"""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp, exp_for_dtype, finite_shift
from .lattice import INVALID
from .scores import Priors, prior_emission, row_emission
from .state import emission_of, multiply_emissions, pack_state


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
        share = tl.cdiv(num_zeros, tl.num_programs(0))
        start = tl.program_id(0).to(tl.int64) * share
        end = tl.minimum((tl.program_id(0) + 1).to(tl.int64) * share, num_zeros)
        for first in range(start, end, 512):
            word = first + tl.arange(0, 512)
            tl.store(zeros_ptr + word, tl.zeros([512], tl.int64), mask=word < num_zeros)
    margin: tl.constexpr = 24 if TABLE_WIDTH else 0  # rows before and after the table's steps
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, n, lane = (row // N).to(tl.int64) - margin, (row % N).to(tl.int64), tl.arange(0, BLOCK_V)
    mask = (t >= 0) & (t < T) & (t < tl.load(input_lengths_ptr + n))
    source_ptr = logits_ptr + tl.multiple_of(t * stride_t + n * stride_n, VEC)[:, None]
    maximum, sum_exp = tl.full([ROWS], -float("inf"), ACC_DTYPE), tl.zeros([ROWS], ACC_DTYPE)
    for first in range(0, C, PIECES * BLOCK_V):
        pieces, new_maximum = (), maximum
        for i in tl.static_range(PIECES):
            v = first + i * BLOCK_V + lane
            piece_mask = mask[:, None] & (v // VEC * VEC < C)[None, :]
            ptrs = source_ptr + v.to(tl.int64)[None, :] * stride_c
            x = tl.load(ptrs, mask=piece_mask, other=-float("inf"))
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
            if priors_ptr is not None:
                priors = Priors(priors_ptr, prior_scale)
                prior = prior_emission(priors, tl.minimum(lane, C - 1), limit, False)
                prior = prior[0][None, :], prior[1][None, :]
                emission = multiply_emissions(emission, prior, False)
            if STAR:
                # The star has e**lse, or 1 for log-probabilities.
                is_star = mask[:, None] & (lane == C)[None, :]
                star_mantissa = (emission[1] * 0).to(tl.float32) + 1.0
                star_exponent = emission[1] * 0 - 127
                if maxima_ptr is not None:
                    star = row_emission(maximum, sum_exp, limit)
                    star_mantissa, star_exponent = star[0][:, None], star[1][:, None]
                mantissa = tl.where(is_star, star_mantissa, emission[0])
                emission = mantissa, tl.where(is_star, star_exponent, emission[1])
            row_index = (n * (T + 2 * margin) + t + margin) * TABLE_WIDTH
            word = tl.multiple_of(row_index, 8)[:, None] + lane[None, :]
            table_mask = (t < T + margin)[:, None] & (lane < TABLE_WIDTH)[None, :]
            tl.store(table_ptr + word, pack_state(emission, False), mask=table_mask)
    if maxima_ptr is not None:
        tl.store(maxima_ptr + t * N + n, maximum, mask=mask)
        tl.store(sums_ptr + t * N + n, sum_exp, mask=mask)
    if flags_ptr is not None:
        # The sum is NaN, or 0 where all logits are -inf.
        flag = tl.full([ROWS], INVALID, tl.int64)
        tl.atomic_or(flags_ptr + n, flag, mask=mask & ~(sum_exp > 0.0), sem="relaxed")
