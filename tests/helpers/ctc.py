"""Backends and a small batch for the tests of CTC and CTC-CRF."""

from importlib.util import find_spec

import pytest
import torch

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
