"""CTC on the CPU: α forwards in fp64, the posterior backwards from it, and the best alignment by pointers of two bits; sequences in parallel.

States are a blank, a label, a blank, ..., a blank, and two more in front that nothing enters, so that each step is a loop without branches.
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

IMPOSSIBLE = LOWEST / 2  # what lies below has come from -inf
LANES = 64  # of a long sum


class Lattices(NamedTuple):
    """The targets of a batch; nothing in it can index out of bounds.

    Fields:
        labels: one after another.
        offsets, targets, lengths: where each sequence's begin, their number, and that of the steps; 0 and 0 for one that has no right answer.
        blank: the class of the blank.
        most: no target is longer.
    """

    labels: Any
    offsets: Any
    targets: Any
    lengths: Any
    blank: int
    most: int

    @property
    def sources(self) -> range:
        """The edges of a step, by which the work is shared."""
        return range(3 * (2 * self.most + 1))


@njit(**FLAGS)
def states_of(batch: Any, n: int, labels: Any, skips: Any) -> int:
    """The number of states; the class of each, and 0 where the label before the blank before it may be left out, otherwise -inf's stand-in."""
    count = 2 * batch.targets[n] + 1
    for c in range(count):
        labels[c] = batch.labels[batch.offsets[n] + c // 2] if c % 2 else batch.blank
        skips[c] = 0.0 if c > 1 and labels[c] != labels[c - 2] else LOWEST
    return count


@njit(**FLAGS)
def start(alpha: Any, count: int) -> None:
    """Before the first step only the first blank, from which the first label may be entered."""
    for c in range(count + 2):
        alpha[c] = LOWEST
    alpha[2] = 0.0


@njit(**FLAGS)
def classes_of(scores: Any, t: int, n: int, buffer: Any) -> Any:
    """The numbers of a step, `[C]`, side by side: where they lie, or copied to the buffer."""
    row, stride = row_at(scores, t, n), scores.strides[2]
    if stride == 1:
        return row[: len(buffer)]
    for c in range(len(buffer)):
        buffer[c] = row[c * stride]
    return buffer


@njit(**FLAGS)
def normaliser(row: Any, high: Any, sums: Any) -> float:
    """log Σ exp of the classes of a step, of which each lane, `[LANES]` both, takes every so many: one sum would not become vector code,
    and neither would two rows of one array, which might overlap."""
    whole = len(row) - len(row) % LANES
    highest, total = LOWEST, 0.0
    for c in range(whole, len(row)):
        highest = row[c] if row[c] > highest else highest
    if whole:
        for i in range(LANES):
            high[i], sums[i] = highest, 0.0
        for c in range(0, whole, LANES):
            part = row[c : c + LANES]
            for i in range(LANES):
                high[i] = part[i] if part[i] > high[i] else high[i]
        for i in range(LANES):
            highest = high[i] if high[i] > highest else highest
        for c in range(0, whole, LANES):
            part = row[c : c + LANES]
            for i in range(LANES):
                sums[i] += exp_floor(part[i] - highest)
        for i in range(LANES):
            total += sums[i]
    for c in range(whole, len(row)):
        total += exp_floor(row[c] - highest)
    return (
        highest + np.log(total) if highest > LOWEST else np.nan
    )  # as a log-softmax of nothing but -inf


@njit(**FLAGS)
def enter(
    row: Any,
    norm: float,
    labels: Any,
    skips: Any,
    before: Any,
    after: Any,
    count: int,
    emitted: Any,
) -> None:
    """α after a step, `[2 + S]`, from that before it."""
    for c in range(count):
        emitted[c] = row[labels[c]] - norm
    for c in range(count):
        a, b, d = before[c + 2], before[c + 1], before[c] + skips[c]
        most = max(max(a, b), max(d, LOWEST))
        total = exp_floor(a - most) + exp_floor(b - most) + exp_floor(d - most)
        value = most + log(total) + emitted[c]
        after[c + 2] = LOWEST if value <= IMPOSSIBLE else value  # NaN stays


@njit(nogil=True, **FLAGS)
def forward(
    share: Any,
    batch: Any,
    scores: Any,
    classes: int,
    from_logits: bool,
    alpha: Any,
    keep: bool,
    losses: Any,
) -> None:
    """Losses, `[N]`; α before each step is kept in `[N, T + 1, 2 + S + 1]`, or for two steps, with log Σ exp of the step behind it."""
    width, buffer, high, sums = (
        2 * batch.most + 1,
        np.empty(classes, scores.numbers.dtype),
        np.empty(LANES),
        np.empty(LANES),
    )
    for n in share:
        labels, skips, emitted = np.empty(width, np.int64), np.empty(width), np.empty(width)
        count = states_of(batch, n, labels, skips)
        start(alpha[n, 0], count)
        for t in range(batch.lengths[n]):
            row = classes_of(scores, t, n, buffer)
            here, after = (t, t + 1) if keep else (t % 2, (t + 1) % 2)
            norm = normaliser(row, high, sums) if from_logits else 0.0
            alpha[n, here, width + 2] = norm
            alpha[n, after, 0], alpha[n, after, 1] = LOWEST, LOWEST
            enter(row, norm, labels, skips, alpha[n, here], alpha[n, after], count, emitted)
        last = alpha[n, batch.lengths[n] if keep else batch.lengths[n] % 2]
        a, b = last[count + 1], last[count] if count > 1 else LOWEST
        most = max(a, b)
        losses[n] = (
            INF
            if most <= IMPOSSIBLE
            else -(most + np.log(exp_floor(a - most) + exp_floor(b - most)))
        )


@njit(**FLAGS)
def leave(before: Any, skips: Any, here: Any, there: Any, parts: Any, count: int) -> None:
    """The posterior of the states before a step, `[S]`, from that behind it, by the share that each had in the sum that entered a state."""
    for c in range(count):
        a, b, d = before[c + 2], before[c + 1], before[c] + skips[c]
        most = max(max(a, b), max(d, LOWEST))
        x, y, z = exp(a - most), exp(b - most), exp(d - most)
        share = here[c] / (x + y + z)
        parts[0, c], parts[1, c], parts[2, c] = x * share, y * share, z * share
    for c in range(count):
        there[c] = parts[0, c]
    for c in range(count - 1):
        there[c] += parts[1, c + 1]
    for c in range(count - 2):
        there[c] += parts[2, c + 2]


@njit(**FLAGS)
def descend(row: Any, norm: float, grad: float, softmax: bool, posterior: Any, result: Any) -> None:
    """The gradient of the classes of a step, `[C]`."""
    if softmax:
        for c in range(len(row)):
            result[c] = grad * (exp(row[c] - norm) - posterior[c])
    else:
        for c in range(len(row)):
            result[c] = grad * (0.0 - posterior[c])


@njit(nogil=True, **FLAGS)
def backward(
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
    """The gradient of the logits, `[T, N, C]`."""
    width, buffer = 2 * batch.most + 1, np.empty(classes, scores.numbers.dtype)
    for n in share:
        labels, skips, parts = np.empty(width, np.int64), np.empty(width), np.empty((3, width))
        here, there, posterior = np.empty(width), np.empty(width), np.zeros(classes)
        count = states_of(batch, n, labels, skips)
        possible = losses[n] < INF
        for c in range(count):
            here[c] = 0.0
        last = alpha[n, batch.lengths[n]]
        for c in range(max(count - 2, 0), count):
            here[c] = exp(last[c + 2] + losses[n]) if possible else 0.0
        for t in range(batch.lengths[n] - 1, -1, -1):
            total = 0.0
            for c in range(count):
                total += here[c]
            scale = 1.0 / total if total > 0.0 else 0.0
            for c in range(count):
                posterior[labels[c]] += here[c] * scale
            row = classes_of(scores, t, n, buffer)
            descend(
                row,
                alpha[n, t, width + 2],
                grad[n],
                from_logits and possible,
                posterior,
                result[t, n],
            )
            for c in range(count):
                posterior[labels[c]] = 0.0
            leave(alpha[n, t], skips, here, there, parts, count)
            here, there = there, here
        for t in range(batch.lengths[n], len(result)):
            for c in range(classes):
                result[t, n, c] = 0.0


@njit(nogil=True, **FLAGS)
def best(
    share: Any,
    batch: Any,
    scores: Any,
    classes: int,
    from_logits: bool,
    pointers: Any,
    labels_of: Any,
    tokens: Any,
    found: Any,
    score: Any,
) -> None:
    """The best alignment of each sequence, followed back by pointers of two bits, `[N, T, S / 4]`."""
    width, buffer, high, sums = (
        2 * batch.most + 1,
        np.empty(classes, scores.numbers.dtype),
        np.empty(LANES),
        np.empty(LANES),
    )
    for n in share:
        labels, skips, norms = (
            np.empty(width, np.int64),
            np.empty(width),
            np.zeros(max(batch.lengths[n], 1)),
        )
        count = states_of(batch, n, labels, skips)
        before, after = np.empty(width + 2), np.full(width + 2, LOWEST)
        start(before, count)
        for t in range(batch.lengths[n]):
            row = classes_of(scores, t, n, buffer)
            norms[t] = normaliser(row, high, sums) if from_logits else 0.0
            for c in range(count):
                most, slot = before[c + 2], 0
                if (before[c + 1] > most) | (before[c + 1] != before[c + 1]):  # NaN is the greatest
                    most, slot = before[c + 1], 1
                if (before[c] + skips[c] > most) | (before[c] + skips[c] != before[c] + skips[c]):
                    most, slot = before[c], 2
                value = most + (row[labels[c]] - norms[t])
                after[c + 2] = LOWEST if value <= IMPOSSIBLE else value
                cell = pointers[n, t, c // 4] if c % 4 else 0
                pointers[n, t, c // 4] = cell | (slot << (2 * (c % 4)))
            before, after = after, before
        state = count - 2 if count > 1 and before[count] >= before[count + 1] else count - 1
        score[n] = -INF if before[state + 2] <= IMPOSSIBLE else before[state + 2]
        if (before[count] != before[count]) | (before[count + 1] != before[count + 1]):
            score[n] = np.nan
        for t in range(batch.lengths[n] - 1 if score[n] > -INF else -1, -1, -1):
            labels_of[n, t] = labels[state]
            tokens[n, t] = state // 2 if state % 2 else -1
            found[n, t] = row_at(scores, t, n)[labels[state] * scores.strides[2]] - norms[t]
            state -= (pointers[n, t, state // 4] >> (2 * (state % 4))) & 3


def lattices(
    logits: Tensor,
    labels: Tensor,
    offsets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    most: int,
    blank: int,
) -> tuple[Lattices, Tensor]:
    """And which sequences have no right answer: a label or a length is out of range."""
    span, _, classes = logits.shape
    wrong = (
        (input_lengths < 0)
        | (input_lengths > span)
        | (target_lengths < 0)
        | (target_lengths > most)
        | (offsets < 0)
    )
    bad = torch.nn.functional.pad(((labels < 0) | (labels >= classes)).long().cumsum(0), (1, 0))
    ends = (offsets + target_lengths).clamp(0, len(labels))
    wrong = (
        wrong
        | (offsets + target_lengths > len(labels))
        | (bad[ends] > bad[offsets.clamp(0, len(labels))])
    )
    lengths, targets = (
        t.long().masked_fill(wrong, 0).numpy() for t in (input_lengths, target_lengths)
    )
    return Lattices(
        labels.long().contiguous().numpy(), offsets.long().numpy(), targets, lengths, blank, most
    ), wrong


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
    batch, wrong = lattices(logits, labels, offsets, input_lengths, target_lengths, most, blank)
    span, count, classes = logits.shape
    alpha = torch.from_numpy(
        np.zeros((count, span + 1 if keep else 2, 2 * most + 4))
    )  # the system's pages are zero: what nobody writes costs nothing
    losses = torch.empty(count, dtype=torch.float64, device="cpu")
    run_over_batch(
        forward, batch, as_steps(logits), classes, from_logits, alpha.numpy(), keep, losses.numpy()
    )
    losses.masked_fill_(wrong, torch.nan)
    value = reduce_losses(losses, target_lengths, reduction, zero_infinity).to(
        acc_dtype(logits.dtype), copy=True
    )
    return value, losses, alpha if keep else alpha.new_empty(0)


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
    if not logits.numel():  # The reference served the loss and saved nothing.
        return torch.empty(logits.shape, dtype=logits.dtype, device="cpu")
    batch, wrong = lattices(logits, labels, offsets, input_lengths, target_lengths, most, blank)
    result = empty_batch(logits.shape, torch.promote_types(logits.dtype, torch.float32))
    numbers = (
        gradient_per_sequence(grad, target_lengths, reduction).contiguous().numpy(),
        as_steps(logits),
        logits.shape[2],
        from_logits,
    )
    run_over_batch(
        backward, batch, *numbers, kept.numpy(), losses.contiguous().numpy(), result.numpy()
    )
    fill_nan(result, wrong | losses.isnan())
    return result.to(logits.dtype)


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
    batch, wrong = lattices(logits, labels, offsets, input_lengths, target_lengths, most, blank)
    span, count, classes = logits.shape
    pointers = torch.empty((count, span, most // 2 + 1), dtype=torch.uint8, device="cpu")
    found, tokens = torch.full((2, count, span), -1, device="cpu")
    scores, score = (
        torch.zeros((count, span), dtype=torch.float64, device="cpu"),
        torch.empty(count, dtype=torch.float64, device="cpu"),
    )
    results = [t.numpy() for t in (found, tokens, scores, score)]
    run_over_batch(best, batch, as_steps(logits), classes, from_logits, pointers.numpy(), *results)
    found, tokens = found.masked_fill(wrong[:, None], -1), tokens.masked_fill(wrong[:, None], -1)
    return (
        found,
        tokens,
        scores.masked_fill_(wrong[:, None], torch.nan),
        score.masked_fill_(wrong, torch.nan),
    )
