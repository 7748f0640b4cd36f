"""The choice of the way that an eager call takes, since each step costs host time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..runtime.autograd import plain_eager, refuse_forward_mode

FULL_PRECISION = (torch.float32, torch.float64)


def needs_no_derivative(*tensors: Tensor | None) -> bool:
    """Return whether an op may be called without its autograd function.

    That is so in plain eager mode if none of the tensors needs a gradient. A tensor with a
    forward-mode tangent raises, because the op would drop the tangent.
    """
    if not plain_eager():
        return False
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return False
    refuse_forward_mode(*tensors)
    return True


def native_serves(input: Tensor) -> bool:
    """Return whether a function of PyTorch may replace an op and its derivatives.

    The layout of its results is the op's only for contiguous inputs, and it rounds intermediate
    results of half types. Under transforms and in forward mode the op decides what is refused.
    """
    return (
        input.dtype in FULL_PRECISION
        and input.is_contiguous()
        and plain_eager()
        and forward_ad._current_level < 0
    )
