"""Dense linear chains: log Z, its gradients and memory, and the best path.

All functions take emissions `[T, N, C]`, transitions `[C, C]`, start and end `[C]`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.linear_chain.api import LinearChain
from ..primitives.semiring import Max
from ..runtime.dtypes import acc_dtype
from ..testing.samples.in_torch import linear_chain as loop_logz
from .case import Buffers, Function, Functions, Limited, Sizes, cases_of
from .chain import beyond_loop
from .paths import BestCase, LogZCase, SequencesCase, Truth, differentiated, in_fp64

MAX_POTENTIALS = 2**31  # numbers in the scores of all transitions, of which several copies exist


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


class LinearInputs(NamedTuple):
    emissions: Tensor
    transitions: Tensor
    start: Tensor
    end: Tensor


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


def beyond_torch_struct(inputs: LinearInputs) -> str | None:
    T, N, C = inputs.emissions.shape
    if T < 2:
        return "takes at least two tokens"
    if T * N * C * C > MAX_POTENTIALS:
        return "would hold the scores of all transitions several times"
    return None


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


PROVIDERS: Functions = {
    "partita": {
        "linear_chain": lambda: lambda *inputs: LinearChain(*inputs).logz(),
        "linear_viterbi": lambda: lambda *inputs: LinearChain(*inputs).viterbi().states,
    },
    "torch": {
        "linear_chain": Limited(lambda: loop_logz, beyond_loop),
        "linear_viterbi": Limited(lambda: loop_viterbi, beyond_loop),
    },
    "torch-struct": {
        "linear_chain": Limited(torch_struct_logz, beyond_torch_struct),
        "linear_viterbi": Limited(torch_struct_viterbi, beyond_torch_struct),
    },
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

    sizes = ("steps", "sequences", "states")
    scores = "emissions"
    slow: ClassVar[tuple[str, ...]] = ("torch", "pytorch-crf", "torch-struct")
    slow_on_cpu = True
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
        """Return the best scores, `[N]`, in fp64."""
        with torch.no_grad():
            return LinearChain(*in_fp64(inputs)).to_chain().logz(Max)

    def path_scores(self, inputs: LinearInputs, found: Tensor, standard: Tensor) -> Tensor:
        emissions, transitions, start, end = in_fp64(inputs)
        states = found.long()
        known = states.clamp(0, self.states - 1)
        scores = emissions.gather(2, known[:, :, None]).sum((0, 2)) + start[known[0]]
        scores = scores + end[known[-1]] + transitions[known[:-1], known[1:]].sum(0)
        return scores.masked_fill((known != states).any(0), -torch.inf)


linear_chain_cases = cases_of({"linear_chain": (LogZ, SIZES), "linear_viterbi": (Viterbi, SIZES)})
OPS = {"linear_chain": linear_chain_cases}
