"""Sparse linear chains: log Z, its gradient and memory, and the best path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.chain.api import Chain
from ..ops.chain.edges import dense_source
from ..primitives.semiring import Max
from ..runtime.backend import backend
from ..runtime.dtypes import acc_dtype
from .case import Buffers, Case, Loop, Moves, Settings, TrainedCase, Verdict, poison, training_loop
from .providers import Function, Provider, is_ours

BASES = 4  # A, C, G and T
WINDOW = 3  # a label, the blank before it, and the label before that
# The truth in fp64 takes much longer than the kernels, so it is computed for a few chains.
CHAINS_JUDGED = 4
ELEMENTS_JUDGED = 2**24
CONTRACT = (2e-6, 1e-6)  # bounds of marginals, and of log Z over max(1, |log Z|)
MAX_REFERENCE_STEPS = 10_000  # of the truth in PyTorch, which has many calls for each step
ROUNDING_A_STEP = 1e-9  # added to the bound of log Z for each step
# Peers carry fp32 states, whose marginals are off by 1e-3 at 2,000 steps.
PEER_BOUND = 1e-2

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


class Size(NamedTuple):
    steps: int
    chains: int
    states: int
    table: SourceTable = kmers


SIZES = (
    Size(800, 64, 64),
    Size(800, 64, 256),
    Size(800, 64, 1024),
    Size(2000, 128, 256),
    Size(2000, 64, 1024),
    Size(500, 128, 201, alignment),
    Size(100_000, 1, 16),
    Size(1_000_000, 1, 4, dense_source),
)
CPU_SIZES = Size(500, 8, 64), Size(200, 4, 1024), Size(500, 8, 201, alignment)
CPU_QUICK_SIZES = Size(100, 4, 64), Size(100, 4, 256)


class Inputs(NamedTuple):
    scores: Tensor  # [T, N, C, K]
    source: Tensor  # [C, K]
    initial: Tensor  # [N, C]
    final: Tensor  # [N, C]


class Truth(NamedTuple):
    """The truth in fp64 for some of the chains."""

    chains: Tensor  # [n], their indices
    logz: Tensor  # [n]
    marginals: Tensor  # [T, n, C, K]


class Best(NamedTuple):
    """The best scores in fp64 for some of the chains."""

    chains: Tensor  # [n], their indices
    score: Tensor  # [n]


@dataclass(frozen=True)
class ChainCase(Case):
    """A batch of chains over one table of sources."""

    steps: int
    chains: int
    states: int
    table: SourceTable

    sizes: ClassVar[tuple[str, ...]] = ("steps", "chains", "states", "slots")
    varying: ClassVar[tuple[str, ...]] = sizes
    scores: ClassVar[str] = "scores"

    @property
    def slots(self) -> int:
        return self.table(self.states).shape[1]

    def inputs(self, buffers: Buffers) -> Inputs:
        ends = torch.zeros(
            self.chains, self.states, dtype=acc_dtype(self.dtype), device=buffers.device
        )
        source = self.table(self.states).to(buffers.device, torch.int32)
        return Inputs(buffers.normal("scores", self.shape, self.dtype), source, ends, ends)

    def is_slow(self, provider: Provider, device: torch.device) -> bool:
        """Return whether this is a loop in Python, a peer's long scan, or anything on the CPU."""
        long_scan = self.steps > MAX_REFERENCE_STEPS and not is_ours(provider.name)
        return provider.name == "torch" or long_scan or device.type == "cpu"


def judged(inputs: Inputs) -> tuple[Tensor, Chain]:
    """Return the indices of some chains, with the first and the last, and these chains in fp64."""
    steps, chains, states, slots = inputs.scores.shape
    number = max(1, min(CHAINS_JUDGED, chains, ELEMENTS_JUDGED // (steps * states * slots)))
    which = torch.linspace(0, chains - 1, number, device=inputs.scores.device).long()
    return which, Chain(
        inputs.scores[:, which].double(),
        inputs.source,
        inputs.initial[which].double(),
        inputs.final[which].double(),
    )


def scanned_in_order(chain: Chain, final: Tensor) -> tuple[Tensor, Tensor]:
    """Return log Z and the marginals of chains in fp64 from the scores of their states.

    Their scans take one step after the other, also where log Z is parallel in time.
    """
    alpha, beta = chain.forward_scores(), chain.backward_scores()
    logz = (alpha[-1] + final).logsumexp(-1)
    sums = (alpha + beta).logsumexp(-1)[1:]  # log Z at each time, up to rounding
    weights = alpha[:-1, :, chain.source.clamp(min=0).long()] + chain.scores
    marginals = (weights + (beta[1:] - sums[..., None])[..., None]).exp()
    return logz, marginals.masked_fill(chain.source < 0, 0.0)


def worst(error: Tensor, allowed: float, got: Tensor, expected: Tensor) -> Verdict:
    error = error.nan_to_num(nan=torch.inf)
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return Verdict(float(error[index]), allowed, index, float(got[index]), float(expected[index]))


def rounding(truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of rounding a marginal to a half type, which a gradient has to have."""
    return truth * (torch.finfo(dtype).eps / 2 if dtype.itemsize < 4 else 0.0)


@dataclass(frozen=True)
class LogZ(TrainedCase, ChainCase):
    """log Z reads the scores once; the marginals need a second read and a write."""

    caption: ClassVar[str] = "log Z and its gradient"

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read"), "total": Moves(3 * self.bytes, "copy")}

    def standard(self, inputs: Inputs) -> Truth:
        which, chain = judged(inputs)
        if self.steps > MAX_REFERENCE_STEPS:
            return Truth(which, *scanned_in_order(chain, inputs.final[which]))
        with backend("reference"), torch.no_grad():
            return Truth(which, chain.logz(), chain.marginals())

    def verdicts(
        self, function: Function, inputs: Inputs, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        which, truth, marginals = standard
        of_marginals, of_logz = CONTRACT if is_ours(provider.name) else (PEER_BOUND, PEER_BOUND)
        scores, *others = inputs
        leaf = scores.detach().requires_grad_()
        poison(scores)
        total = function(leaf, *others)
        (grad,) = torch.autograd.grad(total, leaf, torch.ones_like(total))
        some = grad[:, which].double()
        yield worst(
            ((some - marginals).abs() - rounding(marginals, grad.dtype)).clamp(min=0),
            of_marginals,
            some,
            marginals,
        )
        for result in (total.detach(), function(scores, *others)):
            some = result[which].double()
            apart = ((some - truth).abs() - ROUNDING_A_STEP * self.steps).clamp(min=0)
            yield worst(apart / truth.abs().clamp(min=1), of_logz, some, truth)
        yield one_edge_a_step(grad)

    def training(self, function: Function, inputs: Inputs) -> Loop:
        scores, *others = inputs
        ones = torch.ones(scores.shape[1], dtype=inputs.initial.dtype, device=scores.device)
        return training_loop(function, [scores], others, ones)


def one_edge_a_step(marginals: Tensor) -> Verdict:
    """Check on all chains that the marginals of a step sum to 1; small errors count as none."""
    sums = marginals.sum((2, 3), dtype=torch.float64)
    apart = (sums - 1).abs()
    return worst(
        apart.masked_fill(apart <= PEER_BOUND, 0.0), PEER_BOUND, sums, torch.ones_like(sums)
    )


@dataclass(frozen=True)
class Viterbi(ChainCase):
    """The edges of the best path, for one read of the scores."""

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read")}

    def standard(self, inputs: Inputs) -> Best:
        which, chain = judged(inputs)
        if self.steps > MAX_REFERENCE_STEPS:
            return Best(which, (chain.forward_scores(Max)[-1] + inputs.final[which]).amax(-1))
        with backend("reference"), torch.no_grad():
            return Best(which, chain.logz(Max))

    def verdicts(
        self, function: Function, inputs: Inputs, provider: Provider, standard: Best
    ) -> Iterator[Verdict]:
        """Accept any connected path with the best score."""
        allowed = CONTRACT[1] if is_ours(provider.name) else PEER_BOUND
        edges = function(*inputs).long()
        safe = edges.clamp(0, self.states * self.slots - 1)
        yield broken_path(edges, safe, inputs.source, allowed)
        scores = (
            inputs.scores.flatten(2)
            .gather(2, safe[..., None])
            .sum((0, 2), dtype=torch.float64)[standard.chains]
        )
        yield worst(
            (standard.score - scores).abs() / standard.score.abs().clamp(min=1),
            allowed,
            scores,
            standard.score,
        )

    def loops(self, function: Function, inputs: Inputs, provider: Provider) -> Sequence[Loop]:
        return [Loop((("inference", lambda: function(*inputs)),), lambda: None)]


def broken_path(edges: Tensor, safe: Tensor, source: Tensor, allowed: float) -> Verdict:
    """Return the share of edges that do not exist or do not continue the edge before them."""
    left, entered = source.flatten()[safe].long(), safe // source.shape[1]
    broken = (edges != safe) | (left < 0)
    broken[1:] |= left[1:] != entered[:-1]
    first = worst(broken.double(), allowed, left, entered.roll(1, 0))
    return replace(first, error=float(broken.double().mean()))


def chosen_sizes(
    settings: Settings, on_gpu: Sequence[Any], on_cpu: Sequence[Any], quick: Sequence[Any]
) -> Sequence[Any]:
    """Return the sizes for the device, or its first size with the states that the user names."""
    gpu = settings.device.type == "cuda"
    if settings.columns:
        return [(on_gpu if gpu else on_cpu)[0]._replace(states=n) for n in settings.columns]
    if gpu:
        return on_gpu[:2] if settings.quick else on_gpu
    return quick if settings.quick else on_cpu


def _sizes(settings: Settings) -> Iterator[Size]:
    for size in chosen_sizes(settings, SIZES, CPU_SIZES, CPU_QUICK_SIZES):
        yield _within(size, settings.elements) if settings.elements else size


def _within(size: Size, elements: int) -> Size:
    """Return a size with fewer or shorter chains that has at most this number of scores."""
    step = size.table(size.states).numel()
    chains = max(1, min(size.chains, elements // (size.steps * step)))
    return size._replace(chains=chains, steps=max(1, min(size.steps, elements // (chains * step))))


def cases(settings: Settings) -> Iterator[Case]:
    for dtype in settings.types():
        for size in _sizes(settings):
            yield LogZ("chain", dtype, *size)
            yield Viterbi("viterbi", dtype, *size)
