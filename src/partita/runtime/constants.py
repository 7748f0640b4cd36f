"""Tensors that many calls read and none writes, kept on GPUs: making one takes a launch or more, and what is built from a table is kept with its tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .autograd import is_capturing, plain_eager

_made: dict[tuple[Any, ...], tuple[int, Tensor]] = {}


def constant(make: Callable[..., Tensor], *args: Any, device: torch.device) -> Tensor:
    """`make(*args, device=device)`; on a GPU the same tensor each time, which the first call waits for, as others may read it on other streams."""
    if device.type == "cpu" or not plain_eager():
        return make(*args, device=device)
    key = (make, device, *args)
    version, found = _made.get(key, (0, None))
    if found is not None and found._version == version:
        return found
    with torch.inference_mode(
        False
    ):  # what is made in that mode cannot be saved for a gradient later
        found = make(*args, device=device)
    if not is_capturing(found):
        if found.is_cuda:
            torch.cuda.current_stream(device).synchronize()
        _made[key] = found._version, found
    return found
