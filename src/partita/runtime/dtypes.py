"""Dtypes that results are computed in."""

from __future__ import annotations

import torch


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of `dtype` are carried in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
