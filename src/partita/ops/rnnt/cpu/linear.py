"""Transducer losses from encoder and predictor on the CPU: ATen's products, and Numba's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ..common import token_and_duration_posteriors
from ..joint import Joint, JointKernels, Wanted, linear_transducer
from .batch import Batch, as_batch
from .launch import (
    RNNT_ARCS,
    Arcs,
    rnnt_arc_scores,
    rnnt_gradient,
    scan,
    tdt_arc_scores,
    tdt_arcs,
    write_tdt,
)


def _chunk_batch(targets: Tensor, steps: Tensor, labels: Tensor, T: int, blank: int) -> Batch:
    """Return the batch of a chunk, whose lengths are valid."""
    return Batch(
        targets=targets.long().contiguous().numpy(),
        steps=steps.contiguous().numpy(),
        labels=labels.contiguous().numpy(),
        invalid=np.zeros(len(steps), np.bool_),
        blank=blank,
        T=T,
    )


def _scanned(
    arcs: Tensor, batch: Batch, kinds: Arcs, delay_penalty: float, wanted: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return losses and posteriors as tensors."""
    losses, posteriors = scan(arcs.numpy(), batch, kinds, delay_penalty, wanted)
    dtype = acc_dtype(dtype)
    return torch.from_numpy(losses).to(dtype), torch.from_numpy(posteriors).to(dtype)


def rnnt_kernels(
    batch: Batch,
    blank: int,
    hat: bool,
    delay_penalty: float,
    fastemit_lambda: float,
    dtype: torch.dtype,
) -> JointKernels:
    """Return the functions of RNN-T."""

    def read_nodes(
        logits: Sequence[Tensor], targets: Tensor, steps: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        part = _chunk_batch(targets, steps, labels, logits[0].shape[1], blank)
        arcs, lse = rnnt_arc_scores(logits[0], part, True, hat)
        return torch.from_numpy(arcs), (torch.from_numpy(lse),)

    def scan_arcs(arcs: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
        return _scanned(arcs, batch, RNNT_ARCS, delay_penalty, wanted, dtype)

    def write_gradient(
        factor: Tensor,
        logits: Sequence[Tensor],
        lses: Sequence[Tensor],
        posteriors: Tensor,
        targets: Tensor,
    ) -> None:
        nodes = (logits[0], lses[0], posteriors, targets, factor, factor)  # no lengths are read
        rnnt_gradient(factor, *nodes, blank, True, hat, 0.0, fastemit_lambda, inplace=True)

    return JointKernels(read_nodes, scan_arcs, write_gradient)


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
    T, V = encoder.shape[1], len(weight)
    batch = as_batch(targets, logit_lengths, target_lengths, T, V, blank)
    joint = _joint(encoder, predictor, [(weight, bias)], activation, targets, batch)
    wanted = Wanted(encoder_grad, predictor_grad, [weight_grad], [bias_grad])
    options = (blank, hat, delay_penalty, fastemit_lambda, encoder.dtype)
    kernels = rnnt_kernels(batch, *options)
    losses, gradients = linear_transducer(kernels, joint, factor, chunk, keep_logits, wanted)
    return losses, *gradients


def _joint(
    encoder: Tensor,
    predictor: Tensor,
    heads: Any,
    activation: str,
    targets: Tensor,
    batch: Batch,
) -> Joint:
    lengths = (torch.from_numpy(batch.steps), torch.from_numpy(batch.labels))
    return Joint(encoder, predictor, heads, activation, targets, *lengths)


def tdt_kernels(
    batch: Batch, blank: int, durations: Sequence[int], sigma: float, dtype: torch.dtype
) -> JointKernels:
    """Return the functions of token-and-duration transducers."""
    kinds = tdt_arcs(durations)

    def read_nodes(
        logits: Sequence[Tensor], targets: Tensor, steps: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        part = _chunk_batch(targets, steps, labels, logits[0].shape[1], blank)
        arcs, *lses = tdt_arc_scores(logits[0], logits[1], part, kinds, sigma)
        return torch.from_numpy(arcs), tuple(torch.from_numpy(lse) for lse in lses)

    def scan_arcs(arcs: Tensor, wanted: bool) -> tuple[Tensor, Tensor]:
        losses, posteriors = _scanned(arcs, batch, kinds, 0.0, wanted, dtype)
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

    return JointKernels(read_nodes, scan_arcs, write_gradient)


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
    T, V = encoder.shape[1], len(weight)
    batch = as_batch(targets, logit_lengths, target_lengths, T, V, blank)
    heads = [(weight, bias), (duration_weight, duration_bias)]
    joint = _joint(encoder, predictor, heads, activation, targets, batch)
    wanted = Wanted(
        encoder_grad,
        predictor_grad,
        [weight_grad, duration_weight_grad],
        [bias_grad, duration_bias_grad],
    )
    kernels = tdt_kernels(batch, blank, durations, sigma, encoder.dtype)
    losses, gradients = linear_transducer(kernels, joint, factor, chunk, keep_logits, wanted)
    return losses, *gradients
