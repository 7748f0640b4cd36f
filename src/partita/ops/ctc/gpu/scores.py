"""The priors of the classes and the star in CTC kernels.

The emission of a class is e**(logit - scale · prior). The log-sum-exp of a step is taken from log Z
later, as without priors, so the star has e**lse as its emission where the kernels read logits, and
1 where they read log-probabilities. Priors are used in fp64, because their errors would add up.

A kernel that has neither gets None for their arguments, and empty tuples stand for them inside,
because a device function cannot return None.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E
from .state import ZERO_EXPONENT, emission_of


class ScoreTensors(NamedTuple):
    """The tensors that scores are computed from; those that a kernel does not need are None.

    Fields:
        rows: `[T, N, C]` logits, or the table of emissions as words, `[N, T, TABLE_WIDTH]`.
        priors: `[C]`, contiguous; None without priors, and for a table, which has them.
        maxima: `[T, N]`, the maximum of each row; None for log-probabilities.
        sums: `[T, N]`, the sum of exponentials relative to it; None likewise.
        limit: the greatest absolute value of a logit that has an emission.
    """

    rows: tl.tensor
    priors: tl.tensor | None
    maxima: tl.tensor | None
    sums: tl.tensor | None
    limit: tl.tensor | None


class EmissionRows(NamedTuple):
    """The logits of a sequence, or its table of emissions as words.

    Fields:
        ptr: the first row.
        stride_t: offset from each row to the next.
        stride_c: offset from each class to the next.
        priors: see `Priors`; empty without priors, and for a table, which has them.
        normalizers: see `Normalizers`; empty without a star, for a table and for log-probabilities.
    """

    ptr: tl.tensor
    stride_t: tl.tensor
    stride_c: tl.tensor
    priors: tuple[tl.tensor, ...]
    normalizers: tuple[tl.tensor, ...]


class Priors(NamedTuple):
    """The priors of the classes.

    Fields:
        ptr: `[C]`.
        scale: the bits of the fp64 factor with which they are subtracted.
    """

    ptr: tl.tensor
    scale: tl.tensor


class Normalizers(NamedTuple):
    """The log-sum-exps of a sequence's steps, as pairs of a maximum and a sum.

    Fields:
        maxima_ptr: the maximum of the first step.
        sums_ptr: the sum of exponentials relative to it.
        stride_t: offset from each step to the next.
    """

    maxima_ptr: tl.tensor
    sums_ptr: tl.tensor
    stride_t: tl.tensor


@triton.jit
def sequence_rows(scores, stride_t, stride_n, stride_c, prior_scale, n, N):
    """Return the rows of a sequence as `EmissionRows`, given the `ScoreTensors` of the batch."""
    priors, normalizers = (), ()
    if scores.priors is not None:
        priors = Priors(scores.priors, prior_scale)
    if scores.maxima is not None:
        normalizers = Normalizers(scores.maxima + n, scores.sums + n, N.to(tl.int64))
    return EmissionRows(scores.rows + n * stride_n, stride_t, stride_c, priors, normalizers)


@triton.jit
def load_priors(priors, v):
    """Return the scaled priors of the classes v in fp64."""
    scale = tl.cast(priors.scale, tl.int64).to(tl.float64, bitcast=True)
    return tl.load(priors.ptr + v).to(tl.float64) * scale


@triton.jit
def prior_emission(priors, v, limit, FP64: tl.constexpr):
    """Return e**-prior of the classes v as emissions. A mantissa is NaN beyond the limit."""
    prior = load_priors(priors, v)
    log2 = 0.0 - prior * LOG2E
    if FP64:
        return (log2,)
    else:
        in_range = tl.abs(prior) <= limit
        integer = tl.floor(tl.where(in_range, log2, 0.0) + 0.5)
        mantissa = tl.exp2((tl.where(in_range, log2, 0.0) - integer).to(tl.float32))
        mantissa = tl.where(in_range, mantissa, tl.where(prior == float("inf"), 1.0, float("nan")))
        return mantissa, tl.where(in_range, integer.to(tl.int32), ZERO_EXPONENT) - 127


@triton.jit
def row_emission(maximum, sum_exp, limit):
    """Return e**lse of steps as an emission, given the maximum and the sum relative to it."""
    mantissa, exponent = emission_of(maximum, limit)
    return mantissa * sum_exp.to(tl.float32), exponent
