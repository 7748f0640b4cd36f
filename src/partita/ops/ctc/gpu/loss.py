"""CTC's partition function and loss, from α and β at the middle step."""

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, finite_shift, log_exact
from .lattice import load_lengths
from .state import (
    MIN_EXPONENT,
    ZERO_EXPONENT,
    add,
    constant_state,
    exp2_int,
    multiply_emission,
    select,
    unpack_state,
)

LOSS_SIZES = ["T", "N", "M", "max_target_len", "num_chunks", "num_blocks"]


@triton.jit
def load_states(ptr, mask, FP64: tl.constexpr):
    """Load states from memory; masked ones are 0."""
    return select(
        mask,
        unpack_state(tl.load(ptr, mask=mask, other=0), FP64),
        constant_state(0, mask.to(tl.int32), FP64),
        FP64,
    )


@triton.jit
def multiply(a, b, FP64: tl.constexpr):
    """Return the product of a sum of states and a state."""
    if FP64:
        return (a[0] + b[0],)
    else:
        return multiply_emission(a, (b[0], tl.maximum(b[1], ZERO_EXPONENT) - 127), FP64)


@triton.jit
def log2_partition(
    alpha_ptr, beta_ptr, labels_ptr, target_len, BLOCK_L: tl.constexpr, FP64: tl.constexpr
):
    """Return log2 of the sum over all alignments, from α before the middle step and β after it."""
    lane = tl.arange(0, BLOCK_L)
    total = constant_state(0, lane, FP64)
    for first in range(0, target_len + 1, BLOCK_L):
        i = first + lane
        index, previous = i // 32 * 64 + i % 32, (i - 1) // 32 * 64 + (i - 1) % 32 + 32
        label_class = tl.load(labels_ptr + i, mask=i < target_len, other=-1)
        has_both = (i > 0) & (i < target_len)
        can_skip = has_both & (label_class != tl.load(labels_ptr + i - 1, mask=has_both, other=-1))
        blank = load_states(alpha_ptr + index, i <= target_len, FP64)
        label = load_states(alpha_ptr + index + 32, i < target_len, FP64)
        before = load_states(alpha_ptr + previous, (i > 0) & (i <= target_len), FP64)
        into_blank = add(blank, before, FP64)
        into_label = add(label, select(can_skip, into_blank, blank, FP64), FP64)
        blank_beta = load_states(beta_ptr + index, i <= target_len, FP64)
        through_blank = multiply(into_blank, blank_beta, FP64)
        label_beta = load_states(beta_ptr + index + 32, i < target_len, FP64)
        through_label = multiply(into_label, label_beta, FP64)
        total = add(total, add(through_blank, through_label, FP64), FP64)
        # The product with 1 brings the mantissa back to [1, 2).
        total = multiply(total, constant_state(1, lane, FP64), FP64)
    if FP64:
        shift = finite_shift(tl.max(total[0], axis=0))
        return shift + tl.log2(tl.sum(tl.exp2(total[0] - shift), axis=0))
    else:
        exponent = tl.max(total[1], axis=0)
        mantissa = tl.sum((total[0] * exp2_int(total[1] - exponent)).to(tl.float64), axis=0)
        return tl.where(
            exponent > MIN_EXPONENT, exponent.to(tl.float64) + tl.log2(mantissa), -float("inf")
        )


@triton.jit(do_not_specialize=LOSS_SIZES)
def ctc_loss_kernel(
    targets,  # TargetTensors
    saved,  # SavedScan
    losses_ptr,  # [N] fp64
    value_ptr,  # [N], or their sum or mean []
    finished_ptr,  # [1] int64, zero; None where losses are not reduced
    T,
    N,
    M,
    max_target_len,
    num_chunks,
    num_blocks,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ALL_FP64: tl.constexpr,
    MEAN: tl.constexpr,
    ZERO_INFINITY: tl.constexpr,
):
    """Compute log2 of the partition function of one sequence, and its loss.

    The loss is the sum of the log-sum-exps of the steps minus log Z. The program that finishes last
    reduces the losses in a fixed order, to their sum or to the mean of loss / target length.
    """
    n = tl.program_id(0).to(tl.int64)
    flags = tl.load(saved.flags + n)
    length, target_len, offset = load_lengths(targets, n, T, max_target_len, M)[:3]
    alpha_ptr = saved.states + (num_blocks.to(tl.int64) * N + n) * num_chunks * 64
    beta_ptr = alpha_ptr + (num_blocks.to(tl.int64) + 1) * N * num_chunks * 64
    inputs = (alpha_ptr, beta_ptr, targets.labels + offset, target_len)
    if ALL_FP64:
        logz = log2_partition(*inputs, BLOCK_L, True)
    elif flags == 1:
        logz = log2_partition(*inputs, BLOCK_L, True)
    else:
        logz = log2_partition(*inputs, BLOCK_L, False)
    logz = tl.where(length > 0, logz, tl.where(target_len == 0, 0.0, -float("inf")))
    loss = 0.0 - logz * LN2
    if saved.maxima is not None:
        lse = tl.zeros([BLOCK_T], tl.float64)
        for first in range(0, length, BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            row = t.to(tl.int64) * N + n
            maximum = tl.load(saved.maxima + row, mask=t < length, other=0.0)
            sum_exp = tl.load(saved.sums + row, mask=t < length, other=1.0)
            lse += maximum.to(tl.float64) + log_exact(sum_exp).to(tl.float64)
        loss += tl.sum(lse, axis=0)
    tl.store(saved.logz + n, tl.where(loss == loss, logz, loss))
    loss = tl.where(flags >= 2, float("nan"), loss)
    tl.store(losses_ptr + n, loss)
    if finished_ptr is not None:
        tl.debug_barrier()
        if tl.atomic_add(finished_ptr, 1, sem="acq_rel") == N - 1:
            total = tl.zeros([BLOCK_L], tl.float64)
            for first in range(0, N, BLOCK_L):
                i = first + tl.arange(0, BLOCK_L)
                each = tl.load(losses_ptr + i, mask=i < N, other=0.0, volatile=True)
                if ZERO_INFINITY:
                    each = tl.where(each == float("inf"), 0.0, each)
                if MEAN:
                    labels = tl.load(targets.target_lengths + i, mask=i < N, other=1)
                    each /= tl.maximum(labels, 1).to(tl.float64)
                total += each
            value = tl.sum(total, axis=0) / (N.to(tl.float64) if MEAN else 1.0)
            tl.store(value_ptr, value.to(value_ptr.dtype.element_ty))
    else:
        if ZERO_INFINITY:
            loss = tl.where(loss == float("inf"), 0.0, loss)
        tl.store(value_ptr + n, loss.to(value_ptr.dtype.element_ty))
