"""CTC-CRF on a GPU: the gradient of all paths, from which that of those that spell the target is taken in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch
from ...chain.gpu.launch import chain_gradient
from ...ctc.gpu.launch import label_index
from .. import reference


@triton.jit(do_not_specialize=["steps", "count", "held", "width"])
def crf_subtract_kernel(
    grad_ptr,  # [count]
    marginals_ptr,  # [steps, count, held]
    slots_ptr,  # [count, width] int32
    again_ptr,  # [count] int32
    next_ptr,  # [count, held] int32
    d_scores_ptr,  # [steps, count, width]
    steps,
    count,
    held,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each score of some steps loses the marginals of all places of the lattice that read it, in their order."""
    n = (tl.program_id(0) % count).to(tl.int64)
    t = (tl.program_id(0) // count).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, grad, counts, again = (
        t * count + n,
        tl.load(grad_ptr + n),
        (t < steps)[:, None],
        tl.load(again_ptr + n),
    )
    for first in range(0, width, BLOCK):
        v = first + tl.arange(0, BLOCK)
        at = tl.load(slots_ptr + n * width + v, mask=v < width, other=-1)
        held_here, total = (
            (at >= 0)[None, :],
            tl.zeros([ROWS, BLOCK], marginals_ptr.dtype.element_ty),
        )
        score_ptr = d_scores_ptr + (row * width)[:, None] + v[None, :]
        before = tl.load(score_ptr, mask=counts & held_here, other=0.0)
        for _ in range(again + 1):
            total += tl.load(
                marginals_ptr + (row * held)[:, None] + at[None, :],
                mask=counts & (at >= 0)[None, :],
                other=0.0,
            )
            at = tl.load(next_ptr + n * held + at, mask=at >= 0, other=-1)
        tl.store(score_ptr, before - total * grad, mask=counts & held_here)


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
    free, dtype, (steps, count, states, slots) = (
        reference.free(scores),
        acc_dtype(scores.dtype),
        scores.shape,
    )
    result = chain_gradient(grad, scores, free, free, source, lengths, logz, kept, dtype)[0]
    places, marginals = places.flatten(1).contiguous(), marginals.contiguous()
    held, device = places.shape[1], scores.device
    if steps * count * held:
        width, every = states * slots, torch.full((count,), held, device=device)
        found = label_index(
            places, torch.arange(count, device=device) * held, every, held, width, -1
        )
        factor = (grad * 2.0 ** -reference.FIXED[dtype][1]).to(dtype)
        sizes = (steps, count, held, width)
        launch(
            crf_subtract_kernel,
            count * cdiv(steps, 4),
            factor,
            marginals,
            *found,
            result,
            *sizes,
            ROWS=4,
            BLOCK=1024,
            num_warps=8,
        )
    return result.to(scores.dtype)
