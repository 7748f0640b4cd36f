"""The k best paths do not depend on how the steps are cut into segments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from partita import Chain
from partita.paths import nbest
from partita.testing import all_paths


def random_chain(seed: int, integers: bool) -> tuple[tuple[Any, ...], int]:
    """Return the arguments of `best_paths` for a small chain with missing edges, and k."""
    g = torch.Generator().manual_seed(seed)
    T, N, C, K, k = (int(torch.randint(low, 7, (1,), generator=g)) for low in (0, 1, 1, 1, 1))
    source = torch.randint(-1, C, (C, K), generator=g)

    def numbers(*shape: int) -> Tensor:
        if integers:  # which tie
            return torch.randint(0, 2, shape, generator=g).double()
        values = torch.randn(shape, generator=g, dtype=torch.float64)
        return values.masked_fill(torch.rand(shape, generator=g) < 0.2, -torch.inf)

    lengths = torch.randint(0, T + 1, (N,), generator=g)
    active = torch.arange(T)[:, None] < lengths
    ends = numbers(N, C), numbers(N, C)
    return (numbers(T, N, C, K), source.clamp(min=0), source < 0, *ends, active), k


def enumerated(arguments: tuple[Any, ...], n: int) -> list[tuple[float, list[int], list[int]]]:
    """Return the score, states and edges of all paths of a sequence, best first, ties in order."""
    scores, source, missing, *ends, active = arguments
    chain = Chain(scores, source.masked_fill(missing, -1), *ends, lengths=active.sum(0))
    paths = all_paths(chain, n)
    edges = (paths.edges % source.shape[1]).tolist()
    rows = zip(paths.scores.tolist(), paths.states.tolist(), edges, strict=True)
    found = [row for row in rows if row[0] > -torch.inf]
    # The last state decides, then the edges from the last one back.
    return sorted(found, key=lambda path: (-path[0], path[1][-1], path[2][::-1]))


@pytest.mark.parametrize("segments", [1, 2, 3, 6])
@pytest.mark.parametrize("integers", [False, True])
def test_best_paths_are_those_of_enumeration(
    segments: int, integers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nbest, "number_of_segments", lambda *args: segments)
    monkeypatch.setattr(nbest, "MAX_PARALLEL_WAYS", 200)  # so that sequences are taken in groups
    compared = 0
    for seed in range(40):
        arguments, k = random_chain(seed, integers)
        active, (C, K) = arguments[-1], arguments[1].shape
        if (C * K) ** len(active) * C > 3_000:
            continue
        score, states, edges = nbest.best_paths(arguments[0].__getitem__, *arguments[1:], k=k)
        for n in range(active.shape[1]):
            paths, steps = enumerated(arguments, n)[:k], int(active[:, n].sum())
            assert (score[len(paths) :, n] == -torch.inf).all()
            for r, (expected, of_states, of_edges) in enumerate(paths):
                torch.testing.assert_close(float(score[r, n]), expected, rtol=1e-12, atol=1e-12)
                assert states[r, : steps + 1, n].tolist() == of_states
                assert edges[r, :steps, n].tolist() == of_edges
                compared += 1
    assert compared > 100


def test_long_sequences_are_cut_on_a_gpu_alone() -> None:
    assert nbest.number_of_segments(100_000, 3, 2, torch.device("cuda")) == 316
    assert nbest.number_of_segments(100_000, 3, 2, torch.device("cpu")) == 1
    assert nbest.number_of_segments(100, 3, 2, torch.device("cuda")) == 1
    assert nbest.number_of_segments(100_000, 64, 2, torch.device("cuda")) == 1
