"""Semi-Markov chains for tests, and the enumeration of their paths."""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from partita import SemiMarkovChain


def random_semi_markov(
    T: int = 5,
    N: int = 3,
    C: int = 2,
    D: int = 3,
    *,
    seed: int = 0,
    ragged: bool = True,
    forbidden: float = 0.0,
    scale: float = 1.0,
    ends: bool = True,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> SemiMarkovChain:
    """Return chains with normal scores, of which a share `forbidden` is -inf.

    Emissions past a length are NaN.
    """
    g = torch.Generator().manual_seed(seed)

    def scores(*shape: int) -> Tensor:
        values = scale * torch.randn(shape, generator=g, dtype=torch.float64)
        values = values.masked_fill(torch.rand(shape, generator=g) < forbidden, -torch.inf)
        return values.to(dtype).to(device)

    emissions, transitions, durations = scores(T, N, C), scores(C, C), scores(D, C)
    start, end = (scores(N, C), scores(N, C)) if ends else (None, None)
    lengths = None
    if ragged:
        lengths = torch.randint(1, T + 1, (N,), generator=g).to(device)
        emissions[torch.arange(T, device=device)[:, None] >= lengths] = torch.nan
    return SemiMarkovChain(emissions, transitions, durations, start, end, lengths=lengths)


class SegmentPaths(NamedTuple):
    """All paths of one sequence.

    Fields:
        states: `[P, T]`, -1 past the length.
        starts: `[P, T]`, False past the length.
        scores: `[P]` fp64, differentiable in the scores of the chain.
    """

    states: Tensor
    starts: Tensor
    scores: Tensor


def _compositions(length: int, D: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to divide a sequence into segments of 1 to D steps."""
    if not length:
        yield ()
    for first in range(1, min(D, length) + 1):
        for others in _compositions(length - first, D):
            yield (first, *others)


def all_segment_paths(chain: SemiMarkovChain, n: int) -> SegmentPaths:
    """Enumerate the paths of the n-th sequence."""
    T, _, C = chain.emissions.shape
    length = T if chain.lengths is None else int(chain.lengths[n])
    emissions, transitions, durations, start, end = (
        scores.double()
        for scores in (
            *(chain.emissions[:, n], chain.transitions, chain.durations),
            *(chain.start[n], chain.end[n]),
        )
    )
    all_states, all_starts, all_scores = [], [], []
    for sizes in _compositions(length, len(durations)):
        for states in product(range(C), repeat=len(sizes)):
            score, t = start[states[0]] + end[states[-1]], 0
            row, starts = torch.full((T,), -1), torch.zeros(T, dtype=torch.bool)
            for i, (c, size) in enumerate(zip(states, sizes, strict=True)):
                score = score + durations[size - 1, c] + emissions[t : t + size, c].sum()
                if i:
                    score = score + transitions[states[i - 1], c]
                row[t : t + size], starts[t] = c, True
                t += size
            all_states.append(row)
            all_starts.append(starts)
            all_scores.append(score)
    return SegmentPaths(torch.stack(all_states), torch.stack(all_starts), torch.stack(all_scores))


def segment_posteriors(paths: SegmentPaths, p: Tensor, D: int, C: int) -> Tensor:
    """Return the posteriors of segments `[T, D, C]` by last step and number of steps minus 1."""
    T = paths.states.shape[1]
    found = torch.zeros(T, D, C, dtype=torch.float64)
    for states, starts, weight in zip(paths.states, paths.starts, p, strict=True):
        first = 0
        for t in range(T):
            first = t if starts[t] else first
            if states[t] >= 0 and (t + 1 == T or starts[t + 1] or states[t + 1] < 0):
                found[t, t - first, states[t]] += weight
    return found
