"""Loads of lengths and small matrices; the aligned vectors of rows that start at any address."""

import triton
import triton.language as tl


@triton.jit
def checked_length(lengths_ptr, n, T, LEAST: tl.constexpr, otherwise):
    """Return the length of sequence n, and whether it is out of range.

    A length that is not from LEAST to T is returned as `otherwise`, so no kernel reads or writes
    out of bounds.
    """
    length = tl.load(lengths_ptr + n).to(tl.int64)
    invalid = (length < LEAST) | (length > T)
    return tl.where(invalid, otherwise, length).to(tl.int32), invalid


@triton.jit
def load_length(lengths_ptr, n, T, LEAST: tl.constexpr = 0, otherwise=0):
    """Return the length of sequence n and 0.0; for one out of range, `otherwise` and NaN.

    Without lengths it is T. A kernel adds the second value to its results, so that an invalid
    length makes them NaN.
    """
    if lengths_ptr is None:
        return T, 0.0
    else:
        length, invalid = checked_length(lengths_ptr, n, T, LEAST, otherwise)
        return length, tl.where(invalid, float("nan"), 0.0)


@triton.jit
def row_span(start, classes, VEC: tl.constexpr):
    """Return the number of classes before the aligned vectors of a row, and inside them."""
    if VEC == 1:
        return 0, classes
    else:
        head = (aligned_start(start, VEC) - start).to(tl.int32)
        return head, (classes - head) // VEC * VEC


@triton.jit
def aligned_start(start, VEC: tl.constexpr):
    """Return the offset of the aligned vectors of a row.

    The compiler sees from the expression that the offset is a multiple of VEC.
    """
    if VEC == 1:
        return start
    else:
        return (start + VEC - 1) // VEC * VEC


@triton.jit
def edge_columns(head, body, classes, VEC: tl.constexpr, LANES: tl.constexpr):
    """Return the columns of the classes around the aligned vectors, and the mask of their lanes."""
    lane = tl.arange(0, LANES)
    column = tl.where(lane < VEC, lane, head + body + lane - VEC)
    return column, tl.where(lane < VEC, lane < head, (lane < 2 * VEC) & (column < classes))


@triton.constexpr_function
def load_assembly(dtype, vector, whole, masked, policy):
    """Return PTX that loads successive numbers from an address, before a given number of bytes.

    They are loaded at once if they are `whole`, which start on a multiple of their size. Otherwise
    16-bit numbers come from words, in which the first one starts at the bit of the last operand.
    The bits of each number are returned, those of bf16 as fp32; above those of fp16 may be others.
    """
    address, end, shift = (f"${vector + i}" for i in range(3))
    itemsize = dtype.primitive_bitwidth // 8
    bits = max(32, 8 * itemsize)
    loaded = [f"${i}" for i in range(0, vector, bits // (8 * itemsize))]
    load = "ld.global" + (f".L1::{policy}" if policy else "")
    loads = [
        (i * bits // 8, f"{load}.b{bits} {x}, [{address}+{i * bits // 8}];")
        for i, x in enumerate(loaded)
    ]
    if whole and len(loaded) > 1:
        loads = [(0, f"{load}.v{len(loaded)}.b{bits} {{{', '.join(loaded)}}}, [{address}];")]
    code = [f"mov.b{bits} {x}, 0;" for x in loaded] if masked else []
    for byte, line in loads:
        code += [f"setp.gt.s32 p, {end}, {byte};", "@p " + line] if masked else [line]
    if itemsize == 2 and not whole:
        byte = 2 * vector
        code += [f"setp.ne.s32 p, {shift}, 0;", "mov.b32 after, 0;"]
        code += [f"setp.gt.and.s32 p, {end}, {byte}, p;"] if masked else []
        code += [f"@p {load}.b32 after, [{address}+{byte}];"]
        for x, following in zip(loaded, [*loaded[1:], "after"], strict=True):
            code += [f"shf.r.wrap.b32 {x}, {x}, {following}, {shift};"]
    for i in range(0, vector, 2) if itemsize == 2 else ():
        high = "and.b32 ${}, ${}, 0xffff0000;" if dtype.is_bf16() else "shr.u32 ${}, ${}, 16;"
        code += [high.format(i + 1, i)] + [f"shl.b32 ${i}, ${i}, 16;"] * dtype.is_bf16()
    return "{ .reg .pred p; .reg .b32 after; " + " ".join(code) + " }"


@triton.jit
def load_vectors(
    ptrs,
    stride,
    first,
    last,
    row_mask,
    MASKED: tl.constexpr,
    POLICY: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Load a block of classes of rows, [VEC, ., ROWS, LANES], from `first` on.

    They are dealt to the lanes of a `LaneTile`, vector after vector. Wherever the rows start, a
    lane has the same classes, and Triton lays them out in the same way. No 4 bytes are read that
    have no class of the row.

    Args:
        ptrs: the addresses of the rows, [ROWS].
        stride: the stride over classes.
        first, last: the first class of the block, and the end of the classes.
        row_mask: which rows exist, [ROWS].
        MASKED: whether the block may lie past the last class or have rows that do not exist.
        POLICY: a hint for the cache, or "".
        BLOCK: the classes of the block, a multiple of those that all lanes get at a time.

    Returns:
        The numbers, -inf outside of the mask, their classes, and the mask.
    """
    VEC: tl.constexpr = TILE.vector
    BLOCKS: tl.constexpr = BLOCK // (TILE.lanes * VEC)
    dtype: tl.constexpr = ptrs.dtype.element_ty
    # Vectors of a lane are a constant apart, [., 1, LANES], so one address serves for all.
    lane = tl.arange(0, TILE.lanes)[None, None, :] * VEC
    block = tl.arange(0, BLOCKS)[:, None, None] * (TILE.lanes * VEC)
    lane_start = first + lane.to(tl.int64)
    column = (lane_start + block.to(tl.int64))[None] + tl.arange(0, VEC)[:, None, None, None]
    # The numbers that exist from the start of each vector on.
    existing = tl.full([BLOCKS, TILE.rows, TILE.lanes], VEC, tl.int32)
    mask = tl.full([VEC, BLOCKS, TILE.rows, TILE.lanes], True, tl.int1)
    if MASKED:
        left = tl.where(row_mask, tl.minimum(last - first, BLOCK).to(tl.int32), -1)
        existing = (left[None, :, None] - lane) - block
        if VEC * ptrs.dtype.element_ty.primitive_bitwidth == 128:
            mask = mask & (existing > 0)[None]
        else:
            mask = tl.arange(0, VEC)[:, None, None, None] < existing[None]
    if TILE.access == 0:
        x_ptrs = ptrs[None, None, :, None] + column * stride
        x = tl.load(x_ptrs, mask=mask, other=-float("inf"), eviction_policy=POLICY)
    else:
        ITEMSIZE: tl.constexpr = dtype.primitive_bitwidth // 8
        address = ptrs.to(tl.int64)[None, :, None]
        lost = address & (2 if ITEMSIZE == 2 and TILE.access == 1 else 0)
        numbers = tl.inline_asm_elementwise(
            load_assembly(dtype, VEC, TILE.access == 2, MASKED, POLICY),
            ("=&l," if ITEMSIZE == 8 else "=&r,") * VEC + "l,r,r",
            [
                (address - lost + lane_start * ITEMSIZE) + block * ITEMSIZE,
                existing * ITEMSIZE + lost.to(tl.int32),
                lost.to(tl.int32) * 8,
            ],
            dtype=(tl.int64,) * VEC if ITEMSIZE == 8 else (tl.int32,) * VEC,
            is_pure=True,
            pack=1,
        )
        bits = numbers[0][None]
        for i in tl.static_range(1, VEC):  # The selects vanish, as a thread has whole vectors.
            bits = tl.where(tl.arange(0, VEC)[:, None, None, None] == i, numbers[i][None], bits)
        if dtype == tl.float16:
            x = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            x = bits.to(tl.float64 if ITEMSIZE == 8 else tl.float32, bitcast=True)
        if MASKED:
            x = tl.where(mask, x, -float("inf"))
    return x, column, mask


@triton.jit
def load_matrix(ptr, C, stride_k, stride_c, BLOCK_C: tl.constexpr, OTHER: tl.constexpr):
    """Load a matrix `[BLOCK_C, BLOCK_C]`."""
    k, c = tl.arange(0, BLOCK_C).to(tl.int64)[:, None], tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    return tl.load(ptr + k * stride_k + c * stride_c, mask=(k < C) & (c < C), other=OTHER)


@triton.jit
def prefetch_line(ptr):
    """Ask for the cache lines at some addresses."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
