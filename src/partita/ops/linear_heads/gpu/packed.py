"""The loss and its gradients from the rows whose labels are not ignored.

These rows are gathered, one chunk at a time, and PyTorch's grouped product reads their number on
the GPU. So ignored rows take little time, and the host waits for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from ....primitives.rows import chunks
from ....runtime.dtypes import acc_dtype
from ...cross_entropy.gpu.launch import one_pass_of_chunk
from ..chunked import add_product, empty_gradients
from .launch import mean_shares
from .pack import gather_rows, pack_rows, scatter_rows


def linear_packed_one_pass(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    denominator: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    softcap: float,
    z_loss: float,
    mean: bool,
    chunk: int,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    """Compute the sum or mean of the loss and its `HeadGradients`, `chunk` packed rows at a time.

    The arguments are those of `chunked.linear_one_pass`, without a bias; `packing.packs_rows` says
    which inputs are served. A gradient of the matrix that comes from several chunks is added up in
    fp32 by a product of whole chunks, whose ignored rows are 0.
    """
    assert bias is None and len(input) > 0
    M, C, accumulator = len(input), len(weight), acc_dtype(input.dtype)
    one_chunk = chunk >= M
    packed = pack_rows(target, ignore_index, min(chunk, M))
    result = empty_gradients(input, weight, None, input_grad, False, False)
    if input_grad:
        result.input.zero_()  # the gradient of ignored rows
    dweight, loss = result.weight, None
    if weight_grad and not one_chunk:
        dweight = torch.empty(weight.shape, dtype=accumulator, device=weight.device)
    sums = (denominator, ignore_index, C, mean, accumulator)
    divisors = mean_shares(target, class_weight, *sums)
    options = (ignore_index, label_smoothing, softcap, z_loss, mean or denominator is not None)
    for i, part in enumerate(chunks(M, chunk)):
        index, limit = packed.index[part], packed.limits[i : i + 1]
        hidden = input.new_empty(len(index), input.shape[1])
        gather_rows(input, index, hidden)
        # Logits past the limit are not written. Their labels are ignored, so their gradient is 0.
        logits = grouped_mm(hidden, weight.T[None], offs=limit)
        part_loss = one_pass_of_chunk(logits, packed.target[part], class_weight, *options, divisors)
        loss = part_loss if loss is None else loss + part_loss
        if weight_grad and one_chunk:
            dweight = grouped_mm(logits.T, hidden, offs=limit)[0]
        elif weight_grad:
            add_product(dweight, logits.T, hidden, is_first=i == 0)
        del hidden  # its memory is that of its gradient
        if input_grad:
            scatter_rows(grouped_mm(logits, weight[None], offs=limit), index, result.input)
        del logits
    assert loss is not None
    if weight_grad and not one_chunk:
        dweight = dweight.to(weight.dtype)
    return loss, result.input, dweight, result.bias
