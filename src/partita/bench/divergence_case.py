"""Cases of mean divergences share their bounds, their errors and their training step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .case import Loop, TrainedCase, Verdict, poison, training_loop
from .linear_cross_entropy import worst_error
from .providers import TORCH, Function, Provider

BETAS = (0.0, 0.5, 1.0)
TOLERANCE = 2.0  # the bound is this multiple of PyTorch's error, plus the slack


class Truth(NamedTuple):
    """The loss and the gradient of the first rows in fp64, and the errors of PyTorch."""

    loss: Tensor
    gradient: Tensor
    own: list[float]


@dataclass(frozen=True)
class MeanDivergence(TrainedCase):
    """The mean divergence of a student's rows from a teacher's.

    Class attributes:
        learned: how many of the inputs, the first ones, have a gradient.
    """

    scores: ClassVar[str] = "logits"
    learned: ClassVar[int]

    @abstractmethod
    def truth(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """Compute the loss and the gradient of the first rows of the first input in fp64."""

    def standard(self, inputs: Any) -> Truth:
        loss, gradient = self.truth(inputs)
        return Truth(loss, gradient, self.own_errors(inputs, loss, gradient))

    def own_errors(self, inputs: Any, loss: Tensor, gradient: Tensor) -> list[float]:
        """Return the errors of PyTorch."""
        found = self.errors(TORCH.ops[self.op](), inputs, loss, gradient)
        return [verdict.error for verdict in found]

    def allowed(self, own: float, provider: Provider) -> float:
        """Return the bound of an error, given that of PyTorch."""
        slack = torch.finfo(self.dtype).eps / 4 if self.dtype.itemsize == 2 else 1e-5
        return TOLERANCE * own + slack

    def verdicts(
        self, function: Function, inputs: Any, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        """Judge all providers but the yardstick, which has no results."""
        if provider.name == self.yardstick:
            return
        found = self.errors(function, inputs, standard.loss, standard.gradient)
        for verdict, own in zip(found, standard.own, strict=True):
            yield replace(verdict, allowed=self.allowed(own, provider))

    def errors(
        self, function: Function, inputs: Any, loss: Tensor, gradient: Tensor
    ) -> Iterator[Verdict]:
        """Yield the errors over the greatest true value, without a bound.

        They are those of the loss with gradients and without, and of the first rows' gradients.
        The last is infinite if a gradient is not finite anywhere.
        """
        leaves = [tensor.detach().requires_grad_() for tensor in inputs[: self.learned]]
        for leaf in leaves:
            poison(leaf)
        result = function(*leaves, *inputs[self.learned :])
        found = torch.autograd.grad(result, leaves)
        yield worst_error(result.detach()[None], loss[None])
        with torch.no_grad():
            yield worst_error(function(*inputs).detach()[None], loss[None])
        verdict = worst_error(found[0][: len(gradient)], gradient)
        finite = all(bool(part.isfinite().all()) for each in found for part in each.split(1024))
        yield verdict if finite else replace(verdict, error=math.inf)

    def training(self, function: Function, inputs: Any) -> Loop:
        return training_loop(function, inputs[: self.learned], inputs[self.learned :])
