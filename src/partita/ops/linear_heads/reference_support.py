"""Logits of the entries of recorded supports from hidden states, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...primitives.rows import ELEMENTS, chunks
from ...runtime.dtypes import acc_dtype
from ..support.common import INVALID, Support
from .chunked import empty_gradients
from .common import Head, HeadGradients, Wanted


def parts_of(
    support: Support, head: Head, first_class: int, counts: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield some entries that count at a time, with their rows and their classes in the head.

    They are in the order of the support, and the others' classes are those of other heads.
    """
    C, hidden = head.weight.shape
    classes = support.keys.long() - first_class
    is_own = (classes >= 0) & (classes < C)
    place = (is_own if counts is None else is_own & counts[support.order]).nonzero()[:, 0]
    for part in chunks(len(place), ELEMENTS // max(hidden, 1)):
        here = place[part]
        yield support.order[here], support.ordered_rows[here], classes[here]


def linear_support_logits(head: Head, support: Support, first_class: int) -> Tensor:
    """Return the logits of the entries whose classes the head has, 0 for others, `[E]`.

    Args:
        head: hidden states `[M, H]`, and the matrix of the classes from `first_class` on.
        support: the classes that count in each row.
        first_class: the class of the first row of the matrix.
    """
    input, weight, bias = head
    x = input.new_zeros(len(support.order), dtype=acc_dtype(input.dtype))
    for entries, rows, classes in parts_of(support, head, first_class):
        logits = (input[rows].to(x.dtype) * weight[classes].to(x.dtype)).sum(1)
        if bias is not None:
            logits = logits + bias[classes].to(x.dtype)
        x = x.index_put((entries,), logits)
    return x


def linear_support_logits_backward(
    grad: Tensor, head: Head, support: Support, first_class: int, wanted: Wanted
) -> HeadGradients:
    """Compute the `HeadGradients` from those of the logits of entries, `[E]`.

    Entries with the gradient 0 do not count, whatever their hidden states hold. The gradient of the
    hidden state of an invalid row is NaN.
    """
    input, weight, _ = head
    result = empty_gradients(*head, *wanted)
    totals = HeadGradients(*(torch.zeros_like(field, dtype=grad.dtype) for field in result))
    for entries, rows, classes in parts_of(support, head, first_class, grad != 0):
        factor = grad[entries].unsqueeze(-1)
        # PyTorch adds these up in a fixed order.
        if wanted.input_grad:
            products = factor * weight[classes].to(grad.dtype)
            totals.input.index_put_((rows,), products, accumulate=True)
        if wanted.weight_grad:
            products = factor * input[rows].to(grad.dtype)
            totals.weight.index_put_((classes,), products, accumulate=True)
        if wanted.bias_grad:
            totals.bias.index_put_((classes,), factor[:, 0], accumulate=True)
    if wanted.input_grad:
        totals.input[support.kinds == INVALID] = torch.nan
    return HeadGradients(*(a.to(b.dtype) for a, b in zip(totals, result, strict=True)))
