"""CTC-CRF on a GPU: the gradient of all paths, minus the target's marginals, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch
from ...chain.gpu.launch import chain_gradient
from ...ctc.gpu.launch import label_index
from ..common import marginal_scale, zero_ends
from .subtract import crf_subtract_kernel

STEPS_PER_PROGRAM = 4


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
    ends, dtype = zero_ends(scores), acc_dtype(scores.dtype)
    T, N, C, A = scores.shape
    result = chain_gradient(grad, scores, ends, ends, source, lengths, logz, saved, dtype)[0]
    edge_index, marginals = edge_index.flatten(1).contiguous(), marginals.contiguous()
    E, device = edge_index.shape[1], scores.device
    if T * N * E:
        # Each score finds the edges that read it as a class finds its labels in a target of CTC.
        offsets, counts = torch.arange(N, device=device) * E, torch.full((N,), E, device=device)
        edges_of_score = label_index(edge_index, offsets, counts, E, C * A, -1)
        launch(
            crf_subtract_kernel,
            N * cdiv(T, STEPS_PER_PROGRAM),
            marginal_scale(grad, dtype),
            marginals,
            *edges_of_score,
            result,
            *(T, N, E, C * A),
            ROWS=STEPS_PER_PROGRAM,
            BLOCK=1024,
            num_warps=8,
        )
    return result.to(scores.dtype)
