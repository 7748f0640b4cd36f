"""CTC's rows: what normalises each step, the loss from the middle of the scans, and the gradient from the posteriors of positions."""

import triton
import triton.language as tl

from .ctc_scan import labels_of, sizes_of
from .ctc_steps import (
    NOTHING,
    POSSIBLE,
    between,
    chosen,
    classes_of,
    factor_of,
    plus,
    power,
    running_sums,
    state,
    state_of,
    times,
    word_of,
)
from .math import exp, exp_for, finite_shift, log_of


@triton.jit(do_not_specialize=["steps", "count", "classes", "stride_t", "stride_n"])
def ctc_norm_kernel(
    logits_ptr,  # [steps, count, classes]
    input_lengths_ptr,  # [count]
    maxima_ptr,  # [steps, count] or None
    sums_ptr,  # [steps, count] or None
    table_ptr,  # [count, 24 + steps + 24, TABLE] int64, or None
    steps,
    count,
    classes,
    limit,
    stride_t,
    stride_n,
    stride_c,
    REAL: tl.constexpr,
    TABLE: tl.constexpr,
    VEC: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The maximum of each step, and the sum of the exponentials less it; and the factors of its classes, 0 in padding."""
    margin: tl.constexpr = 24 if TABLE else 0  # rows before and behind the table's steps
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, n, lane = (row // count).to(tl.int64) - margin, (row % count).to(tl.int64), tl.arange(0, BLOCK_V)
    counts = (t >= 0) & (t < steps) & (t < tl.load(input_lengths_ptr + n))
    source_ptr = logits_ptr + tl.multiple_of(t * stride_t + n * stride_n, VEC)[:, None]
    maximum, total = tl.full([ROWS], -float("inf"), REAL), tl.zeros([ROWS], REAL)
    for first in range(0, classes, PIECES * BLOCK_V):
        pieces, higher = (), maximum
        for i in tl.static_range(PIECES):
            v = first + i * BLOCK_V + lane
            x = tl.load(source_ptr + v.to(tl.int64)[None, :] * stride_c, mask=counts[:, None] & (v // VEC * VEC < classes)[None, :], other=-float("inf")).to(REAL)
            pieces = pieces + (x,)
        if maxima_ptr is not None:
            for i in tl.static_range(PIECES):
                higher = tl.maximum(higher, tl.max(pieces[i], axis=1))
            shift = finite_shift(higher)
            total = total * exp(maximum - shift)
            for i in tl.static_range(PIECES):
                total += tl.sum(exp_for(pieces[i] - shift[:, None], REAL), axis=1)
            maximum = higher
        if TABLE:
            factor = factor_of(pieces[0], limit)
            at = tl.multiple_of((n * (steps + 2 * margin) + t + margin) * TABLE, 8)[:, None] + lane[None, :]
            tl.store(table_ptr + at, word_of(factor, False), mask=(t < steps + margin)[:, None] & (lane < TABLE)[None, :])
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
def states_at(ptr, held, WIDE: tl.constexpr):
    """States in memory; 0 where none is held."""
    return chosen(held, state_of(tl.load(ptr, mask=held, other=0), WIDE), state(0, held.to(tl.int32), WIDE), WIDE)


@triton.jit
def product_of(a, b, WIDE: tl.constexpr):
    """The product of a sum of states and a state."""
    if WIDE:
        return (a[0] + b[0],)
    else:
        return times(a, (b[0], tl.maximum(b[1], NOTHING) - 127), WIDE)


@triton.jit
def total_of(alpha_ptr, beta_ptr, labels_ptr, labels, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """log2 of the sum over all ways from α before a step to β behind it."""
    lane = tl.arange(0, BLOCK)
    total = state(0, lane, WIDE)
    for first in range(0, labels + 1, BLOCK):
        i = first + lane
        at, before = i // 32 * 64 + i % 32, (i - 1) // 32 * 64 + (i - 1) % 32 + 32
        label = tl.load(labels_ptr + i, mask=i < labels, other=-1)
        skip = (i > 0) & (i < labels) & (label != tl.load(labels_ptr + i - 1, mask=(i > 0) & (i < labels), other=-1))
        blank, into_label = states_at(alpha_ptr + at, i <= labels, WIDE), states_at(alpha_ptr + at + 32, i < labels, WIDE)
        into_blank = plus(blank, states_at(alpha_ptr + before, (i > 0) & (i <= labels), WIDE), WIDE)
        into_label = plus(into_label, chosen(skip, into_blank, blank, WIDE), WIDE)
        through_blank = product_of(into_blank, states_at(beta_ptr + at, i <= labels, WIDE), WIDE)
        through_label = product_of(into_label, states_at(beta_ptr + at + 32, i < labels, WIDE), WIDE)
        total = product_of(plus(total, plus(through_blank, through_label, WIDE), WIDE), state(1, lane, WIDE), WIDE)
    if WIDE:
        most = finite_shift(tl.max(total[0], axis=0))
        return most + tl.log2(tl.sum(tl.exp2(total[0] - most), axis=0))
    else:
        most = tl.max(total[1], axis=0)
        summed = tl.sum((total[0] * power(total[1] - most)).to(tl.float64), axis=0)
        return tl.where(most > POSSIBLE, most.to(tl.float64) + tl.log2(summed), -float("inf"))


@triton.jit
def norm_of(maxima_ptr, sums_ptr, n, count, length, BLOCK: tl.constexpr):
    """What normalises a sequence's steps, together."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, length, BLOCK):
        t = first + tl.arange(0, BLOCK)
        at = t.to(tl.int64) * count + n
        maximum, summed = tl.load(maxima_ptr + at, mask=t < length, other=0.0), tl.load(sums_ptr + at, mask=t < length, other=1.0)
        total += maximum.to(tl.float64) + log_of(summed).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit(do_not_specialize=["steps", "count", "held", "most", "chunks", "blocks"])
def ctc_total_kernel(
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    input_lengths_ptr,  # [count]
    target_lengths_ptr,  # [count]
    kept_ptr,  # [2, blocks + 1, count, chunks, 2, 32] int64
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
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WIDE: tl.constexpr,
    ALL: tl.constexpr,
):
    """log2 of the sum over the alignments from α and β at the middle, and the loss: what normalises the steps, less it."""
    n = tl.program_id(0).to(tl.int64)
    flags = tl.load(flags_ptr + n)
    length, labels, offset, wrong = sizes_of(n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held)
    alpha_ptr = kept_ptr + (blocks.to(tl.int64) * count + n) * chunks * 64
    beta_ptr = alpha_ptr + (blocks.to(tl.int64) + 1) * count * chunks * 64
    if (flags >= 0) if ALL or not WIDE else (flags == 1):
        logz = total_of(alpha_ptr, beta_ptr, labels_ptr + offset, labels, BLOCK_L, WIDE)
        logz = tl.where(length > 0, logz, tl.where(labels == 0, 0.0, -float("inf")))
        loss = 0.0 - logz * 0.6931471805599453
        if maxima_ptr is not None:
            loss += norm_of(maxima_ptr, sums_ptr, n, count, length, BLOCK_T)
        tl.store(logz_ptr + n, tl.where(loss == loss, logz, loss))
        tl.store(loss_ptr + n, tl.where(flags >= 2, float("nan"), loss))


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


GRADIENT_SIZES = ["steps", "count", "classes", "held", "most", "chunks", "blank", "stride_t", "stride_n"]


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
    posterior_ptr,  # [count, chunks, steps, WIDTH]
    blanks_ptr,  # [count, chunks, steps]
    result_ptr,  # [steps, count, classes]
    steps,
    count,
    classes,
    held,
    most,
    chunks,
    blank,
    stride_t,
    stride_n,
    stride_c,
    REAL: tl.constexpr,
    WIDTH: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Softmax less the posteriors of the classes, or minus these: the chunks' together."""
    n = (tl.program_id(0) % count).to(tl.int64)
    t = (tl.program_id(0) // count).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    labels, offset, grad, counts, spoilt = row_state(
        n, t, steps, most, held, grad_ptr, offsets_ptr, input_lengths_ptr, target_lengths_ptr, flags_ptr, logz_ptr, REAL
    )
    row, v = t * count + n, tl.arange(0, BLOCK_V)
    blanks, posterior = tl.zeros([ROWS], REAL), tl.zeros([ROWS, BLOCK_V], REAL)
    for c in range(0, labels // 32 + 1):
        at = (n * chunks + c) * steps + t
        posterior += tl.load(posterior_ptr + (at * WIDTH)[:, None] + v[None, :], mask=counts[:, None] & (v // VEC * VEC < classes)[None, :], other=0.0)
        blanks += tl.load(blanks_ptr + at, mask=counts, other=0.0)
    total = tl.sum(posterior, axis=1) + blanks
    posterior += tl.where((v == blank)[None, :], blanks[:, None], 0.0)
    inside = (t < steps)[:, None] & (v // VEC * VEC < classes)[None, :]
    value = -posterior * tl.where(total > 0.0, grad / total, 0.0)[:, None] + spoilt[:, None]
    if maxima_ptr is not None:
        maximum, scale = norms_of(maxima_ptr, sums_ptr, row, counts, grad, REAL)
        at = tl.multiple_of(t * stride_t + n * stride_n, VEC)[:, None] + v.to(tl.int64)[None, :] * stride_c
        value += softmax_at(logits_ptr, at, inside & counts[:, None], maximum[:, None], scale[:, None], REAL)
    tl.store(result_ptr + tl.multiple_of(row * classes, VEC)[:, None] + v[None, :], value.to(result_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["steps", "count", "classes", "held", "most", "stride_t", "stride_n"])
def ctc_softmax_kernel(
    grad_ptr,  # [count] fp64
    logits_ptr,  # [steps, count, classes]
    offsets_ptr,  # [count]
    input_lengths_ptr,  # [count]
    target_lengths_ptr,  # [count]
    maxima_ptr,  # [steps, count] or None
    sums_ptr,  # [steps, count] or None
    flags_ptr,  # [count] int64
    logz_ptr,  # [count] fp64
    result_ptr,  # [steps, count, classes]
    steps,
    count,
    classes,
    held,
    most,
    stride_t,
    stride_n,
    stride_c,
    REAL: tl.constexpr,
    VEC: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The gradient of a step without posteriors: the softmax, or 0."""
    n, step = (tl.program_id(0) % count).to(tl.int64), (tl.program_id(0) // count).to(tl.int64)
    t = step + tl.zeros([1], tl.int64)
    labels, offset, grad, counts, spoilt = row_state(
        n, t, steps, most, held, grad_ptr, offsets_ptr, input_lengths_ptr, target_lengths_ptr, flags_ptr, logz_ptr, REAL
    )
    maximum, scale = norms_of(maxima_ptr, sums_ptr, t * count + n, counts, grad, REAL)
    logits_ptr += tl.multiple_of(step * stride_t + n * stride_n, VEC)
    result_ptr += tl.multiple_of((step * count + n) * classes, VEC)
    for first in range(0, classes, PIECES * BLOCK_V):
        pieces = ()
        for i in tl.static_range(PIECES):
            v = first + i * BLOCK_V + tl.arange(0, BLOCK_V)
            value = tl.zeros([BLOCK_V], REAL) + spoilt
            if maxima_ptr is not None:
                value += softmax_at(logits_ptr, v.to(tl.int64) * stride_c, (v // VEC * VEC < classes) & counts, maximum, scale, REAL)
            pieces = pieces + (value,)
        for i in tl.static_range(PIECES):
            v = first + i * BLOCK_V + tl.arange(0, BLOCK_V)
            tl.store(result_ptr + v, pieces[i].to(result_ptr.dtype.element_ty), mask=v // VEC * VEC < classes)


@triton.jit
def place_in_chunks(j, pitch):
    """Where a label's posterior stands, of the chunks of 32."""
    return (j // 32).to(tl.int64) * pitch + j % 32


@triton.jit
def summed_of_class(posterior_ptr, pitch, next_ptr, j, labels, counts):
    """For labels that stand at j for the first time, the posteriors of all their places, [ROWS, BLOCK_L]; and which these are."""
    behind = tl.load(next_ptr + j, mask=j < labels, other=-2)
    first = (behind & 1) == 1
    at, total = tl.where(first, j, -1), tl.zeros([posterior_ptr.shape[0], j.shape[0]], posterior_ptr.dtype.element_ty)
    while tl.max(at, axis=0) >= 0:
        total += tl.load(posterior_ptr[:, None] + place_in_chunks(at, pitch)[None, :], mask=counts[:, None] & (at >= 0)[None, :], other=0.0)
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
    posterior_ptr,  # [count, chunks, steps, 32]
    blanks_ptr,  # [count, chunks, steps]
    next_ptr,  # [count, most] int32
    result_ptr,  # [steps, count, classes]
    steps,
    count,
    classes,
    held,
    most,
    chunks,
    blank,
    stride_t,
    stride_n,
    stride_c,
    REAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """The gradient of some steps where labels are, and the blank: each from all places of its class."""
    n = (tl.program_id(0) % count).to(tl.int64)
    t = (tl.program_id(0) // count).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    labels, offset, grad, counts, spoilt = row_state(
        n, t, steps, most, held, grad_ptr, offsets_ptr, input_lengths_ptr, target_lengths_ptr, flags_ptr, logz_ptr, REAL
    )
    row, pitch = t * count + n, steps.to(tl.int64) * 32
    maximum, scale = norms_of(maxima_ptr, sums_ptr, row, counts, grad, REAL)
    source_ptr, target_ptr = logits_ptr + t * stride_t + n * stride_n, result_ptr + row * classes
    share_ptr, total = posterior_ptr + (n * chunks * steps + t) * 32, tl.zeros([ROWS], REAL)
    for c in range(0, labels // 32 + 1):
        total += tl.load(blanks_ptr + (n * chunks + c) * steps + t, mask=counts, other=0.0)
    found = total  # of the blank, which may stand in a target too
    for first in range(0, labels, BLOCK_L):
        j = first + tl.arange(0, BLOCK_L)
        share = tl.load(share_ptr[:, None] + place_in_chunks(j, pitch)[None, :], mask=counts[:, None] & (j < labels)[None, :], other=0.0)
        label = tl.load(labels_ptr + offset + j, mask=j < labels, other=-1)
        total += tl.sum(share, axis=1)
        found += tl.sum(tl.where((label == blank)[None, :], share, 0.0), axis=1)
    inverse = tl.where(total > 0.0, grad / total, 0.0)
    for first in range(0, labels, BLOCK_L):
        j = first + tl.arange(0, BLOCK_L)
        label = tl.load(labels_ptr + offset + j, mask=j < labels, other=-1)
        posterior, leads = summed_of_class(share_ptr, pitch, next_ptr + n * most, j, labels, counts)
        leads = counts[:, None] & (leads & (label >= 0) & (label < classes) & (label != blank))[None, :]
        value = spoilt[:, None] - posterior * inverse[:, None]
        if maxima_ptr is not None:
            value += softmax_at(source_ptr[:, None], (label * stride_c)[None, :], leads, maximum[:, None], scale[:, None], REAL)
        tl.store(target_ptr[:, None] + label[None, :], value.to(result_ptr.dtype.element_ty), mask=leads)
    value = spoilt - found * inverse
    if maxima_ptr is not None:
        value += softmax_at(source_ptr, blank * stride_c, counts, maximum, scale, REAL)
    tl.store(target_ptr + blank, value.to(result_ptr.dtype.element_ty), mask=counts)


@triton.jit(do_not_specialize=["count", "classes", "held", "most", "chunks"])
def ctc_order_kernel(
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    target_lengths_ptr,  # [count]
    order_ptr,  # [count, chunks, 1 + 2 * GROUPS, 32] int32
    count,
    classes,
    held,
    most,
    chunks,
    GROUPS: tl.constexpr,
):
    """The labels of a chunk sorted by class: their places in that order, and where each class begins and ends in it."""
    n, chunk, lane = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks, tl.arange(0, 32)
    labels, offset = tl.load(target_lengths_ptr + n), tl.load(offsets_ptr + n)
    labels = tl.where((labels < 0) | (labels > most) | (offset < 0) | (offset + labels > held), 0, labels).to(tl.int32)
    label, has, skips, bad = labels_of(labels_ptr + offset, chunk * 32, labels, classes, lane)
    order, bounds = classes_of(label.to(tl.int32), has, lane, GROUPS)
    order_ptr += tl.program_id(0).to(tl.int64) * ((1 + 2 * GROUPS) * 32) + lane
    tl.store(order_ptr, order)
    for g in tl.static_range(GROUPS):
        tl.store(order_ptr + (1 + 2 * g) * 32, bounds[g][0])
        tl.store(order_ptr + (2 + 2 * g) * 32, bounds[g][1])


@triton.jit
def sums_by_class(posterior_ptr, blanks_ptr, order_ptr, chunk_ends, pitch, left, lane, ROWS: tl.constexpr, GROUPS: tl.constexpr, REAL: tl.constexpr):
    """Posteriors of some steps over the chunks: by class, [32] for each group of each step; of all labels, [32] for each step; and blanks, a step a lane."""
    sums, totals, blanks = (), (), lane.to(REAL) * 0.0
    for i in tl.static_range(ROWS * GROUPS):
        sums = sums + (lane.to(REAL) * 0.0,)
    for u in tl.static_range(ROWS):
        totals = totals + (lane.to(REAL) * 0.0,)
    for c in range(0, chunk_ends):
        order, shares = tl.load(order_ptr), ()
        for u in tl.static_range(ROWS):
            shares = shares + (tl.load(posterior_ptr + u * 32 + order, mask=(order >= 0) & (u < left), other=0.0),)
        running, more, all_ = running_sums(shares, lane), (), ()
        for u in tl.static_range(ROWS):
            all_ = all_ + (totals[u] + tl.gather(running[u], lane * 0 + 31, 0),)
            for g in tl.static_range(GROUPS):
                begin, end = tl.load(order_ptr + (1 + 2 * g) * 32), tl.load(order_ptr + (2 + 2 * g) * 32)
                more = more + (sums[u * GROUPS + g] + between(running[u], begin, end),)
        sums, totals = more, all_
        blanks += tl.load(blanks_ptr + lane, mask=(lane < ROWS) & (lane < left), other=0.0)
        posterior_ptr += pitch * 32
        blanks_ptr += pitch
        order_ptr += (1 + 2 * GROUPS) * 32
    return sums, totals, blanks


@triton.jit(do_not_specialize=GRADIENT_SIZES)
def ctc_lane_gradient_kernel(
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
    posterior_ptr,  # [count, chunks, steps, 32]
    blanks_ptr,  # [count, chunks, steps]
    order_ptr,  # [count, chunks, 1 + 2 * GROUPS, 32] int32
    result_ptr,  # [steps, count, classes]
    steps,
    count,
    classes,
    held,
    most,
    chunks,
    blank,
    stride_t,
    stride_n,
    stride_c,
    REAL: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Softmax less the posteriors of the classes, or minus these, from posteriors by label: one warp, a class a lane."""
    n, first, lane = (tl.program_id(0) % count).to(tl.int64), (tl.program_id(0) // count).to(tl.int64) * ROWS, tl.arange(0, 32)
    t = first + lane
    labels, offset, grad, counts, spoilt = row_state(
        n, t, steps, most, held, grad_ptr, offsets_ptr, input_lengths_ptr, target_lengths_ptr, flags_ptr, logz_ptr, REAL
    )
    left = tl.sum((counts & (lane < ROWS)).to(tl.int32), axis=0)
    sums, totals, blanks = sums_by_class(
        posterior_ptr + (n * chunks * steps + first) * 32, blanks_ptr + n * chunks * steps + first, order_ptr + n * chunks * ((1 + 2 * GROUPS) * 32) + lane,
        labels // 32 + 1, steps.to(tl.int64), left, lane, ROWS, GROUPS, REAL,
    )  # fmt: skip
    maximum, scale = norms_of(maxima_ptr, sums_ptr, t * count + n, counts & (lane < ROWS), grad, REAL)
    for u in tl.static_range(ROWS):
        own_blank = tl.gather(blanks, lane * 0 + u, 0)
        total = totals[u] + own_blank
        inverse = tl.where(total > 0.0, grad / total, 0.0)
        for g in tl.static_range(GROUPS):
            v = g * 32 + lane
            posterior = sums[u * GROUPS + g] + tl.where(v == blank, own_blank, 0.0)
            value = tl.gather(spoilt, lane * 0 + u, 0) - posterior * inverse
            if maxima_ptr is not None:
                at = (first + u) * stride_t + n * stride_n + v.to(tl.int64) * stride_c
                high, part = tl.gather(maximum, lane * 0 + u, 0), tl.gather(scale, lane * 0 + u, 0)
                value += softmax_at(logits_ptr, at, (v < classes) & (u < left), high, part, REAL)
            tl.store(result_ptr + ((first + u) * count + n) * classes + v, value.to(result_ptr.dtype.element_ty), mask=(v < classes) & (first + u < steps))
