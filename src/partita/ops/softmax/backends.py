"""The functions that serve softmax, log-softmax and log-sum-exp on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference

    return {
        "softmax": reference.softmax,
        "softmax_backward": reference.softmax_backward,
        "logsumexp": reference.logsumexp,
        "logsumexp_backward": reference.logsumexp_backward,
    }


def _gpu() -> Functions:
    from .gpu import launch

    return {
        "softmax": launch.softmax,
        "softmax_backward": launch.softmax_backward,
        "logsumexp": launch.logsumexp,
        "logsumexp_backward": launch.logsumexp_backward,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu)
