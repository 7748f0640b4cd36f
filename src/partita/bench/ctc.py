"""CTC: the loss and its gradient, from logits and over k-mers, and the best alignment of a long target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.chain.api import Chain
from ..runtime.backend import backend
from .case import Buffers, Case, Loop, Moves, Settings, Verdict, poison
from .chain import BASES, CONTRACT, PEERS_MAY, SLOW_REPETITIONS, kmers, rounding, worst
from .ctc_peers import CrfInputs, CtcInputs, native_loss, places
from .measure import Timing, peak_extra_memory
from .providers import Function, Provider, is_ours

ROUNDINGS_OF_PEERS = 64  # of fp32 numbers as great as log Z: others carry such states (PyTorch's posteriors: off by 0.3 at 20,000 steps)
ELEMENTS_AT_ONCE = 2**25  # of which the truth is computed in fp64
SEQUENCES_JUDGED = 4  # of those over k-mers


class Size(NamedTuple):
    """Targets have from `shortest` to `longest` labels; k-mers are of `state_len` bases."""

    steps: int
    sequences: int
    classes: int
    shortest: int
    longest: int
    state_len: int = 0

    @property
    def scores(self) -> int:
        """Of a step of one sequence."""
        return self.classes * BASES**self.state_len


SIZES = (
    Size(500, 128, 20, 80, 100),
    Size(1000, 64, 32, 100, 200),
    Size(150, 128, 5000, 15, 30),
    Size(2000, 16, 500, 100, 300),
    Size(4000, 256, 5, 400, 500),
    Size(30000, 1, 32, 2000, 2500),
    Size(64, 4, 32, 16, 16),
    Size(256, 16, 64, 48, 48),
    Size(512, 32, 64, 48, 48),
    Size(1024, 32, 128, 96, 96),
)
QUICK_SIZES = SIZES[0], SIZES[6]
CPU_SIZES = SIZES[0], Size(1000, 8, 5000, 100, 100)
CPU_QUICK_SIZES = Size(60, 4, 20, 8, 12), Size(64, 4, 32, 16, 16)
CRF_SIZE, CRF_CPU_SIZE, CRF_QUICK_SIZE = (
    Size(2000, 64, 5, 300, 500, 5),
    Size(400, 4, 5, 60, 100, 3),
    Size(60, 2, 5, 8, 12, 2),
)
ALIGN_SIZE, ALIGN_CPU_SIZE, ALIGN_QUICK_SIZE = (
    Size(180000, 1, 32, 20000, 20000),
    Size(4000, 1, 32, 500, 500),
    Size(100, 1, 8, 12, 12),
)
FEWEST_STEPS = 16  # before k-mers are made shorter


class Truth(NamedTuple):
    """In fp64: the loss, and its gradient in the scores of some of the sequences."""

    loss: Tensor  # []
    logz: float  # the size of log Z of a sequence
    sequences: Tensor  # [n], which
    gradient: Tensor  # [T, n, ...]


def random_targets(case: CtcCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """Labels from 1 to C - 1, `[N, S]`, the same on every device, and how many of them count, `[N]`, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(case.shortest, case.longest + 1, (case.sequences,), generator=generator)
    lengths[0] = case.longest
    return torch.randint(1, case.classes, (case.sequences, case.longest), generator=generator).to(
        device
    ), lengths


@dataclass(frozen=True)
class CtcCase(Case):
    """A batch of inputs, each with a target."""

    steps: int
    sequences: int
    classes: int
    shortest: int
    longest: int

    sizes: ClassVar[tuple[str, ...]] = ("steps", "sequences", "classes", "shortest", "longest")
    varying: ClassVar[tuple[str, ...]] = sizes
    scores: ClassVar[str] = "logits"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.steps, self.sequences, self.classes

    def inputs(self, buffers: Buffers) -> Any:
        targets, lengths = random_targets(self, buffers.device)
        return CtcInputs(
            buffers.normal("logits", self.shape, self.dtype),
            targets,
            torch.full_like(lengths, self.steps),
            lengths,
        )

    def times(
        self,
        function: Function,
        inputs: Any,
        provider: Provider,
        device: torch.device,
        repetitions: int,
    ) -> dict[str, Timing]:
        return super().times(
            function,
            inputs,
            provider,
            device,
            min(repetitions, SLOW_REPETITIONS) if device.type == "cpu" else repetitions,
        )


def training(function: Function, inputs: Any) -> Loop:
    scores, *others = inputs
    leaf = scores.detach().requires_grad_()
    held: dict[str, Any] = {}

    def forward() -> None:
        held["loss"] = function(leaf, *others)

    def backward() -> None:
        held["gradient"] = torch.autograd.grad(held.pop("loss"), leaf)

    return Loop((("forward", forward), ("backward", backward)), held.clear)


def judge(
    function: Function, inputs: Any, truth: Truth, weights: Tensor, allowed: tuple[float, float]
) -> Iterator[Verdict]:
    """Gradient and loss against fp64: the error that is told is that of the gradient, a loss that is right counts as exact.

    Args:
        weights: `[n]`, what makes posteriors of the gradients.
        allowed: error of these, and of the loss over max(1, |loss|).
    """
    scores, *others = inputs
    leaf = scores.detach().requires_grad_()
    poison(scores)
    loss = function(leaf, *others)
    (grad,) = torch.autograd.grad(loss, leaf)
    weights = weights.double().reshape(1, -1, *(1,) * (scores.ndim - 2))
    some, expected = grad[:, truth.sequences].double() * weights, truth.gradient * weights
    yield worst(
        ((some - expected).abs() - rounding(expected.abs(), grad.dtype)).clamp(min=0),
        allowed[0],
        some,
        expected,
    )
    for result in (loss.detach(), function(scores, *others)):
        apart = (result.double() - truth.loss).abs() / truth.loss.abs().clamp(min=1)
        yield worst(
            apart.masked_fill(apart <= allowed[1], 0.0)[None],
            allowed[1],
            result[None],
            truth.loss[None],
        )


@dataclass(frozen=True)
class LossCase(CtcCase):
    """A loss reads the scores once; its gradient asks for a second read, and a write."""

    versus: ClassVar[str] = "torch"

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read"), "total": Moves(3 * self.bytes, "copy")}

    def allowed(self, provider: Provider, truth: Truth, of_ours: int = 1) -> tuple[float, float]:
        """Errors of posteriors, and of the loss over max(1, |loss|)."""
        if is_ours(provider.name):
            return of_ours * CONTRACT[0], of_ours * CONTRACT[1]
        return max(
            PEERS_MAY, ROUNDINGS_OF_PEERS * torch.finfo(torch.float32).eps * truth.logz
        ), PEERS_MAY

    def loops(self, function: Function, inputs: Any, provider: Provider) -> Sequence[Loop]:
        return [
            Loop((("inference", lambda: function(*inputs)),), lambda: None),
            training(function, inputs),
        ]

    def extra_memory(
        self, function: Function, inputs: Any, provider: Provider, device: torch.device
    ) -> int | None:
        loop = training(function, inputs)
        return peak_extra_memory(loop.steps, device, before=loop.before)


@dataclass(frozen=True)
class Loss(LossCase):
    """The summed loss, from logits."""

    caption: ClassVar[str] = "CTC loss and its gradient"

    def standard(self, inputs: CtcInputs) -> Truth:
        """PyTorch's own, in fp64, some sequences at a time."""
        logits, targets, *lengths = inputs
        each = max(1, ELEMENTS_AT_ONCE // (self.steps * (self.classes + 2 * self.longest + 1)))
        losses, gradients = [], []
        for start in range(0, self.sequences, each):
            these = slice(start, start + each)
            leaf = logits[:, these].double().requires_grad_()
            loss = native_loss(leaf, targets[these], *(length[these] for length in lengths))
            gradients.append(torch.autograd.grad(loss, leaf)[0])
            losses.append(loss.detach())
        total = torch.stack(losses).sum()
        return Truth(
            total,
            float(total) / self.sequences,
            torch.arange(self.sequences, device=logits.device),
            torch.cat(gradients, 1),
        )

    def verdicts(
        self, function: Function, inputs: CtcInputs, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        yield from judge(
            function,
            inputs,
            standard,
            torch.ones_like(standard.sequences),
            self.allowed(provider, standard),
        )


@dataclass(frozen=True)
class Crf(LossCase):
    """The mean loss over k-mers, four bases and the blank: log Z of the chain less that of the target's alignments."""

    caption: ClassVar[str] = "CTC-CRF loss and its gradient"
    sizes: ClassVar[tuple[str, ...]] = (
        "steps",
        "sequences",
        "states",
        "slots",
        "shortest",
        "longest",
    )
    varying: ClassVar[tuple[str, ...]] = sizes
    scores: ClassVar[str] = "scores"
    versus: ClassVar[str] = "koi"

    state_len: int

    @property
    def states(self) -> int:
        return BASES**self.state_len

    @property
    def slots(self) -> int:
        return self.classes

    @property
    def shape(self) -> tuple[int, ...]:
        return self.steps, self.sequences, self.states, self.slots

    def inputs(self, buffers: Buffers) -> CrfInputs:
        targets, lengths = random_targets(self, buffers.device)
        lengths = lengths.to(buffers.device)
        targets = targets.masked_fill(
            torch.arange(self.longest, device=buffers.device) >= lengths[:, None], 0
        )
        source = kmers(self.states).to(buffers.device, torch.int32)
        return CrfInputs(
            buffers.normal("scores", self.shape, self.dtype),
            source,
            targets,
            lengths,
            self.state_len,
        )

    def standard(self, inputs: CrfInputs) -> Truth:
        """Two chains in fp64; log Z of all sequences, marginals of some."""
        count = max(
            1,
            min(
                SEQUENCES_JUDGED,
                self.sequences,
                ELEMENTS_AT_ONCE // (self.steps * self.states * self.slots),
            ),
        )
        which = torch.linspace(0, self.sequences - 1, count, device=inputs.scores.device).long()
        with backend("reference"), torch.no_grad():
            losses = torch.cat(
                [
                    crf_losses(inputs, these)
                    for these in torch.arange(self.sequences, device=which.device).split(4 * count)
                ]
            )
            every, aligned, found = crf_chains(inputs, which)
            posterior, size = every.marginals().flatten(2), float(every.logz().abs().max())
            for place, marginals in zip(found, aligned.marginals().unbind(-1), strict=True):
                posterior.scatter_add_(
                    2, place.expand(self.steps, -1, -1), -marginals[..., -place.shape[1] :]
                )
        lengths = inputs.target_lengths.double()
        gradient = posterior.unflatten(2, (self.states, self.slots)) / (
            self.sequences * lengths[which, None, None]
        )
        return Truth((losses / lengths).mean(), size, which, gradient)

    def verdicts(
        self, function: Function, inputs: CrfInputs, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        """The gradient is the difference of two marginals, over the lengths and their number."""
        weights = self.sequences * inputs.target_lengths[standard.sequences]
        yield from judge(
            function, inputs, standard, weights, self.allowed(provider, standard, of_ours=2)
        )

    def times(
        self,
        function: Function,
        inputs: Any,
        provider: Provider,
        device: torch.device,
        repetitions: int,
    ) -> dict[str, Timing]:
        """A loop in Python is repeated less often."""
        return super().times(
            function,
            inputs,
            provider,
            device,
            min(repetitions, SLOW_REPETITIONS) if provider.name == "torch" else repetitions,
        )


def crf_chains(inputs: CrfInputs, which: Tensor) -> tuple[Chain, Chain, tuple[Tensor, Tensor]]:
    """In fp64, of these sequences: all paths, those that spell the target, and where the scores of these are."""
    scores, targets = inputs.scores[:, which].double(), inputs.targets[which]
    ends = torch.zeros_like(scores[0, ..., 0])
    found = places(targets, inputs.state_len, BASES)
    stay, move = (scores.flatten(2).gather(2, place.expand(len(scores), -1, -1)) for place in found)
    state = torch.arange(stay.shape[2], device=scores.device)
    initial = torch.where(state == 0, 0.0, -torch.inf).double().expand_as(stay[0])
    final = torch.where(
        state == inputs.target_lengths[which, None] - inputs.state_len, 0.0, -torch.inf
    ).double()
    aligned = Chain(
        torch.stack([stay, F.pad(move, (1, 0))], -1),
        torch.stack([state, state - 1], 1),
        initial,
        final,
    )
    return Chain(scores, inputs.source, ends, ends), aligned, found


def crf_losses(inputs: CrfInputs, which: Tensor) -> Tensor:
    every, aligned, _ = crf_chains(inputs, which)
    return every.logz() - aligned.logz()


@dataclass(frozen=True)
class Align(CtcCase):
    """The class of each step in the best alignment; log-probabilities are read once."""

    versus: ClassVar[str] = "torchaudio"
    memory_of: ClassVar[str] = "inference"
    scores: ClassVar[str] = "log-probabilities"

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read")}

    def inputs(self, buffers: Buffers) -> CtcInputs:
        logits, *others = super().inputs(buffers)
        return CtcInputs(logits.log_softmax(-1), *others)

    def standard(self, inputs: CtcInputs) -> Tensor:
        return best_scores(*inputs)

    def verdicts(
        self, function: Function, inputs: CtcInputs, provider: Provider, standard: Tensor
    ) -> Iterator[Verdict]:
        """Another alignment is as good if its score is, and if it spells the target."""
        log_probs, targets, _, lengths = inputs
        allowed = CONTRACT[1] if is_ours(provider.name) else PEERS_MAY
        labels = function(*inputs).long()
        safe = labels.clamp(0, self.classes - 1)
        spelled = [row[row != 0] for row in map(torch.unique_consecutive, labels)]
        wrong = torch.tensor(
            [
                not torch.equal(found, target[:n])
                for found, target, n in zip(spelled, targets, lengths, strict=True)
            ]
        )
        yield worst(
            wrong.double(), allowed, torch.tensor([len(found) for found in spelled]), lengths
        )
        scores = (
            log_probs.transpose(0, 1).gather(2, safe[..., None]).sum((1, 2), dtype=torch.float64)
        )
        yield worst(
            (standard - scores).abs() / standard.abs().clamp(min=1), allowed, scores, standard
        )

    def loops(self, function: Function, inputs: CtcInputs, provider: Provider) -> Sequence[Loop]:
        return [Loop((("inference", lambda: function(*inputs)),), lambda: None)]

    def extra_memory(
        self, function: Function, inputs: CtcInputs, provider: Provider, device: torch.device
    ) -> int | None:
        return peak_extra_memory([("inference", lambda: function(*inputs))], device)


def best_scores(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
) -> Tensor:
    """Of the best alignments, `[N]` in fp64: blanks and labels apart, a step at a time, for the lattice of a long target fits no memory."""
    count, longest = targets.shape
    blank = torch.full((count, longest + 1), -torch.inf, dtype=torch.float64, device=targets.device)
    label = blank[:, 1:].clone()
    blank[:, 0] = 0.0
    same = F.pad(targets[:, 1:] == targets[:, :-1], (1, 0), value=True)
    for step in log_probs:
        before = F.pad(label, (1, 0), value=-torch.inf)
        entered = torch.maximum(
            torch.maximum(label, blank[:, :-1]), before[:, :-1].masked_fill(same, -torch.inf)
        )
        blank, label = torch.maximum(blank, before) + step[:, :1], entered + step.gather(1, targets)
    last = target_lengths.to(targets.device)[:, None]
    return torch.maximum(blank.gather(1, last), label.gather(1, last - 1)).squeeze(1)


def _sizes(settings: Settings) -> Iterator[Size]:
    gpu = settings.device.type == "cuda"
    sizes: Sequence[Size] = (
        (QUICK_SIZES if settings.quick else SIZES)
        if gpu
        else (CPU_QUICK_SIZES if settings.quick else CPU_SIZES)
    )
    if settings.columns:
        sizes = [sizes[0]._replace(classes=max(2, classes)) for classes in settings.columns]
    for size in sizes:
        yield _within(size, settings.elements)


def _within(size: Size, elements: int | None) -> Size:
    """Fewer sequences, and shorter ones if it takes that, so that there are no more scores and every target can be aligned."""
    if elements is None:
        return size
    while size.state_len > 1 and size.scores * FEWEST_STEPS > elements:
        size = size._replace(state_len=size.state_len - 1)
    sequences = max(1, min(size.sequences, elements // (size.steps * size.scores)))
    steps = max(1, min(size.steps, elements // (sequences * size.scores)))
    longest = max(1, size.state_len, min(size.longest, steps // 2))
    return size._replace(
        steps=steps, sequences=sequences, longest=longest, shortest=min(size.shortest, longest)
    )


def cases(settings: Settings) -> Iterator[Case]:
    which = 2 if settings.quick else int(settings.device.type != "cuda")
    crf, align = (
        each[which]
        for each in (
            (CRF_SIZE, CRF_CPU_SIZE, CRF_QUICK_SIZE),
            (ALIGN_SIZE, ALIGN_CPU_SIZE, ALIGN_QUICK_SIZE),
        )
    )
    for dtype in settings.types():
        for size in _sizes(settings):
            yield Loss("ctc", dtype, *size[:5])
        yield Crf("ctc_crf", dtype, *_within(crf, settings.elements))
        yield Align("ctc_align", dtype, *_within(align, settings.elements)[:5])
