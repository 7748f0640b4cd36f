"""Statistics over recorded supports from hidden states: rows with ids, and rows without.

Rows with ids take one dot product for each entry that counts. Rows without ids take all logits, a
chunk of classes at a time. How many rows these are decides what the products are, so a call on a
GPU whose rows may lack ids waits for this number once, after the work on the entries has been
launched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..support.common import (
    EVERY_CLASS,
    Support,
    SupportKernels,
    SupportRows,
    rows_without_ids,
)
from .chunked import ChunkKernels, linear_rows, linear_rows_backward
from .common import Head, HeadGradients, RowOptions, RowStatistics, Wanted
from .reference import gradient_coefficients


def linear_support(
    kernels: ChunkKernels,
    of_entries: SupportKernels,
    head: Head,
    target: Tensor,
    support: Support,
    temperature: float,
    softcap: float,
    chunk: int,
    may_lack_ids: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the `SupportRows` of a head, the logits of entries, and rows that need all classes.

    The last two results are those of `rows_without_ids`; there are none unless rows may lack ids.
    """
    x = of_entries.dots(head, support, softcap)
    found = of_entries.statistics(x, target, support, temperature)
    whole_rows, number = target.new_zeros(len(target)), torch.tensor(0)
    if may_lack_ids:
        whole_rows, number = rows_without_ids(support.kinds)
    if rows := int(number):
        index = whole_rows[:rows]
        is_whole = support.kinds[index] == EVERY_CLASS
        labels = torch.where(is_whole, target[index], 0)
        part = head._replace(input=head.input[index])
        options = RowOptions(temperature, softcap, -100, needs_smoothing=False, needs_entropy=True)
        *statistics, _ = linear_rows(kernels, part, labels, None, options, chunk, False)
        whole = RowStatistics(*statistics)
        fields = SupportRows(-whole.nll, whole.entropy, whole.maximum, whole.sumexp)
        for field, values in zip(found, fields, strict=True):
            field[index] = torch.where(is_whole, values, field[index])
    return *found, x, whole_rows, number


def linear_support_backward(
    kernels: ChunkKernels,
    of_entries: SupportKernels,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    head: Head,
    target: Tensor,
    support: Support,
    entropy: Tensor,
    maximum: Tensor,
    sumexp: Tensor,
    x: Tensor,
    whole_rows: Tensor,
    number: Tensor,
    temperature: float,
    softcap: float,
    chunk: int,
    wanted: Wanted,
) -> HeadGradients:
    """Compute the `HeadGradients` from the gradients of log-probabilities and entropies."""
    grads, results = (grad_logprob, grad_entropy), SupportRows(entropy, entropy, maximum, sumexp)
    numbers, of_whole = (temperature, softcap), None
    coefficients = of_entries.coefficients(*grads, x, target, support, results, *numbers)
    index = whole_rows[: int(number)]
    if len(index):
        is_whole = support.kinds[index] == EVERY_CLASS
        labels = torch.where(is_whole, target[index], 0)
        on_label, on_entropy = (torch.where(is_whole, grad[index], 0) for grad in grads)
        of_rows = gradient_coefficients(
            (-on_label, None, None, on_entropy),
            labels,
            None,
            entropy[index],
            len(head.weight),
            temperature,
            -100,
            maximum.dtype,
        )
        part = head._replace(input=head.input[index])
        statistics = (maximum[index], sumexp[index], head.input.new_empty(0))
        call = (part, labels, None, *statistics, *numbers, chunk, wanted)
        of_whole = linear_rows_backward(kernels, of_rows, *call)
    gradients = of_entries.gradients(coefficients, head, support, of_whole, wanted)
    if of_whole is not None and wanted.input_grad:
        # Each row has one of the two gradients, and zeros in the other.
        gradients.input[index] = gradients.input[index] + of_whole.input
    return gradients
