"""CTC-CRF on a GPU: the gradient of all paths, from which that of those that spell the target is taken in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference import crf as reference
from ..reference.softmax import accumulator
from .chain import chain_gradient
from .ctc_gradient import summed_of_class
from .ctc_rows import ctc_next_kernel
from .launch import launch


@triton.jit(do_not_specialize=["steps", "count", "held", "width"])
def crf_subtract_kernel(
    grad_ptr,  # [count]
    marginals_ptr,  # [steps, count, held]
    places_ptr,  # [count, held] int64
    next_ptr,  # [count, held] int32
    d_scores_ptr,  # [steps, count, width]
    steps,
    count,
    held,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scores that several steps of a lattice read lose all their marginals at once, each in the order of the lattice."""
    n = (tl.program_id(0) % count).to(tl.int64)
    t = (tl.program_id(0) // count).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, counts, grad = t * count + n, t < steps, tl.load(grad_ptr + n)
    for first in range(0, held, BLOCK):
        j = first + tl.arange(0, BLOCK)
        total, leads = summed_of_class(marginals_ptr + row * held, 32, next_ptr + n * held, j, held, counts)
        place = tl.load(places_ptr + n * held + j, mask=leads, other=0)
        score_ptr = d_scores_ptr + (row * width)[:, None] + place[None, :]
        before = tl.load(score_ptr, mask=counts[:, None] & leads[None, :], other=0.0)
        tl.store(score_ptr, before - total * grad, mask=counts[:, None] & leads[None, :])


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
        launch(ctc_next_kernel, count * triton.cdiv(held, 64), *labels, BLOCK=64, num_warps=4)
        block = min(max(32, triton.next_power_of_2(held)), 1024)
        factor = (grad * 2.0 ** -reference.FIXED[dtype][1]).to(dtype)
        sizes, rows = (steps, count, held, states * slots), 1024 // block
        launch(crf_subtract_kernel, count * triton.cdiv(steps, rows), factor, marginals, places, behind, result, *sizes, ROWS=rows, BLOCK=block, num_warps=4)
    return result.to(scores.dtype)
