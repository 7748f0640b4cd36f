"""The transducer's loss in plain PyTorch: the sum over the paths of a lattice of steps and labels.

At the node (t, u) a blank leads to (t + 1, u) and the next label to (t, u + 1). All sums are fp64
and differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from ...runtime.dtypes import acc_dtype
from .reference_lattice import (
    Arc,
    Lengths,
    best_paths,
    log_partition,
    node_mask,
    valid_lengths,
    within_lattice,
)

ARCS = (Arc(steps=1, labels=0), Arc(steps=0, labels=1))


def label_index(targets: Tensor, U1: int, V: int) -> Tensor:
    """Return the class of the label that leaves each node of a step, `[B, U1]`, any at the last."""
    labels = torch.nn.functional.pad(targets.long(), (0, U1 - targets.shape[1]))
    return labels.clamp(0, V - 1)


def class_scores(x: Tensor, index: Tensor) -> Tensor:
    """Return the scores `[B, T, U1]` of the label that leaves each node."""
    T = x.shape[1]
    return x.gather(3, index[:, None, :, None].expand(-1, T, -1, -1)).squeeze(3)


def is_label_possible(labels: Tensor) -> Tensor:
    """Return whether a node has a label that is not -inf, `[B, T, U1, 1]`."""
    return (labels != -torch.inf).any(-1, keepdim=True)


def arc_scores(
    logits: Tensor, targets: Tensor, lengths: Lengths, blank: int, fused: bool, hat: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of blank and label at each node, and the log-sum-exp.

    The first is `[2, B, T, U1]` and the second `[B, T, U1]`, both fp64. With `hat` the log-sum-exp
    is that of the labels; where all of them are impossible, so is the label, and the blank is as
    probable as elsewhere. Logits at padding are not read.
    """
    _, T, U1, V = logits.shape
    mask = node_mask(lengths, T, U1)
    x = torch.where(mask[..., None], logits, 0.0).double()
    index = label_index(targets, U1, V)
    if not fused:
        return torch.stack([x[..., blank], class_scores(x, index)]), x.new_empty(0)
    if not hat:
        # Log-probabilities are not differences from the log-sum-exp, whose digits may be too few.
        y = x.log_softmax(-1)
        return torch.stack([y[..., blank], class_scores(y, index)]), x.logsumexp(-1)
    is_blank = torch.arange(V, device=x.device) == blank
    labels = x.masked_fill(is_blank, -torch.inf)
    possible = is_label_possible(labels)
    safe = torch.where(possible, labels, 0.0)
    label = logsigmoid(-x[..., blank]) + class_scores(safe.log_softmax(-1), index)
    scores = [logsigmoid(x[..., blank]), torch.where(possible[..., 0], label, -torch.inf)]
    return torch.stack(scores), torch.where(possible[..., 0], safe.logsumexp(-1), -torch.inf)


def delayed(scores: Tensor, lengths: Lengths, delay_penalty: float) -> Tensor:
    """Return the scores `[2, B, T, U1]` with what the delay penalty adds to the labels."""
    if not delay_penalty:
        return scores
    t = torch.arange(scores.shape[2], device=scores.device)
    lead_time = (lengths.steps[:, None] - 1).double() / 2 - t
    return torch.stack([scores[0], scores[1] + (delay_penalty * lead_time)[..., None]])


def rnnt_lattice(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    fused: bool,
    hat: bool,
    delay_penalty: float,
) -> tuple[Tensor, Tensor, Lengths]:
    """Return the scores of the arcs within the lattice, the log-sum-exp and the lengths."""
    _, T, _, V = logits.shape
    lengths = valid_lengths(targets, logit_lengths, target_lengths, T, V, blank)
    scores, lse = arc_scores(logits, targets, lengths, blank, fused, hat)
    scores = delayed(scores, lengths, delay_penalty)
    return within_lattice(scores, ARCS, lengths), lse, lengths


def rnnt_forward(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    fused: bool,
    hat: bool,
    delay_penalty: float,
    need_posteriors: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return minus the log-probability of each target, and what its gradient needs.

    Returns:
        The losses `[B]`, the log-sum-exp of each node `[B, T, U1]` fp64 (empty unless `fused`), and
        the posterior of the blank and of the label that leave each node, `[2, B, T, U1]`. The last
        two are empty unless `need_posteriors`. An invalid sequence has the loss and posteriors NaN.
    """
    sequences = (targets, logit_lengths, target_lengths)
    scores, lse, lengths = rnnt_lattice(logits, *sequences, blank, fused, hat, delay_penalty)
    logz, posteriors = log_partition(scores, ARCS, lengths, need_posteriors)
    dtype = acc_dtype(logits.dtype)
    nll = torch.where(lengths.invalid, torch.nan, 0.0 - logz).to(dtype)
    if not need_posteriors:
        return nll, scores.new_empty(0), nll.new_empty(0)
    posteriors = torch.where(lengths.invalid[:, None, None], torch.nan, posteriors)
    return nll, lse, posteriors.to(dtype)


def rnnt_gradient(
    grad: Tensor,
    logits: Tensor,
    lse: Tensor,
    posteriors: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    fused: bool,
    hat: bool,
    clamp: float,
    fastemit_lambda: float,
) -> Tensor:
    """Return the gradient of the losses in the logits or log-probabilities.

    A node whose posteriors are NaN has the gradient NaN. One whose posteriors are 0 has the
    gradient 0, and so has a sequence whose `grad` is 0; their logits are not read. The log-sum-exps
    are not used here; they save a kernel work.
    """
    U1, V = logits.shape[2:]
    blank_posterior, label_posterior = posteriors.double()
    label_posterior = label_posterior * (1 + fastemit_lambda)
    index = torch.arange(V, device=logits.device)
    is_blank = index == blank
    is_label = index == label_index(targets, U1, V)[:, None, :, None]
    active = ((posteriors != 0).any(0) & (grad != 0)[:, None, None])[..., None]
    blank_posterior, label_posterior = blank_posterior[..., None], label_posterior[..., None]
    of_label = torch.where(is_label, label_posterior, 0.0)
    of_blank = torch.where(is_blank, blank_posterior, 0.0)
    x = torch.where(active, logits, 0.0).double()
    if not fused:
        result = 0.0 - of_blank - of_label
    elif not hat:
        result = (blank_posterior + label_posterior) * x.softmax(-1) - of_blank - of_label
    else:
        labels = x.masked_fill(is_blank, -torch.inf)
        possible = is_label_possible(labels)
        classes = torch.where(possible, labels, 0.0).softmax(-1)
        result = torch.where(possible, label_posterior * classes, 0.0) - of_label
        # The probability of the blank minus 1 would cancel.
        d_blank = label_posterior * x.sigmoid() - blank_posterior * (-x).sigmoid()
        result = torch.where(is_blank, d_blank, result)
    if clamp > 0:
        result = result.clamp(-clamp, clamp)
    is_nan = (blank_posterior + label_posterior).isnan()
    result = torch.where(is_nan, torch.nan, result)
    result = torch.where(active, result * grad.double()[:, None, None, None], 0.0)
    return result.to(logits.dtype).contiguous()


def differentiable_gradient(
    grad: Tensor,
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    fused: bool,
    hat: bool,
    delay_penalty: float,
    clamp: float,
    fastemit_lambda: float,
) -> Tensor:
    """Return the gradient of the losses as a function of `grad` and the logits."""
    sequences = (targets, logit_lengths, target_lengths)
    _, lse, posteriors = rnnt_forward(logits, *sequences, blank, fused, hat, delay_penalty, True)
    saved = (lse, posteriors, *sequences)
    return rnnt_gradient(grad, logits, *saved, blank, fused, hat, clamp, fastemit_lambda)


def rnnt_align(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the step that emits each label on the best path, its log-probability, and the sum.

    These are `[B, U]` int64, `[B, U]` and `[B]`.
    """
    sequences = (targets, logit_lengths, target_lengths)
    scores, _, lengths = rnnt_lattice(logits, *sequences, blank, fused, False, 0.0)
    return finished_paths(scores, ARCS, lengths, acc_dtype(logits.dtype))


def finished_paths(
    scores: Tensor, arcs: tuple[Arc, ...], lengths: Lengths, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best paths in a dtype; a sequence that is invalid or has NaN has the score NaN."""
    paths = best_paths(scores, arcs, lengths)
    invalid = lengths.invalid | paths.score.isnan()
    steps = paths.steps.masked_fill(invalid[:, None], -1)
    label_scores = torch.where(invalid[:, None], torch.nan, paths.scores)
    score = torch.where(invalid, torch.nan, paths.score)
    return steps, label_scores.to(dtype), score.to(dtype)
