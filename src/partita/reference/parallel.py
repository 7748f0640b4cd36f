"""What a rank does with its share of the classes, between the gather of the statistics and the reduction of the gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .linear_cross_entropy import Coefficients, State, absorb, descend, filled, first_state, linear_state
from .softmax import accumulator

__all__ = ["linear_descend_", "linear_state", "logits_gradient", "logits_state", "wide_product"]


def logits_state(
    logits: Tensor, target: Tensor, class_weight: Tensor | None, temperature: float, softcap: float, spread: bool, entropy: bool,
    absorb: Callable[..., None] = absorb, first_state: Callable[..., State] = first_state,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`State` of rows of logits, empty where not wanted."""
    state = first_state(logits, spread, entropy)
    if logits.numel():
        absorb(logits, 0, target.contiguous(), class_weight, state, temperature, softcap)
    return filled(state)


def logits_gradient(
    pull: Tensor, at_label: Tensor, log_pull: Tensor | None, by_class: Tensor | None, logits: Tensor, target: Tensor, class_weight: Tensor | None,
    maximum: Tensor, sumexp: Tensor, temperature: float, softcap: float, descend: Callable[..., None] = descend,
) -> Tensor:  # fmt: skip
    """Of rows of logits, from the coefficients."""
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if logits.numel():
        c = Coefficients(pull, at_label, log_pull, by_class)
        descend(logits, 0, target.contiguous(), class_weight, c, maximum, sumexp, temperature, softcap, result)
    return result


def linear_descend_(
    logits: Tensor, pull: Tensor, at_label: Tensor, log_pull: Tensor | None, by_class: Tensor | None, target: Tensor, class_weight: Tensor | None,
    maximum: Tensor, sumexp: Tensor, temperature: float, softcap: float, descend: Callable[..., None] = descend,
) -> None:  # fmt: skip
    """Logits that were kept become their gradient."""
    if logits.numel():
        c = Coefficients(pull, at_label, log_pull, by_class)
        descend(logits, 0, target.contiguous(), class_weight, c, maximum, sumexp, temperature, softcap, logits)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b, in the type in which sums are."""
    wide = accumulator(a.dtype)
    if a.is_cuda and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)
