"""Transducers by others: torchaudio, warprnnt_numba, and PyTorch, which is the reference here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.rnnt.api import rnnt_loss
from ..ops.rnnt.linear import linear_rnnt_loss
from ..ops.rnnt.tdt import tdt_loss
from ..runtime.backend import backend
from . import ctc_peers

DURATIONS = (0, 1, 2, 3, 4)


class RNNTInputs(NamedTuple):
    """A batch of logits and targets of full length; class 0 is the blank.

    Fields:
        logits: `[B, T, U + 1, V]`.
        durations: `[B, T, U + 1, K]`, or None without durations.
        targets: `[B, U]` int32.
        lengths: the steps and the labels of each sequence, `[2, B]` int32.
    """

    logits: Tensor
    durations: Tensor | None
    targets: Tensor
    lengths: Tensor


class JointInputs(NamedTuple):
    """Encoder `[B, T, D]`, predictor `[B, U + 1, D]`, matrix `[V, D]`, targets and lengths."""

    encoder: Tensor
    predictor: Tensor
    weight: Tensor
    targets: Tensor
    lengths: Tensor


def partita_rnnt(
    logits: Tensor, durations: Tensor | None, targets: Tensor, lengths: Tensor
) -> Tensor:
    """Compute the summed loss; the tensor of no durations is None."""
    if durations is None:
        return rnnt_loss(logits, targets, lengths[0], lengths[1], blank=0, reduction="sum")
    sequences = (targets, lengths[0], lengths[1])
    return tdt_loss(logits, durations, *sequences, 0, DURATIONS, reduction="sum")


def partita_joint(
    encoder: Tensor, predictor: Tensor, weight: Tensor, targets: Tensor, lengths: Tensor
) -> Tensor:
    """Compute the summed loss from encoder and predictor."""
    sequences = (targets, lengths[0], lengths[1])
    return linear_rnnt_loss(encoder, predictor, weight, *sequences, blank=0, reduction="sum")


def reference_rnnt(*inputs: Any) -> Tensor:
    """Compute the summed loss in PyTorch, by anti-diagonals and in fp64."""
    with backend("reference"):
        return partita_rnnt(*inputs)


def with_joint(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a loss from encoder and predictor that computes all logits."""

    def function(
        encoder: Tensor, predictor: Tensor, weight: Tensor, targets: Tensor, lengths: Tensor
    ) -> Tensor:
        hidden = (encoder[:, :, None] + predictor[:, None]).relu()
        return loss(hidden @ weight.T, None, targets, lengths)

    return function


def torchaudio_rnnt() -> Callable[..., Tensor]:
    """Return the summed loss of torchaudio, which takes fp32 and fp16."""
    library: Any = importlib.import_module("torchaudio.functional")

    def function(logits: Tensor, durations: None, targets: Tensor, lengths: Tensor) -> Tensor:
        logits = logits.float() if logits.dtype != torch.float16 else logits
        return library.rnnt_loss(logits, targets, *lengths, blank=0, reduction="sum")

    return function


def beyond_torchaudio(inputs: Any) -> str | None:
    """Return why torchaudio's alignment of CTC cannot take these inputs, or None."""
    return None if "lengths" in inputs._fields else ctc_peers.beyond_torchaudio(inputs)


def beyond_warprnnt(inputs: Any) -> str | None:
    """Return why warprnnt_numba is not timed: on a CPU it is a loop in Python."""
    return None if inputs[0].device.type == "cuda" else "needs a GPU"


def warprnnt_rnnt() -> Callable[..., Tensor]:
    """Return the summed loss of warprnnt_numba."""
    library: Any = importlib.import_module("warprnnt_numba")
    loss = library.RNNTLossNumba(blank=0, reduction="sum")
    return lambda logits, durations, targets, lengths: loss(
        logits.float(), targets, *lengths
    ).squeeze()
