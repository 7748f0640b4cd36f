"""The registered ops of the decoders. Their results are not differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime import checks, register
from ...runtime.autograd import one_by_one
from .backends import BACKENDS
from .basecalls import empty_basecalls
from .common import Hypotheses, empty_hypotheses


def _check_lengths(logits: Tensor, input_lengths: Tensor, *_: Any) -> None:
    checks.within("input_lengths", input_lengths, 0, len(logits), "steps")


def _beam_fake(
    logits: Tensor, input_lengths: Tensor, blank: int, beam_width: int, nbest: int, *_: Any
) -> Hypotheses:
    return empty_hypotheses(logits, nbest)


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
crf_beam_search: register.Op = register.define(
    "ctc_crf_beam_search(Tensor scores, Tensor later, Tensor input_lengths, int beam_width,"
    " str backend) -> (Tensor, Tensor)",
    lambda scores, later, *_: (
        scores.new_empty(later.shape[:2], dtype=torch.int64),
        scores.new_empty(scores.shape[:2], dtype=torch.int64),
    ),
    vmap=lambda *batch: one_by_one(crf_beam_search, *batch),
    backends=BACKENDS,
    reference_if_empty=True,
)
crf_calls: register.Op = register.define(
    "ctc_crf_calls(Tensor marginals, Tensor states, Tensor edges, Tensor input_lengths,"
    " int state_len, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda marginals, states, edges, lengths, state_len, *_: empty_basecalls(marginals, state_len),
    vmap=lambda *batch: one_by_one(crf_calls, *batch),
    backends=BACKENDS,
    reference_if_empty=True,
)
