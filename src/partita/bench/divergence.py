"""The divergence of two heads: the loss alone, loss and gradients, and their memory.

The cases of rows of logits come first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from . import divergence_rows
from .case import Buffers, Case, Loop, Moves, Settings, TrainedCase, Verdict, poison, training_loop
from .divergence_peers import DivergenceInputs, rows_of_logits
from .linear_cross_entropy import linear_sizes, worst_error
from .providers import PRODUCTS, TORCH, Function, Provider, is_ours

BETAS = (0.0, 0.5, 1.0)
TOLERANCE = 2.0  # the bound of Partita is this multiple of PyTorch's error, plus the slack
PEER_BOUND = 5e-2  # relative to the greatest gradient, and to the loss
TOKENS_JUDGED = 64
ELEMENTS_AT_ONCE = 2**25  # logits in fp64 that are in memory together


class Truth(NamedTuple):
    """The loss and the gradients of the first tokens in fp64, and the errors of PyTorch."""

    loss: Tensor
    gradient: Tensor
    own: list[float]


@dataclass(frozen=True)
class Divergence(TrainedCase):
    """The mean divergence, which is bounded by four matrix products."""

    tokens: int
    hidden: int
    vocabulary: int
    beta: float

    sizes: ClassVar[tuple[str, ...]] = ("tokens", "hidden", "vocabulary", "beta")
    varying: ClassVar[tuple[str, ...]] = sizes
    scores: ClassVar[str] = "logits"
    yardstick: ClassVar[str] = PRODUCTS.name

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

    def standard(self, inputs: DivergenceInputs) -> Truth:
        loss, gradient = truth_of(inputs)
        try:
            compared = errors(TORCH.ops[self.op](), inputs, loss, gradient)
            own = [verdict.error for verdict in compared]
        except torch.OutOfMemoryError:  # PyTorch has all logits several times
            own = [PEER_BOUND] * 3
        return Truth(loss, gradient, own)

    def verdicts(
        self, function: Function, inputs: DivergenceInputs, provider: Provider, standard: Truth
    ) -> Iterator[Verdict]:
        """Judge all providers but the yardstick, which has no results."""
        if provider.name == self.yardstick:
            return
        slack = torch.finfo(self.dtype).eps / 4 if self.dtype.itemsize == 2 else 1e-5
        found = errors(function, inputs, standard.loss, standard.gradient)
        for verdict, own in zip(found, standard.own, strict=True):
            ours = TOLERANCE * own + slack
            yield replace(verdict, allowed=ours if is_ours(provider.name) else PEER_BOUND)

    def training(self, function: Function, inputs: DivergenceInputs) -> Loop:
        return training_loop(function, inputs[:2], inputs[2:])


def truth_of(inputs: DivergenceInputs) -> tuple[Tensor, Tensor]:
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


def errors(
    function: Function, inputs: DivergenceInputs, loss: Tensor, gradient: Tensor
) -> Iterator[Verdict]:
    """Yield the errors over the greatest true value, without a bound.

    They are those of the loss with gradients and without, and of the first tokens' gradients.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:2]]
    for leaf in leaves:
        poison(leaf)
    result = function(*leaves, *inputs[2:])
    found, of_matrix = torch.autograd.grad(result, leaves)
    yield worst_error(result.detach()[None], loss[None])
    with torch.no_grad():
        yield worst_error(function(*inputs).detach()[None], loss[None])
    verdict = worst_error(found[: len(gradient)], gradient)
    yield verdict if bool(of_matrix.isfinite().all()) else replace(verdict, error=math.inf)


def cases(settings: Settings) -> Iterator[Case]:
    yield from divergence_rows.cases(settings)
    for dtype in settings.types(torch.bfloat16):
        for size in linear_sizes(settings):
            for beta in BETAS:
                yield Divergence("linear_divergence", dtype, *size, beta)
