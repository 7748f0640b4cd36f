"""The ops of transducers on the CPU: arrays for the Numba kernels, and their results.

The steps of a batch run in parallel where rows are read or written, and the sequences where the
lattices are scanned. The losses from encoder and predictor take their products from ATen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from ..common import posteriors_of_kinds
from ..joint import Joint, JointKernels, linear_transducer
from .batch import Arcs, Batch, arcs_of, as_batch
from .nodes import Upstream, add_durations, read_nodes, write_duration_gradient, write_gradient
from .scan import align_sequences, scan_sequences


def score_arcs(
    logits: Tensor,
    duration_logits: Tensor | None,
    batch: Batch,
    arcs: Arcs,
    fused: bool,
    hat: bool,
    sigma: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log-probabilities of the arcs, `[A, B, T, U1]`, and both log-sum-exps."""
    nodes = logits.shape[:3]
    scores = np.empty((len(arcs.steps), *nodes))
    lse = np.empty(nodes if fused else (0, 0, 0))
    duration_lse = np.empty((0, 0, 0) if duration_logits is None else nodes)
    inside = np.arange(batch.T) < batch.steps[:, None]
    work = np.where(inside, batch.labels[:, None] + 1, 0).reshape(-1)
    options = (batch, as_steps(logits), fused, hat, sigma, scores, lse)
    run_over_sequences(read_nodes, work, batch.V, *options)
    if duration_logits is not None:
        args = (batch, as_steps(duration_logits), arcs.steps, scores, duration_lse)
        run_over_sequences(add_durations, work, duration_logits.shape[3], *args)
    return torch.from_numpy(scores), torch.from_numpy(lse), torch.from_numpy(duration_lse)


def scan(
    scores: Tensor,
    batch: Batch,
    durations: Sequence[int],
    delay_penalty: float,
    need_posteriors: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the losses `[B]`, and the posteriors, `[2 + K, B, T, U1]` or empty, in the dtype."""
    arcs, losses = arcs_of(durations), np.empty(len(batch.steps))
    posteriors = np.empty(scores.shape if need_posteriors else (0, 0, 0, 0))
    work = len(arcs.steps) * (scores.shape[3] + 1) * 8  # a node takes longer than an edge
    args = (batch, arcs, scores.numpy(), delay_penalty, losses, posteriors)
    run_over_sequences(scan_sequences, batch.steps, work, *args)
    found = torch.from_numpy(losses).to(dtype)
    if not need_posteriors:
        return found, found.new_empty(0)
    return found, posteriors_of_kinds(torch.from_numpy(posteriors), len(durations)).to(dtype)


def rnnt_forward(
    logits: Tensor,
    duration_logits: Tensor | None,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    durations: Sequence[int],
    fused: bool,
    hat: bool,
    sigma: float,
    delay_penalty: float,
    need_posteriors: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses `[B]`, log-sum-exps `[B, T, U1]` and posteriors `[2 + K, B, T, U1]`."""
    batch = as_batch(logits.shape, targets, logit_lengths, target_lengths, blank)
    nodes = (logits, duration_logits, batch, arcs_of(durations))
    scores, *lses = score_arcs(*nodes, fused, hat, sigma)
    options = (durations, delay_penalty, need_posteriors, acc_dtype(logits.dtype))
    losses, posteriors = scan(scores, batch, *options)
    lse, duration_lse = (
        lse if need_posteriors and lse.numel() else scores.new_empty(0) for lse in lses
    )
    return losses, lse, duration_lse, posteriors


def _write_gradient(
    kernel: Callable[..., None],
    grad: Tensor,
    logits: Tensor,
    lse: Tensor,
    posteriors: Tensor,
    targets: Any,
    blank: int,
    result: Tensor,
    *options: Any,
) -> Tensor:
    """Run the kernel for all steps; the result may be the logits."""
    B, T, U1, V = logits.shape
    if logits.numel():
        arrays = (as_array(grad), posteriors.contiguous().numpy(), targets)
        norms = lse.contiguous().numpy() if lse.numel() else np.empty((0, 0, 0))
        inputs = (Upstream(*arrays, blank, V), as_steps(logits), norms, *options)
        run_over_sequences(kernel, np.full(B * T, U1), V, *inputs, as_steps(result))
    return result


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
    result = logits if inplace else empty_batch(logits.shape, logits.dtype)
    nodes = (grad, logits, lse, posteriors, as_integers(targets), blank, result)
    return _write_gradient(write_gradient, *nodes, fused, hat, clamp, 1.0 + fastemit_lambda)


def rnnt_gradient_(grad: Tensor, logits: Tensor, *rest: Any) -> None:
    """Write the gradient over the logits."""
    rnnt_gradient(grad, logits, *rest, inplace=True)


def rnnt_duration_gradient(
    grad: Tensor,
    duration_logits: Tensor,
    duration_lse: Tensor,
    posteriors: Tensor,
    *,
    inplace: bool = False,
) -> Tensor:
    """Return the gradient in the logits of durations, or with `inplace` write it over them."""
    shape, dtype = duration_logits.shape, duration_logits.dtype
    result = duration_logits if inplace else empty_batch(shape, dtype)
    nodes = (grad, duration_logits, duration_lse, posteriors, np.empty((0, 0), np.int64), 0)
    return _write_gradient(write_duration_gradient, *nodes, result)


def rnnt_align(
    logits: Tensor,
    duration_logits: Tensor | None,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    durations: Sequence[int],
    fused: bool,
    sigma: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the step that emits each label on the best path, its log-probability, and the sum."""
    batch = as_batch(logits.shape, targets, logit_lengths, target_lengths, blank)
    arcs, shape, dtype = arcs_of(durations), targets.shape, acc_dtype(logits.dtype)
    scores = score_arcs(logits, duration_logits, batch, arcs, fused, False, sigma)[0]
    results = np.empty(shape, np.int64), np.empty(shape), np.empty(shape[0])
    work = len(arcs.steps) * scores.shape[3] * 8
    args = (batch, arcs, scores.numpy(), *results)
    run_over_sequences(align_sequences, batch.steps, work, *args)
    steps, label_scores, score = map(torch.from_numpy, results)
    return steps, label_scores.to(dtype), score.to(dtype)


def linear_rnnt(
    encoder: Tensor,
    predictor: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    duration_weight: Tensor | None,
    duration_bias: Tensor | None,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    factor: Tensor | None,
    activation: str,
    blank: int,
    durations: Sequence[int],
    hat: bool,
    sigma: float,
    delay_penalty: float,
    fastemit_lambda: float,
    chunk: int,
    keep_logits: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Return the losses `[B]`, and the gradients of the sum of factor * loss."""
    shape = (*encoder.shape[:2], predictor.shape[1], len(weight))
    batch = as_batch(shape, targets, logit_lengths, target_lengths, blank)

    def read_chunk(
        logits: Sequence[Tensor], targets: Tensor, steps: Tensor, labels: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        part = as_batch(logits[0].shape, targets, steps, labels, blank)
        tokens, of_durations = logits[0], logits[1] if len(logits) > 1 else None
        nodes = (tokens, of_durations, part, arcs_of(durations))
        scores, *lses = score_arcs(*nodes, True, hat, sigma)
        return scores, lses[: len(logits)]

    def scan_arcs(scores: Tensor, need_posteriors: bool) -> tuple[Tensor, Tensor]:
        options = (durations, delay_penalty, need_posteriors, acc_dtype(encoder.dtype))
        return scan(scores, batch, *options)

    def write_chunk(
        factor: Tensor,
        logits: Sequence[Tensor],
        lses: Sequence[Tensor],
        posteriors: Tensor,
        targets: Tensor,
    ) -> None:
        nodes = (logits[0], lses[0], posteriors, targets, factor, factor)  # no lengths are read
        rnnt_gradient(factor, *nodes, blank, True, hat, 0.0, fastemit_lambda, inplace=True)
        for each, lse in zip(logits[1:], lses[1:], strict=True):
            rnnt_duration_gradient(factor, each, lse, posteriors, inplace=True)

    heads = [(weight, bias), (duration_weight, duration_bias)]
    lengths = map(torch.from_numpy, (batch.steps, batch.labels))
    joint = Joint(encoder, predictor, heads, activation, targets, *lengths)
    kernels = JointKernels(read_chunk, scan_arcs, write_chunk)
    losses, gradients = linear_transducer(kernels, joint, factor, chunk, keep_logits, wanted)
    return losses, *gradients
