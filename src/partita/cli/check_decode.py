"""The decoders that `partita check` runs, against their reference in fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.ctc_crf.api import debruijn_source
from ..ops.decode.api import ctc_beam_search, ctc_greedy_search
from ..ops.decode.crf import ctc_crf_decode
from ..runtime.backend import backend
from ..testing.budget import Error, ulp_error, worst_finite_ulp
from ..testing.memory import poisoned_memory
from .check_torch import paths_in_torch, upcast

BEAM_WIDTH = 8
BASES, STATE_LEN = 4, 3


@dataclass(frozen=True)
class Decoder:
    """One line of the table.

    Fields:
        op: the name of the op.
        decode: maps rows, which are the steps of one sequence, to hypotheses or basecalls.
        scores: the field that has their log-probabilities. All other fields are integers.
        in_torch: computes such scores in plain PyTorch, in the dtype of the rows, given the result.
        edges: the kinds of input.
        dtypes: the dtypes. Half types have equal sums, whose order a rounding decides.
        numba: whether Numba serves the op on the CPU.
    """

    op: str
    decode: Callable[[Tensor], Any]
    scores: str
    in_torch: Callable[[Tensor, Any], Tensor]
    edges: tuple[str, ...] = ("plain", "offset")
    dtypes: tuple[str, ...] = ("fp32",)
    numba: bool = True


def decoder_error(check: Decoder, x: Tensor) -> Error:
    """Return the error of the scores of a decoder.

    Raises:
        ValueError: tokens, steps or lengths are not those of the reference.
    """
    with poisoned_memory():
        found = check.decode(x)
    with backend("reference"):
        truth = check.decode(x.double())
    for name in truth._fields:
        if name != check.scores and not torch.equal(getattr(found, name), getattr(truth, name)):
            raise ValueError(f"{name}: other than in the reference")
    below = x.float() if x.dtype == torch.float64 else x
    own, exact = (check.in_torch(each, truth) for each in (below, below.double()))
    baseline = worst_finite_ulp(own, exact, "tensor")
    result, expected = (getattr(each, check.scores) for each in (found, truth))
    return ulp_error(result, expected, baseline, scale="tensor")


def _best_path_in_torch(x: Tensor, found: Any) -> Tensor:
    return upcast(x).log_softmax(-1).amax(-1).sum()


def _ctc_in_torch(x: Tensor, found: Any) -> Tensor:
    length = found.lengths[0, :1].cpu()
    tokens, steps = found.tokens[0, :1, : int(length)], torch.tensor([len(x)])
    log_probs = upcast(x)[:, None].log_softmax(-1)
    return F.ctc_loss(log_probs, tokens, steps, length, reduction="sum")


def _crf_scores(x: Tensor) -> Tensor:
    """Return rows as the steps of one sequence over k-mers, `[T, 1, C, A]`."""
    return x[:, None, -(BASES**STATE_LEN) * (BASES + 1) :].unflatten(2, (-1, BASES + 1))


def _called(x: Tensor, method: str) -> Any:
    """Return basecalls with probabilities, whose error is that of posteriors."""
    found = ctc_crf_decode(
        _crf_scores(x),
        state_len=STATE_LEN,
        alphabet_size=BASES + 1,
        method=method,
        beam_width=BEAM_WIDTH,
    )
    return found._replace(log_probs=found.log_probs.exp())


def _posteriors_in_torch(x: Tensor, found: Any) -> Tensor:
    scores = _crf_scores(upcast(x)).detach().requires_grad_()
    source = debruijn_source(BASES, STATE_LEN).to(x.device)
    with torch.enable_grad():
        logz = paths_in_torch(scores, source, lambda terms: terms.logsumexp(-1))
        return torch.autograd.grad(logz.sum(), scores)[0]


DECODERS = (
    Decoder(
        "ctc_greedy_search",
        lambda x: ctc_greedy_search(x[:, None], from_logits=True),
        "scores",
        _best_path_in_torch,
    ),
    Decoder(
        "ctc_beam_search",
        lambda x: ctc_beam_search(
            x[:, None], beam_width=BEAM_WIDTH, nbest=BEAM_WIDTH, from_logits=True
        ),
        "scores",
        _ctc_in_torch,
    ),
    *(
        Decoder(
            f"ctc_crf_decode, {method}",
            partial(_called, method=method),
            "log_probs",
            _posteriors_in_torch,
            ("plain",),
        )
        for method in ("viterbi", "posterior", "beam")
    ),
)
