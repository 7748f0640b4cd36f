"""Results and functions that the reference and the kernels of divergences share."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import larger
from ..logprobs.common import TopK, check_ids

IGNORED = checks.NOTHING_IGNORED  # the id of a teacher's class in rows that do not count


class DivergenceRows(NamedTuple):
    """The divergence of each row, fp32 (fp64 for fp64), and what its gradient needs.

    Fields:
        loss: the divergence in nats, `[...]`.
        student: KL(student ‖ teacher) for beta 1, KL(student ‖ mixture) for a beta between 0 and 1,
            and 0 for beta 0, `[...]`.
        maximum, sumexp: maximum of the student's soft-capped logits, and the sum of
            exp((logits - maximum) / temperature), `[...]`.
        teacher_maximum, teacher_sumexp: the same of the teacher, `[...]`.
    """

    loss: Tensor
    student: Tensor
    maximum: Tensor
    sumexp: Tensor
    teacher_maximum: Tensor
    teacher_sumexp: Tensor


class DivergenceState(NamedTuple):
    """The state of rows after some of their classes.

    Fields:
        rows: the `DivergenceRows` of these classes alone, fields `[M]`.
        weighted: the sum of e * (first - second), relative to the maxima of both rows. e are the
            exponentials of the first row, which is the teacher's for beta 0, otherwise the
            student's, `[M]`.
    """

    rows: DivergenceRows
    weighted: Tensor

    def part(self, rows: slice) -> DivergenceState:
        """Return the state of some rows, in the same memory."""
        fields = DivergenceRows(*(field[rows] for field in self.rows))
        return DivergenceState(fields, self.weighted[rows])


class DivergenceKernels(NamedTuple):
    """The functions of one backend that work on some classes of both rows, `[M, C]` each.

    Fields:
        new_state: returns a `DivergenceState` for as many rows as its first argument has.
        accumulate: updates a `DivergenceState` in place with the classes from `first` on.
        accumulate_mixture: adds the divergences from the mixture over these classes to the state,
            whose maxima and sums have seen all classes.
        gradient: overwrites the student's logits with their gradient.
    """

    new_state: Callable[..., DivergenceState]
    accumulate: Callable[..., None]
    accumulate_mixture: Callable[..., None]
    gradient: Callable[..., None]

    def divergence_state(
        self,
        logits: Tensor,
        teacher_logits: Tensor,
        beta: float,
        temperature: float,
        softcap: float,
    ) -> Tensor:
        """Return what ranks exchange of some classes of both rows, `[M, C]` each.

        That is `[5, M]`: both maxima and sums, and the weighted sum of `DivergenceState`.
        """
        if not logits.shape[1]:
            result = logits.new_zeros(5, len(logits), dtype=acc_dtype(logits.dtype))
            result[:3:2] = -torch.inf
            return result
        state = self.new_state(logits)
        self.accumulate(logits, teacher_logits, state, 0, beta, temperature, softcap)
        return torch.stack([*state.rows[2:], state.weighted])

    def divergence_mixture(
        self,
        logits: Tensor,
        teacher_logits: Tensor,
        maximum: Tensor,
        sumexp: Tensor,
        teacher_maximum: Tensor,
        teacher_sumexp: Tensor,
        beta: float,
        temperature: float,
        softcap: float,
    ) -> Tensor:
        """Return the terms of these classes in loss and KL(student ‖ mixture), `[2, M]`.

        The maxima and sums are those of all classes.
        """
        result = maximum.new_zeros(2, len(logits))
        statistics = (maximum, sumexp, teacher_maximum, teacher_sumexp)
        if logits.shape[1]:
            rows = DivergenceRows(result[0], result[1], *(each.contiguous() for each in statistics))
            state = DivergenceState(rows, result[0])
            self.accumulate_mixture(logits, teacher_logits, state, 0, beta, temperature, softcap)
        return result


def in_common_precision(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return the student's logits in the dtype of both if that is fp64.

    The dtype of the student's logits is that in which a divergence is computed.
    """
    dtype = torch.promote_types(logits.dtype, teacher_logits.dtype)
    return logits.to(dtype) if dtype == torch.float64 else logits


def reduced(loss: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """Reduce the losses of the rows of the mask."""
    if mask is not None:
        loss = torch.where(mask == 0, 0, loss)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    if mask is None:
        return loss.sum() / loss.numel()
    return loss.sum() / (mask != 0).sum()


def row_factors(mask: Tensor | None, like: Tensor, reduction: str) -> Tensor:
    """Return the derivative of a reduced loss in the loss of each row, with the dtype of `like`."""
    if mask is None:
        return torch.full_like(like, 1 / larger(like.numel(), 1) if reduction == "mean" else 1.0)
    is_valid = mask != 0
    factor = is_valid.sum().to(like.dtype).reciprocal() if reduction == "mean" else 1.0
    return torch.where(is_valid, factor, 0.0).to(like.dtype)


def check_options(
    beta: float, mask: Tensor | None, reduction: str, rows: Tensor, name: str
) -> None:
    """Raise unless these are options of the divergence of rows `[..., D]` of the named tensor."""
    checks.number("beta", beta, low=0.0, high=1.0)
    checks.choice("reduction", reduction, checks.REDUCTIONS)
    if mask is not None:
        checks.tensor("mask", mask)
        checks.shape("mask", mask, rows.shape[:-1], f"{name}.shape[:-1]")
        checks.device("mask", mask, rows, name)


def check_teacher(
    teacher: TopK,
    rows: Tensor,
    name: str,
    classes: int,
    beta: float,
    mask: Tensor | None,
    reduction: str,
) -> None:
    """Raise unless teacher and options fit the rows `[..., D]` of the named tensor."""
    if not isinstance(teacher, TopK):
        advice = "; partita.TopK(*teacher) names its fields" if isinstance(teacher, tuple) else ""
        raise TypeError(
            "teacher: expected a TopK(logprobs, indices, logsumexp), as topk_logprobs returns it,"
            f" got {type(teacher).__name__}{advice}"
        )
    check_ids(teacher.indices, rows, name, "teacher.indices")
    checks.floating("teacher.logprobs", teacher.logprobs)
    checks.device("teacher.logprobs", teacher.logprobs, rows, name)
    checks.shape("teacher.logprobs", teacher.logprobs, teacher.indices.shape, "teacher.indices")
    check_options(beta, mask, reduction, rows, name)
    checks.labels("teacher.indices", ids_of_rows(teacher, mask), classes, IGNORED)


def ids_of_rows(teacher: TopK, mask: Tensor | None) -> Tensor:
    """Return the teacher's classes, and IGNORED in rows that do not count."""
    ids = teacher.indices.long()  # a narrow type would wrap the bounds
    return ids if mask is None else torch.where(mask.unsqueeze(-1) != 0, ids, IGNORED)
