"""Semi-Markov chains: log Z, its gradients and memory, and the best path.

All functions take emissions `[T, N, C]`, transitions `[C, C]`, durations `[D, C]`, start and end
`[C]`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.semi_markov.api import SemiMarkovChain
from ..runtime.dtypes import acc_dtype
from .case import Beyond, Buffers, Case, Function, Load, Settings, Sizes, needs_gpu
from .chain import beyond_loop
from .paths import BestCase, Gradient, SumCase, Truth, fewer, in_fp64

# Numbers in the chart of torch-struct, which has matrices of (D C)² for each step.
MAX_CHART = 2**31


class Size(NamedTuple):
    steps: int
    sequences: int
    states: int
    durations: int


FULL_SIZES = (
    Size(1000, 32, 24, 50),
    Size(200, 64, 10, 16),
    Size(10_000, 4, 16, 100),
    Size(1000, 16, 50, 30),
)
SIZES = Sizes(
    FULL_SIZES,
    FULL_SIZES[:2],
    [Size(200, 8, 24, 20), Size(200, 16, 10, 16)],
    [Size(40, 4, 6, 5)],
)


class SemiMarkovInputs(NamedTuple):
    emissions: Tensor
    transitions: Tensor
    durations: Tensor
    start: Tensor
    end: Tensor


def loop_logz(
    emissions: Tensor, transitions: Tensor, durations: Tensor, start: Tensor, end: Tensor
) -> Tensor:
    """Compute log Z, `[N]`, by two log-sum-exps for each step, over `[D, N, C]` and `[N, C, C]`."""
    emissions = emissions.to(transitions.dtype)
    opened, ages = start.expand(emissions.shape[1:]), emissions[:0]
    for emission in emissions:
        ages = torch.cat([opened[None], ages[: len(durations) - 1]]) + emission
        closed = (ages + durations[: len(ages), None]).logsumexp(0)
        opened = (closed[:, :, None] + transitions).logsumexp(1)
    return (closed + end).logsumexp(-1)


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
    """Return why torch-struct cannot take these inputs, or None."""
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


PROVIDERS: dict[str, dict[str, Load]] = {
    "partita": {
        "semi_markov": lambda: lambda *inputs: SemiMarkovChain(*inputs).logz(),
        "semi_markov_viterbi": lambda: lambda *inputs: SemiMarkovChain(*inputs).viterbi()[1:],
    },
    "torch": {"semi_markov": lambda: loop_logz},
    "torch-struct": {"semi_markov": torch_struct_logz},
    "flash-semicrf": {"semi_markov": flash_semicrf_logz},
}
BEYOND: dict[str, dict[str, Beyond]] = {
    "torch": {"semi_markov": beyond_loop},
    "torch-struct": {"semi_markov": beyond_torch_struct},
    "flash-semicrf": {"semi_markov": needs_gpu},
}


@dataclass(frozen=True)
class SemiMarkovCase(Case):
    """A batch of sequences with the same transitions and durations."""

    steps: int
    sequences: int
    states: int
    durations: int

    sizes: ClassVar[tuple[str, ...]] = ("steps", "sequences", "states")
    differs_by: ClassVar[tuple[str, ...]] = (*sizes, "durations")
    scores: ClassVar[str] = "emissions"
    slow: ClassVar[tuple[str, ...]] = ("torch", "torch-struct")
    slow_on_cpu: ClassVar[bool] = True

    def inputs(self, buffers: Buffers) -> SemiMarkovInputs:
        dtype, C = acc_dtype(self.dtype), self.states
        return SemiMarkovInputs(
            buffers.normal("scores", self.shape, self.dtype),
            buffers.normal("transitions", (C, C), dtype),
            buffers.normal("durations", (self.durations, C), dtype),
            *buffers.normal("ends", (2, C), dtype),
        )


@dataclass(frozen=True)
class LogZ(SumCase, SemiMarkovCase):
    """log Z and its gradients: posteriors, and expected counts of transitions and durations."""

    caption: ClassVar[str] = "log Z of semi-Markov chains and its gradients"
    learned: ClassVar[int] = 3

    def upstream(self, inputs: SemiMarkovInputs) -> list[Tensor]:
        return [inputs.transitions.new_ones(self.sequences)]

    def standard(self, inputs: SemiMarkovInputs) -> Truth:
        """Return the truth by a loop over the steps."""
        leaves = [tensor.requires_grad_() for tensor in in_fp64(inputs)]
        with torch.enable_grad():
            logz = loop_logz(*leaves)
            found = torch.autograd.grad(logz.sum(), leaves[:3])
        gradients = [Gradient(i, ..., each, each.clamp(min=1)) for i, each in enumerate(found)]
        return Truth(logz.detach(), ..., gradients)


@dataclass(frozen=True)
class Viterbi(BestCase, SemiMarkovCase):
    """The states of the best path, and where its segments start."""

    def standard(self, inputs: SemiMarkovInputs) -> Tensor:
        """Return the best scores, `[N]`, in fp64."""
        emissions, transitions, durations, start, end = in_fp64(inputs)
        opened, ages = start.expand(emissions.shape[1:]), emissions[:0]
        for emission in emissions:
            ages = torch.cat([opened[None], ages[: len(durations) - 1]]) + emission
            closed = (ages + durations[: len(ages), None]).amax(0)
            opened = (closed[:, :, None] + transitions).amax(1)
        return (closed + end).amax(-1)

    def path_scores(self, inputs: SemiMarkovInputs, found: Any, standard: Tensor) -> Tensor:
        chain = SemiMarkovChain(*in_fp64(inputs))
        with torch.no_grad():
            return chain.log_prob(*found) + chain.logz()


def semi_markov_cases(settings: Settings) -> Iterator[Case]:
    for dtype in settings.types():
        for size in SIZES.chosen(settings, "states"):
            limits = fewer(size.steps, size.sequences, size.states, settings.elements)
            yield LogZ("semi_markov", dtype, *limits, *size[2:])
            yield Viterbi("semi_markov_viterbi", dtype, *limits, *size[2:])
