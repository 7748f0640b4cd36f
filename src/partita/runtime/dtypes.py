"""The dtypes that results are computed in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of `dtype` are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def integer_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the integer dtype with the size of an accumulator's dtype."""
    return torch.int64 if dtype == torch.float64 else torch.int32


def fp32_result(logits: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context in which logits of half types give a loss in fp32."""
    kind = logits.device.type
    half_type = logits.dtype in (torch.float16, torch.bfloat16) and kind != "meta"
    return torch.autocast(kind) if half_type else nullcontext()
