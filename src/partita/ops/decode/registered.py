"""The registered ops of the decoders. Their results are not differentiable."""

from __future__ import annotations

from functools import partial
from types import ModuleType

from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import one_by_one
from . import reference
from .basecalls import empty_basecalls
from .common import empty_hypotheses, empty_path, empty_posteriors


def _check_lengths(logits: Tensor, input_lengths: Tensor) -> None:
    checks.within("input_lengths", input_lengths, 0, len(logits), "steps")


def _cpu() -> tuple[ModuleType, ...]:
    from .cpu import beam, crf

    return beam, crf


def _gpu() -> tuple[ModuleType, ...]:
    from .gpu import launch, launch_crf

    return launch, launch_crf


_define = partial(register.define, gpu=_gpu, cpu=_cpu, vmap=one_by_one, reference_if_empty=True)
greedy_search = _define(reference.ctc_greedy_search, empty_hypotheses, check=_check_lengths)
beam_search = _define(reference.ctc_beam_search, empty_hypotheses, check=_check_lengths)
crf_path = _define(
    reference.ctc_crf_path,
    lambda scores: (*empty_path(scores), *empty_posteriors(scores)),
    by_identity=("source",),
)
crf_base_posteriors = _define(
    reference.ctc_crf_base_posteriors, lambda marginals: empty_posteriors(marginals)
)
crf_calls = _define(reference.ctc_crf_calls, empty_basecalls)
