"""Backends and small batches for the tests of CTC and CTC-CRF."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

import partita

NEEDS_NUMBA = pytest.mark.skipif(find_spec("numba") is None, reason="needs Numba")
BACKENDS = ["reference", "numba"]
backends = pytest.mark.parametrize(
    "backend", ["reference", pytest.param("numba", marks=NEEDS_NUMBA)]
)


def sample(
    dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
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


def crf_sample(
    dtype: torch.dtype = torch.float64, steps: int = 12
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores, targets, target lengths and input lengths over 2-mers of three bases.

    The first target repeats a base, the second is one 2-mer, the third is too short, and the fourth
    needs all of its steps.
    """
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(steps, 5, 9 * 4, generator=g, dtype=torch.float64).to(dtype)
    targets = torch.randint(1, 4, (5, 6), generator=g)
    targets[0] = 2
    return (
        scores,
        targets,
        torch.tensor([6, 2, 1, 6, 4]),
        torch.tensor([steps, steps - 3, steps, 4, 1 + steps // 2]),
    )


def crf_loss(x: torch.Tensor, rest: Any, **options: Any) -> torch.Tensor:
    """Return the loss of scores; `rest` holds targets, target lengths and input lengths."""
    targets, lengths, inputs = rest
    return partita.ctc_crf_loss(x, targets, lengths, **CRF_SIZES, input_lengths=inputs, **options)
