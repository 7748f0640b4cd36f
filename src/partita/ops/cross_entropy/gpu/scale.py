"""The scaling of a gradient by the gradient that arrives from above."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, tl_acc_dtype
from .plan import FUSED_ROWS

BLOCK = 4096  # elements that a program handles at a time
MAX_PROGRAMS = 1024


@triton.jit
def cross_entropy_scale_kernel(
    grad_ptr,  # [rows, width]
    factor_ptr,  # []
    rows,
    width,  # the elements of a row
    ACC_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply a gradient by a factor that only the device knows.

    A factor of 1 reads and writes none of the gradient.
    """
    factor = tl.load(factor_ptr).to(ACC_DTYPE)
    if factor != 1.0:
        elements = tl.full([], rows, tl.int64) * width
        start = tl.program_id(0).to(tl.int64) * BLOCK
        for first in range(start, elements, tl.num_programs(0) * BLOCK):
            index = first + tl.arange(0, BLOCK)
            mask = index < elements
            grad = tl.load(grad_ptr + index, mask=mask).to(ACC_DTYPE)
            tl.store(grad_ptr + index, (grad * factor).to(grad_ptr.dtype.element_ty), mask=mask)


def scale_(grad: Tensor, factor: Tensor) -> None:
    """Multiply a gradient in place by a scalar tensor."""
    if not _fills_its_memory(grad):
        grad.mul_(factor.to(acc_dtype(grad.dtype)))
        return
    rows = grad.shape[0] if grad.ndim else 1
    width = grad.numel() // max(rows, 1)
    # A program for each row lets the number of programs grow evenly with the rows.
    has_row_programs = rows <= FUSED_ROWS and 0 < width <= BLOCK
    launch(
        cross_entropy_scale_kernel,
        rows if has_row_programs else min(cdiv(rows * width, BLOCK), MAX_PROGRAMS),
        grad_ptr=grad,
        factor_ptr=factor,
        rows=rows,
        width=width,
        ACC_DTYPE=tl_acc_dtype(grad.dtype),
        BLOCK=BLOCK,
        num_warps=8,
    )


def _fills_its_memory(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are one gapless piece of memory, in any order."""
    if tensor.is_contiguous():
        return True
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() == 1 + sum((size - 1) * stride for size, stride in steps)
