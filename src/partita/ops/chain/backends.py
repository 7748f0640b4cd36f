"""The functions that serve the ops of sparse linear chains on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference

    return {
        "chain_logz": reference.chain_logz,
        "chain_rounded_logz": reference.chain_rounded_logz,
        "chain_gradient": reference.chain_gradient,
        "chain_scan": reference.chain_scan,
        "chain_viterbi": reference.chain_viterbi,
        "chain_sample": reference.chain_sample,
        "chain_expectation": reference.chain_expectation,
        "chain_expectation_gradient": reference.chain_expectation_gradient,
    }


def _gpu() -> Functions:
    from .gpu import launch

    return {
        "chain_logz": launch.chain_logz,
        "chain_rounded_logz": launch.chain_rounded_logz,
        "chain_gradient": launch.chain_gradient,
        "chain_scan": launch.chain_scan,
        "chain_viterbi": _gpu_viterbi,
        "chain_sample": _gpu_sample,
        "chain_expectation": _gpu_expectation,
        "chain_expectation_gradient": _gpu_expectation_gradient,
    }


# These ops have many kernels of their own, which take time to load.
def _gpu_viterbi(*args: Any) -> Any:
    from .gpu.launch_paths import chain_viterbi

    return chain_viterbi(*args)


def _gpu_sample(*args: Any) -> Any:
    from .gpu.launch_paths import chain_sample

    return chain_sample(*args)


def _gpu_expectation(*args: Any) -> Any:
    from .gpu.launch_expectation import chain_expectation

    return chain_expectation(*args)


def _gpu_expectation_gradient(*args: Any) -> Any:
    from .gpu.launch_expectation import chain_expectation_gradient

    return chain_expectation_gradient(*args)


def _cpu() -> Functions:
    from .cpu import expectation, logz, paths, state_scores

    return {
        "chain_logz": logz.chain_logz,
        "chain_rounded_logz": logz.chain_rounded_logz,
        "chain_gradient": logz.chain_gradient,
        "chain_scan": state_scores.chain_scan,
        "chain_viterbi": paths.chain_viterbi,
        "chain_sample": paths.chain_sample,
        "chain_expectation": expectation.chain_expectation,
        "chain_expectation_gradient": expectation.chain_expectation_gradient,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu, cpu=_cpu)
