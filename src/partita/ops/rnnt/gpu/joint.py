"""The joint network of transducers in kernels: hidden states of all nodes, and their gradient.

The hidden state of a node is `activation(encoder[b, t] + predictor[b, u])`. Its gradient in the
encoder is summed over u, and that in the predictor over t. The second sum has two stages, because
each program has few steps: partial sums of blocks of steps, and their sum in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import tanh
from .lattice import load_sequence
from .rows import column_offset

JOINT_SIZES = ["first_step", "steps", "T", "U1"]


class JointInput(NamedTuple):
    """The encoder's or the predictor's vectors, `[B, rows, D]`, with their strides."""

    ptr: tl.tensor
    b: tl.tensor
    row: tl.tensor
    d: tl.tensor


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return the activation of x."""
    if ACTIVATION == 0:
        # NaN stays NaN.
        return tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == 1:
        return tanh(x)
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=JOINT_SIZES)
def rnnt_joint_kernel(
    encoder,  # JointInput [B, T, D]
    predictor,  # JointInput [B, U1, D]
    lengths,  # Lengths
    hidden_ptr,  # [steps, U1, D]
    first_step,  # the first step, counted over all sequences
    T,
    U1,
    D,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,  # values of u of a program
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Compute the hidden states of some nodes of a step; those beyond the lengths are 0."""
    blocks, columns = tl.cdiv(U1, ROWS), tl.cdiv(D, BLOCK_D)
    row_block, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    local_step = row_block // blocks
    step = first_step + local_step
    b, t = step // T, step % T
    length, target_len, _ = load_sequence(b, lengths, T, U1)
    u = row_block % blocks * ROWS + tl.arange(0, ROWS)
    d = column * BLOCK_D + tl.arange(0, BLOCK_D)
    e_ptr = encoder.ptr + (b.to(tl.int64) * encoder.b + t.to(tl.int64) * encoder.row)
    e = tl.load(e_ptr + column_offset(d, encoder.d), mask=(d < D) & (d * 0 + t < length), other=0.0)
    p_ptr = predictor.ptr + b.to(tl.int64) * predictor.b
    p_offset = u.to(tl.int64)[:, None] * predictor.row + column_offset(d, predictor.d)[None, :]
    valid = (u <= target_len) & (u * 0 + t < length)
    p = tl.load(p_ptr + p_offset, mask=valid[:, None] & (d < D)[None, :], other=0.0)
    hidden = activate(e.to(DTYPE)[None, :] + p.to(DTYPE), ACTIVATION)
    hidden = tl.where(valid[:, None], hidden, 0.0).to(hidden_ptr.dtype.element_ty)
    row = local_step.to(tl.int64) * U1 + u
    ptr = hidden_ptr + row[:, None] * D + d[None, :]
    tl.store(ptr, hidden, mask=(u < U1)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=JOINT_SIZES)
def rnnt_joint_gradient_kernel(
    dhidden_ptr,  # [sequences, steps, U1, D]
    encoder,  # JointInput [B, T, D]
    predictor,  # JointInput [B, U1, D]
    lengths,  # Lengths
    dencoder_ptr,  # [B, T, D], or None
    partials_ptr,  # [sequences, step blocks, U1, D], or None
    first_step,  # the first step, counted over all sequences
    steps,  # steps of each sequence
    T,
    U1,
    D,
    ACTIVATION: tl.constexpr,
    STEPS: tl.constexpr,  # steps of a program
    UNROLL: tl.constexpr,  # values of u that are loaded together
    BLOCK_D: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Write the encoder's gradient of some steps, and these steps' part of the predictor's."""
    blocks, columns = tl.cdiv(steps, STEPS), tl.cdiv(D, BLOCK_D)
    step_block, column = tl.program_id(0) // columns, tl.program_id(0) % columns
    sequence, block = (step_block // blocks).to(tl.int64), step_block % blocks
    step = block * STEPS + tl.arange(0, STEPS)
    first = first_step + sequence * steps
    b, t = first // T, first % T + step
    length, target_len, _ = load_sequence(b, lengths, T, U1)
    d = column * BLOCK_D + tl.arange(0, BLOCK_D)
    inside, has_step = (d < D)[None, :], (step < steps)[:, None]
    mask = inside & has_step & (t < length)[:, None]
    e_offset = b * encoder.b + t[:, None] * encoder.row + column_offset(d, encoder.d)[None, :]
    e = tl.load(encoder.ptr + e_offset, mask=mask, other=0.0).to(DTYPE)
    row = ((sequence * steps + step) * U1)[:, None]
    p_ptr = predictor.ptr + b * predictor.b + column_offset(d, predictor.d)
    total = tl.zeros([STEPS, BLOCK_D], DTYPE)
    for first_u in range(0, U1, UNROLL):
        dhidden, inputs = (), ()
        for i in tl.static_range(UNROLL):
            # The gradient is 0 beyond the lengths, and NaN in all nodes of an invalid sequence.
            has_row = inside & has_step & (first_u + i + step * 0 < U1)[:, None]
            ptr = dhidden_ptr + (row + (first_u + i)) * D + d[None, :]
            dhidden = dhidden + (tl.load(ptr, mask=has_row, other=0.0),)
            p_mask = (d < D) & (first_u + i + d * 0 <= target_len)
            p = tl.load(p_ptr + (first_u + i) * predictor.row, mask=p_mask, other=0.0)
            inputs = inputs + (p,)
        for i in tl.static_range(UNROLL):
            x = e + inputs[i].to(DTYPE)[None, :]
            # NaN of a counted step or label is not read in a padding node.
            x = tl.where(mask & (first_u + i <= target_len), x, 0.0)
            dx = dhidden[i].to(DTYPE)
            if ACTIVATION == 0:
                dx *= tl.where(x > 0.0, 1.0, tl.where(x == x, 0.0, x))
            else:
                y = activate(x, ACTIVATION)
                dx *= 1.0 - y * y if ACTIVATION == 1 else y * (1.0 - y)
            total += dx
            if partials_ptr is not None:
                ptr = partials_ptr + (step_block.to(tl.int64) * U1 + (first_u + i)) * D + d
                tl.store(ptr, tl.sum(dx, axis=0), mask=(d < D) & (first_u + i + d * 0 < U1))
    if dencoder_ptr is not None:
        ptr = dencoder_ptr + (b * T + t)[:, None] * D + d[None, :]
        tl.store(ptr, total.to(dencoder_ptr.dtype.element_ty), mask=inside & has_step)


@triton.jit(do_not_specialize=["first_sequence", "blocks", "size"])
def rnnt_predictor_sum_kernel(
    partials_ptr,  # [sequences, blocks, size]
    dpredictor_ptr,  # [B, size], to which the sums are added
    first_sequence,
    blocks,
    size,
    BLOCK: tl.constexpr,
):
    """Add the partial sums of each sequence to the predictor's gradient."""
    columns = tl.cdiv(size, BLOCK)
    sequence, column = (tl.program_id(0) // columns).to(tl.int64), tl.program_id(0) % columns
    index = column * BLOCK + tl.arange(0, BLOCK)
    ptr = dpredictor_ptr + (first_sequence + sequence) * size + index
    total = tl.load(ptr, mask=index < size, other=0.0)
    for i in range(blocks):
        part_ptr = partials_ptr + (sequence * blocks + i) * size + index
        total += tl.load(part_ptr, mask=index < size, other=0.0)
    tl.store(ptr, total, mask=index < size)
