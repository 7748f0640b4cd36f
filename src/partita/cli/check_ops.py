"""The ops that `partita check` runs, each with its counterpart in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.chain.api import Chain, logz
from ..ops.cross_entropy.api import cross_entropy, token_stats
from ..ops.ctc.api import ctc_loss
from ..ops.ctc_crf.api import ctc_crf_loss, debruijn_source
from ..ops.divergence.api import divergence, topk_divergence
from ..ops.linear_chain.api import linear_chain
from ..ops.logprobs.api import logprobs, topk_logprobs
from ..ops.semi_markov.api import semi_markov_chain
from ..ops.softmax.api import log_softmax, logsumexp, softmax
from ..primitives.semiring import Max
from ..testing.budget import Scale
from .check_linear import LINEAR, LOG_PROBABILITY, PROBABILITY_GRADIENT, SCALES
from .check_rnnt import LINEAR_RNNT, RNNT
from .check_torch import (
    divergence_in_torch,
    pairs_in_torch,
    paths_in_torch,
    token_stats_in_torch,
    topk_divergence_in_torch,
    upcast,
)
from .console import DTYPES

EDGES = ("plain", "offset", "leading_inf", "transposed", "framed")
ROWS, COLUMNS = 19, 781  # neither is a multiple of a block
LONG_ROWS, LONG_COLUMNS = 3, 50_257
IGNORED = 2  # a label
STATE_LEN, ALPHABET = 3, 5  # k-mers of three bases; four bases and the blank
TARGET = (1, 3, 2, 2, 4, 1)

Function = Callable[..., Any]


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Fields:
        op: the name of the op.
        ours, theirs: functions of the logits and the results of `others`; theirs is PyTorch in the
            dtype of the logits.
        others: computes the arguments after the logits.
        scale, grad_scale: the scales of `ulp_error` for results and gradients; `element` where
            nothing cancels.
        sizes: pairs of rows and columns.
        edges: the kinds of input at the first size.
        dtypes: fewer of them where compiling for each takes long.
        numba: whether Numba serves the op on the CPU.
    """

    op: str
    ours: Function
    theirs: Function
    others: Callable[[Tensor], tuple[Any, ...]]
    scale: Scale
    grad_scale: Scale
    sizes: tuple[tuple[int, int], ...] = ((ROWS, COLUMNS), (LONG_ROWS, LONG_COLUMNS))
    edges: tuple[str, ...] = EDGES
    dtypes: tuple[str, ...] = tuple(DTYPES)
    numba: bool = False


def labels(x: Tensor) -> Tensor:
    """Return labels among the last columns, which are finite in all inputs."""
    return (
        torch.arange(x.shape[0], device=x.device) % (x.shape[1] // 8) + x.shape[1] - x.shape[1] // 8
    )


def _some_ignored(x: Tensor) -> Tensor:
    return labels(x).masked_fill(torch.arange(x.shape[0], device=x.device) % 3 == 1, IGNORED)


def _probabilities(x: Tensor) -> Tensor:
    """Return probabilities of the same columns, which are 0 where the logits may be -inf."""
    one_hot = F.one_hot(labels(x), x.shape[1])
    return (0.75 * one_hot + 0.25 * one_hot.roll(1, 0)).to(x.dtype)


def _weight(x: Tensor) -> Tensor:
    """Return class weights in eighths, which all dtypes represent exactly."""
    return (torch.arange(x.shape[1], device=x.device) % 8 + 1).to(x.dtype) / 8


def _everything(x: Tensor, target: Tensor) -> Tensor:
    """Compute the loss with class weights, smoothing, ignored labels, soft-capping and z-loss."""
    capped = 30 * torch.tanh(x / 30)
    valid = target != IGNORED
    z = 1e-3 * torch.where(valid, capped.logsumexp(-1), 0).square().sum() / valid.sum()
    return (
        F.cross_entropy(capped, target, _weight(x), ignore_index=IGNORED, label_smoothing=0.1) + z
    )


def _some_classes(x: Tensor) -> Tensor:
    """Return four classes of each row, of which two may be the same."""
    first = labels(x).clamp(min=0)
    return torch.stack([first, (first + 1) % x.shape[-1], first // 2, first], -1)


def _chain_scores(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows as steps of one chain of 260 states.

    A state is entered from itself and from its two neighbours.
    """
    states = torch.arange(x.shape[1] // 3, device=x.device)
    source = (states[:, None] + torch.arange(-1, 2, device=x.device)) % len(states)
    return x[:, None, : source.numel()].unflatten(2, source.shape), source


def _logz(x: Tensor) -> Tensor:
    return logz(*_chain_scores(x))


def _best(x: Tensor) -> Tensor:
    return logz(*_chain_scores(x), semiring=Max)


def _tags(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return 40 columns of the rows as the emissions of one sequence, and transitions."""
    columns = torch.arange(40, device=x.device)
    transitions = ((columns[:, None] * 7 + columns * 3) % 11).to(x.dtype) / 4
    return x[:, None, -40:], transitions


def _linear_chain(x: Tensor) -> Tensor:
    return linear_chain(*_tags(x)).logz()


def _linear_chain_in_torch(x: Tensor) -> Tensor:
    emissions, transitions = _tags(upcast(x))
    alpha = emissions[0]
    for row in emissions[1:]:
        alpha = (alpha[..., None] + transitions).logsumexp(1) + row
    return alpha.logsumexp(-1)


def _segments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of a semi-Markov chain of 12 states and segments of up to 7 steps."""
    emissions, transitions = _tags(x)
    return emissions[..., :12], transitions[:12, :12], transitions[12:19, :12]


def _semi_markov(x: Tensor) -> Tensor:
    return semi_markov_chain(*_segments(x)).logz()


def _semi_markov_in_torch(x: Tensor) -> Tensor:
    emissions, transitions, durations = _segments(upcast(x))
    opened, ages = torch.zeros_like(emissions[0]), emissions[:0]
    for row in emissions:
        ages = torch.cat([opened[None], ages[: len(durations) - 1]]) + row
        closed = (ages + durations[: len(ages), None]).logsumexp(0)
        opened = (closed[..., None] + transitions).logsumexp(1)
    return closed.logsumexp(-1)


def _mean(x: Tensor) -> Tensor:
    """Compute the expectation of one number for each edge, the same at all steps."""
    scores, source = _chain_scores(x)
    return Chain(scores, source).expectation(_numbers(source, x.dtype))


def _numbers(source: Tensor, dtype: torch.dtype) -> Tensor:
    return (
        (torch.arange(source.numel(), device=source.device) % 7)
        .to(dtype)
        .unflatten(0, source.shape)
    )


def _in_torch(x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    return paths_in_torch(*_chain_scores(upcast(x)), total)


def _mean_in_torch(x: Tensor) -> Tensor:
    scores, source = _chain_scores(upcast(x))
    return pairs_in_torch(scores, source, _numbers(source, x.dtype).expand_as(scores))[1]


def _entropy(x: Tensor) -> Tensor:
    return Chain(*_chain_scores(x)).entropy()


def _entropy_in_torch(x: Tensor) -> Tensor:
    scores, source = _chain_scores(upcast(x))
    log_z, mean = pairs_in_torch(scores, source, scores)
    return log_z - mean


def _ctc_arguments(x: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Return a target of two labels for rows that are the steps of one sequence."""
    return labels(x)[:2][None], [x.shape[0]], [2]


def _ctc(x: Tensor, *arguments: Any) -> Tensor:
    return ctc_loss(x[:, None], *arguments, from_logits=True)


def _ctc_in_torch(x: Tensor, *arguments: Any) -> Tensor:
    return F.ctc_loss(upcast(x)[:, None].log_softmax(-1), *arguments)


def _crf_scores(x: Tensor) -> Tensor:
    """Return the rows as steps of one sequence over k-mers, `[T, 1, C, A]`."""
    size = (ALPHABET - 1) ** STATE_LEN * ALPHABET
    return x[:, None, :size].unflatten(2, (-1, ALPHABET))


def _crf(x: Tensor) -> Tensor:
    return ctc_crf_loss(
        _crf_scores(x),
        torch.tensor([TARGET], device=x.device),
        [len(TARGET)],
        state_len=STATE_LEN,
        alphabet_size=ALPHABET,
        reduction="none",
    )


def _crf_in_torch(x: Tensor) -> Tensor:
    """Compute log Z of all paths minus log Z of the paths that emit the target.

    In the lattice of the target, a k-mer stays or is entered from the one before it.
    """
    scores, bases = _crf_scores(upcast(x)), ALPHABET - 1
    kmers = [
        sum((base - 1) * bases ** (STATE_LEN - 1 - i) for i, base in enumerate(window))
        for window in (TARGET[at : at + STATE_LEN] for at in range(len(TARGET) - STATE_LEN + 1))
    ]
    stays, moves = scores[:, 0, kmers, 0], scores[:, 0, kmers[1:], TARGET[: len(kmers) - 1]]
    # -1e5 adds nothing to a sum, and -inf would make the gradients NaN.
    alpha = torch.full((len(kmers),), -1e5, dtype=scores.dtype, device=x.device)
    alpha[0] = 0
    for stay, move in zip(stays, moves, strict=True):
        entered = torch.logaddexp(alpha[1:] + stay[1:], alpha[:-1] + move)
        alpha = torch.cat([alpha[:1] + stay[:1], entered])
    source = debruijn_source(bases, STATE_LEN).to(x.device)
    return paths_in_torch(scores, source, lambda terms: terms.logsumexp(-1)) - alpha[-1]


CHECKS = (
    Check("softmax", softmax, lambda x: torch.softmax(x, -1), lambda x: (), "element", "tensor"),
    Check(
        "log_softmax", log_softmax, lambda x: torch.log_softmax(x, -1), lambda x: (), -1, "tensor"
    ),
    Check(
        "logsumexp", logsumexp, lambda x: torch.logsumexp(x, -1), lambda x: (), "tensor", "element"
    ),
    Check(
        "cross_entropy", cross_entropy, F.cross_entropy, lambda x: (labels(x),), "tensor", "element"
    ),
    Check(
        "cross_entropy, per row",
        lambda x, target: cross_entropy(x, target, reduction="none", ignore_index=IGNORED),
        lambda x, target: F.cross_entropy(x, target, reduction="none", ignore_index=IGNORED),
        lambda x: (_some_ignored(x),),
        "tensor",
        "element",
    ),
    Check(
        "cross_entropy, all options",
        lambda x, target: cross_entropy(
            x,
            target,
            _weight(x),
            ignore_index=IGNORED,
            label_smoothing=0.1,
            softcap=30.0,
            z_loss=1e-3,
        ),
        _everything,
        lambda x: (_some_ignored(x),),
        "tensor",
        -1,
        ((ROWS, COLUMNS),),
    ),
    Check(
        "cross_entropy, probabilities",
        lambda x, target: cross_entropy(x, target, _weight(x)),
        lambda x, target: F.cross_entropy(x, target, _weight(x)),
        lambda x: (_probabilities(x),),
        "tensor",
        -1,
        ((ROWS, COLUMNS),),
        ("plain", "offset", "transposed"),  # PyTorch's loss is NaN where 0 meets -inf
    ),
    Check(
        "cross_entropy, in place",
        lambda x, target: cross_entropy(x.clone(), target, inplace=True),
        F.cross_entropy,
        lambda x: (labels(x),),
        "tensor",
        "element",
    ),
    Check(
        "token_stats",
        lambda x, target: token_stats(x, target, temperature=0.75),
        token_stats_in_torch,
        lambda x: (labels(x),),
        "tensor",
        "tensor",
    ),
    *(
        Check(
            f"divergence, beta {beta}",
            lambda x, beta=beta: divergence(x, x.flip(-1), beta=beta, reduction="none"),
            lambda x, beta=beta: divergence_in_torch(x, beta),
            lambda x: (),
            "tensor",
            "tensor",
            ((ROWS, COLUMNS),),
            ("plain", "offset", "transposed"),  # where classes are masked it may be infinite
        )
        for beta in (0.0, 0.5, 1.0)
    ),
    Check(
        "topk_divergence",
        lambda x: topk_divergence(x, topk_logprobs(x.detach().flip(-1), 7), reduction="none"),
        lambda x: topk_divergence_in_torch(x, 7, x.detach().flip(-1)),
        lambda x: (),
        LOG_PROBABILITY,
        PROBABILITY_GRADIENT,
        ((ROWS, COLUMNS),),
        ("plain", "offset", "transposed"),
        ("fp32", "fp64"),
    ),
    Check(
        "topk_logprobs",
        lambda x: topk_logprobs(x, 7, temperature=0.75).logprobs,
        lambda x: (upcast(x) / 0.75).log_softmax(-1).topk(7).values,
        lambda x: (),
        "tensor",
        "tensor",
        edges=("plain", "offset", "transposed"),
        dtypes=("fp32", "fp64"),  # PyTorch takes any of equal logits, which half types have
    ),
    Check(
        "logprobs",
        lambda x, ids: logprobs(x, ids, temperature=0.75),
        lambda x, ids: (upcast(x) / 0.75).log_softmax(-1).gather(-1, ids),
        lambda x: (_some_classes(x),),
        "tensor",
        "tensor",
    ),
    *(
        Check(
            op,
            ours,
            theirs,
            lambda x: (labels(x),),
            *SCALES.get(op, ("tensor", "tensor")),
            ((ROWS, COLUMNS),),
            ("plain",),
            dtypes,
        )
        for op, ours, theirs, dtypes in (*LINEAR, *LINEAR_RNNT)
    ),
    Check(
        "ctc_loss",
        _ctc,
        _ctc_in_torch,
        _ctc_arguments,
        "tensor",
        "tensor",
        ((ROWS, COLUMNS),),
        ("plain", "offset"),
        ("bf16", "fp32"),
        True,
    ),
    *(
        Check(
            op,
            ours,
            theirs,
            lambda x: (),
            "tensor",
            "tensor",
            ((ROWS, COLUMNS),),
            ("plain", "offset"),
            tuple(dtypes),
            True,
        )
        for op, ours, theirs, *dtypes in (
            (
                "logz",
                _logz,
                partial(_in_torch, total=lambda terms: terms.logsumexp(-1)),
                "fp32",
                "fp64",
            ),
            (
                "viterbi, best score",
                _best,
                partial(_in_torch, total=lambda terms: terms.amax(-1)),
                "fp32",
                "fp64",
            ),
            (
                "expectation",
                _mean,
                _mean_in_torch,
                "fp32",
            ),  # in fp64 an offset costs both of them many ulp
            ("entropy", _entropy, _entropy_in_torch, "fp32"),
            ("linear_chain", _linear_chain, _linear_chain_in_torch, "fp32"),
            ("semi_markov_chain", _semi_markov, _semi_markov_in_torch, "fp32"),
            ("ctc_crf_loss", _crf, _crf_in_torch, "fp32"),
            *RNNT,
        )
    ),
)
