"""Transducer losses from encoder and predictor in plain PyTorch, by chunks of the joint network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import reference
from .joint import JointKernels, linear_transducer

KERNELS = JointKernels(reference.score_arcs, reference.sum_paths, reference.rnnt_gradient)


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
    found: Any = linear_transducer(
        KERNELS,
        encoder,
        predictor,
        weight,
        bias,
        duration_weight,
        duration_bias,
        targets,
        logit_lengths,
        target_lengths,
        factor,
        activation,
        blank,
        durations,
        hat,
        sigma,
        delay_penalty,
        fastemit_lambda,
        chunk,
        keep_logits,
        wanted,
    )
    return found
