"""Access to rows that start anywhere, and to memory that is read or written once."""

import triton
import triton.language as tl


@triton.jit
def load_streaming(ptr, mask, other, STREAM: tl.constexpr):
    """Load what is not read again; rows that are shared leave the cache to the boxes and to what others have in flight."""
    if STREAM:
        return tl.load(ptr, mask=mask, other=other, eviction_policy="evict_first")
    else:
        return tl.load(ptr, mask=mask, other=other)


@triton.jit
def store_streaming(ptr, value, mask, STREAM: tl.constexpr):
    """Store what is not read soon, rounded to the dtype of the memory."""
    if STREAM:
        tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask, cache_modifier=".cs")
    else:
        tl.store(ptr, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_span(start, classes, VEC: tl.constexpr):
    """How many classes of a row stand before its aligned vectors, and how many in them."""
    if VEC == 1:
        return 0, classes
    else:
        head = (aligned_start(start, VEC) - start).to(tl.int32)
        return head, (classes - head) // VEC * VEC


@triton.jit
def aligned_start(start, VEC: tl.constexpr):
    """Offset of the aligned vectors of a row, in a form from which the compiler sees that it is a multiple of VEC."""
    if VEC == 1:
        return start
    else:
        return (start + VEC - 1) // VEC * VEC


@triton.jit
def edge_columns(head, body, classes, VEC: tl.constexpr, LANES: tl.constexpr):
    """The classes before and behind the aligned vectors: their columns, and which of the lanes hold one."""
    lane = tl.arange(0, LANES)
    column = tl.where(lane < VEC, lane, head + body + lane - VEC)
    return column, tl.where(lane < VEC, lane < head, (lane < 2 * VEC) & (column < classes))


@triton.jit
def opaque(packed, zero):
    """`packed`, a block of a half type, as values that the compiler takes for new: it then converts them anew in place of holding
    the fp32 copies, which would double the registers that a row occupies while its program waits."""
    return tl.inline_asm_elementwise(
        "xor.b32 $0, $1, $2;", "=r,r,r", [packed, zero], dtype=packed.dtype, is_pure=False, pack=2
    )
