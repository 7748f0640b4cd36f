"""CTC on the CPU, in Numba, with the sequences of a batch in parallel.

The forward scan computes alpha in fp64; the backward scan derives the posterior from it. The M
states are blank, label, blank, ..., blank. Two padding states that nothing enters precede them, so
that the loop of a step has no branches. Inside of the scans LOWEST stands for -inf, so that no
difference of two states is NaN. The best alignment is traced by two-bit pointers. A star in the
targets is one more class, C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...primitives.cpu.batch import (
    INF,
    LOWEST,
    as_array,
    as_integers,
    as_steps,
    contiguous_row,
    empty_batch,
    finish_row,
    row_to_write,
    run_over_sequences,
    start_of,
)
from ...primitives.cpu.half import number_at
from ...primitives.cpu.jit import jit
from ...primitives.cpu.logits import (
    HUGE,
    Logits,
    centered_row,
    fill_row,
    logsumexp_row,
    row_buffers,
)
from ...primitives.cpu.math import exp, exp_floor, log
from ...runtime.dtypes import acc_dtype
from .common import CTCInputs

IMPOSSIBLE = LOWEST / 2  # a smaller value is the sum of LOWEST and log-probabilities


class CTCBatch(NamedTuple):
    """The targets and the lengths of a batch as the user gave them; see `Lattice`.

    Fields:
        labels: all labels, `[num_labels]`.
        offsets: index of each sequence's first label, `[N]`.
        lengths: number of steps, `[N]`.
        target_lengths: number of labels, `[N]`.
        max_target_len: an upper bound of all target lengths.
        blank: the class of the blank.
        star: the label that stands for any class, or a class where there is none.
        priors: what is subtracted from the log-probability of each class, `[C]`; empty for nothing.
    """

    labels: Any
    offsets: Any
    lengths: Any
    target_lengths: Any
    max_target_len: int
    blank: int
    star: int
    priors: Any


class Lattice(NamedTuple):
    """The lattice of a sequence. The M states are blank, label, blank, ..., blank.

    Fields:
        length, target_len: the numbers of steps and labels.
        is_valid: whether lengths and labels are in range. Otherwise the lengths are 0, so that no
            index that is computed from them is out of bounds.
        classes: the class of each state, `[M]`.
        skips: the score of the edge that skips a blank into a state, `[M]`: 0 between two different
            labels and LOWEST otherwise.
        has_star: whether a label is the star.
    """

    length: int
    target_len: int
    is_valid: bool
    classes: Any
    skips: Any
    has_star: bool


def as_batch(x: CTCInputs) -> tuple[CTCBatch, Logits]:
    """Return the arguments of an op as arrays."""
    priors = np.empty(0)
    if x.label_priors is not None:
        priors = x.prior_scale * as_array(x.label_priors)
    T, _, C = x.logits.shape
    batch = CTCBatch(
        labels=as_integers(x.labels.reshape(-1)),
        offsets=as_integers(x.offsets),
        lengths=as_integers(x.input_lengths),
        target_lengths=as_integers(x.target_lengths),
        max_target_len=x.max_target_len,
        blank=x.blank,
        star=x.blank if x.star is None else x.star,
        priors=priors,
    )
    return batch, Logits(as_steps(x.logits), T, C, x.from_logits)


def run_over_lattices(
    kernel: Callable[..., Any], batch: CTCBatch, logits: Logits, *args: Any
) -> None:
    """Run `kernel(sequences, batch, logits, *args)` for all sequences."""
    work = 3 * (2 * batch.max_target_len + 1) + logits.C  # the edges and the classes of a step
    run_over_sequences(kernel, batch.lengths, work, batch, logits, *args)


@jit
def lattice_of(batch: Any, logits: Any, n: int) -> Lattice:
    """Return the lattice of a sequence."""
    length, target_len, first = batch.lengths[n], batch.target_lengths[n], batch.offsets[n]
    is_valid = 0 <= length <= logits.T and 0 <= target_len <= batch.max_target_len
    is_valid = is_valid and 0 <= first <= len(batch.labels) - target_len
    if is_valid:
        for i in range(first, first + target_len):
            label = batch.labels[i]
            is_valid = is_valid and (0 <= label < logits.C or label == batch.star)
    if not is_valid:
        length, target_len = 0, 0
    states, has_star = 2 * target_len + 1, False
    classes, skips = np.empty(states, np.int64), np.empty(states)
    for c in range(states):
        label = batch.labels[first + c // 2] if c % 2 else batch.blank
        classes[c] = min(label, logits.C)  # the one label beyond the classes is the star
        has_star = has_star or classes[c] == logits.C
        skips[c] = 0.0 if c > 1 and classes[c] != classes[c - 2] else LOWEST
    return Lattice(length, target_len, is_valid, classes, skips, has_star)


@jit
def fill_emitted(batch: Any, lattice: Any, row: Any, lse: float, emitted: Any) -> None:
    """Fill in the score of each state's class at a step; that of the star is 0."""
    classes, C = lattice.classes, len(row)
    if lattice.has_star:
        for c in range(len(classes)):
            emitted[c] = row[classes[c]] - lse if classes[c] < C else 0.0
    else:
        for c in range(len(classes)):
            emitted[c] = row[classes[c]] - lse
    if len(batch.priors):
        for c in range(len(classes)):
            emitted[c] -= batch.priors[classes[c]] if classes[c] < C else 0.0


@jit
def has_nan(alpha: Any) -> bool:
    """Return whether a state is NaN, which it is from the first step on at which its label is."""
    found = False
    for c in range(len(alpha)):
        found = found | (alpha[c] != alpha[c])
    return found


@jit
def alpha_step(skips: Any, before: Any, after: Any, emitted: Any) -> None:
    """Compute alpha after a step, `[2 + M]`, from alpha before it."""
    for c in range(len(skips)):
        a, b, d = before[c + 2], before[c + 1], before[c] + skips[c]
        highest = max(max(a, b), max(d, LOWEST))
        total = exp_floor(a - highest) + exp_floor(b - highest) + exp_floor(d - highest)
        value = highest + log(total) + emitted[c]
        after[c + 2] = LOWEST if value <= IMPOSSIBLE else value  # NaN passes through


@jit(nogil=True)
def forward_scan(share: Any, batch: Any, logits: Any, alpha: Any, save: bool, losses: Any) -> None:
    """Compute the losses, `[N]`; that of an invalid sequence is NaN.

    `alpha` is `[N, T + 1, 2 + M + 1]` and receives alpha before each step with the step's
    log-sum-exp in the last entry. Without `save` it is `[N, 2, 2 + M + 1]` and only alternates.
    """
    steps, emitted = logits.steps, np.empty(alpha.shape[2])
    buffers = row_buffers(steps, logits.C)
    for n in share:
        lattice = lattice_of(batch, logits, n)
        length, states = lattice.length, len(lattice.classes)
        fill_row(alpha[n, 0, : states + 2], LOWEST)
        alpha[n, 0, 2] = 0.0
        for t in range(length):
            row = contiguous_row(steps, t, n, buffers.row)
            lse = logsumexp_row(row, buffers) if logits.from_logits else 0.0
            before, after = (t, t + 1) if save else (t % 2, (t + 1) % 2)
            alpha[n, before, alpha.shape[2] - 1] = lse
            row, lse = centered_row(row, lse, buffers)
            alpha[n, after, 0], alpha[n, after, 1] = LOWEST, LOWEST
            fill_emitted(batch, lattice, row, lse, emitted)
            alpha_step(lattice.skips, alpha[n, before], alpha[n, after], emitted)
        last = alpha[n, length if save else length % 2]
        a, b = last[states + 1], last[states] if states > 1 else LOWEST
        highest = max(a, b)
        total = exp_floor(a - highest) + exp_floor(b - highest)
        losses[n] = INF if highest <= IMPOSSIBLE else -(highest + np.log(total))
        if not lattice.is_valid or has_nan(last[: states + 2]):
            losses[n] = np.nan


@jit
def reduce_losses(losses: Any, target_lengths: Any, mean: bool, zero_infinity: bool) -> float:
    """Return the sum of the losses, or the mean of loss / target length."""
    total = 0.0
    for n in range(len(losses)):
        loss = 0.0 if zero_infinity and losses[n] == INF else losses[n]
        total += loss / max(target_lengths[n], 1) if mean else loss
    return total / len(losses) if mean else total


@jit
def posterior_step(alpha: Any, skips: Any, posterior: Any, result: Any, parts: Any) -> None:
    """Compute the posterior of the states before a step, `[M]`, from the one after it.

    Each state's posterior is divided among the three edges into it in proportion to the terms that
    they contribute to its alpha.
    """
    states = len(skips)
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


@jit(nogil=True)
def backward_scan(
    share: Any,
    batch: Any,
    logits: Any,
    grad: Any,
    mean: bool,
    alpha: Any,
    losses: Any,
    result: Any,
) -> None:
    """Compute the gradient of the logits or log-probabilities, `[T, N, C]`.

    `grad` is the gradient of each loss, or with `mean` that of the mean of loss / target length.
    """
    steps, C = logits.steps, logits.C
    buffers = row_buffers(steps, C)
    d_buffer, posterior = np.empty(C, result.numbers.dtype), np.zeros(C + 1)
    for n in share:
        lattice = lattice_of(batch, logits, n)
        classes, states = lattice.classes, len(lattice.classes)
        after, before, parts = np.zeros(states), np.empty(states), np.empty((3, states))
        is_possible, has_failed = losses[n] < INF, losses[n] != losses[n]
        factor = grad[n] / len(grad) / max(lattice.target_len, 1) if mean else grad[n]
        for t in range(0 if has_failed else lattice.length, logits.T):
            d_row = row_to_write(result, t, n, d_buffer)
            fill_row(d_row, 0.0 if lattice.is_valid and t >= lattice.length else np.nan)
            finish_row(result, t, n, d_row)
        if has_failed:
            continue
        for c in range(max(states - 2, 0), states):
            after[c] = exp(alpha[n, lattice.length, c + 2] + losses[n]) if is_possible else 0.0
        for t in range(lattice.length - 1, -1, -1):
            total = 0.0
            for c in range(states):
                total += after[c]
            scale = 1.0 / total if total > 0.0 else 0.0
            for c in range(states):
                posterior[classes[c]] += after[c] * scale
            row, lse = contiguous_row(steps, t, n, buffers.row), alpha[n, t, -1]
            row, lse = centered_row(row, lse, buffers)
            d_row = row_to_write(result, t, n, d_buffer)
            if logits.from_logits and is_possible:
                share_of_classes = 1.0 - posterior[C]  # all but the star
                for c in range(C):
                    d_row[c] = factor * (exp(row[c] - lse) * share_of_classes - posterior[c])
            else:
                for c in range(C):
                    d_row[c] = factor * (0.0 - posterior[c])
            finish_row(result, t, n, d_row)
            for c in range(states):
                posterior[classes[c]] = 0.0
            posterior_step(alpha[n, t], lattice.skips, after, before, parts)
            after, before = before, after


def ctc_loss(
    x: CTCInputs, reduction: str, zero_infinity: bool, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the reduced loss, the losses `[N]` fp64, and alpha if `save`, else an empty tensor."""
    inputs = as_batch(x)
    T, N, _ = x.logits.shape
    # The system's fresh pages are zero, so entries that are never written cost nothing.
    alpha = np.zeros((N, T + 1 if save else 2, 2 * x.max_target_len + 4))
    losses = np.empty(N)
    run_over_lattices(forward_scan, *inputs, alpha, save, losses)
    dtype = acc_dtype(x.logits.dtype)
    if reduction == "none":
        value = torch.from_numpy(losses).to(dtype, copy=True)
        if zero_infinity:
            value.masked_fill_(value == torch.inf, 0.0)
    else:
        lengths, mean = inputs[0].target_lengths, reduction == "mean"
        value = torch.tensor(reduce_losses(losses, lengths, mean, zero_infinity), dtype=dtype)
    saved = torch.from_numpy(alpha if save else np.empty(0))
    return value, torch.from_numpy(losses), saved


def ctc_gradient(
    grad: Tensor, x: CTCInputs, losses: Tensor, saved: Tensor, reduction: str
) -> Tensor:
    """Return the gradient of the logits or log-probabilities from the saved alpha."""
    if not x.logits.numel():  # the reference served the loss and saved nothing
        return torch.empty(x.logits.shape, dtype=x.logits.dtype)
    inputs, result = as_batch(x), empty_batch(x.logits.shape, x.logits.dtype)
    grads = as_array(grad.expand(len(losses)))
    states = saved.numpy(), losses.contiguous().numpy()
    run_over_lattices(backward_scan, *inputs, grads, reduction == "mean", *states, as_steps(result))
    return result


@jit(nogil=True)
def viterbi_scan(
    share: Any,
    batch: Any,
    logits: Any,
    pointers: Any,
    labels: Any,
    tokens: Any,
    scores: Any,
    score: Any,
) -> None:
    """Find the best alignment of each sequence and trace it by pointers, `[N, T, M / 4]` bytes.

    Steps without a label get the label -1 and the score 0. A sequence that is invalid or has NaN
    gets the label -1 and the score NaN at all steps.
    """
    steps = logits.steps
    buffers = row_buffers(steps, logits.C)
    for n in share:
        lattice = lattice_of(batch, logits, n)
        classes, skips, states = lattice.classes, lattice.skips, len(lattice.classes)
        emitted, lse = np.empty(states), np.empty(lattice.length)
        before, after = np.full(states + 2, LOWEST), np.full(states + 2, LOWEST)
        before[2] = 0.0
        for t in range(lattice.length):
            row = contiguous_row(steps, t, n, buffers.row)
            lse[t] = logsumexp_row(row, buffers) if logits.from_logits else 0.0
            row, norm = centered_row(row, lse[t], buffers)
            fill_emitted(batch, lattice, row, norm, emitted)
            for c in range(states):
                # NaN counts as the greatest value, so that it reaches the result.
                best, edge = before[c + 2], 0
                if (before[c + 1] > best) | (before[c + 1] != before[c + 1]):
                    best, edge = before[c + 1], 1
                if (before[c] + skips[c] > best) | (before[c] + skips[c] != before[c] + skips[c]):
                    best, edge = before[c], 2
                value = best + emitted[c]
                after[c + 2] = LOWEST if value <= IMPOSSIBLE else value
                packed = pointers[n, t, c // 4] if c % 4 else 0
                pointers[n, t, c // 4] = packed | (edge << (2 * (c % 4)))
            before, after = after, before
        state = states - 2 if states > 1 and before[states] >= before[states + 1] else states - 1
        best = -INF if before[state + 2] <= IMPOSSIBLE else before[state + 2]
        score[n] = best if lattice.is_valid and not has_nan(before) else np.nan
        labels[n], tokens[n] = -1, -1
        scores[n] = 0.0 if score[n] == score[n] else np.nan
        for t in range(lattice.length - 1 if score[n] > -INF else -1, -1, -1):
            label = classes[state]
            labels[n, t] = label if label < logits.C else batch.star
            tokens[n, t] = state // 2 if state % 2 else -1
            if label < logits.C:
                at = start_of(steps, t, n) + label * steps.strides[2]
                value = number_at(steps, at) - lse[t]
                if HUGE <= abs(lse[t]) < INF:
                    row = contiguous_row(steps, t, n, buffers.row)
                    row, norm = centered_row(row, lse[t], buffers)
                    value = row[label] - norm
                scores[n, t] = value - (batch.priors[label] if len(batch.priors) else 0.0)
            state -= (pointers[n, t, state // 4] >> (2 * (state % 4))) & 3


def ctc_align(x: CTCInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the best alignment: label, position and score of each step, and the scores' sum."""
    T, N, _ = x.logits.shape
    pointers = np.empty((N, T, x.max_target_len // 2 + 1), np.uint8)
    results = np.empty((N, T), np.int64), np.empty((N, T), np.int64), np.empty((N, T)), np.empty(N)
    run_over_lattices(viterbi_scan, *as_batch(x), pointers, *results)
    best, tokens, scores, score = map(torch.from_numpy, results)
    dtype = acc_dtype(x.logits.dtype)
    return best, tokens, scores.to(dtype), score.to(dtype)
