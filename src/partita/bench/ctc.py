"""CTC: the loss from logits with its gradient, under the same contract.

CTC-CRF over k-mers stands beside the recipe of basecallers, and the alignment of a long target is
timed too. PyTorch uses its own kernels, not cuDNN's.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.ctc.api import ctc_align, ctc_loss
from ..ops.ctc_crf.api import ctc_crf_loss
from ..runtime.backend import backend
from ..testing.samples.in_torch import total_of_paths as loop_logz
from .case import Buffers, Function, Functions, Limited, Provider, Sizes, cases_of
from .chain import BASES, MAX_STATES, beyond_fp32_kernels, beyond_loop, kmers
from .paths import BestCase, LossCase, SequencesCase

# Others carry fp32 states as large as log Z. PyTorch's posteriors are off by 0.3 at 20,000 steps.
PEER_ERROR_A_STEP = 2.5e-5
ELEMENTS_AT_ONCE = 2**25  # elements whose truth is computed in fp64 together
SEQUENCES_JUDGED = 4  # sequences over k-mers
MIN_STEPS = 16  # with fewer steps, k-mers get shorter first
# koi has this number too. The gradient of logaddexp is NaN where both arguments are infinite.
UNREACHED = -1e30

FULL_SIZES = (  # steps, sequences, classes, shortest and longest target
    (500, 128, 20, 80, 100),
    (1000, 64, 32, 100, 200),
    (150, 128, 5000, 15, 30),
    (2000, 16, 500, 100, 300),
    (4000, 256, 5, 400, 500),
    (30000, 1, 32, 2000, 2500),
    (64, 4, 32, 16, 16),
    (256, 16, 64, 48, 48),
    (512, 32, 64, 48, 48),
    (1024, 32, 128, 96, 96),
)
SIZES = Sizes(
    FULL_SIZES,
    [FULL_SIZES[0], FULL_SIZES[6]],
    [(500, 32, 20, 80, 100), (400, 4, 5000, 40, 40)],
    [(60, 4, 20, 8, 12), (64, 4, 32, 16, 16)],
)
# K-mers have their number of bases too.
CRF_QUICK = [(60, 2, 5, 8, 12, 2)]
CRF_SIZES = Sizes([(2000, 64, 5, 300, 500, 5)], CRF_QUICK, [(400, 4, 5, 60, 100, 3)], CRF_QUICK)
ALIGN_QUICK = [(100, 1, 8, 12, 12)]
ALIGN_SIZES = Sizes(
    [(180000, 1, 32, 20000, 20000)], ALIGN_QUICK, [(4000, 1, 32, 500, 500)], ALIGN_QUICK
)


class CTCInputs(NamedTuple):
    """A batch of inputs and their targets, all of full length."""

    logits: Tensor  # [T, N, C]; log-probabilities for an alignment
    targets: Tensor  # [N, S] int64, padded with labels
    input_lengths: Tensor  # [N] int64, on the CPU
    target_lengths: Tensor  # [N] int64, on the CPU


class CRFInputs(NamedTuple):
    """Scores of the edges between k-mers, and the target bases."""

    scores: Tensor  # [T, N, C, 5], of staying and of entering from each of four k-mers
    source: Tensor  # [C, 5], the table of these k-mers
    targets: Tensor  # [N, S] int64 from 1 to 4, and 0 past the length of a target
    target_lengths: Tensor  # [N] int64, on the device
    state_len: int  # the number of bases of a k-mer


def native_loss(
    logits: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor
) -> Tensor:
    """Compute the summed loss by PyTorch's own kernels.

    cuDNN's kernels take 256 labels at most, and other arguments.
    """
    log_probs = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    with torch.backends.cudnn.flags(enabled=False):
        return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, reduction="sum")


def seqdist_loss() -> Function:
    """Return the summed loss of seqdist, whose own function has the mean alone."""
    library: Any = importlib.import_module("seqdist.ctc")

    def function(logits: Tensor, targets: Tensor, *lengths: Tensor) -> Tensor:
        lengths_on_device = [length.to(logits.device, non_blocking=True) for length in lengths]
        states = library.prepare_inputs(logits.log_softmax(-1), targets, *lengths_on_device)
        return -library._Logz.apply(*states, library._fwd_bwd_cupy, library.Log).sum()

    return function


def beyond_seqdist(inputs: CTCInputs) -> str | None:
    if inputs.logits.device.type != "cuda":
        return "needs a GPU"
    if inputs.logits.dtype not in (torch.float32, torch.float64):
        return "takes fp32 and fp64 logits only"
    if 2 * inputs.targets.shape[1] + 1 > MAX_STATES:
        return f"takes at most {(MAX_STATES - 1) // 2} labels"
    return None


def torchaudio_align() -> Function:
    """Return the function that finds the class of each step, `[N, T]`."""
    align: Any = importlib.import_module("torchaudio.functional").forced_align

    def function(log_probs: Tensor, targets: Tensor, *lengths: Tensor) -> Tensor:
        on_device = [length.to(log_probs.device) for length in lengths]
        return align(log_probs.transpose(0, 1), targets, *on_device)[0]

    return function


def beyond_torchaudio(inputs: CTCInputs) -> str | None:
    return None if len(inputs.targets) == 1 else "takes one sequence only"


def target_index(targets: Tensor, state_len: int, bases: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the scores of a target's alignments among the scores of a step.

    `[N, S - k + 1]` are for staying in each k-mer of the target, and `[N, S - k]` for entering each
    from the one before it.
    """
    labels = (targets - 1).clamp(min=0)
    weights = bases ** torch.arange(state_len - 1, -1, -1, device=targets.device)
    stay = (labels.unfold(1, state_len, 1) * weights).sum(-1) * (bases + 1)
    return stay, stay[:, 1:] + 1 + labels[:, : stay.shape[1] - 1]


def _recipe(
    inputs: CRFInputs, full_logz: Callable[..., Tensor], aligned_logz: Callable[..., Tensor]
) -> Tensor:
    """Compute the mean loss as basecallers write it.

    A share of log Z is subtracted from the scores of each step. Then log Z of the target's
    alignments is minus the loss.
    """
    scores, source, targets, lengths, state_len = inputs
    (T, N, C, K), lengths = scores.shape, lengths.to(scores.device)
    dtype = torch.promote_types(scores.dtype, torch.float32)
    ends = torch.zeros(N, C, dtype=dtype, device=scores.device)
    normal = scores.flatten(2) - full_logz(scores, source, ends, ends)[:, None] / T
    stay, move = (
        normal.gather(2, index.expand(T, -1, -1))
        for index in target_index(targets, state_len, K - 1)
    )
    return -(aligned_logz(stay, move, lengths + 1 - state_len) / lengths).mean()


def _loop_aligned(stay: Tensor, move: Tensor, lengths: Tensor) -> Tensor:
    alpha = torch.full_like(stay[0], UNREACHED)
    alpha[:, 0] = 0.0
    for staying, moving in zip(stay, move, strict=True):
        alpha = torch.logaddexp(
            staying + alpha, F.pad(moving + alpha[:, :-1], (1, 0), value=UNREACHED)
        )
    return alpha.gather(1, lengths[:, None] - 1).squeeze(1)


def loop_crf_loss(*inputs: Any) -> Tensor:
    return _recipe(CRFInputs(*inputs), loop_logz, _loop_aligned)


def koi_crf_loss() -> Function:
    library: Any = importlib.import_module("koi.ctc")

    def full_logz(*inputs: Tensor) -> Tensor:
        return library.logZ_cu_sparse(*inputs, library.Log, 1)

    return lambda *inputs: _recipe(CRFInputs(*inputs), full_logz, library.logZ_cu)


def _loss(logits: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    return ctc_loss(logits, targets, steps, lengths, reduction="sum", from_logits=True)


def _crf_loss(scores: Tensor, source: Tensor, *others: Any) -> Tensor:
    targets, lengths, state_len = others
    classes = scores.shape[-1]
    return ctc_crf_loss(scores, targets, lengths, state_len=state_len, alphabet_size=classes)


PROVIDERS: Functions = {
    "partita": {
        "ctc": lambda: _loss,
        "ctc_crf": lambda: _crf_loss,
        "ctc_align": lambda: lambda *inputs: ctc_align(*inputs).labels,
    },
    "torch": {"ctc": lambda: native_loss, "ctc_crf": Limited(lambda: loop_crf_loss, beyond_loop)},
    "koi": {"ctc_crf": Limited(koi_crf_loss, beyond_fp32_kernels)},
    "seqdist": {"ctc": Limited(seqdist_loss, beyond_seqdist)},
    "torchaudio": {"ctc_align": Limited(torchaudio_align, beyond_torchaudio)},
}


@dataclass(frozen=True)
class CTCCase(SequencesCase):
    """A batch of inputs, each with a target of `shortest` to `longest` labels."""

    sequences: int
    classes: int
    shortest: int
    longest: int
    state_len: int = 0  # the bases of a k-mer; 0 for classes

    sizes: ClassVar[tuple[str, ...]] = ("steps", "sequences", "classes", "shortest", "longest")
    dimensions: ClassVar[tuple[str, ...]] = ("steps", "sequences", "classes")
    shrinks: ClassVar[Mapping[str, int]] = {"sequences": 1, "steps": 1}

    def within(self, elements: int) -> Any:
        """Return the case with shorter k-mers, fewer sequences, fewer steps and shorter targets."""
        case = self
        while case.state_len > 1 and math.prod(case.shape[2:]) * MIN_STEPS > elements:
            case = replace(case, state_len=case.state_len - 1)
        case = super(CTCCase, case).within(elements)
        longest = max(1, case.state_len, min(self.longest, case.steps // 2))
        return replace(case, longest=longest, shortest=min(self.shortest, longest))

    def targets(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return labels, `[N, S]`, the same on all devices, and lengths, `[N]`, on the CPU."""
        generator, N = torch.Generator().manual_seed(0), self.sequences
        lengths = torch.randint(self.shortest, self.longest + 1, (N,), generator=generator)
        lengths[0] = self.longest
        labels = torch.randint(1, self.classes, (N, self.longest), generator=generator)
        return labels.to(device), lengths

    def inputs(self, buffers: Buffers) -> Any:
        targets, lengths = self.targets(buffers.device)
        logits = buffers.normal("logits", self.shape, self.dtype)
        return CTCInputs(logits, targets, torch.full_like(lengths, self.steps), lengths)


@dataclass(frozen=True)
class CTCLossCase(LossCase, CTCCase):
    """A loss of CTC."""

    contracts = 1  # the bound of Partita, in bounds of one posterior

    def contract(self, provider: Provider) -> tuple[float, float]:
        of_gradient, of_result = super().contract(provider)
        if provider.is_ours:
            return self.contracts * of_gradient, self.contracts * of_result
        return max(of_gradient, PEER_ERROR_A_STEP * self.steps), of_result


class Loss(CTCLossCase):
    """The summed loss from logits, whose truth is PyTorch's in fp64."""

    versus = "torch"
    width, least_width = "classes", 2
    caption = "CTC loss and its gradient"
    dims = (1, 0, 0, 0)
    judged = 1

    @property
    def at_once(self) -> int:
        return max(1, ELEMENTS_AT_ONCE // (self.steps * (self.classes + 2 * self.longest + 1)))

    def exact(self, inputs: CTCInputs) -> Tensor:
        return native_loss(*inputs)


class Crf(CTCLossCase):
    """The mean loss over k-mers: log Z of the chain minus log Z of the target's alignments.

    Its truth is that of the reference.
    """

    caption = "CTC-CRF loss and its gradient"
    scores = "scores"
    versus = "koi"
    contracts = 2  # its gradient is a difference of two marginals
    dimensions = ("steps", "sequences", "states", "slots")
    sizes = (*dimensions, "shortest", "longest")
    dims = (1, None, 0, 0, None)

    @property
    def states(self) -> int:
        return BASES**self.state_len

    @property
    def slots(self) -> int:
        return self.classes

    def inputs(self, buffers: Buffers) -> CRFInputs:
        targets, lengths = (each.to(buffers.device) for each in self.targets(buffers.device))
        past = torch.arange(self.longest, device=buffers.device) >= lengths[:, None]
        source = kmers(self.states).to(buffers.device, torch.int32)
        scores = buffers.normal("scores", self.shape, self.dtype)
        return CRFInputs(scores, source, targets.masked_fill(past, 0), lengths, self.state_len)

    @property
    def at_once(self) -> int:
        number = ELEMENTS_AT_ONCE // (self.steps * self.states * self.slots)
        return max(1, min(SEQUENCES_JUDGED, number))

    def exact(self, inputs: CRFInputs) -> Tensor:
        with backend("reference"):
            return _crf_loss(*inputs) * (len(inputs.targets) / self.sequences)

    def posterior_unit(self, inputs: CRFInputs) -> Tensor:
        """Return the gradient of a posterior, by the mean over lengths and batch."""
        return 1 / (self.sequences * inputs.target_lengths[: self.at_once, None, None].double())


@dataclass(frozen=True)
class Align(BestCase, CTCCase):
    """The class of each step in the best alignment."""

    versus = "torchaudio"
    memory_of = "inference"
    scores = "log-probabilities"

    def inputs(self, buffers: Buffers) -> CTCInputs:
        logits, *others = super().inputs(buffers)
        return CTCInputs(logits.log_softmax(-1), *others)

    def standard(self, inputs: CTCInputs) -> Tensor:
        return best_scores(*inputs)

    def broken(self, inputs: CTCInputs, found: Tensor) -> Tensor:
        """Return which alignments do not emit their target."""
        spelled = (row[row != 0] for row in map(torch.unique_consecutive, found.long()))
        rows = zip(spelled, inputs.targets, inputs.target_lengths, strict=True)
        return torch.tensor([not torch.equal(row, target[:n]) for row, target, n in rows])

    def path_scores(self, inputs: CTCInputs, found: Tensor) -> Tensor:
        safe = found.long().clamp(0, self.classes - 1)
        scores = inputs.logits.transpose(0, 1).gather(2, safe[..., None])
        return scores.sum((1, 2), dtype=torch.float64)


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
        skipped = before[:, :-1].masked_fill(same, -torch.inf)
        entered = torch.maximum(torch.maximum(label, blank[:, :-1]), skipped)
        blank, label = torch.maximum(blank, before) + step[:, :1], entered + step.gather(1, targets)
    last = target_lengths.to(targets.device)[:, None]
    return torch.maximum(blank.gather(1, last), label.gather(1, last - 1)).squeeze(1)


ctc_cases = cases_of(
    {"ctc": (Loss, SIZES), "ctc_crf": (Crf, CRF_SIZES), "ctc_align": (Align, ALIGN_SIZES)}
)
OPS = {"ctc": ctc_cases}
