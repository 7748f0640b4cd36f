"""The row statistics of verl's trainers, under its names, from logits or from hidden states."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..ops.cross_entropy.api import TokenStats, cross_entropy, token_stats
from ..ops.linear_heads.api import linear_token_stats
from ..runtime import checks
from ..runtime.dtypes import fp32_result
from ..runtime.sizes import holds
from .naming import Labels, Renamed

__all__ = [
    "FusedLinearForPPO",
    "entropy_from_logits",
    "linear_cross_entropy",
    "logprobs_from_logits",
]

IGNORED = -100  # the label of a row without a log-probability


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Log-probability of the label of each row.

    Args:
        logits: `[..., C]`, floating dtype.
        labels: classes `[...]`, or in any shape with one for each row; any integer dtype. A row
            with -100 has log-probability and gradient 0.
        inplace_backward: whether the gradient takes the memory of the logits, which the backward
            pass then overwrites. A leaf keeps its memory.

    Returns:
        Log-probabilities in nats, `[...]`, fp32 (fp64 for fp64), differentiable in the logits.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.cross_entropy`.

    Source: `verl.utils.torch_functional.logprobs_from_logits`, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.verl import logprobs_from_logits
        >>> logprobs_from_logits(torch.zeros(1, 2, 4), torch.tensor([[3, 0]]))
        tensor([[-1.3863, -1.3863]])
    """
    checks.floating("logits", logits)
    checks.integer("labels", labels)
    if logits.ndim == 0:
        raise ValueError("logits: expected shape [..., C], got []")
    of_rows = _labels_of_rows("labels", labels, logits)
    inplace = inplace_backward and not logits.is_leaf
    rows = logits.reshape(-1, logits.shape[-1])
    names, given = {"input": "logits", "target": "labels"}, Labels("labels", labels)
    with Renamed(names, given, rows.shape[1], IGNORED), fp32_result(logits):
        loss = cross_entropy(rows, of_rows.reshape(-1), reduction="none", inplace=inplace)
    return -loss.view(of_rows.shape)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy of each row of logits.

    Args:
        logits: `[..., C]`, floating dtype.

    Returns:
        Entropies in nats, `[...]`, fp32 (fp64 for fp64), differentiable in the logits.

    Raises:
        TypeError, ValueError: as in `partita.token_stats`.

    Source: `verl.utils.torch_functional.entropy_from_logits`, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.verl import entropy_from_logits
        >>> entropy_from_logits(torch.zeros(1, 2, 4))
        tensor([[1.3863, 1.3863]])
    """
    return token_stats(logits).entropy


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: object = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of the label, and entropy, of each row of hidden states, without the logits.

    Args:
        hidden: hidden states `[..., H]`, floating dtype.
        weight: `[C, H]` in the same dtype.
        labels: classes `[...]`, or in any shape with one for each row; any integer dtype.
        temperature: positive; what the logits are divided by.
        reduction: of the log-probabilities: `none`, `mean` or `sum`.
        dist_process_group: None. `partita.parallel` has losses over a sharded vocabulary.

    Returns:
        Log-probabilities in nats, `[...]` or a number, and entropies in nats, `[...]`, fp32 (fp64
        for fp64), differentiable in hidden states and matrix.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.linear_token_stats`.
        NotImplementedError: a process group was given.

    Source: `verl.utils.kernel.linear_cross_entropy`, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.verl import linear_cross_entropy
        >>> linear_cross_entropy(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([2]))
        (tensor([-1.3863]), tensor([1.3863]))
    """
    checks.choice("reduction", reduction, checks.REDUCTIONS)
    if dist_process_group is not None:
        raise NotImplementedError(
            "dist_process_group: expected None; partita.parallel.token_stats takes the logits of a"
            " sharded vocabulary"
        )
    names = ("hidden", "weight", "labels")
    stats = _statistics(names, hidden, weight, labels, temperature)
    logprobs = stats.logprob
    if reduction != "none":
        logprobs = logprobs.sum() if reduction == "sum" else logprobs.mean()
    return logprobs, stats.entropy


class FusedLinearForPPO(torch.nn.Module):
    """`linear_cross_entropy` as verl's module for policy gradients.

    Args:
        chunk_size, impl_backend: taken for verl's signature, and not used: the chunks follow the
            sizes.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.linear_token_stats`, by a call.

    Source: `verl.utils.experimental.torch_functional.FusedLinearForPPO`, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.verl import FusedLinearForPPO
        >>> head = FusedLinearForPPO()
        >>> head(torch.zeros(1, 2, 3), torch.zeros(4, 3), torch.tensor([[2, 0]]), temperature=0.7)
        (tensor([[-1.3863, -1.3863]]), tensor([[1.3863, 1.3863]]))
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()
        self.chunk_size, self.impl_backend = chunk_size, impl_backend

    def forward(
        self,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities and the entropies in nats, both `[...]`.

        Args:
            hidden_states: `[..., H]`, floating dtype.
            vocab_weights: `[C, H]` in the same dtype.
            input_ids: classes `[...]`, or in any shape with one for each row; any integer dtype.
            temperature: positive; what the logits are divided by.

        Raises:
            TypeError, ValueError, IndexError: as in `partita.linear_token_stats`.

        Example:
            >>> import torch
            >>> from partita.integrations.verl import FusedLinearForPPO
            >>> FusedLinearForPPO()(torch.zeros(1, 3), torch.zeros(4, 3), torch.tensor([2]))
            (tensor([-1.3863]), tensor([1.3863]))
        """
        names = ("hidden_states", "vocab_weights", "input_ids")
        stats = _statistics(names, hidden_states, vocab_weights, input_ids, temperature)
        return stats.logprob, stats.entropy


def _labels_of_rows(name: str, labels: Tensor, rows: Tensor) -> Tensor:
    """Return the labels in the shape of the rows `[..., D]`, of which each has one."""
    shape = rows.shape[:-1]
    if not holds(labels.numel() == math.prod(shape)):
        raise ValueError(
            f"{name}: expected {math.prod(shape)} classes, one for each row of {list(shape)},"
            f" got {list(labels.shape)}"
        )
    return labels.reshape(shape)


def _statistics(
    names: tuple[str, str, str], hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float
) -> TokenStats:
    """Return the statistics of the rows; errors give the tensors these names."""
    checks.floating(names[0], hidden)
    checks.integer(names[2], labels)
    of_rows = _labels_of_rows(names[2], labels, hidden) if hidden.ndim else labels
    renamed = dict(zip(("input", "linear_weight", "target"), names, strict=True))
    with Renamed(renamed, Labels(names[2], labels), weight.shape[0], IGNORED):
        return linear_token_stats(hidden, weight, of_rows, temperature=temperature)
