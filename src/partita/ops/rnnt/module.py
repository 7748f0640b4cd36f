"""The transducer's loss as a module, which `partita.nn` shows."""

from __future__ import annotations

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.lengths import Lengths
from .api import rnnt_loss
from .arguments import clamp_bound, node_options
from .common import REDUCTIONS


class RNNTLoss(torch.nn.Module):
    """`partita.rnnt_loss` as a module.

    It is `torchaudio.transforms.RNNTLoss` with the options of Partita.

    Args:
        blank, clamp, reduction, fused_log_softmax: as in `partita.rnnt_loss`.
        hat, fastemit_lambda, delay_penalty, inplace: as in `partita.rnnt_loss`.

    Raises:
        TypeError, ValueError: an option that no call would accept.

    Source: `torchaudio.transforms.RNNTLoss`; the method is the one of `partita.rnnt_loss`.

    Example:
        >>> import torch, partita
        >>> loss = partita.nn.RNNTLoss(blank=0)
        >>> loss(torch.zeros(1, 2, 2, 2), torch.tensor([[1]]), [2], [1])
        tensor(1.3863)
    """

    def __init__(
        self,
        blank: int = -1,
        clamp: float = -1.0,
        reduction: str = "mean",
        fused_log_softmax: bool = True,
        *,
        hat: bool = False,
        fastemit_lambda: float = 0.0,
        delay_penalty: float = 0.0,
        inplace: bool = False,
    ) -> None:
        super().__init__()
        checks.choice("reduction", reduction, REDUCTIONS)
        checks.python_int("blank", blank)
        clamp_bound(clamp)
        node_options(fused_log_softmax, hat, fastemit_lambda, delay_penalty)
        self.blank, self.clamp, self.reduction = blank, clamp, reduction
        self.fused_log_softmax, self.hat, self.inplace = fused_log_softmax, hat, inplace
        self.fastemit_lambda, self.delay_penalty = fastemit_lambda, delay_penalty

    def forward(
        self, logits: Tensor, targets: Tensor, logit_lengths: Lengths, target_lengths: Lengths
    ) -> Tensor:
        """Compute `partita.rnnt_loss`, in nats, with the options of the module.

        Args:
            logits, targets, logit_lengths, target_lengths: as in `partita.rnnt_loss`.

        Returns:
            A number, or `[B]` with `reduction="none"`.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: as in `partita.rnnt_loss`.
        """
        return rnnt_loss(
            logits,
            targets,
            logit_lengths,
            target_lengths,
            self.blank,
            self.clamp,
            self.reduction,
            self.fused_log_softmax,
            hat=self.hat,
            fastemit_lambda=self.fastemit_lambda,
            delay_penalty=self.delay_penalty,
            inplace=self.inplace,
        )

    def extra_repr(self) -> str:
        """Return the options that torch prints with the module."""
        return (
            f"blank={self.blank}, clamp={self.clamp}, reduction={self.reduction!r},"
            f" fused_log_softmax={self.fused_log_softmax}, hat={self.hat},"
            f" fastemit_lambda={self.fastemit_lambda}, delay_penalty={self.delay_penalty},"
            f" inplace={self.inplace}"
        )
