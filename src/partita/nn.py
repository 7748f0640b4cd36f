"""Modules with the constructors of torch.nn and of pytorch-crf."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ops.cross_entropy.api import cross_entropy
from .ops.cross_entropy.common import checked_options
from .ops.ctc.api import ctc_loss
from .ops.linear_chain.module import CRF as CRF
from .ops.linear_heads.api import linear_cross_entropy
from .ops.linear_heads.low_rank import LowRank
from .ops.rnnt.module import RNNTLoss as RNNTLoss
from .runtime import checks
from .runtime.lengths import Lengths

RNNTLoss.__module__ = CRF.__module__ = __name__  # users and pickles meet them here


def _loss_repr(module: CrossEntropyLoss | LinearCrossEntropyLoss) -> str:
    """Return the options that the modules of cross-entropy print."""
    return (
        f"ignore_index={module.ignore_index}, reduction={module.reduction!r},"
        f" label_smoothing={module.label_smoothing}, softcap={module.softcap},"
        f" z_loss={module.z_loss}"
    )


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`partita.cross_entropy` as a module.

    It is `torch.nn.CrossEntropyLoss` with soft-capping and z-loss.

    Args:
        weight, size_average, ignore_index, reduce, reduction, label_smoothing: as in
            `torch.nn.CrossEntropyLoss`.
        softcap, z_loss, inplace: as in `partita.cross_entropy`.

    Raises:
        TypeError, ValueError: an option that no call would accept.

    Source: `torch.nn.CrossEntropyLoss`; the method is the one of `partita.cross_entropy`.

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
        checked_options(ignore_index, label_smoothing, softcap, z_loss, self.reduction)
        self.softcap, self.z_loss, self.inplace = softcap, z_loss, inplace

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute `partita.cross_entropy`, in nats, with the options of the module.

        Args:
            input: logits `[N, C, ...]` or `[C]`.
            target: labels `[N, ...]` or `[]`, or probabilities with the shape of `input`.

        Returns:
            A number, or `[N, ...]` with `reduction="none"`.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: as in `partita.cross_entropy`.
        """
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
        """Return the options that torch prints with the module."""
        return f"{_loss_repr(self)}, inplace={self.inplace}"


class LinearCrossEntropyLoss(torch.nn.Module):
    """`partita.linear_cross_entropy` as a module that owns the matrix.

    It is `torch.nn.LinearCrossEntropyLoss` with the options of Partita.

    Args:
        in_features, num_classes, out_features, bias, device, dtype: describe the linear layer
            `linear`, whose matrix is `[C * prod(out_features), H]`.
        reduction, weight, ignore_index, label_smoothing: as in
            `torch.nn.LinearCrossEntropyLoss`.
        softcap, z_loss, memory_budget, logits_dtype: as in `partita.linear_cross_entropy`; the
            budget is in bytes.

    Raises:
        TypeError, ValueError: an option that no call would accept.

    Source: `torch.nn.LinearCrossEntropyLoss`; the method is the one of
    `partita.linear_cross_entropy`.

    Example:
        >>> import torch, partita
        >>> loss = partita.nn.LinearCrossEntropyLoss(4, 10)
        >>> loss(torch.zeros(2, 4), torch.tensor([0, 2]))
        tensor(2.3026, grad_fn=<...>)
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
        memory_budget: int | None = None,
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ignored = -100 if ignore_index is None else ignore_index
        checked_options(ignored, label_smoothing, softcap, z_loss, reduction)
        self.num_classes = num_classes
        self.out_features = tuple(out_features)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.softcap = softcap
        self.z_loss = z_loss
        self.memory_budget = memory_budget
        self.logits_dtype = logits_dtype
        self.linear = torch.nn.Linear(
            in_features,
            math.prod(out_features, start=num_classes),
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.register_buffer("weight", weight)

    def forward(self, input: Tensor, target: Tensor, low_rank: LowRank | None = None) -> Tensor:
        """Compute `partita.linear_cross_entropy`, in nats, with the options of the module.

        Args:
            input: hidden states `[..., H]`, H = in_features.
            target: labels `[...]` (`[N, *out_features]`), or probabilities `[..., C]`
                (`[N, C, *out_features]`).
            low_rank: as in `partita.linear_cross_entropy`.

        Returns:
            A number, or the shape of the labels, `[...]`, with `reduction="none"`.

        Raises:
            TypeError, ValueError, IndexError: as in `partita.linear_cross_entropy`.
        """
        shape, bias = (self.num_classes, *self.out_features), self.linear.bias
        return linear_cross_entropy(
            input,
            self.linear.weight.reshape(*shape, self.linear.in_features),
            target,
            linear_bias=None if bias is None else bias.reshape(shape),
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            softcap=self.softcap,
            z_loss=self.z_loss,
            memory_budget=self.memory_budget,
            logits_dtype=self.logits_dtype,
            low_rank=low_rank,
        )

    def extra_repr(self) -> str:
        """Return the options that torch prints with the module."""
        return f"{_loss_repr(self)}, memory_budget={self.memory_budget}"


class CTCLoss(torch.nn.CTCLoss):
    """`partita.ctc_loss` as a module.

    It is `torch.nn.CTCLoss`, which can also compute the log-softmax.

    Args:
        blank, reduction, zero_infinity: as in `torch.nn.CTCLoss`.
        from_logits: as in `partita.ctc_loss`.

    Raises:
        TypeError, ValueError: an option that no call would accept.

    Source: `torch.nn.CTCLoss`; the method is the one of `partita.ctc_loss`.

    Example:
        >>> import torch, partita
        >>> loss = partita.nn.CTCLoss(from_logits=True)
        >>> loss(torch.zeros(2, 1, 2), torch.tensor([[1]]), [2], [1])
        tensor(0.2877)
    """

    def __init__(
        self,
        blank: int = 0,
        reduction: str = "mean",
        zero_infinity: bool = False,
        *,
        from_logits: bool = False,
    ) -> None:
        checks.choice("reduction", reduction, checks.REDUCTIONS)
        checks.python_int("blank", blank)
        if blank < 0:
            raise ValueError(f"blank: expected a class, 0 or more, got {blank}")
        super().__init__(blank, reduction, zero_infinity)
        self.from_logits = from_logits

    def forward(
        self, log_probs: Tensor, targets: Tensor, input_lengths: Lengths, target_lengths: Lengths
    ) -> Tensor:
        """Compute `partita.ctc_loss`, in nats, with the options of the module.

        Args:
            log_probs, targets, input_lengths, target_lengths: as in `partita.ctc_loss`.

        Returns:
            A number, or `[N]` with `reduction="none"`.

        Raises:
            TypeError, ValueError, IndexError: as in `partita.ctc_loss`.
        """
        return ctc_loss(
            log_probs,
            targets,
            input_lengths,
            target_lengths,
            self.blank,
            self.reduction,
            self.zero_infinity,
            from_logits=self.from_logits,
        )

    def extra_repr(self) -> str:
        """Return the options that torch prints with the module."""
        return (
            f"blank={self.blank}, reduction={self.reduction!r},"
            f" zero_infinity={self.zero_infinity}, from_logits={self.from_logits}"
        )
