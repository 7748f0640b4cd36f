"""Dense linear chains: log Z, its gradients and memory, and the best path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.linear_chain.api import LinearChain
from ..primitives.semiring import Max
from ..runtime.dtypes import acc_dtype
from .case import Buffers, Case, Loop, Moves, Settings, TrainedCase, Verdict, poison, training_loop
from .chain import CONTRACT, PEER_BOUND, ROUNDING_A_STEP, chosen_sizes, rounding, worst
from .linear_chain_peers import LinearInputs
from .providers import Function, Provider, is_ours

SLOW = ("torch", "pytorch-crf", "torch-struct")


class Size(NamedTuple):
    steps: int
    sequences: int
    states: int


SIZES = (
    Size(100, 64, 20),
    Size(500, 32, 50),
    Size(500, 32, 128),
    Size(200, 16, 512),
    Size(10_000, 1, 16),
    Size(100_000, 1, 16),
    Size(1_000_000, 1, 4),
)
CPU_SIZES = Size(100, 64, 20), Size(500, 32, 50), Size(100_000, 1, 16)
CPU_QUICK_SIZES = Size(40, 8, 10), Size(300, 1, 16)


class Truth(NamedTuple):
    """The truth in fp64.

    Fields:
        logz: log Z of each sequence, `[N]`.
        states: the gradient of the emissions, which are the state marginals, `[T, N, C]`.
        transitions: the gradient of the transitions, which are expected counts, `[C, C]`.
    """

    logz: Tensor
    states: Tensor
    transitions: Tensor


@dataclass(frozen=True)
class LinearChainCase(Case):
    """A batch of sequences with the same transitions."""

    steps: int
    sequences: int
    states: int

    sizes: ClassVar[tuple[str, ...]] = ("steps", "sequences", "states")
    varying: ClassVar[tuple[str, ...]] = sizes
    scores: ClassVar[str] = "emissions"

    def inputs(self, buffers: Buffers) -> LinearInputs:
        dtype, C = acc_dtype(self.dtype), self.states
        transitions = buffers.normal("transitions", (C, C), dtype)
        ends = buffers.normal("ends", (2, C), dtype)
        return LinearInputs(buffers.normal("scores", self.shape, self.dtype), transitions, *ends)

    def is_slow(self, provider: Provider, device: torch.device) -> bool:
        """Return whether this is a loop in Python, or anything on the CPU."""
        return provider.name in SLOW or device.type == "cpu"


def in_fp64(inputs: LinearInputs) -> LinearInputs:
    return LinearInputs(*(tensor.detach().double() for tensor in inputs))


@dataclass(frozen=True)
class LogZ(TrainedCase, LinearChainCase):
    """log Z reads the emissions once; the gradients need a second read and a write."""

    caption: ClassVar[str] = "log Z of dense chains and its gradients"

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read"), "total": Moves(3 * self.bytes, "copy")}

    def standard(self, inputs: LinearInputs) -> Truth:
        """Return the truth by the kernels of sparse chains, which share no code with these."""
        emissions, transitions, *ends = in_fp64(inputs)
        leaves = [emissions.requires_grad_(), transitions.requires_grad_()]
        with torch.enable_grad():
            logz = LinearChain(*leaves, *ends).to_chain().logz()
            states, counts = torch.autograd.grad(logz.sum(), leaves)
        return Truth(logz.detach(), states, counts)

    def verdicts(
        self, function: Function, inputs: LinearInputs, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        of_marginals, of_logz = CONTRACT if is_ours(provider.name) else (PEER_BOUND, PEER_BOUND)
        emissions, transitions, *ends = inputs
        leaves = [tensor.detach().requires_grad_() for tensor in (emissions, transitions)]
        poison(emissions)
        total = function(*leaves, *ends)
        states, counts = torch.autograd.grad(total.sum(), leaves)
        apart = (states.double() - standard.states).abs()
        apart = (apart - rounding(standard.states, states.dtype)).clamp(min=0)
        yield worst(apart, of_marginals, states.double(), standard.states)
        # An expected count is a sum of marginals, so that its error is one of its share.
        apart = (counts - standard.transitions).abs() / standard.transitions.clamp(min=1)
        yield worst(apart, of_marginals, counts.double(), standard.transitions)
        for result in (total.detach(), function(*inputs)):
            apart = (result.double() - standard.logz).abs() - ROUNDING_A_STEP * self.steps
            apart = apart.clamp(min=0) / standard.logz.abs().clamp(min=1)
            yield worst(apart, of_logz, result.double(), standard.logz)

    def training(self, function: Function, inputs: LinearInputs) -> Loop:
        emissions, transitions, *ends = inputs
        ones = torch.ones(emissions.shape[1], dtype=transitions.dtype, device=emissions.device)
        return training_loop(function, [emissions, transitions], ends, ones)


@dataclass(frozen=True)
class Viterbi(LinearChainCase):
    """The states of the best path, for one read of the emissions."""

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read")}

    def standard(self, inputs: LinearInputs) -> Tensor:
        """Return the best scores, `[N]`, in fp64."""
        with torch.no_grad():
            return LinearChain(*in_fp64(inputs)).to_chain().logz(Max)

    def verdicts(
        self, function: Function, inputs: LinearInputs, provider: Provider, standard: Tensor
    ) -> Iterator[Verdict]:
        """Accept any path with the best score."""
        allowed = CONTRACT[1] if is_ours(provider.name) else PEER_BOUND
        states = function(*inputs).long()
        emissions, transitions, start, end = in_fp64(inputs)
        known = states.clamp(0, self.states - 1)
        scores = emissions.gather(2, known[:, :, None]).sum((0, 2)) + start[known[0]]
        scores = scores + end[known[-1]] + transitions[known[:-1], known[1:]].sum(0)
        scores = scores.masked_fill((known != states).any(0), -torch.inf)
        yield worst(
            (standard - scores).abs() / standard.abs().clamp(min=1), allowed, scores, standard
        )

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
            yield LogZ("linear_chain", dtype, *size)
            yield Viterbi("linear_viterbi", dtype, *size)
