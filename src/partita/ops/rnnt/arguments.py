"""The arguments of transducers: checked, and in the form that the registered ops take."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.lengths import Lengths, as_lengths, on_device
from ...runtime.sizes import holds

MAX_DURATIONS = 8


def class_index(name: str, value: Any, classes: int) -> int:
    """Return the class that an index from -V to V - 1 means."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or not -classes <= value < classes:
        raise ValueError(
            f"{name}: expected a class from {-classes} to {classes - 1}, got {value!r}"
        )
    return int(value) % classes


def node_logits(name: str, logits: Any, last: str) -> None:
    """Raise unless these are floating logits `[B, T, U + 1, X]` with an entry in the last two."""
    checks.floating(name, logits)
    if logits.ndim != 4 or not all(holds(size >= 1) for size in logits.shape[2:]):
        raise ValueError(
            f"{name}: expected shape [B, T, U + 1, {last}] with U >= 0 and {last} >= 1,"
            f" got {list(logits.shape)}"
        )


def sequences_of(
    targets: Tensor,
    logit_lengths: Lengths,
    target_lengths: Lengths,
    shape: Sequence[int],
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return targets and lengths, checked against the shape `[B, T, U + 1]` of the nodes.

    The targets are `[B, U]` int32 or int64 and contiguous, the lengths of logits and targets `[B]`
    int64 on their device.
    """
    B, _, U1 = shape[:3]
    checks.integer("targets", targets)
    if targets.device != device:
        raise ValueError(f"targets: expected the device {device}, got {targets.device}")
    checks.shape("targets", targets, [B, U1 - 1], "[B, U]")
    steps = as_lengths("logit_lengths", logit_lengths, B)
    labels = as_lengths("target_lengths", target_lengths, B)
    steps, labels = on_device(device, steps, labels)
    if targets.dtype not in (torch.int32, torch.int64):
        targets = targets.long()  # comparisons with V or the blank would wrap in a narrow dtype
    return targets.contiguous(), steps, labels


def checked_durations(durations: Any, K: int) -> list[int]:
    """Return the durations, of which each entry of the duration logits has one."""
    durations = checks.python_ints("durations", durations)
    if not 0 < len(durations) <= MAX_DURATIONS or min(durations) < 0 or max(durations) < 1:
        raise ValueError(
            f"durations: expected 1 to {MAX_DURATIONS} numbers, 0 or more, of which one is above 0,"
            f" got {list(durations)}"
        )
    if len(durations) != K:
        raise ValueError(
            f"durations: expected {K} numbers, one for each entry of the duration logits,"
            f" got {len(durations)}"
        )
    return [int(value) for value in durations]


def node_options(
    fused_log_softmax: bool, hat: bool, fastemit_lambda: float, delay_penalty: float
) -> tuple[bool, float, float]:
    """Return whether blanks are apart (`hat`), the factor of FastEmit and the delay penalty."""
    if hat and not fused_log_softmax:
        raise ValueError(
            "hat: expected logits, which is fused_log_softmax=True, got log-probabilities"
        )
    checks.number("fastemit_lambda", fastemit_lambda, low=0.0)
    checks.number("delay_penalty", delay_penalty, low=0.0)
    return bool(hat), float(fastemit_lambda), float(delay_penalty)


def clamp_bound(clamp: Any) -> float:
    """Return the bound of the gradient, 0 for none; torchaudio takes a negative number for none."""
    if isinstance(clamp, bool) or not isinstance(clamp, (int, float)) or clamp != clamp:
        raise TypeError(f"clamp: expected a number, got {clamp!r}")
    return max(float(clamp), 0.0) if clamp != float("inf") else 0.0
