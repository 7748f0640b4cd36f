"""Calls that the C module replays on a GPU, forward and backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from partita.testing.samples import CALLS, Draw

DEVICE = "cuda"


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def labels(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def gradients(function: Callable[..., Any], *inputs: Tensor) -> list[Tensor]:
    """Return the result of a function and the gradients of its sum."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    result = function(*leaves)
    return [result.detach(), *torch.autograd.grad(result.sum(), leaves)]


KMERS = {"states": 64, "bases": 4}
# Calls of the catalogue by name: the call, its option, and sizes for which there is a path.
CASES: dict[str, tuple[str, str, dict[str, int]]] = {
    "softmax": ("softmax", "", {"rows": 8, "classes": 1000}),
    "softmax, bf16": ("softmax", "", {"rows": 16, "classes": 50257}),
    "logsumexp": ("logsumexp", "", {"rows": 8, "classes": 1000}),
    "cross_entropy": ("cross_entropy", "mean", {"rows": 8, "classes": 1000}),
    "cross_entropy, none": ("cross_entropy", "", {"rows": 8, "classes": 1000}),
    "cross_entropy, all": ("cross_entropy", "all options, mean", {"rows": 8, "classes": 1000}),
    "cross_entropy, bf16": ("cross_entropy", "mean", {"rows": 16, "classes": 50257}),
    "token_stats": ("token_stats", "", {"rows": 8, "classes": 1000}),
    "ctc_loss": ("ctc_loss", "mean", {"steps": 50, "batch": 4, "classes": 20, "labels": 10}),
    "ctc_loss, none": ("ctc_loss", "", {"steps": 50, "batch": 4, "classes": 20, "labels": 10}),
    "ctc_loss, wide": ("ctc_loss", "mean", {"steps": 40, "classes": 3000, "labels": 20}),
    "ctc_align": ("ctc_align", "", {"steps": 50, "batch": 4, "classes": 20, "labels": 10}),
    "logz": ("logz", "", {"steps": 50, "batch": 4, "states": 64, "edges": 5}),
    "viterbi": ("Chain.viterbi", "no ends", {"steps": 50, "batch": 4, "states": 64, "edges": 5}),
    "linear_chain": ("linear_chain", "no ends", {"steps": 50, "batch": 4, "states": 10}),
    "linear_chain, ends": ("linear_chain", "", {"steps": 50, "batch": 4, "states": 10}),
    "linear_chain, more tokens": ("linear_chain", "", {"steps": 70, "batch": 9, "states": 10}),
    "linear_chain, many states": ("linear_chain", "", {"steps": 9, "batch": 4, "states": 150}),
    "ctc_crf_decode, viterbi": ("ctc_crf_decode", "", {"steps": 50, "batch": 4, **KMERS}),
    "ctc_crf_decode, beam": ("ctc_crf_decode", "beam", {"steps": 50, "batch": 4, **KMERS}),
    "ctc_crf": ("ctc_crf_loss", "", {"steps": 50, "batch": 4, "labels": 10, **KMERS}),
    "rnnt_loss": ("rnnt_loss", "mean", {"steps": 12, "classes": 9, "labels": 5}),
    "rnnt_loss, one": ("rnnt_loss", "mean", {"batch": 1, "steps": 12, "classes": 9, "labels": 5}),
    "rnnt_loss, overlap": (
        "rnnt_loss",
        "mean",
        {"batch": 1, "steps": 100, "classes": 1025, "labels": 40},
    ),
    "tdt_loss": ("tdt_loss", "mean", {"steps": 12, "classes": 9, "labels": 5}),
    "rnnt_align": ("rnnt_align", "", {"steps": 12, "classes": 9, "labels": 5}),
    "tdt_align": ("tdt_align", "", {"steps": 12, "classes": 9, "labels": 5}),
}


def make_calls() -> dict[str, Callable[[], list[Tensor]]]:
    """Return functions that make a call, and return its results and gradients."""

    def call_of(name: str) -> Callable[[], list[Tensor]]:
        call, option, sizes = CASES[name]
        draw = Draw(torch.bfloat16 if name.endswith("bf16") else torch.float32, device=DEVICE)
        sample = CALLS[call].sample(draw, option, sizes)

        def run() -> list[Tensor]:
            results = sample.run()
            gradients = sample.gradients(results).values()
            return [*(result.detach() for result in results), *gradients]

        return run

    return {name: call_of(name) for name in CASES}


def poison() -> None:
    """Leave NaN in the memory that the next allocations get."""
    for power in (12, 16, 20, 22):
        torch.full((2**power,), torch.nan, device=DEVICE)


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
