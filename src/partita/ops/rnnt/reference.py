"""The losses of transducers in plain PyTorch: sums over the paths of a lattice of steps and labels.

At the node (t, u) of RNN-T a blank leads to (t + 1, u), and the next label to (t, u + 1). In a
token-and-duration transducer (TDT) a blank of duration d >= 1 leads to (t + d, u), and the next
label of duration d >= 0 to (t + d, u + 1). A path starts at the node (0, 0) and ends at (T_b, U_b).
All sums are fp64 and differentiable.

Each arc leads to a later anti-diagonal n = t + u. Tensors over nodes are `[T + 1, U1]` or, by
anti-diagonals, `[T + U1, U1]`, in which the entry (n, u) is that of the node (n - u, u).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, pad

from ...primitives.semiring import Log, Max
from ...runtime.dtypes import acc_dtype
from . import joint
from .common import (
    NodeInputs,
    NodeOptions,
    SequenceLengths,
    node_mask,
    posteriors_of_kinds,
    valid_lengths,
)


class Arc(NamedTuple):
    """A kind of arc.

    Fields:
        steps: the steps by which it advances.
        labels: the labels by which it advances, 0 (a blank) or 1.
    """

    steps: int
    labels: int


def arcs_of(durations: Sequence[int]) -> tuple[Arc, ...]:
    """Return the arcs of the blanks and of the labels of a TDT, or of RNN-T without durations.

    A blank of duration 0 is never allowed.
    """
    if not durations:
        return Arc(steps=1, labels=0), Arc(steps=0, labels=1)
    return tuple(Arc(d, labels) for labels in (0, 1) for d in durations)


def label_index(targets: Tensor, U1: int, V: int) -> Tensor:
    """Return the class of the label that leaves each node of a step, `[B, U1]`, any at the last."""
    labels = pad(targets.long(), (0, U1 - targets.shape[1]))
    return labels.clamp(0, V - 1)


def class_scores(x: Tensor, index: Tensor) -> Tensor:
    """Return the scores `[B, T, U1]` of the label that leaves each node."""
    T = x.shape[1]
    return x.gather(3, index[:, None, :, None].expand(-1, T, -1, -1)).squeeze(3)


def is_label_possible(labels: Tensor) -> Tensor:
    """Return whether a node has a label that is not -inf, `[B, T, U1, 1]`."""
    return (labels != -torch.inf).any(-1, keepdim=True)


def token_scores(
    logits: Tensor, targets: Tensor, mask: Tensor, blank: int, fused: bool, hat: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-probability of blank and label at each node, and the log-sum-exp.

    The first is `[2, B, T, U1]` and the second `[B, T, U1]`, both fp64. With `hat` the log-sum-exp
    is that of the labels; where all of them are impossible, so is the label, and the blank is as
    probable as elsewhere. Logits at padding, which is outside of the mask, are not read.
    """
    U1, V = logits.shape[2:]
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


def score_arcs(inputs: NodeInputs, options: NodeOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of the arcs at each node, and the log-sum-exps of both logits.

    The first is `[A, B, T, U1]` fp64, that of the blanks first.
    """
    logits, duration_logits, targets, steps, labels = inputs
    blank, _, fused, hat, sigma, _ = options
    mask = node_mask(steps, labels, 0, *logits.shape[1:3])
    tokens, lse = token_scores(logits, targets, mask, blank, fused, hat)
    if duration_logits is None:
        return tokens, lse, lse.new_empty(0)
    x = torch.where(mask[..., None], duration_logits, 0.0).double()
    log_durations = x.log_softmax(-1).movedim(-1, 0)
    return (tokens[:, None] - sigma + log_durations).flatten(0, 1), lse, x.logsumexp(-1)


def skewed(x: Tensor) -> Tensor:
    """Return `[..., R, U1]` by anti-diagonals, `[..., R + U1 - 1, U1]`, filled with -inf."""
    R, U1 = x.shape[-2:]
    # Row u of the transpose moves by u, because each row of the result is shorter by one.
    flat = pad(x.mT, (0, U1), value=-torch.inf).flatten(-2)[..., :-U1]
    return flat.unflatten(-1, (U1, R + U1 - 1)).mT


def unskewed(x: Tensor, R: int) -> Tensor:
    """Return the rows `[..., R, U1]` of what `skewed` returned."""
    U1 = x.shape[-1]
    flat = pad(x.mT.flatten(-2), (0, U1))
    return flat.unflatten(-1, (U1, R + U1))[..., :R].mT


def _next_label(x: Tensor, labels: int) -> Tensor:
    """Return `[..., U1]`, moved to the next label if `labels` is 1."""
    return pad(x[..., :-1], (1, 0), value=-torch.inf) if labels else x


def _previous_label(x: Tensor, labels: int) -> Tensor:
    """Return `[..., U1]`, moved to the previous label if `labels` is 1."""
    return pad(x[..., 1:], (0, 1), value=-torch.inf) if labels else x


def forward_scores(
    scores: Tensor, arcs: Sequence[Arc], add: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """Return the sum, by `add`, over the paths from the start to each node, `[B, N, U1]`.

    `scores` are those of the arcs by anti-diagonals, `[A, B, N, U1]`.
    """
    _, B, N, U1 = scores.shape
    start = scores.new_full((B, U1), -torch.inf)
    alpha = [torch.where(torch.arange(U1, device=scores.device) == 0, 0.0, start)]
    for n in range(1, N):
        terms = []
        for arc, score in zip(arcs, scores, strict=True):
            before = n - arc.steps - arc.labels
            if before >= 0:
                terms.append(_next_label(alpha[before] + score[:, before], arc.labels))
        alpha.append(add(torch.stack(terms), 0) if terms else start)
    return torch.stack(alpha, 1)


def backward_scores(scores: Tensor, arcs: Sequence[Arc], is_end: Tensor) -> Tensor:
    """Return the log-sum over the paths from each node to the end, `[B, N, U1]`.

    `is_end` tells the last node of each sequence, `[B, N, U1]`.
    """
    _, _, N, _ = scores.shape
    ends = torch.where(is_end, 0.0, -torch.inf).to(scores.dtype)
    beta: dict[int, Tensor] = {}
    for n in range(N - 1, -1, -1):
        terms = [ends[:, n]]
        for arc, score in zip(arcs, scores, strict=True):
            after = n + arc.steps + arc.labels
            if after < N:
                terms.append(score[:, n] + _previous_label(beta[after], arc.labels))
        beta[n] = Log.sum(torch.stack(terms), 0)
    return torch.stack([beta[n] for n in range(N)], 1)


def by_diagonals(scores: Tensor) -> Tensor:
    """Return the scores `[A, B, T, U1]` by anti-diagonals, with a row for the end of the paths."""
    return skewed(pad(scores, (0, 0, 0, 1), value=-torch.inf))


def log_partition(
    scores: Tensor, arcs: Sequence[Arc], lengths: SequenceLengths, need_posteriors: bool
) -> tuple[Tensor, Tensor]:
    """Return log Z, `[B]`, and the posterior of each arc, `[A, B, T, U1]`, if it is needed.

    Both are differentiable in the scores of the arcs, `[A, B, T, U1]`.
    """
    T, U1 = scores.shape[2:]
    skew = by_diagonals(scores)
    alpha = forward_scores(skew, arcs, Log.sum)
    n = torch.arange(skew.shape[2], device=scores.device)[:, None]
    u = torch.arange(U1, device=scores.device)
    steps, labels = lengths.steps[:, None, None], lengths.labels[:, None, None]
    is_end = (n == steps + labels) & (u == labels)  # the last node of each sequence, `[B, N, U1]`
    logz = Log.sum(torch.where(is_end, alpha, -torch.inf).flatten(1), 1)
    logz = torch.where(lengths.steps > 0, logz, -torch.inf)
    if not need_posteriors:
        return logz, scores.new_empty(0)
    beta = backward_scores(skew, arcs, is_end)
    shift = logz.masked_fill(logz == -torch.inf, 0.0)[:, None, None]
    posteriors = []
    for arc, score in zip(arcs, skew, strict=True):
        after = pad(beta, (0, 0, 0, arc.steps + arc.labels), value=-torch.inf)
        after = _previous_label(after[:, arc.steps + arc.labels :], arc.labels)
        posteriors.append((alpha + score + after - shift).exp())
    found = unskewed(torch.stack(posteriors), T + 1)[..., :T, :]
    return logz, torch.where(node_mask(lengths.steps, lengths.labels, 0, T, U1), found, 0.0)


def best_paths(
    scores: Tensor, arcs: Sequence[Arc], lengths: SequenceLengths
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best path of each sequence, traced from its end.

    Among equally good arcs into a node, it takes the first in the order of `arcs`.

    Returns:
        The step that emits each label, `[B, U]`, -1 where there is none; the score of its arc,
        `[B, U]` fp64, 0 where there is none; and the score of the path, `[B]` fp64.
    """
    _, B, _, U1 = scores.shape
    skew, batch = by_diagonals(scores), torch.arange(B, device=scores.device)
    best = forward_scores(skew, arcs, Max.sum)
    t, u = lengths.steps, lengths.labels
    score = torch.where(t > 0, best[batch, t + u, u], -torch.inf)
    # The last column takes what belongs to no label.
    steps = t.new_full((B, U1), -1)
    label_scores = scores.new_zeros(B, U1)
    t = torch.where(score > -torch.inf, t, 0)
    u = torch.where(score > -torch.inf, u, 0)
    for _ in range(skew.shape[2] - 1):
        values = []
        for arc, each in zip(arcs, skew, strict=True):
            t0, u0 = t - arc.steps, u - arc.labels
            possible, node = (t0 >= 0) & (u0 >= 0), (batch, (t0 + u0).clamp(min=0), u0.clamp(min=0))
            values.append(torch.where(possible, best[node] + each[node], -torch.inf))
        value, chosen = torch.stack(values).max(0)
        moves = value > -torch.inf
        for i, arc in enumerate(arcs):
            taken = moves & (chosen == i)
            t, u = torch.where(taken, t - arc.steps, t), torch.where(taken, u - arc.labels, u)
            if arc.labels:
                column = torch.where(taken, u, U1 - 1)
                steps[batch, column] = t
                label_scores[batch, column] = skew[i][batch, t + u, u]
    position = torch.arange(U1 - 1, device=scores.device)
    found = (position < lengths.labels[:, None]) & (score > -torch.inf)[:, None]
    steps = torch.where(found, steps[:, :-1], -1)
    return steps, torch.where(found, label_scores[:, :-1], 0.0), score


def usable_arcs(
    scores: Tensor, lengths: SequenceLengths, durations: Sequence[int], delay_penalty: float
) -> tuple[Tensor, tuple[Arc, ...], list[int]]:
    """Return the scores of the arcs, `[A, B, T, U1]`, -inf where they leave the lattice.

    An arc leads to a node, or as a blank from the last label to the end of the path. Blanks of
    duration 0 do not exist and are left out: with the scores come the arcs that are not, and their
    indices in `scores`. The delay penalty is added to labels.
    """
    T, U1 = scores.shape[2:]
    steps, labels = lengths.steps[:, None, None], lengths.labels[:, None, None]
    inside = node_mask(lengths.steps, lengths.labels, 0, T, U1)
    t = torch.arange(T, device=scores.device)[:, None]
    u = torch.arange(U1, device=scores.device)
    extra = delay_penalty * ((steps - 1).double() / 2 - t)
    found, arcs, indices = [], [], []
    for i, arc in enumerate(arcs_of(durations)):
        if arc.steps + arc.labels == 0:
            continue
        stays = (t + arc.steps < steps) & (u + arc.labels <= labels)
        if not arc.labels:
            stays = stays | ((t + arc.steps == steps) & (u == labels))
        score = scores[i] + extra if arc.labels else scores[i]
        found.append(torch.where(inside & stays, score, -torch.inf))
        arcs.append(arc)
        indices.append(i)
    return torch.stack(found), tuple(arcs), indices


def sum_paths(
    scores: Tensor,
    lengths: SequenceLengths,
    options: NodeOptions,
    need_posteriors: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the losses, `[B]`, and posteriors, `[2 + K, B, T, U1]`, or an empty tensor.

    The posteriors are those of blanks, of labels and of each duration. An invalid sequence has the
    loss and posteriors NaN.
    """
    durations = options.durations
    used, arcs, chosen = usable_arcs(scores, lengths, durations, options.delay_penalty)
    logz, posteriors = log_partition(used, arcs, lengths, need_posteriors)
    losses = torch.where(lengths.invalid, torch.nan, 0.0 - logz).to(dtype)
    if not need_posteriors:
        return losses, losses.new_empty(0)
    of_arc = dict(zip(chosen, posteriors, strict=True))
    nothing = torch.zeros_like(posteriors[0])
    found = torch.stack([of_arc.get(i, nothing) for i in range(len(scores))])
    found = torch.where(lengths.invalid[:, None, None], torch.nan, found)
    return losses, posteriors_of_kinds(found, len(durations)).to(dtype)


def logits_gradient(
    grad: Tensor,
    inputs: NodeInputs,
    lse: Tensor,
    duration_lse: Tensor,
    posteriors: Tensor,
    options: NodeOptions,
    clamp: float,
    fastemit_lambda: float,
) -> Tensor:
    """Return the gradient of the losses in the logits or log-probabilities.

    A node whose posteriors are NaN has the gradient NaN. One whose posteriors are 0 has the
    gradient 0, and so has a sequence whose `grad` is 0; their logits are not read. The log-sum-exps
    are not used here; they save a kernel work.
    """
    logits, _, targets, _, _ = inputs
    blank, _, fused, hat, _, _ = options
    U1, V = logits.shape[2:]
    blank_posterior, label_posterior = posteriors[:2].double()
    label_posterior = label_posterior * (1 + fastemit_lambda)
    index = torch.arange(V, device=logits.device)
    is_blank = index == blank
    is_label = index == label_index(targets, U1, V)[:, None, :, None]
    active = ((posteriors[:2] != 0).any(0) & (grad != 0)[:, None, None])[..., None]
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


def duration_gradient(grad: Tensor, duration_logits: Tensor, posteriors: Tensor) -> Tensor:
    """Return the gradient of the losses in the logits of the durations; see `logits_gradient`."""
    of_durations = posteriors[2:].double().movedim(0, -1)
    total = of_durations.sum(-1, keepdim=True)
    active = (total != 0) & (grad != 0)[:, None, None, None]
    softmax = torch.where(active, duration_logits, 0.0).double().softmax(-1)
    result = (total * softmax - of_durations) * grad.double()[:, None, None, None]
    return torch.where(active, result, 0.0).to(duration_logits.dtype).contiguous()


def rnnt_gradient(
    grad: Tensor,
    inputs: NodeInputs,
    lse: Tensor,
    duration_lse: Tensor,
    posteriors: Tensor,
    options: NodeOptions,
    clamp: float,
    fastemit_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the losses in the logits, and in those of durations or empty."""
    saved = (lse, duration_lse, posteriors)
    result = logits_gradient(grad, inputs, *saved, options, clamp, fastemit_lambda)
    if inputs.duration_logits is None:
        return result, result.new_empty(0)
    return result, duration_gradient(grad, inputs.duration_logits, posteriors)


def differentiable_gradient(
    grad: Tensor, inputs: NodeInputs, options: NodeOptions, clamp: float, fastemit_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the losses as functions of `grad` and of both kinds of logits."""
    saved = rnnt_forward(inputs, options, True)[1:]
    return rnnt_gradient(grad, inputs, *saved, options, clamp, fastemit_lambda)


def rnnt_align(inputs: NodeInputs, options: NodeOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return the step that emits each label on the best path, its log-probability, and the sum.

    These are `[B, U]` int64, `[B, U]` and `[B]`. The log-probability of a label is that of the
    token and of its duration. A sequence that is invalid or has NaN has the score NaN.
    """
    _, T, _, V = inputs.logits.shape
    lengths = valid_lengths(inputs, T, V, options.blank)
    nodes = inputs._replace(logit_lengths=lengths.steps, target_lengths=lengths.labels)
    scores = score_arcs(nodes, options)[0]
    used, arcs, _ = usable_arcs(scores, lengths, options.durations, options.delay_penalty)
    steps, label_scores, score = best_paths(used, arcs, lengths)
    invalid, dtype = lengths.invalid | score.isnan(), acc_dtype(inputs.logits.dtype)
    steps = steps.masked_fill(invalid[:, None], -1)
    label_scores = torch.where(invalid[:, None], torch.nan, label_scores)
    score = torch.where(invalid, torch.nan, score)
    return steps, label_scores.to(dtype), score.to(dtype)


KERNELS = joint.Kernels(score_arcs, sum_paths, rnnt_gradient)
rnnt_forward = functools.partial(joint.rnnt_forward, KERNELS)
linear_rnnt = functools.partial(joint.linear_rnnt, KERNELS)
