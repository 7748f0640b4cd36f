"""Arguments of ops, lengths, reductions and chunks that the layers of the transducers share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

REDUCTIONS = ("none", "mean", "sum", "mean_batch", "mean_volume")
NO_DURATIONS: list[int] = []  # those of RNN-T, in the form that the ops take
ACTIVATIONS = ("relu", "tanh", "sigmoid")


class NodeInputs(NamedTuple):
    """The logits of a batch of lattices and its targets, as the registered ops take them.

    Fields:
        logits: `[B, T, U + 1, V]`.
        duration_logits: `[B, T, U + 1, K]`; None for RNN-T.
        targets: the labels, `[B, U]`.
        logit_lengths, target_lengths: the steps and the labels of each sequence, `[B]`.
    """

    logits: Tensor
    duration_logits: Tensor | None
    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor


class NodeOptions(NamedTuple):
    """How logits become the log-probabilities of arcs.

    Fields:
        blank: the class of the blank.
        durations: those of a TDT, or none for RNN-T.
        fused: whether the logits are normalized; otherwise they are log-probabilities.
        hat: whether the blank is a Bernoulli variable apart from the labels.
        sigma: what is subtracted from the log-probability of each token.
        delay_penalty: what is added to that of a label for each step before the middle.
    """

    blank: int
    durations: Sequence[int]
    fused: bool
    hat: bool
    sigma: float
    delay_penalty: float


class JointInputs(NamedTuple):
    """Encoder and predictor, the matrices that make logits of their joint, and the targets.

    Fields:
        encoder: `[B, T, D]`.
        predictor: `[B, U + 1, D]`.
        weight, bias: the matrix `[V, D]` and the bias `[V]` or None of tokens.
        duration_weight, duration_bias: those of durations, `[K, D]` and `[K]`; None for RNN-T.
        lora_A, lora_B: factors `[r, D]` and `[V + K, r]` whose product is added to both matrices
            without being formed; or None.
        targets, logit_lengths, target_lengths: as in `NodeInputs`.
    """

    encoder: Tensor
    predictor: Tensor
    weight: Tensor
    bias: Tensor | None
    duration_weight: Tensor | None
    duration_bias: Tensor | None
    lora_A: Tensor | None
    lora_B: Tensor | None
    targets: Tensor
    logit_lengths: Tensor
    target_lengths: Tensor


class SequenceLengths(NamedTuple):
    """The lengths of a batch.

    Fields:
        steps: the steps of each sequence, `[B]`; 0 for an invalid one.
        labels: the labels of each sequence, `[B]`; 0 for an invalid one.
        invalid: sequences with a label or a length that is out of range, `[B]`.
    """

    steps: Tensor
    labels: Tensor
    invalid: Tensor


def valid_lengths(inputs: NodeInputs | JointInputs, T: int, V: int, blank: int) -> SequenceLengths:
    """Return the lengths, with 0 for the sequences that are invalid."""
    targets, logit_lengths, target_lengths = inputs[-3:]
    position = torch.arange(targets.shape[1], device=targets.device)
    labels = targets.long()
    wrong_label = (labels < 0) | (labels >= V) | (labels == blank)
    invalid = (wrong_label & (position < target_lengths[:, None])).any(1)
    invalid = invalid | (logit_lengths < 0) | (logit_lengths > T)
    invalid = invalid | (target_lengths < 0) | (target_lengths > targets.shape[1])
    steps, labels = (torch.where(invalid, 0, length) for length in (logit_lengths, target_lengths))
    return SequenceLengths(steps, labels, invalid)


def node_mask(steps: Tensor, labels: Tensor, first: int, T: int, U1: int) -> Tensor:
    """Return which nodes of T steps from `first` on are within the lengths, `[B, T, U1]`."""
    t = torch.arange(first, first + T, device=steps.device)
    u = torch.arange(U1, device=steps.device)
    return (t < steps[:, None])[:, :, None] & (u <= labels[:, None])[:, None]


def posteriors_of_kinds(posteriors: Tensor, K: int) -> Tensor:
    """Return what the gradients need of the posteriors of the arcs, `[A, ...]`, blanks first.

    These are the sums over the blanks, over the labels, and over both of each of the K durations of
    a TDT: `[2 + K, ...]`.
    """
    if not K:
        return posteriors
    of_arcs = posteriors.unflatten(0, (2, K))
    return torch.cat([of_arcs.sum(1), of_arcs.sum(0)])


def loss_factors(ones: Tensor, target_lengths: Tensor, reduction: str) -> Tensor:
    """Return the factor of each loss in the reduced loss, `[B]`, in the dtype of as many ones."""
    if reduction == "sum":
        return ones
    if reduction == "mean_batch":
        return ones / ones.shape[0]
    if reduction == "mean":
        return ones / target_lengths.clamp(min=1) / ones.shape[0]
    return ones / target_lengths.sum().clamp(min=1)


def chunk_ranges(B: int, T: int, chunk: int) -> list[tuple[slice, slice]]:
    """Return the sequences and the steps of each chunk of a joint.

    A chunk may have `chunk` steps of all sequences. With at least T of them, it has whole
    sequences, otherwise steps of a single one.
    """
    if not B or not T:
        return [(slice(0, B), slice(0, T))]
    if chunk >= T:
        size = chunk // T
        return [(slice(b, min(b + size, B)), slice(0, T)) for b in range(0, B, size)]
    size = max(chunk, 1)
    steps = [slice(t, min(t + size, T)) for t in range(0, T, size)]
    return [(slice(b, b + 1), each) for b in range(B) for each in steps]
