"""The matrix products of linear heads: their blocks of tokens, and the dtype of the logits.

A library chooses the kernel of a product, and so the order of its sums, by the sizes and by where
the rows of its factors and of its result start. In the batch-invariant mode these are those of a
block of tokens, whatever the batch. Several blocks are one product if that has the bits of the
blocks, which is found out once for each size and never changes a result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...primitives.rows import chunks
from ...runtime.autograd import is_capturing, plain_eager
from ...runtime.caches import BoundedCache, register_cache
from ...runtime.dtypes import acc_dtype
from ...runtime.register import PLAIN
from .plan import BLOCK_TOKENS, ROW_ALIGNMENT

_proofs: BoundedCache[tuple[Any, ...], bool] = BoundedCache(256)
register_cache("linear_heads.products.proofs", _proofs.clear)


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
    invariant: bool,
    bias: Tensor | None = None,
    adds: bool = False,
) -> None:
    """Do the same, with the bits that each row has in a product of one block if `invariant`.

    Both `a` and `out` may have rows more that fill the last block, whose values do not matter.
    Otherwise that block is computed from a copy.
    """
    rows = min(len(a), len(out))
    if not invariant:
        return multiply(a, b, out, bias, adds)
    full = rows // BLOCK_TOKENS * BLOCK_TOKENS
    together = _is_proven(a[:full], b, out[:full], bias, adds)
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


def _is_proven(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, adds: bool) -> bool:
    """Return whether a product gives each block of rows the bits of its own.

    Without memory to find it out, and while a graph is captured, the answer is False until then.
    """
    if len(a) <= BLOCK_TOKENS or not a.is_cuda:
        return len(a) <= BLOCK_TOKENS
    settings = torch.backends.cuda.matmul
    key = (
        *(a.device, a.dtype, out.dtype, adds, None if bias is None else bias.dtype),
        *(a.shape, a.stride(), b.shape, b.stride(), out.stride(), b.data_ptr() % 16 == 0),
        *(settings.fp32_precision, settings.allow_bf16_reduced_precision_reduction),
        settings.allow_fp16_reduced_precision_reduction,
    )
    known = _proofs.get(key)
    if known is None and not is_capturing(a):
        try:
            known = _proofs.store(key, blocks_are_alike(a, b, out, bias, adds))
        except torch.OutOfMemoryError:
            return False
    return bool(known)


def blocks_are_alike(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, adds: bool) -> bool:
    """Compare a product of random numbers in tensors of this form with its blocks of rows."""
    generator = torch.Generator(a.device).manual_seed(0)

    def memory(like: Tensor) -> Tensor:
        sizes = like.shape, like.stride()
        return torch.empty_strided(*sizes, dtype=like.dtype, device=like.device)

    x, y = (memory(each).normal_(generator=generator) for each in (a, b))
    bias = None if bias is None else memory(bias).normal_(generator=generator)
    whole, block = memory(out).fill_(1), memory(out[:BLOCK_TOKENS])
    multiply(x, y, whole, bias, adds)
    for some in chunks(len(a), BLOCK_TOKENS):
        multiply(x[some], y, block.fill_(1), bias, adds)
        if not torch.equal(block, whole[some]):
            return False
    return True


def in_blocks(rows: Tensor, invariant: bool, value: float = 0.0) -> Tensor:
    """Return rows `[M, ...]` as the functions between products take them, padded to whole blocks.

    PyTorch's functions for the CPU give a row other bits by the number of rows. Kernels do not.
    """
    if not invariant or rows.device.type != "cpu":
        return rows
    missing = -rows.shape[0] % BLOCK_TOKENS
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing), value=value)


def without_padding(rows: Tensor, shape: torch.Size, invariant: bool) -> Tensor:
    """Return the result of each token, in the shape of the tokens, from that of whole blocks."""
    if invariant:  # The number fixes a size that is traced.
        rows = rows[: shape.numel()]
    return rows.reshape(*shape, *rows.shape[1:])


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
    input: Tensor, weight: Tensor, bias: Tensor | None, invariant: bool, widens: bool
) -> Tensor:
    """Return `torch.nn.functional.linear`, from any tensors that PyTorch can transform."""
    rows, classes, weight = input.shape[:-1].numel(), len(weight), weight.to(input.dtype)
    bias = None if bias is None else bias.to(input.dtype)
    linear = _wide_linear if widens else F.linear
    if not invariant or not rows:
        return linear(input, weight, bias)
    if padding := -classes % ROW_ALIGNMENT:
        weight = F.pad(weight, (0, 0, 0, padding))
        bias = None if bias is None else F.pad(bias, (0, padding))
    flat = F.pad(input.reshape(rows, input.shape[-1]), (0, 0, 0, -rows % BLOCK_TOKENS))
    flat, weight = aligned_rows(flat), aligned_columns(weight)
    blocks = [linear(each, weight, bias) for each in flat.split(BLOCK_TOKENS)]
    return torch.cat(blocks)[:rows, :classes].reshape(*input.shape[:-1], classes)


def _wide_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `torch.nn.functional.linear` without rounding; it has no derivative."""
    dtype = acc_dtype(input.dtype)
    if input.is_cuda and plain_eager() and input.shape[-1]:
        flat = input.reshape(-1, input.shape[-1])
        result = input.new_empty(len(flat), len(weight), dtype=dtype)
        multiply(flat, weight.T, result, bias)
        return result.reshape(*input.shape[:-1], len(weight))
    bias = None if bias is None else bias.to(dtype)
    with torch.autocast(input.device.type, enabled=False):
        return F.linear(input.to(dtype), weight.to(dtype), bias)
