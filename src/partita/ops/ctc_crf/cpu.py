"""CTC-CRF on the CPU: the chain in Numba, and the subtraction of the target's marginals in ATen."""

from __future__ import annotations

from torch import Tensor

from ...runtime.dtypes import acc_dtype
from ..chain.cpu.logz import chain_gradient
from .common import marginal_scale, subtract_marginals, zero_ends


def crf_gradient(
    grad: Tensor,
    scores: Tensor,
    source: Tensor,
    lengths: Tensor,
    logz: Tensor,
    saved: Tensor,
    marginals: Tensor,
    edge_index: Tensor,
) -> Tensor:
    """Return the marginals of all paths minus those of the target's paths, times `grad`."""
    dtype, ends = acc_dtype(scores.dtype), zero_ends(scores)
    result = chain_gradient(grad, scores, ends, ends, source, lengths, logz, saved, dtype)[0]
    subtract_marginals(result, marginals, edge_index, marginal_scale(grad, dtype))
    return result.to(scores.dtype)
