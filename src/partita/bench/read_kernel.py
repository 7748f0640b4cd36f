"""A kernel that only reads: the ceiling of ops that write little."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..runtime.launch import cdiv

BLOCK = 8192


@triton.jit
def read_kernel(
    input_ptr,  # [size] int32
    output_ptr,  # [cdiv(size, BLOCK)] int32
    size,
    BLOCK: tl.constexpr,
):
    """Store one number for each block, so that the compiler cannot remove a load."""
    block = tl.program_id(0)
    offset = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    x = tl.load(input_ptr + offset, mask=offset < size, other=0)
    tl.store(output_ptr + block, tl.max(x, axis=0))


def read(input: Tensor) -> Tensor:
    """Return the greatest 32-bit word of each block of a contiguous tensor."""
    words = input.view(torch.int32).flatten()
    blocks = cdiv(words.numel(), BLOCK)
    output = words.new_empty(blocks)
    with torch.cuda.device_of(words):
        read_kernel[(blocks,)](words, output, words.numel(), BLOCK=BLOCK, num_warps=8)
    return output
