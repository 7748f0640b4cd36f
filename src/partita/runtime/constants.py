"""Tensors that many calls read and none writes.

They are cached on GPUs, because building one takes at least one launch. The edge tables that are
derived from such a tensor are stored with it, so they are built once too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import recording
from .autograd import is_capturing, plain_eager
from .caches import memory_state, register_cache

# A full cache takes no further tensors. It drops none, since a captured CUDA graph may read them.
MAX_CONSTANTS = 1024

_constants: dict[tuple[Any, ...], tuple[tuple[int, int], Tensor]] = {}
register_cache("runtime.constants", _constants.clear)


def constant(make: Callable[..., Tensor], *args: Any, device: torch.device) -> Tensor:
    """Return `make(*args, device=device)`; on a GPU the same tensor for the same arguments.

    The first call waits for the GPU, because later calls may read the tensor on other streams.
    """
    # A recorder is a dispatch mode, so that a call under it looks as if it were traced.
    if device.type == "cpu" or not (plain_eager() or recording.thread.recorder is not None):
        return make(*args, device=device)
    key = (make, device, *args)
    written, tensor = _constants.get(key, (None, None))
    if tensor is not None and memory_state(tensor) == written:
        recording.keep(tensor)
        return tensor
    # A tensor that is made in inference mode cannot be saved for a gradient later.
    with torch.inference_mode(False):
        tensor = make(*args, device=device)
    if not is_capturing(tensor):
        if tensor.is_cuda:
            torch.cuda.current_stream(device).synchronize()
        state = memory_state(tensor)
        if state is not None and (len(_constants) < MAX_CONSTANTS or key in _constants):
            _constants[key] = state, tensor
    return tensor


def _full(value: float, dtype: torch.dtype, *, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=dtype, device=device)


def scalar(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a number as a tensor, `[]`, which is not filled anew at each call on a GPU."""
    return constant(_full, value, dtype, device=device)
