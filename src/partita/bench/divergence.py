"""The divergence of two heads: the loss alone, loss and gradients, and their memory.

The cases of rows of logits come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import divergence_rows
from .case import Buffers, Case, Moves, Settings
from .divergence_case import BETAS, MeanDivergence
from .divergence_peers import DivergenceInputs, rows_of_logits
from .linear_cross_entropy import linear_sizes
from .providers import PRODUCTS, Provider, is_ours

PEER_BOUND = 5e-2  # relative to the greatest gradient, and to the loss
TOKENS_JUDGED = 64
ELEMENTS_AT_ONCE = 2**25  # logits in fp64 that are in memory together


@dataclass(frozen=True)
class Divergence(MeanDivergence):
    """The divergence of two heads, which is bounded by four matrix products."""

    tokens: int
    hidden: int
    vocabulary: int
    beta: float

    sizes: ClassVar[tuple[str, ...]] = ("tokens", "hidden", "vocabulary", "beta")
    varying: ClassVar[tuple[str, ...]] = sizes
    yardstick: ClassVar[str] = PRODUCTS.name
    learned: ClassVar[int] = 2

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tokens, self.vocabulary

    @property
    def moves(self) -> Mapping[str, Moves]:
        return {}

    def inputs(self, buffers: Buffers) -> DivergenceInputs:
        heads = []
        for name in ("", "teacher "):
            size = (self.vocabulary, self.hidden)
            heads.append(buffers.normal(f"{name}hidden", (self.tokens, self.hidden), self.dtype))
            matrix = buffers.normal(f"{name}matrix", size, self.dtype)
            heads.append(matrix * self.hidden**-0.5)  # logits of variance 1
        return DivergenceInputs(heads[0], heads[1], heads[2], heads[3], self.beta)

    def truth(self, inputs: DivergenceInputs) -> tuple[Tensor, Tensor]:
        """Compute loss and gradient of the first tokens' hidden states in fp64, tokens in parts."""
        hidden, matrix, teacher_hidden, teacher_matrix = (t.double() for t in inputs[:4])
        total, step = hidden.new_zeros(()), max(1, ELEMENTS_AT_ONCE // len(matrix))
        for x, t in zip(hidden.split(step), teacher_hidden.split(step), strict=True):
            rows = rows_of_logits(x @ matrix.T, t @ teacher_matrix.T, inputs.beta)
            total += rows.sum()
        judged = hidden[:TOKENS_JUDGED].requires_grad_()
        teacher_logits = teacher_hidden[:TOKENS_JUDGED] @ teacher_matrix.T
        with torch.enable_grad():
            rows = rows_of_logits(judged @ matrix.T, teacher_logits, inputs.beta)
            (gradient,) = torch.autograd.grad(rows.sum() / len(hidden), judged)
        return total / len(hidden), gradient

    def own_errors(self, inputs: DivergenceInputs, loss: Tensor, gradient: Tensor) -> list[float]:
        try:
            return super().own_errors(inputs, loss, gradient)
        except torch.OutOfMemoryError:  # PyTorch has all logits several times
            return [PEER_BOUND] * 3

    def allowed(self, own: float, provider: Provider) -> float:
        return super().allowed(own, provider) if is_ours(provider.name) else PEER_BOUND


def cases(settings: Settings) -> Iterator[Case]:
    yield from divergence_rows.cases(settings)
    for dtype in settings.types(torch.bfloat16):
        for size in linear_sizes(settings):
            for beta in BETAS:
                yield Divergence("linear_divergence", dtype, *size, beta)
