"""Cross-entropy from hidden states: the loss alone, loss and gradients, and their memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..runtime.dtypes import acc_dtype
from .case import Buffers, Case, Loop, Moves, Settings, TrainedCase, Verdict, poison, training_loop
from .linear_peers import LinearInputs
from .providers import PRODUCTS, TORCH, Function, Provider, is_ours

# The bound of Partita is this multiple of PyTorch's error, as in the contract, plus the slack.
TOLERANCE = 2.0
PEER_BOUND = 5e-2  # relative to the greatest gradient, and to the loss
# A peer that leaves out small gradients has none for classes that are no token's label.
PEER_BOUND_OTHERS = 1.5
TOKENS_JUDGED, CLASSES_JUDGED = 64, 32  # classes that are labels, and that number of others
ELEMENTS_AT_ONCE = 2**27  # logits in fp64 that are in memory together


class Size(NamedTuple):
    tokens: int
    hidden: int
    vocabulary: int


SIZES = (
    Size(8192, 4096, 128256),
    Size(16384, 2048, 262144),
    Size(8192, 2048, 32768),
    Size(4096, 4096, 128256),
)
QUICK_SIZES = (SIZES[2],)
CPU_SIZES, CPU_QUICK_SIZES = (Size(256, 128, 4000),), (Size(128, 64, 1000),)


class Sample(NamedTuple):
    """Some rows of a gradient, in fp64.

    Fields:
        leaf: 0 for the gradient of the hidden states, 1 for that of the matrix.
        rows: `[n]`, the indices of the rows.
        gradient: `[n, hidden]`, the true rows.
        peer_bound: the bound of the error of peers.
    """

    leaf: int
    rows: Tensor
    gradient: Tensor
    peer_bound: float


class Truth(NamedTuple):
    """The loss and samples of the gradients in fp64, and the errors of PyTorch."""

    loss: Tensor
    samples: list[Sample]
    own: list[float]


@dataclass(frozen=True)
class LinearCrossEntropy(TrainedCase):
    """The mean loss, which is bounded by three matrix products, one of them in the forward pass."""

    tokens: int
    hidden: int
    vocabulary: int

    sizes: ClassVar[tuple[str, ...]] = ("tokens", "hidden", "vocabulary")
    varying: ClassVar[tuple[str, ...]] = sizes
    scores: ClassVar[str] = "logits"
    yardstick: ClassVar[str] = PRODUCTS.name
    caption: ClassVar[str] = "Cross-entropy from hidden states and its gradients"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tokens, self.vocabulary

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {}

    def inputs(self, buffers: Buffers) -> LinearInputs:
        matrix = (
            buffers.normal("matrix", (self.vocabulary, self.hidden), self.dtype) * self.hidden**-0.5
        )  # logits of variance 1
        return LinearInputs(
            buffers.normal("hidden", (self.tokens, self.hidden), self.dtype),
            matrix,
            buffers.labels(self.tokens, self.vocabulary),
        )

    def standard(self, inputs: LinearInputs) -> Truth:
        with torch.no_grad():
            loss, samples = truth_of(inputs)
        try:
            own = [
                verdict.error for verdict in compared(TORCH.ops[self.op](), inputs, loss, samples)
            ]
        except torch.OutOfMemoryError:  # PyTorch has all logits several times
            own = [PEER_BOUND] * (2 + len(samples))
        return Truth(loss, samples, own)

    def verdicts(
        self, function: Function, inputs: LinearInputs, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        """Judge all providers but the yardstick, which has no results."""
        if provider.name == self.yardstick:
            return
        slack = [self._slack(acc_dtype(self.dtype))] * 2 + [self._slack(self.dtype)] * len(
            standard.samples
        )
        of_peers = [PEER_BOUND] * 2 + [sample.peer_bound for sample in standard.samples]
        of_ours = [TOLERANCE * own + more for own, more in zip(standard.own, slack, strict=True)]
        verdicts = compared(function, inputs, standard.loss, standard.samples)
        for verdict, allowed in zip(
            verdicts, of_ours if is_ours(provider.name) else of_peers, strict=True
        ):
            yield replace(verdict, allowed=allowed)

    @staticmethod
    def _slack(dtype: torch.dtype) -> float:
        """Return the slack of a dtype; the last rounding of half types is most of the error."""
        return torch.finfo(dtype).eps * (1 / 4 if dtype.itemsize == 2 else 16)

    def training(self, function: Function, inputs: LinearInputs) -> Loop:
        return training_loop(function, inputs[:2], [inputs.target])


def _leaves(inputs: LinearInputs) -> list[Tensor]:
    return [tensor.detach().requires_grad_() for tensor in inputs[:2]]


def truth_of(inputs: LinearInputs) -> tuple[Tensor, list[Sample]]:
    """Compute the truth in fp64, some tokens at a time.

    It is the loss of all tokens, and the gradients of some tokens, of some classes that are labels,
    and of some that are not.
    """
    hidden, matrix, target = inputs[0].double(), inputs[1].double(), inputs[2]
    tokens, classes = len(hidden), len(matrix)
    logsumexp = torch.cat(
        [
            (part @ matrix.T).logsumexp(1)
            for part in hidden.split(max(1, ELEMENTS_AT_ONCE // classes))
        ]
    )
    loss = (
        logsumexp
        - torch.cat(
            [
                (x * matrix[t]).sum(1)
                for x, t in zip(hidden.split(1024), target.split(1024), strict=True)
            ]
        )
    ).mean()
    which = _evenly(torch.arange(tokens, device=target.device), TOKENS_JUDGED)
    p = (hidden[which] @ matrix.T - logsumexp[which, None]).exp()
    p[torch.arange(len(which), device=p.device), target[which]] -= 1
    samples = [Sample(0, which, p @ matrix / tokens, PEER_BOUND)]
    labels = torch.bincount(target, minlength=classes) > 0
    for group, peer_bound in ((labels, PEER_BOUND), (~labels, PEER_BOUND_OTHERS)):
        which = _evenly(group.nonzero().squeeze(1), CLASSES_JUDGED)
        p = (hidden @ matrix[which].T - logsumexp[:, None]).exp() - (
            target[:, None] == which
        ).double()
        samples.append(Sample(1, which, p.T @ hidden / tokens, peer_bound))
    return loss, [sample for sample in samples if len(sample.rows)]


def _evenly(candidates: Tensor, limit: int) -> Tensor:
    """Return some of the candidates, with the first and the last."""
    return candidates[
        torch.linspace(
            0, len(candidates) - 1, min(limit, len(candidates)), device=candidates.device
        ).long()
    ]


def compared(
    function: Function, inputs: LinearInputs, loss: Tensor, samples: Sequence[Sample]
) -> Iterator[Verdict]:
    """Yield the errors over the greatest true value, without a bound.

    They are those of the loss with gradients and without, and of each sample.
    """
    leaves = _leaves(inputs)
    for leaf in leaves:
        poison(leaf)
    result = function(*leaves, inputs.target)
    gradients = torch.autograd.grad(result, leaves)
    yield worst_error(result.detach()[None], loss[None])
    yield worst_error(function(*inputs).detach()[None], loss[None])
    for sample in samples:
        worst = worst_error(gradients[sample.leaf][sample.rows], sample.gradient)
        yield replace(worst, index=(int(sample.rows[worst.index[0]]), *worst.index[1:]))


def worst_error(got: Tensor, expected: Tensor) -> Verdict:
    """Return the worst error over the greatest true value, without a bound."""
    error = ((got.double() - expected).abs() / expected.abs().max()).nan_to_num(nan=torch.inf)
    index = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return Verdict(float(error[index]), math.inf, index, float(got[index]), float(expected[index]))


def linear_sizes(settings: Settings) -> Iterator[Size]:
    """Yield the sizes of cases from hidden states."""
    gpu = settings.device.type == "cuda"
    sizes: Sequence[Size] = (
        (QUICK_SIZES if settings.quick else SIZES)
        if gpu
        else (CPU_QUICK_SIZES if settings.quick else CPU_SIZES)
    )
    if settings.columns:
        sizes = [sizes[0]._replace(vocabulary=max(2, columns)) for columns in settings.columns]
    for size in sizes:
        limit = settings.elements // size.vocabulary if settings.elements else size.tokens
        yield size._replace(tokens=max(1, min(size.tokens, limit)))


def cases(settings: Settings) -> Iterator[Case]:
    for dtype in settings.types(torch.bfloat16):
        for size in linear_sizes(settings):
            yield LinearCrossEntropy("linear_cross_entropy", dtype, *size)
