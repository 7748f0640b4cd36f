"""The functions that serve the ops on hidden states on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference, reference_divergence

    return {
        "linear_rows": reference.linear_rows,
        "linear_rows_backward": reference.linear_rows_backward,
        "linear_one_pass": reference.linear_one_pass,
        "linear_packed_one_pass": reference.linear_one_pass,
        "linear_logprobs": reference.linear_logprobs,
        "linear_logprobs_backward": reference.linear_logprobs_backward,
        "linear_topk_logprobs": reference.linear_topk_logprobs,
        "linear_divergence": reference_divergence.linear_divergence,
        "linear_divergence_backward": reference_divergence.linear_divergence_backward,
        "linear_divergence_one_pass": reference_divergence.linear_divergence_one_pass,
    }


def _gpu() -> Functions:
    from .gpu import launch

    return {
        "linear_rows": launch.linear_rows,
        "linear_rows_backward": launch.linear_rows_backward,
        "linear_one_pass": launch.linear_one_pass,
        "linear_packed_one_pass": _gpu_packed_one_pass,
        "linear_logprobs": launch.linear_logprobs,
        "linear_logprobs_backward": launch.linear_logprobs_backward,
        "linear_topk_logprobs": launch.linear_topk_logprobs,
        "linear_divergence": _gpu_divergence,
        "linear_divergence_backward": _gpu_divergence_backward,
        "linear_divergence_one_pass": _gpu_divergence_one_pass,
    }


# Packed rows and divergences have kernels of their own, which take time to load.
def _gpu_packed_one_pass(*args: Any) -> Any:
    from .gpu.packed import linear_packed_one_pass

    return linear_packed_one_pass(*args)


def _gpu_divergence(*args: Any) -> Any:
    from .gpu.launch_divergence import linear_divergence

    return linear_divergence(*args)


def _gpu_divergence_backward(*args: Any) -> Any:
    from .gpu.launch_divergence import linear_divergence_backward

    return linear_divergence_backward(*args)


def _gpu_divergence_one_pass(*args: Any) -> Any:
    from .gpu.launch_divergence import linear_divergence_one_pass

    return linear_divergence_one_pass(*args)


BACKENDS = Backends(reference=_reference, gpu=_gpu)
