"""The functions that serve the ops of divergences on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference

    return {
        "divergence": reference.divergence,
        "divergence_backward": reference.divergence_backward,
    }


def _gpu() -> Functions:
    from .gpu import launch

    return {"divergence": launch.divergence, "divergence_backward": launch.divergence_backward}


BACKENDS = Backends(reference=_reference, gpu=_gpu)
