"""Transducers: the loss of RNN-T and TDT from logits with its gradient, under the same contract.

The loss of RNN-T is timed from encoder and predictor too. PyTorch is the reference, by
anti-diagonals in fp64.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.rnnt.api import rnnt_loss, tdt_loss
from ..ops.rnnt.linear import linear_rnnt_loss
from ..runtime.backend import backend
from .case import Buffers, Case, Function, Functions, Moves, Provider, Settings, Sizes, cases_of
from .paths import LossCase

DURATIONS = (0, 1, 2, 3, 4)
# Partita's matrix products in half types are judged like those of others: they round the logits.
HALF_BOUND = 5e-2

FULL_SIZES = (  # sequences, steps, labels and classes
    (8, 200, 40, 500),
    (32, 200, 100, 1025),
    (8, 400, 100, 1025),
    (1, 2000, 300, 1025),
)
SIZES = Sizes(
    FULL_SIZES,
    FULL_SIZES[:2],
    [(2, 60, 20, 100), (1, 150, 40, 256)],
    [(2, 20, 6, 32), (1, 12, 4, 64)],
)
HIDDEN = (640, 640, 128, 16)
LINEAR_SIZES = Sizes(
    *([(*size, D) for size in sizes] for sizes, D in zip(SIZES, HIDDEN, strict=True))
)


class RNNTInputs(NamedTuple):
    """A batch of logits and targets of full length; class 0 is the blank."""

    logits: Tensor  # [B, T, U + 1, V]
    durations: Tensor | None  # [B, T, U + 1, K]
    targets: Tensor  # [B, U] int32
    lengths: Tensor  # [2, B] int32, the steps and the labels of each sequence


class JointInputs(NamedTuple):
    encoder: Tensor  # [B, T, D]
    predictor: Tensor  # [B, U + 1, D]
    weight: Tensor  # [V, D]
    targets: Tensor  # [B, U] int32
    lengths: Tensor  # [2, B] int32


def partita_rnnt(
    logits: Tensor, durations: Tensor | None, targets: Tensor, lengths: Tensor
) -> Tensor:
    """Compute the summed loss; the tensor of no durations is None."""
    if durations is None:
        return rnnt_loss(logits, targets, lengths[0], lengths[1], blank=0, reduction="sum")
    sequences = (targets, lengths[0], lengths[1])
    return tdt_loss(logits, durations, *sequences, 0, DURATIONS, reduction="sum")


def partita_joint(
    encoder: Tensor, predictor: Tensor, weight: Tensor, targets: Tensor, lengths: Tensor
) -> Tensor:
    """Compute the summed loss from encoder and predictor."""
    sequences = (targets, lengths[0], lengths[1])
    return linear_rnnt_loss(encoder, predictor, weight, *sequences, blank=0, reduction="sum")


def reference_rnnt(*inputs: Any) -> Tensor:
    """Compute the summed loss in PyTorch, by anti-diagonals and in fp64."""
    with backend("reference"):
        return partita_rnnt(*inputs)


def with_joint(loss: Function) -> Function:
    """Return a loss from encoder and predictor that computes all logits."""

    def function(
        encoder: Tensor, predictor: Tensor, weight: Tensor, targets: Tensor, lengths: Tensor
    ) -> Tensor:
        hidden = (encoder[:, :, None] + predictor[:, None]).relu()
        return loss(hidden @ weight.T, None, targets, lengths)

    return function


def torchaudio_rnnt() -> Function:
    """Return the summed loss of torchaudio, which takes fp32 and fp16."""
    library: Any = importlib.import_module("torchaudio.functional")

    def function(logits: Tensor, durations: None, targets: Tensor, lengths: Tensor) -> Tensor:
        logits = logits.float() if logits.dtype != torch.float16 else logits
        return library.rnnt_loss(logits, targets, *lengths, blank=0, reduction="sum")

    return function


TORCH: dict[str, Function] = {
    "rnnt": reference_rnnt,
    "tdt": reference_rnnt,
    "linear_rnnt": with_joint(reference_rnnt),
}
PROVIDERS: Functions = {
    "partita": {
        "rnnt": lambda: partita_rnnt,
        "tdt": lambda: partita_rnnt,
        "linear_rnnt": lambda: partita_joint,
    },
    "torchaudio": {"rnnt": torchaudio_rnnt, "linear_rnnt": lambda: with_joint(torchaudio_rnnt())},
}


@dataclass(frozen=True)
class TransducerCase(Case):
    """A batch of sequences of full length."""

    sequences: int
    steps: int
    longest: int
    classes: int

    sizes: ClassVar[tuple[str, ...]] = ("sequences", "steps", "longest", "classes")
    width, least_width = "classes", 2
    versus = "torchaudio"
    shrinks: ClassVar[Mapping[str, int]] = {"sequences": 1, "steps": 1, "longest": 1}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sequences, self.steps, self.longest + 1, self.classes

    def targets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return random targets, the same on all devices, and the lengths."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.sequences, self.longest)
        targets = torch.randint(1, self.classes, shape, generator=generator, dtype=torch.int32)
        lengths = torch.tensor([[self.steps], [self.longest]], dtype=torch.int32, device=device)
        return targets.to(device), lengths.expand(-1, self.sequences).contiguous()


@dataclass(frozen=True)
class RNNT(LossCase, TransducerCase):
    """The summed loss from logits, whose truth is that of the reference."""

    caption = "transducer loss and its gradient"
    dims: ClassVar[tuple[int | None, ...]] = (0, 0, 0, 1)

    def inputs(self, buffers: Buffers) -> Any:
        logits = buffers.normal("logits", self.shape, self.dtype)
        return RNNTInputs(logits, None, *self.targets(buffers.device))

    def exact(self, inputs: Any) -> Tensor:
        return TORCH[self.op](*inputs)


class TDT(RNNT):
    """The summed loss from logits of labels and of durations."""

    learned = 2

    def inputs(self, buffers: Buffers) -> RNNTInputs:
        shape = (*self.shape[:3], len(DURATIONS))
        durations = buffers.normal("durations", shape, self.dtype)
        return super().inputs(buffers)._replace(durations=durations)


@dataclass(frozen=True)
class LinearRNNT(RNNT):
    """The summed loss from encoder and predictor, which no read of logits bounds."""

    hidden: int

    sizes = (*RNNT.sizes, "hidden")
    scores = "hidden states"
    dims = (0, 0, None, 0, 1)
    caption = "transducer loss and its gradients from hidden states"
    learned = 3
    work: ClassVar[Mapping[str, Moves]] = {}

    def inputs(self, buffers: Buffers) -> JointInputs:
        B, T, positions, D = self.sequences, self.steps, self.longest + 1, self.hidden
        weight = buffers.normal("matrix", (self.classes, D), self.dtype) * D**-0.5
        encoder = buffers.normal("encoder", (B, T, D), self.dtype)
        predictor = buffers.normal("predictor", (B, positions, D), self.dtype)
        return JointInputs(encoder, predictor, weight, *self.targets(buffers.device))

    def contract(self, provider: Provider) -> tuple[float, float]:
        exact = provider.is_ours and self.dtype.itemsize > 2
        return (1e-4, 1e-5) if exact else (HALF_BOUND, HALF_BOUND)


from_logits = cases_of({"rnnt": (RNNT, SIZES), "tdt": (TDT, SIZES)})
from_hidden = cases_of({"linear_rnnt": (LinearRNNT, LINEAR_SIZES)}, torch.bfloat16)


def rnnt_cases(settings: Settings) -> Iterator[Case]:
    yield from from_logits(settings)
    yield from from_hidden(settings)


OPS = {"rnnt": rnnt_cases}
