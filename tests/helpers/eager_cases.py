"""Calls of the families whose autograd functions the C module serves in plain eager mode."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from partita.ops.cross_entropy.common import checked_options
from partita.ops.cross_entropy.loss import cross_entropy_over
from partita.testing.samples import CALLS, Draw

LABELS = torch.tensor([0, 2, -100])


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Case(NamedTuple):
    """A call.

    Fields:
        ops: the names of its ops.
        inputs: those that may need a gradient.
        function: a function of the inputs.
    """

    ops: tuple[str, str]
    inputs: list[Tensor]
    function: Callable[..., Tensor]


def case_of(name: str, option: str, *ops: str) -> Case:
    """Return a small call of the catalogue, whose results are one vector."""
    sample = CALLS[name].sample(Draw(), option)

    def function(*leaves: Tensor) -> Tensor:
        results = sample.run(**dict(zip(sample.leaves, leaves, strict=True)))
        return torch.cat([result.flatten() for result in results if result.is_floating_point()])

    return Case(ops, [leaf.detach() for leaf in sample.leaves.values()], function)


def over(logits: Tensor) -> Tensor:
    options = checked_options(-100, 0.0, 3.0, 0.0, "sum")
    return cross_entropy_over(logits, LABELS, torch.tensor(5.0), options)


LOSS, STATS = ("cross_entropy_one_pass", "scale_"), ("token_stats", "token_stats_backward")
CHAIN, LINEAR = (
    tuple(f"{name}_{op}" for op in ("logz", "gradient")) for name in ("chain", "linear_chain")
)
CTC, CRF = (tuple(f"{name}_{op}" for op in ("loss", "gradient")) for name in ("ctc", "crf"))
CASES: dict[str, Case] = {
    "cross_entropy": case_of("cross_entropy", "all options, mean", *LOSS),
    "cross_entropy, over": Case(LOSS, [numbers(3, 4)], over),
    "linear_cross_entropy": case_of("linear_cross_entropy", "mean", *LOSS),
    "logprob": case_of("token_stats, logprob", "", *STATS),
    "statistics": case_of("token_stats", "temperature and softcap", *STATS),
    "ctc": case_of("ctc_loss", "mean", *CTC),
    "ctc, priors": case_of("ctc_loss", "priors", *CTC),
    "ctc, star": case_of("ctc_loss", "star", *CTC),
    "crf": case_of("ctc_crf_loss", "mean", *CRF),
    "logz": case_of("logz", "no ends", *CHAIN),
    "logz, lengths": case_of("logz", "", *CHAIN),
    "logz, fp64": case_of("Chain.log_prob", "", *CHAIN),
    "linear_chain": case_of("linear_chain", "", *LINEAR),
    "linear_chain, no ends": case_of("linear_chain", "no ends", *LINEAR),
    "linear_chain, fp64": case_of("LinearChain.log_prob", "", *LINEAR),
}
# Cases whose gradient is an op of the backward pass.
REPLAYED = [name for name, case in CASES.items() if case.ops != LOSS]
# The inputs without a gradient: none, and each of several.
WITHOUT = [
    (name, i)
    for name, case in CASES.items()
    for i in (None, *(range(len(case.inputs)) if len(case.inputs) > 1 else ()))
]


def leaves_of(name: str, without: int | None = None) -> list[Tensor]:
    return [x.clone().requires_grad_(i != without) for i, x in enumerate(CASES[name].inputs)]


def results(function: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Return the value of a function and the gradients of a weighted sum."""
    value = function(*leaves)
    wanted = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad((value * numbers(*value.shape)).sum(), wanted)
    return [value.detach(), *grads]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for got, truth in zip(found, expected, strict=True):
        assert torch.equal(got, truth)
