"""Linear chains: log Z alone, with its gradients, and the best path, for equal transitions.

The truth comes from the kernels of sparse chains.

Semi-Markov chains: the same with scores of durations, and the best paths one after another. The
truth comes from a loop over the steps.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.linear_chain.api import LinearChain
from ..ops.semi_markov.api import SemiMarkovChain
from ..primitives.semiring import Max
from ..runtime.backend import backend
from ..runtime.dtypes import acc_dtype
from ..testing.samples.in_torch import linear_chain as loop_logz
from ..testing.samples.in_torch import semi_markov_chain as segments_logz
from .case import Buffers, Function, Functions, Limited, Sizes, cases_of, needs_gpu
from .chain import beyond_loop
from .paths import BestCase, LogZCase, SequencesCase, Truth, differentiated, in_fp64

FULL_SIZES = (  # steps, sequences and states
    (100, 64, 20),
    (500, 32, 50),
    (500, 32, 128),
    (200, 16, 512),
    (10_000, 1, 16),
    (100_000, 1, 16),
    (1_000_000, 1, 4),
)
SIZES = Sizes(
    FULL_SIZES,
    FULL_SIZES[:2],
    [(100, 64, 20), (500, 32, 50), (100_000, 1, 16)],
    [(40, 8, 10), (300, 1, 16)],
)
PATHS = 8  # of `nbest`
FULL_SEGMENT_SIZES = (  # steps, sequences, states and durations
    (1000, 32, 24, 50),
    (200, 64, 10, 16),
    (10_000, 4, 16, 100),
    (1000, 16, 50, 30),
)
SEGMENT_SIZES = Sizes(
    FULL_SEGMENT_SIZES,
    FULL_SEGMENT_SIZES[:2],
    [(200, 8, 24, 20), (200, 16, 10, 16)],
    [(40, 4, 6, 5)],
)


# The truth of the best paths is a loop over the steps in PyTorch, with a sort at each.
NBEST_SIZES = Sizes(
    [(1000, 32, 24, 50), (200, 64, 10, 16)],
    [(200, 64, 10, 16)],
    [(200, 8, 24, 20), (200, 16, 10, 16)],
    [(40, 4, 6, 5)],
)


class LinearInputs(NamedTuple):
    emissions: Tensor  # [T, N, C]
    transitions: Tensor  # [C, C]
    start: Tensor  # [C]
    end: Tensor  # [C]


class SemiMarkovInputs(NamedTuple):
    emissions: Tensor  # [T, N, C]
    transitions: Tensor  # [C, C]
    durations: Tensor  # [D, C]
    start: Tensor  # [C]
    end: Tensor  # [C]


def loop_viterbi(emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Compute the states of the best path, `[T, N]`, by a maximum a step and a trace-back."""
    first, *others = emissions.to(transitions.dtype).unbind()
    alpha, choices = start + first, []
    for emission in others:
        alpha, choice = (alpha[:, :, None] + transitions).max(1)
        alpha = alpha + emission
        choices.append(choice)
    states = [(alpha + end).argmax(-1)]
    for choice in reversed(choices):
        states.append(choice.gather(1, states[-1][:, None]).squeeze(1))
    return torch.stack(states[::-1])


def _potentials(emissions: Tensor, transitions: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Return the log-potentials of torch-struct, `[N, T - 1, C, C]` (new, old)."""
    emissions = emissions.to(transitions.dtype)
    scores = transitions.T + emissions[1:, :, :, None]
    first, last = start + emissions[0], end
    scores = torch.cat([scores[:1] + first[None, :, None, :], scores[1:]])
    scores = torch.cat([scores[:-1], scores[-1:] + last[:, None]])
    return scores.transpose(0, 1)


def torch_struct_logz() -> Function:
    chain: Any = importlib.import_module("torch_struct").LinearChainCRF
    return lambda *inputs: chain(_potentials(*inputs)).partition


def torch_struct_viterbi() -> Function:
    """Return the states of the best path from the one-hot events that torch-struct gives."""
    chain: Any = importlib.import_module("torch_struct").LinearChainCRF

    def function(emissions: Tensor, *others: Tensor) -> Tensor:
        events = chain(_potentials(emissions, *others)).argmax  # [N, T - 1, C, C] (new, old)
        entered = events.sum(3).argmax(2)
        left = events[:, :1].sum(2).argmax(2)
        return torch.cat([left, entered], 1).T

    return function


def _pytorch_crf(transitions: Tensor, start: Tensor, end: Tensor) -> Any:
    """Return pytorch-crf's module with these tensors in place of its parameters."""
    module = importlib.import_module("torchcrf").CRF(len(start)).to(transitions.device)
    tensors = {"transitions": transitions, "start_transitions": start, "end_transitions": end}
    for name, tensor in tensors.items():
        delattr(module, name)
        setattr(module, name, tensor)
    return module


def _mask(emissions: Tensor) -> Tensor:
    return torch.ones(emissions.shape[:2], dtype=torch.bool, device=emissions.device)


def pytorch_crf_logz() -> Function:
    return lambda emissions, *others: _pytorch_crf(*others)._compute_normalizer(
        emissions.to(others[0].dtype), _mask(emissions)
    )


def pytorch_crf_viterbi() -> Function:
    def function(emissions: Tensor, *others: Tensor) -> Tensor:
        paths = _pytorch_crf(*others).decode(emissions.to(others[0].dtype), _mask(emissions))
        return torch.tensor(paths, device=emissions.device).T

    return function


def _segment_potentials(
    emissions: Tensor, transitions: Tensor, durations: Tensor, start: Tensor, end: Tensor
) -> Tensor:
    """Return the log-potentials of torch-struct, `[N, T, D + 1, C, C]` (new, old)."""
    T, _, C = emissions.shape
    D = len(durations)
    padded = F.pad(emissions.to(transitions.dtype), (0, 0, 0, 0, 0, D))
    # Entry [t, d - 1] is the sum of the emissions of d steps from step t on.
    sums = torch.stack([padded[d : T + d] for d in range(D)]).cumsum(0).transpose(0, 1)
    length = torch.arange(1, D + 1, device=emissions.device)
    last = torch.arange(T, device=emissions.device)[:, None] + length
    scores = sums + durations[:, None] + torch.where((last == T)[..., None, None], end, 0.0)
    scores = torch.where((last <= T)[..., None, None], scores, -torch.inf)
    # The first segment comes from state 0 alone.
    first = torch.full_like(transitions, -torch.inf)
    first = torch.cat([start[:, None], first[:, 1:]], 1)
    entered = torch.cat([first[None], transitions.T.expand(T - 1, C, C)])
    edges = scores[..., None] + entered[:, None, None]  # [T, D, N, C, C]
    edges = edges.permute(2, 0, 1, 3, 4)
    return torch.cat([torch.full_like(edges[:, :, :1], -torch.inf), edges], 2)


def torch_struct_segments() -> Function:
    chain: Any = importlib.import_module("torch_struct").SemiMarkovCRF
    return lambda *inputs: chain(_segment_potentials(*inputs)).partition


def flash_semicrf_logz() -> Function:
    """Return log Z of flash-semicrf, from prefix sums of the emissions in fp64.

    It enters the first segment by a transition from any state, whose sum is taken off here. Its
    path on the CPU is a loop over steps and durations.
    """
    library: Any = importlib.import_module("flash_semicrf")

    def function(
        emissions: Tensor, transitions: Tensor, durations: Tensor, start: Tensor, end: Tensor
    ) -> Tensor:
        T, N, C = emissions.shape
        sums = F.pad(emissions.double().cumsum(0), (0, 0, 0, 0, 1, 0))
        zeros = emissions.new_zeros(T - 1, C, dtype=transitions.dtype)
        first = torch.cat([(start - transitions.logsumexp(0))[None], zeros])
        last = torch.cat([zeros, end[None]])
        logz = library.semi_crf_streaming_forward(
            sums.transpose(0, 1).contiguous(),
            transitions,
            durations,
            torch.full((N,), T, device=emissions.device),
            len(durations),
            proj_start=first.expand(N, T, C).contiguous(),
            proj_end=last.expand(N, T, C).contiguous(),
        )
        return logz.to(transitions.dtype)

    return function


PROVIDERS: Functions = {
    "partita": {
        "linear_chain": lambda: lambda *inputs: LinearChain(*inputs).logz(),
        "linear_viterbi": lambda: lambda *inputs: LinearChain(*inputs).viterbi().states,
        "semi_markov": lambda: lambda *inputs: SemiMarkovChain(*inputs).logz(),
        "semi_markov_viterbi": lambda: lambda *inputs: SemiMarkovChain(*inputs).viterbi()[1:],
        "semi_markov_nbest": lambda: lambda *inputs: SemiMarkovChain(*inputs).nbest(PATHS)[1:],
    },
    "torch": {
        "linear_chain": Limited(lambda: loop_logz, beyond_loop),
        "linear_viterbi": Limited(lambda: loop_viterbi, beyond_loop),
        "semi_markov": Limited(lambda: segments_logz, beyond_loop),
    },
    "torch-struct": {
        "linear_chain": torch_struct_logz,
        "linear_viterbi": torch_struct_viterbi,
        "semi_markov": torch_struct_segments,
    },
    "flash-semicrf": {"semi_markov": Limited(flash_semicrf_logz, needs_gpu)},
    "pytorch-crf": {
        "linear_chain": Limited(pytorch_crf_logz, beyond_loop),
        "linear_viterbi": Limited(pytorch_crf_viterbi, beyond_loop),
    },
}


@dataclass(frozen=True)
class LinearChainCase(SequencesCase):
    """A batch of sequences with the same transitions."""

    sequences: int
    states: int

    sizes: ClassVar[tuple[str, ...]] = ("steps", "sequences", "states")
    scores = "emissions"
    width = "states"

    def inputs(self, buffers: Buffers) -> Any:
        dtype, C = acc_dtype(self.dtype), self.states
        transitions = buffers.normal("transitions", (C, C), dtype)
        ends = buffers.normal("ends", (2, C), dtype)
        return LinearInputs(buffers.normal("scores", self.shape, self.dtype), transitions, *ends)


@dataclass(frozen=True)
class LogZ(LogZCase, LinearChainCase):
    """log Z and its gradients: state marginals, and expected counts of the transitions."""

    caption = "log Z of dense chains and its gradients"
    learned = 2

    def standard(self, inputs: LinearInputs) -> Truth:
        """Return the truth by the kernels of sparse chains, which share no code with these."""
        logz = lambda *exact: LinearChain(*exact).to_chain().logz()  # noqa: E731
        return differentiated(logz, inputs, self.learned)


@dataclass(frozen=True)
class Viterbi(BestCase, LinearChainCase):
    """The states of the best path."""

    def standard(self, inputs: LinearInputs) -> Tensor:
        with torch.no_grad():
            return LinearChain(*in_fp64(inputs)).to_chain().logz(Max)

    def path_scores(self, inputs: LinearInputs, found: Tensor) -> Tensor:
        emissions, transitions, start, end = in_fp64(inputs)
        states = found.long()
        known = states.clamp(0, self.states - 1)
        scores = emissions.gather(2, known[:, :, None]).sum((0, 2)) + start[known[0]]
        scores = scores + end[known[-1]] + transitions[known[:-1], known[1:]].sum(0)
        return scores.masked_fill((known != states).any(0), -torch.inf)


@dataclass(frozen=True)
class SemiMarkovCase(LinearChainCase):
    """A batch of sequences with the same transitions and durations."""

    durations: int

    sizes = (*LinearChainCase.sizes, "durations")
    dimensions = LinearChainCase.sizes

    def inputs(self, buffers: Buffers) -> Any:
        emissions, transitions, *ends = super().inputs(buffers)
        shape = (self.durations, self.states)
        durations = buffers.normal("durations", shape, transitions.dtype)
        return SemiMarkovInputs(emissions, transitions, durations, *ends)


@dataclass(frozen=True)
class SegmentsLogZ(LogZCase, SemiMarkovCase):
    """log Z and its gradients: posteriors, and expected counts of transitions and durations."""

    caption = "log Z of semi-Markov chains and its gradients"
    learned = 3

    def standard(self, inputs: SemiMarkovInputs) -> Truth:
        return differentiated(segments_logz, inputs, self.learned)


@dataclass(frozen=True)
class SegmentsViterbi(BestCase, SemiMarkovCase):
    """The states of the best path, and where its segments start."""

    def standard(self, inputs: SemiMarkovInputs) -> Tensor:
        return segments_logz(*in_fp64(inputs), total=torch.amax)

    def path_scores(self, inputs: SemiMarkovInputs, found: Any) -> Tensor:
        chain = SemiMarkovChain(*in_fp64(inputs))
        with torch.no_grad():
            return chain.log_prob(*found) + chain.logz()


@dataclass(frozen=True)
class SegmentsNBest(SegmentsViterbi):
    """The best paths, which all differ."""

    def standard(self, inputs: SemiMarkovInputs) -> Tensor:
        with backend("reference"):
            return SemiMarkovChain(*in_fp64(inputs)).nbest(PATHS).score

    def broken(self, inputs: SemiMarkovInputs, found: Any) -> Tensor:
        states, starts = found  # [k, T, N]
        same = (states[:, None] == states) & (starts[:, None] == starts)
        return same.all(2).sum(1).ne(1).any(0)  # each path is like itself alone


linear_chain_cases = cases_of({"linear_chain": (LogZ, SIZES), "linear_viterbi": (Viterbi, SIZES)})
semi_markov_cases = cases_of(
    {
        "semi_markov": (SegmentsLogZ, SEGMENT_SIZES),
        "semi_markov_viterbi": (SegmentsViterbi, SEGMENT_SIZES),
        "semi_markov_nbest": (SegmentsNBest, NBEST_SIZES),
    }
)
OPS = {"linear_chain": linear_chain_cases, "semi_markov": semi_markov_cases}
