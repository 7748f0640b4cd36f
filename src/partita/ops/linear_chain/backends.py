"""The functions that serve the ops of dense linear chains on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.backend import Backends
from .common import HAS_KERNELS

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference, reference_tangent

    return {
        "linear_chain_logz": reference.linear_chain_logz,
        "linear_chain_gradient": reference.linear_chain_gradient,
        "linear_chain_viterbi": reference.linear_chain_viterbi,
        "linear_chain_sample": reference.linear_chain_sample,
        "linear_chain_tangent": reference_tangent.linear_chain_tangent,
    }


def _gpu() -> Functions:
    if not HAS_KERNELS:
        return _reference()
    from .gpu import launch

    return {
        "linear_chain_logz": launch.linear_chain_logz,
        "linear_chain_gradient": launch.linear_chain_gradient,
        "linear_chain_viterbi": _gpu_viterbi,
        "linear_chain_sample": _gpu_sample,
        "linear_chain_tangent": _gpu_tangent,
    }


# These ops have many kernels of their own, which take time to load.
def _gpu_viterbi(*args: Any) -> Any:
    from .gpu.launch_paths import linear_chain_viterbi

    return linear_chain_viterbi(*args)


def _gpu_sample(*args: Any) -> Any:
    from .gpu.launch_paths import linear_chain_sample

    return linear_chain_sample(*args)


def _gpu_tangent(*args: Any) -> Any:
    from .gpu.launch_tangent import linear_chain_tangent

    return linear_chain_tangent(*args)


def _cpu() -> Functions:
    from .cpu import gradient, logz, paths, tangent

    return {
        "linear_chain_logz": logz.linear_chain_logz,
        "linear_chain_gradient": gradient.linear_chain_gradient,
        "linear_chain_viterbi": paths.linear_chain_viterbi,
        "linear_chain_sample": paths.linear_chain_sample,
        "linear_chain_tangent": tangent.linear_chain_tangent,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu, cpu=_cpu)
