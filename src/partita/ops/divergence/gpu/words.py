"""Parts of rows in registers, as words of two 16-bit logits each.

A program loads all of its part before it computes. The two logits of a word are taken apart into
two tensors, in which their order does not matter.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....primitives.gpu.math import apply_softcap
from .plan import MIXTURE_WARPS, MIXTURE_WORDS

VEC = gl.constexpr(MIXTURE_WORDS)
THREADS = gl.constexpr(32 * MIXTURE_WARPS)
# Of the words of a block, [THREADS, VEC].
LAYOUT = gl.constexpr(gl.BlockedLayout([1, MIXTURE_WORDS], [32, 1], [MIXTURE_WARPS, 1], [1, 0]))


class Numbers(NamedTuple):
    """The numbers that each class needs.

    Fields:
        cap: the soft-cap, or None.
        weight: beta.
        log2_scale: the factor of logits in exponents.
        words: the number of words of the program's part.
    """

    cap: tl.tensor
    weight: tl.tensor
    log2_scale: tl.tensor
    words: tl.tensor


@gluon.jit
def words_of_row(rows, row, first):
    """Return the address of the words of a row of `StridedRows` from a class on.

    The stride of the rows and the class are multiples of 2 * VEC.
    """
    # The compiler sees from the expression that the address is one of whole vectors.
    offset = (row * rows.m + first) // (2 * VEC) * VEC
    return rows.ptr.to(gl.pointer_type(gl.int32), bitcast=True) + offset


@gluon.jit
def first_words(k: gl.constexpr):
    """Return the index of each thread's first word in block k, `[THREADS]`."""
    return (gl.arange(0, THREADS, gl.SliceLayout(1, LAYOUT)) + k * THREADS) * VEC


@gluon.jit
def word_indices(first):
    """Return the indices of the words of a block, `[THREADS, VEC]`, from each thread's first."""
    column = gl.arange(0, VEC, gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(first, 1) + gl.expand_dims(column, 0)


@gluon.jit
def load_part(row_ptr, num_words, BLOCKS: gl.constexpr):
    """Load the words of a part of a row, a tuple of BLOCKS blocks; those past the part are 0."""
    blocks = ()
    for k in gl.static_range(BLOCKS):
        first = first_words(k)
        mask = gl.expand_dims(first < num_words, 1)
        at = row_ptr + word_indices(first)
        blocks = blocks + (gl.load(at, mask=mask, other=0, eviction_policy="evict_first"),)
    return blocks


@gluon.jit
def store_block(row_ptr, words, num_words, k: gl.constexpr):
    """Store the words of block k of a part of a row."""
    first = first_words(k)
    mask = gl.expand_dims(first < num_words, 1)
    gl.store(row_ptr + word_indices(first), words, mask=mask, cache_modifier=".cs")


@gluon.jit
def greater_bf16(a, b):
    """Return words with the greater of both logits in each half; a NaN loses."""
    asm: gl.constexpr = "max.bf16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [a, b], gl.int32, True, 1)


@gluon.jit
def greater_fp16(a, b):
    """Return the same for fp16."""
    asm: gl.constexpr = "max.f16x2 $0, $1, $2;"
    return gl.inline_asm_elementwise(asm, "=r,r,r", [a, b], gl.int32, True, 1)


@gluon.jit
def logits_of(words, cap, DTYPE: gl.constexpr):
    """Return both soft-capped logits of each word in fp32."""
    asm: gl.constexpr = (
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        if DTYPE == gl.bfloat16
        else "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}"
    )
    # If it were pure, the compiler would keep the logits, which need two registers for each word.
    low, high = gl.inline_asm_elementwise(
        asm, "=f,=f,r", [words], (gl.float32, gl.float32), False, 1
    )
    HAS_SOFTCAP: gl.constexpr = cap is not None
    return apply_softcap(low, cap, HAS_SOFTCAP), apply_softcap(high, cap, HAS_SOFTCAP)


@gluon.jit
def words_of(low, high, DTYPE: gl.constexpr):
    """Return words of two numbers that are rounded to 16 bits."""
    asm: gl.constexpr = (
        "cvt.rn.bf16x2.f32 $0, $2, $1;" if DTYPE == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    )
    return gl.inline_asm_elementwise(asm, "=r,f,f", [low, high], gl.int32, True, 1)
