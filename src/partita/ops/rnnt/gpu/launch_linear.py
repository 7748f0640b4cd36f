"""Transducer losses from encoder and predictor on a GPU, one chunk of the joint at a time.

The first pass computes the logits of each chunk and reduces them to the arcs of the nodes. The scan
makes posteriors of these. The second pass computes the logits again, unless all of them stay in
memory, overwrites them with their gradient, and multiplies that with matrix and hidden states.

Tokens and durations have one matrix together, padded with zeros to a multiple of 16 columns: a
product with an odd number of columns takes several times as long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, tl_acc_dtype
from ..common import ACTIVATIONS, chunk_ranges
from .call import (
    NO_DURATIONS,
    LatticeCall,
    NodeOptions,
    as_targets,
    launch_gradient,
    launch_nodes,
    scan_lattice,
)
from .gradient import DurationGradient
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


class Chunk(NamedTuple):
    """The steps of some sequences whose logits are computed together.

    Fields:
        first: the first step, counted over all sequences.
        sequences, steps: the sequences, and the steps of each of them.
        nodes: its nodes among those of the batch.
        hidden: the hidden states, `[nodes, D]`.
        rows: the logits of tokens and durations, `[nodes, X]`.
    """

    first: int
    sequences: int
    steps: int
    nodes: slice
    hidden: Tensor
    rows: Tensor

    def tokens(self, call: JointCall) -> Tensor:
        """Return the logits of the tokens as those of one sequence, `[1, steps, U1, V]`."""
        return self.rows.view(1, -1, call.sizes[2], self.rows.shape[1])[..., : call.head.tokens]


class JointMemory(NamedTuple):
    """The memory for one chunk after another.

    Fields:
        hidden: the hidden states of the greatest chunk.
        logits: the logits of the greatest chunk, or of all chunks if they are kept.
        keeps_logits: whether they are.
    """

    hidden: Tensor
    logits: Tensor
    keeps_logits: bool


def joint_memory(call: JointCall, chunk: int, keep_logits: bool) -> JointMemory:
    """Return the memory for chunks of a batch."""
    (B, T, U1), encoder = call.sizes, call.encoder
    sizes = [
        (rows.stop - rows.start) * (steps.stop - steps.start)
        for rows, steps in chunk_ranges(B, T, chunk)
    ]
    max_steps = max(sizes, default=0)
    hidden = encoder.new_empty((max_steps * U1, encoder.shape[2]))
    kept = (B * T if keep_logits else max_steps) * U1
    return JointMemory(hidden, encoder.new_empty((kept, len(call.head.weight))), keep_logits)


def compute_chunks(
    call: JointCall, chunk: int, memory: JointMemory, are_kept: bool
) -> Iterator[Chunk]:
    """Compute the hidden states of one chunk after another, and the logits if none are kept."""
    B, T, U1 = call.sizes
    for sequences, steps in chunk_ranges(B, T, chunk):
        first, number = sequences.start * T + steps.start, sequences.stop - sequences.start
        size = number * (steps.stop - steps.start)
        nodes = slice(first * U1, (first + size) * U1)
        hidden = memory.hidden[: size * U1]
        compute_hidden(call, first, size, memory.hidden)
        rows = memory.logits[nodes] if memory.keeps_logits else memory.logits[: size * U1]
        if not are_kept:
            compute_logits(call.head, hidden, rows)
        yield Chunk(first, number, steps.stop - steps.start, nodes, hidden, rows)


def add_gradients(call: JointCall, chunk: Chunk, dhidden: Tensor, found: Gradients) -> None:
    """Add what a chunk gives to the gradients, when its logits have become their gradient.

    `dhidden` has room for the gradient of the hidden states of a chunk.
    """
    rows = chunk.rows
    if found.weight is not None:
        add_product(found.weight, rows.T, chunk.hidden)
    if found.bias is not None:
        found.bias.add_(rows.sum(0, dtype=found.bias.dtype))
    if found.encoder is not None or found.predictor is not None:
        part_dhidden = dhidden[: len(rows)]
        torch.mm(rows, call.head.weight, out=part_dhidden)
        add_joint_gradient(call, part_dhidden, chunk.first, chunk.sequences, chunk.steps, found)


def new_gradients(call: JointCall, wanted: Sequence[bool]) -> Gradients:
    """Return memory for the gradients of encoder, predictor, matrix and bias that are wanted."""
    encoder, weight = call.encoder, call.head.weight
    dtype, device = acc_dtype(encoder.dtype), encoder.device
    d_encoder = torch.empty(encoder.shape, dtype=encoder.dtype, device=device)
    shapes = (call.predictor.shape, weight.shape, weight.shape[:1])
    return Gradients(
        d_encoder if wanted[0] else None,
        *(
            torch.zeros(shape, dtype=dtype, device=device) if wants else None
            for shape, wants in zip(shapes, wanted[1:], strict=True)
        ),
    )


def wanted_part(gradient: Tensor | None, rows: slice, wants: bool, like: Tensor) -> Tensor:
    """Return some rows of a gradient in the dtype of `like`, or an empty tensor.

    Rows after others are copied, because two results of an op may not share memory.
    """
    if gradient is None or not wants:
        return like.new_empty(0)
    return gradient[rows].to(like.dtype, copy=bool(rows.start))


def linear_rnnt(
    encoder: Tensor,
    predictor: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    duration_weight: Tensor | None,
    duration_bias: Tensor | None,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    factor: Tensor | None,
    activation: str,
    blank: int,
    durations: Sequence[int],
    hat: bool,
    sigma: float,
    delay_penalty: float,
    fastemit_lambda: float,
    chunk: int,
    keep_logits: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Return the losses, and the gradients of the sum of factor * loss in the inputs.

    These are encoder, predictor, and matrix and bias of tokens and of durations. Gradients that are
    not wanted are empty, and so are all without a factor.
    """
    head = joint_head(weight, bias, duration_weight, duration_bias)
    targets = as_targets(labels, logit_lengths, target_lengths)
    call = JointCall(encoder, predictor, head, targets, ACTIVATIONS.index(activation))
    options = NodeOptions(blank, durations, True, hat, sigma, delay_penalty)
    B, T, U1 = call.sizes
    needs_gradient = factor is not None and any(wanted)
    keep_logits = keep_logits and needs_gradient
    memory = joint_memory(call, chunk, keep_logits)
    lattice = LatticeCall(targets, options, B, T, U1, head.tokens, encoder.dtype, needs_gradient)
    arcs, lse = lattice.empty_arcs(), lattice.empty_lse()
    duration_logits: Tensor | None = None
    if head.durations:
        duration_logits = encoder.new_empty((B, T, U1, head.durations))
    columns = slice(head.tokens, head.tokens + head.durations)
    for part in compute_chunks(call, chunk, memory, False):
        launch_nodes(lattice, part.tokens(call), lse, arcs, part.first, part.sequences * part.steps)
        if duration_logits is not None:
            duration_logits.flatten(0, 2)[part.nodes] = part.rows[:, columns]
    nll, duration_lse, posteriors = scan_lattice(lattice, arcs, duration_logits)
    found = Gradients(None, None, None, None)
    if factor is not None and needs_gradient:
        heads = (any(wanted[2::2]), any(wanted[3::2]))
        found = new_gradients(call, (*wanted[:2], *heads))
        dhidden = torch.empty_like(memory.hidden)
        of_durations = NO_DURATIONS
        if duration_logits is not None:
            d_durations = torch.empty_like(duration_logits)
            of_durations = DurationGradient(duration_logits, duration_lse, d_durations)
        for part in compute_chunks(call, chunk, memory, keep_logits):
            logits, steps = part.tokens(call), part.sequences * part.steps
            inputs = (factor, logits, lse, posteriors, targets)
            scores = (blank, hat, 0.0, fastemit_lambda)
            launch_gradient(*inputs, logits, part.first, steps, *scores, of_durations)
            if duration_logits is not None:
                part.rows[:, columns] = d_durations.flatten(0, 2)[part.nodes]
            add_gradients(call, part, dhidden, found)
    parts = [(found.encoder, slice(None)), (found.predictor, slice(None))]
    for of_head in (slice(0, head.tokens), columns):
        parts += [(found.weight, of_head), (found.bias, of_head)]
    return nll, *(
        wanted_part(gradient, rows, wants, encoder)
        for (gradient, rows), wants in zip(parts, wanted, strict=True)
    )
