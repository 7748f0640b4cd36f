"""Cases of rows of logits, whose errors are compared with those of PyTorch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..testing import Error, ulp_error
from ..testing.budget import Scale
from .case import Case, Verdict
from .providers import TORCH, Function, Provider

# A result is wrong when its error is this multiple of the contract: 2 ulp, or two times the error
# of PyTorch.
TOLERANCE = 2.0
ELEMENTS_AT_ONCE = 2**24  # elements whose truth is computed in fp64 together


@dataclass(frozen=True)
class RowsCase(Case):
    """Logits `[rows, columns]`."""

    rows: int
    columns: int

    sizes: ClassVar[tuple[str, ...]] = ("rows", "columns")
    varying: ClassVar[tuple[str, ...]] = ("columns",)
    scores: ClassVar[str] = "logits"
    unit: ClassVar[str] = "ulp"

    @abstractmethod
    def errors(self, function: Function, inputs: Any, provider: Provider) -> Iterator[Error]:
        """Yield the errors against fp64, one for each result and gradient."""

    def standard(self, inputs: Any) -> list[float]:
        """Return the errors of PyTorch."""
        return [error.ulp for error in self.errors(TORCH.ops[self.op](), inputs, TORCH)]

    def verdicts(
        self, function: Function, inputs: Any, provider: Provider, standard: Sequence[float]
    ) -> Iterator[Verdict]:
        for error, own in zip(self.errors(function, inputs, provider), standard, strict=True):
            yield Verdict(
                error.ulp, TOLERANCE * max(2.0, 2 * own), error.index, error.got, error.expected
            )


def blocks(x: Tensor) -> Iterator[slice]:
    """Return slices of rows that are computed in fp64 together."""
    step = max(1, ELEMENTS_AT_ONCE // x.shape[1])
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def row_error(
    result: Tensor, truth: Callable[[Tensor, slice], Tensor], x: Tensor, *, scale: Scale = "element"
) -> Error:
    """Return the worst error of rows, which are compared with the truth in blocks.

    Args:
        result: `[rows, ...]`.
        truth: maps some rows of `x` in fp64 and their slice to the true rows of the result.
        x: `[rows, columns]`, the input.
        scale: the scale of `ulp_error`.
    """
    with torch.no_grad():
        return max(
            (
                ulp_error(result[rows], truth(x[rows].double(), rows), scale=scale)
                for rows in blocks(x)
            ),
            key=lambda error: error.ulp,
        )
