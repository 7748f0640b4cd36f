"""CTC-CRF on the CPU: chains in Numba, and their difference in ATen."""

from __future__ import annotations

from torch import Tensor

from ...runtime.dtypes import acc_dtype
from ..chain.cpu.logz import chain_gradient
from . import reference


def crf_gradient(
    grad: Tensor,
    scores: Tensor,
    source: Tensor,
    lengths: Tensor,
    logz: Tensor,
    kept: Tensor,
    marginals: Tensor,
    places: Tensor,
) -> Tensor:
    free, dtype = reference.free(scores), acc_dtype(scores.dtype)
    result = chain_gradient(grad, scores, free, free, source, lengths, logz, kept, dtype)[0]
    reference.subtract(
        result, marginals, places, (grad * 2.0 ** -reference.FIXED[dtype][1]).to(dtype)
    )
    return result.to(scores.dtype)
