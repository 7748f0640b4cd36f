"""Transducer losses by the functions of a backend: from logits, or from encoder and predictor.

The joint `[B, T, U + 1, V]` need not exist at once. The first pass reduces the logits of each node
to the log-probabilities of its arcs. The scan turns these into posteriors. The second pass turns
the logits into their gradient, and this into gradients of the inputs. The loops and the matrix
products are the same on every device; a backend supplies the rest as `Kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype
from ..linear_heads.products import composed_linear, in_blocks, without_padding
from .common import JointInputs, NodeInputs, NodeOptions, chunk_ranges, node_mask, valid_lengths
from .plan import PARTIAL_STEPS


class Kernels(NamedTuple):
    """The functions of one backend.

    Fields:
        score_arcs: takes the `NodeInputs` of a chunk, with the lengths of its sequences within it,
            and `NodeOptions`. It returns the log-probabilities of the arcs, `[A, b, t, U1]` fp64,
            and the log-sum-exps of both logits, `[b, t, U1]`.
        sum_paths: takes the log-probabilities of all arcs, `[A, B, T, U1]`, the lengths and
            options, whether posteriors are needed, and their dtype. It returns the losses `[B]` and
            the posteriors, `[2 + K, B, T, U1]`.
        gradient: `rnnt_gradient`, which may overwrite the logits.
    """

    score_arcs: Callable[..., tuple[Tensor, Tensor, Tensor]]
    sum_paths: Callable[..., tuple[Tensor, Tensor]]
    gradient: Callable[..., tuple[Tensor, Tensor]]


def activate(x: Tensor, activation: str) -> Tensor:
    """Return the activation of the sum of encoder and predictor."""
    if activation == "relu":
        return x.relu()
    return x.tanh() if activation == "tanh" else x.sigmoid()


def activation_gradient(hidden: Tensor, activation: str) -> Tensor:
    """Return the derivative of the activation, given its value."""
    if activation == "relu":
        return (hidden > 0).to(hidden.dtype)
    return 1 - hidden * hidden if activation == "tanh" else hidden * (1 - hidden)


def joint_hidden(
    encoder: Tensor, predictor: Tensor, activation: str, mask: Tensor, invariant: bool
) -> Tensor:
    """Return the hidden states of the joint, `[nodes, D]`, in whole blocks if `invariant`.

    NaN at padding is not read.
    """
    x = encoder[:, :, None] + predictor[:, None]
    # A padding row has the gradient 0, and 0 times NaN would be NaN in the gradient of a matrix.
    x = torch.where(mask[..., None], x, 0.0).flatten(0, 2)
    return activate(in_blocks(x, invariant), activation)


def chunk_logits(
    inputs: JointInputs, hidden: Tensor, nodes: torch.Size, invariant: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the logits of tokens, and those of durations, in the shape of the nodes."""
    A, B, V, states = inputs.lora_A, inputs.lora_B, len(inputs.weight), hidden
    if A is not None:
        states = composed_linear(hidden, A, None, invariant, False)

    def logits(weight: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
        found = composed_linear(hidden, weight, bias, invariant, False)
        if B is not None:
            found = found + composed_linear(states, B[rows], None, invariant, False)
        return without_padding(found, nodes, invariant)

    tokens = logits(inputs.weight, inputs.bias, slice(0, V))
    if inputs.duration_weight is None:
        return tokens, None
    return tokens, logits(inputs.duration_weight, inputs.duration_bias, slice(V, None))


def _add_chunk(
    sums: Sequence[Tensor | None],
    inputs: JointInputs,
    activation: str,
    hidden: Tensor,
    dlogits: Sequence[Tensor],
    rows: slice,
    steps: slice,
    invariant: bool,
) -> None:
    """Add what a chunk contributes to the gradients, each of which is None if it is not wanted."""
    nodes = dlogits[0].shape[:3]
    hidden = hidden[: nodes.numel()]
    dhidden: Tensor | None = None
    d_encoder, d_predictor, *d_heads, d_A, d_B = sums
    weights = (inputs.weight, inputs.duration_weight)
    for weight, dweight, dbias, each in zip(
        weights, d_heads[::2], d_heads[1::2], dlogits, strict=True
    ):
        if weight is None:
            continue
        flat = each.flatten(0, 2)
        if dweight is not None:
            dweight.addmm_(flat.T.to(dweight.dtype), hidden.to(dweight.dtype))
        if dbias is not None:
            dbias += flat.sum(0, dtype=dbias.dtype)
        if d_encoder is not None or d_predictor is not None:
            part = composed_linear(flat, weight.T, None, invariant, False)
            dhidden = part if dhidden is None else dhidden + part
    if inputs.lora_A is not None and inputs.lora_B is not None:
        heads = dlogits if inputs.duration_weight is not None else dlogits[:1]
        flat = torch.cat([each.flatten(0, 2) for each in heads], 1)
        dstates = composed_linear(flat, inputs.lora_B.T, None, invariant, False)
        for total, a, b in ((d_A, dstates, hidden), (d_B, flat, hidden @ inputs.lora_A.T)):
            if total is not None:
                total.addmm_(a.T.to(total.dtype), b.to(total.dtype))
        if dhidden is not None:
            dhidden = dhidden + composed_linear(dstates, inputs.lora_A.T, None, invariant, False)
    if dhidden is None:
        return
    dtype = acc_dtype(hidden.dtype)
    dx = dhidden.to(dtype) * activation_gradient(hidden.to(dtype), activation)
    dx = dx.view(*nodes, hidden.shape[1])
    if d_encoder is not None:
        d_encoder[rows, steps] += dx.sum(2)
    if d_predictor is not None:
        # In the batch-invariant mode, chunks of any length have the same partial sums.
        for some in dx.split(PARTIAL_STEPS if invariant else dx.shape[1], 1):
            d_predictor[rows] += some.sum(1)


def rnnt_forward(
    kernels: Kernels, inputs: NodeInputs, options: NodeOptions, need_posteriors: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return minus the log-probability of each target, and what its gradient needs.

    Without durations and their logits it is that of RNN-T.

    Returns:
        The losses `[B]`, the log-sum-exps of logits (empty unless `fused`) and durations (empty
        for RNN-T), each `[B, T, U1]` fp64, and the posteriors of blanks, of labels and of each
        duration, `[2 + K, B, T, U1]`. The last three are empty unless `need_posteriors`. An
        invalid sequence has the loss and posteriors NaN.
    """
    _, T, _, V = inputs.logits.shape
    lengths = valid_lengths(inputs, T, V, options.blank)
    nodes = inputs._replace(logit_lengths=lengths.steps, target_lengths=lengths.labels)
    scores, *lses = kernels.score_arcs(nodes, options)
    dtype = acc_dtype(inputs.logits.dtype)
    losses, posteriors = kernels.sum_paths(scores, lengths, options, need_posteriors, dtype)
    if not need_posteriors:
        lses = [scores.new_empty(0), scores.new_empty(0)]
    return losses, lses[0], lses[1], posteriors


def linear_rnnt(
    kernels: Kernels,
    inputs: JointInputs,
    factor: Tensor | None,
    activation: str,
    options: NodeOptions,
    fastemit_lambda: float,
    chunk: int,
    keep_logits: int,
    invariant: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the losses `[B]`, and the gradients of the sum of factor * loss.

    These are the gradients of encoder, predictor, matrix and bias of tokens and of durations, and
    the factors of LoRA. Each is empty if it is not `wanted`, and all of them are without a factor.
    If `invariant`, products have whole blocks of nodes.
    """
    encoder, predictor = inputs[:2]
    (B, T, _), U1, V = encoder.shape, predictor.shape[1], len(inputs.weight)
    lengths = valid_lengths(inputs, T, V, options.blank)
    ranges, num_arcs = chunk_ranges(B, T, chunk), 2 * max(len(options.durations), 1)
    needs_gradient = factor is not None and any(wanted)
    saved: list[tuple[Tensor, Tensor | None]] = []
    arcs = encoder.new_empty((num_arcs, B, T, U1), dtype=torch.float64)
    lses = arcs.new_empty((2, B, T, U1))

    def hidden_states(rows: slice, steps: slice) -> tuple[Tensor, torch.Size]:
        own, first = encoder[rows, steps], steps.start
        mask = node_mask(lengths.steps[rows], lengths.labels[rows], first, own.shape[1], U1)
        return joint_hidden(own, predictor[rows], activation, mask, invariant), mask.shape

    for rows, steps in ranges:
        logits = chunk_logits(inputs, *hidden_states(rows, steps), invariant)
        within = (lengths.steps[rows] - steps.start).clamp(0, steps.stop - steps.start)
        nodes = NodeInputs(*logits, inputs.targets[rows], within, lengths.labels[rows])
        arcs[:, rows, steps], *chunk_lses = kernels.score_arcs(nodes, options)
        for lse, each in zip(lses, chunk_lses, strict=True):
            if each.numel():
                lse[rows, steps] = each
        if keep_logits and needs_gradient:
            saved.append(logits)
    dtype = acc_dtype(encoder.dtype)
    losses, posteriors = kernels.sum_paths(arcs, lengths, options, needs_gradient, dtype)
    # The gradients grow chunk by chunk.
    sums = [
        encoder.new_zeros(tensor.shape, dtype=dtype)
        if tensor is not None and wants and needs_gradient
        else None
        for tensor, wants in zip(inputs[:8], wanted, strict=True)
    ]
    if factor is not None and needs_gradient:
        for i, (rows, steps) in enumerate(ranges):
            hidden = hidden_states(rows, steps)
            logits = saved[i] if keep_logits else chunk_logits(inputs, *hidden, invariant)
            sizes = (lengths.steps[rows], lengths.labels[rows])
            nodes = NodeInputs(*logits, inputs.targets[rows], *sizes)
            of_nodes = (*lses[:, rows, steps], posteriors[:, rows, steps])
            numbers = (options, 0.0, fastemit_lambda)
            dlogits = kernels.gradient(factor[rows], nodes, *of_nodes, *numbers)
            _add_chunk(sums, inputs, activation, hidden[0], dlogits, rows, steps, invariant)
    # Gradients have the dtype of the inputs; those that are not wanted are empty.
    found: Any = (encoder.new_empty(0) if each is None else each.to(encoder.dtype) for each in sums)
    return losses, *found
