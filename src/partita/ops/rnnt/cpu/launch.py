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
from ..common import token_and_duration_posteriors
from ..joint import Joint, JointKernels, Wanted, linear_transducer
from .batch import RNNT_ARCS, Arcs, Batch, as_batch, tdt_arcs
from .nodes import (
    Heads,
    Upstream,
    read_rnnt_nodes,
    read_tdt_nodes,
    write_rnnt_gradient,
    write_tdt_gradient,
)
from .scan import align_sequences, scan_sequences


def _read_nodes(kernel: Callable[..., None], batch: Batch, *args: Any) -> None:
    """Run `kernel(share, batch, *args)` for the steps of all sequences."""
    inside = np.arange(batch.T) < batch.steps[:, None]
    nodes_of_steps = np.where(inside, batch.labels[:, None] + 1, 0).reshape(-1)
    run_over_sequences(kernel, nodes_of_steps, batch.V, batch, *args)


def read_rnnt(
    logits: Tensor, batch: Batch, fused: bool, hat: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the log-probabilities of the arcs, `[2, B, T, U1]`, and the log-sum-exps."""
    scores = np.empty((2, *logits.shape[:3]))
    lse = np.empty(logits.shape[:3] if fused else (0, 0, 0))
    _read_nodes(read_rnnt_nodes, batch, as_steps(logits), fused, hat, scores, lse)
    return torch.from_numpy(scores), (torch.from_numpy(lse),)


def read_tdt(
    logits: Sequence[Tensor], batch: Batch, arcs: Arcs, sigma: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the log-probabilities of the arcs, `[2 K, B, T, U1]`, and both log-sum-exps."""
    shape, heads = logits[0].shape[:3], Heads(*map(as_steps, logits))
    scores, lses = np.empty((len(arcs.steps), *shape)), Heads(np.empty(shape), np.empty(shape))
    _read_nodes(read_tdt_nodes, batch, heads, sigma, arcs.steps, scores, lses)
    return torch.from_numpy(scores), tuple(map(torch.from_numpy, lses))


def scan(
    scores: Tensor,
    batch: Batch,
    arcs: Arcs,
    delay_penalty: float,
    need_posteriors: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the losses `[B]` in the dtype, and the posteriors, `[A, B, T, U1]` fp64 or empty."""
    losses = np.empty(len(batch.steps))
    posteriors = np.empty(scores.shape if need_posteriors else (0, 0, 0, 0))
    work = len(arcs.steps) * (scores.shape[3] + 1) * 8  # a node takes longer than an edge
    args = (batch, arcs, scores.numpy(), delay_penalty, losses, posteriors)
    run_over_sequences(scan_sequences, batch.steps, work, *args)
    return torch.from_numpy(losses).to(dtype), torch.from_numpy(posteriors)


def _write_gradient(
    kernel: Callable[..., None],
    grad: Tensor,
    posteriors: Tensor,
    targets: Tensor,
    blank: int,
    V: int,
    *args: Any,
) -> None:
    """Run `kernel(share, upstream, *args)` for all steps."""
    B, T, U1 = posteriors.shape[1:]
    arrays = as_array(grad), posteriors.contiguous().numpy(), as_integers(targets)
    run_over_sequences(kernel, np.full(B * T, U1), V, Upstream(*arrays, blank, V), *args)


def _align(scores: Tensor, batch: Batch, arcs: Arcs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return the step and the score of each label, and the score of each path."""
    shape = batch.targets.shape
    results = np.empty(shape, np.int64), np.empty(shape), np.empty(shape[0])
    work = len(arcs.steps) * scores.shape[3] * 8
    args = (batch, arcs, scores.numpy(), *results)
    run_over_sequences(align_sequences, batch.steps, work, *args)
    steps, label_scores, score = map(torch.from_numpy, results)
    return steps, label_scores.to(dtype), score.to(dtype)


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
    batch, dtype = (
        as_batch(logits.shape, targets, logit_lengths, target_lengths, blank),
        acc_dtype(logits.dtype),
    )
    scores, (lse,) = read_rnnt(logits, batch, fused, hat)
    losses, posteriors = scan(scores, batch, RNNT_ARCS, delay_penalty, need_posteriors, dtype)
    if not need_posteriors or not fused:
        lse = lse.new_empty(0)
    return losses, lse, posteriors.to(dtype) if need_posteriors else losses.new_empty(0)


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
    if not logits.numel():
        return logits if inplace else torch.empty(logits.shape, dtype=logits.dtype)
    result = logits if inplace else empty_batch(logits.shape, logits.dtype)
    norms = lse.contiguous().numpy() if fused else np.empty((0, 0, 0))
    args = (as_steps(logits), norms, fused, hat, clamp, 1.0 + fastemit_lambda, as_steps(result))
    upstream = (grad, posteriors, targets, blank, logits.shape[3])
    _write_gradient(write_rnnt_gradient, *upstream, *args)
    return result


def rnnt_gradient_(grad: Tensor, logits: Tensor, *rest: Any) -> None:
    """Write the gradient over the logits."""
    rnnt_gradient(grad, logits, *rest, inplace=True)


def rnnt_align(
    logits: Tensor,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    fused: bool,
) -> tuple[Tensor, ...]:
    """Return the step that emits each label on the best path, its log-probability, and the sum."""
    batch = as_batch(logits.shape, targets, logit_lengths, target_lengths, blank)
    scores, _ = read_rnnt(logits, batch, fused, False)
    return _align(scores, batch, RNNT_ARCS, acc_dtype(logits.dtype))


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
    batch, dtype = (
        as_batch(token_logits.shape, targets, logit_lengths, target_lengths, blank),
        acc_dtype(token_logits.dtype),
    )
    arcs = tdt_arcs(durations)
    scores, (token_lse, duration_lse) = read_tdt(
        (token_logits, duration_logits), batch, arcs, sigma
    )
    losses, of_arcs = scan(scores, batch, arcs, 0.0, need_posteriors, dtype)
    if not need_posteriors:
        nothing = scores.new_empty(0)
        return losses, nothing, nothing.clone(), losses.new_empty(0)
    posteriors = token_and_duration_posteriors(of_arcs, len(durations)).to(dtype)
    return losses, token_lse, duration_lse, posteriors


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
    logits = (token_logits, duration_logits)
    results = [empty_batch(x.shape, x.dtype) for x in logits]
    if token_logits.numel():
        lses = (token_lse, duration_lse)
        write_tdt(grad, logits, lses, posteriors, targets, blank, results)
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
    heads, norms = Heads(*map(as_steps, logits)), Heads(*(x.contiguous().numpy() for x in lses))
    upstream = (grad, posteriors, targets, blank, logits[0].shape[3])
    _write_gradient(write_tdt_gradient, *upstream, heads, norms, Heads(*map(as_steps, results)))


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
    batch, arcs = (
        as_batch(token_logits.shape, targets, logit_lengths, target_lengths, blank),
        tdt_arcs(durations),
    )
    scores, _ = read_tdt((token_logits, duration_logits), batch, arcs, sigma)
    return _align(scores, batch, arcs, acc_dtype(token_logits.dtype))


def linear_rnnt(
    encoder: Tensor,
    predictor: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    factor: Tensor | None,
    activation: str,
    blank: int,
    hat: bool,
    delay_penalty: float,
    fastemit_lambda: float,
    chunk: int,
    keep_logits: bool,
    encoder_grad: bool,
    predictor_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    """Return the losses `[B]`, and the gradients of the sum of factor * loss."""
    shape = (*encoder.shape[:2], predictor.shape[1], len(weight))
    batch = as_batch(shape, targets, logit_lengths, target_lengths, blank)
    dtype = acc_dtype(encoder.dtype)

    def read_nodes(
        logits: Sequence[Tensor], targets: Tensor, steps: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        part = as_batch(logits[0].shape, targets, steps, labels, blank)
        return read_rnnt(logits[0], part, True, hat)

    def scan_arcs(scores: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
        losses, posteriors = scan(scores, batch, RNNT_ARCS, delay_penalty, wanted, dtype)
        return losses, posteriors.to(dtype)

    def write_gradient(
        factor: Tensor,
        logits: Sequence[Tensor],
        lses: Sequence[Tensor],
        posteriors: Tensor,
        targets: Tensor,
    ) -> None:
        nodes = (logits[0], lses[0], posteriors, targets, factor, factor)  # no lengths are read
        rnnt_gradient(factor, *nodes, blank, True, hat, 0.0, fastemit_lambda, inplace=True)

    joint = Joint(
        encoder,
        predictor,
        [(weight, bias)],
        activation,
        targets,
        *map(torch.from_numpy, (batch.steps, batch.labels)),
    )
    wanted = Wanted(encoder_grad, predictor_grad, [weight_grad], [bias_grad])
    kernels = JointKernels(read_nodes, scan_arcs, write_gradient)
    losses, gradients = linear_transducer(kernels, joint, factor, chunk, keep_logits, wanted)
    return losses, *gradients


def linear_tdt(
    encoder: Tensor,
    predictor: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    duration_weight: Tensor,
    duration_bias: Tensor | None,
    targets: Tensor,
    logit_lengths: Tensor,
    target_lengths: Tensor,
    factor: Tensor | None,
    activation: str,
    blank: int,
    durations: Sequence[int],
    sigma: float,
    chunk: int,
    keep_logits: bool,
    encoder_grad: bool,
    predictor_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
    duration_weight_grad: bool,
    duration_bias_grad: bool,
) -> tuple[Tensor, ...]:
    """Return the losses `[B]`, and the gradients of the sum of factor * loss."""
    shape = (*encoder.shape[:2], predictor.shape[1], len(weight))
    batch = as_batch(shape, targets, logit_lengths, target_lengths, blank)
    dtype = acc_dtype(encoder.dtype)
    arcs = tdt_arcs(durations)

    def read_nodes(
        logits: Sequence[Tensor], targets: Tensor, steps: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        part = as_batch(logits[0].shape, targets, steps, labels, blank)
        return read_tdt(logits, part, arcs, sigma)

    def scan_arcs(scores: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
        losses, posteriors = scan(scores, batch, arcs, 0.0, wanted, dtype)
        posteriors = posteriors.to(dtype)
        if wanted:
            posteriors = token_and_duration_posteriors(posteriors, len(durations))
        return losses, posteriors

    def write_gradient(
        factor: Tensor,
        logits: Sequence[Tensor],
        lses: Sequence[Tensor],
        posteriors: Tensor,
        targets: Tensor,
    ) -> None:
        write_tdt(factor, logits, lses, posteriors, targets, blank, logits)

    heads = [(weight, bias), (duration_weight, duration_bias)]
    joint = Joint(
        encoder,
        predictor,
        heads,
        activation,
        targets,
        *map(torch.from_numpy, (batch.steps, batch.labels)),
    )
    weights, biases = [weight_grad, duration_weight_grad], [bias_grad, duration_bias_grad]
    wanted = Wanted(encoder_grad, predictor_grad, weights, biases)
    kernels = JointKernels(read_nodes, scan_arcs, write_gradient)
    losses, gradients = linear_transducer(kernels, joint, factor, chunk, keep_logits, wanted)
    return losses, *gradients
