"""Dense and semi-Markov chains for tests, and the enumeration of their paths."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from partita import LinearChain, SemiMarkovChain

KINDS = ("constant", "by token", "by sequence")  # of the transitions of dense chains


def random_scores(
    shape: tuple[int, ...], g: torch.Generator, scale: float, forbidden: float
) -> Tensor:
    """Return normal scores, of which a share `forbidden` is -inf."""
    values = scale * torch.randn(shape, generator=g, dtype=torch.float64)
    return values.masked_fill(torch.rand(shape, generator=g) < forbidden, -torch.inf)


def random_linear_chain(
    T: int = 5,
    N: int = 4,
    C: int = 3,
    *,
    kind: str = "constant",
    seed: int = 0,
    ragged: bool = True,
    forbidden: float = 0.0,
    scale: float = 1.0,
    ends: bool = True,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
) -> LinearChain:
    """Return chains with normal scores, of which a share `forbidden` is -inf.

    What is past a length is NaN, in transitions of each sequence too.
    """
    g = torch.Generator().manual_seed(seed)
    shapes = {"constant": (C, C), "by token": (T - 1, C, C), "by sequence": (T - 1, N, C, C)}

    def scores(*shape: int) -> Tensor:
        return random_scores(shape, g, scale, forbidden)

    emissions, transitions = scores(T, N, C), scores(*shapes[kind])
    start, end = (scores(N, C), scores(N, C)) if ends else (None, None)
    lengths = None
    if ragged:
        lengths = torch.randint(1, T + 1, (N,), generator=g)
        past = torch.arange(T)[:, None] >= lengths
        emissions[past] = torch.nan
        if kind == "by sequence":
            transitions[past[1:]] = torch.nan
    tensors = (
        t if t is None else t.to(dtype).to(device) for t in (emissions, transitions, start, end)
    )
    return LinearChain(*tensors, lengths=None if lengths is None else lengths.to(device))


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
        return random_scores(shape, g, scale, forbidden).to(dtype).to(device)

    emissions, transitions, durations = scores(T, N, C), scores(C, C), scores(D, C)
    start, end = (scores(N, C), scores(N, C)) if ends else (None, None)
    lengths = None
    if ragged:
        lengths = torch.randint(1, T + 1, (N,), generator=g).to(device)
        emissions[torch.arange(T, device=device)[:, None] >= lengths] = torch.nan
    return SemiMarkovChain(emissions, transitions, durations, start, end, lengths=lengths)


def random_token_chain(kind: str, **options: Any) -> LinearChain | SemiMarkovChain:
    """Return random semi-Markov chains, or dense chains with transitions of this kind."""
    if kind == "semi-Markov":
        return random_semi_markov(**options)
    return random_linear_chain(kind=kind, **options)


def scores_of(chain: LinearChain | SemiMarkovChain) -> list[Tensor]:
    """Return all scores in the order of the constructor."""
    durations = [chain.durations] if isinstance(chain, SemiMarkovChain) else []
    return [chain.emissions, chain.transitions, *durations, chain.start, chain.end]


class TokenPaths(NamedTuple):
    """All paths of one sequence.

    Fields:
        states: `[P, T]`, -1 past the length, in lexicographic order if all segments have one step.
        starts: `[P, T]`, whether a segment starts; False past the length.
        scores: `[P]` fp64, differentiable in the scores of the chain.
    """

    states: Tensor
    starts: Tensor
    scores: Tensor


def all_token_paths(chain: LinearChain | SemiMarkovChain, n: int) -> TokenPaths:
    """Enumerate the paths of the n-th sequence; segments of dense chains have one step."""
    T, _, C = chain.emissions.shape
    durations = chain.durations if isinstance(chain, SemiMarkovChain) else torch.zeros(1, C)
    length = T if chain.lengths is None else int(chain.lengths[n])
    # Each step starts a segment in one of C states, or goes on in one.
    choices = torch.arange(C if len(durations) == 1 else 2 * C)
    steps = torch.cartesian_prod(*[choices] * length).reshape(-1, length)
    states, starts = steps % C, steps < C
    goes_on = starts[:, 1:] | (states[:, 1:] == states[:, :-1])
    ages = torch.zeros_like(states)
    for t in range(1, length):
        ages[:, t] = torch.where(starts[:, t], 0, ages[:, t - 1] + 1)
    valid = starts[:, 0] & goes_on.all(1) & (ages < len(durations)).all(1)
    states, starts, ages = states[valid], starts[valid], ages[valid]
    ends = torch.cat([starts[:, 1:], torch.ones_like(starts[:, :1])], 1)
    scores = torch.zeros(len(states), dtype=torch.float64)
    for t in range(length):
        scores = scores + chain.emissions[t, n].double()[states[:, t]]
        segment = durations.double()[ages[:, t], states[:, t]]
        scores = scores + torch.where(ends[:, t], segment, 0.0)
        if t:
            step = chain.transitions
            step = step[t - 1] if step.ndim > 2 else step
            step = step[n] if step.ndim > 2 else step
            move = step.double()[states[:, t - 1], states[:, t]]
            scores = scores + torch.where(starts[:, t], move, 0.0)
    for end, state in ((chain.start, states[:, 0]), (chain.end, states[:, -1])):
        if end is not None:
            scores = scores + end[n].double()[state]
    past = (0, T - length)
    pad = torch.nn.functional.pad
    return TokenPaths(pad(states, past, value=-1), pad(starts, past), scores)


def posterior(scores: Tensor) -> Tensor:
    """Return the probabilities of paths, zeros if there is none."""
    return scores.softmax(0) if scores.max() > -torch.inf else torch.zeros_like(scores)


def segment_posteriors(paths: TokenPaths, p: Tensor, D: int, C: int) -> Tensor:
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
