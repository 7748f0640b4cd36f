"""Calls of the families whose autograd functions the C module serves in plain eager mode."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import partita
from partita.ops.cross_entropy import quotient
from partita.ops.cross_entropy.common import checked_options


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


TARGETS = torch.tensor([[1, 2, 2], [3, 1, 0]])
STEPS, LENGTHS = torch.tensor([6, 5]), torch.tensor([3, 2])
PRIORS = -numbers(4).abs()
LABELS = torch.tensor([0, 2, -100])
SOURCE = partita.debruijn_source(2, 2)
CHAIN = (numbers(5, 2, 4, 3), numbers(2, 4), numbers(2, 4))
TAGS = (numbers(5, 2, 3), numbers(3, 3), numbers(3), numbers(2, 3))
TAG_LENGTHS = torch.tensor([5, 2])


def ctc(logits: Tensor, **options: Any) -> Tensor:
    return partita.ctc_loss(logits, TARGETS, STEPS, LENGTHS, from_logits=True, **options)


def crf(scores: Tensor, **options: Any) -> Tensor:
    sizes = {"state_len": 2, "alphabet_size": 3}
    targets, lengths = torch.tensor([[1, 2, 2], [2, 1, 0]]), torch.tensor([3, 2])
    return partita.ctc_crf_loss(scores, targets, lengths, **sizes, **options)


def exact_logz(chain: partita.Chain) -> Tensor:
    return chain._log_partitions(chain._potentials())[0]


def over(logits: Tensor) -> Tensor:
    options = checked_options(-100, 0.0, 3.0, 0.0, "sum")
    return quotient.cross_entropy_over(logits, LABELS, torch.tensor(5.0), options)


# The ops of a call, its inputs and the function.
Case = tuple[tuple[str, ...], tuple[Tensor, ...], Callable[..., Tensor]]
CASES: dict[str, Case] = {
    "cross_entropy": (
        ("cross_entropy_one_pass", "scale_"),
        (numbers(3, 4),),
        lambda x: partita.cross_entropy(x, LABELS, softcap=3.0),
    ),
    "cross_entropy, over": (("cross_entropy_one_pass", "scale_"), (numbers(3, 4),), over),
    "linear_cross_entropy": (
        ("cross_entropy_one_pass", "scale_"),
        (numbers(3, 2), numbers(4, 2)),
        lambda h, w: partita.linear_cross_entropy(h, w, LABELS, softcap=3.0),
    ),
    "logprob": (
        ("token_stats", "token_stats_backward"),
        (numbers(3, 4),),
        lambda x: partita.token_stats(x, LABELS, temperature=2.0).logprob,
    ),
    "statistics": (
        ("token_stats", "token_stats_backward"),
        (numbers(3, 4),),
        lambda x: torch.stack(partita.token_stats(x, LABELS, softcap=3.0)[:3]),
    ),
    "ctc": (("ctc_loss", "ctc_gradient"), (numbers(6, 2, 4),), ctc),
    "ctc, priors": (
        ("ctc_loss", "ctc_gradient"),
        (numbers(6, 2, 4),),
        lambda x: ctc(x, reduction="none", label_priors=PRIORS, prior_scale=0.5),
    ),
    "ctc, star": (
        ("ctc_loss", "ctc_gradient"),
        (numbers(6, 2, 4),),
        lambda x: ctc(x, star=7, reduction="sum"),
    ),
    "crf": (("crf_loss", "crf_gradient"), (numbers(5, 2, 4, 3),), crf),
    "logz": (
        ("chain_logz", "chain_gradient"),
        CHAIN,
        lambda s, *ends: partita.logz(s, SOURCE, *ends),
    ),
    "logz, lengths": (
        ("chain_logz", "chain_gradient"),
        CHAIN,
        lambda s, *ends: partita.logz(s, SOURCE, *ends, lengths=torch.tensor([5, 3])),
    ),
    "logz, fp64": (
        ("chain_logz", "chain_gradient"),
        CHAIN,
        lambda s, *ends: exact_logz(partita.Chain(s, SOURCE, *ends)),
    ),
    "linear_chain": (
        ("linear_chain_logz", "linear_chain_gradient"),
        TAGS,
        lambda e, t, s, f: partita.linear_chain(e, t, s, f, lengths=TAG_LENGTHS).logz(),
    ),
    "linear_chain, no ends": (
        ("linear_chain_logz", "linear_chain_gradient"),
        TAGS[:2],
        lambda e, t: partita.linear_chain(e, t).logz(),
    ),
    "linear_chain, fp64": (
        ("linear_chain_logz", "linear_chain_gradient"),
        TAGS[:2],
        lambda e, t: partita.linear_chain(e, t).log_prob(torch.ones(5, 2, dtype=torch.int64)),
    ),
}
# Cases whose gradient is an op of the backward pass.
REPLAYED = [name for name, (ops, *_) in CASES.items() if "scale_" not in ops]
# The inputs without a gradient: none, and each of several.
WITHOUT = [
    (name, i)
    for name, (_, inputs, _) in CASES.items()
    for i in (None, *(range(len(inputs)) if len(inputs) > 1 else ()))
]


def leaves_of(name: str, without: int | None = None) -> list[Tensor]:
    return [x.clone().requires_grad_(i != without) for i, x in enumerate(CASES[name][1])]


def results(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Return the value of a function and the gradients of a weighted sum."""
    value = function(*leaves)
    wanted = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad((value * numbers(*value.shape)).sum(), wanted)
    return [value.detach(), *grads]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, truth in zip(found, expected, strict=True):
        assert torch.equal(got, truth)
