"""The loss of the rows whose labels are not ignored; the others cost nothing.

These rows are gathered, one chunk at a time, and the products read their number on the device. This
holds for half types. The products of fp32 and fp64 are cuBLAS's, so all of their rows are computed.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ....primitives.rows import chunks
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import NVIDIA
from ...cross_entropy.gpu.launch import one_pass_of_chunk
from ..chunked import empty_gradients, logits_buffer
from ..plan import padded_width
from .pack import gather_rows, pack_rows, scatter_rows
from .product import limited_product
from .product_tma import descriptor_product, has_descriptor

# What multiplies the packed rows: `all` leaves the rows as they are, `grouped` takes PyTorch's
# grouped product where it needs no synchronisation, `own` the kernel of `product.py`, and
# `descriptor` that of `product_tma.py`. Whatever one does not serve, `own` does.
PRODUCTS = "grouped"
GROUPED_ALIGNMENT = 16  # bytes at which rows start


def packs(input: Tensor) -> bool:
    """Return whether the rows of these hidden states are packed."""
    return PRODUCTS != "all" and input.dtype.itemsize == 2 and len(input) > 0


@functools.lru_cache(maxsize=64)
def has_grouped_product(index: int) -> bool:
    """Return whether PyTorch's grouped product on this GPU does not wait for the host."""
    return NVIDIA and torch.cuda.get_device_capability(index)[0] in (9, 10)


def _is_grouped(*tensors: Tensor) -> bool:
    first = tensors[0]
    if PRODUCTS != "grouped" or not first.is_cuda or first.dtype != torch.bfloat16:
        return False
    unit = GROUPED_ALIGNMENT // first.element_size()
    aligned = all(
        tensor.data_ptr() % GROUPED_ALIGNMENT == 0
        and tensor.stride(1) == 1
        and tensor.stride(0) % unit == 0
        and tensor.shape[1] % unit == 0
        and tensor.numel() > 0
        for tensor in tensors
    )
    return aligned and has_grouped_product(first.device.index)


def _own_product(a: Tensor, b: Tensor, limit: Tensor, result: Tensor, **options: Any) -> None:
    if PRODUCTS == "descriptor" and has_descriptor(a) and has_descriptor(b):
        descriptor_product(a, b, limit, result, **options)
    else:
        limited_product(a, b, limit, result, **options)


def packed_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, limits: Tensor, buffer: Tensor | None
) -> Tensor:
    """Compute the logits of the packed rows of a chunk, in the buffer if there is one.

    Rows past the limit are not written. `limits` is a column of those of `PackedRows`, `[2, 1]`.
    """
    if buffer is None:
        matrix = weight.T[None]
        return torch.nn.functional.grouped_mm(hidden, matrix, offs=limits[1])
    rows, classes = len(hidden), len(weight)
    padded = buffer[: rows * padded_width(classes)].view(rows, padded_width(classes))
    logits = padded[:, :classes]
    if bias is None:
        _own_product(hidden, weight.T, limits[0], logits)
    else:
        limited_product(hidden, weight.T, limits[0], logits, bias=bias)
    return logits


def linear_one_pass(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    divisors: Tensor | None,
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

    `divisors` are what the loss of a row is divided by, as `mean_shares` returns them.
    """
    (M, H), C, accumulator = input.shape, len(weight), acc_dtype(input.dtype)
    chunk, one_chunk = min(chunk, M), chunk >= M
    packed = pack_rows(target, ignore_index, chunk)
    grouped = _is_grouped(weight) and C % (GROUPED_ALIGNMENT // weight.element_size()) == 0
    groups_logits, groups_sum = grouped and bias is None, grouped and one_chunk
    result = empty_gradients(
        input, weight, bias, input_grad, weight_grad and not groups_sum, bias_grad
    )
    if input_grad:
        result.input.zero_()  # the gradient of ignored rows
    dweight, dbias, loss = result.weight, None, None
    if weight_grad and not one_chunk:
        dweight = torch.zeros_like(result.weight, dtype=accumulator)
    buffer = None if groups_logits else logits_buffer(input, chunk, C)
    for i, part in enumerate(chunks(M, chunk)):
        index, limits = packed.index[part], packed.limits[:, i : i + 1]
        hidden = input.new_empty(len(index), H)
        gather_rows(input, index, hidden)
        logits = packed_logits(hidden, weight, bias, limits, buffer)
        options = (ignore_index, label_smoothing, softcap, z_loss, mean, divisors)
        part_loss = one_pass_of_chunk(logits, packed.target[part], class_weight, *options)
        loss = part_loss if loss is None else loss + part_loss
        if weight_grad and groups_sum:
            dweight = torch.nn.functional.grouped_mm(logits.T, hidden, offs=limits[1])[0]
        elif weight_grad:
            _own_product(
                logits.T,
                hidden,
                limits[0],
                dweight,
                limits_sum=True,
                accumulate=not one_chunk,
            )
        if input_grad and grouped:
            del hidden  # The allocator gives its memory to the gradient.
            dhidden = torch.nn.functional.grouped_mm(logits, weight[None], offs=limits[1])
            scatter_rows(dhidden, index, result.input)
            del dhidden
        elif input_grad:
            _own_product(logits, weight, limits[0], hidden)
            scatter_rows(hidden, index, result.input)
        if bias_grad:
            part_dbias = logits.sum(0, dtype=accumulator)
            dbias = part_dbias if dbias is None else dbias + part_dbias
        del logits
    assert loss is not None
    if weight_grad and not one_chunk:
        result.weight.copy_(dweight)
        dweight = result.weight
    if dbias is not None:
        result.bias.copy_(dbias)
    return loss, result.input, dweight, result.bias
