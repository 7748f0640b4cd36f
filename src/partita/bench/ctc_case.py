"""Cases of CTC: their inputs, and the bounds of their losses and gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .case import Buffers, Case, Loop, Moves, TrainedCase, Verdict, poison, training_loop
from .chain import CONTRACT, PEER_BOUND, rounding, worst
from .ctc_peers import CTCInputs
from .providers import Function, Provider, is_ours

# Others carry fp32 states as large as log Z. PyTorch's posteriors are off by 0.3 at 20,000 steps.
PEER_ROUNDINGS = 64
ELEMENTS_AT_ONCE = 2**25  # elements whose truth is computed in fp64 together


class Truth(NamedTuple):
    """The loss in fp64, and its gradient in the scores of some of the sequences."""

    loss: Tensor  # []
    logz: float  # the magnitude of log Z of a sequence
    sequences: Tensor  # [n], their indices
    gradient: Tensor  # [T, n, ...]


def random_targets(case: CTCCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random labels, `[N, S]`, the same on all devices, and lengths, `[N]`, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(case.shortest, case.longest + 1, (case.sequences,), generator=generator)
    lengths[0] = case.longest
    return torch.randint(1, case.classes, (case.sequences, case.longest), generator=generator).to(
        device
    ), lengths


@dataclass(frozen=True)
class CTCCase(Case):
    """A batch of inputs, each with a target."""

    steps: int
    sequences: int
    classes: int
    shortest: int
    longest: int

    sizes: ClassVar[tuple[str, ...]] = ("steps", "sequences", "classes", "shortest", "longest")
    varying: ClassVar[tuple[str, ...]] = sizes
    scores: ClassVar[str] = "logits"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.steps, self.sequences, self.classes

    def inputs(self, buffers: Buffers) -> Any:
        targets, lengths = random_targets(self, buffers.device)
        return CTCInputs(
            buffers.normal("logits", self.shape, self.dtype),
            targets,
            torch.full_like(lengths, self.steps),
            lengths,
        )

    def is_slow(self, provider: Provider, device: torch.device) -> bool:
        return device.type == "cpu"


def judge(
    function: Function, inputs: Any, truth: Truth, weights: Tensor, allowed: tuple[float, float]
) -> Iterator[Verdict]:
    """Yield verdicts on the gradient and the loss against fp64.

    The reported error is that of the gradient, and a loss within its bound counts as exact.

    Args:
        weights: `[n]`, the factors that turn gradients into posteriors.
        allowed: the bounds of posteriors, and of the loss over max(1, |loss|).
    """
    scores, *others = inputs
    leaf = scores.detach().requires_grad_()
    poison(scores)
    loss = function(leaf, *others)
    (grad,) = torch.autograd.grad(loss, leaf)
    weights = weights.double().reshape(1, -1, *(1,) * (scores.ndim - 2))
    some, expected = grad[:, truth.sequences].double() * weights, truth.gradient * weights
    yield worst(
        ((some - expected).abs() - rounding(expected.abs(), grad.dtype)).clamp(min=0),
        allowed[0],
        some,
        expected,
    )
    for result in (loss.detach(), function(scores, *others)):
        apart = (result.double() - truth.loss).abs() / truth.loss.abs().clamp(min=1)
        yield worst(
            apart.masked_fill(apart <= allowed[1], 0.0)[None],
            allowed[1],
            result[None],
            truth.loss[None],
        )


@dataclass(frozen=True)
class LossCase(TrainedCase, CTCCase):
    """A loss reads the scores once; its gradient needs a second read and a write."""

    versus: ClassVar[str] = "torch"

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read"), "total": Moves(3 * self.bytes, "copy")}

    def allowed(self, provider: Provider, truth: Truth, of_ours: int = 1) -> tuple[float, float]:
        """Return the bounds of posteriors, and of the loss over max(1, |loss|)."""
        if is_ours(provider.name):
            return of_ours * CONTRACT[0], of_ours * CONTRACT[1]
        return max(
            PEER_BOUND, PEER_ROUNDINGS * torch.finfo(torch.float32).eps * truth.logz
        ), PEER_BOUND

    def training(self, function: Function, inputs: Any) -> Loop:
        scores, *others = inputs
        return training_loop(function, [scores], others)
