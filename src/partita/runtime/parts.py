"""Arguments of launches that are no single value: tuples, and parts of a tensor's memory.

A kernel takes what belongs together as one tuple, whose members may be tuples again. A part is the
memory of a tensor from an offset on: a view costs the host as much as a launch, and a workspace has
a dozen parts, so only Triton gets views.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor

# The contiguous tensor whose memory it is, the offset in bytes, and the dtype of the elements.
Part = tuple[Tensor, int, torch.dtype]


def is_part(arg: Any) -> TypeGuard[Part]:
    """Return whether an argument is a part of a tensor's memory; a kernel takes no dtypes."""
    return type(arg) is tuple and len(arg) == 3 and isinstance(arg[2], torch.dtype)


def members(args: tuple[Any, ...]) -> Iterator[Any]:
    """Yield the arguments of a launch, and those of tuples one by one, as the C module counts."""
    for arg in args:
        if isinstance(arg, tuple) and not is_part(arg):
            yield from members(arg)
        else:
            yield arg


def tuple_types(args: tuple[Any, ...]) -> Iterator[type]:
    """Yield the types of the tuples among the arguments of a launch."""
    for arg in args:
        if isinstance(arg, tuple) and not is_part(arg):
            yield type(arg)
            yield from tuple_types(arg)


def first_tensor(args: tuple[Any, ...]) -> Tensor:
    """Return the first tensor among the arguments of a launch."""
    found = (arg[0] if is_part(arg) else arg for arg in members(args))
    return next(arg for arg in found if isinstance(arg, Tensor))


def with_views(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a launch with a view for each part, up to the end of its memory."""
    return tuple(map(_with_views, args))


def _with_views(arg: Any) -> Any:
    if is_part(arg):
        tensor, offset, dtype = arg
        return tensor.view(dtype)[offset // dtype.itemsize :]
    if isinstance(arg, tuple):
        found = with_views(arg)
        return type(arg)(*found) if hasattr(arg, "_fields") else found
    return arg
