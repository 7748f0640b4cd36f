"""Loads of lengths and small matrices; loads and stores of rows.

Rows have cache hints, aligned vectors, or any address.
"""

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
def load_streaming(ptr, mask, other, STREAM: tl.constexpr):
    """Load values that are not read again.

    With STREAM, for rows that programs share, they leave the cache to the exchange slots and to the
    loads in flight of other programs.
    """
    return tl.load(ptr, mask=mask, other=other, eviction_policy="evict_first" if STREAM else "")


@triton.jit
def store_streaming(ptr, value, mask, STREAM: tl.constexpr):
    """Store values that are not read soon, rounded to the dtype of the memory."""
    value = value.to(ptr.dtype.element_ty)
    tl.store(ptr, value, mask=mask, cache_modifier=".cs" if STREAM else "")


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
def load_assembly(itemsize, vector, whole, masked, policy):
    """Return PTX that loads the words of a vector from an address, where a predicate is not 0.

    The vector is loaded at once if it is `whole`, otherwise number by number.
    """
    words = max(vector * itemsize // 4, 1)
    out, address = [f"${i}" for i in range(words)], f"${words}"
    load = ("@p " if masked else "") + "ld.global" + (f".L1::{policy}" if policy else "")
    code = [f"setp.ne.s32 p, ${words + 1}, 0;"] if masked else []
    code += [f"mov.b32 {word}, 0;" for word in out] if masked else []
    if whole and words > 1:
        code += [f"{load}.v{words}.b32 {{{', '.join(out)}}}, [{address}];"]
    elif itemsize > 2:
        code += [f"{load}.b32 {word}, [{address}+{4 * i}];" for i, word in enumerate(out)]
    else:
        code += [f"{load}.u16 {out[i // 2]}, [{address}+{2 * i}];" for i in range(0, vector, 2)]
        for i in range(1, vector, 2):
            code += [f"{load}.u16 high, [{address}+{2 * i}];"]
            code += [f"prmt.b32 {out[i // 2]}, {out[i // 2]}, high, 0x5410;"]
    return "{ .reg .pred p; .reg .b32 high; " + " ".join(code) + " }"


@triton.jit
def select_word(words, index):
    """Return the words at an index along a first dimension that a thread has whole."""
    word = words[0][None]
    for i in tl.static_range(1, len(words)):
        word = tl.where(index == i, words[i][None], word)
    return word


@triton.jit
def unpack_words(words, VEC: tl.constexpr, dtype: tl.constexpr):
    """Return the numbers in words of memory as fp32 or fp64, along a new first dimension."""
    number = tl.arange(0, VEC)[:, None, None, None]
    word = select_word(words, number * dtype.primitive_bitwidth // 32)
    if dtype == tl.float64:
        high = select_word(words, number * 2 + 1).to(tl.int64)
        return ((high << 32) | (word.to(tl.int64) & 0xFFFFFFFF)).to(tl.float64, bitcast=True)
    elif dtype == tl.float32:
        return word.to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        high = tl.where(number % 2 == 0, word << 16, word & -65536)
        return high.to(tl.float32, bitcast=True)
    else:
        low = tl.where(number % 2 == 0, word, word >> 16).to(tl.int16)
        return low.to(tl.float16, bitcast=True).to(tl.float32)


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
    lane has the same classes, and Triton lays them out in the same way. Only classes of the row are
    read.

    Args:
        ptrs: the addresses of the rows, [ROWS].
        stride: the stride over classes.
        first, last: the first class of the block, and the end of the classes; whole vectors lie
            between them.
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
    exists = tl.full([BLOCKS, TILE.rows, TILE.lanes], True, tl.int1)
    if MASKED:
        left = tl.minimum(last - first, BLOCK).to(tl.int32)
        exists = (block < left - lane) & row_mask[None, :, None]
    mask = tl.broadcast_to(exists[None], [VEC, BLOCKS, TILE.rows, TILE.lanes])
    if TILE.access == 0:
        x_ptrs = ptrs[None, None, :, None] + column * stride
        x = tl.load(x_ptrs, mask=mask, other=-float("inf"), eviction_policy=POLICY)
    else:
        ITEMSIZE: tl.constexpr = dtype.primitive_bitwidth // 8
        WORDS: tl.constexpr = max(VEC * ITEMSIZE // 4, 1)
        start = ptrs.to(tl.int64)[None, :, None] + lane_start * ITEMSIZE
        words = tl.inline_asm_elementwise(
            load_assembly(ITEMSIZE, VEC, TILE.access == 2, MASKED, POLICY),
            "=&r," * WORDS + "l,r",
            [start + block * ITEMSIZE, exists.to(tl.int32)],
            dtype=(tl.int32,) * WORDS,
            is_pure=True,
            pack=1,
        )
        x = unpack_words(words, VEC, dtype)
        if MASKED:
            x = tl.where(mask, x, -float("inf"))
    return x, column, mask


@triton.jit
def load_matrix(ptr, C, stride_k, stride_c, BLOCK_C: tl.constexpr, OTHER: tl.constexpr):
    """Load a matrix `[BLOCK_C, BLOCK_C]`."""
    k, c = tl.arange(0, BLOCK_C).to(tl.int64)[:, None], tl.arange(0, BLOCK_C).to(tl.int64)[None, :]
    return tl.load(ptr + k * stride_k + c * stride_c, mask=(k < C) & (c < C), other=OTHER)


@triton.jit
def opaque(packed, zero):
    """Return `packed`, a block of a half type, as values that the compiler regards as new.

    The compiler then converts them to fp32 once more. Otherwise it would hold the fp32 copies,
    which double the registers that a row occupies while its program waits. `zero` is 0.0, which the
    compiler does not know.
    """
    zeros = tl.full(packed.shape, zero, tl.float32).to(packed.dtype)
    return tl.inline_asm_elementwise(
        "xor.b32 $0, $1, $2;", "=r,r,r", [packed, zeros], dtype=packed.dtype, is_pure=False, pack=2
    )


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
