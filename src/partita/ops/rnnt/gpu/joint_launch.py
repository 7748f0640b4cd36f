"""The joint network of transducers on a GPU: inputs, products and launches of its kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, tl_acc_dtype
from .joint import (
    JointInput,
    rnnt_joint_gradient_kernel,
    rnnt_joint_kernel,
    rnnt_predictor_sum_kernel,
)
from .lattice import Targets

ROW_ALIGNMENT = 16  # columns of the padded matrix
# Steps of a program of the joint's gradient, and of one of a chunk that makes few programs. More
# steps mean fewer partial sums.
GRADIENT_STEPS, FEW_STEPS = 16, 4
FEW_PROGRAMS = 1024
JOINT_ROWS = 32  # values of u of a program of the joint


class Head(NamedTuple):
    """The matrix and the bias that make logits of hidden states.

    Fields:
        weight: `[X, D]`, tokens, then durations, then zeros.
        bias: `[X]` or None.
        tokens, durations: the numbers V and K of columns.
    """

    weight: Tensor
    bias: Tensor | None
    tokens: int
    durations: int


class JointCall(NamedTuple):
    """The inputs of a joint network.

    Fields:
        encoder: `[B, T, D]`.
        predictor: `[B, U1, D]`.
        head: the matrix.
        targets: the targets and the lengths.
        activation: the index of the activation.
    """

    encoder: Tensor
    predictor: Tensor
    head: Head
    targets: Targets
    activation: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """B, T and U1."""
        B, T, _ = self.encoder.shape
        return B, T, self.predictor.shape[1]


class Gradients(NamedTuple):
    """The gradients in the order of the inputs; None where one is not wanted.

    Fields:
        encoder: `[B, T, D]` in its dtype.
        predictor: `[B, U1, D]` in the accumulator dtype.
        weight: `[X, D]` in the accumulator dtype.
        bias: `[X]` in the accumulator dtype.
    """

    encoder: Tensor | None
    predictor: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def joint_head(
    weight: Tensor, bias: Tensor | None, extra_weight: Tensor | None, extra_bias: Tensor | None
) -> Head:
    """Return the padded head of tokens and durations."""
    (V, D), K = weight.shape, 0 if extra_weight is None else len(extra_weight)
    if K == 0 and V % 8 == 0:
        return Head(weight, bias, V, 0)
    X = cdiv(V + K, ROW_ALIGNMENT) * ROW_ALIGNMENT
    padded = weight.new_zeros(X, D)
    padded[:V] = weight
    padded_bias = None
    if extra_weight is not None:
        padded[V : V + K] = extra_weight
    if bias is not None or extra_bias is not None:
        padded_bias = weight.new_zeros(X)
        if bias is not None:
            padded_bias[:V] = bias
        if extra_bias is not None:
            padded_bias[V : V + K] = extra_bias
    return Head(padded, padded_bias, V, K)


def compute_hidden(call: JointCall, first: int, steps: int, hidden: Tensor) -> None:
    """Compute the hidden states of the nodes of some steps, `[steps * U1, D]`."""
    (_, T, U1), D = call.sizes, call.encoder.shape[2]
    launch(
        rnnt_joint_kernel,
        steps * cdiv(U1, JOINT_ROWS) * cdiv(D, 128),
        encoder=JointInput(call.encoder, *call.encoder.stride()),
        predictor=JointInput(call.predictor, *call.predictor.stride()),
        lengths=call.targets.lengths,
        hidden_ptr=hidden,
        first_step=first,
        steps=steps,
        T=T,
        U1=U1,
        D=D,
        ACTIVATION=call.activation,
        ROWS=JOINT_ROWS,
        BLOCK_D=128,
        DTYPE=tl_acc_dtype(hidden.dtype),
        num_warps=4,
    )


def compute_logits(head: Head, hidden: Tensor, logits: Tensor) -> None:
    """Compute the logits of hidden states, `[rows, X]`."""
    if head.bias is None:
        torch.mm(hidden, head.weight.T, out=logits)
    else:
        torch.addmm(head.bias, hidden, head.weight.T, out=logits)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to `total`, with sums in the dtype of `total`."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def add_joint_gradient(
    call: JointCall, dhidden: Tensor, first: int, sequences: int, steps: int, found: Gradients
) -> None:
    """Write or add the gradients of encoder and predictor, given that of hidden states."""
    (_, T, U1), D = call.sizes, call.encoder.shape[2]
    few = sequences * cdiv(steps, GRADIENT_STEPS) * cdiv(D, 128) < FEW_PROGRAMS
    block_steps = FEW_STEPS if few else GRADIENT_STEPS
    blocks = cdiv(steps, block_steps)
    dtype = acc_dtype(call.encoder.dtype)
    partials = None
    if found.predictor is not None:
        partials = dhidden.new_empty((sequences * blocks, U1, D), dtype=dtype)
    launch(
        rnnt_joint_gradient_kernel,
        sequences * blocks * cdiv(D, 128),
        dhidden_ptr=dhidden,
        encoder=JointInput(call.encoder, *call.encoder.stride()),
        predictor=JointInput(call.predictor, *call.predictor.stride()),
        lengths=call.targets.lengths,
        dencoder_ptr=found.encoder,
        partials_ptr=partials,
        first_step=first,
        steps=steps,
        T=T,
        U1=U1,
        D=D,
        ACTIVATION=call.activation,
        STEPS=block_steps,
        UNROLL=4,
        BLOCK_D=128,
        DTYPE=tl_acc_dtype(dhidden.dtype),
        num_warps=1 if few else 2,
    )
    if partials is not None:
        launch(
            rnnt_predictor_sum_kernel,
            sequences * cdiv(U1 * D, 512),
            partials_ptr=partials,
            dpredictor_ptr=found.predictor,
            first_sequence=first // T,
            blocks=blocks,
            size=U1 * D,
            BLOCK=512,
            num_warps=4,
        )
