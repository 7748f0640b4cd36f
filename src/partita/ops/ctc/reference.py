"""CTC in plain PyTorch, as a sparse linear chain over the states of a target's lattice.

The states are blank, label, blank, ..., label, blank. All sums are fp64 and differentiable.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.semiring import Log
from ...runtime.dtypes import acc_dtype
from ..chain.reference import chain_gradient, chain_inputs, chain_viterbi, log_partition
from .common import PackedTargets, gradient_per_sequence, padded_targets, reduce_losses


class CTCLattice(NamedTuple):
    """The chain whose paths are the alignments of a target, with M = 2 · max_target_len + 1 states.

    Fields:
        labels: the class that each state emits, `[N, M]`.
        scores: the score of each edge into a state, `[T, N, M, 3]` fp64: from the state itself,
            from the one before it, and from the one before that, which skips a blank.
        source: the state that each edge comes from, `[M, 3]`.
        initial, final: the score of starting and of ending in each state, `[N, M]` fp64.
        invalid: sequences with a label or a length that is out of range, `[N]`.
    """

    labels: Tensor
    scores: Tensor
    source: Tensor
    initial: Tensor
    final: Tensor
    invalid: Tensor


def ctc_lattice(
    log_probs: Tensor, targets: PackedTargets, input_lengths: Tensor, blank: int
) -> CTCLattice:
    """Build the lattice of each target from log-probabilities `[T, N, C]` fp64."""
    T, N, C = log_probs.shape
    padded, mask = padded_targets(targets)
    invalid = (mask & ((padded < 0) | (padded >= C))).any(1)
    invalid = invalid | (input_lengths < 0) | (input_lengths > T)
    invalid = invalid | (targets.lengths < 0) | (targets.lengths > targets.max_target_len)
    M = 2 * targets.max_target_len + 1
    labels = padded.new_full((N, M), blank)
    labels[:, 1::2] = torch.where(mask, padded, blank).clamp(0, C - 1)
    # The derivative of indexing adds up in a fixed order on a GPU; that of `gather` does not.
    emitted = log_probs[:, torch.arange(N, device=labels.device)[:, None], labels]
    same = labels[:, 2:] == labels[:, :-2]
    same = torch.nn.functional.pad(same, (min(2, M), 0), value=True)[:, :M]
    scores = torch.stack([emitted, emitted, emitted.masked_fill(same, -torch.inf)], -1)
    state = torch.arange(M, device=labels.device)
    source = (state[:, None] - torch.arange(3, device=labels.device)).clamp(min=-1)
    initial = torch.where(state == 0, 0.0, -torch.inf).double().expand(N, -1)
    last = 2 * targets.lengths[:, None]
    final = torch.where((state == last) | (state == last - 1), 0.0, -torch.inf).double()
    return CTCLattice(labels, scores, source, initial, final, invalid)


def as_log_probs(logits: Tensor, from_logits: bool) -> Tensor:
    """Return log-probabilities in fp64; the input holds them already unless `from_logits`."""
    logits = logits.double()
    return logits.log_softmax(-1) if from_logits else logits


def losses_of(
    logits: Tensor, targets: PackedTargets, input_lengths: Tensor, blank: int, from_logits: bool
) -> Tensor:
    """Return minus the log-probability of each target, `[N]` fp64.

    It is inf, with the gradient 0, where there is no alignment, and NaN for an invalid sequence.
    """
    x = ctc_lattice(as_log_probs(logits, from_logits), targets, input_lengths, blank)
    chain = chain_inputs(x.scores, x.source, x.initial, x.final, input_lengths, Log)
    return torch.where(x.invalid, torch.nan, 0.0 - log_partition(chain, Log))


def ctc_loss(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    max_target_len: int,
    blank: int,
    from_logits: bool,
    reduction: str,
    zero_infinity: bool,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reduced loss, the losses `[N]` fp64, and an empty saved tensor.

    The gradient of the reference saves nothing: it computes the lattice anew.
    """
    targets = PackedTargets(labels, offsets, target_lengths, max_target_len)
    losses = losses_of(logits, targets, input_lengths, blank, from_logits)
    value = reduce_losses(losses, target_lengths, reduction, zero_infinity)
    value = value.to(acc_dtype(logits.dtype), copy=True)
    return value, losses, logits.new_empty(0, dtype=torch.float64)


def ctc_gradient(
    grad: Tensor,
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    saved: Tensor,
    max_target_len: int,
    blank: int,
    from_logits: bool,
    reduction: str,
) -> Tensor:
    """Return the gradient of the loss in the logits or in the log-probabilities.

    For log-probabilities it is minus the posterior of each class at each step; for logits it is the
    softmax minus that posterior. It is differentiable in `grad` and `logits`.
    """
    log_probs = as_log_probs(logits, from_logits)
    targets = PackedTargets(labels, offsets, target_lengths, max_target_len)
    x = ctc_lattice(log_probs, targets, input_lengths, blank)
    chain = (x.scores, x.initial, x.final, x.source, input_lengths, losses, saved, torch.float64)
    posterior = chain_gradient(torch.ones_like(losses), *chain)[0].sum(-1)
    T, N, C = log_probs.shape
    index = (torch.arange(N, device=logits.device)[:, None], x.labels)
    result = log_probs.new_zeros(N, C, T)
    # A state whose label occurs before adds to the same class, here in a fixed order.
    result = result.index_put(index, -posterior.permute(1, 2, 0), accumulate=True).permute(2, 0, 1)
    if from_logits:
        active = torch.arange(len(logits), device=logits.device)[:, None] < input_lengths
        has_softmax = active & (losses < torch.inf)
        result = result + torch.where(has_softmax[..., None], log_probs.exp(), 0.0)
    result = result * gradient_per_sequence(grad, target_lengths, reduction)[:, None]
    return torch.where(x.invalid[:, None], torch.nan, result).to(logits.dtype).contiguous()


def ctc_align(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    max_target_len: int,
    blank: int,
    from_logits: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best alignment of each target.

    Returns:
        The class that each step emits, `[N, T]`; its position in the target, `[N, T]`, or -1; its
        log-probability, `[N, T]`; and the sum of these log-probabilities, `[N]`.
    """
    dtype = acc_dtype(logits.dtype)
    log_probs = as_log_probs(logits, from_logits)
    targets = PackedTargets(labels, offsets, target_lengths, max_target_len)
    x = ctc_lattice(log_probs, targets, input_lengths, blank)
    score, states, _ = chain_viterbi(x.scores, x.source, x.initial, x.final, input_lengths, True)
    score = torch.where(x.invalid, torch.nan, score)
    state = states[1:].T.contiguous()
    mask = (state >= 0) & ~x.invalid[:, None]
    if not mask.numel():
        return state, state, state.to(dtype), score.to(dtype)
    classes = torch.where(mask, x.labels.gather(1, state.clamp(min=0)), -1)
    tokens = torch.where(mask & (state % 2 == 1), state // 2, -1)
    scores = log_probs.transpose(0, 1).gather(2, classes.clamp(min=0)[..., None]).squeeze(-1)
    scores = torch.where(x.invalid[:, None], torch.nan, scores.masked_fill(~mask, 0.0))
    return classes, tokens, scores.to(dtype), score.to(dtype)
