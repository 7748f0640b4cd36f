"""The loss and its gradients from the rows whose labels are not ignored.

These rows are gathered, one chunk at a time. Their number is only known on the device, where
PyTorch's grouped product reads it. So ignored rows take little time, and the host waits for
nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ....primitives.rows import chunks
from ....runtime.dtypes import acc_dtype
from ..chunked import gradients_like
from ..common import Head, HeadGradients, Wanted
from ..products import multiply
from .launch import KERNELS


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
    (M, _), (input_grad, weight_grad, *_) = input.shape, wanted
    one_chunk = chunk >= M
    # The rows whose labels are not ignored come first, in their order.
    is_ignored, order = (target == ignore_index).byte().sort(stable=True)
    is_ignored = is_ignored.bool()[:, None]
    firsts = torch.arange(0, M, min(chunk, M), device=target.device)
    # Products take no empty group. A chunk without packed rows has one row, whose label is ignored.
    limits = ((~is_ignored).sum() - firsts).clamp(1, min(chunk, M)).int()
    result = gradients_like(Head(input, weight, None), Wanted(input_grad, False, False))
    dweight = result.weight
    if weight_grad and not one_chunk:
        dweight = torch.empty(weight.shape, dtype=acc_dtype(input.dtype), device=weight.device)
    for i, part in enumerate(chunks(M, chunk)):
        rows, zeros, limit = order[part], is_ignored[part], limits[i : i + 1]
        hidden = input.index_select(0, rows).masked_fill_(zeros, 0.0)
        # Logits past the limit are not written. Their labels are ignored, so their gradient is 0.
        logits = F.grouped_mm(hidden, weight.T[None], offs=limit)
        write_gradient(target[rows], logits, logits)
        if weight_grad and one_chunk:
            dweight = F.grouped_mm(logits.T, hidden, offs=limit)[0]
        elif weight_grad:
            multiply(logits.T, hidden, dweight, adds=i > 0)
        del hidden  # its memory is that of its gradient
        if input_grad:
            dinput = F.grouped_mm(logits, weight[None], offs=limit).masked_fill_(zeros, 0.0)
            result.input.index_copy_(0, rows, dinput)
            del dinput
        del logits
    return result._replace(weight=dweight.to(weight.dtype))


linear_packed_one_pass = KERNELS._replace(packed_gradients=packed_gradients).linear_one_pass
