"""Results that the reference and the kernels of divergences share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


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
