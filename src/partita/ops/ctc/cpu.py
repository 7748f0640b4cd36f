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
from numba import njit
from torch import Tensor

from ...primitives.cpu.batch import (
    INF,
    LOWEST,
    as_steps,
    empty_batch,
    fill_nan,
    row_at,
    run_over_batch,
)
from ...primitives.cpu.math import FLAGS, exp, exp_floor, log
from ...runtime.dtypes import acc_dtype
from .common import gradient_per_sequence, reduce_losses

IMPOSSIBLE = LOWEST / 2  # a smaller value is the sum of LOWEST and log-probabilities
LANES = 64  # partial sums of a log-sum-exp


class CTCBatch(NamedTuple):
    """The targets of a batch. No index that is computed from them is out of bounds.

    Fields:
        labels: all labels, `[num_labels]`.
        offsets: index of each sequence's first label, `[N]`.
        target_lengths: number of labels, `[N]`; 0 for an invalid sequence.
        lengths: number of steps, `[N]`; 0 for an invalid sequence.
        blank: the class of the blank.
        max_target_len: an upper bound of all target lengths.
    """

    labels: Any
    offsets: Any
    target_lengths: Any
    lengths: Any
    blank: int
    max_target_len: int

    @property
    def sources(self) -> range:
        """The edges of a step. Their number measures the work of a step."""
        return range(3 * (2 * self.max_target_len + 1))


@njit(**FLAGS)
def fill_states(batch: Any, n: int, labels: Any, skips: Any) -> int:
    """Fill in the class of each state and the score of the edge that skips a blank into it.

    That score is 0 between two different labels and LOWEST otherwise. Return the number of states.
    """
    states = 2 * batch.target_lengths[n] + 1
    for c in range(states):
        labels[c] = batch.labels[batch.offsets[n] + c // 2] if c % 2 else batch.blank
        skips[c] = 0.0 if c > 1 and labels[c] != labels[c - 2] else LOWEST
    return states


@njit(**FLAGS)
def init_alpha(alpha: Any, states: int) -> None:
    """Set alpha before the first step: only the first blank, from which the first label follows."""
    for c in range(states + 2):
        alpha[c] = LOWEST
    alpha[2] = 0.0


@njit(**FLAGS)
def contiguous_row(scores: Any, t: int, n: int, buffer: Any) -> Any:
    """Return the scores of a step, `[C]`, contiguous: a view, or a copy in the buffer."""
    row, stride = row_at(scores, t, n), scores.strides[2]
    if stride == 1:
        return row[: len(buffer)]
    for c in range(len(buffer)):
        buffer[c] = row[c * stride]
    return buffer


@njit(**FLAGS)
def logsumexp_row(row: Any, maxima: Any, sums: Any) -> float:
    """Return the log-sum-exp of a step's classes, by way of partial results `[LANES]`.

    A single running sum would not become vector code. Neither would two rows of one array, which
    might overlap, so maxima and sums are two arrays.
    """
    whole = len(row) - len(row) % LANES
    highest, total = LOWEST, 0.0
    for c in range(whole, len(row)):
        highest = row[c] if row[c] > highest else highest
    if whole:
        for i in range(LANES):
            maxima[i], sums[i] = highest, 0.0
        for c in range(0, whole, LANES):
            part = row[c : c + LANES]
            for i in range(LANES):
                maxima[i] = part[i] if part[i] > maxima[i] else maxima[i]
        for i in range(LANES):
            highest = maxima[i] if maxima[i] > highest else highest
        for c in range(0, whole, LANES):
            part = row[c : c + LANES]
            for i in range(LANES):
                sums[i] += exp_floor(part[i] - highest)
        for i in range(LANES):
            total += sums[i]
    for c in range(whole, len(row)):
        total += exp_floor(row[c] - highest)
    # A row of nothing but -inf gives NaN, as a log-softmax does.
    return highest + np.log(total) if highest > LOWEST else np.nan


@njit(**FLAGS)
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


@njit(nogil=True, **FLAGS)
def forward_scan(
    share: Any,
    batch: Any,
    scores: Any,
    classes: int,
    from_logits: bool,
    alpha: Any,
    save: bool,
    losses: Any,
) -> None:
    """Compute the losses, `[N]`.

    `alpha` is `[N, T + 1, 2 + M + 1]` and receives alpha before each step with the step's
    log-sum-exp in the last entry. Without `save` it is `[N, 2, 2 + M + 1]` and only alternates.
    """
    max_states, buffer = 2 * batch.max_target_len + 1, np.empty(classes, scores.numbers.dtype)
    maxima, sums = np.empty(LANES), np.empty(LANES)
    for n in share:
        labels, skips = np.empty(max_states, np.int64), np.empty(max_states)
        emitted = np.empty(max_states)
        states = fill_states(batch, n, labels, skips)
        init_alpha(alpha[n, 0], states)
        for t in range(batch.lengths[n]):
            row = contiguous_row(scores, t, n, buffer)
            before, after = (t, t + 1) if save else (t % 2, (t + 1) % 2)
            lse = logsumexp_row(row, maxima, sums) if from_logits else 0.0
            alpha[n, before, max_states + 2] = lse
            alpha[n, after, 0], alpha[n, after, 1] = LOWEST, LOWEST
            alpha_step(row, lse, labels, skips, alpha[n, before], alpha[n, after], states, emitted)
        last = alpha[n, batch.lengths[n] if save else batch.lengths[n] % 2]
        a, b = last[states + 1], last[states] if states > 1 else LOWEST
        highest = max(a, b)
        total = exp_floor(a - highest) + exp_floor(b - highest)
        losses[n] = INF if highest <= IMPOSSIBLE else -(highest + np.log(total))


@njit(**FLAGS)
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


@njit(**FLAGS)
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


@njit(nogil=True, **FLAGS)
def backward_scan(
    share: Any,
    batch: Any,
    grad: Any,
    scores: Any,
    classes: int,
    from_logits: bool,
    alpha: Any,
    losses: Any,
    result: Any,
) -> None:
    """Compute the gradient of the logits or log-probabilities, `[T, N, C]`."""
    max_states, buffer = 2 * batch.max_target_len + 1, np.empty(classes, scores.numbers.dtype)
    for n in share:
        labels, skips = np.empty(max_states, np.int64), np.empty(max_states)
        after, before, parts = np.empty(max_states), np.empty(max_states), np.empty((3, max_states))
        posterior = np.zeros(classes)
        states = fill_states(batch, n, labels, skips)
        possible = losses[n] < INF
        for c in range(states):
            after[c] = 0.0
        last = alpha[n, batch.lengths[n]]
        for c in range(max(states - 2, 0), states):
            after[c] = exp(last[c + 2] + losses[n]) if possible else 0.0
        for t in range(batch.lengths[n] - 1, -1, -1):
            total = 0.0
            for c in range(states):
                total += after[c]
            scale = 1.0 / total if total > 0.0 else 0.0
            for c in range(states):
                posterior[labels[c]] += after[c] * scale
            row, lse = contiguous_row(scores, t, n, buffer), alpha[n, t, max_states + 2]
            gradient_row(row, lse, grad[n], from_logits and possible, posterior, result[t, n])
            for c in range(states):
                posterior[labels[c]] = 0.0
            posterior_step(alpha[n, t], skips, after, before, parts, states)
            after, before = before, after
        for t in range(batch.lengths[n], len(result)):
            for c in range(classes):
                result[t, n, c] = 0.0


@njit(nogil=True, **FLAGS)
def viterbi_scan(
    share: Any,
    batch: Any,
    scores: Any,
    classes: int,
    from_logits: bool,
    pointers: Any,
    labels_out: Any,
    tokens: Any,
    scores_out: Any,
    score: Any,
) -> None:
    """Find the best alignment of each sequence and trace it by pointers, `[N, T, M / 4]` bytes."""
    max_states, buffer = 2 * batch.max_target_len + 1, np.empty(classes, scores.numbers.dtype)
    maxima, sums = np.empty(LANES), np.empty(LANES)
    for n in share:
        labels, skips = np.empty(max_states, np.int64), np.empty(max_states)
        lse = np.zeros(max(batch.lengths[n], 1))
        states = fill_states(batch, n, labels, skips)
        before, after = np.empty(max_states + 2), np.full(max_states + 2, LOWEST)
        init_alpha(before, states)
        for t in range(batch.lengths[n]):
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
        for t in range(batch.lengths[n] - 1 if score[n] > -INF else -1, -1, -1):
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
) -> tuple[CTCBatch, Tensor]:
    """Return the batch and the mask of invalid sequences, `[N]`.

    A sequence is invalid if one of its labels or lengths is out of range.
    """
    T, _, C = logits.shape
    num_labels, ends = len(labels), offsets + target_lengths
    invalid = (input_lengths < 0) | (input_lengths > T)
    invalid = invalid | (target_lengths < 0) | (target_lengths > max_target_len)
    bad_labels = ((labels < 0) | (labels >= C)).long().cumsum(0)
    bad_labels = torch.nn.functional.pad(bad_labels, (1, 0))
    first, last = (bad_labels[index.clamp(0, num_labels)] for index in (offsets, ends))
    invalid = invalid | (offsets < 0) | (ends > num_labels) | (last > first)
    lengths = input_lengths.long().masked_fill(invalid, 0).numpy()
    targets = target_lengths.long().masked_fill(invalid, 0).numpy()
    labels, offsets = labels.long().contiguous(), offsets.long()
    batch = CTCBatch(labels.numpy(), offsets.numpy(), targets, lengths, blank, max_target_len)
    return batch, invalid


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
    batch, invalid = as_batch(logits, *targets)
    T, N, C = logits.shape
    # The system's fresh pages are zero, so entries that are never written cost nothing.
    alpha = torch.from_numpy(np.zeros((N, T + 1 if save else 2, 2 * max_target_len + 4)))
    losses = torch.empty(N, dtype=torch.float64, device="cpu")
    inputs = (as_steps(logits), C, from_logits)
    run_over_batch(forward_scan, batch, *inputs, alpha.numpy(), save, losses.numpy())
    losses.masked_fill_(invalid, torch.nan)
    value = reduce_losses(losses, target_lengths, reduction, zero_infinity)
    value = value.to(acc_dtype(logits.dtype), copy=True)
    return value, losses, alpha if save else alpha.new_empty(0)


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
    batch, invalid = as_batch(logits, *targets)
    result = empty_batch(logits.shape, torch.promote_types(logits.dtype, torch.float32))
    grad = gradient_per_sequence(grad, target_lengths, reduction).contiguous()
    inputs = (grad.numpy(), as_steps(logits), logits.shape[2], from_logits)
    states = (saved.numpy(), losses.contiguous().numpy())
    run_over_batch(backward_scan, batch, *inputs, *states, result.numpy())
    fill_nan(result, invalid | losses.isnan())
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
    batch, invalid = as_batch(logits, *targets)
    T, N, C = logits.shape
    pointers = torch.empty((N, T, max_target_len // 2 + 1), dtype=torch.uint8, device="cpu")
    classes, tokens = torch.full((2, N, T), -1, device="cpu")
    scores = torch.zeros((N, T), dtype=torch.float64, device="cpu")
    score = torch.empty(N, dtype=torch.float64, device="cpu")
    results = [t.numpy() for t in (classes, tokens, scores, score)]
    inputs = (as_steps(logits), C, from_logits, pointers.numpy())
    run_over_batch(viterbi_scan, batch, *inputs, *results)
    classes = classes.masked_fill(invalid[:, None], -1)
    tokens = tokens.masked_fill(invalid[:, None], -1)
    scores.masked_fill_(invalid[:, None], torch.nan)
    return classes, tokens, scores, score.masked_fill_(invalid, torch.nan)
