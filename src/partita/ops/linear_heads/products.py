"""The matrix products of linear heads: their blocks of tokens, and the dtype of the logits.

A library chooses the kernel of a product, and so the order of its sums, by the sizes and by where
the rows of its factors and of its result start. In the batch-invariant mode these are those of a
block of tokens, whatever the batch. Several blocks are one product if that has the bits of the
blocks, which is found out once for each size and never changes a result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...primitives.rows import chunks
from ...runtime.autograd import is_capturing, plain_eager
from ...runtime.caches import BoundedCache, register_cache
from ...runtime.dtypes import acc_dtype
from ...runtime.invariance import is_batch_invariant
from ...runtime.register import PLAIN
from .plan import (
    BLOCK_TOKENS,
    ROW_ALIGNMENT,
    SPARE_ROWS,
    padded_width,
    spare_rows,
    widens_logits,
)

_proofs: BoundedCache[tuple[Any, ...], bool] = BoundedCache(256)
register_cache("linear_heads.products.proofs", _proofs.clear)


class Products(NamedTuple):
    """How the products of a call are computed.

    Fields:
        block: 0, or in the batch-invariant mode the tokens in a chunk that does not keep its
            logits, a multiple of 1,024.
        widens: whether logits of half types are fp32, as the product adds them up.
    """

    block: int = 0
    widens: bool = False

    def rows(self, tokens: int) -> int:
        """Return the rows of memory for the logits of tokens, which whole blocks fill."""
        return tokens + -tokens % BLOCK_TOKENS if self.block else tokens

    def buffer(self, input: Tensor, tokens: int, classes: int) -> Tensor:
        """Return memory for the logits of some tokens and classes, flat, whose rows are padded."""
        rows, dtype = self.rows(tokens), input.dtype
        if self.widens:
            rows, dtype = rows + spare_rows(True), acc_dtype(dtype)
        return input.new_empty(rows * padded_width(classes), dtype=dtype)

    def logits_in(self, buffer: Tensor, tokens: int, classes: int) -> Tensor:
        """Return the view of a buffer that takes logits, with the padding of tokens and classes."""
        width = padded_width(classes)
        memory = buffer[spare_rows(self.widens) * width :]
        return memory[: self.rows(tokens) * width].view(-1, width)

    def gradient_in(self, buffer: Tensor, dtype: torch.dtype, tokens: int, classes: int) -> Tensor:
        """Return the view of a buffer that takes the gradient of its logits, with its padding.

        A gradient of another dtype starts before the logits; see `gradient_parts`.
        """
        if buffer.dtype == dtype:
            return self.logits_in(buffer, tokens, classes)
        width = padded_width(classes)
        return buffer.view(dtype)[: self.rows(tokens) * width].view(-1, width)

    def gradient_parts(self, tokens: int) -> list[slice]:
        """Return the tokens whose gradients are written together over their logits, in order.

        A gradient that is as large as the logits takes their place. One of half their size takes
        the place of logits that were read before, so that each part has twice the rows of all
        before it.
        """
        if not self.widens:
            return [slice(0, tokens)]
        parts, first = [], 0
        while first < tokens:
            stop = min(SPARE_ROWS + 2 * first, tokens)
            parts.append(slice(first, stop))
            first = stop
        return parts


USUAL = Products()


def products_of_call(input: Tensor, logits_dtype: torch.dtype | None) -> Products:
    """Return how the products of a call with these hidden states are computed."""
    widens = widens_logits(logits_dtype, input.dtype)
    return Products(BLOCK_TOKENS if is_batch_invariant() else 0, widens)


def multiply(
    a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, adds: bool = False
) -> None:
    """Write `a @ b` to `out`, with a bias or added to what is there; `out` may be wider."""
    options: dict[str, Any] = {}
    if a.dtype != out.dtype and a.is_cuda:
        options["out_dtype"] = out.dtype
    elif a.dtype != out.dtype:
        a, b = a.to(out.dtype), b.to(out.dtype)
    added = out if adds else bias
    if added is None:
        torch.mm(a, b, out=out, **options)
    else:
        torch.addmm(added.to(out.dtype), a, b, out=out, **options)


def multiply_blocks(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    products: Products,
    bias: Tensor | None = None,
    adds: bool = False,
) -> None:
    """Do the same with the bits that each row has in a product of one block of rows.

    Both `a` and `out` may have rows more that fill the last block, whose values do not matter.
    Otherwise that block is computed from a copy.
    """
    rows = min(len(a), len(out))
    if not products.block:
        return multiply(a, b, out, bias, adds)
    full = rows // BLOCK_TOKENS * BLOCK_TOKENS
    together = _is_proven(full, a, b, out, bias, adds)
    for some in chunks(full, full if together else BLOCK_TOKENS):
        multiply(a[some], b, out[some], bias, adds)
    if full < rows:
        last, result = (_filled(each[full : full + BLOCK_TOKENS]) for each in (a, out))
        multiply(last, b, result, bias, adds)
        if len(out) < full + BLOCK_TOKENS:
            out[full:].copy_(result[: rows - full])
    return None


def _filled(rows: Tensor) -> Tensor:
    """Return rows, or a copy with zeros that fill a block."""
    missing = BLOCK_TOKENS - len(rows)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _is_proven(
    rows: int, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, adds: bool
) -> bool:
    """Return whether a product of these rows gives each of its blocks the bits of its own.

    This compares both once on random numbers, and needs memory of their size. Without that memory,
    and while a graph is captured, the answer is False until it can be found out.
    """
    if rows <= BLOCK_TOKENS or not a.is_cuda:
        return rows <= BLOCK_TOKENS
    settings = torch.backends.cuda.matmul
    key = (
        *(rows, a.device, a.dtype, out.dtype, adds, None if bias is None else bias.dtype),
        *(a.stride(), b.shape, b.stride(), out.stride(), settings.fp32_precision),
        *(settings.allow_bf16_reduced_precision_reduction, b.data_ptr() % 16 == 0),
        settings.allow_fp16_reduced_precision_reduction,
    )
    known = _proofs.get(key)
    if known is None and not is_capturing(a):
        try:
            known = _proofs.store(key, blocks_are_alike(rows, a, b, out, bias, adds))
        except torch.OutOfMemoryError:
            return False
    return bool(known)


def blocks_are_alike(
    rows: int, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, adds: bool
) -> bool:
    """Compare a product of random numbers, of this form and so many rows, with its blocks."""
    generator = torch.Generator(a.device).manual_seed(0)

    def random(like: Tensor, shape: tuple[int, ...]) -> Tensor:
        memory = torch.empty_strided(shape, like.stride(), dtype=like.dtype, device=like.device)
        return memory.normal_(generator=generator)

    x, y = random(a, (rows, a.shape[1])), random(b, tuple(b.shape))
    bias = None if bias is None else random(bias, tuple(bias.shape))
    whole = random(out, (rows, out.shape[1]))
    before = [whole[some].clone() for some in chunks(rows, BLOCK_TOKENS)] if adds else []
    multiply(x, y, whole, bias, adds)
    for i, some in enumerate(chunks(rows, BLOCK_TOKENS)):
        block = before[i] if adds else random(out, (BLOCK_TOKENS, out.shape[1]))
        multiply(x[some], y, block, bias, adds)
        if not torch.equal(block, whole[some]):
            return False
    return True


def in_blocks(rows: Tensor, products: Products, value: float = 0.0) -> Tensor:
    """Return rows `[M, ...]` as the functions between products take them, padded to whole blocks.

    PyTorch's functions for the CPU give a row other bits by the number of rows. Kernels do not.
    """
    missing = -len(rows) % BLOCK_TOKENS
    if not products.block or rows.device.type != "cpu" or not missing:
        return rows
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing), value=value)


def aligned_rows(rows: Tensor) -> Tensor:
    """Return rows in memory of their own width that start on 16 bytes."""
    rows = aligned_columns(rows).contiguous()
    has_address = plain_eager() and type(rows) in PLAIN
    return rows.clone() if has_address and rows.data_ptr() % 16 else rows


def aligned_columns(matrix: Tensor) -> Tensor:
    """Return a matrix with zeros for columns up to a multiple of 16."""
    missing = -matrix.shape[1] % ROW_ALIGNMENT
    return F.pad(matrix, (0, missing)) if missing else matrix


def composed_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, products: Products
) -> Tensor:
    """Return `torch.nn.functional.linear`, from any tensors that PyTorch can transform."""
    if products.widens:
        tensors = (input, weight, bias)
        wide = (None if each is None else each.to(acc_dtype(each.dtype)) for each in tensors)
        with torch.autocast(input.device.type, enabled=False):
            return composed_linear(*wide, Products(products.block))  # type: ignore[arg-type]
    rows, classes = input.shape[:-1].numel(), len(weight)
    if not products.block or not rows:
        return F.linear(input, weight, bias)
    if padding := -classes % ROW_ALIGNMENT:
        weight = F.pad(weight, (0, 0, 0, padding))
        bias = None if bias is None else F.pad(bias, (0, padding))
    flat = F.pad(input.reshape(rows, input.shape[-1]), (0, 0, 0, -rows % BLOCK_TOKENS))
    flat, weight = aligned_rows(flat), aligned_columns(weight)
    blocks = [F.linear(each, weight, bias) for each in flat.split(BLOCK_TOKENS)]
    return torch.cat(blocks)[:rows, :classes].reshape(*input.shape[:-1], classes)
