"""The row statistics of TRL's trainers, under its names, from one read of the logits."""

from __future__ import annotations

from torch import Tensor

from ..ops.cross_entropy.api import TokenStats, token_stats
from ..ops.logprobs.api import logprobs
from ..runtime import checks

__all__ = ["entropy_from_logits", "selective_log_softmax", "selective_log_softmax_and_entropy"]

NO_LABEL = -1  # no class, and so what a masked row may have as its ignored label


def selective_log_softmax(
    logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None
) -> Tensor:
    """Log-probabilities of the given classes of each row, `log_softmax` and then `gather`.

    Args:
        logits: `[..., C]`, floating dtype.
        index: classes `[...]`, or `[..., K]`, any integer dtype.
        temperature: positive; what the logits are divided by.
        row_mask: `[...]` or `[..., K]`, the shape of the classes; where it is 0, results and
            gradients are 0, and the class may be any number.

    Returns:
        Log-probabilities in nats, `[...]` or `[..., K]`, differentiable in the logits. Half types
        give fp32 on a GPU and their own dtype on a CPU, as in TRL.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.token_stats` and `partita.logprobs`.

    Source: `trl.trainer.utils.selective_log_softmax` of TRL 1.16, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.trl import selective_log_softmax
        >>> selective_log_softmax(torch.zeros(1, 2, 4), torch.tensor([[3, 0]]))
        tensor([[-1.3863, -1.3863]])
    """
    checks.floating("logits", logits)
    checks.integer("index", index)
    if index.ndim == logits.ndim - 1:
        return _in_dtype(_statistics(logits, index, temperature, row_mask).logprob, logits)
    if row_mask is None:
        return _in_dtype(logprobs(logits, index, temperature=temperature), logits)
    is_masked = _masked(index, row_mask)
    found = logprobs(logits, index.masked_fill(is_masked, 0), temperature=temperature)
    return _in_dtype(found.masked_fill(is_masked, 0.0), logits)


def selective_log_softmax_and_entropy(
    logits: Tensor,
    index: Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of one class, and entropy, of each row, from one read of the logits.

    Args:
        logits: `[..., C]`, floating dtype.
        index: classes `[...]`, any integer dtype.
        entropy_requires_grad: whether the entropy is differentiable.
        temperature, row_mask: as in `selective_log_softmax`.

    Returns:
        Log-probabilities and entropies in nats, both `[...]`, in the dtype of
        `selective_log_softmax`.

    Raises:
        TypeError, ValueError, IndexError: as in `partita.token_stats`.

    Source: the function of that name in TRL 1.16, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.trl import selective_log_softmax_and_entropy
        >>> selective_log_softmax_and_entropy(torch.zeros(1, 4), torch.tensor([2]))
        (tensor([-1.3863]), tensor([1.3863]))
    """
    checks.floating("logits", logits)
    checks.integer("index", index)
    stats = _statistics(logits, index, temperature, row_mask)
    entropy = stats.entropy if entropy_requires_grad else stats.entropy.detach()
    if row_mask is not None:
        entropy = entropy.masked_fill(_masked(index, row_mask), 0.0)
    return _in_dtype(stats.logprob, logits), _in_dtype(entropy, logits)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """Entropy of each row of logits, in nats.

    Args:
        logits: `[..., C]`, floating dtype.
        chunk_size: taken for TRL's signature, and not used: no chunk of probabilities is made.

    Returns:
        Entropies `[...]`, differentiable in the logits, in the dtype of `selective_log_softmax`.

    Raises:
        TypeError, ValueError: as in `partita.token_stats`.

    Source: `trl.trainer.utils.entropy_from_logits` of TRL 1.16, 2026.

    Example:
        >>> import torch
        >>> from partita.integrations.trl import entropy_from_logits
        >>> entropy_from_logits(torch.zeros(1, 2, 4))
        tensor([[1.3863, 1.3863]])
    """
    return _in_dtype(token_stats(logits).entropy, logits)


def _in_dtype(found: Tensor, logits: Tensor) -> Tensor:
    """Return a result in the dtype that TRL gives: its kernels for GPUs return fp32."""
    return found.to(logits.dtype) if logits.is_cpu else found


def _statistics(
    logits: Tensor, index: Tensor, temperature: float, row_mask: Tensor | None
) -> TokenStats:
    """Return the statistics of the rows, of which masked ones have log-probability 0."""
    if row_mask is None:
        nothing = checks.NOTHING_IGNORED
        return token_stats(logits, index, temperature=temperature, ignore_index=nothing)
    index = index.long().masked_fill(_masked(index, row_mask), NO_LABEL)
    return token_stats(logits, index, temperature=temperature, ignore_index=NO_LABEL)


def _masked(index: Tensor, row_mask: Tensor) -> Tensor:
    """Return where the mask is 0; raise unless it has the shape of the index."""
    checks.tensor("row_mask", row_mask)
    checks.shape("row_mask", row_mask, index.shape, "the shape of index")
    checks.device("row_mask", row_mask, index, "index")
    return row_mask == 0
