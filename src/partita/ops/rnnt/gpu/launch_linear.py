"""Transducer losses from encoder and predictor on a GPU, one chunk of the joint at a time.

The first pass computes the logits of each chunk and reduces them to the arcs of the nodes. The scan
makes posteriors of these. The second pass computes the logits again, unless all of them stay in
memory, overwrites them with their gradient, and multiplies that with matrix and hidden states.

Tokens and durations have one matrix together, padded with zeros to a multiple of 16 columns: a
product with an odd number of columns takes several times as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ..common import ACTIVATIONS, chunk_ranges
from .call import NodeOptions, as_targets, launch_gradient, launch_nodes, scan_zeros
from .joint_launch import (
    Gradients,
    JointCall,
    add_joint_gradient,
    add_product,
    compute_hidden,
    compute_logits,
    joint_head,
)
from .launch_tdt import duration_gradient, scan_durations, token_duration_arcs
from .plan import LSE_DTYPE, lattice_plan
from .scan_launch import scan_lattice


class NodeTensors(NamedTuple):
    """The tensors of the nodes of all chunks.

    Fields:
        arcs: the scores of blank and label, `[2, nodes]`.
        lse: the log-sum-exps of the tokens, `[B, T, U1]`, or empty.
        durations: the logits of the durations, `[B, T, U1, K]`, later their gradient.
    """

    arcs: Tensor
    lse: Tensor
    durations: Tensor


def chunk_steps(call: JointCall, chunk: int) -> list[tuple[int, int, int]]:
    """Return the first step, the sequences and the steps of each of them, for each chunk."""
    B, T, _ = call.sizes
    return [
        (rows.start * T + steps.start, rows.stop - rows.start, steps.stop - steps.start)
        for rows, steps in chunk_ranges(B, T, chunk)
    ]


def read_nodes(
    call: JointCall,
    chunks: Sequence[tuple[int, int, int]],
    options: NodeOptions,
    hidden: Tensor,
    logits: Tensor,
    keep_logits: bool,
    save: bool,
) -> NodeTensors:
    """Compute the logits of all chunks, and return what the nodes need of them."""
    (B, T, U1), head = call.sizes, call.head
    device, plan = hidden.device, lattice_plan(B, T, U1)
    nodes = NodeTensors(
        torch.empty((2, plan.nodes), dtype=torch.float64, device=device),
        torch.empty((B, T, U1) if save else (0,), dtype=LSE_DTYPE, device=device),
        hidden.new_empty((B, T, U1, head.durations)),
    )
    flat_durations = nodes.durations.view(B * T * U1, head.durations)
    for first, sequences, steps in chunks:
        chunk_size = sequences * steps
        part = slice(first * U1, (first + chunk_size) * U1)
        compute_hidden(call, first, chunk_size, hidden)
        rows = logits[part] if keep_logits else logits[: chunk_size * U1]
        compute_logits(head, hidden[: chunk_size * U1], rows)
        shaped = rows.view(1, chunk_size, U1, -1)[..., : head.tokens]
        arguments = (first, chunk_size, (B, T, U1), options)
        launch_nodes(shaped, call.targets, nodes.lse, nodes.arcs, *arguments)
        if head.durations:
            flat_durations[part] = rows[:, head.tokens : head.tokens + head.durations]
    return nodes


def write_gradients(
    call: JointCall,
    chunks: Sequence[tuple[int, int, int]],
    options: NodeOptions,
    fastemit_lambda: float,
    factor: Tensor,
    nodes: NodeTensors,
    posteriors: Tensor,
    hidden: Tensor,
    logits: Tensor,
    keep_logits: bool,
    found: Gradients,
) -> None:
    """Compute the gradients of all chunks."""
    (B, T, U1), head = call.sizes, call.head
    flat_durations = nodes.durations.view(B * T * U1, head.durations)
    dhidden = torch.empty_like(hidden)
    for first, sequences, steps in chunks:
        chunk_size = sequences * steps
        part = slice(first * U1, (first + chunk_size) * U1)
        part_hidden = hidden[: chunk_size * U1]
        compute_hidden(call, first, chunk_size, hidden)
        rows = logits[part] if keep_logits else logits[: chunk_size * U1]
        if not keep_logits:
            compute_logits(head, part_hidden, rows)
        shaped = rows.view(1, chunk_size, U1, -1)[..., : head.tokens]
        launch_gradient(
            factor,
            shaped,
            nodes.lse,
            posteriors,
            call.targets,
            shaped,
            first,
            chunk_size,
            options.blank,
            options.hat,
            0.0,
            fastemit_lambda,
        )
        if head.durations:
            rows[:, head.tokens : head.tokens + head.durations] = flat_durations[part]
        if found.weight is not None:
            add_product(found.weight, rows.T, part_hidden)
        if found.bias is not None:
            found.bias.add_(rows.sum(0, dtype=found.bias.dtype))
        if found.encoder is not None or found.predictor is not None:
            part_dhidden = dhidden[: chunk_size * U1]
            torch.mm(rows, head.weight, out=part_dhidden)
            add_joint_gradient(call, part_dhidden, first, sequences, steps, found)


def new_gradients(call: JointCall, wanted: Sequence[bool]) -> Gradients:
    """Return memory for the gradients of encoder, predictor, matrix and bias that are wanted."""
    encoder, predictor, head = call.encoder, call.predictor, call.head
    dtype = acc_dtype(encoder.dtype)

    def zeros(shape: Sequence[int]) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=encoder.device)

    return Gradients(
        torch.empty(encoder.shape, dtype=encoder.dtype, device=encoder.device)
        if wanted[0]
        else None,
        zeros(predictor.shape) if wanted[1] else None,
        zeros(head.weight.shape) if wanted[2] else None,
        zeros((len(head.weight),)) if wanted[3] else None,
    )


def linear_transducer(
    call: JointCall,
    options: NodeOptions,
    durations: Sequence[int],
    fastemit_lambda: float,
    factor: Tensor | None,
    chunk: int,
    keep_logits: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Gradients | None]:
    """Return the losses, and the gradients of the sum of factor * loss if there is a factor."""
    (B, T, U1), head = call.sizes, call.head
    chunks = chunk_steps(call, chunk)
    needs_gradient = factor is not None and any(wanted)
    max_steps = max((sequences * steps for _, sequences, steps in chunks), default=0)
    keep_logits = keep_logits and needs_gradient
    encoder = call.encoder
    hidden = encoder.new_empty((max_steps * U1, encoder.shape[2]))
    logits = encoder.new_empty(((B * T if keep_logits else max_steps) * U1, len(head.weight)))
    nodes = read_nodes(call, chunks, options, hidden, logits, keep_logits, needs_gradient)
    sizes, plan = (B, T, U1), lattice_plan(B, T, U1)
    if head.durations:
        zeros = scan_zeros(plan, B, 2 if needs_gradient else 1, encoder.device)
        arcs, lse = token_duration_arcs(
            nodes.arcs, nodes.durations, call.targets, durations, zeros.flags, needs_gradient
        )
        nll, posteriors = scan_durations(
            arcs,
            zeros,
            call.targets,
            sizes,
            head.tokens,
            options.blank,
            durations,
            encoder.dtype,
            needs_gradient,
        )
        if factor is not None and needs_gradient:
            ddurations = duration_gradient(factor, nodes.durations, lse, posteriors)
            nodes = nodes._replace(durations=ddurations)
    else:
        scan_options = (head.tokens, options.blank, encoder.dtype, needs_gradient)
        nll, posteriors = scan_lattice(nodes.arcs, call.targets, plan, sizes, *scan_options)
    if factor is None or not needs_gradient:
        return nll, None
    found = new_gradients(call, wanted)
    memory = (nodes, posteriors, hidden, logits, keep_logits, found)
    write_gradients(call, chunks, options, fastemit_lambda, factor, *memory)
    return nll, found


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
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    factor: Tensor | None,
    activation: str,
    blank: int,
    hat: bool,
    delay_penalty: float,
    fastemit_lambda: float,
    chunk: int,
    keep_logits: bool,
    encoder_grad: bool,
    predictor_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    """Return the losses, and the gradients of encoder, predictor, matrix and bias."""
    head = joint_head(weight, bias, None, None)
    targets = as_targets(labels, logit_lengths, target_lengths)
    call = JointCall(encoder, predictor, head, targets, ACTIVATIONS.index(activation))
    options = NodeOptions(blank, True, hat, 0.0, delay_penalty)
    wanted = (encoder_grad, predictor_grad, weight_grad, bias_grad)
    nll, found = linear_transducer(
        call, options, (), fastemit_lambda, factor, chunk, keep_logits, wanted
    )
    found = found or Gradients(None, None, None, None)
    everything, tokens = slice(None), slice(0, head.tokens)
    return (
        nll,
        wanted_part(found.encoder, everything, encoder_grad, encoder),
        wanted_part(found.predictor, everything, predictor_grad, encoder),
        wanted_part(found.weight, tokens, weight_grad, encoder),
        wanted_part(found.bias, tokens, bias_grad, encoder),
    )


def linear_tdt(
    encoder: Tensor,
    predictor: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    duration_weight: Tensor,
    duration_bias: Tensor | None,
    labels: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    factor: Tensor | None,
    activation: str,
    blank: int,
    durations: Sequence[int],
    sigma: float,
    chunk: int,
    keep_logits: bool,
    encoder_grad: bool,
    predictor_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
    duration_weight_grad: bool,
    duration_bias_grad: bool,
) -> tuple[Tensor, ...]:
    """Return the losses, and the gradients of the inputs in their order."""
    head = joint_head(weight, bias, duration_weight, duration_bias)
    targets = as_targets(labels, logit_lengths, target_lengths)
    call = JointCall(encoder, predictor, head, targets, ACTIVATIONS.index(activation))
    options = NodeOptions(blank, True, False, sigma, 0.0)
    any_weight, any_bias = weight_grad or duration_weight_grad, bias_grad or duration_bias_grad
    wanted = (encoder_grad, predictor_grad, any_weight, any_bias)
    nll, found = linear_transducer(
        call, options, durations, 0.0, factor, chunk, keep_logits, wanted
    )
    found = found or Gradients(None, None, None, None)
    everything, tokens = slice(None), slice(0, head.tokens)
    others = slice(head.tokens, head.tokens + head.durations)
    return (
        nll,
        wanted_part(found.encoder, everything, encoder_grad, encoder),
        wanted_part(found.predictor, everything, predictor_grad, encoder),
        wanted_part(found.weight, tokens, weight_grad, encoder),
        wanted_part(found.bias, tokens, bias_grad, encoder),
        wanted_part(found.weight, others, duration_weight_grad, encoder),
        wanted_part(found.bias, others, duration_bias_grad, encoder),
    )
