"""The registered ops of the decoders. Their results are not differentiable."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import one_by_one
from . import reference
from .basecalls import empty_basecalls
from .common import Hypotheses, empty_hypotheses, empty_posteriors


def _check_lengths(logits: Tensor, input_lengths: Tensor) -> None:
    checks.within("input_lengths", input_lengths, 0, len(logits), "steps")


def _beam_fake(logits: Tensor, nbest: int) -> Hypotheses:
    return empty_hypotheses(logits, nbest)


def _empty_path(scores: Tensor) -> tuple[Tensor, Tensor]:
    T, N = scores.shape[:2]
    return (
        scores.new_empty((T + 1, N), dtype=torch.int64),
        scores.new_empty((T, N), dtype=torch.int64),
    )


def _cpu() -> tuple[ModuleType, ...]:
    from .cpu import beam, crf_path, greedy

    return beam, crf_path, greedy


def _gpu_crf() -> ModuleType:
    from .gpu import launch_crf

    return launch_crf


def _gpu_greedy() -> ModuleType:
    from .gpu import launch_greedy

    return launch_greedy


def _gpu_launch() -> ModuleType:
    from .gpu import launch

    return launch


greedy_search = register.define(
    reference.ctc_greedy_search,
    lambda logits: empty_hypotheses(logits),
    gpu=_gpu_greedy,
    cpu=_cpu,
    check=_check_lengths,
    vmap=one_by_one,
    reference_if_empty=True,
)
beam_search = register.define(
    reference.ctc_beam_search,
    _beam_fake,
    gpu=_gpu_launch,
    cpu=_cpu,
    check=_check_lengths,
    vmap=one_by_one,
    reference_if_empty=True,
)
crf_path = register.define(
    reference.ctc_crf_path,
    lambda scores: (*_empty_path(scores), *empty_posteriors(scores)),
    gpu=_gpu_crf,
    cpu=_cpu,
    vmap=one_by_one,
    reference_if_empty=True,
    by_identity=("source",),
)
crf_base_posteriors = register.define(
    reference.ctc_crf_base_posteriors,
    lambda marginals: empty_posteriors(marginals),
    gpu=_gpu_crf,
    cpu=_cpu,
    vmap=one_by_one,
    reference_if_empty=True,
)
crf_calls = register.define(
    reference.ctc_crf_calls,
    empty_basecalls,
    gpu=_gpu_crf,
    cpu=_cpu,
    vmap=one_by_one,
    reference_if_empty=True,
)
