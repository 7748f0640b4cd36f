"""Transducer losses from encoder and predictor, one chunk of the joint network at a time.

The joint `[B, T, U + 1, V]` need not exist at once. The first pass reduces the logits of each node
to the log-probabilities of its arcs. The scan turns these into posteriors. The second pass turns
the logits into their gradient, and this into gradients of the inputs. The loops and the matrix
products are the same on every device; a backend supplies the rest as `JointKernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype
from .common import chunk_ranges

Head = tuple[Tensor | None, Tensor | None]  # a matrix [X, D] and its bias [X]


class JointKernels(NamedTuple):
    """The functions of one backend.

    Fields:
        read_nodes: takes the logits of each head for a chunk, `[b, t, U1, X]`, its targets, and the
            steps and labels of its sequences within the chunk. It returns the log-probabilities of
            the arcs, `[A, b, t, U1]` fp64, and the log-sum-exp of each head, `[b, t, U1]`.
        scan: takes the log-probabilities of all arcs, `[A, B, T, U1]`, and whether posteriors are
            needed. It returns the losses `[B]` and the posteriors, `[..., B, T, U1]`.
        write_gradient: overwrites the logits of a chunk with their gradient, given the factor of
            each loss, the logits, their log-sum-exps, the posteriors and the targets.
    """

    read_nodes: Callable[..., tuple[Tensor, Sequence[Tensor]]]
    scan: Callable[..., tuple[Tensor, Tensor]]
    write_gradient: Callable[..., None]


class Joint(NamedTuple):
    """A joint network and the lengths of its batch.

    Fields:
        encoder: `[B, T, D]`.
        predictor: `[B, U + 1, D]`.
        heads: the matrices and biases that make logits of tokens and of durations, of which RNN-T
            has none.
        activation: the name of the function between the sum and the heads.
        targets: `[B, U]`.
        steps, labels: the lengths of the sequences, `[B]`; 0 for an invalid sequence.
    """

    encoder: Tensor
    predictor: Tensor
    heads: Sequence[Head]
    activation: str
    targets: Tensor
    steps: Tensor
    labels: Tensor

    def matrices(self) -> list[tuple[Tensor, Tensor | None]]:
        """Return the heads that there are."""
        return [(weight, bias) for weight, bias in self.heads if weight is not None]


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


def chunk_mask(steps: Tensor, labels: Tensor, first: int, T: int, U1: int) -> Tensor:
    """Return which nodes from step `first` on are within the lengths, `[B, T, U1]`."""
    t = torch.arange(first, first + T, device=steps.device)
    u = torch.arange(U1, device=steps.device)
    return (t < steps[:, None])[:, :, None] & (u <= labels[:, None])[:, None]


def joint_hidden(encoder: Tensor, predictor: Tensor, activation: str, mask: Tensor) -> Tensor:
    """Return the hidden states of the joint, `[B, T, U + 1, D]`; NaN at padding is not read."""
    x = encoder[:, :, None] + predictor[:, None]
    # A padding row has the gradient 0, and 0 times NaN would be NaN in the gradient of a matrix.
    return activate(torch.where(mask[..., None], x, 0.0), activation)


def _hidden(joint: Joint, rows: slice, steps: slice) -> Tensor:
    """Return the hidden states of a chunk."""
    encoder, predictor = joint.encoder[rows, steps], joint.predictor[rows]
    lengths = (joint.steps[rows], joint.labels[rows])
    mask = chunk_mask(*lengths, steps.start, encoder.shape[1], predictor.shape[1])
    return joint_hidden(encoder, predictor, joint.activation, mask)


def _logits(joint: Joint, hidden: Tensor) -> list[Tensor]:
    return [torch.nn.functional.linear(hidden, weight, bias) for weight, bias in joint.matrices()]


class _Sums(NamedTuple):
    """The gradients, which grow chunk by chunk in the accumulator dtype; None if not wanted."""

    encoder: Tensor | None
    predictor: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    duration_weight: Tensor | None
    duration_bias: Tensor | None


def _zero_sums(joint: Joint, wanted: Sequence[bool]) -> _Sums:
    dtype = acc_dtype(joint.encoder.dtype)
    inputs = (joint.encoder, joint.predictor, *joint.heads[0], *joint.heads[1])
    return _Sums(
        *(
            torch.zeros(tensor.shape, dtype=dtype, device=tensor.device)
            if tensor is not None and wants
            else None
            for tensor, wants in zip(inputs, wanted, strict=True)
        )
    )


def _add_chunk(
    sums: _Sums, joint: Joint, hidden: Tensor, dlogits: list[Tensor], rows: slice, steps: slice
) -> None:
    """Add what a chunk contributes to the gradients."""
    flat_hidden = hidden.flatten(0, 2)
    dhidden: Tensor | None = None
    for i, (weight, _) in enumerate(joint.matrices()):
        flat = dlogits[i].flatten(0, 2)
        dweight, dbias = sums[2 + 2 * i], sums[3 + 2 * i]
        if dweight is not None:
            dweight.addmm_(flat.T.to(dweight.dtype), flat_hidden.to(dweight.dtype))
        if dbias is not None:
            dbias += flat.sum(0, dtype=dbias.dtype)
        if sums.encoder is not None or sums.predictor is not None:
            part = flat @ weight
            dhidden = part if dhidden is None else dhidden + part
    if dhidden is None:
        return
    dtype = acc_dtype(hidden.dtype)
    dx = dhidden.view(hidden.shape).to(dtype)
    dx = dx * activation_gradient(hidden.to(dtype), joint.activation)
    if sums.encoder is not None:
        sums.encoder[rows, steps] += dx.sum(2)
    if sums.predictor is not None:
        sums.predictor[rows] += dx.sum(1)


def linear_transducer(
    kernels: JointKernels,
    joint: Joint,
    factor: Tensor | None,
    chunk: int,
    keep_logits: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, list[Tensor]]:
    """Return the losses `[B]`, and the gradients of the sum of factor * loss.

    The gradients are those of encoder, predictor, and matrix and bias of both heads. Those that are
    not wanted are empty, and so are all of them without a factor.
    """
    B, T, _ = joint.encoder.shape
    ranges = chunk_ranges(B, T, chunk)
    needs_gradient = factor is not None and any(wanted)
    saved: list[list[Tensor]] = []
    arcs: Tensor | None = None
    lses: list[Tensor] = []
    for rows, steps in ranges:
        logits = _logits(joint, _hidden(joint, rows, steps))
        within = (joint.steps[rows] - steps.start).clamp(0, steps.stop - steps.start)
        part, part_lses = kernels.read_nodes(
            logits, joint.targets[rows], within, joint.labels[rows]
        )
        if arcs is None:
            arcs = part.new_empty(len(part), B, T, joint.predictor.shape[1])
            lses = [lse.new_empty(arcs.shape[1:]) for lse in part_lses]
        arcs[:, rows, steps] = part
        for lse, each in zip(lses, part_lses, strict=True):
            lse[rows, steps] = each
        if keep_logits and needs_gradient:
            saved.append(logits)
    assert arcs is not None
    losses, posteriors = kernels.scan(arcs, needs_gradient)
    sums = _zero_sums(joint, wanted if needs_gradient else [False] * 6)
    if needs_gradient:
        assert factor is not None
        for i, (rows, steps) in enumerate(ranges):
            hidden = _hidden(joint, rows, steps)
            logits = saved[i] if keep_logits else _logits(joint, hidden)
            chunk_lses = [lse[rows, steps] for lse in lses]
            nodes = (logits, chunk_lses, posteriors[..., rows, steps, :])
            kernels.write_gradient(factor[rows], *nodes, joint.targets[rows])
            _add_chunk(sums, joint, hidden, logits, rows, steps)
    # Gradients have the dtype of the inputs; those that are not wanted are empty.
    empty, dtype = joint.encoder.new_empty, joint.encoder.dtype
    return losses, [empty(0) if sum is None else sum.to(dtype) for sum in sums]
