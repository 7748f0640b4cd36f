"""Which functions serve the ops of losses over a sharded vocabulary on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
    from .gpu import merge

    return {
        "parallel_logits": merge.parallel_logits,
        "parallel_linear": merge.parallel_linear,
        "parallel_fields": merge.parallel_fields,
        "parallel_coefficients": merge.parallel_coefficients,
        "parallel_gradient": merge.parallel_gradient,
        "parallel_gradient_": merge.parallel_gradient_,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu)


def one_pass_functions() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions of the kernel in which ranks of one host wait for one another."""
    from .gpu.one_pass import parallel_one_pass, words_of

    return words_of, parallel_one_pass
