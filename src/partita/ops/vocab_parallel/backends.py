"""The functions that serve the ops of losses over a sharded vocabulary on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference

    return {
        "parallel_logits": reference.parallel_logits,
        "parallel_linear": reference.parallel_linear,
        "parallel_fields": reference.parallel_fields,
        "parallel_coefficients": reference.parallel_coefficients,
        "parallel_gradient": reference.parallel_gradient,
        "parallel_gradient_": reference.parallel_gradient_,
    }


def _gpu() -> Functions:
    from .gpu import launch

    return {
        "parallel_logits": launch.parallel_logits,
        "parallel_linear": launch.parallel_linear,
        "parallel_fields": launch.parallel_fields,
        "parallel_coefficients": launch.parallel_coefficients,
        "parallel_gradient": launch.parallel_gradient,
        "parallel_gradient_": launch.parallel_gradient_,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu)


def parallel_one_pass(*args: Any) -> tuple[Tensor, Tensor]:
    """Call the kernel in which the GPUs of one host wait for each other; it has no reference."""
    from .gpu.launch import parallel_one_pass

    return parallel_one_pass(*args)
