"""CTC's loss and gradient on the CPU, in Numba, with the sequences of a batch in parallel.

The forward scan computes alpha in fp64; the backward scan derives the posterior from it. The M
states are blank, label, blank, ..., blank. Two padding states that nothing enters precede them, so
that the loop of a step has no branches. Inside of the scans LOWEST stands for -inf, so that no
difference of two states is NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import (
    INF,
    LOWEST,
    as_array,
    as_steps,
    contiguous_row,
    empty_batch,
    finish_row,
    row_to_write,
)
from ....primitives.cpu.jit import jit
from ....primitives.cpu.logits import centered_row, logsumexp_row, row_buffers
from ....primitives.cpu.math import exp, exp_floor, log
from ....runtime.dtypes import acc_dtype
from ..common import ScoreOptions
from .batch import IMPOSSIBLE, as_batch, fill_emitted, has_nan, lattice_of, run_over_lattices


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
        alpha[n, 0, : states + 2] = LOWEST
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
            d_row[:] = 0.0 if lattice.is_valid and t >= lattice.length else np.nan
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
    """Return the reduced loss, the losses `[N]` fp64, and alpha if `save`, else an empty tensor."""
    targets = (labels, offsets, input_lengths, target_lengths, max_target_len, blank, from_logits)
    inputs = as_batch(logits, *targets, ScoreOptions(label_priors, prior_scale, star))
    T, N, _ = logits.shape
    # The system's fresh pages are zero, so entries that are never written cost nothing.
    alpha = np.zeros((N, T + 1 if save else 2, 2 * max_target_len + 4))
    losses = np.empty(N)
    run_over_lattices(forward_scan, *inputs, alpha, save, losses)
    dtype = acc_dtype(logits.dtype)
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
    """Return the gradient of the logits or log-probabilities from the saved alpha."""
    if not logits.numel():  # the reference served the loss and saved nothing
        return torch.empty(logits.shape, dtype=logits.dtype)
    targets = (labels, offsets, input_lengths, target_lengths, max_target_len, blank, from_logits)
    inputs = as_batch(logits, *targets, ScoreOptions(label_priors, prior_scale, star))
    result = empty_batch(logits.shape, logits.dtype)
    grads = as_array(grad.expand(len(losses)))
    states = saved.numpy(), losses.contiguous().numpy()
    run_over_lattices(backward_scan, *inputs, grads, reduction == "mean", *states, as_steps(result))
    return result
