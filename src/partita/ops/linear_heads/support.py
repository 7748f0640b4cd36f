"""Statistics over recorded supports from hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...runtime.checks import NOTHING_IGNORED
from ..support.autograd import stats_of_parts
from ..support.common import Support, SupportStats
from .api import linear_token_stats
from .autograd import logits_of_entries
from .inputs import cast_and_check
from .low_rank import LowRank, with_states
from .plan import check_budget


def linear_support_stats(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    ids: Tensor,
    offsets: Tensor,
    *,
    linear_bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    memory_budget: int | None = None,
    logits_dtype: torch.dtype | None = None,
    low_rank: LowRank | None = None,
) -> SupportStats:
    """Compute statistics over recorded supports from hidden states, without the other logits.

    They are `support_stats(input @ linear_weight.T + linear_bias, target, ids, offsets, ...)`. Rows
    with ids take one dot product for each class of their sets, and rows without ids those of
    `linear_token_stats`. For the number of these rows a call waits for the GPU once, unless offsets
    on the CPU tell that every row has ids. In compiled code and in a CUDA graph, which do not know
    the number, all rows take these products too.

    Args:
        input: hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype, or in fp32 beside a half type.
        target: labels `[...]`, any integer dtype.
        ids, offsets: the recorded classes `[K]` and where those of each row begin, `[M + 1]`, as in
            `support_stats`.
        linear_bias: `[C]` in the dtype of the matrix.
        temperature, softcap, ignore_index: as in `support_stats`.
        memory_budget: bytes of workspace for rows without ids; None for 2 GiB.
        logits_dtype: as in `linear_cross_entropy`, for rows without ids.
        low_rank: as in `linear_cross_entropy`.

    Returns:
        `SupportStats(logprob, entropy, in_set)` as in `support_stats`. The first two are
        differentiable in hidden states, matrix, bias and `low_rank`. The sums are in fp32, and
        the logits of rows with ids are not rounded to a half type.

    Raises:
        TypeError, ValueError, IndexError: as in `support_stats` and `linear_cross_entropy`.

    Source: as `support_stats`; the matrix's gradient is a segmented sum over entries sorted by
    class.

    Example:
        >>> import torch, partita
        >>> ids, offsets = torch.tensor([2, 3]), torch.tensor([0, 2])
        >>> target = torch.tensor([2])
        >>> partita.linear_support_stats(torch.zeros(1, 3), torch.zeros(4, 3), target, ids, offsets)
        SupportStats(logprob=tensor([-0.6931]), entropy=tensor([0.6931]), in_set=tensor([True]))
    """
    head = cast_and_check(input, linear_weight, linear_bias, target, low_rank=low_rank)
    check_budget(memory_budget)
    hidden, (_, weight, bias, low_rank_input, factor) = input.shape[-1], head.tensors
    states = with_states(head.input, low_rank_input)

    def entries(x: Tensor, support: Support) -> Tensor:
        return logits_of_entries(x, head, 0, support)

    def all_classes(x: Tensor, labels: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        found = linear_token_stats(
            x[:, :hidden],
            weight,
            labels,
            linear_bias=bias,
            temperature=temperature,
            softcap=softcap,
            ignore_index=NOTHING_IGNORED,
            memory_budget=memory_budget,
            logits_dtype=logits_dtype,
            low_rank=None if factor is None else (x[:, hidden:], factor),
        )
        return found.logprob, found.entropy

    call = (states, "input", len(weight), target, ids, offsets)
    return stats_of_parts(entries, all_classes, *call, temperature, softcap, ignore_index)
