"""Small calls of public functions with a size that varies: rows, sequences, steps or labels."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import partita
from partita import TokenStats, TopK

WEIGHT, MATRIX = torch.randn(7, 4), torch.randn(3, 3)


class SizedCall(NamedTuple):
    """A function of tensors, and the tensors for each size."""

    function: Callable[..., Any]
    tensors: Callable[[int], tuple[Tensor, ...]]


def x(*shape: int) -> Tensor:
    return torch.randn(*shape)


def y(*shape: int) -> Tensor:
    return torch.randint(1, 3, shape)


def lengths(number: int, *values: int) -> tuple[Tensor, ...]:
    return tuple(torch.full((number,), value) for value in values)


def topk(n: int) -> TopK:
    return TopK(*(field.detach() for field in partita.topk_logprobs(x(n, 7), 3)))


def differentiable(stats: TokenStats) -> tuple[Tensor, ...]:
    return stats[:3]


def linear_divergence(**options: Any) -> SizedCall:
    return SizedCall(
        lambda h, w, g: partita.linear_divergence(h, w, g, w.detach(), **options),
        lambda n: (x(n, 4), WEIGHT, x(n, 4)),
    )


def linear_cross_entropy(**options: Any) -> SizedCall:
    return SizedCall(
        lambda h, w, t: partita.linear_cross_entropy(h, w, t, **options),
        lambda n: (x(n, 4), WEIGHT, y(n)),
    )


CALLS = {
    "softmax": SizedCall(partita.softmax, lambda n: (x(n, 7),)),
    "logsumexp": SizedCall(lambda a: partita.logsumexp(a, (0, 2)), lambda n: (x(n, 7, 2),)),
    "cross_entropy": SizedCall(partita.cross_entropy, lambda n: (x(n, 7), y(n))),
    "cross_entropy, pixels": SizedCall(partita.cross_entropy, lambda n: (x(2, 7, n), y(2, n))),
    "cross_entropy, probabilities": SizedCall(
        lambda a, p: partita.cross_entropy(a, p.detach().softmax(1)), lambda n: (x(n, 7), x(n, 7))
    ),
    "token_stats": SizedCall(
        lambda a, t: differentiable(partita.token_stats(a, t)), lambda n: (x(n, 7), y(n))
    ),
    "logprobs": SizedCall(partita.logprobs, lambda n: (x(n, 7), y(n, 2))),
    "topk_logprobs": SizedCall(lambda a: partita.topk_logprobs(a, 2), lambda n: (x(n, 7),)),
    "divergence": SizedCall(
        lambda a, b: partita.divergence(a, b, beta=0.5), lambda n: (x(n, 7), x(n, 7))
    ),
    "topk_divergence": SizedCall(
        lambda a, *t: partita.topk_divergence(a, TopK(*t)), lambda n: (x(n, 7), *topk(n))
    ),
    "linear_cross_entropy": linear_cross_entropy(),
    "linear_cross_entropy, none": linear_cross_entropy(reduction="none"),
    "linear_cross_entropy, budget": linear_cross_entropy(memory_budget=2**20),
    "linear_token_stats": SizedCall(
        lambda h, w, t: differentiable(partita.linear_token_stats(h, w, t)),
        lambda n: (x(n, 4), WEIGHT, y(n)),
    ),
    "linear_logprobs": SizedCall(partita.linear_logprobs, lambda n: (x(n, 4), WEIGHT, y(n, 2))),
    "linear_topk_logprobs": SizedCall(
        lambda h, w: partita.linear_topk_logprobs(h, w, 2), lambda n: (x(n, 4), WEIGHT)
    ),
    "linear_divergence": linear_divergence(),
    "linear_divergence, none": linear_divergence(reduction="none"),
    "linear_topk_divergence": SizedCall(
        lambda h, w, *t: partita.linear_topk_divergence(h, w, TopK(*t)),
        lambda n: (x(n, 4), WEIGHT, *topk(n)),
    ),
    "rnnt_loss": SizedCall(
        lambda *a: partita.rnnt_loss(*a, blank=0),
        lambda n: (x(n, 4, 3, 5), y(n, 2), *lengths(n, 4, 2)),
    ),
    "tdt_loss": SizedCall(
        lambda *a: partita.tdt_loss(*a, 0, [0, 1]),
        lambda n: (x(n, 4, 3, 5), x(n, 4, 3, 2), y(n, 2), *lengths(n, 4, 2)),
    ),
    "linear_rnnt_loss": SizedCall(
        lambda *a: partita.linear_rnnt_loss(*a, blank=0),
        lambda n: (x(2, n, 4), x(2, 3, 4), WEIGHT, y(2, 2), *lengths(2, n, 2)),
    ),
    "ctc_loss, sequences": SizedCall(
        partita.ctc_loss, lambda n: (x(6, n, 5), y(n, 2), *lengths(n, 6, 2))
    ),
    "ctc_loss, steps": SizedCall(
        lambda *a: partita.ctc_loss(*a, from_logits=True),
        lambda n: (x(n, 2, 5), y(2, 2), *lengths(2, n, 1)),
    ),
    "ctc_loss, labels": SizedCall(
        partita.ctc_loss, lambda n: (x(19, 2, 5), y(2, n), *lengths(2, 19, n))
    ),
    "ctc_beam_search": SizedCall(
        lambda a: partita.ctc_beam_search(a, beam_width=2), lambda n: (x(4, n, 5).log_softmax(2),)
    ),
    "ctc_crf_loss": SizedCall(
        lambda *a: partita.ctc_crf_loss(*a, state_len=1, alphabet_size=3),
        lambda n: (x(4, n, 6), y(n, 2), *lengths(n, 2)),
    ),
    "ctc_crf_decode": SizedCall(
        lambda a: partita.ctc_crf_decode(a, state_len=1, alphabet_size=3), lambda n: (x(n, 2, 6),)
    ),
    "Chain, sequences": SizedCall(partita.logz, lambda n: (x(4, n, 3, 3), partita.dense_source(3))),
    "Chain, steps": SizedCall(
        lambda a, source: partita.Chain(a, source).marginals(),
        lambda n: (x(n, 2, 3, 3), partita.dense_source(3)),
    ),
    "LinearChain, sequences": SizedCall(
        lambda a, b: partita.linear_chain(a, b).logz(), lambda n: (x(4, n, 3), MATRIX)
    ),
    "LinearChain, steps": SizedCall(
        lambda a, b: partita.linear_chain(a, b).state_marginals(), lambda n: (x(n, 2, 3), MATRIX)
    ),
    "SemiMarkovChain, sequences": SizedCall(
        lambda a, b: partita.semi_markov_chain(a, b, b[:2]).logz(), lambda n: (x(4, n, 3), MATRIX)
    ),
    "SemiMarkovChain, steps": SizedCall(
        lambda a, b: partita.semi_markov_chain(a, b, b[:2]).logz(), lambda n: (x(n, 2, 3), MATRIX)
    ),
}


def varying_dims(call: SizedCall) -> tuple[int | None, ...]:
    """Return the dimension of each tensor that has the size, or None."""
    pairs = zip(call.tensors(8), call.tensors(9), strict=True)
    return tuple(
        next((dim for dim in range(a.ndim) if a.shape[dim] != b.shape[dim]), None) for a, b in pairs
    )
