"""CTC: the loss from logits with its gradient, and the alignment of a long target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .case import Buffers, Case, Loop, Moves, Settings, Verdict
from .chain import BASES, CONTRACT, PEER_BOUND, worst
from .ctc_case import ELEMENTS_AT_ONCE, CTCCase, LossCase, Truth, judge
from .ctc_crf import Crf
from .ctc_peers import CTCInputs, native_loss
from .measure import peak_extra_memory
from .providers import Function, Provider, is_ours


class Size(NamedTuple):
    """The size of a batch whose targets have `shortest` to `longest` labels.

    k-mers have `state_len` bases.
    """

    steps: int
    sequences: int
    classes: int
    shortest: int
    longest: int
    state_len: int = 0

    @property
    def scores(self) -> int:
        """Return the number of scores of one step of one sequence."""
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
CPU_SIZES = Size(500, 32, 20, 80, 100), Size(400, 4, 5000, 40, 40)
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
MIN_STEPS = 16  # with fewer steps, k-mers get shorter first


@dataclass(frozen=True)
class Loss(LossCase):
    """The summed loss from logits."""

    caption: ClassVar[str] = "CTC loss and its gradient"

    def standard(self, inputs: CTCInputs) -> Truth:
        """Compute the loss of PyTorch in fp64, some sequences at a time."""
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
        self, function: Function, inputs: CTCInputs, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        yield from judge(
            function,
            inputs,
            standard,
            torch.ones_like(standard.sequences),
            self.allowed(provider, standard),
        )


@dataclass(frozen=True)
class Align(CTCCase):
    """The class of each step in the best alignment, for one read of the log-probabilities."""

    versus: ClassVar[str] = "torchaudio"
    memory_of: ClassVar[str] = "inference"
    scores: ClassVar[str] = "log-probabilities"

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {"inference": Moves(self.bytes, "read")}

    def inputs(self, buffers: Buffers) -> CTCInputs:
        logits, *others = super().inputs(buffers)
        return CTCInputs(logits.log_softmax(-1), *others)

    def standard(self, inputs: CTCInputs) -> Tensor:
        return best_scores(*inputs)

    def verdicts(
        self, function: Function, inputs: CTCInputs, provider: Provider, standard: Tensor
    ) -> Iterator[Verdict]:
        """Accept any alignment with the best score that emits the target."""
        log_probs, targets, _, lengths = inputs
        allowed = CONTRACT[1] if is_ours(provider.name) else PEER_BOUND
        labels = function(*inputs).long()
        safe = labels.clamp(0, self.classes - 1)
        spelled = [row[row != 0] for row in map(torch.unique_consecutive, labels)]
        mismatch = torch.tensor(
            [
                not torch.equal(found, target[:n])
                for found, target, n in zip(spelled, targets, lengths, strict=True)
            ]
        )
        yield worst(
            mismatch.double(), allowed, torch.tensor([len(found) for found in spelled]), lengths
        )
        scores = (
            log_probs.transpose(0, 1).gather(2, safe[..., None]).sum((1, 2), dtype=torch.float64)
        )
        yield worst(
            (standard - scores).abs() / standard.abs().clamp(min=1), allowed, scores, standard
        )

    def loops(self, function: Function, inputs: CTCInputs, provider: Provider) -> Sequence[Loop]:
        return [Loop((("inference", lambda: function(*inputs)),), lambda: None)]

    def extra_memory(
        self, function: Function, inputs: CTCInputs, provider: Provider, device: torch.device
    ) -> int | None:
        return peak_extra_memory([("inference", lambda: function(*inputs))], device)


def best_scores(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
) -> Tensor:
    """Compute the scores of the best alignments, `[N]` in fp64.

    Blanks and labels are two vectors, as the lattice of a long target fits no memory.
    """
    N, longest = targets.shape
    blank = torch.full((N, longest + 1), -torch.inf, dtype=torch.float64, device=targets.device)
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
    """Return a size with at most this number of scores, in which all targets can be aligned."""
    if elements is None:
        return size
    while size.state_len > 1 and size.scores * MIN_STEPS > elements:
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
