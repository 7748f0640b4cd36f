"""The blocks of tokens that the products of a batch-invariant call have.

A library chooses the kernel of a product, and so the order of its sums, by the sizes and by where
the rows of its factors and of its result start. In a block these are the same for every batch. Some
kernels also add up rows that start on 16 bytes in another order than others, and so all rows do.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.autograd import plain_eager
from ...runtime.invariance import is_batch_invariant
from ...runtime.register import PLAIN
from .plan import BLOCK_TOKENS, ROW_ALIGNMENT


def block_tokens() -> int:
    """Return how many tokens each product of a call has, or 0 outside of the mode."""
    return BLOCK_TOKENS if is_batch_invariant() else 0


def in_blocks(rows: Tensor, block: int, value: float = 0.0) -> Tensor:
    """Return rows `[M, ...]` that are padded to a multiple of `block` rows, unless that is 0."""
    if not block:
        return rows
    rows = F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, -len(rows) % block), value=value)
    rows = rows.contiguous()
    has_address = plain_eager() and type(rows) in PLAIN
    return rows.clone() if has_address and rows.data_ptr() % 16 else rows


def aligned_columns(matrix: Tensor) -> Tensor:
    """Return a matrix with zeros for columns up to a multiple of 16."""
    return F.pad(matrix, (0, -matrix.shape[1] % ROW_ALIGNMENT))


def linear_by_blocks(input: Tensor, weight: Tensor, bias: Tensor | None, block: int) -> Tensor:
    """Return `torch.nn.functional.linear`, by products of `block` rows unless that is 0."""
    rows, classes = input.shape[:-1].numel(), len(weight)
    if not block or not rows:
        return F.linear(input, weight, bias)
    padding = -classes % ROW_ALIGNMENT
    weight = F.pad(aligned_columns(weight), (0, 0, 0, padding))
    bias = None if bias is None else F.pad(bias, (0, padding))
    flat = aligned_columns(input.reshape(rows, input.shape[-1]))
    products = [F.linear(each, weight, bias) for each in in_blocks(flat, block).split(block)]
    return torch.cat(products)[:rows, :classes].reshape(*input.shape[:-1], classes)
