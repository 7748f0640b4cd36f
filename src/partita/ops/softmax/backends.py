"""Which functions serve the ops of softmax, log-softmax and log-sum-exp on each backend."""

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
    from .gpu import logsumexp, softmax

    return {
        "softmax": softmax.softmax,
        "softmax_backward": softmax.softmax_backward,
        "logsumexp": logsumexp.logsumexp,
        "logsumexp_backward": logsumexp.logsumexp_backward,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu)
