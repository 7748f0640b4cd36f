"""CLIP's loss of pairs of features, with the gradients of both.

Pairs are near each other, and the scale is 10. PyTorch and open_clip compute all logits. Partita
runs with its usual budget, and with one that holds a quarter of the logits (partita-lean). The unit
is the time of three bare products (products). Results are compared with the reference in fp64.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.contrastive.api import contrastive_loss
from ..ops.contrastive.common import row_bytes
from ..runtime.backend import backend
from .case import Buffers, Function, Functions, Provider, Sizes, cases_of, given
from .heads import TOKENS_JUDGED, products, sample
from .paths import GradientCase, Truth, evenly

SCALE = 10.0
PEER_BOUND = 0.1  # A logit near 8 has an error of 0.03 in bf16, and its probability of 3 %.
FULL_SIZES = ((4096, 512), (16384, 768), (65536, 768))  # pairs and hidden numbers
SIZES = Sizes(FULL_SIZES, FULL_SIZES[1:2], [(1024, 256)], [(256, 64)])


class PairInputs(NamedTuple):
    a: Tensor  # [pairs, hidden]
    b: Tensor  # [pairs, hidden]
    scale: Tensor  # []


def lean_loss(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Compute the loss within a quarter of the bytes of all logits."""
    budget = -(-len(a) // 4) * row_bytes(len(b), a.dtype)
    return contrastive_loss(a, b, scale, memory_budget=budget)


def composed_loss(a: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Compute all logits and then their loss with PyTorch's ops."""
    logits, target = scale * F.linear(a, b), torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def open_clip() -> Function:
    library: Any = importlib.import_module("open_clip")
    loss: Function = library.ClipLoss()
    return loss


TORCH: dict[str, Function] = {"contrastive_loss": composed_loss}
PROVIDERS: Functions = {
    "partita": {"contrastive_loss": given(contrastive_loss)},
    "partita-lean": {"contrastive_loss": given(lean_loss)},
    "products": {"contrastive_loss": products},
    "open-clip": {"contrastive_loss": open_clip},
}


@dataclass(frozen=True)
class Pairs(GradientCase):
    """The loss of pairs, which is bounded by three matrix products."""

    pairs: int
    hidden: int

    sizes: ClassVar[tuple[str, ...]] = ("pairs", "hidden")
    dimensions = ("pairs", "pairs")
    caption = "CLIP's loss from features and its gradients"
    yardstick = "products"
    learned = 2
    relative_above = 1.0  # A few pairs have a loss near 0, log(1 + little), which fp32 rounds.
    shrinks: ClassVar[dict[str, int]] = {"pairs": 2}  # The gradient of a single one is zero.

    def inputs(self, buffers: Buffers) -> PairInputs:
        a, noise = (buffers.normal(x, (self.pairs, self.hidden), self.dtype) for x in "ab")
        a, b = (F.normalize(x.float(), dim=1).to(self.dtype) for x in (a, a + noise))
        return PairInputs(a, b, torch.tensor(SCALE, dtype=self.dtype, device=a.device))

    def standard(self, inputs: PairInputs) -> Truth:
        exact = [x.detach().double() for x in inputs]
        leaves = [x.requires_grad_() for x in exact[:2]]
        with backend("reference"):
            loss = contrastive_loss(*exact)
            gradients = torch.autograd.grad(loss, leaves)
        which = evenly(TOKENS_JUDGED, self.pairs, inputs.a.device)
        samples = [sample(i, which, grad[which], PEER_BOUND) for i, grad in enumerate(gradients)]
        return Truth(loss.detach(), ..., samples)

    def bounds(self, provider: Provider, standard: Truth) -> Sequence[float]:
        if not provider.is_ours:
            return [PEER_BOUND] * 4
        of_gradient = torch.finfo(self.dtype).eps if self.dtype.itemsize == 2 else 1e-5
        return [of_gradient, of_gradient, 1e-5, 1e-5]  # of the loss, whose logits are not rounded


OPS = {"contrastive_loss": cases_of({"contrastive_loss": (Pairs, SIZES)}, torch.bfloat16)}
