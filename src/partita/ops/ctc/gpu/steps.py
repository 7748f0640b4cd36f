"""The steps of a scan: prefetched emissions, and carries exchanged between chunks.

A scan covers half of the steps in blocks of BLOCK_T. Rows of emissions are loaded one block ahead.
So that all blocks are full, a half begins with padding, where the blank has probability 1 and
labels have 0: this leaves α and β as they start. The posterior scan reaches the padding last, when
no work remains. A table of emissions has rows of zeros before and after its steps, so reads beyond
a half stay in bounds.

Chunks of a target hand carries to their neighbors through words in memory, one word for each step.
A word of 0 means that the carry is not written yet. A chunk loads the carries of a block ahead
of time and polls them before it starts the block.

Some kernels write the number 8 for `plan.SAVE_EVERY`, 32 for `plan.CHUNK` and 24 for
`plan.TABLE_MARGIN`, because the interpreter cannot compute with constexprs and its own integers.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.math import LOG2E
from .lattice import LaneStates
from .scores import prior_emission, row_emission
from .state import (
    ZERO_EXPONENT,
    ZERO_WORD,
    ZERO_WORD_FP64,
    add,
    broadcast_lane,
    constant_state,
    emission_of,
    multiply_emission,
    multiply_emissions,
    select,
    shift_lanes,
    unpack_state,
)


class HalfSteps(NamedTuple):
    """The steps that one direction scans, in its order.

    Fields:
        first_row: offset of the first row.
        row_stride: offset from each row to the next, negative for β.
        steps: number of steps.
        padding: number of padding steps before them.
        first_step: the first step.
    """

    first_row: tl.tensor
    row_stride: tl.tensor
    steps: tl.tensor
    padding: tl.tensor
    first_step: tl.tensor


class EmissionSource(NamedTuple):
    """The logits of a chunk, or its part of a table of emissions as words.

    Fields:
        label_ptr: address of each lane's label in row 0, `[32]`.
        blank_ptr: address of the blank in row 0.
        stride_t: offset from each row to the next.
        lattice: see `ChunkLattice`.
        limit: the greatest absolute value of a logit whose exponential is an emission.
        priors: the emissions by which the priors of label and blank multiply; empty without.
        normalizers: see `EmissionRows` in `scores.py`.
    """

    label_ptr: tl.tensor
    blank_ptr: tl.tensor
    stride_t: tl.tensor
    lattice: tuple[tl.tensor, ...]
    limit: tl.tensor
    priors: tuple[tl.tensor, ...]
    normalizers: tuple[tl.tensor, ...]


class Emissions(NamedTuple):
    """The emissions of a block of steps, or the loaded values from which they are computed.

    Fields:
        label: one tensor `[32]` by lane for each step.
        blank: one tensor `[32]` with a step in each lane.
        star: the loaded maximum and sum of each step, `[32]` with a step in each lane, or empty.
    """

    label: tuple[tl.tensor, ...]
    blank: tl.tensor
    star: tuple[tl.tensor, ...]


class CarryLinks(NamedTuple):
    """The words through which a chunk exchanges carries with its neighbors during a scan.

    Fields:
        sent_ptr: the words that it sends to the next chunk, one for each step of the half.
        received_ptr: the words that it receives from the previous chunk.
        has_next: whether there is a next chunk in the direction of the scan.
        has_previous: whether there is a previous chunk.
    """

    sent_ptr: tl.tensor
    received_ptr: tl.tensor
    has_next: tl.tensor
    has_previous: tl.tensor


@triton.jit
def half_steps(first, steps, stride_t, FORWARD: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the description of a half of `steps` steps that starts at step `first`."""
    stride = stride_t.to(tl.int64)
    return HalfSteps(
        first * stride,
        stride if FORWARD else -stride,
        steps,
        (BLOCK_T - steps % BLOCK_T) % BLOCK_T,
        first,
    )


@triton.jit
def first_scan_half(length, stride_t, FORWARD: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the half of a sequence that α (FORWARD) or β takes in the first scan, in its order."""
    if FORWARD:
        return half_steps(length * 0, length // 2, stride_t, True, BLOCK_T)
    else:
        last_step = tl.maximum(length - 1, 0)
        return half_steps(last_step, length - length // 2, stride_t, False, BLOCK_T)


@triton.jit
def chunk_source(rows, lattice, target, FP64: tl.constexpr, TABLE_WIDTH: tl.constexpr):
    """Return where a chunk finds its emissions in the rows of a sequence.

    A table has a column for the star. Logits have none, so those of class 0 are loaded for it.
    """
    label, blank, limit, priors = lattice.label, target.blank, target.limit, ()
    if len(lattice.is_star) > 0 and TABLE_WIDTH == 0:
        label = tl.where(lattice.is_star[0], 0, label)
    if len(rows.priors) > 0:
        priors = (
            prior_emission(rows.priors, label, limit, FP64),
            prior_emission(rows.priors, blank, limit, FP64),
        )
    return EmissionSource(
        rows.ptr + label.to(tl.int64) * rows.stride_c,
        rows.ptr + tl.cast(blank, tl.int64) * rows.stride_c,
        rows.stride_t,
        lattice,
        limit,
        priors,
        rows.normalizers,
    )


@triton.jit
def row_index(half, p):
    """Return which row of the half serves padded step p; any serves padding and what follows."""
    return tl.minimum(tl.maximum(p - half.padding, 0), tl.maximum(half.steps - 1, 0))


@triton.jit
def prefetch_emissions(
    source,
    half,
    p,
    lane,
    FORWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Load the logits, or the words of the table, of a block of steps."""
    label_rows, star = (), ()
    if TABLE_WIDTH:
        stride: tl.constexpr = TABLE_WIDTH if FORWARD else -TABLE_WIDTH
        row = half.first_row + (p - half.padding) * stride
        for u in tl.static_range(BLOCK_T):
            label_rows = label_rows + (tl.load((source.label_ptr + row) + u * stride),)
        return Emissions(label_rows, tl.load(source.blank_ptr + row + lane % BLOCK_T * stride), ())
    else:
        for u in tl.static_range(BLOCK_T):
            row = half.first_row + row_index(half, p + u) * half.row_stride
            label_rows = label_rows + (tl.load(source.label_ptr + row),)
        step = row_index(half, p + lane % BLOCK_T)
        blank_row = tl.load(source.blank_ptr + (half.first_row + step * half.row_stride))
        if len(source.normalizers) > 0:
            step = half.first_step + step if FORWARD else half.first_step - step
            offset = step.to(tl.int64) * source.normalizers.stride_t
            star = (
                tl.load(source.normalizers.maxima_ptr + offset),
                tl.load(source.normalizers.sums_ptr + offset),
            )
        return Emissions(label_rows, blank_row, star)


@triton.jit
def class_emission(x, prior, limit, FP64: tl.constexpr):
    """Return the emissions of classes, given their logits and a tuple of their priors'."""
    emission = (x.to(tl.float64) * LOG2E,) if FP64 else emission_of(x, limit)
    if len(prior) > 0:
        emission = multiply_emissions(emission, prior[0], FP64)
    return emission


@triton.jit
def decode_emissions(
    loaded,
    source,
    p,
    padding,
    lane,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Compute the emissions of a block of steps from the loaded rows.

    Labels of lanes without a label have emission 0. Returns the emissions, and a tensor `[32]` that
    is NaN in each lane that met a logit beyond the limit and 0 elsewhere.
    """
    labels, overflow, star = (), lane.to(tl.float32) * 0.0, ()
    has_star: tl.constexpr = len(source.lattice.is_star) > 0 and TABLE_WIDTH == 0
    if has_star and len(loaded.star) == 0:  # log-probabilities, in which the star has 1
        star = constant_state(1, lane, FP64)
        if not FP64:
            star = (star[0], star[1] - 127)
    elif has_star and FP64:
        star_score = loaded.star[0].to(tl.float64) * LOG2E + tl.log2(loaded.star[1].to(tl.float64))
        star = (star_score,)
    elif has_star:
        star = row_emission(loaded.star[0], loaded.star[1], source.limit)
    for u in tl.static_range(BLOCK_T):
        valid = source.lattice.has_label
        if TABLE_WIDTH:
            emission = unpack_state(loaded.label[u], False)
        else:
            emission = class_emission(loaded.label[u], source.priors[:1], source.limit, FP64)
        if has_star:
            star_of_step = broadcast_lane(star, lane * 0 + u, FP64)
            emission = select(source.lattice.is_star[0], star_of_step, emission, FP64)
        if FP64:
            labels = labels + ((tl.where(valid, emission[0], -float("inf")),),)
        else:
            if not TABLE_WIDTH:
                valid &= p + u >= padding
            exponent = tl.where(valid, emission[1], ZERO_EXPONENT - 127)
            labels = labels + ((emission[0], exponent),)
            overflow = overflow + emission[0] * 0.0
    if TABLE_WIDTH:
        emission = unpack_state(loaded.blank, False)
    else:
        emission = class_emission(loaded.blank, source.priors[1:], source.limit, FP64)
    if FP64:
        return Emissions(labels, emission, ()), overflow
    else:
        mantissa, exponent = emission
        overflow += mantissa * 0.0
        valid = p + lane % BLOCK_T >= padding
        mantissa, exponent = tl.where(valid, mantissa, 1.0), tl.where(valid, exponent, -127)
        return Emissions(labels, (mantissa, exponent), ()), overflow


@triton.jit
def prefetch_carries(carries_ptr, p, valid, lane, BLOCK_T: tl.constexpr, FP64: tl.constexpr):
    """Load the carries of a block of steps, one step per lane; words not written yet are 0."""
    zero = ZERO_WORD_FP64 if FP64 else ZERO_WORD
    return tl.load(carries_ptr + p + lane, mask=valid & (lane < BLOCK_T), other=zero, volatile=True)


@triton.jit
def await_carries(words, links, p, lane, BLOCK_T: tl.constexpr, FP64: tl.constexpr):
    """Return the carries of a block once the previous chunk has written all of them."""
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = prefetch_carries(links.received_ptr, p, links.has_previous, lane, BLOCK_T, FP64)
    return words


@triton.jit
def advance(
    state,
    words,
    blanks,
    label,
    index,
    can_skip,
    lane,
    FORWARD: tl.constexpr,
    FP64: tl.constexpr,
):
    """Take a step: return the sums that enter the states, and the states after it.

    What enters a blank or a label comes from the states before the step for α, and from those after
    it for β. The carry comes from the neighboring chunk (see `store_carry`). For α it is the label
    before the first position; for β, the part that the position after the last one sends to its
    label.

    `words` and `blanks` are the carries and the blank's emissions of a block, with a step in each
    lane; `label` are the labels' emissions of the step `index`. The index is a tensor `[32]`, so
    that Triton translates this function once, not for each unrolled step.
    """
    carry = unpack_state(tl.gather(words, index, 0), FP64)
    own_blank, own_label = state
    if FORWARD:
        into_blank = add(own_blank, shift_lanes(own_label, carry, lane, -1, FP64), FP64)
        sent = select(can_skip, into_blank, own_blank, FP64)
    else:
        into_blank = add(own_blank, own_label, FP64)
        sent = select(can_skip, into_blank, own_blank, FP64)
        sent = shift_lanes(sent, carry, lane, 1, FP64)
    into_label = add(own_label, sent, FP64)
    blank = multiply_emission(into_blank, broadcast_lane(blanks, index, FP64), FP64)
    after = LaneStates(blank, multiply_emission(into_label, label, FP64))
    return LaneStates(into_blank, into_label), after
