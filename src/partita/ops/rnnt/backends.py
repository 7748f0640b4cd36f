"""The functions that serve the ops of transducers on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _gradients(rnnt_gradient: Callable[..., Any]) -> Functions:
    """Return the gradient of RNN-T as an op with a result, and as one that writes in place."""

    def in_place(grad: Any, logits: Any, *rest: Any) -> None:
        rnnt_gradient(grad, logits, *rest, True)

    return {
        "rnnt_gradient": lambda *args: rnnt_gradient(*args, False),
        "rnnt_gradient_": in_place,
    }


def _reference() -> Functions:
    from . import reference, reference_linear, reference_tdt

    return {
        **_gradients(reference.rnnt_gradient),
        "rnnt_forward": reference.rnnt_forward,
        "rnnt_align": reference.rnnt_align,
        "tdt_forward": reference_tdt.tdt_forward,
        "tdt_gradient": reference_tdt.tdt_gradient,
        "tdt_align": reference_tdt.tdt_align,
        "linear_rnnt": reference_linear.linear_rnnt,
        "linear_tdt": reference_linear.linear_tdt,
    }


def _gpu() -> Functions:
    from .gpu import launch

    return {
        **_gradients(launch.rnnt_gradient),
        "rnnt_forward": launch.rnnt_forward,
        "rnnt_align": launch.rnnt_align,
        "tdt_forward": launch.tdt_forward,
        "tdt_gradient": launch.tdt_gradient,
        "tdt_align": launch.tdt_align,
        "linear_rnnt": launch.linear_rnnt,
        "linear_tdt": launch.linear_tdt,
    }


def _cpu() -> Functions:
    from .cpu import launch, linear

    return {
        **_gradients(launch.rnnt_gradient),
        "rnnt_forward": launch.rnnt_forward,
        "rnnt_align": launch.rnnt_align,
        "tdt_forward": launch.tdt_forward,
        "tdt_gradient": launch.tdt_gradient,
        "tdt_align": launch.tdt_align,
        "linear_rnnt": linear.linear_rnnt,
        "linear_tdt": linear.linear_tdt,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu, cpu=_cpu)
