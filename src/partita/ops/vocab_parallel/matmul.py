"""Matrix products of the backward pass from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime.dtypes import acc_dtype


def matmul_in_acc_dtype(a: Tensor, b: Tensor) -> Tensor:
    """Return a b in the accumulator's dtype."""
    dtype = acc_dtype(a.dtype)
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def matmul_during_collective(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, computed in two parts so that a collective can start between them.

    A product occupies the whole device. NCCL's kernel is queued after the first part, which is a
    quarter of the rows, and it starts when that part leaves the device.
    """
    first = len(a) // 4 // 128 * 128
    result = torch.empty((len(a), b.shape[1]), dtype=a.dtype, device=a.device)
    for part in (slice(0, first), slice(first, None)) if first else (slice(None),):
        torch.mm(a[part], b, out=result[part])
    return result
