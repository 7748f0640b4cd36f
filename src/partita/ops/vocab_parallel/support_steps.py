"""The steps of statistics over recorded supports whose classes lie on several ranks.

Reference and kernels share them. Each rank computes the logits of the entries whose classes it has.
"""

from __future__ import annotations

from torch import Tensor

from ..linear_heads.common import Head, Wanted
from ..support.common import Support, SupportKernels, SupportRows


def parallel_support_dots(
    of_entries: SupportKernels, head: Head, support: Support, softcap: float
) -> Tensor:
    """Return the soft-capped logits of the entries whose classes this rank has, else 0, `[E]`."""
    return of_entries.dots(head, support, softcap)


def parallel_support_rows(
    of_entries: SupportKernels, x: Tensor, target: Tensor, support: Support, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the `SupportRows` of rows with ids from the logits of all entries."""
    return of_entries.statistics(x, target, support, temperature)


def parallel_support_coefficients(
    of_entries: SupportKernels,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    x: Tensor,
    target: Tensor,
    support: Support,
    entropy: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    temperature: float,
    softcap: float,
) -> Tensor:
    """Return the gradients of the logits of all entries, `[E]`."""
    results = SupportRows(entropy, entropy, maximum, sumexp)  # the first one is not read
    grads, numbers = (grad_logprob, grad_entropy), (temperature, softcap)
    return of_entries.coefficients(*grads, x, target, support, results, *numbers)


def parallel_support_gradients(
    of_entries: SupportKernels,
    coefficients: Tensor,
    head: Head,
    support: Support,
    wanted: Wanted,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's part of the gradient of hidden states, and those of matrix and bias."""
    return of_entries.gradients(coefficients, head, support, None, wanted, partial_input=True)
