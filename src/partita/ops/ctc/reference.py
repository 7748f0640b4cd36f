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
from .common import CTCInputs, gradient_per_sequence, reduce_losses


class CTCLattice(NamedTuple):
    """The chain whose paths are the alignments of a target, with M = 2 · max_target_len + 1 states.

    The three edges into a state come from the state itself, from the one before it, and from the
    one before that, which skips a blank.

    Fields:
        chain: the chain, with scores `[T, N, M, 3]` in fp64.
        labels: the class that each state emits, `[N, M]`.
        invalid: sequences with a label or a length that is out of range, `[N]`.
    """

    chain: ChainPotentials
    labels: Tensor
    invalid: Tensor


def padded_targets(x: CTCInputs) -> tuple[Tensor, Tensor]:
    """Return the padded labels, `[N, max_target_len]`, and the mask of those within a length."""
    position = torch.arange(x.max_target_len, device=x.offsets.device)
    mask = position < x.target_lengths[:, None]
    if not x.labels.numel():
        return mask.long(), mask
    index = (x.offsets[:, None] + position).clamp(0, x.labels.numel() - 1)
    return x.labels.reshape(-1)[index].long(), mask


def ctc_lattice(x: CTCInputs, label_scores: Tensor) -> CTCLattice:
    """Build the lattice of each target from the scores of `scores_of`."""
    T, N, C = label_scores.shape
    padded, mask = padded_targets(x)
    if x.star is not None:
        # The star becomes the last class, and any other label from there on stays out of range.
        padded = torch.where(padded == x.star, C - 1, torch.where(padded == C - 1, C, padded))
    invalid = (mask & ((padded < 0) | (padded >= C))).any(1)
    invalid = invalid | (x.input_lengths < 0) | (x.input_lengths > T)
    invalid = invalid | (x.target_lengths < 0) | (x.target_lengths > x.max_target_len)
    M = 2 * x.max_target_len + 1
    labels = padded.new_full((N, M), x.blank)
    labels[:, 1::2] = torch.where(mask, padded, x.blank).clamp(0, C - 1)
    # The derivative of indexing adds up in a fixed order on a GPU; that of `gather` does not.
    emitted = label_scores[:, torch.arange(N, device=labels.device)[:, None], labels]
    same = labels[:, 2:] == labels[:, :-2]
    same = torch.nn.functional.pad(same, (min(2, M), 0), value=True)[:, :M]
    scores = torch.stack([emitted, emitted, emitted.masked_fill(same, -torch.inf)], -1)
    state = torch.arange(M, device=labels.device)
    source = (state[:, None] - torch.arange(3, device=labels.device)).clamp(min=-1)
    initial = torch.where(state == 0, 0.0, -torch.inf).double().expand(N, -1)
    last = 2 * x.target_lengths[:, None]
    final = torch.where((state == last) | (state == last - 1), 0.0, -torch.inf).double()
    chain = ChainPotentials(scores, source, initial, final, x.input_lengths)
    return CTCLattice(chain, labels, invalid)


def within_lengths(x: CTCInputs) -> Tensor:
    """Return which steps count, `[T, N, 1]`."""
    steps = torch.arange(x.logits.shape[0], device=x.logits.device)
    return (steps[:, None] < x.input_lengths)[..., None]


def as_log_probs(x: CTCInputs) -> Tensor:
    """Return log-probabilities in fp64; the input holds them already unless `from_logits`.

    Steps past a length are 0 before, because their derivative must not be NaN.
    """
    logits = torch.where(within_lengths(x), x.logits, 0.0).double()
    return logits.log_softmax(-1) if x.from_logits else logits


def scores_of(x: CTCInputs, log_probs: Tensor) -> Tensor:
    """Return the score of each label at each step, `[T, N, C]` or with a star `[T, N, C + 1]`."""
    if x.label_priors is not None:
        log_probs = log_probs - x.prior_scale * x.label_priors.double()
    return log_probs if x.star is None else torch.nn.functional.pad(log_probs, (0, 1))


def ctc_loss(
    x: CTCInputs, reduction: str, zero_infinity: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reduced loss, the losses `[N]` fp64, and an empty saved tensor.

    A loss is minus the log of the total score of a target's alignments. It is inf, with the
    gradient 0, where there is no alignment, and NaN for an invalid sequence. The gradient of the
    reference saves nothing: it computes the lattice anew.
    """
    lattice = ctc_lattice(x, scores_of(x, as_log_probs(x)))
    logz = log_partition(chain_inputs(lattice.chain, Log), Log)
    losses = torch.where(lattice.invalid, torch.nan, 0.0 - logz)
    reduced = torch.where(losses == torch.inf, 0.0, losses) if zero_infinity else losses
    value = reduce_losses(reduced, x.target_lengths, reduction)
    return value.to(acc_dtype(x.logits.dtype), copy=True), losses, losses.new_empty(0)


def ctc_gradient(
    grad: Tensor, x: CTCInputs, losses: Tensor, saved: Tensor, reduction: str
) -> Tensor:
    """Return the gradient of the loss in the logits or in the log-probabilities.

    For log-probabilities it is minus the posterior of each class at each step. For logits it is the
    softmax times the posterior of all classes but the star, minus the posterior of the class. It is
    differentiable in `grad` and `logits`. Where the loss is NaN, so are all steps of the sequence.
    """
    log_probs = as_log_probs(x)
    scores = scores_of(x, log_probs)
    lattice = ctc_lattice(x, scores)
    one = torch.ones_like(losses)
    posterior = chain_gradient(one, lattice.chain, losses, saved, torch.float64)[0].sum(-1)
    T, N, C = log_probs.shape
    index = (torch.arange(N, device=losses.device)[:, None], lattice.labels)
    result = log_probs.new_zeros(N, scores.shape[2], T)
    # A state whose label occurs before adds to the same class, here in a fixed order.
    result = result.index_put(index, -posterior.permute(1, 2, 0), accumulate=True).permute(2, 0, 1)
    active = within_lengths(x)
    if x.from_logits:
        has_softmax = active & (losses < torch.inf)[:, None]
        softmax = log_probs.exp()
        if x.star is not None:
            softmax = softmax * (1.0 + result[..., C:])
        result = result[..., :C] + torch.where(has_softmax, softmax, 0.0)
    result = result[..., :C] * gradient_per_sequence(grad, x.target_lengths, reduction)[:, None]
    result = torch.where(
        active & losses.isnan()[:, None], torch.nan, torch.where(active, result, 0.0)
    )
    result = torch.where(lattice.invalid[:, None], torch.nan, result)
    return result.to(x.logits.dtype).contiguous()


def ctc_align(x: CTCInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best alignment of each target; one with NaN has the labels -1 and scores of NaN.

    Returns:
        The label that each step emits, `[N, T]`; its position in the target, `[N, T]`, or -1; its
        score, `[N, T]`; and the sum of these scores, `[N]`.
    """
    dtype, label_scores = acc_dtype(x.logits.dtype), scores_of(x, as_log_probs(x))
    lattice = ctc_lattice(x, label_scores)
    score, states, _ = chain_viterbi(lattice.chain, True)
    score = torch.where(lattice.invalid, torch.nan, score)
    state = states[1:].T.contiguous()
    mask = (state >= 0) & ~score.isnan()[:, None]
    if not mask.numel():
        return state.clone(), state.clone(), state.to(dtype), score.to(dtype)
    classes = torch.where(mask, lattice.labels.gather(1, state.clamp(min=0)), -1)
    tokens = torch.where(mask & (state % 2 == 1), state // 2, -1)
    scores = label_scores.transpose(0, 1).gather(2, classes.clamp(min=0)[..., None]).squeeze(-1)
    scores = torch.where(score.isnan()[:, None], torch.nan, scores.masked_fill(~mask, 0.0))
    if x.star is not None:
        classes = torch.where(classes == x.logits.shape[2], x.star, classes)
    return classes, tokens, scores.to(dtype), score.to(dtype)
