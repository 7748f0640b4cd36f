"""CTC-CRF over k-mers: the loss and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.chain.api import Chain
from ..runtime.backend import backend
from .case import Buffers, Verdict
from .chain import BASES, kmers
from .ctc_case import ELEMENTS_AT_ONCE, LossCase, Truth, judge, random_targets
from .ctc_peers import CRFInputs, target_index
from .providers import Function, Provider

SEQUENCES_JUDGED = 4  # sequences over k-mers


@dataclass(frozen=True)
class Crf(LossCase):
    """The mean loss over k-mers: log Z of the chain minus log Z of the target's alignments."""

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

    def inputs(self, buffers: Buffers) -> CRFInputs:
        targets, lengths = random_targets(self, buffers.device)
        lengths = lengths.to(buffers.device)
        targets = targets.masked_fill(
            torch.arange(self.longest, device=buffers.device) >= lengths[:, None], 0
        )
        source = kmers(self.states).to(buffers.device, torch.int32)
        return CRFInputs(
            buffers.normal("scores", self.shape, self.dtype),
            source,
            targets,
            lengths,
            self.state_len,
        )

    def standard(self, inputs: CRFInputs) -> Truth:
        """Compute log Z of all sequences and the marginals of some from two chains in fp64."""
        number = max(
            1,
            min(
                SEQUENCES_JUDGED,
                self.sequences,
                ELEMENTS_AT_ONCE // (self.steps * self.states * self.slots),
            ),
        )
        which = torch.linspace(0, self.sequences - 1, number, device=inputs.scores.device).long()
        with backend("reference"), torch.no_grad():
            losses = torch.cat(
                [
                    crf_losses(inputs, these)
                    for these in torch.arange(self.sequences, device=which.device).split(4 * number)
                ]
            )
            full, aligned, index = crf_chains(inputs, which)
            posterior, size = full.marginals().flatten(2), float(full.logz().abs().max())
            for at, marginals in zip(index, aligned.marginals().unbind(-1), strict=True):
                posterior.scatter_add_(
                    2, at.expand(self.steps, -1, -1), -marginals[..., -at.shape[1] :]
                )
        lengths = inputs.target_lengths.double()
        gradient = posterior.unflatten(2, (self.states, self.slots)) / (
            self.sequences * lengths[which, None, None]
        )
        return Truth((losses / lengths).mean(), size, which, gradient)

    def verdicts(
        self, function: Function, inputs: CRFInputs, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        """Judge the gradient: a difference of two marginals over lengths and batch size."""
        weights = self.sequences * inputs.target_lengths[standard.sequences]
        yield from judge(
            function, inputs, standard, weights, self.allowed(provider, standard, of_ours=2)
        )

    def is_slow(self, provider: Provider, device: torch.device) -> bool:
        """Return whether this is a loop in Python, or anything on the CPU."""
        return provider.name == "torch" or super().is_slow(provider, device)


def crf_chains(inputs: CRFInputs, which: Tensor) -> tuple[Chain, Chain, tuple[Tensor, Tensor]]:
    """Return two chains in fp64 and the indices of the second one's scores.

    The first chain has all paths of these sequences, the second the paths that emit the target.
    """
    scores, targets = inputs.scores[:, which].double(), inputs.targets[which]
    ends = torch.zeros_like(scores[0, ..., 0])
    index = target_index(targets, inputs.state_len, BASES)
    stay, move = (scores.flatten(2).gather(2, at.expand(len(scores), -1, -1)) for at in index)
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
    return Chain(scores, inputs.source, ends, ends), aligned, index


def crf_losses(inputs: CRFInputs, which: Tensor) -> Tensor:
    full, aligned, _ = crf_chains(inputs, which)
    return full.logz() - aligned.logz()
