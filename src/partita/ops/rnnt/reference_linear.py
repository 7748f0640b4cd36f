"""Transducer losses from encoder and predictor in plain PyTorch, by chunks of the joint network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype
from . import reference, reference_tdt
from .joint import Joint, JointKernels, Wanted, linear_transducer
from .reference_lattice import Lengths, log_partition, valid_lengths, within_lattice


def _finished(
    logz: Tensor, posteriors: Tensor, lengths: Lengths, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return losses and posteriors, which are NaN for an invalid sequence."""
    losses = torch.where(lengths.invalid, torch.nan, 0.0 - logz).to(dtype)
    if not posteriors.numel():
        return losses, posteriors
    invalid = lengths.invalid[:, None, None]
    return losses, torch.where(invalid, torch.nan, posteriors).to(dtype)


def rnnt_kernels(
    lengths: Lengths,
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
        part = Lengths(steps, labels, torch.zeros_like(steps, dtype=torch.bool))
        scores, lse = reference.arc_scores(logits[0], targets, part, blank, True, hat)
        return scores, (lse,)

    def scan(arcs: Tensor, need_posteriors: bool) -> tuple[Tensor, Tensor]:
        scores = reference.delayed(arcs, lengths, delay_penalty)
        scores = within_lattice(scores, reference.ARCS, lengths)
        found = log_partition(scores, reference.ARCS, lengths, need_posteriors)
        return _finished(*found, lengths, acc_dtype(dtype))

    def write_gradient(
        factor: Tensor,
        logits: Sequence[Tensor],
        lses: Sequence[Tensor],
        posteriors: Tensor,
        targets: Tensor,
    ) -> None:
        nodes = (logits[0], lses[0], posteriors, targets, factor, factor)  # no lengths are read
        options = (blank, True, hat, 0.0, fastemit_lambda)
        logits[0].copy_(reference.rnnt_gradient(factor, *nodes, *options))

    return JointKernels(read_nodes, scan, write_gradient)


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
    keep_logits: int,
    encoder_grad: bool,
    predictor_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the losses `[B]`, and the gradients of the sum of factor * loss.

    The gradients of encoder, predictor, matrix and bias are empty if they are not wanted, and all
    of them are without a factor.
    """
    T, V = encoder.shape[1], len(weight)
    lengths = valid_lengths(targets, logit_lengths, target_lengths, T, V, blank)
    joint = Joint(
        encoder, predictor, [(weight, bias)], activation, targets, lengths.steps, lengths.labels
    )
    options = (blank, hat, delay_penalty, fastemit_lambda, encoder.dtype)
    wanted = Wanted(encoder_grad, predictor_grad, [weight_grad], [bias_grad])
    kernels = rnnt_kernels(lengths, *options)
    losses, gradients = linear_transducer(kernels, joint, factor, chunk, bool(keep_logits), wanted)
    d_encoder, d_predictor, d_weight, d_bias = gradients
    return losses, d_encoder, d_predictor, d_weight, d_bias


def tdt_kernels(
    lengths: Lengths, blank: int, durations: Sequence[int], sigma: float, dtype: torch.dtype
) -> JointKernels:
    """Return the functions of token-and-duration transducers."""

    def read_nodes(
        logits: Sequence[Tensor], targets: Tensor, steps: Tensor, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        part = Lengths(steps, labels, torch.zeros_like(steps, dtype=torch.bool))
        scores, *lses = reference_tdt.arc_scores(logits[0], logits[1], targets, part, blank, sigma)
        return scores, tuple(lses)

    def scan(arcs: Tensor, need_posteriors: bool) -> tuple[Tensor, Tensor]:
        found = reference_tdt.sum_of_paths(arcs, lengths, durations, need_posteriors)
        return _finished(*found, lengths, acc_dtype(dtype))

    def write_gradient(
        factor: Tensor,
        logits: Sequence[Tensor],
        lses: Sequence[Tensor],
        posteriors: Tensor,
        targets: Tensor,
    ) -> None:
        nodes = (logits[0], logits[1], lses[0], lses[1], posteriors)
        # No lengths are read.
        results = reference_tdt.tdt_gradient(factor, *nodes, targets, factor, factor, blank)
        for each, result in zip(logits, results, strict=True):
            each.copy_(result)

    return JointKernels(read_nodes, scan, write_gradient)


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
    keep_logits: int,
    encoder_grad: bool,
    predictor_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
    duration_weight_grad: bool,
    duration_bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the losses `[B]`, and the gradients of the sum of factor * loss.

    The gradients are those of encoder, predictor, and of matrix and bias of tokens and durations.
    """
    T, V = encoder.shape[1], len(weight)
    lengths = valid_lengths(targets, logit_lengths, target_lengths, T, V, blank)
    heads = [(weight, bias), (duration_weight, duration_bias)]
    joint = Joint(encoder, predictor, heads, activation, targets, lengths.steps, lengths.labels)
    wanted = Wanted(
        encoder_grad,
        predictor_grad,
        [weight_grad, duration_weight_grad],
        [bias_grad, duration_bias_grad],
    )
    kernels = tdt_kernels(lengths, blank, durations, sigma, encoder.dtype)
    losses, gradients = linear_transducer(kernels, joint, factor, chunk, bool(keep_logits), wanted)
    d_encoder, d_predictor, *of_heads = gradients
    d_weight, d_bias, d_duration_weight, d_duration_bias = of_heads
    of_durations = d_duration_weight, d_duration_bias
    return losses, d_encoder, d_predictor, d_weight, d_bias, *of_durations
