"""The divergence of a student's distribution from a teacher's, for distillation."""

from __future__ import annotations

from torch import Tensor

from ...runtime import checks
from ...runtime.sizes import same_sizes
from ..cross_entropy.common import check_logits
from ..logprobs.autograd import logprobs_of
from ..logprobs.common import TopK
from .autograd import divergence_of_classes, reduced_divergence
from .common import IGNORED, check_options, check_teacher, ids_of_rows, in_common_precision


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
    if not same_sizes(teacher_logits.shape, logits.shape):
        same_rows = teacher_logits.shape[:-1] == logits.shape[:-1]
        advice = "; cut the longer rows to the classes that both have" if same_rows else ""
        raise ValueError(
            f"teacher_logits: expected the shape of logits = {list(logits.shape)},"
            f" got {list(teacher_logits.shape)}{advice}"
        )
    check_options(beta, mask, reduction, logits, "logits")
    numbers = float(beta), *checks.temperature_and_softcap(temperature, softcap)
    logits = in_common_precision(logits, teacher_logits)
    return reduced_divergence(logits, teacher_logits, mask, *numbers, reduction)


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
