"""Batches for the tests of CTC and CTC-CRF, and the comparison of kernels with the reference."""

from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from helpers.chains import assert_within_roundings
from torch import Tensor

import partita
from partita.testing import poisoned_memory

NEEDS_NUMBA = pytest.mark.skipif(find_spec("numba") is None, reason="needs Numba")
BACKENDS = ["reference", "numba"]
backends = pytest.mark.parametrize(
    "backend", ["reference", pytest.param("numba", marks=NEEDS_NUMBA)]
)


def sample(
    dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 12 steps of 5 sequences over 6 classes, with targets that can all be aligned."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, 5, 6, generator=g, dtype=torch.float64).to(dtype)
    return (
        logits,
        torch.randint(1, 6, (5, 4), generator=g),
        torch.tensor([12, 9, 8, 12, 10]),
        torch.tensor([4, 2, 4, 0, 1]),
    )


CRF_SIZES = {"state_len": 2, "alphabet_size": 4}


def crf_sample(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scores, targets, target lengths and input lengths over 2-mers of three bases.

    The first target repeats a base, the second is one 2-mer, the third is too short, and the fourth
    needs all of its steps.
    """
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(12, 5, 9 * 4, generator=g, dtype=torch.float64).to(dtype)
    targets = torch.randint(1, 4, (5, 6), generator=g)
    targets[0] = 2
    return (
        scores,
        targets,
        torch.tensor([6, 2, 1, 6, 4]),
        torch.tensor([12, 9, 12, 4, 7]),
    )


def crf_loss(x: Tensor, rest: Any, **options: Any) -> Tensor:
    """Return the loss of scores; `rest` holds targets, target lengths and input lengths."""
    targets, lengths, inputs = rest
    return partita.ctc_crf_loss(x, targets, lengths, **CRF_SIZES, input_lengths=inputs, **options)


class Batch(NamedTuple):
    """The arguments of `ctc_loss`."""

    logits: Tensor
    targets: Tensor
    input_lengths: Tensor
    target_lengths: Tensor
    blank: int = 0

    def to(self, device: str) -> "Batch":
        return Batch(*(t.to(device) for t in self[:4]), self.blank)


def batch_of(
    steps: int,
    N: int,
    classes: int,
    max_target_len: int,
    *,
    device: str = "cpu",
    seed: int = 0,
    scale: float = 1.0,
    holes: float = 0.0,
) -> Batch:
    """Return a random batch. Targets may contain the blank (class C - 2) and repeated labels."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(steps, N, classes, generator=g) * scale
    logits[torch.rand(logits.shape, generator=g) < holes] = -torch.inf
    blank = max(classes - 2, 0)
    logits[..., blank] = logits[..., blank].nan_to_num(neginf=0.0)
    targets = torch.randint(0, classes, (N, max_target_len), generator=g)
    inputs = torch.randint(steps // 2, steps + 1, (N,), generator=g)
    return Batch(
        logits,
        targets,
        inputs,
        torch.randint(max_target_len // 2, max_target_len + 1, (N,), generator=g),
        blank,
    ).to(device)


def results(
    x: Batch,
    backend: str,
    dtype: torch.dtype = torch.float32,
    from_logits: bool = True,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Return the losses with and without a gradient to follow, and the gradient."""
    options["from_logits"] = from_logits
    logits = x.logits.to(dtype).clone().requires_grad_()
    with partita.backend(backend), poisoned_memory():
        losses = partita.ctc_loss(logits, *x[1:], "none", **options)
        weights = torch.linspace(0.5, 2, len(losses), device=losses.device).to(losses.dtype)
        (grad,) = torch.autograd.grad(
            (losses.nan_to_num(nan=torch.nan, posinf=0.0) * weights).sum(), logits
        )
        with torch.no_grad():
            without_grad = partita.ctc_loss(logits, *x[1:], "none", **options)
    return losses.detach(), without_grad, grad


def assert_matches_reference(
    x: Batch, dtype: torch.dtype = torch.float32, from_logits: bool = True, **options: Any
) -> None:
    """Compare the kernels with the reference.

    Posteriors are within 2e-6, or 4e-6 where a weight doubles them, plus an ulp of their dtype.
    Losses are within 2e-6, relative.
    """
    ours, truth = (
        results(x, backend, dtype, from_logits, **options) for backend in ("triton", "reference")
    )
    assert_within_roundings(ours, truth, dtype)


def assert_alignment_matches(x: Batch, from_logits: bool = True, **options: Any) -> None:
    """Compare the alignment of the kernels with that of the reference."""
    found = []
    for backend in ("triton", "reference"):
        with partita.backend(backend), poisoned_memory():
            found.append(partita.ctc_align(*x, from_logits=from_logits, **options))
    torch.testing.assert_close(found[0].score, found[1].score, rtol=1e-6, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(
        found[0].scores, found[1].scores, rtol=1e-6, atol=2e-6, equal_nan=True
    )
    assert torch.equal(found[0].labels, found[1].labels) and torch.equal(
        found[0].tokens, found[1].tokens
    )


def reduced_loss(
    x: Batch, backend: str, reduction: str, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """Return the reduced loss and its gradient."""
    logits = x.logits.clone().requires_grad_()
    with partita.backend(backend), poisoned_memory():
        loss = partita.ctc_loss(logits, *x[1:], reduction, zero_infinity, from_logits=True)
        return loss.detach(), torch.autograd.grad(loss * 0.7, logits)[0]


# What raises an error for two sequences of three steps, whose targets have two labels.
BAD_SEQUENCES: dict[str, Any] = {
    "TypeError: targets: expected an integer dtype": {"targets": torch.zeros(2, 2)},
    r"ValueError: targets: expected shape \[N, S\] with N = 2": {
        "targets": torch.ones(3, 2).long()
    },
    r"ValueError: input_lengths: expected steps from 0 to 3, got 4 at \[1\]": {
        "input_lengths": [3, 4]
    },
    r"ValueError: target_lengths: expected labels from 0 to 2, got -1 at \[0\]": {
        "target_lengths": [-1, 2]
    },
    r"ValueError: target_lengths: expected shape \[N\] = \[2\], got \[1\]": {"target_lengths": [1]},
    "ValueError: targets: expected as many labels as the sum of target_lengths, 4, got 5": {
        "targets": torch.ones(5).long()
    },
    "ValueError: reduction: expected one of 'none', 'mean', 'sum', got 'max'": {"reduction": "max"},
}
