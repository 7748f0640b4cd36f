"""The CTC lattice of a target in kernels, in chunks of 32 positions with one position per lane.

Position i of a target is the blank before its label i, and that label. The last position has no
label, so a target of L labels has L + 1 positions and 2 L + 1 states. α enters a blank from the
same blank and from the label before it; it enters a label from the same label, from the blank
before it, and from the label before that blank unless both labels are equal. β goes the other way.

One program is one warp and scans one chunk in one direction. Programs take their chunks from a
counter in the order in which they start, so the neighbor that a chunk waits for always started
before it. Programs in fp64 scan all chunks of a sequence one after another instead.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ....primitives.gpu.memory import checked_length
from .state import (
    add,
    constant_state,
    pack_state,
    select,
)

# Bits of a sequence's flags.
NEEDS_FP64 = tl.constexpr(1)  # a logit overflows the exponent of an emission
INVALID = tl.constexpr(2)  # a label or a length is out of range, or an alignment has NaN

# Triton compiles nothing anew for other values of these arguments.
SIZES = [
    "T",
    "N",
    "C",
    "M",
    "max_target_len",
    "num_chunks",
    "num_blocks",
    "carry_steps",
    "blank",
    "stride_t",
    "stride_n",
    "stride_c",
    "prior_scale",
    "star",
]


class TargetTensors(NamedTuple):
    """The targets of a batch and the lengths; kernels get None for those that they do not read.

    Fields:
        labels: the targets one after another, M labels, contiguous.
        offsets: `[N]`, where each target starts.
        input_lengths: `[N]`.
        target_lengths: `[N]`.
    """

    labels: tl.tensor
    offsets: tl.tensor
    input_lengths: tl.tensor
    target_lengths: tl.tensor


class ChunkLattice(NamedTuple):
    """The part of a target's lattice that one warp scans; each field is `[32]`, by lane.

    Fields:
        label: the class of the lane's label, 0 where the lane has none, C for the star.
        has_label: whether the lane has a label.
        can_skip: whether α may enter the label from the label before it without a blank.
        is_star: whether the lane's label is the star, in a tuple that is empty without a star.
    """

    label: tl.tensor
    has_label: tl.tensor
    can_skip: tl.tensor
    is_star: tuple[tl.tensor, ...]


class TargetScan(NamedTuple):
    """The values that the scans of all chunks of a sequence share.

    Fields:
        labels_ptr: the target's labels.
        length: number of steps.
        target_len: number of labels.
        C: number of classes.
        blank: the class of the blank.
        limit: the greatest absolute value of a logit that has an emission.
        star: the label that is the star, or None.
    """

    labels_ptr: tl.tensor
    length: tl.tensor
    target_len: tl.tensor
    C: tl.tensor
    blank: tl.tensor
    limit: tl.tensor
    star: tl.tensor | None


class LaneStates(NamedTuple):
    """α or β of the lattice states of 32 positions.

    Fields:
        blank: the state of each lane's blank; see `state.py`.
        label: the state of each lane's label.
    """

    blank: tuple[tl.tensor, ...]
    label: tuple[tl.tensor, ...]


@triton.jit
def program_index(tile_counter_ptr):
    """Return this program's index, in the order in which programs start if there is a counter."""
    if tile_counter_ptr is None:
        return tl.program_id(0)
    else:
        return tl.atomic_add(tile_counter_ptr, 1, sem="relaxed")


@triton.jit
def program_chunk(tile_counter_ptr, N):
    """Return this program's chunk (counted in its direction), sequence and direction."""
    index = program_index(tile_counter_ptr)
    return index // (2 * N), (index // 2 % N).to(tl.int64), index % 2


@triton.jit
def load_target(targets, n, max_target_len, M):
    """Return a target's length and offset as given, and whether they are out of range."""
    target_len, offset = tl.load(targets.target_lengths + n), tl.load(targets.offsets + n)
    return (
        target_len,
        offset,
        (target_len < 0) | (target_len > max_target_len) | (offset < 0) | (offset + target_len > M),
    )


@triton.jit
def load_lengths(targets, n, T, max_target_len, M):
    """Return a sequence's input length, target length, target offset and validity.

    Lengths and offset of an invalid sequence are 0.
    """
    length, is_bad = checked_length(targets.input_lengths, n, T, 0, 0)
    target_len, offset, invalid = load_target(targets, n, max_target_len, M)
    invalid = invalid | is_bad
    return (
        tl.where(invalid, 0, length),
        tl.where(invalid, 0, target_len).to(tl.int32),
        tl.where(invalid, 0, offset),
        invalid,
    )


@triton.jit
def load_chunk(target, chunk, lane):
    """Return the lattice of a chunk of a target, and the lanes whose label is out of range."""
    position, target_len = chunk * 32 + lane, target.target_len
    label = tl.load(target.labels_ptr + position, mask=position < target_len, other=0)
    has_both = (position > 0) & (position < target_len)
    before = tl.load(target.labels_ptr + position - 1, mask=has_both, other=-1)
    in_range = (label >= 0) & (label < target.C)
    label_class, is_star = tl.where(in_range, label, 0), ()
    if target.star is not None:
        is_star = (label == target.star,)
        label_class = tl.where(is_star[0], target.C, label_class)
        in_range = in_range | is_star[0]
    has_label, can_skip = position < target_len, (position > 0) & (label != before)
    return ChunkLattice(label_class, has_label, can_skip, is_star), ~in_range


@triton.jit
def boundary_states(position, end, lane, FP64: tl.constexpr):
    """Return the states with which a scan starts: 1 in the blank at position `end`, 0 elsewhere."""
    zero = constant_state(0, lane, FP64)
    return LaneStates(select(position == end, constant_state(1, lane, FP64), zero, FP64), zero)


@triton.jit
def store_carry(ptrs, state, can_skip, is_sent, FORWARD: tl.constexpr, FP64: tl.constexpr):
    """Store the carry for the next chunk from the last lane (α) or the first (β), if `is_sent`."""
    blank, label = state
    if FORWARD:
        carry = label
    else:
        carry = select(can_skip, add(blank, label, FP64), blank, FP64)
    tl.store(ptrs, pack_state(carry, FP64), mask=is_sent)


@triton.jit
def store_states(saved_ptr, state, lane, FP64: tl.constexpr):
    """Store the states of a chunk as words `[2, 32]`."""
    tl.store(saved_ptr + lane, pack_state(state.blank, FP64))
    tl.store(saved_ptr + 32 + lane, pack_state(state.label, FP64))
