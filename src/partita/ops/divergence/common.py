"""Terms of two rows, their results, and the loss that they make up."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...primitives.rows import finite_shift, laid_out_like
from ...runtime import checks
from ...runtime.dtypes import acc_dtype, integer_dtype
from ...runtime.sizes import larger
from ..cross_entropy.api import TokenStats
from ..cross_entropy.common import valid_targets
from ..logprobs.common import TopK, check_ids

IGNORED = checks.NOTHING_IGNORED  # the id of a teacher's class in rows that do not count


class Terms(NamedTuple):
    """Something for each term of a loss of a student's row and a teacher's."""

    hard: Any  # the cross-entropy of the student with a label, at temperature 1
    kl: Any  # KL(teacher ‖ student)
    reverse_kl: Any  # KL(student ‖ teacher)
    jsd: Any  # the generalised Jensen-Shannon divergence
    tv: Any  # the total variation


NO_TERMS = Terms(None, None, None, None, None)


class Means(NamedTuple):
    """Something for each number of a row that gradients need in addition to terms and sums."""

    plain: Any  # the sum of exp(x - maximum) over the student's soft-capped logits x
    student: Any  # KL(student ‖ mixture)
    sign: Any  # the mean of sign(student - teacher) under the student


class Sums(NamedTuple):
    """Something for each sum that grows with the classes of a row."""

    # The sum of f * (t - x), relative to the maxima of both rows, where f are the exponentials of
    # the teacher's logits t.
    forward: Any
    reverse: Any  # the sum of e * (x - t), with the student's exponentials e
    label: Any  # the logit of the label, -inf until its class was read


class Exchanged(NamedTuple):
    """Something for each number of a row that ranks exchange, which have its classes together.

    The first four are as in `DivergenceRows`, and `plain` is as in `Means`.
    """

    maximum: Any
    sumexp: Any
    teacher_maximum: Any
    teacher_sumexp: Any
    forward: Any
    reverse: Any
    label: Any
    plain: Any
    argmax: Any


NO_CLASSES = Exchanged(-math.inf, 0.0, -math.inf, 0.0, 0.0, 0.0, -math.inf, 0.0, 0.0)


class TermOptions(NamedTuple):
    """The options of the terms of rows."""

    # hard, kl, reverse_kl, jsd, tv: whether the term is computed
    hard: bool
    kl: bool
    reverse_kl: bool
    jsd: bool
    tv: bool
    best: bool  # whether the teacher's arg-max is
    beta: float  # the teacher's weight in the mixture of `jsd`
    temperature: float  # what the soft-capped logits are divided by in all terms but `hard`
    softcap: float  # the soft-cap of both logits, or 0
    ignore_index: int  # the label of rows without a `hard` term

    @property
    def terms(self) -> Terms:
        return Terms(*self[:5])

    @property
    def means(self) -> Means:
        """Return which means are needed. At temperature 1 `sumexp` is the plain sum too."""
        return Means(self.hard and self.temperature != 1, self.jsd, self.tv)

    @property
    def sums(self) -> Sums:
        return Sums(self.kl, self.reverse_kl, self.hard)

    @property
    def exchanged(self) -> Exchanged:
        """Return which numbers of their classes ranks exchange first."""
        return Exchanged(True, True, True, True, *self.sums, self.means.plain, self.best)

    @property
    def is_mixed(self) -> bool:
        """Return whether a term needs the normalisers of both rows first."""
        return self.jsd or self.tv

    @property
    def mixed(self) -> TermOptions:
        """Return the options of the terms that need the normalisers of both rows first."""
        return TermOptions(False, False, False, self.jsd, self.tv, False, *self[6:])


def divergence_options(beta: float, temperature: float, softcap: float) -> TermOptions:
    """Return the options of the one term that a beta names."""
    named = (False, beta == 0, beta == 1, 0 < beta < 1, False, False)
    return TermOptions(*named, beta, temperature, softcap, IGNORED)


Named = TypeVar("Named", Terms, Means, Exchanged)


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
    """The terms of each row, fp32 (fp64 for fp64), and what their gradient needs."""

    terms: Tensor  # the `packed` terms that are computed, in nats, [..., N], or [...] for one
    # maximum, sumexp: maximum of the student's soft-capped logits, and the sum of exp((logits -
    # maximum) / temperature), [...]
    maximum: Tensor
    sumexp: Tensor
    # teacher_maximum, teacher_sumexp: the same of the teacher, [...]
    teacher_maximum: Tensor
    teacher_sumexp: Tensor
    means: Tensor  # the `packed` `Means` that are needed, [..., K], or [...] for one
    argmax: Tensor  # the lowest class with the teacher's maximum, [...] int64, or [..., 0]


class DivergenceState(NamedTuple):
    """The state of rows after some of their classes: results of these alone, and `Sums` `[M]`."""

    rows: DivergenceRows
    sums: Sums


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
    """The functions of one backend that work on some classes of both rows, `[M, C]` each."""

    # Updates a `DivergenceState` in place with the classes from `first` on, of `classes` in all, or
    # writes it if `first` is 0.
    accumulate: Callable[..., None]
    # Adds the terms and means that need both normalisers, which have seen all classes.
    accumulate_mixture: Callable[..., None]
    # Writes the gradient of the student's logits, which may take their place.
    gradient: Callable[..., None]

    def divergence_state(
        self,
        logits: Tensor,
        teacher_logits: Tensor,
        target: Tensor | None,
        first: int,
        options: TermOptions,
    ) -> Tensor:
        """Return the packed `Exchanged` of the classes of a rank, from `first` on, `[M, C]` each.

        The bits of the arg-max are those of an integer.
        """
        rows, sums = state = empty_state(empty_rows(logits, options), options)
        if logits.shape[1]:
            labels = None if target is None else target.long() - first
            self.accumulate(logits, teacher_logits, labels, state, 0, logits.shape[1], options)
            dtype = rows.maximum.dtype
            argmax = (rows.argmax + first).to(integer_dtype(dtype)).view(dtype)
            plain = columns(rows.means, options.means).plain
            found = Exchanged(*rows[1:5], *sums, plain, argmax)
        else:
            found = Exchanged(*(torch.full_like(rows.maximum, value) for value in NO_CLASSES))
        pairs = zip(found, options.exchanged, strict=True)
        return packed([each for each, is_needed in pairs if is_needed], rows.maximum)

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
        """Return the terms and the means of these classes that need both normalisers, `[2, M, N]`.

        The maxima and sums are those of all classes.
        """
        options = options.mixed
        result = maximum.new_zeros(2, len(logits), sum(options.terms))
        if logits.shape[1]:
            terms, means = result.squeeze(-1) if result.shape[2] == 1 else result
            statistics = (maximum, sumexp, teacher_maximum, teacher_sumexp)
            sums = (each.contiguous() for each in statistics)
            rows = DivergenceRows._make((terms, *sums, means, terms))
            state = DivergenceState(rows, Sums(None, None, None))
            self.accumulate_mixture(logits, teacher_logits, state, 0, options)
        return result

    def divergence_local_gradient(
        self,
        grad: Tensor,
        logits: Tensor,
        teacher_logits: Tensor,
        target: Tensor | None,
        rows: DivergenceRows,
        first: int,
        classes: int,
        options: TermOptions,
    ) -> Tensor:
        """Return the gradient of the logits `[M, C]` from `first` on, of `classes` in all.

        The terms and statistics are those of all classes.
        """
        grad, labels = grad.contiguous(), None if target is None else target.long().contiguous()
        rows = DivergenceRows(*(field.contiguous() for field in rows))
        result = logits.new_empty(logits.shape)
        place = (first, classes, options, result)
        self.gradient(grad, logits, teacher_logits, labels, rows, *place)
        return laid_out_like(result, logits)


def origin_of_sums(maximum: Tensor, temperature: float, in_kernels: bool) -> Tensor:
    """Return the logit that the exponentials of a row are relative to, in fp64.

    It is the maximum, whose product with log2(e) / temperature is rounded in kernels.
    """
    origin = finite_shift(maximum)
    if not in_kernels:
        return origin.double()
    scale = torch.full_like(origin, temperature).reciprocal() * math.log2(math.e)
    return (origin * scale).double() / scale.double()


def label_loss(
    target: Tensor, label: Tensor, maximum: Tensor, plain: Tensor, classes: int, ignored: int
) -> Tensor:
    """Return the cross-entropy of each row, given the logit of its label."""
    _, valid, invalid = valid_targets(target, classes, ignored)
    nll = plain.log() + (finite_shift(maximum) - label)
    return torch.where(valid, nll, 0) + torch.where(invalid, torch.nan, 0.0).to(plain.dtype)


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


class Distillation(NamedTuple):
    """The result of `distillation_loss`.

    Fields:
        loss: the weighted sum of the terms, a number, or `[...]` under `none`.
        hard: the cross-entropy of the student's logits with the labels.
        kl: KL(teacher ‖ student).
        reverse_kl: KL(student ‖ teacher).
        jsd: the generalised Jensen-Shannon divergence.
        tv: the total variation, half of the sum of |student - teacher|.
        teacher_mass: the teacher's probability of all classes that the student has, `[...]`; None
            without `teacher_classes`.
        teacher_argmax: the teacher's most probable class, the lowest of equal ones, `[...]` int64.

    A term that has no weight is None. Under `none` the others are `[...]` and differentiable.
    Otherwise they are numbers without a gradient, reduced as the loss is, but not weighted.
    """

    loss: Tensor
    hard: Tensor | None
    kl: Tensor | None
    reverse_kl: Tensor | None
    jsd: Tensor | None
    tv: Tensor | None
    teacher_mass: Tensor | None
    teacher_argmax: Tensor


class Objective(NamedTuple):
    """How the terms of rows make up the loss."""

    hard_rows: Tensor | None  # which rows have a `hard` term, [...], or None for all
    soft_rows: Tensor | None  # which rows have the other terms, [...], or None for all
    tensors: Terms  # the weights that are tensors [...] or [], otherwise None
    numbers: Terms  # the weights that are numbers, otherwise None
    scale: float  # what the terms but `hard` are multiplied by
    reduction: str  # `none`, `mean` or `sum`

    def _parts(self) -> list[tuple[str, Tensor | None, float, Any]]:
        """Return name, rows, scale and weight of each term that has a weight."""
        weights = zip(Terms._fields, self.tensors, self.numbers, strict=True)
        of_hard, of_others = (self.hard_rows, 1.0), (self.soft_rows, self.scale)
        return [
            (name, *(of_hard if name == "hard" else of_others), number if x is None else x)
            for name, x, number in weights
            if x is not None or number is not None
        ]

    def factors(self, like: Tensor) -> Tensor:
        """Return the derivative of the loss in each term of each row `[...]`, packed."""
        found = []
        for _, rows, scale, weight in self._parts():
            factor = row_factors(rows, like, self.reduction)
            if isinstance(weight, Tensor) or weight * scale != 1.0:
                factor = torch.where(factor == 0, 0, factor * weight * scale).to(like.dtype)
            found.append(factor)
        return packed(found, like)

    def _reduced(self, terms: Tensor, weighted: bool) -> list[Tensor]:
        """Return each of the packed terms, reduced, times its weight or not."""
        parts, found = self._parts(), []
        of_terms = unpacked(terms, [True] * len(parts))
        for values, (_, rows, scale, weight) in zip(of_terms, parts, strict=True):
            factor = weight * scale if weighted else scale
            if isinstance(factor, Tensor) or factor != 1.0:
                values = values * factor
            found.append(reduced(values, rows, self.reduction))
        return found

    def loss(self, terms: Tensor) -> Tensor:
        """Return the loss from the packed terms of rows."""
        return functools.reduce(torch.add, self._reduced(terms, weighted=True))

    def result(
        self, loss: Tensor, rows: DivergenceRows, teacher: TokenStats | None, temperature: float
    ) -> Distillation:
        """Return the result from rows `[...]`, and statistics of all of the teacher's classes."""
        terms = rows.terms if self.reduction == "none" else rows.terms.detach()
        values = zip(self._parts(), self._reduced(terms, weighted=False), strict=True)
        found: dict[str, Any] = {name: value for (name, *_), value in values}
        mass, argmax = None, rows.argmax
        if teacher is not None:
            shift = finite_shift(rows.teacher_maximum) / temperature
            logsumexp = shift + rows.teacher_sumexp.log()
            mass, argmax = (logsumexp - teacher.logsumexp).exp().detach(), teacher.argmax
        return Distillation._make((loss, *map(found.get, Terms._fields), mass, argmax))


def checked_divergence(
    rows: Tensor,
    name: str,
    mask: Tensor | None,
    reduction: str,
    beta: float,
    temperature: float,
    softcap: float | None,
) -> tuple[Objective, TermOptions]:
    """Return objective and options of one divergence of rows `[..., D]` of the named tensor."""
    check_options(beta, mask, reduction, rows, name)
    options = divergence_options(float(beta), *checks.temperature_and_softcap(temperature, softcap))
    weights = Terms(*(1.0 if named else None for named in options.terms))
    return Objective(None, mask, NO_TERMS, weights, 1.0, reduction), options


def checked_objective(
    weights: Mapping[str, float | Tensor],
    rows: Tensor,
    name: str,
    target: Tensor | None,
    mask: Tensor | None,
    reduction: str,
    ignore_index: int,
    beta: float,
    temperature: float,
    scale_by_temperature_squared: bool,
    softcap: float | None,
) -> tuple[Objective, TermOptions]:
    """Return objective and options for rows `[..., D]` of the named tensor; raise for bad ones."""
    if not isinstance(weights, Mapping) or not weights:
        raise TypeError(
            "weights: expected a dict from the names of terms to their weights, such as"
            f' {{"hard": 0.5, "kl": 0.5}}, got {weights!r}'
        )
    shape = (rows.shape[:-1], f"{name}.shape[:-1]")
    for term, weight in weights.items():
        checks.choice("weights", term, Terms._fields)
        if isinstance(weight, Tensor):
            checks.floating(f"weights[{term!r}]", weight)
            checks.device(f"weights[{term!r}]", weight, rows, name)
            if weight.ndim:
                checks.shape(f"weights[{term!r}]", weight, *shape)
        else:
            checks.number(f"weights[{term!r}]", weight, low=0.0)
    if target is not None:
        checks.integer("target", target)
        checks.device("target", target, rows, name)
        checks.shape("target", target, *shape)
    elif "hard" in weights:
        raise ValueError("target: expected the labels of the term 'hard', got None")
    check_options(beta, mask, reduction, rows, name)
    checks.python_int("ignore_index", ignore_index)
    numbers = float(beta), *checks.temperature_and_softcap(temperature, softcap)
    if "jsd" in weights and beta in (0.0, 1.0):
        raise ValueError(
            f"beta: expected a number between 0 and 1 for the term 'jsd', got {beta}; the terms"
            " 'kl' and 'reverse_kl' are the divergences at the ends"
        )
    counts = None if target is None else target != ignore_index
    given = [weights.get(term) for term in Terms._fields]
    tensors = (x.detach() if isinstance(x, Tensor) else None for x in given)
    floats = (None if x is None or isinstance(x, Tensor) else float(x) for x in given)
    scale = numbers[1] ** 2 if scale_by_temperature_squared else 1.0
    soft_rows = counts if mask is None else mask != 0
    of_terms = (Terms(*tensors), Terms(*floats))
    objective = Objective(counts, soft_rows, *of_terms, scale, reduction)
    named = [term in weights for term in Terms._fields]
    return objective, TermOptions._make((*named, True, *numbers, ignore_index))


def mapped_classes(
    classes: Tensor, rows: Tensor, name: str, student_classes: int, teacher_classes: int
) -> tuple[Tensor, Tensor]:
    """Return ids that are safe to read, and 0, or NaN where an id was no class, `[C]` each.

    Raise unless these are ids of the teacher's classes, one for each class of the student.
    """
    checks.integer("teacher_classes", classes)
    checks.device("teacher_classes", classes, rows, name)
    meaning = "the classes of the student"
    checks.shape("teacher_classes", classes, (student_classes,), meaning)
    checks.labels("teacher_classes", classes, teacher_classes, checks.NOTHING_IGNORED)
    ids = classes.long()
    safe = ids.clamp(0, teacher_classes - 1)
    return safe, torch.where(ids == safe, 0.0, torch.nan)
