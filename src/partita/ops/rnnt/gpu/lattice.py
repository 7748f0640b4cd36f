"""The lattice of a transducer in kernels: indices of nodes, lengths, and sums of log-probabilities.

Scores on the lattice are logarithms to base 2 in fp64. Differences below the maximum of a sum are
taken in fp64; only their exponentials, and the logarithm of 1 plus such an exponential, are fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, UNFUSED, log1p_tail
from ....primitives.gpu.memory import checked_length

LOG2E_FP32 = tl.constexpr(1.4426950216293335)  # log2(e) as fp32 has it
LN2_FP32 = tl.constexpr(1 / 1.4426950216293335)
MINUS_ZERO = tl.constexpr(-(2**63))  # the bits of -0.0, which stand for those of 0.0 in messages

# Triton compiles nothing anew for other values of these arguments.
SIZES = [
    "T",
    "B",
    "U1",
    "V",
    "num_chunks",
    "rows",
    "carry_steps",
    "blank",
    "stride_b",
    "stride_t",
    "stride_u",
    "duration_stride_b",
    "duration_stride_t",
    "duration_stride_u",
    "target_stride",
    "first_step",
    "nodes",
]


class Lengths(NamedTuple):
    """The lengths of the sequences of a batch, `[B]` each: steps, and labels."""

    steps: tl.tensor
    labels: tl.tensor


class Targets(NamedTuple):
    """The targets of a batch: labels `[B, U]` with contiguous rows, and `Lengths`."""

    labels: tl.tensor
    lengths: tl.tensor

    @property
    def stride(self) -> int:
        """The offset from a target to the next, which kernels take as `target_stride`."""
        return self.labels.stride(0) if self.labels.shape[1] else 0


class Sequence(NamedTuple):
    """The sizes of one sequence.

    Fields:
        length: number of steps; 0 for an invalid sequence.
        target_len: number of labels; 0 for an invalid sequence.
        invalid: whether a length is out of range.
    """

    length: tl.tensor
    target_len: tl.tensor
    invalid: tl.tensor


@triton.jit
def load_sequence(b, lengths, T, U1):
    """Return the sizes of sequence b."""
    length, is_bad = checked_length(lengths.steps, b, T, 0, 0)
    target_len, has_bad_target = checked_length(lengths.labels, b, U1 - 1, 0, 0)
    invalid = is_bad | has_bad_target
    return Sequence(tl.where(invalid, 0, length), tl.where(invalid, 0, target_len), invalid)


@triton.jit
def node_offset(b, t, u, num_chunks, rows):
    """Return the offset of node (t, u) of sequence b in an array `[B, num_chunks, rows, 32]`."""
    chunk = (b.to(tl.int64) * num_chunks + u // 32) * rows
    return (chunk + t + u % 32) * 32 + u % 32


@triton.jit
def log2_1p(e):
    """Return log2(1 + e) for e in [0, 1], in fp32 with an error below 6e-8 that vanishes with e."""
    if UNFUSED:
        return tl.log2(1.0 + e.to(tl.float64)).to(tl.float32)
    else:
        # The polynomial is fitted to log2(1 + e) / e at Chebyshev points. Its terms are paired,
        # because each of them is on the path from one step to the next.
        s = e * e
        q01 = tl.fma(e, -0.7213461399078369, 1.4426950216293335)
        q23 = tl.fma(e, -0.36001819372177124, 0.48085030913352966)
        q45 = tl.fma(e, -0.22090348601341248, 0.28389522433280945)
        q67 = tl.fma(e, -0.082326240837574, 0.15313147008419037)
        q89 = tl.fma(e, -0.004697961732745171, 0.028719963505864143)
        fourth = s * s
        low = tl.fma(q23, s, q01)
        middle = tl.fma(q67, s, q45)
        return e * tl.fma(tl.fma(q89, fourth, middle), fourth, low)


@triton.jit
def log2_add(a, b, FP64: tl.constexpr):
    """Return log2(2**a + 2**b); the part that is added to the maximum is fp32 unless FP64."""
    greater = tl.where(a > b, a, b)
    if FP64:
        distance = tl.where(a == b, 0.0, -tl.abs(a - b))
        return greater + tl.log2(1.0 + tl.exp2(distance))
    else:
        # Two infinities of one sign have no difference.
        distance = tl.where(a == b, 0.0, -tl.abs((a - b).to(tl.float32)))
        return greater + log2_1p(tl.exp2(distance)).to(tl.float64)


@triton.jit
def log_sum(total, DTYPE: tl.constexpr):
    """Return the natural logarithm of a row's sum in fp64.

    Its absolute error is below 1e-8 if the logits are not fp64.
    """
    if UNFUSED or DTYPE == tl.float64:
        return tl.log(total)
    else:
        bits = total.to(tl.int64, bitcast=True)
        # The exponent is chosen so that the significand 1 + f lies between 2/3 and 4/3.
        exponent = (bits - 0x3FE5555555555555) & -0x10000000000000
        f = (bits - exponent).to(tl.float64, bitcast=True) - 1.0
        f32 = f.to(tl.float32)
        power = (exponent >> 52).to(tl.int32).to(tl.float64)
        y = power * LN2 + (f + (log1p_tail(f32) * (f32 * f32)).to(tl.float64))
        return tl.where(
            (total > 0.0) & (total < float("inf")), y, tl.where(total == 0.0, -float("inf"), total)
        )


@triton.jit
def log2_units(x, DTYPE: tl.constexpr):
    """Return an fp64 logarithm as one to base 2.

    The factor is log2(e) as rounded to DTYPE, in which kernels multiply logits. All scores then
    have the same relative error of 1e-8, and the logits may be far from 0.
    """
    if DTYPE == tl.float64:
        return x * LOG2E
    else:
        return x * LOG2E_FP32
