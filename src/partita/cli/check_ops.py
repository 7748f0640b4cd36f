"""What `partita check` runs: ops beside PyTorch's way of saying it."""

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
from ..ops.linear_heads.api import linear_cross_entropy, linear_token_stats
from ..ops.softmax.api import log_softmax, logsumexp, softmax
from ..primitives.semiring import Max
from ..testing.budget import Scale
from .console import DTYPES

EDGES = ("plain", "offset", "leading_inf", "transposed", "framed")
ROWS, COLUMNS = 19, 781  # neither is a multiple of a block
WIDE_ROWS, WIDE_COLUMNS = 3, 50_257
IGNORED = 2  # a label
LEAN = 25_000  # bytes: too few for all logits of these rows
BASES, SPELT = (3, 5), (1, 3, 2, 2, 4, 1)  # three to a k-mer, four and the blank; a target

Function = Callable[..., Any]


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Fields:
        op: its name.
        ours, theirs: from the logits and what `others` gives; theirs is PyTorch, in the dtype of the logits.
        others: from the logits, the arguments that follow them.
        scale, grad_scale: of `ulp_error`, for the results and the gradients: `element` where nothing cancels.
        sizes: rows and columns.
        edges: the inputs at the first of these.
        dtypes: some of them, where compiling for each takes long.
        numba: whether Numba serves it on the CPU.
    """

    op: str
    ours: Function
    theirs: Function
    others: Callable[[Tensor], tuple[Any, ...]]
    scale: Scale
    grad_scale: Scale
    sizes: tuple[tuple[int, int], ...] = ((ROWS, COLUMNS), (WIDE_ROWS, WIDE_COLUMNS))
    edges: tuple[str, ...] = EDGES
    dtypes: tuple[str, ...] = tuple(DTYPES)
    numba: bool = False


def labels(x: Tensor) -> Tensor:
    """Labels among the last columns, which are finite in every input."""
    return (
        torch.arange(x.shape[0], device=x.device) % (x.shape[1] // 8) + x.shape[1] - x.shape[1] // 8
    )


def _some_ignored(x: Tensor) -> Tensor:
    return labels(x).masked_fill(torch.arange(x.shape[0], device=x.device) % 3 == 1, IGNORED)


def _probabilities(x: Tensor) -> Tensor:
    """Of the same columns alone: 0 where the logits may be -inf."""
    one_hot = F.one_hot(labels(x), x.shape[1])
    return (0.75 * one_hot + 0.25 * one_hot.roll(1, 0)).to(x.dtype)


def _weight(x: Tensor) -> Tensor:
    """Of the classes; eighths, which every dtype holds."""
    return (torch.arange(x.shape[1], device=x.device) % 8 + 1).to(x.dtype) / 8


def _everything(x: Tensor, target: Tensor) -> Tensor:
    """Class weights, smoothing, ignored labels, soft-capping and z-loss at once."""
    capped = 30 * torch.tanh(x / 30)
    kept = target != IGNORED
    z = 1e-3 * torch.where(kept, capped.logsumexp(-1), 0).square().sum() / kept.sum()
    return (
        F.cross_entropy(capped, target, _weight(x), ignore_index=IGNORED, label_smoothing=0.1) + z
    )


def _token_stats(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    x = _wide(x) / 0.75
    logp = x.log_softmax(-1)
    p = logp.exp()
    entropy = -(p * logp.masked_fill(p == 0, 0)).sum(-1)
    return logp.gather(-1, target.unsqueeze(-1)).squeeze(-1), x.logsumexp(-1), entropy


def _chain_scores(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rows as steps of one chain of 260 states, each entered from itself and its neighbours."""
    states = torch.arange(x.shape[1] // 3, device=x.device)
    source = (states[:, None] + torch.arange(-1, 2, device=x.device)) % len(states)
    return x[:, None, : source.numel()].unflatten(2, source.shape), source


def _logz(x: Tensor) -> Tensor:
    return logz(*_chain_scores(x))


def _best(x: Tensor) -> Tensor:
    return logz(*_chain_scores(x), semiring=Max)


def _mean(x: Tensor) -> Tensor:
    """Of a number for each edge, the same at every step."""
    scores, source = _chain_scores(x)
    return Chain(scores, source).expectation(_numbers(source, x.dtype))


def _numbers(source: Tensor, dtype: torch.dtype) -> Tensor:
    return (
        (torch.arange(source.numel(), device=source.device) % 7)
        .to(dtype)
        .unflatten(0, source.shape)
    )


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _paths_in_torch(scores: Tensor, source: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """The sum over all paths, or the best score."""
    alpha = torch.zeros_like(scores[0, :, :, 0])
    for step in scores:
        alpha = total(step + alpha[:, source])
    return total(alpha)


def _in_torch(x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    return _paths_in_torch(*_chain_scores(_wide(x)), total)


def _pairs_in_torch(scores: Tensor, source: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """log Z, and the mean of the sum of a path's values, which each step has its own of."""
    alpha, mean = torch.zeros(2, *scores.shape[1:3], dtype=scores.dtype, device=scores.device)
    for step, value in zip(scores, values, strict=True):
        terms = step + alpha[:, source]
        mean = (terms.softmax(-1) * (value + mean[:, source])).sum(-1)
        alpha = terms.logsumexp(-1)
    return alpha.logsumexp(-1), (alpha.softmax(-1) * mean).sum(-1)


def _mean_in_torch(x: Tensor) -> Tensor:
    scores, source = _chain_scores(_wide(x))
    return _pairs_in_torch(scores, source, _numbers(source, x.dtype).expand_as(scores))[1]


def _entropy(x: Tensor) -> Tensor:
    return Chain(*_chain_scores(x)).entropy()


def _entropy_in_torch(x: Tensor) -> Tensor:
    scores, source = _chain_scores(_wide(x))
    log_z, mean = _pairs_in_torch(scores, source, scores)
    return log_z - mean


def _matrix(x: Tensor) -> Tensor:
    """For rows that are hidden states: as many classes as these have elements."""
    size = x.shape[1]
    return (
        torch.arange(size * size, device=x.device, dtype=torch.float64)
        .sin()
        .unflatten(0, (size, size))
        / 16
    ).to(x.dtype)


def _linear_in_torch(x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, _matrix(x)), target)


def _linear_stats_in_torch(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return _token_stats(F.linear(x, _matrix(x)), target)


def _ctc_arguments(x: Tensor) -> tuple[Tensor, list[int], list[int]]:
    """Two labels of the row's target, for rows that are the steps of one sequence."""
    return labels(x)[:2][None], [x.shape[0]], [2]


def _ctc(x: Tensor, *arguments: Any) -> Tensor:
    return ctc_loss(x[:, None], *arguments, from_logits=True)


def _ctc_in_torch(x: Tensor, *arguments: Any) -> Tensor:
    return F.ctc_loss(_wide(x)[:, None].log_softmax(-1), *arguments)


def _crf_scores(x: Tensor) -> Tensor:
    """The rows as steps of one sequence over k-mers, `[T, 1, C, A]`."""
    kmer, alphabet = BASES
    return x[:, None, : (alphabet - 1) ** kmer * alphabet].unflatten(2, (-1, alphabet))


def _crf(x: Tensor) -> Tensor:
    target = torch.tensor([SPELT], device=x.device)
    return ctc_crf_loss(
        _crf_scores(x),
        target,
        [len(SPELT)],
        state_len=BASES[0],
        alphabet_size=BASES[1],
        reduction="none",
    )


def _crf_in_torch(x: Tensor) -> Tensor:
    """All paths through the k-mers, less those that spell the target: each of its k-mers stays, or is entered from the one before it."""
    scores, (size, alphabet) = _crf_scores(_wide(x)), BASES
    kmers = [
        sum(
            (base - 1) * (alphabet - 1) ** (size - 1 - i)
            for i, base in enumerate(SPELT[at : at + size])
        )
        for at in range(len(SPELT) - size + 1)
    ]
    stays, moves = scores[:, 0, kmers, 0], scores[:, 0, kmers[1:], SPELT[: len(kmers) - 1]]
    spelt = torch.full(
        (len(kmers),), -1e5, dtype=scores.dtype, device=x.device
    )  # so little that it adds nothing; -inf would make gradients NaN
    spelt[0] = 0
    for stay, move in zip(stays, moves, strict=True):
        spelt = torch.cat(
            [spelt[:1] + stay[:1], torch.logaddexp(spelt[1:] + stay[1:], spelt[:-1] + move)]
        )
    return (
        _paths_in_torch(
            scores,
            debruijn_source(alphabet - 1, size).to(x.device),
            lambda terms: terms.logsumexp(-1),
        )
        - spelt[-1]
    )


LINEAR: tuple[tuple[str, Function, Function, tuple[str, ...]], ...] = (
    (
        "linear_cross_entropy",
        lambda x, t: linear_cross_entropy(x, _matrix(x), t),
        _linear_in_torch,
        tuple(DTYPES),
    ),
    (
        "linear_cross_entropy, lean",
        lambda x, t: linear_cross_entropy(x, _matrix(x), t, memory_budget=LEAN),
        _linear_in_torch,
        ("fp32", "fp64"),
    ),
    (
        "linear_token_stats",
        lambda x, t: linear_token_stats(x, _matrix(x), t, temperature=0.75),
        _linear_stats_in_torch,
        tuple(DTYPES),
    ),
)
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
        _token_stats,
        lambda x: (labels(x),),
        "tensor",
        "tensor",
    ),
    *(
        Check(
            op,
            ours,
            theirs,
            lambda x: (labels(x),),
            "tensor",
            "tensor",
            ((ROWS, COLUMNS),),
            ("plain",),
            dtypes,
        )
        for op, ours, theirs, dtypes in LINEAR
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
            ("ctc_crf_loss", _crf, _crf_in_torch, "fp32"),
        )
    ),
)
