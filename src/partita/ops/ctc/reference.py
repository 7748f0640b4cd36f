"""CTC in plain PyTorch: a sparse linear chain over a target's labels with blanks between them, in fp64, differentiable throughout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.semiring import Log
from ...runtime.dtypes import acc_dtype
from ..chain.reference import chain_gradient, chain_inputs, chain_viterbi, log_partition
from .common import Targets, gradient_per_sequence, reduce_losses


class Lattice(NamedTuple):
    """The chain whose paths are the alignments of a target.

    Fields:
        labels: `[N, S]`, the class that each state emits: blank, label, blank, label, ..., blank.
        scores: `[T, N, S, 3]` fp64: of staying, of the next state, and of the label after this one past the blank between them.
        source: `[S, 3]`.
        initial, final: `[N, S]` fp64.
        wrong: `[N]`, sequences with a label or a length that is out of range.
    """

    labels: Tensor
    scores: Tensor
    source: Tensor
    initial: Tensor
    final: Tensor
    wrong: Tensor


def padded_targets(targets: Targets) -> tuple[Tensor, Tensor]:
    """The labels of each sequence, `[N, most]`, and which of them count."""
    place = torch.arange(targets.most, device=targets.offsets.device)
    counts = place < targets.lengths[:, None]
    if not targets.labels.numel():
        return counts.long(), counts
    index = (targets.offsets[:, None] + place).clamp(0, targets.labels.numel() - 1)
    return targets.labels[index].long(), counts


def lattice(log_probs: Tensor, targets: Targets, input_lengths: Tensor, blank: int) -> Lattice:
    """From log-probabilities `[T, N, C]` fp64."""
    steps, count, classes = log_probs.shape
    found, counts = padded_targets(targets)
    wrong = (counts & ((found < 0) | (found >= classes))).any(1)
    wrong = (
        wrong
        | (input_lengths < 0)
        | (input_lengths > steps)
        | (targets.lengths < 0)
        | (targets.lengths > targets.most)
    )
    states = 2 * targets.most + 1
    labels = found.new_full((count, states), blank)
    labels[:, 1::2] = torch.where(counts, found, blank).clamp(0, classes - 1)
    entered = log_probs.gather(2, labels.expand(steps, -1, -1))
    same = torch.nn.functional.pad(
        labels[:, 2:] == labels[:, :-2], (min(2, states), 0), value=True
    )[:, :states]
    scores = torch.stack([entered, entered, entered.masked_fill(same, -torch.inf)], -1)
    state = torch.arange(states, device=labels.device)
    source = (state[:, None] - torch.arange(3, device=labels.device)).clamp(min=-1)
    initial = torch.where(state == 0, 0.0, -torch.inf).double().expand(count, -1)
    last = 2 * targets.lengths[:, None]
    final = torch.where((state == last) | (state == last - 1), 0.0, -torch.inf).double()
    return Lattice(labels, scores, source, initial, final, wrong)


def normalised(logits: Tensor, from_logits: bool) -> Tensor:
    logits = logits.double()
    return logits.log_softmax(-1) if from_logits else logits


def loss_of(
    logits: Tensor, targets: Targets, input_lengths: Tensor, blank: int, from_logits: bool
) -> Tensor:
    """-log of the probability of the targets, `[N]` fp64; inf where there is no alignment, with a gradient of 0."""
    x = lattice(normalised(logits, from_logits), targets, input_lengths, blank)
    total = log_partition(
        chain_inputs(x.scores, x.source, x.initial, x.final, input_lengths, Log), Log
    )
    return torch.where(x.wrong, torch.nan, 0.0 - total)


def ctc_loss(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    most: int,
    blank: int,
    from_logits: bool,
    reduction: str,
    zero_infinity: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses reduced, each of them, and what the gradient may use again: nothing, for the reference starts anew."""
    losses = loss_of(
        logits, Targets(labels, offsets, target_lengths, most), input_lengths, blank, from_logits
    )
    value = reduce_losses(losses, target_lengths, reduction, zero_infinity).to(
        acc_dtype(logits.dtype), copy=True
    )
    return value, losses, logits.new_empty(0, dtype=torch.float64)


def ctc_gradient(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    kept: Tensor,
    most: int,
    blank: int,
    from_logits: bool,
    reduction: str,
) -> Tensor:
    """The gradient of log-probabilities is minus the posterior of each class at each step; that of logits, the softmax minus it."""
    log_probs = normalised(logits, from_logits)
    x = lattice(log_probs, Targets(labels, offsets, target_lengths, most), input_lengths, blank)
    chain = (x.scores, x.initial, x.final, x.source, input_lengths, losses, kept, torch.float64)
    posterior = chain_gradient(torch.ones_like(losses), *chain)[0].sum(-1)
    result = torch.zeros_like(log_probs).scatter_add(
        2, x.labels.expand(posterior.shape), -posterior
    )
    counts = torch.arange(len(logits), device=logits.device)[:, None] < input_lengths
    if from_logits:
        result = result + torch.where(
            (counts & (losses < torch.inf))[..., None], log_probs.exp(), 0.0
        )
    return torch.where(
        x.wrong[:, None],
        torch.nan,
        result * gradient_per_sequence(grad, target_lengths, reduction)[:, None],
    ).to(logits.dtype)


def ctc_align(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    most: int,
    blank: int,
    from_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the best alignment: the label of each step and its place in the target, `[N, T]`, its log-probability, and the sum of these, `[N]` fp64."""
    log_probs = normalised(logits, from_logits)
    x = lattice(log_probs, Targets(labels, offsets, target_lengths, most), input_lengths, blank)
    score, states, _ = chain_viterbi(x.scores, x.source, x.initial, x.final, input_lengths, True)
    score = torch.where(x.wrong, torch.nan, score)
    state = states[1:].T.contiguous()
    there = (state >= 0) & ~x.wrong[:, None]
    if not there.numel():
        return state, state, state.double(), score
    found = torch.where(there, x.labels.gather(1, state.clamp(min=0)), -1)
    tokens = torch.where(there & (state % 2 == 1), state // 2, -1)
    scores = (
        log_probs.transpose(0, 1)
        .gather(2, found.clamp(min=0)[..., None])
        .squeeze(-1)
        .masked_fill(~there, 0.0)
    )
    return found, tokens, torch.where(x.wrong[:, None], torch.nan, scores), score
