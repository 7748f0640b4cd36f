"""CTC's gradient from the posteriors that the scan left, by class or by label."""

import triton
import triton.language as tl

from ....primitives.gpu.math import exp_for_dtype, finite_shift
from .state import between, running_sums
from .steps import sizes_of


@triton.jit
def state_of_steps(n, t, length, flags_ptr, logz_ptr, REAL: tl.constexpr):
    """Which steps of a sequence have posteriors, and NaN where there is no right answer."""
    logz = tl.load(logz_ptr + n)
    spoilt = tl.where(
        tl.load(flags_ptr + n) >= 2,
        float("nan"),
        tl.where(t < length, tl.where(logz != logz, float("nan"), 0.0), 0.0),
    )
    return t < tl.where(logz > -float("inf"), length, 0), spoilt.to(REAL)


@triton.jit
def row_state(
    n,
    t,
    steps,
    count,
    most,
    held,
    grad_ptr,
    stride_g,
    offsets_ptr,
    input_lengths_ptr,
    target_lengths_ptr,
    flags_ptr,
    logz_ptr,
    MEAN: tl.constexpr,
    REAL: tl.constexpr,
):
    """Labels of a sequence and where they start, its gradient, which steps have posteriors, and NaN where there is no right answer."""
    length, labels, offset = sizes_of(
        n, input_lengths_ptr, target_lengths_ptr, offsets_ptr, steps, most, held
    )[:3]
    counts, spoilt = state_of_steps(n, t, length, flags_ptr, logz_ptr, REAL)
    grad = tl.load(grad_ptr + n * stride_g).to(REAL)
    if MEAN:
        grad /= (tl.maximum(labels, 1) * count).to(REAL)
    return labels, offset, grad, counts, spoilt


@triton.jit
def norms_of(maxima_ptr, sums_ptr, row, counts, grad, REAL: tl.constexpr):
    """What normalises steps: the maximum, and the gradient over the sum of exponentials."""
    if maxima_ptr is None:
        return tl.zeros(row.shape, REAL), tl.zeros(row.shape, REAL)
    else:
        maximum = finite_shift(tl.load(maxima_ptr + row, mask=counts, other=0.0))
        return maximum, tl.where(
            counts, grad / tl.load(sums_ptr + row, mask=counts, other=1.0), 0.0
        )


@triton.jit
def softmax_at(at, held, maximum, scale, REAL: tl.constexpr):
    """The softmax of some logits times a scale, from what normalises it."""
    return (
        exp_for_dtype(tl.load(at, mask=held, other=-float("inf")).to(REAL) - maximum, REAL) * scale
    )


GRADIENT_SIZES = [
    "steps",
    "count",
    "classes",
    "held",
    "most",
    "chunks",
    "blank",
    "stride_t",
    "stride_n",
    "stride_g",
]


@triton.jit(do_not_specialize=GRADIENT_SIZES)
def ctc_narrow_gradient_kernel(
    grad_ptr,  # [count], or of their sum or mean []
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
    stride_g,
    MEAN: tl.constexpr,
    REAL: tl.constexpr,
    WIDTH: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Softmax less the posteriors of the classes, or minus these: the chunks' together."""
    n = (tl.program_id(0) % count).to(tl.int64)
    t = (tl.program_id(0) // count).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    labels, _, grad, counts, spoilt = row_state(
        n,
        t,
        steps,
        count,
        most,
        held,
        grad_ptr,
        stride_g,
        offsets_ptr,
        input_lengths_ptr,
        target_lengths_ptr,
        flags_ptr,
        logz_ptr,
        MEAN,
        REAL,
    )
    row, v = t * count + n, tl.arange(0, BLOCK_V)
    blanks, posterior = tl.zeros([ROWS], REAL), tl.zeros([ROWS, BLOCK_V], REAL)
    for c in range(0, labels // 32 + 1):
        at = (n * chunks + c) * steps + t
        posterior += tl.load(
            posterior_ptr + (at * WIDTH)[:, None] + v[None, :],
            mask=counts[:, None] & (v // VEC * VEC < classes)[None, :],
            other=0.0,
        )
        blanks += tl.load(blanks_ptr + at, mask=counts, other=0.0)
    total = tl.sum(posterior, axis=1) + blanks
    posterior += tl.where((v == blank)[None, :], blanks[:, None], 0.0)
    inside = (t < steps)[:, None] & (v // VEC * VEC < classes)[None, :]
    value = -posterior * tl.where(total > 0.0, grad / total, 0.0)[:, None] + spoilt[:, None]
    if maxima_ptr is not None:
        maximum, scale = norms_of(maxima_ptr, sums_ptr, row, counts, grad, REAL)
        at = (
            tl.multiple_of(t * stride_t + n * stride_n, VEC)[:, None]
            + v.to(tl.int64)[None, :] * stride_c
        )
        value += softmax_at(
            logits_ptr + at, inside & counts[:, None], maximum[:, None], scale[:, None], REAL
        )
    tl.store(
        result_ptr + tl.multiple_of(row * classes, VEC)[:, None] + v[None, :],
        value.to(result_ptr.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def place_in_chunks(j, pitch):
    """Where a label's posterior stands, of the chunks of 32."""
    return (j // 32).to(tl.int64) * pitch + j % 32


@triton.jit
def summed_of_class(posterior_ptr, pitch, next_ptr, at, again, counts):
    """The posteriors at each step of all places of classes, of which `at` is the first, or -1; none stands there again more often than that."""
    total = tl.zeros([counts.shape[0], at.shape[0]], posterior_ptr.dtype.element_ty)
    for _ in range(again + 1):
        total += tl.load(
            posterior_ptr[:, None] + place_in_chunks(at, pitch)[None, :],
            mask=counts[:, None] & (at >= 0)[None, :],
            other=0.0,
        )
        at = tl.load(next_ptr + at, mask=at >= 0, other=-1)
    return total


@triton.jit
def totals_of_steps(
    posterior_ptr, blanks_ptr, labels_ptr, labels, blank, pitch, counts, BLOCK_L: tl.constexpr
):
    """What the posteriors of steps sum to, and those of the blank, which may stand in a target too."""
    total, found = (
        tl.zeros(counts.shape, posterior_ptr.dtype.element_ty),
        tl.zeros(counts.shape, posterior_ptr.dtype.element_ty),
    )
    for first in range(0, labels // 32 + 1, 32):
        c = first + tl.arange(0, 32)
        inside = counts[:, None] & (c <= labels // 32)[None, :]
        found += tl.sum(
            tl.load(blanks_ptr[:, None] + c.to(tl.int64)[None, :] * pitch, mask=inside, other=0.0),
            axis=1,
        )
    for first in range(0, labels, BLOCK_L):
        j = first + tl.arange(0, BLOCK_L)
        inside = counts[:, None] & (j < labels)[None, :]
        share = tl.load(
            posterior_ptr[:, None] + place_in_chunks(j, pitch * 32)[None, :], mask=inside, other=0.0
        )
        is_blank = tl.load(labels_ptr + j, mask=j < labels, other=-1) == blank
        total += tl.sum(tl.where(is_blank[None, :], 0.0, share), axis=1)
        found += tl.sum(tl.where(is_blank[None, :], share, 0.0), axis=1)
    return total + found, found


@triton.jit
def softmax_pieces(
    source_ptr,
    first,
    classes,
    stride_c,
    maximum,
    scale,
    counts,
    spoilt,
    REAL: tl.constexpr,
    NORMAL: tl.constexpr,
    VEC: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The softmax of some classes of some steps, or 0, in pieces: all are loaded before the first is needed."""
    pieces = ()
    for i in tl.static_range(PIECES):
        v = first + i * BLOCK_V + tl.arange(0, BLOCK_V)
        value = tl.zeros([counts.shape[0], BLOCK_V], REAL) + spoilt[:, None]
        if NORMAL:
            inside = counts[:, None] & (v // VEC * VEC < classes)[None, :]
            value += softmax_at(
                source_ptr[:, None] + v.to(tl.int64)[None, :] * stride_c,
                inside,
                maximum[:, None],
                scale[:, None],
                REAL,
            )
        pieces = pieces + (value,)
    return pieces


@triton.jit(do_not_specialize=GRADIENT_SIZES)
def ctc_label_gradient_kernel(
    grad_ptr,  # [count], or of their sum or mean []
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
    slots_ptr,  # [count, classes] int32
    again_ptr,  # [count] int32
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
    stride_g,
    MEAN: tl.constexpr,
    REAL: tl.constexpr,
    VEC: tl.constexpr,
    PIECES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Softmax less the posteriors of the classes, or minus these: the softmax, and over it what the first label of each class, and the blank, make of
    theirs."""
    n, t = (
        (tl.program_id(0) % count).to(tl.int64),
        (tl.program_id(0) // count).to(tl.int64) * ROWS + tl.arange(0, ROWS),
    )
    labels, offset, grad, counts, spoilt = row_state(
        n,
        t,
        steps,
        count,
        most,
        held,
        grad_ptr,
        stride_g,
        offsets_ptr,
        input_lengths_ptr,
        target_lengths_ptr,
        flags_ptr,
        logz_ptr,
        MEAN,
        REAL,
    )
    maximum, scale = norms_of(maxima_ptr, sums_ptr, t * count + n, counts, grad, REAL)
    source_ptr, target_ptr = (
        logits_ptr + tl.multiple_of(t * stride_t + n * stride_n, VEC),
        result_ptr + tl.multiple_of((t * count + n) * classes, VEC),
    )
    share_ptr, own_ptr, pitch = (
        posterior_ptr + (n * chunks * steps + t) * 32,
        blanks_ptr + n * chunks * steps + t,
        steps.to(tl.int64),
    )
    total, found = totals_of_steps(
        share_ptr, own_ptr, labels_ptr + offset, labels, blank, pitch, counts, BLOCK_L
    )
    inverse, again = tl.where(total > 0.0, grad / total, 0.0), tl.load(again_ptr + n)
    for first in range(0, classes, PIECES * BLOCK_V):
        pieces = softmax_pieces(
            source_ptr,
            first,
            classes,
            stride_c,
            maximum,
            scale,
            counts,
            spoilt,
            REAL,
            maxima_ptr is not None,
            VEC,
            PIECES,
            BLOCK_V,
        )
        for i in tl.static_range(PIECES):
            v = first + i * BLOCK_V + tl.arange(0, BLOCK_V)
            inside = (t < steps)[:, None] & (v // VEC * VEC < classes)[None, :]
            tl.store(
                target_ptr[:, None] + v[None, :],
                pieces[i].to(result_ptr.dtype.element_ty),
                mask=inside,
            )
    tl.debug_barrier()  # what follows stores some of these again
    for first in range(0, labels + 1, BLOCK_L):
        j = first + tl.arange(0, BLOCK_L)
        label = tl.load(labels_ptr + offset + j, mask=j < labels, other=-1)
        at = tl.load(
            slots_ptr + n * classes + label, mask=(label >= 0) & (label < classes), other=-1
        )
        at, label = (
            tl.where(at == j, at, -1),
            tl.where(j == labels, blank, label),
        )  # the blank behind the last label
        posterior = summed_of_class(share_ptr, pitch * 32, next_ptr + n * most, at, again, counts)
        posterior += tl.where((j == labels)[None, :], found[:, None], 0.0)
        stands = counts[:, None] & ((at >= 0) | (j == labels))[None, :]
        value = spoilt[:, None] - posterior * inverse[:, None]
        if maxima_ptr is not None:
            value += softmax_at(
                source_ptr[:, None] + (label.to(tl.int64) * stride_c)[None, :],
                stands,
                maximum[:, None],
                scale[:, None],
                REAL,
            )
        tl.store(
            target_ptr[:, None] + label[None, :], value.to(result_ptr.dtype.element_ty), mask=stands
        )


@triton.jit
def sums_by_class(
    posterior_ptr,
    blanks_ptr,
    order_ptr,
    chunk_ends,
    pitch,
    left,
    lane,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    REAL: tl.constexpr,
):
    """Posteriors of some steps over the chunks: by class, [32] for each group of each step; of all labels, [32] for each step; and blanks, a step a lane."""
    sums, totals, blanks = (), (), lane.to(REAL) * 0.0
    for _ in tl.static_range(ROWS * GROUPS):
        sums = sums + (lane.to(REAL) * 0.0,)
    for _ in tl.static_range(ROWS):
        totals = totals + (lane.to(REAL) * 0.0,)
    for _ in range(chunk_ends):
        order, shares = tl.load(order_ptr), ()
        for u in tl.static_range(ROWS):
            shares = shares + (
                tl.load(posterior_ptr + u * 32 + order, mask=(order >= 0) & (u < left), other=0.0),
            )
        running, more, all_ = running_sums(shares, lane), (), ()
        for u in tl.static_range(ROWS):
            all_ = all_ + (totals[u] + tl.gather(running[u], lane * 0 + 31, 0),)
            for g in tl.static_range(GROUPS):
                begin, end = (
                    tl.load(order_ptr + (1 + 2 * g) * 32),
                    tl.load(order_ptr + (2 + 2 * g) * 32),
                )
                more = more + (sums[u * GROUPS + g] + between(running[u], begin, end),)
        sums, totals = more, all_
        blanks += tl.load(blanks_ptr + lane, mask=(lane < ROWS) & (lane < left), other=0.0)
        posterior_ptr += pitch * 32
        blanks_ptr += pitch
        order_ptr += (1 + 2 * GROUPS) * 32
    return sums, totals, blanks


@triton.jit(do_not_specialize=GRADIENT_SIZES)
def ctc_lane_gradient_kernel(
    grad_ptr,  # [count], or of their sum or mean []
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
    stride_g,
    MEAN: tl.constexpr,
    REAL: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Softmax less the posteriors of the classes, or minus these, from posteriors by label: one warp, a class a lane."""
    n, first, lane = (
        (tl.program_id(0) % count).to(tl.int64),
        (tl.program_id(0) // count).to(tl.int64) * ROWS,
        tl.arange(0, 32),
    )
    t = first + lane
    labels, _, grad, counts, spoilt = row_state(
        n,
        t,
        steps,
        count,
        most,
        held,
        grad_ptr,
        stride_g,
        offsets_ptr,
        input_lengths_ptr,
        target_lengths_ptr,
        flags_ptr,
        logz_ptr,
        MEAN,
        REAL,
    )
    left = tl.sum((counts & (lane < ROWS)).to(tl.int32), axis=0)
    sums, totals, blanks = sums_by_class(
        posterior_ptr + (n * chunks * steps + first) * 32,
        blanks_ptr + n * chunks * steps + first,
        order_ptr + n * chunks * ((1 + 2 * GROUPS) * 32) + lane,
        labels // 32 + 1,
        steps.to(tl.int64),
        left,
        lane,
        ROWS,
        GROUPS,
        REAL,
    )
    maximum, scale = norms_of(
        maxima_ptr, sums_ptr, t * count + n, counts & (lane < ROWS), grad, REAL
    )
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
                value += softmax_at(logits_ptr + at, (v < classes) & (u < left), high, part, REAL)
            tl.store(
                result_ptr + ((first + u) * count + n) * classes + v,
                value.to(result_ptr.dtype.element_ty),
                mask=(v < classes) & (first + u < steps),
            )
