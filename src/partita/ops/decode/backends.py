"""The functions that serve the decoders on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference

    return {
        "ctc_greedy_search": reference.ctc_greedy_search,
        "ctc_beam_search": reference.ctc_beam_search,
        "ctc_crf_path": reference.ctc_crf_path,
        "ctc_crf_base_posteriors": reference.ctc_crf_base_posteriors,
        "ctc_crf_calls": reference.ctc_crf_calls,
    }


def _gpu() -> Functions:
    return {
        "ctc_greedy_search": _gpu_greedy_search,
        "ctc_beam_search": _gpu_beam_search,
        "ctc_crf_path": _gpu_crf_path,
        "ctc_crf_base_posteriors": _gpu_crf_base_posteriors,
        "ctc_crf_calls": _gpu_crf_calls,
    }


# The searches have kernels of their own, which take time to load.
def _gpu_greedy_search(*args: Any) -> Any:
    from .gpu.launch_greedy import ctc_greedy_search

    return ctc_greedy_search(*args)


def _gpu_beam_search(*args: Any) -> Any:
    from .gpu.launch import ctc_beam_search

    return ctc_beam_search(*args)


def _gpu_crf_path(*args: Any) -> Any:
    from .gpu.launch_crf import ctc_crf_path

    return ctc_crf_path(*args)


def _gpu_crf_base_posteriors(*args: Any) -> Any:
    from .gpu.launch_crf import ctc_crf_base_posteriors

    return ctc_crf_base_posteriors(*args)


def _gpu_crf_calls(*args: Any) -> Any:
    from .gpu.launch_crf import ctc_crf_calls

    return ctc_crf_calls(*args)


def _cpu() -> Functions:
    from .cpu import beam, crf_calls, crf_path, greedy

    return {
        "ctc_greedy_search": greedy.ctc_greedy_search,
        "ctc_beam_search": beam.ctc_beam_search,
        "ctc_crf_path": crf_path.ctc_crf_path,
        "ctc_crf_base_posteriors": crf_path.ctc_crf_base_posteriors,
        "ctc_crf_calls": crf_calls.ctc_crf_calls,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu, cpu=_cpu)
