"""What cases of paths share: losses with gradients that are posteriors, and best paths."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .case import Case, Function, Moves, Provider, Verdict

CONTRACT = (2e-6, 1e-6)  # bounds of posteriors, and of log Z over max(1, |log Z|)
ROUNDING_A_STEP = 1e-9  # added to the bound of log Z for each step
# Peers carry fp32 states, whose marginals are off by 1e-3 at 2,000 steps.
PEER_BOUND = 1e-2
READ = {"inference": Moves(1, "read")}


class Gradient(NamedTuple):
    """Some of a true gradient in fp64.

    Fields:
        leaf: the number of the input whose gradient it is.
        where: the index of this part of the gradient.
        truth: the part.
        unit: what the error of an element is measured in: 1 for posteriors, and the expected
            number itself for an expected number, which is a sum of posteriors.
    """

    leaf: int
    where: Any
    truth: Tensor
    unit: Tensor | float = 1.0


class Truth(NamedTuple):
    """The truth in fp64.

    Fields:
        result: the result, or that of some sequences.
        which: the index of these sequences.
        gradients: some of the gradients.
        logz: the magnitude of log Z of a sequence, where the bound of peers depends on it.
    """

    result: Tensor
    which: Any
    gradients: list[Gradient]
    logz: float = 0.0


@dataclass(frozen=True)
class SumCase(Case):
    """log Z or a loss, for one read of the scores; the gradient needs another and a write."""

    learned: ClassVar[int] = 1
    work: ClassVar[Mapping[str, Moves]] = {**READ, "total": Moves(3, "copy")}
    memory_of: ClassVar[str] = "total"

    steps: int

    def bounds(self, provider: Provider, truth: Truth) -> tuple[float, float]:
        """Return the bounds of posteriors, and of the result over max(1, |result|)."""
        return CONTRACT if provider.is_ours else (PEER_BOUND, PEER_BOUND)

    def verdicts(
        self, function: Function, inputs: Any, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        of_gradient, of_result = self.bounds(provider, standard)
        result, gradients = self.trained(function, inputs, provider)
        for leaf, where, truth, unit in standard.gradients:
            got = gradients[leaf][where].double()
            apart = (got - truth).abs() - rounding(truth.abs(), gradients[leaf].dtype)
            yield worst(apart.clamp(min=0) / unit, of_gradient, got, truth)
        with torch.no_grad():
            results = (result.detach(), function(*inputs))
        for each in results:
            got = each[standard.which].double()
            apart = (got - standard.result).abs() - ROUNDING_A_STEP * self.steps
            apart = apart.clamp(min=0) / standard.result.abs().clamp(min=1)
            yield worst(apart, of_result, got, standard.result)
        yield from self.invariants(gradients)

    def invariants(self, gradients: Sequence[Tensor]) -> Iterator[Verdict]:
        """Yield verdicts on what holds for the gradients of all sequences."""
        yield from ()


@dataclass(frozen=True)
class BestCase(Case):
    """A best path, for one read of the scores. Any path with the best score is right."""

    work: ClassVar[Mapping[str, Moves]] = READ

    @abstractmethod
    def path_scores(self, inputs: Any, found: Any, standard: Any) -> Tensor:
        """Return the scores of the paths that were found, `[n]` in fp64."""

    def broken(self, inputs: Any, found: Any) -> Tensor:
        """Return which paths do not exist, `[N]`, where their score does not tell."""
        return torch.zeros(1, dtype=torch.bool)

    def best(self, standard: Any) -> Tensor:
        """Return the best scores, `[n]` in fp64."""
        return standard

    def verdicts(
        self, function: Function, inputs: Any, provider: Provider, standard: Any
    ) -> Iterator[Verdict]:
        allowed = CONTRACT[1] if provider.is_ours else PEER_BOUND
        found = function(*inputs)
        broken = self.broken(inputs, found).double()
        yield worst(broken, allowed, broken, torch.zeros_like(broken))
        scores, best = self.path_scores(inputs, found, standard), self.best(standard)
        yield worst((best - scores).abs() / best.abs().clamp(min=1), allowed, scores, best)


def worst(error: Tensor, allowed: float, got: Tensor, expected: Tensor) -> Verdict:
    error, got, expected = torch.atleast_1d(error.nan_to_num(nan=torch.inf), got, expected)
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return Verdict(float(error[index]), allowed, index, float(got[index]), float(expected[index]))


def rounding(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of rounding a posterior to a half type, which a gradient has to have."""
    return truth * (torch.finfo(dtype).eps / 2 if dtype.itemsize < 4 else 0.0)


def evenly(number: int, of: int, device: torch.device) -> Tensor:
    """Return the indices of some sequences, at least one, with the first and the last."""
    return torch.linspace(0, of - 1, max(1, min(number, of)), device=device).long()


def in_fp64(inputs: Any) -> Any:
    """Return the same inputs in fp64."""
    return type(inputs)(*(tensor.detach().double() for tensor in inputs))


def fewer(
    steps: int, sequences: int, scores: int, elements: int | None, least: int = 2
) -> tuple[int, int]:
    """Return the steps and the number of sequences that have at most this number of elements.

    Args:
        scores: the number of scores of one step of one sequence.
        elements: the limit, or None.
        least: the least number of steps.
    """
    if elements is None:
        return steps, sequences
    sequences = max(1, min(sequences, elements // (steps * scores)))
    return max(least, min(steps, elements // (sequences * scores))), sequences
