"""Dense linear chains for tests, and the enumeration of their paths."""

from typing import NamedTuple

import torch
from torch import Tensor

from partita import LinearChain

KINDS = ("constant", "by token", "by sequence")


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
        values = scale * torch.randn(shape, generator=g, dtype=torch.float64)
        return values.masked_fill(torch.rand(shape, generator=g) < forbidden, -torch.inf)

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


class LinearPaths(NamedTuple):
    """All paths of one sequence.

    Fields:
        states: `[P, L]`, in lexicographic order.
        scores: `[P]` fp64, differentiable in the scores of the chain.
    """

    states: Tensor
    scores: Tensor


def all_linear_paths(chain: LinearChain, n: int) -> LinearPaths:
    """Enumerate the paths of the n-th sequence."""
    T, _, C = chain.emissions.shape
    length = T if chain.lengths is None else int(chain.lengths[n])
    states = torch.cartesian_prod(*[torch.arange(C)] * length).reshape(-1, length)
    scores = torch.zeros(len(states), dtype=torch.float64)
    for t in range(length):
        scores = scores + chain.emissions[t, n].double()[states[:, t]]
        if t:
            step = chain.transitions
            step = step[t - 1] if step.ndim > 2 else step
            step = step[n] if step.ndim > 2 else step
            scores = scores + step.double()[states[:, t - 1], states[:, t]]
    for end, state in ((chain.start, states[:, 0]), (chain.end, states[:, -1])):
        if end is not None:
            scores = scores + end[n].double()[state]
    return LinearPaths(states, scores)
