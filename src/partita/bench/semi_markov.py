"""Semi-Markov chains: log Z, its gradients and memory, and the best path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.semi_markov.api import SemiMarkovChain
from ..runtime.dtypes import acc_dtype
from .case import Buffers, Case, Loop, Moves, Settings, TrainedCase, Verdict, poison, training_loop
from .chain import CONTRACT, PEER_BOUND, ROUNDING_A_STEP, chosen_sizes, rounding, worst
from .providers import Function, Provider, is_ours
from .semi_markov_peers import SemiMarkovInputs, loop_logz

SLOW = ("torch", "torch-struct")


class Size(NamedTuple):
    steps: int
    sequences: int
    states: int
    durations: int


SIZES = (
    Size(1000, 32, 24, 50),
    Size(200, 64, 10, 16),
    Size(10_000, 4, 16, 100),
    Size(1000, 16, 50, 30),
)
CPU_SIZES = Size(200, 8, 24, 20), Size(200, 16, 10, 16)
CPU_QUICK_SIZES = (Size(40, 4, 6, 5),)


class Truth(NamedTuple):
    """The truth in fp64.

    Fields:
        logz: log Z of each sequence, `[N]`.
        gradients: those in emissions, which are posteriors, in transitions and in durations.
    """

    logz: Tensor
    gradients: Sequence[Tensor]


@dataclass(frozen=True)
class SemiMarkovCase(Case):
    """A batch of sequences with the same transitions and durations."""

    steps: int
    sequences: int
    states: int
    durations: int

    sizes: ClassVar[tuple[str, ...]] = ("steps", "sequences", "states")
    varying: ClassVar[tuple[str, ...]] = ("steps", "sequences", "states", "durations")
    scores: ClassVar[str] = "emissions"

    def inputs(self, buffers: Buffers) -> SemiMarkovInputs:
        dtype, C = acc_dtype(self.dtype), self.states
        return SemiMarkovInputs(
            buffers.normal("scores", self.shape, self.dtype),
            buffers.normal("transitions", (C, C), dtype),
            buffers.normal("durations", (self.durations, C), dtype),
            *buffers.normal("ends", (2, C), dtype),
        )

    def is_slow(self, provider: Provider, device: torch.device) -> bool:
        """Return whether this is a loop in Python, or anything on the CPU."""
        return provider.name in SLOW or device.type == "cpu"


def in_fp64(inputs: SemiMarkovInputs) -> SemiMarkovInputs:
    return SemiMarkovInputs(*(tensor.detach().double() for tensor in inputs))


@dataclass(frozen=True)
class LogZ(TrainedCase, SemiMarkovCase):
    """log Z reads the emissions once; the gradients need a second read and a write."""

    caption: ClassVar[str] = "log Z of semi-Markov chains and its gradients"

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read"), "total": Moves(3 * self.bytes, "copy")}

    def standard(self, inputs: SemiMarkovInputs) -> Truth:
        """Return the truth by a loop over the steps."""
        leaves = [tensor.requires_grad_() for tensor in in_fp64(inputs)]
        with torch.enable_grad():
            logz = loop_logz(*leaves)
            gradients = torch.autograd.grad(logz.sum(), leaves[:3])
        return Truth(logz.detach(), gradients)

    def verdicts(
        self, function: Function, inputs: SemiMarkovInputs, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        of_marginals, of_logz = CONTRACT if is_ours(provider.name) else (PEER_BOUND, PEER_BOUND)
        leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
        poison(inputs.emissions)
        total = function(*leaves, *inputs[3:])
        gradients = torch.autograd.grad(total.sum(), leaves)
        for grad, truth in zip(gradients, standard.gradients, strict=True):
            # An expected count is a sum of posteriors, so that its error is one of its share.
            apart = ((grad.double() - truth).abs() - rounding(truth, grad.dtype)).clamp(min=0)
            yield worst(apart / truth.clamp(min=1), of_marginals, grad.double(), truth)
        for result in (total.detach(), function(*inputs)):
            apart = (result.double() - standard.logz).abs() - ROUNDING_A_STEP * self.steps
            apart = apart.clamp(min=0) / standard.logz.abs().clamp(min=1)
            yield worst(apart, of_logz, result.double(), standard.logz)

    def training(self, function: Function, inputs: SemiMarkovInputs) -> Loop:
        ones = torch.ones(
            self.sequences, dtype=inputs.transitions.dtype, device=inputs.emissions.device
        )
        return training_loop(function, list(inputs[:3]), inputs[3:], ones)


@dataclass(frozen=True)
class Viterbi(SemiMarkovCase):
    """The states of the best path, for one read of the emissions."""

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read")}

    def standard(self, inputs: SemiMarkovInputs) -> Tensor:
        """Return the best scores, `[N]`, in fp64."""
        emissions, transitions, durations, start, end = in_fp64(inputs)
        opened, ages = start.expand(emissions.shape[1:]), emissions[:0]
        for emission in emissions:
            ages = torch.cat([opened[None], ages[: len(durations) - 1]]) + emission
            closed = (ages + durations[: len(ages), None]).amax(0)
            opened = (closed[:, :, None] + transitions).amax(1)
        return (closed + end).amax(-1)

    def verdicts(
        self, function: Function, inputs: SemiMarkovInputs, provider: Provider, standard: Tensor
    ) -> Iterator[Verdict]:
        """Accept any path with the best score."""
        allowed = CONTRACT[1] if is_ours(provider.name) else PEER_BOUND
        chain = SemiMarkovChain(*in_fp64(inputs))
        with torch.no_grad():
            scores = chain.log_prob(*function(*inputs)) + chain.logz()
        apart = (standard - scores).abs() / standard.abs().clamp(min=1)
        yield worst(apart, allowed, scores, standard)

    def loops(self, function: Function, inputs: Any, provider: Provider) -> Sequence[Loop]:
        return [Loop((("inference", lambda: function(*inputs)),), lambda: None)]


def _sizes(settings: Settings) -> Iterator[Size]:
    for size in chosen_sizes(settings, SIZES, CPU_SIZES, CPU_QUICK_SIZES):
        yield _within(size, settings.elements) if settings.elements else size


def _within(size: Size, elements: int) -> Size:
    """Return a size with fewer or shorter sequences that has at most this number of emissions."""
    sequences = max(1, min(size.sequences, elements // (size.steps * size.states)))
    steps = max(2, min(size.steps, elements // (sequences * size.states)))
    return size._replace(steps=steps, sequences=sequences)


def cases(settings: Settings) -> Iterator[Case]:
    for dtype in settings.types():
        for size in _sizes(settings):
            yield LogZ("semi_markov", dtype, *size)
            yield Viterbi("semi_markov_viterbi", dtype, *size)
