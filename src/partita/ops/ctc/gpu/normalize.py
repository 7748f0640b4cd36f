"""What CTC's scans need and leave beside them: what normalises each step, the loss, and where the labels of a class stand."""

import triton
import triton.language as tl

from ....primitives.gpu.math import LN2, exp, exp_for_dtype, finite_shift, log_exact
from .state import (
    NOTHING,
    POSSIBLE,
    chosen,
    classes_of,
    factor_of,
    plus,
    power,
    state,
    state_of,
    times,
    word_of,
)
from .steps import labels_of, sizes_of, target_of


@triton.jit
def fill_share(zeros_ptr, words, BLOCK: tl.constexpr):
    """This program's share of zeros for a scan to come: a fill of their own would take a launch."""
    share = tl.cdiv(words, tl.num_programs(0))
    for first in range(
        tl.program_id(0).to(tl.int64) * share,
        tl.minimum((tl.program_id(0) + 1).to(tl.int64) * share, words),
        BLOCK,
    ):
        word = first + tl.arange(0, BLOCK)
        tl.store(zeros_ptr + word, tl.zeros([BLOCK], tl.int64), mask=word < words)


@triton.jit(do_not_specialize=["words", "steps", "count", "classes", "stride_t", "stride_n"])
def ctc_norm_kernel(
    logits_ptr,  # [steps, count, classes]
    input_lengths_ptr,  # [count]
    maxima_ptr,  # [steps, count] or None
    sums_ptr,  # [steps, count] or None
    table_ptr,  # [count, 24 + steps + 24, TABLE] int64, or None
    zeros_ptr,  # [words] int64, or None
    words,
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
    """The maximum of each step, and the sum of the exponentials less it; the factors of its classes, 0 in padding; and zeros for the scan to come."""
    if zeros_ptr is not None:
        fill_share(zeros_ptr, words, 512)
    margin: tl.constexpr = 24 if TABLE else 0  # rows before and behind the table's steps
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    t, n, lane = (
        (row // count).to(tl.int64) - margin,
        (row % count).to(tl.int64),
        tl.arange(0, BLOCK_V),
    )
    counts = (t >= 0) & (t < steps) & (t < tl.load(input_lengths_ptr + n))
    source_ptr = logits_ptr + tl.multiple_of(t * stride_t + n * stride_n, VEC)[:, None]
    maximum, total = tl.full([ROWS], -float("inf"), REAL), tl.zeros([ROWS], REAL)
    for first in range(0, classes, PIECES * BLOCK_V):
        pieces, higher = (), maximum
        for i in tl.static_range(PIECES):
            v = first + i * BLOCK_V + lane
            inside = counts[:, None] & (v // VEC * VEC < classes)[None, :]
            x = tl.load(
                source_ptr + v.to(tl.int64)[None, :] * stride_c, mask=inside, other=-float("inf")
            )
            pieces = pieces + (x.to(REAL),)
        if maxima_ptr is not None:
            for i in tl.static_range(PIECES):
                higher = tl.maximum(higher, tl.max(pieces[i], axis=1))
            shift = finite_shift(higher)
            total = total * exp(maximum - shift)
            for i in tl.static_range(PIECES):
                total += tl.sum(exp_for_dtype(pieces[i] - shift[:, None], REAL), axis=1)
            maximum = higher
        if TABLE:
            factor = factor_of(pieces[0], limit)  # type: ignore[misc]
            at = (
                tl.multiple_of((n * (steps + 2 * margin) + t + margin) * TABLE, 8)[:, None]
                + lane[None, :]
            )
            tl.store(
                table_ptr + at,
                word_of(factor, False),
                mask=(t < steps + margin)[:, None] & (lane < TABLE)[None, :],
            )
    if maxima_ptr is not None:
        tl.store(maxima_ptr + t * count + n, maximum, mask=counts)
        tl.store(sums_ptr + t * count + n, total, mask=counts)


@triton.jit(do_not_specialize=["held", "most", "classes", "blank"])
def ctc_next_kernel(
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    target_lengths_ptr,  # [count]
    slots_ptr,  # [count, classes] int32, -1
    again_ptr,  # [count] int32, -1
    next_ptr,  # [count, most] int32
    held,
    most,
    classes,
    blank,
    BLOCK: tl.constexpr,
):
    """For each class but the blank where it stands first in a target, how often one stands there again at most, and where each label stands next, or -1."""
    blocks = tl.cdiv(most, BLOCK)
    n = (tl.program_id(0) // blocks).to(tl.int64)
    labels, offset, wrong = target_of(n, target_lengths_ptr, offsets_ptr, most, held)
    labels = tl.where(wrong, 0, labels).to(tl.int32)
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + offset + j, mask=j < labels, other=-1)
    behind, before = tl.full([BLOCK], 2147483647, tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, labels, BLOCK):
        i = start + tl.arange(0, BLOCK)
        other = tl.load(labels_ptr + offset + i, mask=i < labels, other=-2)
        same = label[:, None] == other[None, :]
        behind = tl.minimum(
            behind,
            tl.min(tl.where(same & (i[None, :] > j[:, None]), i[None, :], 2147483647), axis=1),
        )
        before += tl.sum((same & (i[None, :] < j[:, None])).to(tl.int32), axis=1)
    stands = (j < labels) & (label >= 0) & (label < classes) & (label != blank)
    tl.store(next_ptr + n * most + j, tl.where(behind < 2147483647, behind, -1), mask=j < labels)
    tl.store(slots_ptr + n * classes + label, j, mask=stands & (before == 0))
    tl.atomic_max(
        again_ptr + n, tl.max(tl.where(stands, before, -1), axis=0)
    )  # of integers: in any order the same


@triton.jit
def states_at(ptr, held, WIDE: tl.constexpr):
    """States in memory; 0 where none is held."""
    return chosen(
        held,
        state_of(tl.load(ptr, mask=held, other=0), WIDE),
        state(0, held.to(tl.int32), WIDE),
        WIDE,
    )


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
        skip = (
            (i > 0)
            & (i < labels)
            & (label != tl.load(labels_ptr + i - 1, mask=(i > 0) & (i < labels), other=-1))
        )
        blank, into_label = (
            states_at(alpha_ptr + at, i <= labels, WIDE),
            states_at(alpha_ptr + at + 32, i < labels, WIDE),
        )
        into_blank = plus(blank, states_at(alpha_ptr + before, (i > 0) & (i <= labels), WIDE), WIDE)
        into_label = plus(into_label, chosen(skip, into_blank, blank, WIDE), WIDE)
        through_blank = product_of(into_blank, states_at(beta_ptr + at, i <= labels, WIDE), WIDE)
        through_label = product_of(
            into_label, states_at(beta_ptr + at + 32, i < labels, WIDE), WIDE
        )
        total = product_of(
            plus(total, plus(through_blank, through_label, WIDE), WIDE), state(1, lane, WIDE), WIDE
        )
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
        maximum, summed = (
            tl.load(maxima_ptr + at, mask=t < length, other=0.0),
            tl.load(sums_ptr + at, mask=t < length, other=1.0),
        )
        total += maximum.to(tl.float64) + log_exact(summed).to(tl.float64)
    return tl.sum(total, axis=0)


@triton.jit
def counted(loss, ZERO: tl.constexpr):
    """Infinite losses count as 0 where that is asked for."""
    if ZERO:
        loss = tl.where(loss == float("inf"), 0.0, loss)
    return loss


@triton.jit
def reduced(
    losses_ptr,
    target_lengths_ptr,
    count,
    MEAN: tl.constexpr,
    ZERO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of what all programs left, or the mean of loss / target length."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, count, BLOCK):
        n = first + tl.arange(0, BLOCK)
        loss = counted(tl.load(losses_ptr + n, mask=n < count, other=0.0, volatile=True), ZERO)
        if MEAN:
            loss /= tl.maximum(tl.load(target_lengths_ptr + n, mask=n < count, other=1), 1).to(
                tl.float64
            )
        total += loss
    return tl.sum(total, axis=0) / (count.to(tl.float64) if MEAN else 1.0)


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
    losses_ptr,  # [count] fp64
    value_ptr,  # [count], or their sum or mean []; None where what normalises the steps is not there yet
    arrived_ptr,  # [1] int64, 0; None where losses are not reduced
    steps,
    count,
    held,
    most,
    chunks,
    blocks,
    BLOCK_L: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ALL: tl.constexpr,
    MEAN: tl.constexpr,
    ZERO: tl.constexpr,
):
    """log2 of the sum over the alignments from α and β at the middle, and the loss: what normalises the steps, less it; the last program reduces all."""
    n = tl.program_id(0).to(tl.int64)
    flags = tl.load(flags_ptr + n)
    length, labels, offset = sizes_of(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held
    )[:3]
    alpha_ptr = kept_ptr + (blocks.to(tl.int64) * count + n) * chunks * 64
    beta_ptr = alpha_ptr + (blocks.to(tl.int64) + 1) * count * chunks * 64
    if ALL:
        logz = total_of(alpha_ptr, beta_ptr, labels_ptr + offset, labels, BLOCK_L, True)
    elif flags == 1:
        logz = total_of(alpha_ptr, beta_ptr, labels_ptr + offset, labels, BLOCK_L, True)
    else:
        logz = total_of(alpha_ptr, beta_ptr, labels_ptr + offset, labels, BLOCK_L, False)
    logz = tl.where(length > 0, logz, tl.where(labels == 0, 0.0, -float("inf")))
    loss = 0.0 - logz * LN2
    if maxima_ptr is not None:
        loss += norm_of(maxima_ptr, sums_ptr, n, count, length, BLOCK_T)
    tl.store(logz_ptr + n, tl.where(loss == loss, logz, loss))
    loss = tl.where(flags >= 2, float("nan"), loss)
    tl.store(losses_ptr + n, loss)
    if arrived_ptr is not None:
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == count - 1:
            tl.store(
                value_ptr,
                reduced(losses_ptr, target_lengths_ptr, count, MEAN, ZERO, BLOCK_L).to(
                    value_ptr.dtype.element_ty
                ),
            )
    elif value_ptr is not None:
        tl.store(value_ptr + n, counted(loss, ZERO).to(value_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["count", "classes", "held", "most", "chunks", "words"])
def ctc_order_kernel(
    labels_ptr,  # [held]
    offsets_ptr,  # [count]
    target_lengths_ptr,  # [count]
    order_ptr,  # [count, chunks, 1 + 2 * GROUPS, 32] int32
    zeros_ptr,  # [words] int64
    count,
    classes,
    held,
    most,
    chunks,
    words,
    GROUPS: tl.constexpr,
):
    """The labels of a chunk sorted by class: their places in that order, and where each class begins and ends in it. And zeros for the scan to come."""
    fill_share(zeros_ptr, words, 512)
    n, chunk, lane = (
        (tl.program_id(0) // chunks).to(tl.int64),
        tl.program_id(0) % chunks,
        tl.arange(0, 32),
    )
    labels, offset, wrong = target_of(n, target_lengths_ptr, offsets_ptr, most, held)
    labels = tl.where(wrong, 0, labels).to(tl.int32)
    labelled = labels_of(labels_ptr + offset, chunk * 32, labels, classes, lane)
    order, bounds = classes_of(labelled[0].to(tl.int32), labelled[1], lane, GROUPS)
    order_ptr += tl.program_id(0).to(tl.int64) * ((1 + 2 * GROUPS) * 32) + lane
    tl.store(order_ptr, order)
    for g in tl.static_range(GROUPS):
        tl.store(order_ptr + (1 + 2 * g) * 32, bounds[g][0])
        tl.store(order_ptr + (2 + 2 * g) * 32, bounds[g][1])
