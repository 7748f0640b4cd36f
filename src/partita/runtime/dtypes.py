"""The dtypes that results are computed in."""

from __future__ import annotations

import torch


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of `dtype` are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32
