"""Log-probabilities of given classes of each row."""

from __future__ import annotations

from torch import Tensor

from ...runtime import checks
from ..cross_entropy.common import check_logits
from .autograd import logprobs_of, topk_of
from .common import TopK, check_ids, check_k


def logprobs(
    logits: Tensor, ids: Tensor, *, temperature: float = 1.0, softcap: float | None = None
) -> Tensor:
    """Log-probabilities of K given classes of each row, in one read of the logits.

    `token_stats` gives one label's log-probability, with the entropy. This op serves several: the
    candidates of a teacher, the answers of a multiple choice, or the tokens of several rollouts.

    Args:
        logits: `[..., C]`, floating dtype, any strides; may be -inf (masked classes).
        ids: classes `[..., K]`, any integer dtype. Classes may repeat.
        temperature: positive; what the logits are divided by.
        softcap: replace the logits by `softcap * tanh(logits / softcap)` first.

    Returns:
        Log-probabilities in nats, `[..., K]`, fp32 (fp64 for fp64), differentiable in the logits.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected.
        IndexError: an id that is no class; on a GPU only with `PARTITA_CHECK=1`, otherwise its
            log-probability is NaN, and so is the gradient of its row.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.

    Example:
        >>> import torch, partita
        >>> logits = torch.tensor([[0.0, 1.0, 2.0]], requires_grad=True)
        >>> found = partita.logprobs(logits, torch.tensor([[2, 0]]))
        >>> found.sum().backward()
        >>> found, logits.grad
        (tensor([[-0.4076, -2.4076]], grad_fn=<...>), tensor([[ 0.8199, -0.4895, -0.3305]]))
    """
    check_logits(logits)
    check_ids(ids, logits, "logits")
    numbers = *checks.temperature_and_softcap(temperature, softcap), checks.NOTHING_IGNORED
    return logprobs_of(logits, ids.long(), *numbers)  # a narrow type would wrap the bounds


def topk_logprobs(
    logits: Tensor, k: int, *, temperature: float = 1.0, softcap: float | None = None
) -> TopK:
    """Find the k most probable classes of each row, with their log-probabilities.

    Args:
        logits: `[..., C]`, floating dtype, any strides; may be -inf (masked classes).
        k: how many, from 1 to C.
        temperature: positive; what the logits are divided by.
        softcap: replace the logits by `softcap * tanh(logits / softcap)` first.

    Returns:
        `TopK(logprobs, indices, logsumexp)` in nats: `[..., k]`, fp32 (fp64 for fp64), descending
        and differentiable in the logits; `[..., k]` int64, of equal logits the lower class first;
        and `[...]`, which has no gradient.

    Raises:
        TypeError, ValueError: a wrong dtype, shape or number, named with what was expected.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.

    Example:
        >>> import torch, partita
        >>> found = partita.topk_logprobs(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), 2)
        >>> found.logprobs, found.indices
        (tensor([[-0.9176, -0.9176]]), tensor([[1, 3]]))
    """
    check_logits(logits)
    check_k(k, logits.shape[-1])
    return topk_of(logits, k, *checks.temperature_and_softcap(temperature, softcap))
