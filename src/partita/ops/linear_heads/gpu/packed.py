"""The loss and its gradients from the rows whose labels are not ignored.

These rows are gathered, one chunk at a time. Their number is only known on the device, where
kernels and PyTorch's grouped product read it. So ignored rows take little time, and the host waits
for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.row_plan import matrix_rows
from ....primitives.rows import chunks
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2
from ...cross_entropy.gpu.reduction import load_labels
from ..chunked import empty_gradients
from ..common import Head, HeadGradients, Wanted
from ..products import multiply
from .launch import KERNELS

PACK_BLOCK = tl.constexpr(1024)  # labels that the packing kernel reads at a time
COPY_BLOCK = 2048  # elements of a row that a program copies at a time


class PackedRows(NamedTuple):
    """The rows whose labels are not ignored, in their order.

    Fields:
        index: the row at each packed position, and -1 past the last one, `[M]` int32.
        target: the labels in this order, and the ignored label past the last one, `[M]` int64.
        limits: the packed rows of each chunk of positions, `[chunks]` int32, and 1 where there are
            none, because products take no empty groups. That row is 0, and its label is ignored.
    """

    index: Tensor
    target: Tensor
    limits: Tensor


@triton.jit(do_not_specialize=["rows", "chunk", "chunks", "ignore_index"])
def linear_pack_kernel(
    target_ptr,  # [rows] labels
    packed,  # PackedRows
    rows,
    chunk,
    chunks,
    ignore_index: tl.int64,
):
    """Find the packed position of each row whose label is not ignored, in one program.

    The positions are prefix sums, so they follow the order of the rows.
    """
    lane = tl.arange(0, PACK_BLOCK)
    total = tl.full([], 0, tl.int32)
    for first in range(0, rows, PACK_BLOCK):
        row = first + lane
        label = load_labels(target_ptr, row.to(tl.int64), row < rows, ignore_index)
        valid = (label != ignore_index).to(tl.int32)
        position = total + tl.cumsum(valid, 0) - 1
        tl.store(packed.index + position, row, mask=valid != 0)
        tl.store(packed.target + position, label, mask=valid != 0)
        total += tl.sum(valid, axis=0)
    for first in range(total // PACK_BLOCK * PACK_BLOCK, rows, PACK_BLOCK):
        row = first + lane
        mask = (row >= total) & (row < rows)
        tl.store(packed.index + row, tl.full([PACK_BLOCK], -1, tl.int32), mask=mask)
        tl.store(packed.target + row, tl.full([PACK_BLOCK], ignore_index, tl.int64), mask=mask)
    for first in range(0, chunks, PACK_BLOCK):
        i = first + lane
        limit = tl.minimum(tl.maximum(total - i * chunk, 1), chunk)
        tl.store(packed.limits + i, limit, mask=i < chunks)


@triton.jit(do_not_specialize=["width"])
def linear_copy_kernel(
    source,  # StridedRows of one batch, [M, width] or [positions, width]
    source_index_ptr,  # [positions], or None for the rows in order
    result,  # StridedRows of one batch, [positions, width] or [M, width]
    result_index_ptr,  # [positions], or None for the rows in order
    width,
    BLOCK: tl.constexpr,
):
    """Copy a row from its index to its index.

    Of a source with index -1 the result is 0, and to a result with index -1 nothing is copied.
    """
    blocks = tl.cdiv(width, BLOCK)
    position = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    row, to = position, position
    if source_index_ptr is not None:
        row = tl.load(source_index_ptr + position).to(tl.int64)
    if result_index_ptr is not None:
        to = tl.load(result_index_ptr + position).to(tl.int64)
    pointers = source.ptr + row * source.row + column * source.column
    values = tl.load(pointers, mask=(row >= 0) & (column < width), other=0.0)
    values = values.to(result.ptr.dtype.element_ty)
    tl.store(result.ptr + to * result.row + column, values, mask=(to >= 0) & (column < width))


def pack_rows(target: Tensor, ignore_index: int, chunk: int) -> PackedRows:
    """Return the rows whose labels are not ignored; chunks have `chunk` positions."""
    rows, chunks = len(target), cdiv(len(target), chunk)
    packed = PackedRows(
        index=target.new_empty(rows, dtype=torch.int32),
        target=target.new_empty(rows, dtype=torch.int64),
        limits=target.new_empty(chunks, dtype=torch.int32),
    )
    launch(
        linear_pack_kernel,
        1,
        target_ptr=target.contiguous(),
        packed=packed,
        rows=rows,
        chunk=chunk,
        chunks=chunks,
        ignore_index=ignore_index,
        num_warps=8,
    )
    return packed


def copy_rows(
    source: Tensor, source_index: Tensor | None, result: Tensor, result_index: Tensor | None
) -> None:
    """Copy rows of the source to rows of the result, whose columns are adjacent."""
    positions, width = min(len(source), len(result)), source.shape[1]
    block = min(next_power_of_2(max(width, 1)), COPY_BLOCK)
    launch(
        linear_copy_kernel,
        positions * cdiv(width, block),
        source=matrix_rows(source),
        source_index_ptr=source_index,
        result=matrix_rows(result),
        result_index_ptr=result_index,
        width=width,
        BLOCK=block,
        num_warps=4,
    )


def packed_gradients(
    head: Head,
    wanted: Wanted,
    target: Tensor,
    ignore_index: int,
    write_gradient: Callable[[Tensor, Tensor, Tensor], None],
    chunk: int,
) -> HeadGradients:
    """Compute the gradients of a head without a bias, `chunk` packed rows at a time.

    `write_gradient` takes the labels of a chunk and overwrites its logits with their gradient, and
    `packing.packs_rows` says which heads are served. A gradient of the matrix that comes from
    several chunks is added up in fp32 by a product of whole chunks, whose ignored rows are 0.
    """
    input, weight, bias, *_ = head
    assert bias is None and len(input) > 0
    (M, H), (input_grad, weight_grad, _) = input.shape, wanted
    one_chunk = chunk >= M
    packed = pack_rows(target, ignore_index, min(chunk, M))
    result = empty_gradients(input, weight, None, input_grad, False, False)
    if input_grad:
        result.input.zero_()  # the gradient of ignored rows
    dweight = result.weight
    if weight_grad and not one_chunk:
        dweight = torch.empty(weight.shape, dtype=acc_dtype(input.dtype), device=weight.device)
    for i, part in enumerate(chunks(M, chunk)):
        index, limit = packed.index[part], packed.limits[i : i + 1]
        hidden = input.new_empty(len(index), H)
        copy_rows(input, index, hidden, None)
        # Logits past the limit are not written. Their labels are ignored, so their gradient is 0.
        logits = F.grouped_mm(hidden, weight.T[None], offs=limit)
        write_gradient(packed.target[part], logits, logits)
        if weight_grad and one_chunk:
            dweight = F.grouped_mm(logits.T, hidden, offs=limit)[0]
        elif weight_grad:
            multiply(logits.T, hidden, dweight, adds=i > 0)
        del hidden  # its memory is that of its gradient
        if input_grad:
            copy_rows(F.grouped_mm(logits, weight[None], offs=limit), None, result.input, index)
        del logits
    return result._replace(weight=dweight.to(weight.dtype))


linear_packed_one_pass = KERNELS._replace(packed_gradients=packed_gradients).linear_one_pass
