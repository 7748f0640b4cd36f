"""The functions that serve the ops of log-probabilities on each backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...primitives.rows import by_rows
from ...runtime.backend import Backends

Functions = Mapping[str, Callable[..., Any]]


def _reference() -> Functions:
    from . import reference

    return {
        "logprobs": by_rows(reference.logprobs),
        "logprobs_backward": by_rows(reference.logprobs_backward, logits=1),
        "topk_logprobs": by_rows(reference.topk_logprobs),
    }


def _gpu() -> Functions:
    from .gpu import launch, launch_topk

    return {
        "logprobs": launch.logprobs,
        "logprobs_backward": launch.logprobs_backward,
        "topk_logprobs": launch_topk.topk_logprobs,
    }


BACKENDS = Backends(reference=_reference, gpu=_gpu)
