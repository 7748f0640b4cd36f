"""What cases of paths share: losses with gradients that are posteriors, and best paths."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .case import Attempt, Case, Function, Moves, Provider, Verdict

CONTRACT = (2e-6, 1e-6)  # bounds of posteriors, and of log Z over max(1, |log Z|)
ROUNDING_A_STEP = 1e-9  # added to the bound of log Z for each step
# Peers carry fp32 states, whose marginals are off by 1e-3 at 2,000 steps.
PEER_BOUND = 1e-2
READ = {"inference": Moves(1, "read")}


class Gradient(NamedTuple):
    """Some of a true gradient in fp64."""

    leaf: int  # the number of the input whose gradient it is
    where: Any  # the index of this part of the gradient
    truth: Tensor
    # Errors of posteriors are absolute, and those of a sum of posteriors relative to the sum.
    unit: Tensor | float = 1.0
    peer_bound: float = PEER_BOUND


class Truth(NamedTuple):
    """The truth in fp64."""

    result: Tensor  # of all sequences or of some
    which: Any  # the index of these sequences
    gradients: list[Gradient]
    own: Sequence[float] = ()  # the errors of PyTorch, if they bound those of others


@dataclass(frozen=True)
class SequencesCase(Case):
    """A batch of sequences or chains."""

    shrinks: ClassVar[Mapping[str, int]] = {"sequences": 1, "steps": 2}

    steps: int


class GradientCase(Case):
    """A result with gradients, some of which are compared with the truth."""

    memory_of = "total"
    relative_above = 0.0  # errors of smaller results are errors over this number

    @abstractmethod
    def bounds(self, provider: Provider, standard: Truth) -> Sequence[float]:
        """Return the bounds of the gradients, and of the result with and without gradients."""

    def verdicts(self, attempt: Attempt, standard: Truth) -> Iterator[Verdict]:
        """Judge all providers but the yardstick, which has no results."""
        if attempt.provider.name != self.yardstick:
            bounds = iter(self.bounds(attempt.provider, standard))
            for found in self.compared(attempt, standard):
                has_bound = found.allowed < math.inf
                yield found if has_bound else replace(found, allowed=next(bounds))

    def compared(self, attempt: Attempt, truth: Truth) -> Iterator[Verdict]:
        """Yield the errors of gradients, and of the result with and without them, without a bound.

        That of a gradient that is judged by rows is infinite if another row is not finite.
        """
        result, gradients = self.trained(attempt)
        yield from self.invariants(gradients)
        for leaf, where, exact, unit, _ in truth.gradients:
            gradient = gradients[leaf]
            got = gradient[where].double()
            apart = (got - exact).abs() - self.gradient_rounding(exact.abs(), gradient.dtype)
            found = worst(apart.clamp(min=0) / unit, math.inf, got, exact)
            if isinstance(where, Tensor):
                found = replace(found, index=(int(where[found.index[0]]), *found.index[1:]))
                if not all(bool(part.isfinite().all()) for part in gradient.split(1024)):
                    found = replace(found, error=math.inf)
            yield found
        with torch.no_grad():
            results = (result.detach(), attempt.function(*attempt.inputs))
        for each in results:
            got, exact = each[truth.which].double(), truth.result
            apart = ((got - exact).abs() - self.result_rounding()).clamp(min=0)
            yield worst(apart / exact.abs().clamp(min=self.relative_above), math.inf, got, exact)

    def gradient_rounding(self, exact: Tensor, dtype: torch.dtype) -> Tensor | float:
        """Return the error of a gradient that counts as none."""
        return 0.0

    def result_rounding(self) -> float:
        """Return the error of the result that counts as none."""
        return 0.0

    def invariants(self, gradients: Sequence[Tensor]) -> Iterator[Verdict]:
        """Yield verdicts on what holds for the gradients of all sequences."""
        yield from ()


class PartsCase(GradientCase):
    """A loss that is the sum of what rows or sequences give, whose truth is computed in parts."""

    dims: ClassVar[tuple[int | None, ...]]  # the dimension of each input that counts them
    # The inputs with a true gradient; 0 for the first input alone, and for its first part alone.
    judged = 0

    @property
    def at_once(self) -> int:  # rows or sequences of a part
        return 1

    @abstractmethod
    def exact(self, inputs: Any) -> Tensor:
        """Compute what a part gives to the loss, from its inputs in fp64."""

    def truth_in_parts(self, inputs: Any) -> tuple[Tensor, Sequence[Tensor]]:
        """Compute the loss and its gradients in fp64."""
        dims, total = self.dims, inputs[0].shape[self.dims[0]]
        loss = inputs[0].new_zeros((), dtype=torch.float64)
        gradients: Sequence[Tensor] = ()
        for first in range(0, total, self.at_once):
            part = []
            for x, d in zip(inputs, dims, strict=True):
                if d is not None and x is not None:
                    x = x.narrow(d, first, min(self.at_once, total - first))
                is_floating = isinstance(x, Tensor) and x.is_floating_point()
                part.append(x.detach().double() if is_floating else x)
            leaves = [x.requires_grad_() for x in part[: self.judged or int(first == 0)]]
            own = self.exact(type(inputs)(*part))
            loss += own.detach()
            if leaves:
                found = torch.autograd.grad(own, leaves)
                gradients = [
                    a + b if d is None else torch.cat([a, b], d)
                    for a, b, d in zip(gradients, found, dims, strict=False)
                ] or found
        return loss, gradients


@dataclass(frozen=True)
class SumCase(GradientCase):
    """log Z or a loss, for one read of the scores; the gradient needs another and a write."""

    learned = 1
    work: ClassVar[Mapping[str, Moves]] = {**READ, "total": Moves(3, "copy")}
    relative_above = 1.0

    steps: int

    def gradient_rounding(self, exact: Tensor, dtype: torch.dtype) -> Tensor | float:
        """Return the error of rounding a posterior to a half type, which a gradient has to have."""
        return exact * (torch.finfo(dtype).eps / 2 if dtype.itemsize < 4 else 0.0)

    def result_rounding(self) -> float:
        return ROUNDING_A_STEP * self.steps

    def contract(self, provider: Provider) -> tuple[float, float]:
        """Return the bounds of posteriors, and of the result over max(1, |result|)."""
        return CONTRACT if provider.is_ours else (PEER_BOUND, PEER_BOUND)

    def bounds(self, provider: Provider, standard: Truth) -> Sequence[float]:
        of_gradient, of_result = self.contract(provider)
        return [of_gradient] * len(standard.gradients) + [of_result] * 2


class LogZCase(SumCase):
    """log Z of each sequence, in the dtype of the last input."""

    def upstream(self, inputs: Any) -> list[Tensor]:
        return [inputs[-1].new_ones(self.shape[1])]


class LossCase(PartsCase, SumCase):
    """A loss that is the sum of what sequences give; gradients of the first ones are judged."""

    sequences: int

    def posterior_unit(self, inputs: Any) -> Tensor | float:
        """Return the gradient of a posterior, for the sequences that are judged."""
        return 1.0

    def standard(self, inputs: Any) -> Truth:
        dim = self.dims[0] or 0
        loss, (gradient,) = self.truth_in_parts(inputs)
        where = (*[slice(None)] * dim, slice(gradient.shape[dim]))
        judged = Gradient(0, where, gradient, self.posterior_unit(inputs))
        return Truth(loss, ..., [judged])


class BestCase(Case):
    """A best path, for one read of the scores. Any path with the best score is right."""

    work = READ

    @abstractmethod
    def path_scores(self, inputs: Any, found: Any) -> Tensor:
        """Return the scores of the paths that were found, `[n]` in fp64."""

    def broken(self, inputs: Any, found: Any) -> Tensor:
        """Return which paths do not exist, `[N]`, where their score does not tell."""
        return torch.zeros(1, dtype=torch.bool)

    def verdicts(self, attempt: Attempt, standard: Tensor) -> Iterator[Verdict]:
        """Judge the scores of the paths by the best ones, `[n]` in fp64."""
        function, inputs, provider = attempt
        allowed = CONTRACT[1] if provider.is_ours else PEER_BOUND
        found = function(*inputs)
        broken = self.broken(inputs, found).double()
        yield worst(broken, allowed, broken, torch.zeros_like(broken))
        scores = self.path_scores(inputs, found)
        apart = (standard - scores).abs() / standard.abs().clamp(min=1)
        yield worst(apart, allowed, scores, standard)


def worst(error: Tensor, allowed: float, got: Tensor, expected: Tensor) -> Verdict:
    error, got, expected = torch.atleast_1d(error.nan_to_num(nan=torch.inf), got, expected)
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return Verdict(float(error[index]), allowed, index, float(got[index]), float(expected[index]))


def differentiated(logz: Function, inputs: Any, learned: int) -> Truth:
    """Compute log Z of all sequences in fp64, and its gradients in the first inputs."""
    leaves = [tensor.requires_grad_() for tensor in in_fp64(inputs)]
    with torch.enable_grad():
        result = logz(*leaves)
        found = torch.autograd.grad(result.sum(), leaves[:learned])
    gradients = [Gradient(i, ..., each, each.clamp(min=1)) for i, each in enumerate(found)]
    return Truth(result.detach(), ..., gradients)


def evenly(number: int, of: int, device: torch.device) -> Tensor:
    """Return the indices of some sequences, at least one, with the first and the last."""
    return torch.linspace(0, of - 1, max(1, min(number, of)), device=device).long()


def in_fp64(inputs: Any) -> Any:
    return type(inputs)(*(tensor.detach().double() for tensor in inputs))
