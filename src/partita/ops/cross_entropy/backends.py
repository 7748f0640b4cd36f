"""Which functions serve the ops of cross-entropy and token statistics on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference, token_stats_reference

    return {
        "cross_entropy": reference.cross_entropy,
        "cross_entropy_backward": reference.cross_entropy_backward,
        "cross_entropy_backward_": reference.cross_entropy_backward_,
        "cross_entropy_reduced": reference.cross_entropy_reduced,
        "cross_entropy_one_pass": reference.cross_entropy_one_pass,
        "cross_entropy_one_pass_": reference.cross_entropy_one_pass_,
        "scale_": reference.scale_,
        "token_stats": token_stats_reference.token_stats,
        "token_stats_backward": token_stats_reference.token_stats_backward,
    }


def _gpu() -> Functions:
    from .gpu import one_pass, reduction, rows, token_stats

    return {
        "cross_entropy_reduced": one_pass.cross_entropy_reduced,
        "cross_entropy_one_pass": one_pass.cross_entropy_one_pass,
        "cross_entropy_one_pass_": one_pass.cross_entropy_one_pass_,
        "cross_entropy": rows.cross_entropy,
        "cross_entropy_backward": rows.cross_entropy_backward,
        "cross_entropy_backward_": rows.cross_entropy_backward_,
        "scale_": reduction.scale_,
        "token_stats": token_stats.token_stats,
        "token_stats_backward": token_stats.token_stats_backward,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu)
