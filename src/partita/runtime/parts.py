"""Parts of a tensor's memory as arguments of launches.

A view costs the host as much as a launch, and a workspace has a dozen parts. The C launcher takes
an address from a tensor and an offset instead, so only Triton needs the views.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# The contiguous tensor whose memory it is, the offset in bytes, and the dtype of the elements.
Part = tuple[Tensor, int, torch.dtype]


def tensor_of(arg: Any) -> Any:
    """Return the tensor whose memory a part is in; any other argument is returned as it is."""
    return arg[0] if type(arg) is tuple else arg


def with_views(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a launch with a view for each part, up to the end of its memory."""
    return tuple(_view(*arg) if type(arg) is tuple else arg for arg in args)


def _view(tensor: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    return tensor.view(dtype)[offset // dtype.itemsize :]
