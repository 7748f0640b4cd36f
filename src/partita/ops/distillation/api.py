"""The loss of a student that learns from labels and from a teacher at once."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...runtime import checks
from ...runtime.sizes import same_sizes
from ..cross_entropy.common import check_logits
from .autograd import loss_of_logits
from .common import Distillation, check_mapped_classes, checked_objective, term_options


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

    Source: Hinton et al., Distilling the knowledge in a neural network, 2015 (`hard` and `kl`);
        Agarwal et al., On-policy distillation of language models, 2024 (`reverse_kl`, `jsd`); Zhou
        et al., DistillSpec, 2024 (`tv`, which is 1 minus the acceptance rate of speculation).

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
    if teacher_classes is not None:
        shape = (*logits.shape[:-1], *teacher_logits.shape[-1:])
        checks.shape("teacher_logits", teacher_logits, shape, "logits.shape[:-1] and its classes")
        check_mapped_classes(
            teacher_classes, logits, "logits", logits.shape[-1], teacher_logits.shape[-1]
        )
    elif not same_sizes(teacher_logits.shape, logits.shape):
        same_rows = teacher_logits.shape[:-1] == logits.shape[:-1]
        advice = "; teacher_classes says which classes the student has" if same_rows else ""
        raise ValueError(
            f"teacher_logits: expected the shape of logits = {list(logits.shape)},"
            f" got {list(teacher_logits.shape)}{advice}"
        )
    objective = checked_objective(
        weights,
        logits,
        "logits",
        target,
        mask,
        ignore_index,
        reduction,
        temperature,
        scale_by_temperature_squared,
    )
    options = term_options(objective, beta, temperature, softcap, ignore_index)
    return loss_of_logits(logits, teacher_logits, target, teacher_classes, objective, options)
