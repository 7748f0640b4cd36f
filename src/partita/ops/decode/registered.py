"""The registered ops of the decoders. Their results are not differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import one_by_one
from .backends import BACKENDS
from .basecalls import empty_basecalls
from .common import Hypotheses, empty_hypotheses, empty_posteriors


def _check_lengths(logits: Tensor, input_lengths: Tensor, *_: Any) -> None:
    checks.within("input_lengths", input_lengths, 0, len(logits), "steps")


def _beam_fake(
    logits: Tensor, input_lengths: Tensor, blank: int, beam_width: int, nbest: int, *_: Any
) -> Hypotheses:
    return empty_hypotheses(logits, nbest)


def _empty_path(scores: Tensor) -> tuple[Tensor, Tensor]:
    T, N = scores.shape[:2]
    return (
        scores.new_empty((T + 1, N), dtype=torch.int64),
        scores.new_empty((T, N), dtype=torch.int64),
    )


greedy_search: register.Op = register.define(
    "ctc_greedy_search(Tensor logits, Tensor input_lengths, int blank, bool from_logits,"
    " str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda logits, *_: empty_hypotheses(logits),
    check=_check_lengths,
    vmap=lambda *batch: one_by_one(greedy_search, *batch),
    backends=BACKENDS,
    reference_if_empty=True,
)
beam_search: register.Op = register.define(
    "ctc_beam_search(Tensor logits, Tensor input_lengths, int blank, int beam_width, int nbest,"
    " int cutoff_top_n, float blank_skip_threshold, bool from_logits, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _beam_fake,
    check=_check_lengths,
    vmap=lambda *batch: one_by_one(beam_search, *batch),
    backends=BACKENDS,
    reference_if_empty=True,
)
crf_path: register.Op = register.define(
    "ctc_crf_path(Tensor scores, Tensor source, Tensor input_lengths, int beam_width, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    lambda scores, *_: (*_empty_path(scores), *empty_posteriors(scores)),
    vmap=lambda *batch: one_by_one(crf_path, *batch),
    backends=BACKENDS,
    reference_if_empty=True,
    by_identity=("source",),
)
crf_base_posteriors: register.Op = register.define(
    "ctc_crf_base_posteriors(Tensor marginals, Tensor input_lengths, str backend)"
    " -> (Tensor, Tensor)",
    lambda marginals, *_: empty_posteriors(marginals),
    vmap=lambda *batch: one_by_one(crf_base_posteriors, *batch),
    backends=BACKENDS,
    reference_if_empty=True,
)
crf_calls: register.Op = register.define(
    "ctc_crf_calls(Tensor base_posteriors, Tensor first_posteriors, Tensor states, Tensor edges,"
    " Tensor input_lengths, int state_len, ScalarType dtype, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda by_base, *rest: empty_basecalls(by_base, *rest[4:6]),
    vmap=lambda *batch: one_by_one(crf_calls, *batch),
    backends=BACKENDS,
    reference_if_empty=True,
)
