"""Statistics over recorded supports from hidden states, in plain PyTorch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...primitives.rows import ELEMENTS, chunks, finite_shift, softcapped
from ...runtime.dtypes import acc_dtype
from ..support.common import INVALID, RECORDED, Support, SupportKernels, SupportRows
from ..support.reference import statistics
from . import chunked_support
from .chunked import empty_gradients
from .common import Head, HeadGradients, Wanted
from .reference import CHUNK_KERNELS


def entry_dots(head: Head, support: Support, softcap: float) -> Tensor:
    """Return the soft-capped logits of the entries that count, 0 for others, `[E]`."""
    input, weight, bias = head
    x = input.new_zeros(len(support.rows), dtype=acc_dtype(input.dtype))
    places = (support.keys < len(weight)).nonzero()[:, 0]
    for part in chunks(len(places), ELEMENTS // max(input.shape[1], 1)):
        place = places[part]
        rows, classes = support.rows[place].long(), support.keys[place].long()
        products = input[rows].to(x.dtype) * weight[classes].to(x.dtype)
        logits = products.sum(1)
        if bias is not None:
            logits = logits + bias[classes].to(x.dtype)
        x[support.order[place]] = softcapped(logits, softcap)
    return x


def entry_statistics(
    x: Tensor, target: Tensor, support: Support, temperature: float
) -> SupportRows:
    """Return the statistics of rows with ids from the logits of their entries.

    They are laid out as a matrix, `[M, W]`, whose width is that of the longest row.
    """
    M, offsets = len(target), support.offsets
    is_listed = support.kinds == RECORDED
    base = offsets[:-1] + torch.arange(M, device=offsets.device)
    numbers = torch.where(is_listed, offsets.diff() + 1, 1)
    width = int(numbers.max()) if M else 1
    place = torch.arange(width, device=x.device)
    is_entry = is_listed.unsqueeze(-1) & (place < numbers.unsqueeze(-1))
    entry = torch.where(is_entry, base.unsqueeze(-1) + place, 0)
    counts = is_entry & (support.classes[entry] >= 0)
    rows = torch.where(counts, x[entry], -torch.inf)
    # Rows that have no statistics here are rows of zeros.
    rows = torch.where(is_listed.unsqueeze(-1), rows, 0)
    return statistics(rows, rows[:, 0], support.kinds, temperature)


def entry_coefficients(
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    x: Tensor,
    target: Tensor,
    support: Support,
    results: SupportRows,
    temperature: float,
    softcap: float,
) -> Tensor:
    """Return the gradients of the logits of the entries, 0 for those that do not count, `[E]`."""
    counts = support.classes >= 0
    rows = support.rows_of_entries()
    if not len(target):
        return torch.zeros_like(x)
    on_label, on_entropy = grad_logprob[rows], grad_entropy[rows]
    _, entropy, maximum, sumexp = (field[rows] for field in results)
    exponent = (x - finite_shift(maximum)) / temperature
    p = exponent.exp() / sumexp
    logp_plus_entropy = torch.where(p == 0, 0, exponent - sumexp.log() + entropy)
    is_label = support.classes == target[rows]
    grad = torch.where(is_label, on_label, 0) - p * (on_label + on_entropy * logp_plus_entropy)
    grad = grad / temperature
    if softcap:
        t = x / softcap
        grad = grad * (1 - t) * (1 + t)
    # A row without a gradient has the gradient 0, whatever its logits are.
    grad = torch.where((on_label == 0) & (on_entropy == 0), 0, grad)
    grad = torch.where(support.kinds[rows] == INVALID, torch.nan, grad)
    return torch.where(counts, grad, 0)


def entry_gradients(
    coefficients: Tensor,
    head: Head,
    support: Support,
    others: HeadGradients | None,
    wanted: Wanted,
    partial_input: bool = False,
) -> HeadGradients:
    """Return the gradients of the head from those of the entries' logits.

    `others` are the gradients of matrix and bias by other rows, to which these are added. A partial
    gradient of the hidden states is in the accumulator's dtype.
    """
    (input, weight, _), dtype = head, coefficients.dtype
    result = empty_gradients(*head, *wanted)
    totals = [torch.zeros_like(field, dtype=dtype) for field in result]
    if others is not None:
        totals[1:] = [field.to(dtype) for field in others[1:]]
    dinput, dweight, dbias = totals
    # Rows and entries without a gradient do not count, whatever they hold.
    counts = (coefficients[support.order] != 0) & (support.keys < len(weight))
    places = counts.nonzero()[:, 0]
    for part in chunks(len(places), ELEMENTS // max(input.shape[1], 1)):
        place = places[part]
        factor = coefficients[support.order[place]].unsqueeze(-1)
        rows, classes = support.rows[place].long(), support.keys[place].long()
        # PyTorch adds these up in a fixed order.
        if wanted.input_grad:
            products = factor * weight[classes].to(dtype)
            dinput.index_put_((rows,), products, accumulate=True)
        if wanted.weight_grad:
            products = factor * input[rows].to(dtype)
            dweight.index_put_((classes,), products, accumulate=True)
        if wanted.bias_grad:
            dbias.index_put_((classes,), factor[:, 0], accumulate=True)
    if wanted.input_grad:
        is_invalid = (support.kinds == INVALID).unsqueeze(-1)
        dinput = torch.where(is_invalid, torch.nan, dinput)
    if not partial_input:
        dinput = dinput.to(input.dtype)
    return HeadGradients(dinput, dweight.to(weight.dtype), dbias.to(weight.dtype))


SUPPORT_KERNELS = SupportKernels(entry_dots, entry_statistics, entry_coefficients, entry_gradients)

linear_support = functools.partial(chunked_support.linear_support, CHUNK_KERNELS, SUPPORT_KERNELS)
linear_support_backward = functools.partial(
    chunked_support.linear_support_backward, CHUNK_KERNELS, SUPPORT_KERNELS
)
