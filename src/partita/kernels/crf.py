"""CTC-CRF on a GPU: the gradient of all paths, from which that of those that spell the target is taken in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import crf as reference
from ..reference.softmax import accumulator
from .chain import chain_gradient
from .ctc_rows import ctc_next_kernel
from .launch import cdiv, launch


@triton.jit(do_not_specialize=["held", "width"])
def crf_slot_kernel(
    places_ptr,  # [count, held] int64
    next_ptr,  # [count, held] int32
    slots_ptr,  # [count, width] int32
    held,
    width,
    BLOCK: tl.constexpr,
):
    """Where in its lattice each score of a step is first read; scores that no lattice reads keep what they had."""
    blocks = tl.cdiv(held, BLOCK)
    n, j = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    leads = (tl.load(next_ptr + n * held + j, mask=j < held, other=-2) & 1) == 1
    place = tl.load(places_ptr + n * held + j, mask=leads, other=-1)
    tl.store(slots_ptr + n * width + place, j, mask=place >= 0)


@triton.jit(do_not_specialize=["steps", "count", "held", "width"])
def crf_subtract_kernel(
    grad_ptr,  # [count]
    marginals_ptr,  # [steps, count, held]
    slots_ptr,  # [count, width] int32
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
    row, grad, counts = t * count + n, tl.load(grad_ptr + n), (t < steps)[:, None]
    for first in range(0, width, BLOCK):
        v = first + tl.arange(0, BLOCK)
        at = tl.load(slots_ptr + n * width + v, mask=v < width, other=-1)
        held_here, total = (at >= 0)[None, :], tl.zeros([ROWS, BLOCK], marginals_ptr.dtype.element_ty)
        score_ptr = d_scores_ptr + (row * width)[:, None] + v[None, :]
        before = tl.load(score_ptr, mask=counts & held_here, other=0.0)
        while tl.max(at, axis=0) >= 0:
            total += tl.load(marginals_ptr + (row * held)[:, None] + at[None, :], mask=counts & (at >= 0)[None, :], other=0.0)
            at = tl.load(next_ptr + n * held + at, mask=at >= 0, other=-2) >> 1
        tl.store(score_ptr, before - total * grad, mask=counts & held_here)


def crf_gradient(
    grad: Tensor, scores: Tensor, source: Tensor, lengths: Tensor, logz: Tensor, kept: Tensor, marginals: Tensor, places: Tensor
) -> Tensor:
    free, dtype, (steps, count, states, slots) = reference.free(scores), accumulator(scores.dtype), scores.shape
    result = chain_gradient(grad, scores, free, free, source, lengths, logz, kept, dtype)[0]
    places, marginals = places.flatten(1).contiguous(), marginals.contiguous()
    held, device = places.shape[1], scores.device
    if steps * count * held:
        behind = torch.empty((count, held), dtype=torch.int32, device=device)
        every = torch.full((count,), held, device=device)
        labels = (places, torch.arange(count, device=device) * held, every, behind, places.numel(), held)
        launch(ctc_next_kernel, count * cdiv(held, 64), *labels, BLOCK=64, num_warps=4)
        width = states * slots
        found = torch.full((count, width), -1, dtype=torch.int32, device=device)
        launch(crf_slot_kernel, count * cdiv(held, 256), places, behind, found, held, width, BLOCK=256, num_warps=4)
        factor = (grad * 2.0 ** -reference.FIXED[dtype][1]).to(dtype)
        sizes = (steps, count, held, width)
        launch(crf_subtract_kernel, count * cdiv(steps, 4), factor, marginals, found, behind, result, *sizes, ROWS=4, BLOCK=1024, num_warps=8)
    return result.to(scores.dtype)
