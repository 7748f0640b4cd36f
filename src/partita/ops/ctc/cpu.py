"""CTC on the CPU, in Numba, with the sequences of a batch in parallel.

The forward scan computes alpha in fp64; the backward scan derives the posterior from it. The best
alignment is traced through pointers of two bits. The M states are blank, label, blank, ..., blank.
Two padding states that nothing enters precede them, so that the loop of a step has no branches.
Inside of the scans LOWEST stands for -inf, so that no difference of two states is NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...primitives.cpu.batch import (
    INF,
    LANES,
    LOWEST,
    as_array,
    as_steps,
    contiguous_row,
    empty_batch,
    logsumexp_row,
    row_at,
    run_over_batch,
)
from ...primitives.cpu.jit import jit
from ...primitives.cpu.math import exp, exp_floor, log
from ...runtime.dtypes import acc_dtype
from ...runtime.register import resolved

IMPOSSIBLE = LOWEST / 2  # a smaller value is the sum of LOWEST and log-probabilities


class CTCBatch(NamedTuple):
    """The targets and the lengths of a batch as the user gave them; see `sequence_lengths`.

    Fields:
        labels: all labels, `[num_labels]`.
        offsets: index of each sequence's first label, `[N]`.
        lengths: number of steps, `[N]`.
        target_lengths: number of labels, `[N]`.
        blank: the class of the blank.
        max_target_len: an upper bound of all target lengths.
        T: number of steps of the logits.
        C: number of classes.
    """

    labels: Any
    offsets: Any
    lengths: Any
    target_lengths: Any
    blank: int
    max_target_len: int
    T: int
    C: int

    @property
    def sources(self) -> range:
        """The edges and the classes of a step. Their number measures the work of a step."""
        return range(3 * (2 * self.max_target_len + 1) + self.C)


@jit
def sequence_lengths(batch: Any, n: int) -> tuple[int, int, bool]:
    """Return the number of steps and of labels of a sequence, and whether it is valid.

    A sequence is invalid if one of its labels or lengths is out of range. Its lengths are 0, so no
    index that is computed from them is out of bounds.
    """
    length, target_len, first = batch.lengths[n], batch.target_lengths[n], batch.offsets[n]
    valid = 0 <= length <= batch.T and 0 <= target_len <= batch.max_target_len
    valid = valid and 0 <= first <= len(batch.labels) - target_len
    if valid:
        for i in range(first, first + target_len):
            valid = valid and 0 <= batch.labels[i] < batch.C
    return (length, target_len, True) if valid else (0, 0, False)


@jit
def fill_states(batch: Any, n: int, target_len: int, labels: Any, skips: Any) -> int:
    """Fill in the class of each state and the score of the edge that skips a blank into it.

    That score is 0 between two different labels and LOWEST otherwise. Return the number of states.
    """
    states = 2 * target_len + 1
    for c in range(states):
        labels[c] = batch.labels[batch.offsets[n] + c // 2] if c % 2 else batch.blank
        skips[c] = 0.0 if c > 1 and labels[c] != labels[c - 2] else LOWEST
    return states


@jit
def init_alpha(alpha: Any, states: int) -> None:
    """Set alpha before the first step: only the first blank, from which the first label follows."""
    for c in range(states + 2):
        alpha[c] = LOWEST
    alpha[2] = 0.0


@jit
def alpha_step(
    row: Any,
    lse: float,
    labels: Any,
    skips: Any,
    before: Any,
    after: Any,
    states: int,
    emitted: Any,
) -> None:
    """Compute alpha after a step, `[2 + M]`, from alpha before it."""
    for c in range(states):
        emitted[c] = row[labels[c]] - lse
    for c in range(states):
        a, b, d = before[c + 2], before[c + 1], before[c] + skips[c]
        highest = max(max(a, b), max(d, LOWEST))
        total = exp_floor(a - highest) + exp_floor(b - highest) + exp_floor(d - highest)
        value = highest + log(total) + emitted[c]
        after[c + 2] = LOWEST if value <= IMPOSSIBLE else value  # NaN passes through


@jit(nogil=True)
def forward_scan(
    share: Any,
    batch: Any,
    scores: Any,
    from_logits: bool,
    alpha: Any,
    save: bool,
    losses: Any,
) -> None:
    """Compute the losses, `[N]`; that of an invalid sequence is NaN.

    `alpha` is `[N, T + 1, 2 + M + 1]` and receives alpha before each step with the step's
    log-sum-exp in the last entry. Without `save` it is `[N, 2, 2 + M + 1]` and only alternates.
    """
    max_states, buffer = 2 * batch.max_target_len + 1, np.empty(batch.C, scores.numbers.dtype)
    maxima, sums = np.empty(LANES), np.empty(LANES)
    for n in share:
        labels, skips = np.empty(max_states, np.int64), np.empty(max_states)
        emitted = np.empty(max_states)
        length, target_len, valid = sequence_lengths(batch, n)
        states = fill_states(batch, n, target_len, labels, skips)
        init_alpha(alpha[n, 0], states)
        for t in range(length):
            row = contiguous_row(scores, t, n, buffer)
            before, after = (t, t + 1) if save else (t % 2, (t + 1) % 2)
            lse = logsumexp_row(row, maxima, sums) if from_logits else 0.0
            alpha[n, before, max_states + 2] = lse
            alpha[n, after, 0], alpha[n, after, 1] = LOWEST, LOWEST
            alpha_step(row, lse, labels, skips, alpha[n, before], alpha[n, after], states, emitted)
        last = alpha[n, length if save else length % 2]
        a, b = last[states + 1], last[states] if states > 1 else LOWEST
        highest = max(a, b)
        total = exp_floor(a - highest) + exp_floor(b - highest)
        losses[n] = INF if highest <= IMPOSSIBLE else -(highest + np.log(total))
        if not valid:
            losses[n] = np.nan


@jit
def reduce_losses(
    losses: Any, target_lengths: Any, mean: bool, zero_infinity: bool, value: Any
) -> None:
    """Write the sum of the losses, or the mean of loss / target length, to `value`, `[1]`."""
    total = 0.0
    for n in range(len(losses)):
        loss = 0.0 if zero_infinity and losses[n] == INF else losses[n]
        total += loss / max(target_lengths[n], 1) if mean else loss
    value[0] = total / len(losses) if mean else total


@jit
def posterior_step(
    alpha: Any, skips: Any, posterior: Any, result: Any, parts: Any, states: int
) -> None:
    """Compute the posterior of the states before a step, `[M]`, from the one after it.

    Each state's posterior is divided among the three edges into it in proportion to the terms that
    they contribute to its alpha.
    """
    for c in range(states):
        a, b, d = alpha[c + 2], alpha[c + 1], alpha[c] + skips[c]
        highest = max(max(a, b), max(d, LOWEST))
        x, y, z = exp(a - highest), exp(b - highest), exp(d - highest)
        scale = posterior[c] / (x + y + z)
        parts[0, c], parts[1, c], parts[2, c] = x * scale, y * scale, z * scale
    for c in range(states):
        result[c] = parts[0, c]
    for c in range(states - 1):
        result[c] += parts[1, c + 1]
    for c in range(states - 2):
        result[c] += parts[2, c + 2]


@jit
def gradient_row(
    row: Any, lse: float, grad: float, softmax: bool, posterior: Any, result: Any
) -> None:
    """Compute the gradient of a step's classes, `[C]`."""
    if softmax:
        for c in range(len(row)):
            result[c] = grad * (exp(row[c] - lse) - posterior[c])
    else:
        for c in range(len(row)):
            result[c] = grad * (0.0 - posterior[c])


@jit(nogil=True)
def backward_scan(
    share: Any,
    batch: Any,
    grad: Any,
    mean: bool,
    scores: Any,
    from_logits: bool,
    alpha: Any,
    losses: Any,
    result: Any,
) -> None:
    """Compute the gradient of the logits or log-probabilities, `[T, N, C]`.

    `grad` is the gradient of each loss, or with `mean` that of the mean of loss / target length.
    """
    max_states, buffer = 2 * batch.max_target_len + 1, np.empty(batch.C, scores.numbers.dtype)
    for n in share:
        labels, skips = np.empty(max_states, np.int64), np.empty(max_states)
        after, before, parts = np.empty(max_states), np.empty(max_states), np.empty((3, max_states))
        posterior = np.zeros(batch.C)
        length, target_len, valid = sequence_lengths(batch, n)
        states = fill_states(batch, n, target_len, labels, skips)
        possible = losses[n] < INF
        own_grad = grad[n] / len(grad) / max(target_len, 1) if mean else grad[n]
        failed = not valid or losses[n] != losses[n]
        for t in range(0 if failed else length, len(result)):
            for c in range(batch.C):
                result[t, n, c] = np.nan if failed else 0.0
        if failed:
            continue
        for c in range(states):
            after[c] = 0.0
        last = alpha[n, length]
        for c in range(max(states - 2, 0), states):
            after[c] = exp(last[c + 2] + losses[n]) if possible else 0.0
        for t in range(length - 1, -1, -1):
            total = 0.0
            for c in range(states):
                total += after[c]
            scale = 1.0 / total if total > 0.0 else 0.0
            for c in range(states):
                posterior[labels[c]] += after[c] * scale
            row, lse = contiguous_row(scores, t, n, buffer), alpha[n, t, max_states + 2]
            gradient_row(row, lse, own_grad, from_logits and possible, posterior, result[t, n])
            for c in range(states):
                posterior[labels[c]] = 0.0
            posterior_step(alpha[n, t], skips, after, before, parts, states)
            after, before = before, after


@jit(nogil=True)
def viterbi_scan(
    share: Any,
    batch: Any,
    scores: Any,
    from_logits: bool,
    pointers: Any,
    labels_out: Any,
    tokens: Any,
    scores_out: Any,
    score: Any,
) -> None:
    """Find the best alignment of each sequence and trace it by pointers, `[N, T, M / 4]` bytes.

    Steps without a label get the label -1 and the score 0, or NaN in an invalid sequence.
    """
    max_states, buffer = 2 * batch.max_target_len + 1, np.empty(batch.C, scores.numbers.dtype)
    maxima, sums = np.empty(LANES), np.empty(LANES)
    for n in share:
        labels, skips = np.empty(max_states, np.int64), np.empty(max_states)
        length, target_len, valid = sequence_lengths(batch, n)
        lse = np.zeros(max(length, 1))
        states = fill_states(batch, n, target_len, labels, skips)
        before, after = np.empty(max_states + 2), np.full(max_states + 2, LOWEST)
        init_alpha(before, states)
        for t in range(length):
            row = contiguous_row(scores, t, n, buffer)
            lse[t] = logsumexp_row(row, maxima, sums) if from_logits else 0.0
            for c in range(states):
                # NaN counts as the greatest value, so that it reaches the result.
                best, edge = before[c + 2], 0
                if (before[c + 1] > best) | (before[c + 1] != before[c + 1]):
                    best, edge = before[c + 1], 1
                if (before[c] + skips[c] > best) | (before[c] + skips[c] != before[c] + skips[c]):
                    best, edge = before[c], 2
                value = best + (row[labels[c]] - lse[t])
                after[c + 2] = LOWEST if value <= IMPOSSIBLE else value
                packed = pointers[n, t, c // 4] if c % 4 else 0
                pointers[n, t, c // 4] = packed | (edge << (2 * (c % 4)))
            before, after = after, before
        state = states - 2 if states > 1 and before[states] >= before[states + 1] else states - 1
        score[n] = -INF if before[state + 2] <= IMPOSSIBLE else before[state + 2]
        if (before[states] != before[states]) | (before[states + 1] != before[states + 1]):
            score[n] = np.nan
        if not valid:
            score[n] = np.nan
        for t in range(len(labels_out[n])):
            labels_out[n, t], tokens[n, t], scores_out[n, t] = -1, -1, 0.0 if valid else np.nan
        for t in range(length - 1 if score[n] > -INF else -1, -1, -1):
            labels_out[n, t] = labels[state]
            tokens[n, t] = state // 2 if state % 2 else -1
            scores_out[n, t] = row_at(scores, t, n)[labels[state] * scores.strides[2]] - lse[t]
            state -= (pointers[n, t, state // 4] >> (2 * (state % 4))) & 3


def as_batch(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    max_target_len: int,
    blank: int,
) -> CTCBatch:
    """Return the arguments of an op as arrays."""
    return CTCBatch(
        labels=resolved(labels).long().contiguous().numpy(),
        offsets=resolved(offsets).contiguous().numpy(),
        lengths=resolved(input_lengths).contiguous().numpy(),
        target_lengths=resolved(target_lengths).contiguous().numpy(),
        blank=blank,
        max_target_len=max_target_len,
        T=logits.shape[0],
        C=logits.shape[2],
    )


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
    """Return the reduced loss, the losses `[N]` fp64, and alpha if `save`, else an empty tensor."""
    targets = (labels, offsets, input_lengths, target_lengths, max_target_len, blank)
    batch = as_batch(logits, *targets)
    T, N, _ = logits.shape
    # The system's fresh pages are zero, so entries that are never written cost nothing.
    alpha = np.zeros((N, T + 1 if save else 2, 2 * max_target_len + 4))
    losses = np.empty(N)
    run_over_batch(forward_scan, batch, as_steps(logits), from_logits, alpha, save, losses)
    dtype = acc_dtype(logits.dtype)
    if reduction == "none":
        value = torch.from_numpy(losses).to(dtype, copy=True)
        if zero_infinity:
            value.masked_fill_(value == torch.inf, 0.0)
    else:
        value = torch.empty((), dtype=dtype, device="cpu")
        mean = reduction == "mean"
        reduce_losses(losses, batch.target_lengths, mean, zero_infinity, value.numpy().reshape(1))
    saved = torch.from_numpy(alpha if save else np.empty(0))
    return value, torch.from_numpy(losses), saved


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
    """Return the gradient of the logits or log-probabilities from the saved alpha."""
    if not logits.numel():  # the reference served the loss and saved nothing
        return torch.empty(logits.shape, dtype=logits.dtype)
    targets = (labels, offsets, input_lengths, target_lengths, max_target_len, blank)
    batch = as_batch(logits, *targets)
    result = empty_batch(logits.shape, torch.promote_types(logits.dtype, torch.float32))
    inputs = (
        as_array(grad.expand(len(losses))),
        reduction == "mean",
        as_steps(logits),
        from_logits,
    )
    states = (saved.numpy(), losses.contiguous().numpy())
    run_over_batch(backward_scan, batch, *inputs, *states, result.numpy())
    return result.to(logits.dtype)


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
    """Return the best alignment: class, position and log-probability of each step; their sum."""
    targets = (labels, offsets, input_lengths, target_lengths, max_target_len, blank)
    T, N, _ = logits.shape
    pointers = np.empty((N, T, max_target_len // 2 + 1), dtype=np.uint8)
    classes, tokens = np.empty((N, T), np.int64), np.empty((N, T), np.int64)
    scores, score = np.empty((N, T)), np.empty(N)
    results = (classes, tokens, scores, score)
    inputs = (as_steps(logits), from_logits, pointers)
    run_over_batch(viterbi_scan, as_batch(logits, *targets), *inputs, *results)
    labels_found, tokens_found, scores_found, score_found = map(torch.from_numpy, results)
    dtype = acc_dtype(logits.dtype)
    return labels_found, tokens_found, scores_found.to(dtype), score_found.to(dtype)
