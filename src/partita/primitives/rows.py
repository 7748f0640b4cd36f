"""Operations on rows in plain PyTorch that the references share."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..runtime.dtypes import acc_dtype

ELEMENTS = 2**20  # of rows that are computed together on a CPU: their copies fit a cache


def finite_shift(maximum: Tensor) -> Tensor:
    """What to subtract: not -inf, from which nothing differs by a number."""
    return torch.where(maximum == -torch.inf, 0.0, maximum)


def chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, total)) for first in range(0, total, max(size, 1)))


def row_chunks(rows: Tensor) -> Iterator[slice]:
    """Of `[M, C]`, some at a time; elsewhere than on a CPU all together."""
    return chunks(
        len(rows),
        max(1, ELEMENTS // max(rows.shape[1], 1)) if rows.device.type == "cpu" else len(rows),
    )


def softcap_slope(logits: Tensor, softcap: float) -> Tensor:
    """Of the soft-cap: 1 - tanh² of what it takes the tanh of, whose digits a product would have lost."""
    t = (logits.to(acc_dtype(logits.dtype)) / softcap).tanh()
    return (1 - t) * (1 + t)


def laid_out_like(result: Tensor, like: Tensor) -> Tensor:
    """The result as kernels lay it out in memory, and as compilers are told: like another tensor."""
    own = torch.empty_like(like, dtype=result.dtype)
    return result if result.stride() == own.stride() else own.copy_(result)
