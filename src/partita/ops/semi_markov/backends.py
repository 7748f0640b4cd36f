"""The functions that serve the ops of semi-Markov chains on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference, reference_paths

    return {
        "semi_markov_logz": reference.semi_markov_logz,
        "semi_markov_gradient": reference.semi_markov_gradient,
        "semi_markov_segments": reference.semi_markov_segments,
        "semi_markov_viterbi": reference_paths.semi_markov_viterbi,
        "semi_markov_sample": reference_paths.semi_markov_sample,
    }


def _gpu() -> Functions:
    from .gpu import launch

    return {
        "semi_markov_logz": launch.semi_markov_logz,
        "semi_markov_gradient": launch.semi_markov_gradient,
        "semi_markov_segments": launch.semi_markov_segments,
        "semi_markov_viterbi": _gpu_viterbi,
        "semi_markov_sample": _gpu_sample,
    }


# These ops have kernels of their own, which take time to load.
def _gpu_viterbi(*args: Any) -> Any:
    from .gpu.launch_paths import semi_markov_viterbi

    return semi_markov_viterbi(*args)


def _gpu_sample(*args: Any) -> Any:
    from .gpu.launch_paths import semi_markov_sample

    return semi_markov_sample(*args)


def _cpu() -> Functions:
    from .cpu import gradient, logz, paths

    return {
        "semi_markov_logz": logz.semi_markov_logz,
        "semi_markov_gradient": gradient.semi_markov_gradient,
        "semi_markov_segments": gradient.semi_markov_segments,
        "semi_markov_viterbi": paths.semi_markov_viterbi,
        "semi_markov_sample": paths.semi_markov_sample,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu, cpu=_cpu)
