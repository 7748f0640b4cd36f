"""Batches of transducers, and the sum over all of their paths one by one."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

DURATIONS = [0, 1, 2]
# Lengths of a batch with an empty target, a single step and the longest of each.
STEPS, LABELS = [4, 1, 3, 2], [2, 1, 0, 2]


def sample(
    dtype: torch.dtype = torch.float64, V: int = 5, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return logits of tokens and durations, targets without class 0, steps and labels."""
    g = torch.Generator().manual_seed(seed)
    B, T, U = len(STEPS), max(STEPS), max(LABELS)
    tokens = torch.randn(B, T, U + 1, V, generator=g, dtype=torch.float64).to(dtype)
    durations = torch.randn(B, T, U + 1, len(DURATIONS), generator=g, dtype=torch.float64)
    targets = torch.randint(1, V, (B, U), generator=g)
    return tokens, durations.to(dtype), targets, torch.tensor(STEPS), torch.tensor(LABELS)


class Lattices(NamedTuple):
    """Logits of tokens `[B, T, U + 1, V]` and of durations, targets, steps and labels."""

    tokens: Tensor
    durations: Tensor
    targets: Tensor
    steps: Tensor
    labels: Tensor


def lattices(
    shape: tuple[int, int, int, int],
    device: str,
    dtype: torch.dtype = torch.float32,
    blank: int = 0,
    K: int = 3,
) -> Lattices:
    """Return a ragged batch of shape `[B, T, U, V]`, with NaN beyond the lengths."""
    B, T, U, V = shape
    g = torch.Generator().manual_seed(0)
    tokens = 2 * torch.randn(B, T, U + 1, V, generator=g, dtype=torch.float64)
    durations = torch.randn(B, T, U + 1, K, generator=g, dtype=torch.float64)
    labels = torch.randint(0, max(V - 1, 1), (B, U), generator=g)
    steps, lengths = torch.randint(1, T + 1, (B,), generator=g), torch.arange(B) % (U + 1)
    steps[0], lengths[0] = T, U
    for b in range(B):
        for x in (tokens, durations):
            x[b, steps[b] :], x[b, :, lengths[b] + 1 :] = math.nan, math.nan
    targets = labels + (labels >= blank)
    inputs = (tokens.to(dtype), durations.to(dtype), targets, steps, lengths)
    return Lattices(*(each.to(device) for each in inputs))


class Path(NamedTuple):
    """A path: its score, and the steps and scores of its labels."""

    score: Tensor
    steps: list[int]
    scores: list[Tensor]


# (blank, t, u) -> the arcs that leave the node: the steps by which each advances and its score.
ArcsOf = Callable[[bool, int, int], Sequence[tuple[int, Tensor]]]


def all_paths(arcs: ArcsOf, T: int, U: int) -> list[Path]:
    """Return all paths from (0, 0) that end at (T, U) by a blank."""
    found: list[Path] = []

    def extend(t: int, u: int, score: Tensor, steps: list[int], scores: list[Tensor]) -> None:
        for d, value in arcs(True, t, u):
            if t + d == T and u == U:
                found.append(Path(score + value, steps, scores))
            elif d and t + d < T:
                extend(t + d, u, score + value, steps, scores)
        for d, value in arcs(False, t, u) if u < U else ():
            if t + d < T:
                extend(t + d, u + 1, score + value, [*steps, t], [*scores, value])

    if T > 0:
        extend(0, 0, torch.zeros((), dtype=torch.float64), [], [])
    return found


def rnnt_arcs(log_probs: Tensor, target: Tensor, blank: int) -> ArcsOf:
    """Return the arcs of one sequence of an RNN-T, `[T, U + 1, V]`."""
    return lambda is_blank, t, u: (
        [(1, log_probs[t, u, blank])] if is_blank else [(0, log_probs[t, u, target[u]])]
    )


def tdt_arcs(tokens: Tensor, durations: Tensor, target: Tensor, blank: int) -> ArcsOf:
    """Return the arcs of one sequence of a TDT from log-probabilities."""

    def arcs(is_blank: bool, t: int, u: int) -> list[tuple[int, Tensor]]:
        token = tokens[t, u, blank] if is_blank else tokens[t, u, target[u]]
        return [
            (d, token + durations[t, u, i]) for i, d in enumerate(DURATIONS) if d or not is_blank
        ]

    return arcs


def hat_log_probs(logits: Tensor, blank: int) -> Tensor:
    """Return log-probabilities in which the blank is a Bernoulli apart from the labels."""
    is_blank = torch.arange(logits.shape[-1]) == blank
    labels = logits.masked_fill(is_blank, -torch.inf).log_softmax(-1)
    blanks = torch.nn.functional.logsigmoid(logits)
    others = torch.nn.functional.logsigmoid(-logits[..., blank, None]) + labels
    return torch.where(is_blank, blanks, others)


def losses_of_paths(arcs: Sequence[ArcsOf], steps: Tensor, labels: Tensor) -> Tensor:
    """Return minus the log-sum-exp of the scores of all paths of each sequence."""
    losses = []
    for of_sequence, T, U in zip(arcs, steps.tolist(), labels.tolist(), strict=True):
        scores = [path.score for path in all_paths(of_sequence, T, U)]
        losses.append(-torch.stack(scores).logsumexp(0))
    return torch.stack(losses)
