"""CTC in plain PyTorch, as a sparse linear chain over the states of a target's lattice.

The states are blank, label, blank, ..., label, blank. All sums are fp64 and differentiable. A star
in the targets is one more class, C, with the score 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...primitives.semiring import Log
from ...runtime.dtypes import acc_dtype
from ..chain.common import ChainPotentials
from ..chain.reference import chain_gradient, chain_inputs, chain_viterbi, log_partition
from .common import (
    PackedTargets,
    ScoreOptions,
    gradient_per_sequence,
    padded_targets,
    reduce_losses,
)


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
    label_scores: Tensor,
    targets: PackedTargets,
    input_lengths: Tensor,
    blank: int,
    star: int | None,
) -> CTCLattice:
    """Build the lattice of each target from the scores of `scores_of`."""
    T, N, C = label_scores.shape
    padded, mask = padded_targets(targets)
    if star is not None:
        # The star becomes the last class, and any other label from there on stays out of range.
        padded = torch.where(padded == star, C - 1, torch.where(padded == C - 1, C, padded))
    invalid = (mask & ((padded < 0) | (padded >= C))).any(1)
    invalid = invalid | (input_lengths < 0) | (input_lengths > T)
    invalid = invalid | (targets.lengths < 0) | (targets.lengths > targets.max_target_len)
    M = 2 * targets.max_target_len + 1
    labels = padded.new_full((N, M), blank)
    labels[:, 1::2] = torch.where(mask, padded, blank).clamp(0, C - 1)
    # The derivative of indexing adds up in a fixed order on a GPU; that of `gather` does not.
    emitted = label_scores[:, torch.arange(N, device=labels.device)[:, None], labels]
    same = labels[:, 2:] == labels[:, :-2]
    same = torch.nn.functional.pad(same, (min(2, M), 0), value=True)[:, :M]
    scores = torch.stack([emitted, emitted, emitted.masked_fill(same, -torch.inf)], -1)
    state = torch.arange(M, device=labels.device)
    source = (state[:, None] - torch.arange(3, device=labels.device)).clamp(min=-1)
    initial = torch.where(state == 0, 0.0, -torch.inf).double().expand(N, -1)
    last = 2 * targets.lengths[:, None]
    final = torch.where((state == last) | (state == last - 1), 0.0, -torch.inf).double()
    return CTCLattice(labels, scores, source, initial, final, invalid)


def within_lengths(logits: Tensor, input_lengths: Tensor) -> Tensor:
    """Return which steps count, `[T, N, 1]`."""
    return (torch.arange(logits.shape[0], device=logits.device)[:, None] < input_lengths)[..., None]


def as_log_probs(logits: Tensor, input_lengths: Tensor, from_logits: bool) -> Tensor:
    """Return log-probabilities in fp64; the input holds them already unless `from_logits`.

    Steps past a length are 0 before, because their derivative must not be NaN.
    """
    logits = torch.where(within_lengths(logits, input_lengths), logits, 0.0).double()
    return logits.log_softmax(-1) if from_logits else logits


def scores_of(log_probs: Tensor, options: ScoreOptions) -> Tensor:
    """Return the score of each label at each step, `[T, N, C]` or with a star `[T, N, C + 1]`."""
    if options.label_priors is not None:
        log_probs = log_probs - options.prior_scale * options.label_priors.double()
    return log_probs if options.star is None else torch.nn.functional.pad(log_probs, (0, 1))


def losses_of(
    logits: Tensor,
    targets: PackedTargets,
    input_lengths: Tensor,
    blank: int,
    from_logits: bool,
    options: ScoreOptions,
) -> Tensor:
    """Return minus the log of the total score of each target's alignments, `[N]` fp64.

    It is inf, with the gradient 0, where there is no alignment, and NaN for an invalid sequence.
    """
    scores = scores_of(as_log_probs(logits, input_lengths, from_logits), options)
    x = ctc_lattice(scores, targets, input_lengths, blank, options.star)
    chain = ChainPotentials(x.scores, x.source, x.initial, x.final, input_lengths)
    logz = log_partition(chain_inputs(chain, Log), Log)
    return torch.where(x.invalid, torch.nan, 0.0 - logz)


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
    label_priors: Tensor | None = None,
    prior_scale: float = 1.0,
    star: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reduced loss, the losses `[N]` fp64, and an empty saved tensor.

    The gradient of the reference saves nothing: it computes the lattice anew.
    """
    targets = PackedTargets(labels, offsets, target_lengths, max_target_len)
    options = ScoreOptions(label_priors, prior_scale, star)
    losses = losses_of(logits, targets, input_lengths, blank, from_logits, options)
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
    label_priors: Tensor | None,
    max_target_len: int,
    blank: int,
    from_logits: bool,
    reduction: str,
    prior_scale: float = 1.0,
    star: int | None = None,
) -> Tensor:
    """Return the gradient of the loss in the logits or in the log-probabilities.

    For log-probabilities it is minus the posterior of each class at each step. For logits it is the
    softmax times the posterior of all classes but the star, minus the posterior of the class. It is
    differentiable in `grad` and `logits`. Where the loss is NaN, so are all steps of the sequence.
    """
    log_probs = as_log_probs(logits, input_lengths, from_logits)
    targets = PackedTargets(labels, offsets, target_lengths, max_target_len)
    scores = scores_of(log_probs, ScoreOptions(label_priors, prior_scale, star))
    x = ctc_lattice(scores, targets, input_lengths, blank, star)
    chain = ChainPotentials(x.scores, x.source, x.initial, x.final, input_lengths)
    one = torch.ones_like(losses)
    posterior = chain_gradient(one, chain, losses, saved, torch.float64)[0].sum(-1)
    T, N, C = log_probs.shape
    index = (torch.arange(N, device=logits.device)[:, None], x.labels)
    result = log_probs.new_zeros(N, scores.shape[2], T)
    # A state whose label occurs before adds to the same class, here in a fixed order.
    result = result.index_put(index, -posterior.permute(1, 2, 0), accumulate=True).permute(2, 0, 1)
    active = within_lengths(logits, input_lengths)
    if from_logits:
        has_softmax = active & (losses < torch.inf)[:, None]
        softmax = log_probs.exp()
        if star is not None:
            softmax = softmax * (1.0 + result[..., C:])
        result = result[..., :C] + torch.where(has_softmax, softmax, 0.0)
    result = result[..., :C] * gradient_per_sequence(grad, target_lengths, reduction)[:, None]
    result = torch.where(
        active & losses.isnan()[:, None], torch.nan, torch.where(active, result, 0.0)
    )
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
    label_priors: Tensor | None = None,
    prior_scale: float = 1.0,
    star: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best alignment of each target; one with NaN has the labels -1 and scores of NaN.

    Returns:
        The label that each step emits, `[N, T]`; its position in the target, `[N, T]`, or -1; its
        score, `[N, T]`; and the sum of these scores, `[N]`.
    """
    dtype = acc_dtype(logits.dtype)
    label_scores = scores_of(
        as_log_probs(logits, input_lengths, from_logits),
        ScoreOptions(label_priors, prior_scale, star),
    )
    targets = PackedTargets(labels, offsets, target_lengths, max_target_len)
    x = ctc_lattice(label_scores, targets, input_lengths, blank, star)
    chain = ChainPotentials(x.scores, x.source, x.initial, x.final, input_lengths)
    score, states, _ = chain_viterbi(chain, True)
    score = torch.where(x.invalid, torch.nan, score)
    state = states[1:].T.contiguous()
    mask = (state >= 0) & ~score.isnan()[:, None]
    if not mask.numel():
        return state.clone(), state.clone(), state.to(dtype), score.to(dtype)
    classes = torch.where(mask, x.labels.gather(1, state.clamp(min=0)), -1)
    tokens = torch.where(mask & (state % 2 == 1), state // 2, -1)
    scores = label_scores.transpose(0, 1).gather(2, classes.clamp(min=0)[..., None]).squeeze(-1)
    scores = torch.where(score.isnan()[:, None], torch.nan, scores.masked_fill(~mask, 0.0))
    if star is not None:
        classes = torch.where(classes == logits.shape[2], star, classes)
    return classes, tokens, scores.to(dtype), score.to(dtype)
