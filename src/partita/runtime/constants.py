"""Tensors that many calls read and none writes.

They are cached on GPUs, because building one takes at least one launch. The edge tables that are
derived from such a tensor are stored with it, so they are built once too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import first_call, private_names, recording
from .autograd import is_capturing, plain_eager
from .caches import register_cache

# A full cache takes no further tensors. It drops none, since a captured CUDA graph may read them.
MAX_CONSTANTS = 1024

_constants: dict[tuple[Any, ...], tuple[int, Tensor]] = {}
register_cache("runtime.constants", _constants.clear)


def _is_watched() -> bool:
    """Return whether one of our own dispatch modes makes this call look as if it were traced."""
    return recording.recorder() is not None or first_call.watching()


def constant(make: Callable[..., Tensor], *args: Any, device: torch.device) -> Tensor:
    """Return `make(*args, device=device)`; on a GPU the same tensor for the same arguments.

    The first call waits for the GPU, because later calls may read the tensor on other streams.
    """
    if device.type == "cpu" or not (plain_eager() or _is_watched()):
        return make(*args, device=device)
    key = (make, device, *args)
    known = _constants.get(key)
    if known is not None and private_names.version_of(known[1]) == known[0]:
        recording.keep(known[1])
        return known[1]
    first_call.refuse_if_planning()
    # A tensor that is made in inference mode cannot be saved for a gradient later.
    with torch.inference_mode(False):
        tensor = make(*args, device=device)
    if not is_capturing(tensor):
        if tensor.is_cuda:
            torch.cuda.current_stream(device).synchronize()
        version = private_names.version_of(tensor)
        if version is not None and (len(_constants) < MAX_CONSTANTS or key in _constants):
            _constants[key] = version, tensor
    return tensor
