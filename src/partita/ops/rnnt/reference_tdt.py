"""The loss of token-and-duration transducers in plain PyTorch.

At the node (t, u) a blank of duration d >= 1 leads to (t + d, u), and the next label of duration
d >= 0 to (t + d, u + 1). All sums are fp64 and differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype
from .common import token_and_duration_posteriors
from .reference import class_scores, finished_paths, label_index
from .reference_lattice import (
    Arc,
    Lengths,
    log_partition,
    node_mask,
    valid_lengths,
    within_lattice,
)


def duration_arcs(durations: Sequence[int]) -> tuple[Arc, ...]:
    """Return the arcs of the blanks and of the labels; a blank of duration 0 is never allowed."""
    return tuple(Arc(d, labels) for labels in (0, 1) for d in durations)


def _log_softmax(logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-softmax of the logits in fp64, that of zeros at padding, and log-sum-exps."""
    x = torch.where(mask[..., None], logits, 0.0).double()
    return x.log_softmax(-1), x.logsumexp(-1)


def arc_scores(
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    lengths: Lengths,
    blank: int,
    sigma: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of the arcs at each node, and both log-sum-exps.

    The first is `[2 K, B, T, U1]` fp64, that of the blanks first. Logits at padding are not read.
    """
    _, T, U1, V = token_logits.shape
    mask = node_mask(lengths, T, U1)
    x, token_lse = _log_softmax(token_logits, mask)
    y, duration_lse = _log_softmax(duration_logits, mask)
    label = class_scores(x, label_index(targets, U1, V))
    tokens = torch.stack([x[..., blank], label]) - sigma
    log_durations = y.movedim(-1, 0)
    return (tokens[:, None] + log_durations).flatten(0, 1), token_lse, duration_lse


def usable_arcs(
    scores: Tensor, lengths: Lengths, durations: Sequence[int]
) -> tuple[Tensor, tuple[Arc, ...], list[int]]:
    """Return the scores within the lattice, without the blanks of duration 0, which do not exist.

    With them come the arcs, and their indices in `scores`.
    """
    arcs = duration_arcs(durations)
    chosen = [i for i, arc in enumerate(arcs) if arc.steps + arc.labels > 0]
    used = tuple(arcs[i] for i in chosen)
    return within_lattice(torch.stack([scores[i] for i in chosen]), used, lengths), used, chosen


def sum_of_paths(
    scores: Tensor, lengths: Lengths, durations: Sequence[int], need_posteriors: bool
) -> tuple[Tensor, Tensor]:
    """Return log Z, `[B]`, and posteriors, `[2 + K, B, T, U1]`, or an empty tensor.

    The posteriors are those of blanks, of labels and of each duration.
    """
    used, arcs, chosen = usable_arcs(scores, lengths, durations)
    logz, posteriors = log_partition(used, arcs, lengths, need_posteriors)
    if not need_posteriors:
        return logz, posteriors
    of_arc = dict(zip(chosen, posteriors, strict=True))
    nothing = torch.zeros_like(posteriors[0])
    found = torch.stack([of_arc.get(i, nothing) for i in range(len(scores))])
    return logz, token_and_duration_posteriors(found, len(durations))


def tdt_forward(
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    durations: Sequence[int],
    sigma: float,
    need_posteriors: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return minus the log-probability of each target, and what its gradient needs.

    Returns:
        The losses `[B]`, the log-sum-exps of tokens and durations, each `[B, T, U1]` fp64, and the
        posteriors of blanks, of labels and of each duration, `[2 + K, B, T, U1]`. The last three
        are empty unless `need_posteriors`. An invalid sequence has the loss and posteriors NaN.
    """
    sequences = (targets, logit_lengths, target_lengths)
    T, V = token_logits.shape[1], token_logits.shape[3]
    lengths = valid_lengths(*sequences, T, V, blank)
    inputs = (token_logits, duration_logits, targets, lengths)
    scores, token_lse, duration_lse = arc_scores(*inputs, blank, sigma)
    logz, posteriors = sum_of_paths(scores, lengths, durations, need_posteriors)
    dtype = acc_dtype(token_logits.dtype)
    nll = torch.where(lengths.invalid, torch.nan, 0.0 - logz).to(dtype)
    if not need_posteriors:
        return nll, scores.new_empty(0), scores.new_empty(0), nll.new_empty(0)
    posteriors = torch.where(lengths.invalid[:, None, None], torch.nan, posteriors)
    return nll, token_lse, duration_lse, posteriors.to(dtype)


def tdt_gradient(
    grad: Tensor,
    token_logits: Tensor,
    duration_logits: Tensor,
    token_lse: Tensor,
    duration_lse: Tensor,
    posteriors: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the losses in the logits of tokens and of durations.

    A node whose posteriors are 0 has the gradient 0, and so has a sequence whose `grad` is 0;
    their logits are not read. The log-sum-exps are not used here; they save a kernel work.
    """
    _, _, U1, V = token_logits.shape
    blank_posterior, label_posterior = posteriors[:2].double()[..., None]
    active = ((posteriors[:2] != 0).any(0) & (grad != 0)[:, None, None])[..., None]
    factor = grad.double()[:, None, None, None]
    index = torch.arange(V, device=token_logits.device)
    is_label = index == label_index(targets, U1, V)[:, None, :, None]
    tokens = torch.where(index == blank, blank_posterior, 0.0)
    tokens = tokens + torch.where(is_label, label_posterior, 0.0)
    durations = posteriors[2:].double().movedim(0, -1)
    total = blank_posterior + label_posterior
    results = []
    for logits, expected in ((token_logits, tokens), (duration_logits, durations)):
        softmax = torch.where(active, logits, 0.0).double().softmax(-1)
        result = torch.where(active, (total * softmax - expected) * factor, 0.0)
        results.append(result.to(logits.dtype).contiguous())
    return results[0], results[1]


def differentiable_gradient(
    grad: Tensor,
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    durations: Sequence[int],
    sigma: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the losses as functions of `grad` and of both kinds of logits."""
    inputs = (token_logits, duration_logits)
    sequences = (targets, logit_lengths, target_lengths)
    saved = tdt_forward(*inputs, *sequences, blank, durations, sigma, True)[1:]
    return tdt_gradient(grad, *inputs, *saved, *sequences, blank)


def tdt_align(
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    durations: Sequence[int],
    sigma: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the step that emits each label on the best path, its log-probability, and the sum.

    The log-probability of a label is that of the token and of its duration.
    """
    T, V = token_logits.shape[1], token_logits.shape[3]
    lengths = valid_lengths(targets, logit_lengths, target_lengths, T, V, blank)
    inputs = (token_logits, duration_logits, targets, lengths)
    scores = arc_scores(*inputs, blank, sigma)[0]
    used, arcs, _ = usable_arcs(scores, lengths, durations)
    return finished_paths(used, arcs, lengths, acc_dtype(token_logits.dtype))
