"""Operations on rows in plain PyTorch that the references share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..runtime.dtypes import acc_dtype

# The elements of rows that are computed together on a CPU: their temporaries fit in a cache.
ELEMENTS = 2**22


def finite_shift(maximum: Tensor) -> Tensor:
    """Return the maximum to subtract before an exponential: 0 where the maximum is -inf."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def chunks(total: int, size: int) -> Iterator[slice]:
    """Return slices of at most `size` elements that cover `total` elements."""
    return (slice(first, min(first + size, total)) for first in range(0, total, max(size, 1)))


def row_chunks(rows: Tensor) -> Iterator[slice]:
    """Return slices of the rows of `[M, V]`: small ones on a CPU, else one slice with all rows."""
    on_cpu = rows.device.type == "cpu"
    return chunks(len(rows), max(1, ELEMENTS // max(rows.shape[1], 1)) if on_cpu else len(rows))


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """Return the logits in the accumulator dtype, soft-capped unless `softcap` is 0."""
    x = logits.to(acc_dtype(logits.dtype))
    return softcap * (x / softcap).tanh() if softcap else x


def softcap_slope(logits: Tensor, softcap: float) -> Tensor:
    """Return the derivative of soft-capping, 1 - tanh², without cancellation near a tanh of 1."""
    t = (logits.to(acc_dtype(logits.dtype)) / softcap).tanh()
    return (1 - t) * (1 + t)


def laid_out_like(result: Tensor, like: Tensor) -> Tensor:
    """Return the result with the memory layout of another tensor.

    Kernels lay out their results in this way, and the fakes tell compilers so.
    """
    output = torch.empty_like(like, dtype=result.dtype)
    return result if result.stride() == output.stride() else output.copy_(result)
