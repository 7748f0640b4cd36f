"""The product of `product.py` with tensor descriptors, for GPUs that copy whole tiles at once."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ....runtime import recording
from ....runtime.launch import INTERPRETED, cdiv
from .product import CPU_PROGRAMS, TILE_GROUP, locate_product_tile, product_options

ALIGNMENT = 16  # bytes at which descriptors want addresses and rows to start


@triton.jit(do_not_specialize=["M", "N", "K"])
def linear_descriptor_product_kernel(
    a,  # descriptor of [M, K], or of [K, M] with TRANSPOSED_A
    b,  # descriptor of [K, N], or of [N, K] with TRANSPOSED_B
    result_ptr,  # [M, N]
    limit_ptr,  # []: bounds K with LIMITS_K, else M
    M,
    N,
    K,
    result_m,  # stride
    TRANSPOSED_A: tl.constexpr,
    TRANSPOSED_B: tl.constexpr,
    LIMITS_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    FLATTEN: tl.constexpr,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a @ b, or add it to the result with ACCUMULATE.

    With LIMITS_K both operands are zero from the limit up to the end of its block.
    """
    limit = tl.load(limit_ptr)
    if LIMITS_K:
        K = tl.minimum(limit, K)
    else:
        M = tl.minimum(limit, M)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    if ACCUMULATE:
        tiles = tl.where(K == 0, 0, tiles)  # nothing is added
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        first_m, first_n = locate_product_tile(tile, M, N, GROUP, BLOCK_M, BLOCK_N)
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            a_tile = a.load([k, first_m]).T if TRANSPOSED_A else a.load([first_m, k])
            b_tile = b.load([first_n, k]).T if TRANSPOSED_B else b.load([k, first_n])
            if UPCAST:  # The interpreter multiplies no half types.
                a_tile, b_tile = a_tile.to(tl.float32), b_tile.to(tl.float32)
            sums = tl.dot(a_tile, b_tile, sums)
        m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
        pointers = result_ptr + m.to(tl.int64)[:, None] * result_m + n[None, :]
        mask = (m < M)[:, None] & (n < N)[None, :]
        if ACCUMULATE:
            sums += tl.load(pointers, mask=mask, other=0.0)
        tl.store(pointers, sums.to(result_ptr.dtype.element_ty), mask=mask)


def has_descriptor(tensor: Tensor) -> bool:
    """Return whether a descriptor can describe a matrix or its transpose."""
    unit = ALIGNMENT // tensor.element_size()
    strides = sorted(tensor.stride())
    aligned = tensor.data_ptr() % ALIGNMENT == 0 and strides[1] % unit == 0
    return tensor.numel() > 0 and strides[0] == 1 and aligned and strides[1] > 1


def descriptor_options(accumulate: bool) -> dict[str, Any]:
    """Return the blocks and launch options of the product."""
    return {**product_options(accumulate), "FLATTEN": not INTERPRETED}


def descriptor_product(
    a: Tensor,
    b: Tensor,
    limit: Tensor,
    result: Tensor,
    *,
    limits_sum: bool = False,
    accumulate: bool = False,
) -> None:
    """Write `a @ b` to the result, as `limited_product` does.

    With `limits_sum` the rows of both operands past the limit are zero, up to a multiple of 64 or
    to their end.
    """
    (M, K), N = a.shape, b.shape[1]
    options = descriptor_options(accumulate)
    block_m, block_n, block_k = (options[f"BLOCK_{name}"] for name in "MNK")
    transposed_a, transposed_b = a.stride(1) != 1, b.stride(1) != 1
    a_shape, b_shape = [block_m, block_k], [block_k, block_n]
    programs = CPU_PROGRAMS
    if a.is_cuda:
        programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    if (active := recording.recorder()) is not None:
        active.refuse("Triton has to launch one of its kernels")
    linear_descriptor_product_kernel[(min(cdiv(M, block_m) * cdiv(N, block_n), programs),)](
        TensorDescriptor.from_tensor(a.T, a_shape[::-1])
        if transposed_a
        else TensorDescriptor.from_tensor(a, a_shape),
        TensorDescriptor.from_tensor(b.T, b_shape[::-1])
        if transposed_b
        else TensorDescriptor.from_tensor(b, b_shape),
        result,
        limit,
        M,
        N,
        K,
        result.stride(0),
        TRANSPOSED_A=transposed_a,
        TRANSPOSED_B=transposed_b,
        LIMITS_K=limits_sum,
        ACCUMULATE=accumulate,
        UPCAST=INTERPRETED,
        GROUP=TILE_GROUP,
        **options,
    )
