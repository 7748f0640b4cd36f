"""The loss and its gradients from the rows whose labels are not ignored.

These rows are gathered, one chunk at a time, and PyTorch's grouped product reads their number on
the GPU. So ignored rows take little time, and the host waits for nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from ....primitives.rows import chunks
from ....runtime.dtypes import acc_dtype
from ..chunked import Wanted, add_product, empty_gradients, linear_one_pass
from ..common import Head, HeadGradients
from .launch import CHUNK_KERNELS
from .pack import gather_rows, pack_rows, scatter_rows


def packed_gradients(
    head: Head,
    wanted: Wanted,
    target: Tensor,
    ignore_index: int,
    write_gradient: Callable[[Tensor, Tensor], None],
    chunk: int,
) -> HeadGradients:
    """Compute the gradients of a head without a bias, `chunk` packed rows at a time.

    The arguments are those of `chunked.gradients_of_loss`; `packing.packs_rows` says which heads
    are served. A gradient of the matrix that comes from several chunks is added up in fp32 by a
    product of whole chunks, whose ignored rows are 0.
    """
    input, weight, bias = head
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
        gather_rows(input, index, hidden)
        # Logits past the limit are not written. Their labels are ignored, so their gradient is 0.
        logits = grouped_mm(hidden, weight.T[None], offs=limit)
        write_gradient(logits, packed.target[part])
        if weight_grad and one_chunk:
            dweight = grouped_mm(logits.T, hidden, offs=limit)[0]
        elif weight_grad:
            add_product(dweight, logits.T, hidden, is_first=i == 0)
        del hidden  # its memory is that of its gradient
        if input_grad:
            scatter_rows(grouped_mm(logits, weight[None], offs=limit), index, result.input)
        del logits
    return result._replace(weight=dweight.to(weight.dtype))


linear_packed_one_pass = functools.partial(linear_one_pass, CHUNK_KERNELS, packed_gradients)
