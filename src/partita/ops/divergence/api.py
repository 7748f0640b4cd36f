"""The divergence of a student's distribution from a teacher's, and losses that contain it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...runtime import checks
from ...runtime.sizes import same_sizes
from ..cross_entropy.api import token_stats
from ..cross_entropy.common import check_logits
from ..logprobs.autograd import logprobs_of
from ..logprobs.common import TopK
from .autograd import divergence_of_classes, reduced_divergence, terms_of_rows
from .common import (
    IGNORED,
    Distillation,
    check_options,
    check_teacher,
    checked_objective,
    ids_of_rows,
    in_common_precision,
    mapped_classes,
)


def divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Divergence of the student's distribution of each row from the teacher's, for distillation.

    The distributions are softmaxes at the temperature, and the result is not scaled by its square.
    With m = beta * teacher + (1 - beta) * student, a beta between 0 and 1 gives the generalised
    Jensen-Shannon divergence beta * KL(teacher ‖ m) + (1 - beta) * KL(student ‖ m).

    Args:
        logits: the student's, `[..., C]`, floating dtype, any strides; may be -inf.
        teacher_logits: the teacher's, `[..., C]`, any floating dtype. They get no gradient.
        beta: 0 for the forward KL(teacher ‖ student), 1 for the reverse KL(student ‖ teacher), or a
            number between them.
        temperature: positive; what both logits are divided by.
        softcap: replace both logits by `softcap * tanh(logits / softcap)` first.
        mask: `[...]`, bool or numbers; rows where it is 0 have loss and gradient zero, and the mean
            does not count them.
        reduction: `none` (the shape `[...]`), `mean` over the rows of the mask, or `sum`.

    Returns:
        The divergence in nats, a number or `[...]`, fp32 (fp64 for fp64), differentiable in
        `logits`. A mean over no rows is NaN.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected.

    Source: Agarwal et al., On-policy distillation of language models, 2024, whose beta this is.

    Example:
        >>> import torch, partita
        >>> logits = torch.zeros(1, 2, requires_grad=True)
        >>> loss = partita.divergence(logits, torch.tensor([[1.0986, 0.0]]))
        >>> loss.backward()
        >>> loss, logits.grad
        (tensor(0.1308, grad_fn=<...>), tensor([[-0.2500,  0.2500]]))
    """
    check_logits(logits)
    if isinstance(teacher_logits, TopK):
        raise TypeError(
            "teacher_logits: expected a Tensor, got a TopK, which topk_divergence takes"
        )
    checks.floating("teacher_logits", teacher_logits)
    checks.device("teacher_logits", teacher_logits, logits, "logits")
    _check_same_shape(teacher_logits, logits, "; cut the longer rows to the classes that both have")
    check_options(beta, mask, reduction, logits, "logits")
    numbers = float(beta), *checks.temperature_and_softcap(temperature, softcap)
    logits = in_common_precision(logits, teacher_logits)
    return reduced_divergence(logits, teacher_logits, mask, *numbers, reduction)


def distillation_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor | None = None,
    *,
    weights: Mapping[str, float | Tensor],
    beta: float = 0.5,
    temperature: float = 1.0,
    scale_by_temperature_squared: bool = False,
    softcap: float | None = None,
    teacher_classes: Tensor | None = None,
    ignore_index: int = -100,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Distillation:
    """Weighted sum of a cross-entropy and of divergences from a teacher, for distillation.

    The terms are `hard`, the cross-entropy with the labels at temperature 1, and at `temperature`
    `kl` = KL(teacher ‖ student), `reverse_kl` = KL(student ‖ teacher), `jsd` = beta * KL(teacher ‖
    m) + (1 - beta) * KL(student ‖ m) with m = beta * teacher + (1 - beta) * student, and `tv` =
    the sum of |student - teacher| over two. All that are named share their reads of the logits.

    Args:
        logits: the student's, `[..., C]`, floating dtype, any strides; may be -inf.
        teacher_logits: the teacher's, `[..., C]`, or `[..., D]` with `teacher_classes`; any
            floating dtype. They get no gradient.
        target: integer labels `[...]`, which the term `hard` needs.
        weights: the weight of each term that is wanted, by name: a number of at least 0, or a
            tensor `[...]` with one for each row, which gets no gradient. There is no default: a
            weight of 0.5 halves a soft objective that stands alone.
        beta: the teacher's weight in the mixture of `jsd`, between 0 and 1.
        temperature: positive; what both logits are divided by in all terms but `hard`.
        scale_by_temperature_squared: multiply these terms by the square of the temperature.
        softcap: replace both logits by `softcap * tanh(logits / softcap)` first.
        teacher_classes: the teacher's class of each class of the student, `[C]`, if the student has
            a part of the vocabulary. The teacher's probabilities of these classes are normalised.
        ignore_index: the label of rows that do not count.
        mask: `[...]`, bool or numbers; rows where it is 0 have no terms but `hard`. By default
            these are the rows whose label is ignored, if there are labels.
        reduction: `none` (the shape `[...]`), `mean`, of each term over the rows that have it, or
            `sum`.

    Returns:
        `Distillation(loss, hard, kl, reverse_kl, jsd, tv, teacher_mass, teacher_argmax)`: the loss
        and the terms in nats, fp32 (fp64 for fp64). A mean over no rows is NaN.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device, name or number, named with what was
            expected.
        IndexError: a label or a teacher's class that is none; on a GPU only with
            `PARTITA_CHECK=1`, otherwise the row's result is NaN, or for a teacher's class all are.

    Source: Hinton et al., Distilling the knowledge in a neural network, 2015 (`hard`, `kl`); as
        `divergence` (`reverse_kl`, `jsd`); Zhou et al., DistillSpec, 2024 (`tv`).

    Example:
        >>> import torch, partita
        >>> logits = torch.zeros(1, 2, requires_grad=True)
        >>> teacher, target = torch.tensor([[1.0986, 0.0]]), torch.tensor([0])
        >>> weights = {"hard": 0.5, "kl": 0.5}
        >>> found = partita.distillation_loss(logits, teacher, target, weights=weights)
        >>> found.loss.backward()
        >>> found.hard, found.kl, logits.grad
        (tensor(0.6931), tensor(0.1308), tensor([[-0.3750,  0.3750]]))
    """
    check_logits(logits)
    checks.floating("teacher_logits", teacher_logits)
    checks.device("teacher_logits", teacher_logits, logits, "logits")
    mapped = None
    if teacher_classes is not None:
        sizes = logits.shape[-1], teacher_logits.shape[-1]
        shape = (*logits.shape[:-1], sizes[1])
        checks.shape("teacher_logits", teacher_logits, shape, "logits.shape[:-1] and its classes")
        mapped = mapped_classes(teacher_classes, logits, "logits", *sizes)
    else:
        advice = "; teacher_classes says which classes the student has"
        _check_same_shape(teacher_logits, logits, advice)
    numbers = (ignore_index, beta, temperature, scale_by_temperature_squared, softcap)
    of_rows = (logits, "logits", target, mask, reduction)
    objective, options = checked_objective(weights, *of_rows, *numbers)
    logits, of_all = in_common_precision(logits, teacher_logits), None
    teacher_logits = teacher_logits.detach()
    if mapped is not None:
        of_all = token_stats(teacher_logits, temperature=temperature, softcap=softcap)
        ids, penalty = mapped
        teacher_logits = teacher_logits.index_select(-1, ids) + penalty.to(teacher_logits.dtype)
    rows = terms_of_rows(logits, teacher_logits, target, options)
    return objective.result(objective.loss(rows.terms), rows, of_all, options.temperature)


def _check_same_shape(teacher_logits: Tensor, logits: Tensor, advice: str) -> None:
    """Raise unless the shapes are the same, with the advice if the rows are."""
    if not same_sizes(teacher_logits.shape, logits.shape):
        advice = advice if teacher_logits.shape[:-1] == logits.shape[:-1] else ""
        raise ValueError(
            f"teacher_logits: expected the shape of logits = {list(logits.shape)},"
            f" got {list(teacher_logits.shape)}{advice}"
        )


def topk_divergence(
    logits: Tensor,
    teacher: TopK,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Divergence of a student from a teacher whose k most probable classes are known.

    All other classes count as one. The result is at most the divergence over all classes. The
    student's other classes are summed by themselves; what the teacher leaves to its own is the
    difference between 1 and a sum, which loses its digits below about 1e-6.

    Args:
        logits: the student's, `[..., C]`, floating dtype, any strides; may be -inf.
        teacher: a `TopK`, of which the log-probabilities `[..., k]` and the classes `[..., k]` are
            used. The classes of a row differ from each other. They get no gradient.
        beta: as in `divergence`.
        temperature, softcap: what the student's logits are divided by, and their bound. The
            teacher's log-probabilities are taken as they are.
        mask, reduction: as in `divergence`.

    Returns:
        The divergence in nats, a number or `[...]`, fp32 (fp64 for fp64), differentiable in
        `logits`. A mean over no rows is NaN.

    Raises:
        TypeError, ValueError: a wrong dtype, shape, device or number, named with what was expected.
        IndexError: an id that is no class; on a GPU only with `PARTITA_CHECK=1`, otherwise the
            result of its row is NaN.

    Source: as `divergence`, over k + 1 classes.

    Example:
        >>> import torch, partita
        >>> teacher = partita.topk_logprobs(torch.tensor([[3.0, 1.0, 0.0, 0.0]]), 2)
        >>> partita.topk_divergence(torch.zeros(1, 4), teacher)
        tensor(0.7142)
    """
    check_logits(logits)
    numbers = checks.temperature_and_softcap(temperature, softcap)
    classes = logits.shape[-1]
    check_teacher(teacher, logits, "logits", classes, beta, mask, reduction)
    needs_rest = teacher.indices.shape[-1] < classes
    logp = logprobs_of(logits, ids_of_rows(teacher, mask), *numbers, IGNORED, needs_rest)
    return divergence_of_classes(logp, teacher, float(beta), mask, reduction)
