"""CTC's rows: what normalises each step, the loss from the middle of the scans, and the gradient from the posteriors of positions."""

import triton
import triton.language as tl

from .ctc_scan import SIZES, sizes_of
from .ctc_steps import log2_of
from .math import exp, exp_for, finite_shift


@triton.jit(do_not_specialize=["steps", "count", "classes", "stride_t", "stride_n"])
def ctc_norm_kernel(
    logits_ptr,  # [steps, count, classes]
    input_lengths_ptr,  # [count]
    maxima_ptr,  # [steps, count]
    sums_ptr,  # [steps, count]
    steps,
    count,
    classes,
    stride_t,
    stride_n,
    stride_c,
    REAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The maximum of each step, and the sum of the exponentials less it."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    t, n = row // count, row % count
    counts = (t < steps) & (t < tl.load(input_lengths_ptr + n))
    maximum, total = tl.full([ROWS], -float("inf"), REAL), tl.zeros([ROWS], REAL)
    for first in range(0, classes, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        at = (t * stride_t + n * stride_n)[:, None] + v.to(tl.int64)[None, :] * stride_c
        x = tl.load(logits_ptr + at, mask=counts[:, None] & (v < classes)[None, :], other=-float("inf")).to(REAL)
        higher = tl.maximum(maximum, tl.max(x, axis=1))
        shift = finite_shift(higher)
        total = total * exp(maximum - shift) + tl.sum(exp_for(x - shift[:, None], REAL), axis=1)
        maximum = higher
    tl.store(maxima_ptr + row, maximum, mask=counts)
    tl.store(sums_ptr + row, total, mask=counts)


@triton.jit
def log2_at(ptr, held, WIDE: tl.constexpr):
    """Logarithms of states in memory to base 2; -inf where none is held."""
    return tl.where(held, log2_of(tl.load(ptr, mask=held, other=0), WIDE), -float("inf"))


@triton.jit
def log2_add(maximum, total, term):
    """A term more in 2**maximum · total, the sum of such."""
    higher = tl.where(term > maximum, term, maximum)
    shift = finite_shift(higher)
    return higher, total * tl.exp2(maximum - shift) + tl.exp2(term - shift)


@triton.jit
def place_of_position(i, PARTS: tl.constexpr):
    """Where the blank of a position stands among the states of its chunks, `[chunks, 2, PARTS, 32]`."""
    return i // (32 * PARTS) * (64 * PARTS) + i % PARTS * 32 + i % (32 * PARTS) // PARTS


@triton.jit
def total_of(alpha_ptr, beta_ptr, labels_ptr, labels, PARTS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """log2 of the sum over all ways from α before a step to β behind it."""
    maximum, total = tl.full([BLOCK], -float("inf"), tl.float64), tl.zeros([BLOCK], tl.float64)
    for first in range(0, labels + 1, BLOCK):
        i = first + tl.arange(0, BLOCK)
        at, before = place_of_position(i, PARTS), place_of_position(tl.maximum(i - 1, 0), PARTS)
        label = tl.load(labels_ptr + i, mask=i < labels, other=-1)
        skip = (i > 0) & (i < labels) & (label != tl.load(labels_ptr + i - 1, mask=(i > 0) & (i < labels), other=-1))
        blank, this = log2_at(alpha_ptr + at, i <= labels, WIDE), log2_at(alpha_ptr + at + 32 * PARTS, i < labels, WIDE)
        left = log2_at(alpha_ptr + before + 32 * PARTS, (i > 0) & (i <= labels), WIDE)
        blank_next, this_next = log2_at(beta_ptr + at, i <= labels, WIDE), log2_at(beta_ptr + at + 32 * PARTS, i < labels, WIDE)
        maximum, total = log2_add(maximum, total, blank + blank_next)
        maximum, total = log2_add(maximum, total, left + blank_next)
        maximum, total = log2_add(maximum, total, this + this_next)
        maximum, total = log2_add(maximum, total, blank + this_next)
        maximum, total = log2_add(maximum, total, tl.where(skip, left, -float("inf")) + this_next)
    shift = finite_shift(tl.max(maximum, axis=0))
    return shift + tl.log2(tl.sum(total * tl.exp2(maximum - shift), axis=0))


@triton.jit(do_not_specialize=SIZES)
def ctc_total_kernel(
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    input_lengths_ptr,  # [count]
    target_lengths_ptr,  # [count]
    kept_ptr,  # [2, blocks + 1, count, chunks, 2, PARTS, 32] int64
    flags_ptr,  # [count] int64
    maxima_ptr,  # [steps, count] or None
    sums_ptr,  # [steps, count] or None
    logz_ptr,  # [count] fp64
    loss_ptr,  # [count] fp64
    steps,
    count,
    held,
    most,
    chunks,
    blocks,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    ALL: tl.constexpr,
):
    """log2 of the sum over the alignments from α and β at the middle, and the loss: what normalises the steps, less it."""
    n = tl.program_id(0).to(tl.int64)
    flags = tl.load(flags_ptr + n)
    length, labels, offset, _ = sizes_of(n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held)
    alpha_ptr = kept_ptr + (blocks.to(tl.int64) * count + n) * chunks * (64 * PARTS)
    beta_ptr = alpha_ptr + (blocks.to(tl.int64) + 1) * count * chunks * (64 * PARTS)
    if (flags >= 0) if ALL or not WIDE else (flags == 1):
        logz = total_of(alpha_ptr, beta_ptr, labels_ptr + offset, labels, PARTS, BLOCK, WIDE)
        logz = tl.where(length > 0, logz, tl.where(labels == 0, 0.0, -float("inf")))
        loss = -logz * 0.6931471805599453
        if maxima_ptr is not None:
            norm = tl.zeros([BLOCK], tl.float64)
            for first in range(0, length, BLOCK):
                t = first + tl.arange(0, BLOCK)
                at = t.to(tl.int64) * count + n
                maximum = tl.load(maxima_ptr + at, mask=t < length, other=0.0).to(tl.float64)
                norm += maximum + tl.log(tl.load(sums_ptr + at, mask=t < length, other=1.0).to(tl.float64))
            loss += tl.sum(norm, axis=0)
        tl.store(logz_ptr + n, logz)
        tl.store(loss_ptr + n, tl.where(flags >= 2, float("nan"), loss))


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b."""
    if PRECISION is None:
        return total + tl.sum(a[:, :, None] * b.to(a.dtype)[None, :, :], axis=1)
    else:
        return tl.dot(a, b.to(a.dtype), total, input_precision=PRECISION)


@triton.jit
def blanks_of(blank_ptr, t, counts, n, count, chunks, last, BLOCK_L: tl.constexpr, REAL: tl.constexpr):
    """The posterior of the blank at each step, over the chunks."""
    total = tl.zeros(t.shape, REAL)
    for first in range(0, last + 1, BLOCK_L):
        c = first + tl.arange(0, BLOCK_L)
        at = ((t * count + n) * chunks)[:, None] + c[None, :]
        total += tl.sum(tl.load(blank_ptr + at, mask=counts[:, None] & (c <= last)[None, :], other=0.0), axis=1)
    return total


@triton.jit
def shares_at(posterior_ptr, labels_ptr, row, counts, first, labels, BLOCK_L: tl.constexpr):
    """Labels, [BLOCK_L] (-1: none), and their posteriors at some steps, [ROWS, BLOCK_L]."""
    j = first + tl.arange(0, BLOCK_L)
    shares = tl.load(posterior_ptr + row[:, None] + j[None, :], mask=counts[:, None] & (j < labels)[None, :], other=0.0)
    return tl.load(labels_ptr + j, mask=j < labels, other=-1), shares


@triton.jit
def softmax_at(logits_ptr, at, held, maximum, inverse, REAL: tl.constexpr):
    """The softmax of some classes from what normalises each step."""
    x = tl.load(logits_ptr + at, mask=held, other=-float("inf")).to(REAL)
    return exp_for(x - maximum[:, None], REAL) * inverse[:, None]


@triton.jit(do_not_specialize=["steps", "count", "classes", "held", "most", "chunks", "width", "blank", "stride_t", "stride_n"])
def ctc_gradient_kernel(
    grad_ptr,  # [count] fp64
    logits_ptr,  # [steps, count, classes]
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    input_lengths_ptr,  # [count]
    target_lengths_ptr,  # [count]
    maxima_ptr,  # [steps, count] or None
    sums_ptr,  # [steps, count] or None
    flags_ptr,  # [count] int64
    logz_ptr,  # [count] fp64
    posterior_ptr,  # [steps, count, width]
    blank_ptr,  # [steps, count, chunks]
    result_ptr,  # [steps, count, classes]
    steps,
    count,
    classes,
    held,
    most,
    chunks,
    width,
    blank,
    stride_t,
    stride_n,
    stride_c,
    NARROW: tl.constexpr,
    PRECISION: tl.constexpr,
    REAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Softmax less the posteriors of the classes, which are products of those of the positions with tables of 0 and 1; or minus these.

    NARROW rows are formed at once. Others are written without the posteriors, and then again where labels are, each with all equals of its class.
    """
    n = (tl.program_id(0) % count).to(tl.int64)
    t = (tl.program_id(0) // count).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    length, labels, offset, _ = sizes_of(n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held)
    logz, grad = tl.load(logz_ptr + n), tl.load(grad_ptr + n).to(REAL)
    wrong = tl.where(tl.load(flags_ptr + n) >= 2, float("nan"), 0.0).to(REAL)
    spoilt = wrong + tl.where(t < length, tl.where(logz != logz, float("nan"), 0.0), 0.0).to(REAL)  # [ROWS]
    counts = t < tl.where(logz > -float("inf"), length, 0)
    labels_ptr += offset
    row = (t * count + n) * width
    source, target = t * stride_t + n * stride_n, (t * count + n) * classes
    blanks = blanks_of(blank_ptr, t, counts, n, count, chunks, labels // (width // chunks), 16, REAL)
    total = blanks
    for first in range(0, labels, BLOCK_L):
        shares = shares_at(posterior_ptr, labels_ptr, row, counts, first, labels, BLOCK_L)[1]
        total += tl.sum(shares, axis=1)
    scale = tl.where(total > 0.0, grad / total, 0.0)
    maximum, inverse = tl.zeros([ROWS], REAL), tl.zeros([ROWS], REAL)
    if maxima_ptr is not None:
        maximum = finite_shift(tl.load(maxima_ptr + t * count + n, mask=counts, other=0.0))
        inverse = grad / tl.load(sums_ptr + t * count + n, mask=counts, other=1.0)
    for first in range(0, classes, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        inside = (t < steps)[:, None] & (v < classes)[None, :]
        value = tl.zeros([ROWS, BLOCK_V], REAL)
        if maxima_ptr is not None:
            at = source[:, None] + v.to(tl.int64)[None, :] * stride_c
            value = softmax_at(logits_ptr, at, inside & counts[:, None], maximum, inverse, REAL)
        if NARROW:
            posterior = tl.zeros([ROWS, BLOCK_V], REAL)
            for j in range(0, labels, BLOCK_L):
                label, shares = shares_at(posterior_ptr, labels_ptr, row, counts, j, labels, BLOCK_L)
                posterior = product(shares, label[:, None] == v[None, :], posterior, PRECISION)
            value -= (posterior + tl.where((v == blank)[None, :], blanks[:, None], 0.0)) * scale[:, None]
        tl.store(result_ptr + target[:, None] + v[None, :], (value + spoilt[:, None]).to(result_ptr.dtype.element_ty), mask=inside)
    if not NARROW:
        tl.debug_barrier()
        found = blanks  # and labels that are the blank
        for first in range(0, labels, BLOCK_L):
            label = shares_at(posterior_ptr, labels_ptr, row, counts, first, labels, BLOCK_L)[0]
            posterior = tl.zeros([ROWS, BLOCK_L], REAL)
            for j in range(0, labels, BLOCK_L):
                other, shares = shares_at(posterior_ptr, labels_ptr, row, counts, j, labels, BLOCK_L)
                posterior = product(shares, other[:, None] == label[None, :], posterior, PRECISION)
                if first == 0:
                    found += tl.sum(tl.where((other == blank)[None, :], shares, 0.0), axis=1)
            held_here = counts[:, None] & ((label >= 0) & (label < classes) & (label != blank))[None, :]
            value = -posterior * scale[:, None]
            if maxima_ptr is not None:
                value += softmax_at(logits_ptr, source[:, None] + label[None, :] * stride_c, held_here, maximum, inverse, REAL)
            tl.store(result_ptr + target[:, None] + label[None, :], (value + spoilt[:, None]).to(result_ptr.dtype.element_ty), mask=held_here)
        value = -found * scale
        if maxima_ptr is not None:
            x = tl.load(logits_ptr + source + blank * stride_c, mask=counts, other=-float("inf")).to(REAL)
            value += exp_for(x - maximum, REAL) * inverse
        tl.store(result_ptr + target + blank, (value + spoilt).to(result_ptr.dtype.element_ty), mask=counts)
