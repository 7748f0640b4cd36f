"""Transducers: the loss from logits, with durations too, and from encoder and predictor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .case import Buffers, Case, Loop, Moves, Settings, TrainedCase, Verdict, poison, training_loop
from .chain import CONTRACT, PEER_BOUND, chosen_sizes, rounding, worst
from .providers import Function, Provider, is_ours
from .rnnt_peers import DURATIONS, JointInputs, RNNTInputs, reference_rnnt, with_joint

HIDDEN = 640
# Partita's matrix products in half types are judged like those of others: they round the logits.
HALF_BOUND = 5e-2


class Size(NamedTuple):
    """Sequences of so many steps, with targets of so many labels out of some classes."""

    sequences: int
    steps: int
    longest: int
    classes: int


SIZES = (
    Size(8, 200, 40, 500),
    Size(32, 200, 100, 1025),
    Size(8, 400, 100, 1025),
    Size(1, 2000, 300, 1025),
)
CPU_SIZES = Size(2, 60, 20, 100), Size(1, 150, 40, 256)
CPU_QUICK_SIZES = Size(2, 20, 6, 32), Size(1, 12, 4, 64)


class Truth(NamedTuple):
    """The summed loss in fp64, and its gradient in the first input for the first sequence."""

    loss: Tensor  # []
    gradient: Tensor  # [T, ...]


@dataclass(frozen=True)
class RNNT(TrainedCase):
    """The summed loss from logits reads them once; its gradient needs a second read and a write."""

    sequences: int
    steps: int
    longest: int
    classes: int

    sizes: ClassVar[tuple[str, ...]] = ("sequences", "steps", "longest", "classes")
    varying: ClassVar[tuple[str, ...]] = sizes
    scores: ClassVar[str] = "logits"
    versus: ClassVar[str] = "torchaudio"
    caption: ClassVar[str] = "transducer loss and its gradient"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sequences, self.steps, self.longest + 1, self.classes

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read"), "total": Moves(3 * self.bytes, "copy")}

    def targets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return random targets, the same on all devices, and the lengths."""
        generator = torch.Generator().manual_seed(0)
        shape = (self.sequences, self.longest)
        targets = torch.randint(1, self.classes, shape, generator=generator, dtype=torch.int32)
        lengths = torch.tensor([[self.steps], [self.longest]], dtype=torch.int32, device=device)
        return targets.to(device), lengths.expand(-1, self.sequences).contiguous()

    def inputs(self, buffers: Buffers) -> Any:
        durations = None
        if self.op == "tdt":
            shape = (*self.shape[:3], len(DURATIONS))
            durations = buffers.normal("durations", shape, self.dtype)
        logits = buffers.normal("logits", self.shape, self.dtype)
        return RNNTInputs(logits, durations, *self.targets(buffers.device))

    def standard(self, inputs: Any) -> Truth:
        """Compute the loss in fp64, one sequence at a time."""
        total, first = torch.zeros((), dtype=torch.float64, device=inputs[0].device), None
        for b in range(self.sequences):
            leaf, *others = one_sequence(inputs, b)
            leaf.requires_grad_(first is None)
            loss = self.in_torch()(leaf, *others)
            if first is None:
                first = torch.autograd.grad(loss, leaf)[0][0]
            total += loss.detach()
        assert first is not None
        return Truth(total, first)

    def in_torch(self) -> Function:
        return reference_rnnt

    def verdicts(
        self, function: Function, inputs: Any, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        bounds = self.bounds(provider)
        leaf = inputs[0].detach().requires_grad_()
        poison(leaf)
        loss = function(leaf, *inputs[1:])
        found = torch.autograd.grad(loss, leaf)[0][0].double()
        apart = (found - standard.gradient).abs() - rounding(standard.gradient.abs(), self.dtype)
        yield worst(apart.clamp(min=0), bounds[0], found, standard.gradient)
        with torch.no_grad():
            results = (loss.detach(), function(*inputs))
        for result in results:
            apart = (result.double() - standard.loss).abs() / standard.loss.abs().clamp(min=1)
            yield worst(apart[None], bounds[1], result[None], standard.loss[None])

    def bounds(self, provider: Provider) -> tuple[float, float]:
        """Return the bounds of the gradient, and of the loss over max(1, |loss|)."""
        return CONTRACT if is_ours(provider.name) else (PEER_BOUND, PEER_BOUND)

    def training(self, function: Function, inputs: Any) -> Loop:
        leaves = 1 if inputs[1] is None else 2
        return training_loop(function, inputs[:leaves], inputs[leaves:])

    def is_slow(self, provider: Provider, device: torch.device) -> bool:
        return provider.name == "torch"


@dataclass(frozen=True)
class LinearRNNT(RNNT):
    """The summed loss from encoder and predictor, which no read of logits bounds."""

    hidden: int

    sizes: ClassVar[tuple[str, ...]] = (*RNNT.sizes, "hidden")
    varying: ClassVar[tuple[str, ...]] = sizes
    scores: ClassVar[str] = "hidden states"
    caption: ClassVar[str] = "transducer loss and its gradients from hidden states"

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {}

    def inputs(self, buffers: Buffers) -> Any:
        B, T, positions, D = self.sequences, self.steps, self.longest + 1, self.hidden
        weight = buffers.normal("matrix", (self.classes, D), self.dtype) * D**-0.5
        encoder = buffers.normal("encoder", (B, T, D), self.dtype)
        predictor = buffers.normal("predictor", (B, positions, D), self.dtype)
        return JointInputs(encoder, predictor, weight, *self.targets(buffers.device))

    def in_torch(self) -> Function:
        return with_joint(reference_rnnt)

    def bounds(self, provider: Provider) -> tuple[float, float]:
        exact = is_ours(provider.name) and self.dtype.itemsize > 2
        return (1e-4, 1e-5) if exact else (HALF_BOUND, HALF_BOUND)

    def training(self, function: Function, inputs: Any) -> Loop:
        return training_loop(function, inputs[:3], inputs[3:])


def one_sequence(inputs: Any, b: int) -> list[Any]:
    """Return the inputs of a sequence in fp64; a matrix and integers have no batch of it."""
    found: list[Any] = []
    for name, value in zip(inputs._fields, inputs, strict=True):
        if value is None or name == "weight":
            found.append(None if value is None else value.double())
        elif name == "lengths":
            found.append(value[:, b : b + 1])
        else:
            part = value[b : b + 1].detach()
            found.append(part.double() if part.is_floating_point() else part)
    return found


def _sizes(settings: Settings) -> Iterator[Size]:
    widths = [None] if not settings.columns else settings.columns
    for width in widths:
        for size in chosen_sizes(_all_widths(settings), SIZES, CPU_SIZES, CPU_QUICK_SIZES):
            size = size if width is None else size._replace(classes=max(2, width))
            yield _within(size, settings.elements)
            if width is not None:
                break


def _all_widths(settings: Settings) -> Settings:
    """Return the settings without the widths, which are classes here."""
    return settings.__class__(**{**vars(settings), "columns": ()})


def _within(size: Size, elements: int | None) -> Size:
    """Return a size with at most this number of logits."""
    if elements is None:
        return size
    sequences = min(size.sequences, max(1, elements // 2**20))
    longest = max(1, min(size.longest, elements // (4 * sequences * size.classes)))
    room = elements // (sequences * (longest + 1) * size.classes)
    return size._replace(sequences=sequences, longest=longest, steps=max(1, min(size.steps, room)))


def cases(settings: Settings) -> Iterator[Case]:
    hidden = HIDDEN if settings.device.type == "cuda" else 16 if settings.quick else 128
    for op in ("rnnt", "tdt"):
        for dtype in settings.types():
            for size in _sizes(settings):
                yield RNNT(op, dtype, *size)
    for dtype in settings.types(torch.bfloat16):
        for size in _sizes(settings):
            yield LinearRNNT("linear_rnnt", dtype, *size, hidden)
