"""The states of CTC's first scan, recomputed block by block for the posterior scan.

A block of steps is recomputed from its emissions, from the states that the first scan saved before
each eighth step, and from the carries that the chunks exchanged then.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from .lattice import LaneStates
from .state import unpack_state
from .steps import advance, decode_emissions, prefetch_carries, prefetch_emissions


class RecomputedHalf(NamedTuple):
    """The half of the first scan whose states a chunk recomputes, in the order of that scan.

    Fields:
        source: where the chunk finds its emissions; see `EmissionSource`.
        half: the steps; see `HalfSteps`.
        states_ptr: the states before the first step, words `[2, 32]`.
        block_stride: offset from them to those of the next block of eight steps.
        carries_ptr: the carries that the chunk received, one for each step.
        has_carries: whether there was a neighbor that sent them.
    """

    source: tuple[tl.tensor, ...]
    half: tuple[tl.tensor, ...]
    states_ptr: tl.tensor
    block_stride: tl.tensor
    carries_ptr: tl.tensor
    has_carries: tl.tensor


class LoadedBlock(NamedTuple):
    """The loaded values from which the states of a block are recomputed.

    Fields:
        rows: the values from which the emissions are computed; see `Emissions`.
        states: the words of blanks and of labels before the block, `[32]` each.
        carries: the words that the chunk received, `[32]` with a step in each lane.
    """

    rows: tuple[tl.tensor, ...]
    states: tuple[tl.tensor, ...]
    carries: tl.tensor


@triton.jit
def prefetch_block(
    recomputed,
    p,
    lane,
    FORWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Load what the block of steps at p is recomputed from; nothing is loaded for p < 0."""
    source, half, states_ptr, block_stride, carries_ptr, has_carries = recomputed
    rows = prefetch_emissions(source, half, p, lane, FORWARD, BLOCK_T, TABLE_WIDTH)
    ptr = states_ptr + tl.maximum(p, 0) // 8 * block_stride + lane
    states = (
        tl.load(ptr, mask=(lane >= 0) & (p >= 0), other=0),
        tl.load(ptr + 32, mask=(lane >= 0) & (p >= 0), other=0),
    )
    words = prefetch_carries(carries_ptr, p, has_carries & (p >= 0), lane, BLOCK_T, FP64)
    return LoadedBlock(rows, states, words)


@triton.jit
def decode_block(
    loaded,
    recomputed,
    p,
    lane,
    FORWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Return a block's emissions and the states before it."""
    source, half, _, _, carries_ptr, has_carries = recomputed
    emissions = decode_emissions(
        loaded.rows, source, p, half.padding, lane, BLOCK_T, FP64, TABLE_WIDTH
    )[0]
    state = LaneStates(unpack_state(loaded.states[0], FP64), unpack_state(loaded.states[1], FP64))
    if FP64:
        # Advance to step p. The steps are a loop, because unrolled they would take long to compile.
        p = tl.maximum(p, 0)
        for q in range(p // 8 * 8, p):
            rows = prefetch_emissions(source, half, q, lane, FORWARD, 1, 0)
            step = decode_emissions(rows, source, q, 0, lane, 1, True, 0)[0]
            words = prefetch_carries(carries_ptr, q, has_carries, lane, 1, True)
            state = advance(
                state,
                words,
                step.blank,
                step.label[0],
                lane * 0,
                source.lattice.can_skip,
                lane,
                FORWARD,
                True,
            )[1]
    return emissions, state
