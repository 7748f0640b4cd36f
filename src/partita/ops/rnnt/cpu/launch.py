"""The ops of transducers on the CPU: arrays for the Numba kernels, and their results.

The steps of a batch run in parallel where rows are read or written, and the sequences where the
lattices are scanned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import as_array, empty_batch, run_over_sequences
from ....runtime.dtypes import acc_dtype
from ....runtime.register import resolved
from ..common import token_and_duration_posteriors
from .batch import Batch, as_batch, as_rows, empty_nodes, nodes_of_steps
from .gradient import write_rnnt_gradient, write_tdt_gradient
from .nodes import read_rnnt_nodes, read_tdt_nodes
from .scan import align_sequences, scan_sequences


class Arcs(NamedTuple):
    """The kinds of arcs.

    Fields:
        steps: the steps by which each advances, `[A]`.
        labels: the labels by which each advances, `[A]`.
    """

    steps: Any
    labels: Any


RNNT_ARCS = Arcs(np.array([1, 0]), np.array([0, 1]))


def tdt_arcs(durations: Sequence[int]) -> Arcs:
    """Return the blanks and then the labels of all durations."""
    K = len(durations)
    return Arcs(np.array([*durations] * 2), np.array([0] * K + [1] * K))


def rnnt_arc_scores(logits: Tensor, batch: Batch, fused: bool, hat: bool) -> tuple[Any, Any]:
    """Return the log-probabilities of the arcs, `[2, B, T, U1]`, and the log-sum-exps."""
    arcs = empty_nodes(logits.shape, 2)
    lse = np.empty(logits.shape[:3] if fused else (0, 0, 0))
    args = (batch, as_rows(logits), fused, hat, arcs, lse)
    run_over_sequences(read_rnnt_nodes, nodes_of_steps(batch), logits.shape[3], *args)
    return arcs, lse


def tdt_arc_scores(
    token_logits: Tensor, duration_logits: Tensor, batch: Batch, arcs: Arcs, sigma: float
) -> tuple[Any, Any, Any]:
    """Return the log-probabilities of the arcs, `[2 K, B, T, U1]`, and both log-sum-exps."""
    scores = empty_nodes(token_logits.shape, len(arcs.steps))
    token_lse, duration_lse = (np.empty(token_logits.shape[:3]) for _ in range(2))
    rows = (as_rows(token_logits), as_rows(duration_logits))
    args = (batch, *rows, sigma, arcs.steps, scores, token_lse, duration_lse)
    run_over_sequences(read_tdt_nodes, nodes_of_steps(batch), token_logits.shape[3], *args)
    return scores, token_lse, duration_lse


def scan(
    scores: Any, batch: Batch, arcs: Arcs, delay_penalty: float, need_posteriors: bool
) -> tuple[Any, Any]:
    """Return the losses `[B]` and the posteriors, `[A, B, T, U1]` or empty."""
    losses = np.empty(len(batch.steps))
    posteriors = np.empty(scores.shape if need_posteriors else (0, 0, 0, 0))
    work = len(arcs.steps) * (scores.shape[3] + 1) * 8  # a node takes longer than an edge
    args = (batch, scores, *arcs, delay_penalty, losses, need_posteriors, posteriors)
    run_over_sequences(scan_sequences, batch.steps, work, *args)
    return losses, posteriors


def _tensor(array: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(array).to(dtype)


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
    """Return losses `[B]`, log-sum-exps `[B, T, U1]` and posteriors `[2, B, T, U1]`."""
    batch = as_batch(
        targets, logit_lengths, target_lengths, logits.shape[1], logits.shape[3], blank
    )
    scores, lse = rnnt_arc_scores(logits, batch, fused, hat)
    losses, posteriors = scan(scores, batch, RNNT_ARCS, delay_penalty, need_posteriors)
    dtype = acc_dtype(logits.dtype)
    if not need_posteriors:
        return (
            _tensor(losses, dtype),
            torch.empty(0, dtype=torch.float64),
            torch.empty(0, dtype=dtype),
        )
    lse = torch.from_numpy(lse if fused else np.empty(0))
    return _tensor(losses, dtype), lse, _tensor(posteriors, dtype)


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
    *,
    inplace: bool = False,
) -> Tensor:
    """Return the gradient in the logits, or with `inplace` write it over them."""
    T, U1, V = logits.shape[1:]
    if not logits.numel():
        return logits if inplace else torch.empty(logits.shape, dtype=logits.dtype)
    result = logits if inplace else empty_batch(logits.shape, logits.dtype)
    lse = lse if fused else lse.new_empty(0, 0, 0)
    nodes = (as_rows(logits), lse.contiguous().numpy(), posteriors.contiguous().numpy())
    options = (fused, hat, clamp, 1.0 + fastemit_lambda)
    labels = resolved(targets).long().contiguous().numpy()
    args = (labels, blank, T, as_array(grad), *nodes, *options, as_rows(result))
    steps = np.full(len(logits) * T, U1)
    run_over_sequences(write_rnnt_gradient, steps, V, *args)
    return result


def rnnt_gradient_(grad: Tensor, logits: Tensor, *rest: Any) -> None:
    """Write the gradient over the logits."""
    rnnt_gradient(grad, logits, *rest, inplace=True)


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
    """Return losses, both log-sum-exps and the posteriors, `[2 + K, B, T, U1]`."""
    T, V = token_logits.shape[1], token_logits.shape[3]
    batch = as_batch(targets, logit_lengths, target_lengths, T, V, blank)
    arcs, dtype = tdt_arcs(durations), acc_dtype(token_logits.dtype)
    scores, *lses = tdt_arc_scores(token_logits, duration_logits, batch, arcs, sigma)
    losses, of_arcs = scan(scores, batch, arcs, 0.0, need_posteriors)
    posteriors = torch.empty(0, dtype=dtype)
    if need_posteriors:
        found = token_and_duration_posteriors(torch.from_numpy(of_arcs), len(durations))
        posteriors = found.to(dtype)
    else:
        lses = [np.empty(0), np.empty(0)]
    token_lse, duration_lse = map(torch.from_numpy, lses)
    return _tensor(losses, dtype), token_lse, duration_lse, posteriors


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
    """Return the gradients in the logits of tokens and durations."""
    inputs = (token_logits, duration_logits)
    results = [empty_batch(x.shape, x.dtype) for x in inputs]
    if token_logits.numel():
        lses = (token_lse, duration_lse)
        write_tdt(grad, inputs, lses, posteriors, targets, blank, results)
    return results[0], results[1]


def write_tdt(
    grad: Tensor,
    logits: Sequence[Tensor],
    lses: Sequence[Tensor],
    posteriors: Tensor,
    targets: Tensor,
    blank: int,
    results: Sequence[Tensor],
) -> None:
    """Write the gradients in both kinds of logits, which the results may be."""
    T, U1, V = logits[0].shape[1:]
    labels = resolved(targets).long().contiguous().numpy()
    nodes = (*map(as_rows, logits), *(lse.contiguous().numpy() for lse in lses))
    args = (labels, blank, T, as_array(grad), *nodes, posteriors.contiguous().numpy())
    steps = np.full(len(logits[0]) * T, U1)
    run_over_sequences(write_tdt_gradient, steps, V, *args, *map(as_rows, results))


def _align(scores: Any, batch: Batch, arcs: Arcs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the step and the score of each label, and the score of each path."""
    shape = batch.targets.shape
    steps, label_scores, score = np.empty(shape, np.int64), np.empty(shape), np.empty(shape[0])
    args = (batch, scores, *arcs, steps, label_scores, score)
    work = len(arcs.steps) * scores.shape[3] * 8
    run_over_sequences(align_sequences, batch.steps, work, *args)
    return torch.from_numpy(steps), _tensor(label_scores, dtype), _tensor(score, dtype)


def rnnt_align(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    fused: bool,
) -> tuple[Tensor, ...]:
    """Return the step that emits each label on the best path, its log-probability, and the sum."""
    T, V = logits.shape[1], logits.shape[3]
    batch = as_batch(targets, logit_lengths, target_lengths, T, V, blank)
    scores, _ = rnnt_arc_scores(logits, batch, fused, False)
    return _align(scores, batch, RNNT_ARCS, acc_dtype(logits.dtype))


def tdt_align(
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    durations: Sequence[int],
    sigma: float,
) -> tuple[Tensor, ...]:
    """Return the step that emits each label on the best path, its log-probability, and the sum."""
    T, V = token_logits.shape[1], token_logits.shape[3]
    batch = as_batch(targets, logit_lengths, target_lengths, T, V, blank)
    arcs = tdt_arcs(durations)
    scores, _, _ = tdt_arc_scores(token_logits, duration_logits, batch, arcs, sigma)
    return _align(scores, batch, arcs, acc_dtype(token_logits.dtype))
