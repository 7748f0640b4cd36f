"""Statistics of rows over the classes that a sampler recorded as possible."""

from __future__ import annotations

from torch import Tensor

from ..cross_entropy.common import check_logits
from .autograd import stats_of_parts
from .common import SupportStats


def support_stats(
    logits: Tensor,
    target: Tensor,
    ids: Tensor,
    offsets: Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
) -> SupportStats:
    """Compute log-probability and entropy over the classes that a sampler recorded as possible.

    A sampler with top-k, top-p or min-p draws from a distribution over few classes, which a trainer
    cannot find again from logits with other bits. Inference engines record these classes for each
    token. The target is always in the set, recorded or not.

    Args:
        logits: `[..., C]`, floating dtype, any strides; may be -inf.
        target: labels `[...]`, any integer dtype.
        ids: recorded classes `[K]`, any integer dtype, one row after another. Classes may repeat.
        offsets: where the ids of each of the M rows begin in `ids`, and K, `[M + 1]`, any integer
            dtype, on the device of the logits or on the CPU. Rows are counted as in
            `logits.flatten(0, -2)`. A row without ids has all classes in its set. Of other rows
            only the logits of their sets are read.
        temperature: positive; what the logits are divided by.
        softcap: replace the logits by `softcap * tanh(logits / softcap)` first.
        ignore_index: rows with this label have log-probability, entropy and gradient 0.

    Returns:
        `SupportStats(logprob, entropy, in_set)`, `[...]` each, in nats, fp32 (fp64 for fp64).
        `logprob` and `entropy` are differentiable in the logits. `in_set` is whether the target was
        recorded; it is true in rows without ids and false in ignored ones.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, or offsets that decrease or
            do not run from 0 to K, named with what was expected.
        IndexError: a label or id that is no class. A GPU checks values with `PARTITA_CHECK=1` only;
            otherwise results and gradients of that row are NaN, and those of all rows if the
            offsets are wrong.

    Source: as `token_stats`, over the support of each row.

    Example:
        >>> import torch, partita
        >>> target, ids = torch.tensor([2, 0]), torch.tensor([2, 3, 1])
        >>> partita.support_stats(torch.zeros(2, 4), target, ids, torch.tensor([0, 2, 3]))
        SupportStats(logprob=tensor([-0.6931, -0.6931]), entropy=tensor([0.6931, 0.6931]),
                     in_set=tensor([ True, False]))
    """
    check_logits(logits)
    call = (logits, "logits", logits.shape[-1], target, ids, offsets)
    return stats_of_parts(lambda x, _: x, None, *call, temperature, softcap, ignore_index)
