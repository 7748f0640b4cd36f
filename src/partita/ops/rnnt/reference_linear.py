"""Transducer losses from encoder and predictor in plain PyTorch, by chunks of the joint network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype
from . import reference
from .joint import Joint, JointKernels, linear_transducer
from .reference_lattice import Lengths, valid_lengths


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
    keep_logits: int,
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the losses `[B]`, and the gradients of the sum of factor * loss.

    These are the gradients of encoder, predictor, and matrix and bias of tokens and of durations.
    Each is empty if it is not `wanted`, and all of them are without a factor.
    """
    T, V = encoder.shape[1], len(weight)
    lengths = valid_lengths(targets, logit_lengths, target_lengths, T, V, blank)

    def read_nodes(
        logits: Sequence[Tensor], targets: Tensor, steps: Tensor, labels: Tensor
    ) -> tuple[Tensor, Sequence[Tensor]]:
        part = Lengths(steps, labels, torch.zeros_like(steps, dtype=torch.bool))
        tokens, of_durations = logits[0], logits[1] if len(logits) > 1 else None
        options = (blank, True, hat, sigma)
        scores, *lses = reference.arc_scores(tokens, of_durations, targets, part, *options)
        return scores, lses[: len(logits)]

    def scan(arcs: Tensor, need_posteriors: bool) -> tuple[Tensor, Tensor]:
        options = (durations, delay_penalty, need_posteriors, acc_dtype(encoder.dtype))
        return reference.losses_of_arcs(arcs, lengths, *options)

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
        for each, lse in zip(logits[1:], lses[1:], strict=True):
            each.copy_(reference.rnnt_duration_gradient(factor, each, lse, posteriors))

    joint = Joint(
        encoder,
        predictor,
        [(weight, bias), (duration_weight, duration_bias)],
        activation,
        targets,
        lengths.steps,
        lengths.labels,
    )
    kernels = JointKernels(read_nodes, scan, write_gradient)
    losses, gradients = linear_transducer(kernels, joint, factor, chunk, bool(keep_logits), wanted)
    d_encoder, d_predictor, *of_heads = gradients
    d_weight, d_bias, d_duration_weight, d_duration_bias = of_heads
    of_durations = d_duration_weight, d_duration_bias
    return losses, d_encoder, d_predictor, d_weight, d_bias, *of_durations
