"""The ops of transducers on the CPU: arrays for the Numba kernels, and their results.

The steps of a batch run in parallel where rows are read or written, and the sequences where the
lattices are scanned. The losses from encoder and predictor take their products from ATen.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import (
    as_array,
    as_integers,
    as_steps,
    empty_batch,
    run_over_sequences,
)
from ....runtime.dtypes import acc_dtype
from .. import joint
from ..common import (
    NodeInputs,
    NodeOptions,
    SequenceLengths,
    posteriors_of_kinds,
    valid_lengths,
)
from .nodes import Batch, Upstream, add_durations, read_nodes, write_gradient
from .scan import align_sequences, arcs_of, scan_sequences


def score_arcs(inputs: NodeInputs, options: NodeOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of the arcs, `[A, B, T, U1]`, and both log-sum-exps.

    The lengths are 0 for an invalid sequence.
    """
    logits, duration_logits, targets, steps, labels = inputs
    blank, durations, fused, hat, sigma, _ = options
    B, T, U1, V = logits.shape
    arrays = (as_integers(targets), as_integers(steps), as_integers(labels))
    batch, (steps_of, _) = Batch(*arrays, blank, T, V), arcs_of(durations)
    scores = np.empty((len(steps_of), B, T, U1))
    lse = np.empty((B, T, U1) if fused else (0, 0, 0))
    duration_lse = np.empty((0, 0, 0) if duration_logits is None else (B, T, U1))
    inside = np.arange(T) < batch.steps[:, None]
    work = np.where(inside, batch.labels[:, None] + 1, 0).reshape(-1)
    args = (batch, as_steps(logits), fused, hat, sigma, scores, lse)
    run_over_sequences(read_nodes, work, V, *args)
    if duration_logits is not None:
        of_durations = (batch, as_steps(duration_logits), steps_of, scores, duration_lse)
        run_over_sequences(add_durations, work, len(durations), *of_durations)
    # Log-sum-exps that are not there are `[0]`.
    found: Any = (torch.from_numpy(x if x.size else x.ravel()) for x in (scores, lse, duration_lse))
    return tuple(found)


def sum_paths(
    scores: Tensor,
    lengths: SequenceLengths,
    options: NodeOptions,
    need_posteriors: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the losses `[B]`, and the posteriors, `[2 + K, B, T, U1]` or empty, in the dtype."""
    arcs, arrays = arcs_of(options.durations), _arrays_of(lengths)
    losses = np.empty(scores.shape[1])
    posteriors = np.empty(scores.shape if need_posteriors else (0, 0, 0, 0))
    work = len(scores) * (scores.shape[3] + 1) * 8  # a node takes longer than an edge
    args = (arrays, arcs, scores.numpy(), options.delay_penalty, losses, posteriors)
    run_over_sequences(scan_sequences, arrays.steps, work, *args)
    found = torch.from_numpy(losses).to(dtype)
    if not need_posteriors:
        return found, found.new_empty(0)
    of_kinds = posteriors_of_kinds(torch.from_numpy(posteriors), len(options.durations))
    return found, of_kinds.to(dtype)


def _arrays_of(lengths: SequenceLengths) -> Any:
    steps, labels = map(as_integers, lengths[:2])
    return SequenceLengths(steps, labels, lengths.invalid.numpy())  # type: ignore[arg-type]


def _gradient(
    grad: Tensor,
    logits: Tensor,
    lse: Tensor,
    posteriors: Tensor,
    targets: Any,
    blank: int,
    inplace: bool,
    *options: Any,
) -> Tensor:
    """Return the gradient in the logits of tokens or durations, or with `inplace` over these."""
    B, T, U1, V = logits.shape
    result = logits if inplace else empty_batch(logits.shape, logits.dtype)
    if logits.numel():
        arrays = (as_array(grad), posteriors.contiguous().numpy(), targets)
        norms = lse.contiguous().numpy() if lse.numel() else np.empty((0, 0, 0))
        inputs = (Upstream(*arrays, blank, V), as_steps(logits), norms, *options)
        run_over_sequences(write_gradient, np.full(B * T, U1), V, *inputs, as_steps(result))
    return result


def rnnt_gradient(
    grad: Tensor,
    inputs: NodeInputs,
    lse: Tensor,
    duration_lse: Tensor,
    posteriors: Tensor,
    options: NodeOptions,
    clamp: float,
    fastemit_lambda: float,
    *,
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients in logits and durations, or with `inplace` write them over these."""
    logits, duration_logits, targets, _, _ = inputs
    blank, _, fused, hat, _, _ = options
    rest = (posteriors, as_integers(targets), blank, inplace)
    factors = (clamp, 1.0 + fastemit_lambda)
    result = _gradient(grad, logits, lse, *rest, fused, hat, *factors, False)
    if duration_logits is None:
        return result, result.new_empty(0)
    numbers = (True, False, 0.0, 1.0, True)
    return result, _gradient(grad, duration_logits, duration_lse, *rest, *numbers)


def rnnt_gradient_(*args: Any) -> None:
    """Write the gradient of RNN-T's losses over the logits."""
    rnnt_gradient(*args, inplace=True)


def rnnt_align(inputs: NodeInputs, options: NodeOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Return the step that emits each label on the best path, its log-probability, and the sum."""
    _, T, _, V = inputs.logits.shape
    lengths = valid_lengths(inputs, T, V, options.blank)
    nodes = inputs._replace(logit_lengths=lengths.steps, target_lengths=lengths.labels)
    scores = score_arcs(nodes, options)[0]
    arcs, arrays = arcs_of(options.durations), _arrays_of(lengths)
    shape, dtype = inputs.targets.shape, acc_dtype(inputs.logits.dtype)
    results = np.empty(shape, np.int64), np.empty(shape), np.empty(shape[0])
    work = len(scores) * scores.shape[3] * 8
    args = (arrays, arcs, scores.numpy(), *results)
    run_over_sequences(align_sequences, arrays.steps, work, *args)
    steps, label_scores, score = map(torch.from_numpy, results)
    return steps, label_scores.to(dtype), score.to(dtype)


KERNELS = joint.Kernels(score_arcs, sum_paths, functools.partial(rnnt_gradient, inplace=True))
rnnt_forward = functools.partial(joint.rnnt_forward, KERNELS)
linear_rnnt = functools.partial(joint.linear_rnnt, KERNELS)
