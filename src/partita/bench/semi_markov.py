"""Semi-Markov chains: log Z, its gradients and memory, and the best path.

All functions take emissions `[T, N, C]`, transitions `[C, C]`, durations `[D, C]`, start and end
`[C]`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.semi_markov.api import SemiMarkovChain
from ..testing.samples.in_torch import semi_markov_chain as loop_logz
from .case import Buffers, Function, Functions, Limited, Sizes, cases_of, needs_gpu
from .chain import beyond_loop
from .linear_chain import LinearChainCase
from .paths import BestCase, LogZCase, Truth, differentiated, in_fp64

# Numbers in the chart of torch-struct, which has matrices of (D C)² for each step.
MAX_CHART = 2**31


FULL_SIZES = (  # steps, sequences, states and durations
    (1000, 32, 24, 50),
    (200, 64, 10, 16),
    (10_000, 4, 16, 100),
    (1000, 16, 50, 30),
)
SIZES = Sizes(
    FULL_SIZES,
    FULL_SIZES[:2],
    [(200, 8, 24, 20), (200, 16, 10, 16)],
    [(40, 4, 6, 5)],
)


class SemiMarkovInputs(NamedTuple):
    emissions: Tensor
    transitions: Tensor
    durations: Tensor
    start: Tensor
    end: Tensor


def _potentials(
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


def torch_struct_logz() -> Function:
    chain: Any = importlib.import_module("torch_struct").SemiMarkovCRF
    return lambda *inputs: chain(_potentials(*inputs)).partition


def beyond_torch_struct(inputs: SemiMarkovInputs) -> str | None:
    T, N, C = inputs.emissions.shape
    if T * N * (len(inputs.durations) * C) ** 2 > MAX_CHART:
        return "would hold (D C)² numbers for each step"
    return None


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
        "semi_markov": lambda: lambda *inputs: SemiMarkovChain(*inputs).logz(),
        "semi_markov_viterbi": lambda: lambda *inputs: SemiMarkovChain(*inputs).viterbi()[1:],
    },
    "torch": {"semi_markov": Limited(lambda: loop_logz, beyond_loop)},
    "torch-struct": {"semi_markov": Limited(torch_struct_logz, beyond_torch_struct)},
    "flash-semicrf": {"semi_markov": Limited(flash_semicrf_logz, needs_gpu)},
}


@dataclass(frozen=True)
class SemiMarkovCase(LinearChainCase):
    """A batch of sequences with the same transitions and durations."""

    durations: int

    sizes = ("steps", "sequences", "states")
    differs_by = (*sizes, "durations")
    scores = "emissions"
    slow = ("torch", "torch-struct")
    slow_on_cpu = True

    def inputs(self, buffers: Buffers) -> Any:
        emissions, transitions, *ends = super().inputs(buffers)
        shape = (self.durations, self.states)
        durations = buffers.normal("durations", shape, transitions.dtype)
        return SemiMarkovInputs(emissions, transitions, durations, *ends)


@dataclass(frozen=True)
class LogZ(LogZCase, SemiMarkovCase):
    """log Z and its gradients: posteriors, and expected counts of transitions and durations."""

    caption = "log Z of semi-Markov chains and its gradients"
    learned = 3

    def standard(self, inputs: SemiMarkovInputs) -> Truth:
        return differentiated(loop_logz, inputs, self.learned)


@dataclass(frozen=True)
class Viterbi(BestCase, SemiMarkovCase):
    """The states of the best path, and where its segments start."""

    def standard(self, inputs: SemiMarkovInputs) -> Tensor:
        """Return the best scores, `[N]`, in fp64."""
        return loop_logz(*in_fp64(inputs), total=torch.amax)

    def path_scores(self, inputs: SemiMarkovInputs, found: Any, standard: Tensor) -> Tensor:
        chain = SemiMarkovChain(*in_fp64(inputs))
        with torch.no_grad():
            return chain.log_prob(*found) + chain.logz()


semi_markov_cases = cases_of(
    {"semi_markov": (LogZ, SIZES), "semi_markov_viterbi": (Viterbi, SIZES)}
)
OPS = {"semi_markov": semi_markov_cases}
