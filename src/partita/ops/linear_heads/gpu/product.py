"""A matrix product that reads on the device how many rows count.

Its programs are as many as run at the same time, and each computes tiles until none is left. Rows
past the limit cost nothing: they are no tiles of the result, or no steps of the sum.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime.launch import INTERPRETED, NVIDIA, cdiv, launch

TILE_GROUP = 8  # tiles of rows that are computed together, so that they share cached columns
VECTOR = tl.constexpr(8)  # elements of 16 bytes, of which padded rows have a multiple
CPU_PROGRAMS = 3  # in the interpreter: fewer than there are tiles, so that programs take several


@triton.jit
def locate_product_tile(
    tile, M, N, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return the tile's first row and column, such that tiles computed together share operands."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tile // (GROUP * tiles_n)
    rows = tl.minimum(tiles_m - group * GROUP, GROUP)
    inside = tile % (GROUP * tiles_n)
    return (group * GROUP + inside % rows) * BLOCK_M, inside // rows * BLOCK_N


@triton.jit
def in_row(column, end, PADDED: tl.constexpr):
    """Return which columns are in a row, or in vectors that start in it, if it is padded."""
    return column // VECTOR * VECTOR < end if PADDED else column < end


@triton.jit
def add_step(sums, a, b, UPCAST: tl.constexpr):
    """Return sums + a @ b. The interpreter needs UPCAST, because it multiplies no half types."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums)


@triton.jit
def product_tile(
    a_ptr,
    b_ptr,
    m,
    n,
    K,
    a_m,
    a_k,
    b_k,
    b_n,
    PADDED_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return the sums of one tile in fp32, [BLOCK_M, BLOCK_N], for the rows m and the columns n."""
    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + m.to(tl.int64)[:, None] * a_m + k.to(tl.int64)[None, :] * a_k
    b_ptrs = b_ptr + k.to(tl.int64)[:, None] * b_k + n.to(tl.int64)[None, :] * b_n
    sums = tl.zeros([m.shape[0], n.shape[0]], tl.float32)
    for first in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=in_row((first + k)[None, :], K, PADDED_K), other=0.0)
        b = tl.load(b_ptrs, mask=(first + k)[:, None] < K, other=0.0)
        sums = add_step(sums, a, b, UPCAST)
        a_ptrs += BLOCK_K * a_k
        b_ptrs += BLOCK_K * b_k
    return sums


@triton.jit(do_not_specialize=["M"])
def linear_product_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    bias_ptr,  # [N] or None
    result_ptr,  # [M, N]
    limit_ptr,  # []: bounds K with LIMITS_K, else M
    M,
    N,
    K,
    a_m,  # strides
    a_k,
    b_k,
    b_n,
    result_m,
    LIMITS_K: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PADDED_K: tl.constexpr,
    PADDED_N: tl.constexpr,
    UPCAST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a @ b + bias, or add a @ b to the result with ACCUMULATE.

    With PADDED_K the padding of the rows of a is 0. With PADDED_N that of the result is written.
    """
    limit = tl.load(limit_ptr)
    if LIMITS_K:
        K = tl.minimum(limit, K)
    else:
        M = tl.minimum(limit, M)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    if ACCUMULATE:
        tiles = tl.where(K == 0, 0, tiles)  # nothing is added
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        first_m, first_n = locate_product_tile(tile, M, N, GROUP, BLOCK_M, BLOCK_N)
        m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
        # Rows and columns past the end read the first ones again, and are not stored.
        inner_m = tl.max_contiguous(tl.multiple_of(tl.where(m < M, m, 0), BLOCK_M), BLOCK_M)
        inner_n = tl.max_contiguous(tl.multiple_of(tl.where(n < N, n, 0), BLOCK_N), BLOCK_N)
        sums = product_tile(
            a_ptr, b_ptr, inner_m, inner_n, K, a_m, a_k, b_k, b_n, PADDED_K, BLOCK_K, UPCAST
        )
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        pointers = result_ptr + m.to(tl.int64)[:, None] * result_m + n[None, :]
        mask = (m < M)[:, None] & in_row(n, N, PADDED_N)[None, :]
        if ACCUMULATE:
            sums += tl.load(pointers, mask=mask, other=0.0)
        tl.store(pointers, sums.to(result_ptr.dtype.element_ty), mask=mask)


def product_options(accumulate: bool) -> dict[str, int]:
    """Return the blocks and launch options of the product.

    A program that adds to the result has two tiles in registers, so they are smaller.
    """
    if INTERPRETED:
        return {"BLOCK_M": 32, "BLOCK_N": 128, "BLOCK_K": 32, "num_warps": 4}
    if NVIDIA:
        block_n = 128 if accumulate else 256
        return {"BLOCK_M": 128, "BLOCK_N": block_n, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 2}


def limited_product(
    a: Tensor,
    b: Tensor,
    limit: Tensor,
    result: Tensor,
    *,
    bias: Tensor | None = None,
    limits_sum: bool = False,
    accumulate: bool = False,
    pads_a: bool = False,
    pads_result: bool = False,
) -> None:
    """Write `a @ b + bias` to the result, with as many rows as `limit` says.

    Args:
        a, b: matrices of a half type, with any strides.
        limit: `[1]` int32 on the device; the number of rows that count.
        result: the result, whose last stride is 1. Rows past the limit are not written.
        bias: a vector to add to each row, or None.
        limits_sum: whether the limit bounds the inner dimension instead of the rows.
        accumulate: whether the product is added to the result.
        pads_a: whether the rows of `a` are padded to a multiple of 16 columns with zeros.
        pads_result: whether those of the result are padded, with numbers that do not matter.
    """
    (M, K), N = a.shape, b.shape[1]
    options: dict[str, Any] = product_options(accumulate)
    tiles = cdiv(M, options["BLOCK_M"]) * cdiv(N, options["BLOCK_N"])
    programs = CPU_PROGRAMS
    if a.is_cuda:
        programs = torch.cuda.get_device_properties(a.device).multi_processor_count
    launch(
        linear_product_kernel,
        min(tiles, programs),
        a,
        b,
        bias,
        result,
        limit,
        M,
        N,
        K,
        *a.stride(),
        *b.stride(),
        result.stride(0),
        LIMITS_K=limits_sum,
        ACCUMULATE=accumulate,
        PADDED_K=pads_a and K % 16 != 0,
        PADDED_N=pads_result and N % 16 != 0,
        UPCAST=INTERPRETED,
        GROUP=TILE_GROUP,
        **options,
    )
