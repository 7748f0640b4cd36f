"""The functions that serve the ops of divergences on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...primitives.rows import by_rows
from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference, reference_chunks

    return {
        "divergence": by_rows(reference.divergence),
        "divergence_backward": by_rows(reference.divergence_backward, logits=1),
        "divergence_one_pass": by_rows(reference.divergence_one_pass),
        "divergence_state": reference_chunks.divergence_state,
        "divergence_mixture": reference_chunks.divergence_mixture,
        "divergence_local_gradient": reference_chunks.divergence_local_gradient,
    }


def _gpu() -> Functions:
    from .gpu import launch

    return {
        "divergence": launch.divergence,
        "divergence_backward": launch.divergence_backward,
        "divergence_one_pass": launch.divergence_one_pass,
        "divergence_state": launch.divergence_state,
        "divergence_mixture": launch.divergence_mixture,
        "divergence_local_gradient": launch.divergence_backward,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu)
