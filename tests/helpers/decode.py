"""Batches for the tests of the decoders, all of their paths, and the comparison of results."""

import itertools
import math
from collections import defaultdict

import torch

import partita


def batch(
    T: int, N: int, C: int, seed: int = 0, *, round: bool = False, forbidden: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores `[T, N, C]` in fp64 and lengths `[N]`, of which the first is T.

    With `round` many scores are equal; with `forbidden` some are -inf.
    """
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, N, C, generator=g, dtype=torch.float64) * 2
    x = x.round() if round else x
    x = x.masked_fill(x < -1.5, -torch.inf) if forbidden else x
    lengths = torch.randint(0, T + 1, (N,), generator=g)
    lengths[0] = T
    return x, lengths


def collapse(path: tuple[int, ...], blank: int) -> tuple[int, ...]:
    return tuple(c for c, _ in itertools.groupby(path) if c != blank)


def enumerate_prefixes(log_probs: torch.Tensor, blank: int) -> dict[tuple[int, ...], float]:
    """Return the log-probability of each sequence of tokens, summed over all paths in `[T, C]`."""
    terms = defaultdict(list)
    T, C = log_probs.shape
    for path in itertools.product(range(C), repeat=T):
        terms[collapse(path, blank)].append(math.exp(float(log_probs[range(T), path].sum())))
    return {tokens: math.log(math.fsum(values)) for tokens, values in terms.items()}


def assert_same(
    found: partita.Hypotheses, expected: partita.Hypotheses, tolerance: float = 1e-12
) -> None:
    """Compare all fields, the scores up to a tolerance relative to max(1, |score|)."""
    for name, a, b in zip(found._fields, found, expected, strict=True):
        if name == "scores":
            torch.testing.assert_close(
                a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True
            )
        else:
            assert torch.equal(a.cpu(), b.cpu()), name
