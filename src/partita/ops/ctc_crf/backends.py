"""The functions that serve the ops of CTC-CRF on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference

    return {
        "crf_loss": reference.crf_loss,
        "crf_gradient": reference.crf_gradient,
    }


def _gpu() -> Functions:
    from .gpu import launch

    return {
        "crf_loss": launch.crf_loss,
        "crf_gradient": launch.crf_gradient,
    }


def _cpu() -> Functions:
    from . import cpu

    return {
        "crf_loss": cpu.crf_loss,
        "crf_gradient": cpu.crf_gradient,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu, cpu=_cpu)
