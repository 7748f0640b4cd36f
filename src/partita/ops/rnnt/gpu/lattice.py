"""The lattice of a transducer in kernels: indices of nodes, sizes, lengths, and log-probabilities.

Scores of arcs are logarithms to base 2 in fp64.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, LOG2E, UNFUSED, log1p_tail
from ....primitives.gpu.memory import checked_length
from . import plan

LOG2E_FP32 = tl.constexpr(1.4426950216293335)  # log2(e) as fp32 has it
LN2_FP32 = tl.constexpr(1 / 1.4426950216293335)
BLOCK_ROWS = tl.constexpr(plan.BLOCK_ROWS)
MARGIN = tl.constexpr(plan.MARGIN)

# Triton compiles nothing anew for other values of these arguments.
SIZES = [
    "T",
    "B",
    "U1",
    "V",
    "num_chunks",
    "blank",
    "stride_b",
    "stride_t",
    "stride_u",
    "target_stride",
    "first_step",
    "steps",
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


class Durations(NamedTuple):
    """The logits of the durations and their gradient, `[B, T, U1, K]`, both contiguous.

    Fields:
        ptr: the logits, or None for RNN-T.
        lse_ptr: the log-sum-exps of the nodes, `[B, T, U1]`, or None.
        grad_ptr: the gradient, or None.
    """

    ptr: tl.tensor
    lse_ptr: tl.tensor
    grad_ptr: tl.tensor


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


class LatticeSizes(NamedTuple):
    """The sizes of a batch, and of arrays over its nodes; see `plan.LatticePlan` for these."""

    T: tl.tensor
    B: tl.tensor
    U1: tl.tensor
    num_chunks: tl.tensor
    rows: tl.tensor
    carry_steps: tl.tensor
    nodes: tl.tensor


@triton.jit
def lattice_sizes(T, B, U1, num_chunks):
    """Return the sizes of a batch and of arrays over its nodes, as `plan.lattice_plan` does.

    The chunks are an argument: computed from U1, they would make the scans spill 16 registers.
    """
    rows = tl.cdiv(T + 32, BLOCK_ROWS) * BLOCK_ROWS
    nodes = B.to(tl.int64) * num_chunks * rows * 32 + MARGIN
    return LatticeSizes(T, B, U1, num_chunks, rows, tl.cdiv(T, BLOCK_ROWS) * BLOCK_ROWS, nodes)


@triton.jit
def node_offset(b, t, u, sizes):
    """Return the offset of node (t, u) of sequence b in an array `[B, num_chunks, rows, 32]`."""
    chunk = (b.to(tl.int64) * sizes.num_chunks + u // 32) * sizes.rows
    return (chunk + t + u % 32) * 32 + u % 32


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
