"""The results of log-sum-exp that the reference and the kernels share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LogSumExp(NamedTuple):
    """Log-sum-exp, and the statistics that its gradient reads."""

    logsumexp: Tensor  # the result, [...]
    maximum: Tensor  # the maximum of each row, [...], at least fp32
    sumexp: Tensor  # the sum of exp(input - maximum) of each row, [...], at least fp32
