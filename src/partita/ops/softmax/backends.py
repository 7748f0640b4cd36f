"""The functions that serve softmax, log-softmax and log-sum-exp on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...primitives.rows import by_rows, laid_out_like
from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference

    return {
        "softmax": _over_any_dim(by_rows(reference.softmax)),
        "softmax_backward": _over_any_dim(by_rows(reference.softmax_backward, logits=1)),
        "logsumexp": by_rows(reference.logsumexp),
        "logsumexp_backward": by_rows(reference.logsumexp_backward, logits=1),
    }


def _over_any_dim(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of softmax that makes its dimension the last one, as rows have it."""

    def run(*args: Any) -> Tensor:
        *tensors, dim, log, dtype = args
        if dim == tensors[0].ndim - 1:
            return function(*args)
        moved = (tensor.movedim(dim, -1) for tensor in tensors)
        result = function(*moved, -1, log, dtype).movedim(-1, dim)
        return laid_out_like(result, tensors[-1])

    return run


def _gpu() -> Functions:
    from .gpu import launch

    return {
        "softmax": launch.softmax,
        "softmax_backward": launch.softmax_backward,
        "logsumexp": launch.logsumexp,
        "logsumexp_backward": launch.logsumexp_backward,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu)
