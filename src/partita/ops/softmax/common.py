"""The results of log-sum-exp that the reference and the kernels share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LogSumExp(NamedTuple):
    """Log-sum-exp, and the statistics that its gradient reads.

    Fields:
        logsumexp: the result, `[...]`.
        maximum: the maximum of each row, `[...]`, at least fp32.
        sumexp: the sum of exp(input - maximum) of each row, `[...]`, at least fp32.
    """

    logsumexp: Tensor
    maximum: Tensor
    sumexp: Tensor
