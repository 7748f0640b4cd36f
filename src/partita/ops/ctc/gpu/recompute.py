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
        can_skip: see `ChunkLattice`.
        saved: the states before each eighth step; see `SavedStates`.
        carries: the carries that the chunk received; see `SavedCarries`.
    """

    source: tuple[tl.tensor, ...]
    half: tuple[tl.tensor, ...]
    can_skip: tl.tensor
    saved: tuple[tl.tensor, ...]
    carries: tuple[tl.tensor, ...]


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
def recompute_to_step(recomputed, state, p, lane, FORWARD: tl.constexpr):
    """Advance fp64 states from those saved before a block of eight steps to step p in it.

    This is a loop, because the unrolled steps would take long to compile.
    """
    source, half, can_skip, _, carries = recomputed
    for q in range(p // 8 * 8, p):
        loaded = prefetch_emissions(source, half, q, lane, FORWARD, 1, 0)
        emissions = decode_emissions(loaded, source, q, 0, lane, 1, True, 0)[0]
        words = prefetch_carries(carries.ptr, q, carries.valid, lane, 1, True)
        blanks, label = emissions.blank, emissions.label[0]
        state = advance(state, words, blanks, label, lane * 0, can_skip, lane, FORWARD, True)[1]
    return state


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
    source, half, _, saved, carries = recomputed
    rows = prefetch_emissions(source, half, p, lane, FORWARD, BLOCK_T, TABLE_WIDTH)
    ptr = saved.ptr + tl.maximum(p, 0) // 8 * saved.block_stride + lane
    states = (
        tl.load(ptr, mask=(lane >= 0) & (p >= 0), other=0),
        tl.load(ptr + 32, mask=(lane >= 0) & (p >= 0), other=0),
    )
    words = prefetch_carries(carries.ptr, p, carries.valid & (p >= 0), lane, BLOCK_T, FP64)
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
    emissions = decode_emissions(
        loaded.rows,
        recomputed.source,
        p,
        recomputed.half.padding,
        lane,
        BLOCK_T,
        FP64,
        TABLE_WIDTH,
    )[0]
    state = LaneStates(unpack_state(loaded.states[0], FP64), unpack_state(loaded.states[1], FP64))
    if FP64:
        state = recompute_to_step(recomputed, state, tl.maximum(p, 0), lane, FORWARD)
    return emissions, state


@triton.jit
def recompute_block(
    loaded,
    recomputed,
    p,
    lane,
    FORWARD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP64: tl.constexpr,
    TABLE_WIDTH: tl.constexpr,
):
    """Return a block's emissions and the states after each of its steps."""
    emissions, state = decode_block(
        loaded, recomputed, p, lane, FORWARD, BLOCK_T, FP64, TABLE_WIDTH
    )
    states = ()
    for u in tl.static_range(BLOCK_T):
        state = advance(
            state,
            loaded.carries,
            emissions.blank,
            emissions.label[u],
            lane * 0 + u,
            recomputed.can_skip,
            lane,
            FORWARD,
            FP64,
        )[1]
        states = states + (state,)
    return emissions, states
