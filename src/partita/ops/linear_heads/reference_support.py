"""Logits of some pairs of a row and a class, from hidden states, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from ...primitives.rows import ELEMENTS, chunks
from ...runtime.dtypes import acc_dtype


def linear_entries(input: Tensor, weight: Tensor, rows: Tensor, classes: Tensor) -> Tensor:
    """Return the dot products of E entries, 0 for those whose class the matrix does not have.

    Hidden states are `[M, H]`, the matrix is `[C, H]`, and rows and classes of entries are `[E]`.
    """
    x = input.new_zeros(len(rows), dtype=acc_dtype(input.dtype))
    own = ((classes >= 0) & (classes < len(weight))).nonzero()[:, 0]
    for part in chunks(len(own), ELEMENTS // max(input.shape[1], 1)):
        states, weights = input[rows[own[part]]], weight[classes[own[part]]]
        x = x.index_put((own[part],), (states.to(x.dtype) * weights.to(x.dtype)).sum(1))
    return x


def linear_entries_sums(
    grad: Tensor,  # the gradients of the logits, [E]
    names: Tensor,  # the sum that each entry belongs to, [E]; others than 0 to S - 1 do not count
    columns: Tensor,  # the row of the table of each entry, [E], which it may not have
    # The entries sorted by name, [E], for kernels. They cut long sums where others end, so that
    # these change the rounding. None if the names are rows, which have no cuts.
    order: Tensor | None,
    starts: Tensor,  # where the entries of each name begin in the order, or the offsets, [S + 1]
    table: Tensor,  # [N, H]
    like: Tensor,  # has the shape and the dtype of the sums, [S, H]
) -> Tensor:
    """Return the sum over the entries of each name of gradient times row of the table.

    Entries with the gradient 0 do not count, whatever the table holds. A gradient that is NaN makes
    its sum NaN. The sums are added up in the gradient's dtype, and then rounded.
    """
    sums = torch.zeros_like(like, dtype=grad.dtype)
    is_name, is_row = (names >= 0) & (names < len(like)), (columns >= 0) & (columns < len(table))
    chosen = (is_name & is_row & (grad != 0)).nonzero()[:, 0]
    for part in chunks(len(chosen), ELEMENTS // max(table.shape[1], 1)):
        entry = chosen[part]
        products = grad[entry].unsqueeze(1) * table[columns[entry]].to(grad.dtype)
        # PyTorch adds these up in a fixed order.
        sums.index_put_((names[entry],), products, accumulate=True)
    sums[names[is_name & grad.isnan()]] = torch.nan
    return sums.to(like.dtype)
