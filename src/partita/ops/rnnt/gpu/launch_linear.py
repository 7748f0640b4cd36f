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
from torch.nn.functional import pad

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, tl_acc_dtype
from ...linear_heads.plan import padded_width
from ...linear_heads.products import multiply, multiply_blocks
from ..common import ACTIVATIONS, JointInputs, NodeOptions, chunk_ranges
from ..plan import PARTIAL_STEPS
from .joint import (
    JointInput,
    rnnt_joint_gradient_kernel,
    rnnt_joint_kernel,
    rnnt_predictor_sum_kernel,
)
from .lattice import Durations
from .launch import (
    NO_DURATIONS,
    LatticeCall,
    as_targets,
    launch_gradient,
    launch_nodes,
    scan_lattice,
)

# Steps of a program of the joint's gradient: more of them than `PARTIAL_STEPS` mean fewer partial
# sums. A chunk that makes few programs has the latter.
GRADIENT_STEPS = 16
FEW_PROGRAMS = 1024
JOINT_ROWS = 32  # values of u of a program of the joint


class JointCall(NamedTuple):
    """A joint network.

    Fields:
        encoder, predictor: `[B, T, D]` and `[B, U1, D]`.
        weight, bias: `[X, D]`, and `[X]` or None: tokens, then durations, then zeros.
        lora_A, lora_B: as in `JointInputs`, the second with zeros as the matrix has; or None.
        activation: the index of the activation.
        invariant: whether products have whole blocks of nodes, so that bits depend on no batch.
        lattice: the batch of lattices, whose nodes have hidden states.
    """

    encoder: Tensor
    predictor: Tensor
    weight: Tensor
    bias: Tensor | None
    lora_A: Tensor | None
    lora_B: Tensor | None
    activation: int
    invariant: bool
    lattice: LatticeCall


class Chunk(NamedTuple):
    """The steps of some sequences whose logits are computed together.

    Fields:
        first: the first step, counted over all sequences.
        sequences, steps: the sequences, and the steps of each of them.
        nodes: its nodes among those of the batch.
        hidden: the hidden states, `[nodes, D]`.
        rows: the logits of tokens and durations, `[nodes, X]`.
        tokens: those of tokens, as the logits of one sequence, `[1, steps, U1, V]`.
    """

    first: int
    sequences: int
    steps: int
    nodes: slice
    hidden: Tensor
    rows: Tensor
    tokens: Tensor


def joint_head(inputs: JointInputs) -> tuple[Tensor, Tensor | None]:
    """Return the padded matrix and bias of tokens and durations together."""
    weight, bias, extra_weight, extra_bias = inputs[2:6]
    if extra_weight is None and len(weight) % 8 == 0:
        return weight, bias
    heads = [(weight, bias)]
    if extra_weight is not None:
        heads.append((extra_weight, extra_bias))
    columns = sum(len(each) for each, _ in heads)
    rest = padded_width(columns) - columns
    padded = pad(torch.cat([each for each, _ in heads]), (0, 0, 0, rest))
    if bias is None and extra_bias is None:
        return padded, None
    biases = [each.new_zeros(len(each)) if of is None else of for each, of in heads]
    return padded, pad(torch.cat(biases), (0, rest))


def compute_chunks(
    call: JointCall,
    ranges: Sequence[tuple[slice, slice]],
    hidden: Tensor,
    logits: Tensor,
    are_kept: bool,
) -> Iterator[Chunk]:
    """Compute the hidden states of one chunk after another, and the logits unless they are kept.

    There is memory for the hidden states of the greatest chunk, and for its logits or all logits.
    """
    (_, B, T, U1, V, *_), D = call.lattice, call.encoder.shape[2]
    for sequences, steps in ranges:
        number, length = sequences.stop - sequences.start, steps.stop - steps.start
        first = sequences.start * T + steps.start
        nodes = slice(first * U1, (first + number * length) * U1)
        launch(
            rnnt_joint_kernel,
            number * length * cdiv(U1, JOINT_ROWS) * cdiv(D, 128),
            encoder=JointInput(call.encoder, *call.encoder.stride()),
            predictor=JointInput(call.predictor, *call.predictor.stride()),
            lengths=call.lattice.targets.lengths,
            hidden_ptr=hidden,
            first_step=first,
            T=T,
            U1=U1,
            D=D,
            ACTIVATION=call.activation,
            ROWS=JOINT_ROWS,
            BLOCK_D=128,
            DTYPE=tl_acc_dtype(hidden.dtype),
            num_warps=4,
        )
        size = nodes.stop - nodes.start
        states, rows = hidden[:size], logits[nodes if len(logits) == B * T * U1 else slice(size)]
        if not are_kept:
            bias, adds = call.bias, False
            if call.lora_A is not None and call.lora_B is not None:
                low = states.new_empty((size, len(call.lora_A)))
                multiply_blocks(states, call.lora_A.T, low, call.invariant)
                multiply_blocks(low, call.lora_B.T, rows, call.invariant, bias)
                bias, adds = None, True
            multiply_blocks(states, call.weight.T, rows, call.invariant, bias, adds)
        tokens = rows.view(1, -1, U1, len(call.weight))[..., :V]
        yield Chunk(first, number, length, nodes, states, rows, tokens)


def add_gradients(
    call: JointCall, chunk: Chunk, dhidden: Tensor, found: Sequence[Tensor | None]
) -> None:
    """Add what a chunk gives to the gradients, when its logits have become their gradient.

    `dhidden` has room for the gradient of the hidden states of a chunk. The gradients are those of
    encoder, predictor, matrix, bias and the factors of LoRA; None where one is not wanted.
    """
    rows, (dencoder, dpredictor, total, dbias, dA, dB) = chunk.rows, found
    if total is not None:
        multiply(rows.T, chunk.hidden, total, adds=True)
    dstates = None
    if call.lora_B is not None:
        dstates = rows.new_empty((len(rows), call.lora_B.shape[1]))
        multiply_blocks(rows, call.lora_B, dstates, call.invariant)
    if dA is not None and dstates is not None:
        multiply(dstates.T, chunk.hidden, dA, adds=True)
    if dB is not None and call.lora_A is not None:
        multiply(rows.T, chunk.hidden @ call.lora_A.T, dB, adds=True)
    if dbias is not None:
        dbias.add_(rows.sum(0, dtype=dbias.dtype))
    if dencoder is None and dpredictor is None:
        return
    dhidden = dhidden[: len(rows)]
    multiply_blocks(rows, call.weight, dhidden, call.invariant)
    if dstates is not None and call.lora_A is not None:
        multiply_blocks(dstates, call.lora_A, dhidden, call.invariant, adds=True)
    T, U1, D = call.lattice.T, call.lattice.U1, call.encoder.shape[2]
    programs = chunk.sequences * cdiv(chunk.steps, GRADIENT_STEPS) * cdiv(D, 128)
    few = call.invariant or programs < FEW_PROGRAMS
    block_steps = PARTIAL_STEPS if few else GRADIENT_STEPS
    blocks = cdiv(chunk.steps, block_steps)
    partials = None
    if dpredictor is not None:
        partials = dpredictor.new_empty((chunk.sequences * blocks, U1, D))
    launch(
        rnnt_joint_gradient_kernel,
        chunk.sequences * blocks * cdiv(D, 128),
        dhidden_ptr=dhidden,
        encoder=JointInput(call.encoder, *call.encoder.stride()),
        predictor=JointInput(call.predictor, *call.predictor.stride()),
        lengths=call.lattice.targets.lengths,
        dencoder_ptr=dencoder,
        partials_ptr=partials,
        first_step=chunk.first,
        steps=chunk.steps,
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
            chunk.sequences * cdiv(U1 * D, 512),
            partials_ptr=partials,
            dpredictor_ptr=dpredictor,
            first_sequence=chunk.first // T,
            blocks=blocks,
            size=U1 * D,
            BLOCK=512,
            num_warps=4,
        )


def linear_rnnt(
    inputs: JointInputs,
    factor: Tensor | None,
    activation: str,
    options: NodeOptions,
    fastemit_lambda: float,
    chunk: int,
    keep_logits: bool,
    invariant: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Return the losses, and the gradients of the sum of factor * loss in the inputs.

    These are encoder, predictor, matrix and bias of tokens and of durations, and the factors of
    LoRA. Gradients that are not wanted are empty, and so are all without a factor.
    """
    encoder, predictor = inputs[:2]
    matrix, biases = joint_head(inputs)
    targets, K = as_targets(*inputs[8:]), len(options.durations)
    (B, T, D), U1, V = encoder.shape, predictor.shape[1], len(inputs.weight)
    needs_gradient = factor is not None and any(wanted)
    keep_logits = keep_logits and needs_gradient
    lattice = LatticeCall(targets, B, T, U1, V, encoder.dtype, needs_gradient, options)
    index = ACTIVATIONS.index(activation)
    A, B_padded = inputs.lora_A, inputs.lora_B
    if B_padded is not None:
        B_padded = pad(B_padded, (0, 0, 0, len(matrix) - len(B_padded)))
    call = JointCall(encoder, predictor, matrix, biases, A, B_padded, index, invariant, lattice)
    ranges = chunk_ranges(B, T, chunk)
    most_nodes = max((n.stop - n.start) * (t.stop - t.start) for n, t in ranges) * U1
    hidden = encoder.new_empty((most_nodes, D))
    logits = encoder.new_empty((B * T * U1 if keep_logits else most_nodes, len(matrix)))
    arcs, lse = lattice.empty_arcs(), lattice.empty_lse()
    duration_logits: Tensor | None = None
    columns = slice(V, V + K)
    if K:
        duration_logits = encoder.new_empty((B, T, U1, K))
    for part in compute_chunks(call, ranges, hidden, logits, False):
        launch_nodes(lattice, part.tokens, lse, arcs, part.first, part.sequences * part.steps)
        if duration_logits is not None:
            duration_logits.flatten(0, 2)[part.nodes] = part.rows[:, columns]
    nll, duration_lse, posteriors = scan_lattice(lattice, arcs, duration_logits)
    found: list[Tensor | None] = [None] * 6
    if factor is not None and needs_gradient:
        # The gradient of the encoder is written. The others are sums over chunks.
        if wanted[0]:
            found[0] = encoder.new_empty(encoder.shape)
        of_factors = (None if x is None else x.shape for x in (A, B_padded))
        shapes = (predictor.shape, matrix.shape, matrix.shape[:1], *of_factors)
        of_sums = (wanted[1], any(wanted[2:6:2]), any(wanted[3:6:2]), *wanted[6:])
        for i, (shape, wants) in enumerate(zip(shapes, of_sums, strict=True)):
            if wants and shape is not None:
                found[1 + i] = encoder.new_zeros(shape, dtype=acc_dtype(encoder.dtype))
        dhidden, of_durations = torch.empty_like(hidden), NO_DURATIONS
        if duration_logits is not None:
            d_durations = torch.empty_like(duration_logits)
            of_durations = Durations(duration_logits, duration_lse, d_durations)
        for part in compute_chunks(call, ranges, hidden, logits, keep_logits):
            nodes = (factor, part.tokens, lse, posteriors, targets, part.tokens)
            scores = (part.sequences * part.steps, options, 0.0, fastemit_lambda)
            launch_gradient(*nodes, part.first, *scores, of_durations)
            if duration_logits is not None:
                part.rows[:, columns] = d_durations.flatten(0, 2)[part.nodes]
            add_gradients(call, part, dhidden, found)
    whole, tokens = slice(None), slice(0, V)
    rows_of = (whole, whole, tokens, tokens, columns, columns, whole, slice(0, V + K))
    parts = zip((*found[:4], *found[2:]), rows_of, strict=True)
    # Rows after others are copied, because two results of an op may not share memory.
    return nll, *(
        encoder.new_empty(0)
        if gradient is None or not wants
        else gradient[rows].to(encoder.dtype, copy=bool(rows.start))
        for (gradient, rows), wants in zip(parts, wanted, strict=True)
    )
