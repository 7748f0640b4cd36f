"""The functions that serve the ops of cross-entropy and token statistics on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...primitives.rows import by_rows
from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference, reference_one_pass

    return {
        "cross_entropy": reference_one_pass.cross_entropy,
        "cross_entropy_backward": reference_one_pass.cross_entropy_backward,
        "cross_entropy_backward_": reference_one_pass.cross_entropy_backward_,
        "cross_entropy_reduced": reference_one_pass.cross_entropy_reduced,
        "cross_entropy_one_pass": reference_one_pass.cross_entropy_one_pass,
        "cross_entropy_one_pass_": reference_one_pass.cross_entropy_one_pass_,
        "scale_": reference.scale_,
        "token_stats": by_rows(reference.token_stats),
        "token_stats_backward": by_rows(reference.token_stats_backward, logits=3),
    }


def _gpu() -> Functions:
    from .gpu import launch, scale, token_stats

    return {
        "cross_entropy": launch.cross_entropy,
        "cross_entropy_backward": launch.cross_entropy_backward,
        "cross_entropy_backward_": launch.cross_entropy_backward_,
        "cross_entropy_reduced": launch.cross_entropy_reduced,
        "cross_entropy_one_pass": launch.cross_entropy_one_pass,
        "cross_entropy_one_pass_": launch.cross_entropy_one_pass_,
        "scale_": scale.scale_,
        "token_stats": token_stats.token_stats,
        "token_stats_backward": token_stats.token_stats_backward,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu)
