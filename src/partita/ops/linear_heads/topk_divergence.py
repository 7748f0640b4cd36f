"""The divergence from a teacher's most probable classes, from hidden states."""

from __future__ import annotations

from torch import Tensor

from ...runtime import checks
from ..divergence.autograd import divergence_of_classes
from ..divergence.common import IGNORED, check_teacher, ids_of_rows
from ..logprobs.common import TopK
from .inputs import checked_matrix
from .logprobs import linear_logprobs_of


def linear_topk_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher: TopK,
    *,
    linear_bias: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
    memory_budget: int | None = None,
) -> Tensor:
    """Divergence of a student's head from a teacher whose k most probable classes are known.

    It is `topk_divergence(input @ linear_weight.T + linear_bias, teacher, ...)`, without the logits
    in memory, with the plans of `linear_logprobs`.

    Args:
        input: the student's hidden states `[..., H]`, floating dtype.
        linear_weight: `[C, H]` in the same dtype.
        teacher: a `TopK`, as in `topk_divergence`.
        linear_bias: `[C]` in the same dtype.
        beta, temperature, softcap, mask, reduction: as in `topk_divergence`.
        memory_budget: bytes of workspace, as in `linear_logprobs`.

    Returns:
        The divergence in nats, a number or `[...]`, fp32 (fp64 for fp64), differentiable in hidden
        states, matrix and bias. A mean over no rows is NaN.

    Raises:
        TypeError, ValueError, IndexError: as in `topk_divergence` and `linear_logprobs`.

    Source: as `topk_divergence`.

    Example:
        >>> import torch, partita
        >>> teacher = partita.topk_logprobs(torch.tensor([[3.0, 1.0, 0.0, 0.0]]), 2)
        >>> partita.linear_topk_divergence(torch.zeros(1, 2), torch.zeros(4, 2), teacher)
        tensor(0.7142)
    """
    checked_matrix(input, linear_weight, linear_bias)
    checks.temperature_and_softcap(temperature, softcap)
    classes = len(linear_weight)
    check_teacher(teacher, input, "input", classes, beta, mask, reduction)
    needs_rest = teacher.indices.shape[-1] < classes
    options = (linear_bias, temperature, softcap, IGNORED, memory_budget, needs_rest)
    logp = linear_logprobs_of(input, linear_weight, ids_of_rows(teacher, mask), *options)
    return divergence_of_classes(logp, teacher, float(beta), mask, reduction)
