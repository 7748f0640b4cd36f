"""Terms, results and functions that the reference and the kernels of divergences share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...runtime import checks
from ...runtime.dtypes import acc_dtype
from ...runtime.sizes import larger
from ..logprobs.common import TopK, check_ids

IGNORED = checks.NOTHING_IGNORED  # the id of a teacher's class in rows that do not count


class Terms(NamedTuple):
    """Something for each term of a loss of a student's row and a teacher's.

    Fields:
        hard: the cross-entropy of the student with a label, at temperature 1.
        kl: KL(teacher ‖ student).
        reverse_kl: KL(student ‖ teacher).
        jsd: the generalised Jensen-Shannon divergence.
        tv: the total variation.
    """

    hard: Any
    kl: Any
    reverse_kl: Any
    jsd: Any
    tv: Any


NO_TERMS = Terms(None, None, None, None, None)


class Means(NamedTuple):
    """Something for each number of a row that gradients need in addition to terms and sums.

    Fields:
        plain: the sum of exp(x - maximum) over the student's soft-capped logits x.
        student: KL(student ‖ mixture).
        sign: the mean of sign(student - teacher) under the student.
    """

    plain: Any
    student: Any
    sign: Any


class Sums(NamedTuple):
    """Something for each sum that grows with the classes of a row.

    Fields:
        forward: the sum of f * (t - x), relative to the maxima of both rows, where f are the
            exponentials of the teacher's logits t.
        reverse: the sum of e * (x - t), with the student's exponentials e.
        label: the logit of the label, -inf until its class was read.
    """

    forward: Any
    reverse: Any
    label: Any


class TermOptions(NamedTuple):
    """The options of the terms of rows.

    Fields:
        hard, kl, reverse_kl, jsd, tv: whether the term is computed.
        best: whether the teacher's arg-max is.
        beta: the teacher's weight in the mixture of `jsd`.
        temperature: what the soft-capped logits are divided by in all terms but `hard`.
        softcap: the soft-cap of both logits, or 0.
        ignore_index: the label of rows without a `hard` term.
    """

    hard: bool
    kl: bool
    reverse_kl: bool
    jsd: bool
    tv: bool
    best: bool
    beta: float
    temperature: float
    softcap: float
    ignore_index: int

    @property
    def terms(self) -> Terms:
        """Return which terms are computed."""
        return Terms(*self[:5])

    @property
    def means(self) -> Means:
        """Return which means are needed. At temperature 1 `sumexp` is the plain sum too."""
        return Means(self.hard and self.temperature != 1, self.jsd, self.tv)

    @property
    def sums(self) -> Sums:
        """Return which sums are needed."""
        return Sums(self.kl, self.reverse_kl, self.hard)

    @property
    def is_mixed(self) -> bool:
        """Return whether a term needs the normalisers of both rows first."""
        return self.jsd or self.tv


def divergence_options(beta: float, temperature: float, softcap: float) -> TermOptions:
    """Return the options of the one term that a beta names."""
    named = (False, beta == 0, beta == 1, 0 < beta < 1, False, False)
    return TermOptions(*named, beta, temperature, softcap, IGNORED)


Named = TypeVar("Named", Terms, Means)


def packed(fields: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return fields `[...]` as one tensor `[..., N]`, or a single one as it is."""
    if len(fields) == 1:
        return fields[0]
    return torch.stack([*fields], -1) if fields else like.new_empty(*like.shape, 0)


def unpacked(tensor: Tensor, needed: Sequence[bool]) -> Sequence[Tensor]:
    """Return the fields of a tensor that `packed` has made of those that are needed."""
    return (tensor,) if sum(needed) == 1 else tensor.unbind(-1)


def columns(tensor: Tensor, needed: Named) -> Named:
    """Return the fields of a packed tensor, None for those that are not needed."""
    of = iter(unpacked(tensor, needed))
    return type(needed)(*(next(of) if is_needed else None for is_needed in needed))


def counts(packed_grad: Tensor) -> Tensor:
    """Return which rows have a gradient in a term, `[M]`, from that of all terms."""
    is_used = packed_grad != 0
    return is_used if is_used.ndim == 1 else is_used.any(1)


class DivergenceRows(NamedTuple):
    """The terms of each row, fp32 (fp64 for fp64), and what their gradient needs.

    Fields:
        terms: the `packed` terms that are computed, in nats, `[..., N]`, or `[...]` for one.
        maximum, sumexp: maximum of the student's soft-capped logits, and the sum of
            exp((logits - maximum) / temperature), `[...]`.
        teacher_maximum, teacher_sumexp: the same of the teacher, `[...]`.
        means: the `packed` `Means` that are needed, `[..., K]`, or `[...]` for one.
        argmax: the lowest class with the teacher's maximum, `[...]` int64, or `[..., 0]`.
    """

    terms: Tensor
    maximum: Tensor
    sumexp: Tensor
    teacher_maximum: Tensor
    teacher_sumexp: Tensor
    means: Tensor
    argmax: Tensor

    def part(self, rows: slice) -> DivergenceRows:
        """Return the fields of some rows, in the same memory."""
        return DivergenceRows(*map(itemgetter(rows), self))


class DivergenceState(NamedTuple):
    """The state of rows after some of their classes: results of these alone, and `Sums` `[M]`."""

    rows: DivergenceRows
    sums: Sums

    def part(self, rows: slice) -> DivergenceState:
        """Return the state of some rows, in the same memory."""
        sums = (None if each is None else each[rows] for each in self.sums)
        return DivergenceState(self.rows.part(rows), Sums(*sums))


def empty_rows(logits: Tensor, options: TermOptions) -> DivergenceRows:
    """Return memory for the results of rows of logits, `[..., C]`."""
    shape, dtype = logits.shape[:-1], acc_dtype(logits.dtype)
    sizes = (sum(options.terms), sum(options.means))
    terms, means = (logits.new_empty(shape if n == 1 else (*shape, n), dtype=dtype) for n in sizes)
    statistics = (logits.new_empty(shape, dtype=dtype) for _ in range(4))
    best = logits.new_empty(shape if options.best else (*shape, 0), dtype=torch.int64)
    return DivergenceRows._make((terms, *statistics, means, best))


def empty_state(rows: DivergenceRows, options: TermOptions) -> DivergenceState:
    """Return the state of rows, which the first classes write without reading."""
    sums = (torch.empty_like(rows.maximum) if needs else None for needs in options.sums)
    return DivergenceState(rows, Sums(*sums))


class DivergenceKernels(NamedTuple):
    """The functions of one backend that work on some classes of both rows, `[M, C]` each.

    Fields:
        accumulate: updates a `DivergenceState` in place with the classes from `first` on, of
            `classes` in all, or writes it if `first` is 0.
        accumulate_mixture: adds the terms and means that need both normalisers, which have seen
            all classes.
        gradient: writes the gradient of the student's logits, which may take their place.
    """

    accumulate: Callable[..., None]
    accumulate_mixture: Callable[..., None]
    gradient: Callable[..., None]

    def divergence_state(
        self, logits: Tensor, teacher_logits: Tensor, options: TermOptions
    ) -> Tensor:
        """Return what ranks exchange of some classes of both rows, `[M, C]` each.

        That is `[5, M]`: both maxima and sums, and the sum of `Sums` that the KL needs, or 0.
        """
        if not logits.shape[1]:
            result = logits.new_zeros(5, len(logits), dtype=acc_dtype(logits.dtype))
            result[:3:2] = -torch.inf
            return result
        rows, sums = state = empty_state(empty_rows(logits, options), options)
        self.accumulate(logits, teacher_logits, None, state, 0, logits.shape[1], options)
        weighted = [each for each in sums if each is not None] or [torch.zeros_like(rows.sumexp)]
        return torch.stack([*rows[1:5], *weighted])

    def divergence_mixture(
        self,
        logits: Tensor,
        teacher_logits: Tensor,
        maximum: Tensor,
        sumexp: Tensor,
        teacher_maximum: Tensor,
        teacher_sumexp: Tensor,
        options: TermOptions,
    ) -> Tensor:
        """Return the terms of these classes in loss and KL(student ‖ mixture), `[2, M]`.

        The maxima and sums are those of all classes.
        """
        result = maximum.new_zeros(2, len(logits))
        statistics = (maximum, sumexp, teacher_maximum, teacher_sumexp)
        if logits.shape[1]:
            loss, student = result
            sums = (each.contiguous() for each in statistics)
            rows = DivergenceRows._make((loss, *sums, student, loss))
            state = DivergenceState(rows, Sums(None, None, None))
            self.accumulate_mixture(logits, teacher_logits, state, 0, options)
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
