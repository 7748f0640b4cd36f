"""Modules with the constructors of torch.nn, and our options by keyword."""

from __future__ import annotations

import torch
from torch import Tensor

from .cross_entropy import cross_entropy


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`partita.cross_entropy` as a module: `torch.nn.CrossEntropyLoss`, with soft-capping and z-loss.

    Args:
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: as in `torch.nn.CrossEntropyLoss`.
        softcap, z_loss, inplace: as in `partita.cross_entropy`.

    Shapes, units, errors and source are those of `partita.cross_entropy`.

    Example:
        >>> import torch, partita
        >>> partita.nn.CrossEntropyLoss(z_loss=1e-4)(torch.zeros(2, 3), torch.tensor([0, 2]))
        tensor(1.0987)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        softcap: float | None = None,
        z_loss: float = 0.0,
        inplace: bool = False,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.softcap, self.z_loss, self.inplace = softcap, z_loss, inplace

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        return f"softcap={self.softcap}, z_loss={self.z_loss}, inplace={self.inplace}"
