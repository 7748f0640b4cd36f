"""The loss of the rows whose labels are not ignored; the others cost nothing.

These rows are gathered, one chunk at a time, and the products read their number on the device. This
holds for half types. The products of fp32 and fp64 are cuBLAS's, so all of their rows are computed.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ....primitives.rows import chunks
from ....runtime.caches import register_cache
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import NVIDIA
from ...cross_entropy.gpu.launch import one_pass_of_chunk
from ..chunked import ChunkKernels, empty_gradients, logits_buffer
from ..common import GradientCoefficients
from ..plan import padded_width
from .pack import gather_rows, pack_rows, scatter_rows
from .product import limited_product
from .product_tma import descriptor_product, has_descriptor

# What multiplies the packed rows: `all` leaves the rows as they are, `grouped` takes PyTorch's
# grouped product where it needs no synchronisation, `own` the kernel of `product.py`, and
# `descriptor` that of `product_tma.py`. Whatever one does not serve, `own` does.
PRODUCTS = "grouped"
GROUPED_ALIGNMENT = 16  # elements of which rows, classes and strides are multiples there


def packs(input: Tensor) -> bool:
    """Return whether the rows of these hidden states are packed."""
    return PRODUCTS != "all" and input.dtype.itemsize == 2 and len(input) > 0


@functools.lru_cache(maxsize=64)
def has_grouped_product(index: int) -> bool:
    """Return whether PyTorch's grouped product on this GPU does not wait for the host.

    Source: `_grouped_mm_cuda` of PyTorch, which elsewhere copies the offsets to the host.
    """
    return NVIDIA and torch.cuda.get_device_capability(index)[0] in (9, 10)


register_cache("linear_heads.has_grouped_product", has_grouped_product.cache_clear)


def _is_grouped(weight: Tensor) -> bool:
    """Return whether the grouped product serves this matrix, whose rows have to be aligned."""
    if PRODUCTS != "grouped" or not weight.is_cuda or weight.dtype != torch.bfloat16:
        return False
    aligned = weight.data_ptr() % (2 * GROUPED_ALIGNMENT) == 0 and weight.stride(1) == 1
    sizes = (*weight.shape, weight.stride(0))
    aligned = aligned and all(size > 0 and size % GROUPED_ALIGNMENT == 0 for size in sizes)
    return aligned and has_grouped_product(weight.device.index)


@functools.lru_cache(maxsize=64)
def copies_tiles(index: int | None) -> bool:
    """Return whether this GPU copies whole tiles; the interpreter, which has no index, does too."""
    return index is None or (NVIDIA and torch.cuda.get_device_capability(index)[0] >= 9)


register_cache("linear_heads.copies_tiles", copies_tiles.cache_clear)


def _own_product(
    a: Tensor,
    b: Tensor,
    limit: Tensor,
    result: Tensor,
    bias: Tensor | None = None,
    *,
    limits_sum: bool = False,
    accumulate: bool = False,
    **padding: bool,
) -> None:
    described = (
        bias is None and PRODUCTS == "descriptor" and has_descriptor(a) and has_descriptor(b)
    )
    if described and copies_tiles(a.device.index):
        descriptor_product(a, b, limit, result, limits_sum=limits_sum, accumulate=accumulate)
    else:
        sums = {"limits_sum": limits_sum, "accumulate": accumulate}
        limited_product(a, b, limit, result, bias=bias, **sums, **padding)


def gathered(source: Tensor, index: Tensor) -> Tensor:
    """Return the indexed rows of a matrix or elements of a vector, and 0 where the index is -1."""
    result = source.new_empty((len(index), *source.shape[1:]))
    gather_rows(source.view(len(source), -1), index, result.view(len(index), -1))
    return result


def packed_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, limits: Tensor, buffer: Tensor | None
) -> Tensor:
    """Compute the logits of the packed rows of a chunk.

    They are in the buffer, if there is one. `limits` is a column of those of `PackedRows`. Rows
    past the limit are not written.
    """
    if buffer is None:
        return torch.nn.functional.grouped_mm(hidden, weight.T[None], offs=limits[1])
    rows, classes = len(hidden), len(weight)
    padded = buffer[: rows * padded_width(classes)].view(rows, padded_width(classes))
    logits = padded[:, :classes]
    _own_product(hidden, weight.T, limits[0], logits, bias, pads_result=True)
    return logits


def weight_gradient(
    dlogits: Tensor, hidden: Tensor, limits: Tensor, grouped: bool, total: Tensor | None = None
) -> Tensor:
    """Return the gradient of the matrix from a chunk, or add it to a total in fp32.

    Rows of `dlogits` past the limit are 0.
    """
    if grouped and total is None:
        return torch.nn.functional.grouped_mm(dlogits.T, hidden, offs=limits[1])[0]
    result = total
    if result is None:
        result = hidden.new_empty(dlogits.shape[1], hidden.shape[1])
    adds = total is not None
    _own_product(dlogits.T, hidden, limits[0], result, limits_sum=True, accumulate=adds)
    return result


def hidden_gradient(dlogits: Tensor, weight: Tensor, limits: Tensor, grouped: bool) -> Tensor:
    """Return the gradient of the packed hidden states of a chunk."""
    if grouped:
        return torch.nn.functional.grouped_mm(dlogits, weight[None], offs=limits[1])
    (rows, classes), width = dlogits.shape, dlogits.stride(0)
    padded = dlogits.as_strided((rows, width), (width, 1))
    padded[:, classes:].zero_()
    result = dlogits.new_empty(rows, weight.shape[1])
    _own_product(dlogits, weight, limits[0], result, pads_a=width == padded_width(classes))
    return result


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
    (M, _), C, accumulator = input.shape, len(weight), acc_dtype(input.dtype)
    chunk, one_chunk = min(chunk, M), chunk >= M
    packed = pack_rows(target, ignore_index, chunk)
    grouped = _is_grouped(weight)
    result = empty_gradients(
        input, weight, bias, input_grad, weight_grad and not one_chunk, bias_grad
    )
    if input_grad:
        result.input.zero_()  # the gradient of ignored rows
    dweight, dbias, loss, total = result.weight, None, None, None
    if weight_grad and not one_chunk:
        total = torch.zeros_like(dweight, dtype=accumulator)
    buffer = None if grouped and bias is None else logits_buffer(input, chunk, C)
    for i, part in enumerate(chunks(M, chunk)):
        index, limits = packed.index[part], packed.limits[:, i : i + 1]
        hidden = gathered(input, index)
        logits = packed_logits(hidden, weight, bias, limits, buffer)
        options = (ignore_index, label_smoothing, softcap, z_loss, mean, divisors)
        part_loss = one_pass_of_chunk(logits, packed.target[part], class_weight, *options)
        loss = part_loss if loss is None else loss + part_loss
        if weight_grad:
            dweight = weight_gradient(logits, hidden, limits, grouped, total)
        del hidden  # its memory is that of its gradient
        if input_grad:
            scatter_rows(hidden_gradient(logits, weight, limits, grouped), index, result.input)
        if bias_grad:
            part_dbias = logits.sum(0, dtype=accumulator)
            dbias = part_dbias if dbias is None else dbias + part_dbias
        del logits
    assert loss is not None
    if total is not None:
        dweight = result.weight.copy_(total)
    if dbias is not None:
        result.bias.copy_(dbias)
    return loss, result.input, dweight, result.bias


def packs_rows(input: Tensor, needs_entropy: bool, one_chunk: bool) -> bool:
    """Return whether `linear_rows` packs the rows. All rows of token statistics count."""
    return packs(input) and one_chunk and not needs_entropy


def linear_rows(
    kernels: ChunkKernels,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    temperature: float,
    softcap: float,
    ignore_index: int,
    needs_smoothing: bool,
    save_logits: bool,
) -> tuple[Tensor, ...]:
    """Return the `RowStatistics` and the logits of the packed rows, flat, if they are saved.

    The statistics of ignored rows are 0, and their sum of exponentials is 1.
    """
    M, C = len(input), len(weight)
    packed = pack_rows(target, ignore_index, M)
    buffer = None if _is_grouped(weight) and bias is None else logits_buffer(input, M, C)
    hidden = gathered(input, packed.index)
    logits = packed_logits(hidden, weight, bias, packed.limits, buffer)
    del hidden
    state = kernels.new_state(input, needs_smoothing, False)
    numbers = (temperature, softcap)
    kernels.accumulate_logits(logits, 0, packed.target, class_weight, state, *numbers)
    numbers = (temperature, ignore_index)
    found = kernels.row_statistics(state, packed.target, class_weight, C, *numbers)
    fields = []
    for name, values in found._asdict().items():
        result = torch.full_like(values, float(name == "sumexp"))
        if len(values):
            scatter_rows(values[:, None], packed.index, result[:, None])
        fields.append(result)
    saved = (logits.reshape(-1) if buffer is None else buffer) if save_logits else None
    return *fields, input.new_empty(0) if saved is None else saved


def linear_rows_backward(
    kernels: ChunkKernels,
    coefficients: GradientCoefficients,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    maximum: Tensor,
    sumexp: Tensor,
    saved: Tensor,
    temperature: float,
    softcap: float,
    ignore_index: int,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> tuple[Tensor, ...]:
    """Compute the `HeadGradients` from the logits of packed rows, which are overwritten."""
    result = empty_gradients(input, weight, bias, input_grad, False, bias_grad)
    M, C = len(input), len(weight)
    packed, grouped = pack_rows(target, ignore_index, M), _is_grouped(weight)
    fields = (None if t is None else gathered(t.contiguous(), packed.index) for t in coefficients)
    of_rows = GradientCoefficients(*fields)  # type: ignore[arg-type]
    statistics = (gathered(maximum, packed.index), gathered(sumexp, packed.index))
    logits = saved.view(M, -1)[:, :C]
    labels = (packed.target, class_weight)
    kernels.logits_gradient(logits, 0, *labels, of_rows, *statistics, temperature, softcap, logits)
    dweight = result.weight
    if weight_grad:
        hidden = gathered(input, packed.index)
        dweight = weight_gradient(logits, hidden, packed.limits, grouped)
        del hidden
    if input_grad:
        dhidden = hidden_gradient(logits, weight, packed.limits, grouped)
        scatter_rows(dhidden, packed.index, result.input.zero_())
    if bias_grad:
        result.bias.copy_(logits.sum(0, dtype=acc_dtype(input.dtype)))
    return result.input, dweight, result.bias
