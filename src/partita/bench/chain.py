"""Chains: log Z alone, with its gradient, and the best path, over tables of k-mers and of CTC.

The bound of Partita is its contract (marginals within 2e-6 of fp64), and that of the peers is 1e-2.
There is no `compile`, which would unroll a loop over hundreds of steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.chain.api import Chain, logz
from ..ops.chain.edges import dense_source
from ..primitives.semiring import Max
from ..runtime.backend import backend
from ..runtime.dtypes import acc_dtype
from ..testing.samples.in_torch import reachable
from ..testing.samples.in_torch import total_of_paths as loop_logz
from .case import Buffers, Function, Functions, Limited, Load, Sizes, Verdict, cases_of
from .paths import PEER_BOUND, BestCase, Gradient, LogZCase, SequencesCase, Truth, evenly, worst

BASES = 4  # A, C, G and T
WINDOW = 3  # a label, the blank before it, and the label before that
# The truth in fp64 takes much longer than the kernels, so it is computed for a few chains.
CHAINS_JUDGED = 4
ELEMENTS_JUDGED = 2**24
MAX_REFERENCE_STEPS = 10_000  # of the truth in PyTorch, which has many calls for each step
MAX_STEPS = 10_000  # of a loop in Python, which takes milliseconds a step with its gradient
MAX_STATES = 1024  # of koi and seqdist, whose blocks have one thread for each state

SourceTable = Callable[[int], Tensor]


def kmers(states: int) -> Tensor:
    """Return the table of CTC-CRF, `[C, 5]`.

    A k-mer is entered from itself, and from the four k-mers that become it when a base is added.
    """
    moves = torch.arange(states).repeat_interleave(BASES).reshape(BASES, states).T
    return torch.cat([torch.arange(states)[:, None], moves], 1)


def alignment(states: int) -> Tensor:
    """Return the table of CTC, `[C, 3]`.

    A state is entered from itself and from the two states before it; -1 means no edge.
    """
    return (torch.arange(states)[:, None] - torch.arange(WINDOW)).clamp(min=-1)


FULL_SIZES = (  # steps, chains, states and table
    (800, 64, 64, kmers),
    (800, 64, 256, kmers),
    (800, 64, 1024, kmers),
    (2000, 128, 256, kmers),
    (2000, 64, 1024, kmers),
    (500, 128, 201, alignment),
    (100_000, 1, 16, kmers),
    (1_000_000, 1, 4, dense_source),
)
SIZES = Sizes(
    FULL_SIZES,
    FULL_SIZES[:2],
    [(500, 8, 64, kmers), (200, 4, 1024, kmers), (500, 8, 201, alignment)],
    [(100, 4, 64, kmers), (100, 4, 256, kmers)],
)


class Inputs(NamedTuple):
    scores: Tensor  # [T, N, C, K]
    source: Tensor  # [C, K]
    initial: Tensor  # [N, C]
    final: Tensor  # [N, C]


def loop_viterbi(scores: Tensor, source: Tensor, initial: Tensor, final: Tensor) -> Tensor:
    """Compute the edges of the best path, `[T, N]`, by a maximum for each step and a trace-back."""
    scores, source = reachable(scores, source)
    alpha, choices = initial, []
    for step in scores:
        alpha, choice = (step + alpha[:, source]).max(-1)
        choices.append(choice)
    state, edges = (alpha + final).argmax(-1), []
    for choice in reversed(choices):
        slot = choice.gather(1, state[:, None]).squeeze(1)
        edges.append(state * source.shape[1] + slot)
        state = source[state, slot]
    return torch.stack(edges[::-1])


def beyond_loop(inputs: Any) -> str | None:
    return f"a loop of more than {MAX_STEPS:,} steps" if len(inputs[0]) > MAX_STEPS else None


def beyond_fp32_kernels(inputs: Any) -> str | None:
    scores, source, *_ = inputs
    if scores.device.type != "cuda":
        return "needs a GPU"
    if scores.dtype != torch.float32:
        return "takes fp32 scores only"
    states, slots = source.shape
    if states > MAX_STATES:
        return f"takes at most {MAX_STATES:,} states"
    if (source < 0).any() or (torch.bincount(source.flatten(), minlength=states) != slots).any():
        return f"takes tables only that use each source exactly {slots} times"
    return None


def _sum_over_paths(module: str, name: str, semiring: str) -> Function:
    library = importlib.import_module(module)
    function, S = getattr(library, name), getattr(library, semiring)
    return lambda scores, source, initial, final: function(scores, source, initial, final, S, 1)


def _best_edges(best_score: Function) -> Function:
    """Return the function that finds the best path by the gradient of its score.

    Users of these libraries decode in this way.
    """

    def function(scores: Tensor, *others: Tensor) -> Tensor:
        leaf = scores.detach().requires_grad_()
        with torch.enable_grad():
            best = best_score(leaf, *others)
            (indicator,) = torch.autograd.grad(best, leaf, torch.ones_like(best))
        return indicator.flatten(2).argmax(2)

    return function


def _library(module: str, name: str) -> dict[str, Limited]:
    """Return the ops of a library that has the partition function of chains under a semiring."""
    ops: dict[str, Load] = {
        "chain": lambda: _sum_over_paths(module, name, "Log"),
        "viterbi": lambda: _best_edges(_sum_over_paths(module, name, "Max")),
    }
    return {op: Limited(load, beyond_fp32_kernels) for op, load in ops.items()}


PROVIDERS: Functions = {
    "partita": {
        "chain": lambda: logz,
        "viterbi": lambda: lambda *inputs: Chain(*inputs).viterbi().edges,
    },
    "torch": {
        "chain": Limited(lambda: loop_logz, beyond_loop),
        "viterbi": Limited(lambda: loop_viterbi, beyond_loop),
    },
    "koi": _library("koi.ctc", "logZ_cu_sparse"),
    "seqdist": _library("seqdist.sparse", "logZ"),
}


@dataclass(frozen=True)
class ChainCase(SequencesCase):
    """A batch of chains over one table of sources."""

    chains: int
    states: int
    table: SourceTable

    sizes = ("steps", "chains", "states", "slots")
    scores = "scores"
    shrinks: ClassVar[Mapping[str, int]] = {"chains": 1, "steps": 1}
    width = "states"

    @property
    def slots(self) -> int:
        return self.table(self.states).shape[1]

    def inputs(self, buffers: Buffers) -> Inputs:
        dtype, source = acc_dtype(self.dtype), self.table(self.states)
        ends = torch.zeros(self.chains, self.states, dtype=dtype, device=buffers.device)
        scores = buffers.normal("scores", self.shape, self.dtype)
        return Inputs(scores, source.to(buffers.device, torch.int32), ends, ends)


def judged(inputs: Inputs) -> Tensor:
    """Return the indices of some chains, with the first and the last."""
    steps, chains, states, slots = inputs.scores.shape
    number = min(CHAINS_JUDGED, ELEMENTS_JUDGED // (steps * states * slots))
    return evenly(number, chains, inputs.scores.device)


def judged_chain(inputs: Inputs) -> Chain:
    """Return these chains in fp64."""
    which = judged(inputs)
    ends = (inputs.initial[which].double(), inputs.final[which].double())
    return Chain(inputs.scores[:, which].double(), inputs.source, *ends)


def scanned_in_order(chain: Chain) -> tuple[Tensor, Tensor]:
    """Return log Z and the marginals of chains in fp64 from the scores of their states.

    Their scans take one step after the other, also where log Z is parallel in time.
    """
    alpha, beta = chain.forward_scores(), chain.backward_scores()
    sums = (alpha + beta).logsumexp(-1)  # log Z at each time, up to rounding
    weights = alpha[:-1, :, chain.source.clamp(min=0).long()] + chain.scores
    marginals = (weights + (beta - sums[..., None])[1:][..., None]).exp()
    return sums[-1], marginals.masked_fill(chain.source < 0, 0.0)


@dataclass(frozen=True)
class LogZ(LogZCase, ChainCase):
    """log Z and its gradient, which are marginals."""

    caption = "log Z and its gradient"

    def standard(self, inputs: Inputs) -> Truth:
        chain = judged_chain(inputs)
        if self.steps > MAX_REFERENCE_STEPS:
            logz, marginals = scanned_in_order(chain)
        else:
            with backend("reference"), torch.no_grad():
                logz, marginals = chain.logz(), chain.marginals()
        which = judged(inputs)
        return Truth(logz, which, [Gradient(0, (slice(None), which), marginals)])

    def invariants(self, gradients: Sequence[Tensor]) -> Iterator[Verdict]:
        """Check on all chains that the marginals of a step sum to 1; small errors count as none."""
        sums = gradients[0].sum((2, 3), dtype=torch.float64)
        apart = (sums - 1).abs()
        apart = apart.masked_fill(apart <= PEER_BOUND, 0.0)
        yield worst(apart, PEER_BOUND, sums, torch.ones_like(sums))


@dataclass(frozen=True)
class Viterbi(BestCase, ChainCase):
    """The edges of the best path."""

    def standard(self, inputs: Inputs) -> Tensor:
        """Return the best scores of the judged chains in fp64."""
        chain = judged_chain(inputs)
        if self.steps > MAX_REFERENCE_STEPS:
            return (chain.forward_scores(Max)[-1] + inputs.final[judged(inputs)]).amax(-1)
        with backend("reference"), torch.no_grad():
            return chain.logz(Max)

    def broken(self, inputs: Inputs, found: Tensor) -> Tensor:
        """Return which chains have an edge that does not exist or does not continue the path."""
        edges = found.long()
        safe = edges.clamp(0, self.states * self.slots - 1)
        left, entered = inputs.source.flatten()[safe].long(), safe // self.slots
        broken = (edges != safe) | (left < 0)
        broken[1:] |= left[1:] != entered[:-1]
        return broken.any(0)

    def path_scores(self, inputs: Inputs, found: Tensor) -> Tensor:
        safe = found.long().clamp(0, self.states * self.slots - 1)
        scores = inputs.scores.flatten(2).gather(2, safe[..., None])
        return scores.sum((0, 2), dtype=torch.float64)[judged(inputs)]


chain_cases = cases_of({"chain": (LogZ, SIZES), "viterbi": (Viterbi, SIZES)})
OPS = {"chain": chain_cases}
