"""CTC's rows: what normalises each step, the loss from the middle of the scans, and the gradient from the posteriors of positions."""

import triton
import triton.language as tl

from .ctc_scan import SIZES, sizes_of
from .ctc_steps import factor_of, log2_of, word_of
from .math import exp, exp_for, finite_shift


@triton.jit(do_not_specialize=["steps", "count", "classes", "blank", "stride_t", "stride_n"])
def ctc_norm_kernel(
    logits_ptr,  # [steps, count, classes]
    input_lengths_ptr,  # [count]
    maxima_ptr,  # [steps, count] or None
    sums_ptr,  # [steps, count] or None
    table_ptr,  # [count, 16 + steps + 16, TABLE] int64, or None
    steps,
    count,
    classes,
    blank,
    limit,
    stride_t,
    stride_n,
    stride_c,
    REAL: tl.constexpr,
    TABLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The maximum of each step, and the sum of the exponentials less it; and the factors of its classes, of one that is impossible, and of padding."""
    margin: tl.constexpr = 16 if TABLE else 0  # rows before and behind the table's steps
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, n, lane = (row // count).to(tl.int64) - margin, (row % count).to(tl.int64), tl.arange(0, BLOCK_V)
    counts = (t >= 0) & (t < steps) & (t < tl.load(input_lengths_ptr + n))
    source_ptr = logits_ptr + (t * stride_t + n * stride_n)[:, None]
    maximum, total = tl.full([ROWS], -float("inf"), REAL), tl.zeros([ROWS], REAL)
    for first in range(0, classes, BLOCK_V):
        v = first + lane
        x = tl.load(source_ptr + v.to(tl.int64)[None, :] * stride_c, mask=counts[:, None] & (v < classes)[None, :], other=-float("inf")).to(REAL)
        if maxima_ptr is not None:
            higher = tl.maximum(maximum, tl.max(x, axis=1))
            shift = finite_shift(higher)
            total = total * exp(maximum - shift) + tl.sum(exp_for(x - shift[:, None], REAL), axis=1)
            maximum = higher
        if TABLE:
            padding = tl.where(v == blank, 0.0, -float("inf")).to(REAL)
            factor = factor_of(tl.where(counts[:, None], x, padding[None, :]), limit)
            at = (n * (steps + 2 * margin) + t + margin)[:, None] * TABLE + v[None, :]
            tl.store(table_ptr + at, word_of(factor, False), mask=(t < steps + margin)[:, None] & (v < TABLE)[None, :])
    if maxima_ptr is not None:
        tl.store(maxima_ptr + t * count + n, maximum, mask=counts)
        tl.store(sums_ptr + t * count + n, total, mask=counts)


@triton.jit(do_not_specialize=["held", "most"])
def ctc_next_kernel(
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    target_lengths_ptr,  # [count]
    next_ptr,  # [count, most] int32
    held,
    most,
    BLOCK: tl.constexpr,
):
    """Where each label stands next in its target, doubled, with 1 added where it stands there for the first time; -2 for nowhere."""
    blocks = tl.cdiv(most, BLOCK)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    labels, offset = tl.load(target_lengths_ptr + n), tl.load(offsets_ptr + n)
    labels = tl.where((labels < 0) | (labels > most) | (offset < 0) | (offset + labels > held), 0, labels).to(tl.int32)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + offset + j, mask=j < labels, other=-1)
    behind, first = tl.full([BLOCK], 2147483647, tl.int32), tl.full([BLOCK], 1, tl.int32)
    for start in range(0, labels, BLOCK):
        i = start + tl.arange(0, BLOCK)
        other = tl.load(labels_ptr + offset + i, mask=i < labels, other=-2)
        same = label[:, None] == other[None, :]
        behind = tl.minimum(behind, tl.min(tl.where(same & (i[None, :] > j[:, None]), i[None, :], 2147483647), axis=1))
        first = tl.minimum(first, tl.min(tl.where(same & (i[None, :] < j[:, None]), 0, 1), axis=1))
    tl.store(next_ptr + n * most + j, tl.where(behind < 2147483647, behind * 2, -2) + first, mask=j < labels)


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
        loss = 0.0 - logz * 0.6931471805599453
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
def blanks_of(blank_ptr, counts, last, BLOCK_L: tl.constexpr, REAL: tl.constexpr):
    """The posterior of the blank at each step, over the chunks."""
    total = tl.zeros(counts.shape, REAL)
    for first in range(0, last + 1, BLOCK_L):
        c = first + tl.arange(0, BLOCK_L)
        total += tl.sum(tl.load(blank_ptr[:, None] + c[None, :], mask=counts[:, None] & (c <= last)[None, :], other=0.0), axis=1)
    return total


@triton.jit
def row_state(n, t, steps, most, held, grad_ptr, offsets_ptr, input_lengths_ptr, target_lengths_ptr, flags_ptr, logz_ptr, REAL: tl.constexpr):
    """Labels of a sequence and where they start, its gradient, which steps have posteriors, and NaN where there is no right answer."""
    length, labels, offset, wrong = sizes_of(n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held)
    logz = tl.load(logz_ptr + n)
    spoilt = tl.where(tl.load(flags_ptr + n) >= 2, float("nan"), tl.where(t < length, tl.where(logz != logz, float("nan"), 0.0), 0.0))
    return labels, offset, tl.load(grad_ptr + n).to(REAL), t < tl.where(logz > -float("inf"), length, 0), spoilt.to(REAL)


@triton.jit
def norms_of(maxima_ptr, sums_ptr, row, counts, grad, REAL: tl.constexpr):
    """What normalises steps: the maximum, and the gradient over the sum of exponentials."""
    if maxima_ptr is None:
        return tl.zeros(row.shape, REAL), tl.zeros(row.shape, REAL)
    else:
        maximum = finite_shift(tl.load(maxima_ptr + row, mask=counts, other=0.0))
        return maximum, tl.where(counts, grad / tl.load(sums_ptr + row, mask=counts, other=1.0), 0.0)


@triton.jit
def softmax_at(logits_ptr, at, held, maximum, scale, REAL: tl.constexpr):
    """The softmax of some classes times a scale, from what normalises it."""
    return exp_for(tl.load(logits_ptr + at, mask=held, other=-float("inf")).to(REAL) - maximum, REAL) * scale


GRADIENT_SIZES = ["steps", "count", "classes", "held", "most", "chunks", "width", "blank", "stride_t", "stride_n"]


@triton.jit(do_not_specialize=GRADIENT_SIZES)
def ctc_narrow_gradient_kernel(
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
    PRECISION: tl.constexpr,
    REAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Softmax less the posteriors of the classes, or minus these: the product of those of the positions with a table of 0 and 1."""
    n = (tl.program_id(0) % count).to(tl.int64)
    t = (tl.program_id(0) // count).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    labels, offset, grad, counts, spoilt = row_state(
        n, t, steps, most, held, grad_ptr, offsets_ptr, input_lengths_ptr, target_lengths_ptr, flags_ptr, logz_ptr, REAL
    )
    row, v = t * count + n, tl.arange(0, BLOCK_V)
    blanks = blanks_of(blank_ptr + row * chunks, counts, labels // (width // chunks), 16, REAL)
    total, posterior = blanks, tl.zeros([ROWS, BLOCK_V], REAL)
    for first in range(0, labels, BLOCK_L):
        j = first + tl.arange(0, BLOCK_L)
        label = tl.load(labels_ptr + offset + j, mask=j < labels, other=-1)
        shares = tl.load(posterior_ptr + (row * width)[:, None] + j[None, :], mask=counts[:, None] & (j < labels)[None, :], other=0.0)
        total += tl.sum(shares, axis=1)
        posterior = product(shares, label[:, None] == v[None, :], posterior, PRECISION)
    posterior += tl.where((v == blank)[None, :], blanks[:, None], 0.0)
    inside = (t < steps)[:, None] & (v < classes)[None, :]
    value = -posterior * tl.where(total > 0.0, grad / total, 0.0)[:, None] + spoilt[:, None]
    if maxima_ptr is not None:
        maximum, scale = norms_of(maxima_ptr, sums_ptr, row, counts, grad, REAL)
        at = (t * stride_t + n * stride_n)[:, None] + v.to(tl.int64)[None, :] * stride_c
        value += softmax_at(logits_ptr, at, inside & counts[:, None], maximum[:, None], scale[:, None], REAL)
    tl.store(result_ptr + (row * classes)[:, None] + v[None, :], value.to(result_ptr.dtype.element_ty), mask=inside)


@triton.jit
def summed_of_class(posterior_ptr, next_ptr, j, labels, BLOCK_L: tl.constexpr):
    """For labels that stand at j for the first time, the posteriors of all their places; and which these are."""
    behind = tl.load(next_ptr + j, mask=j < labels, other=-2)
    first, total = (behind & 1) == 1, tl.load(posterior_ptr + j, mask=j < labels, other=0.0)
    at = tl.where(first, behind >> 1, -1)
    while tl.max(at, axis=0) >= 0:
        total += tl.load(posterior_ptr + at, mask=at >= 0, other=0.0)
        at = tl.load(next_ptr + at, mask=at >= 0, other=-2) >> 1
    return total, first


@triton.jit(do_not_specialize=GRADIENT_SIZES)
def ctc_wide_gradient_kernel(
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
    next_ptr,  # [count, most] int32
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
    REAL: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """The same for one step, written without the posteriors, and then again where labels are, each from all places of its class."""
    n, step = (tl.program_id(0) % count).to(tl.int64), (tl.program_id(0) // count).to(tl.int64)
    t = step + tl.zeros([1], tl.int64)
    labels, offset, grad, counts, spoilt = row_state(
        n, t, steps, most, held, grad_ptr, offsets_ptr, input_lengths_ptr, target_lengths_ptr, flags_ptr, logz_ptr, REAL
    )
    row = step * count + n
    maximum, scale = norms_of(maxima_ptr, sums_ptr, row + t * 0, counts, grad, REAL)
    logits_ptr += step * stride_t + n * stride_n
    result_ptr += row * classes
    posterior_ptr += row * width
    labels = tl.where(tl.max(counts.to(tl.int32), axis=0) > 0, labels, 0)
    blanks = blanks_of(blank_ptr + (row + t * 0) * chunks, counts, labels // (width // chunks), 16, REAL)
    total, found = blanks, blanks  # of all, and of the blank, which may stand in a target too
    for first in range(0, labels, BLOCK_L):
        j = first + tl.arange(0, BLOCK_L)
        share = tl.load(posterior_ptr + j, mask=j < labels, other=0.0)
        label = tl.load(labels_ptr + offset + j, mask=j < labels, other=-1)
        total += tl.sum(share, axis=0)
        found += tl.sum(tl.where(label == blank, share, 0.0), axis=0)
    inverse = tl.where(total > 0.0, grad / total, 0.0)
    for first in range(0, classes, BLOCK_V):
        v = first + tl.arange(0, BLOCK_V)
        value = tl.zeros([BLOCK_V], REAL) + spoilt
        if maxima_ptr is not None:
            value += softmax_at(logits_ptr, v.to(tl.int64) * stride_c, (v < classes) & counts, maximum, scale, REAL)
        value -= tl.where(v == blank, found * inverse, 0.0)
        tl.store(result_ptr + v, value.to(result_ptr.dtype.element_ty), mask=v < classes)
    tl.debug_barrier()
    for first in range(0, labels, BLOCK_L):
        j = first + tl.arange(0, BLOCK_L)
        label = tl.load(labels_ptr + offset + j, mask=j < labels, other=-1)
        posterior, leads = summed_of_class(posterior_ptr, next_ptr + n * most, j, labels, BLOCK_L)
        leads = leads & (label >= 0) & (label < classes) & (label != blank)
        value = spoilt - posterior * inverse
        if maxima_ptr is not None:
            value += softmax_at(logits_ptr, label * stride_c, leads, maximum, scale, REAL)
        tl.store(result_ptr + label, value.to(result_ptr.dtype.element_ty), mask=leads)
