"""The functions that serve the ops of CTC on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference

    return {
        "ctc_loss": reference.ctc_loss,
        "ctc_gradient": reference.ctc_gradient,
        "ctc_align": reference.ctc_align,
    }


def _gpu() -> Functions:
    from .gpu import launch

    return {
        "ctc_loss": launch.ctc_loss,
        "ctc_gradient": launch.ctc_gradient,
        "ctc_align": _gpu_align,
    }


def _gpu_align(*args: Any) -> Any:
    # The alignment has kernels of its own, which take time to load.
    from .gpu.launch_align import ctc_align

    return ctc_align(*args)


def _cpu() -> Functions:
    from .cpu import align, loss

    return {
        "ctc_loss": loss.ctc_loss,
        "ctc_gradient": loss.ctc_gradient,
        "ctc_align": align.ctc_align,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu, cpu=_cpu)
