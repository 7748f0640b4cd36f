"""Partition functions for PyTorch: log Z and its gradient, fused, exact and fast."""

from __future__ import annotations

import importlib
from types import ModuleType

from torch.serialization import add_safe_globals as _add_safe_globals

from .ops.chain.api import Chain, ChainSample, ViterbiPath, logz
from .ops.chain.edges import dense_source, edges_from_states
from .ops.contrastive.api import contrastive_loss
from .ops.cross_entropy.api import TokenStats, cross_entropy, token_stats
from .ops.ctc.api import CTCAlignment, TokenSpans, ctc_align, ctc_loss, word_spans
from .ops.ctc_crf.api import ctc_crf_loss, debruijn_source
from .ops.decode.api import ctc_beam_search, ctc_crf_decode, ctc_greedy_search
from .ops.decode.basecalls import Basecalls
from .ops.decode.common import Hypotheses
from .ops.decode.ctc_decoder import CTCDecoder, CTCStream, PartialText, Transcripts
from .ops.decode.language_model import NgramLM
from .ops.decode.phrase_boost import PhraseBoost
from .ops.decode.stitch import stitch
from .ops.decode.transducer import rnnt_beam_search, rnnt_greedy_search
from .ops.decode.transducer_common import Event as _TransducerEvents
from .ops.decode.transducer_common import TransducerBeamState as _TransducerBeamState
from .ops.decode.transducer_common import TransducerHypotheses
from .ops.decode.transducer_common import TransducerState as _TransducerState
from .ops.divergence.api import distillation_loss, divergence, topk_divergence
from .ops.divergence.common import Distillation
from .ops.linear_chain.api import (
    ExpectedCounts,
    LinearChain,
    LinearPath,
    LinearSample,
    linear_chain,
)
from .ops.linear_heads.api import linear_cross_entropy, linear_token_stats
from .ops.linear_heads.divergence import (
    linear_distillation_loss,
    linear_divergence,
    linear_topk_divergence,
)
from .ops.linear_heads.logprobs import linear_logprobs, linear_topk_logprobs
from .ops.linear_heads.low_rank import LoRA
from .ops.linear_heads.plan import MemoryPlan as _MemoryPlan
from .ops.linear_heads.plan import linear_cross_entropy_plan
from .ops.linear_heads.support import linear_support_stats
from .ops.linear_heads.truncated import linear_truncated_stats
from .ops.logprobs.api import logprobs, topk_logprobs
from .ops.logprobs.common import TopK
from .ops.rnnt.api import RNNTAlignment, rnnt_align, rnnt_loss, tdt_align, tdt_loss
from .ops.rnnt.linear import linear_rnnt_loss, linear_tdt_loss
from .ops.rnnt.plan import RNNTPlan as _RNNTPlan
from .ops.rnnt.plan import linear_rnnt_plan
from .ops.semi_markov.api import (
    SemiMarkovChain,
    SemiMarkovCounts,
    SemiMarkovPath,
    SemiMarkovSample,
    semi_markov_chain,
)
from .ops.softmax.api import log_softmax, logsumexp, softmax
from .ops.support.api import support_stats
from .ops.support.common import SupportStats
from .ops.truncated.api import truncated_stats
from .ops.truncated.common import TruncatedStats
from .primitives.semiring import Log, Max, Semiring
from .runtime.backend import backend
from .runtime.invariance import batch_invariant

__version__ = "0.2.0"

__all__ = [
    "Basecalls",
    "CTCAlignment",
    "CTCDecoder",
    "CTCStream",
    "Chain",
    "ChainSample",
    "Distillation",
    "ExpectedCounts",
    "Hypotheses",
    "LinearChain",
    "LinearPath",
    "LinearSample",
    "LoRA",
    "Log",
    "Max",
    "NgramLM",
    "PartialText",
    "PhraseBoost",
    "RNNTAlignment",
    "SemiMarkovChain",
    "SemiMarkovCounts",
    "SemiMarkovPath",
    "SemiMarkovSample",
    "Semiring",
    "SupportStats",
    "TokenSpans",
    "TokenStats",
    "TopK",
    "Transcripts",
    "TransducerHypotheses",
    "TruncatedStats",
    "ViterbiPath",
    "backend",
    "batch_invariant",
    "contrastive_loss",
    "cross_entropy",
    "ctc_align",
    "ctc_beam_search",
    "ctc_crf_decode",
    "ctc_crf_loss",
    "ctc_greedy_search",
    "ctc_loss",
    "debruijn_source",
    "dense_source",
    "distillation_loss",
    "divergence",
    "edges_from_states",
    "hmm",
    "integrations",
    "linear_chain",
    "linear_cross_entropy",
    "linear_cross_entropy_plan",
    "linear_distillation_loss",
    "linear_divergence",
    "linear_logprobs",
    "linear_rnnt_loss",
    "linear_rnnt_plan",
    "linear_support_stats",
    "linear_tdt_loss",
    "linear_token_stats",
    "linear_topk_divergence",
    "linear_topk_logprobs",
    "linear_truncated_stats",
    "log_softmax",
    "logprobs",
    "logsumexp",
    "logz",
    "nn",
    "parallel",
    "rnnt_align",
    "rnnt_beam_search",
    "rnnt_greedy_search",
    "rnnt_loss",
    "semi_markov_chain",
    "softmax",
    "stitch",
    "support_stats",
    "tdt_align",
    "tdt_loss",
    "testing",
    "token_stats",
    "topk_divergence",
    "topk_logprobs",
    "truncated_stats",
    "word_spans",
]

# Users meet these objects as `partita.X`, so this is what error messages and pickles name.
for _name in __all__:
    _object = globals().get(_name)
    if callable(_object):
        _object.__module__ = __name__

# By default `torch.load` reads the classes that it knows.
_classes = [_object for _object in map(globals().get, __all__) if isinstance(_object, type)]
_add_safe_globals(
    [
        *(_object for _object in _classes if issubclass(_object, tuple)),
        *(Chain, LinearChain, SemiMarkovChain, _MemoryPlan, _RNNTPlan),
        *(_TransducerState, _TransducerBeamState, _TransducerEvents),
    ]
)

_modules = ("hmm", "integrations", "nn", "parallel", "testing")


def __getattr__(name: str) -> ModuleType:
    if name in _modules:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules})
