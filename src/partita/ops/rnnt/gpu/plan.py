"""Transducers on a GPU: how rows and lattices are cut into programs, and workspace sizes.

These are pure functions of sizes. They import no Triton, so that the fakes of the registered ops
can use them.

The lattice of a sequence has a node (t, u) for each step t and each number u of emitted labels. The
scans cut it into chunks of 32 values of u, one per lane of a warp. In a chunk, row s contains the
nodes with t = s - lane, which lie on one anti-diagonal: none of them depends on another.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ....runtime.caches import register_cache
from ....runtime.sizes import cdiv, next_power_of_2

CHUNK = 32  # values of u in a chunk, one per lane of a warp
NODES_PER_PROGRAM = 4  # nodes whose rows a program reads
BLOCK_ROWS = 8  # rows of a chunk that a scan loads together
LSE_DTYPE = torch.float64  # keeps exp(x - lse) exact for logits far from 0
MAX_LANE_ELEMENTS = 40  # elements of a row that a lane holds
MAX_DURATION = 64  # a scan remembers as many states
# A scan runs beside the pass over the logits if it has at most as many programs as a small part of
# any GPU runs at once, and if that pass takes longer than what the overlap costs: arcs are zeroed.
MAX_OVERLAP_SCANS = 64
MAX_OVERLAP_STEPS = 2**15  # the product of two numbers of steps fits in 32 bits
MIN_OVERLAP_BYTES = 2**24  # of logits
MIN_OVERLAP_ROW_BYTES = 512  # of the logits of a node, whose arcs are two words
MAX_OVERLAP_KINDS = 10  # of arcs
MAX_OVERLAP_DEPTH = 5  # states that a lane remembers
MARGIN = (MAX_DURATION + 4) * CHUNK  # elements before each kind of arcs that a scan may read


class LatticePlan(NamedTuple):
    """The layout of arrays over the nodes of a batch, `[B, num_chunks, rows, 32]`.

    Fields:
        num_chunks: chunks of 32 values of u.
        rows: rows of a chunk, including those of the virtual step T and the scan's last block.
        nodes: elements of an array, with a margin after those of the nodes.
        carry_steps: carries of a chunk, one for each step.
    """

    num_chunks: int
    rows: int
    nodes: int
    carry_steps: int


class ArcKinds(NamedTuple):
    """The kinds of arcs that a scan is compiled for.

    Fields:
        code: the kinds; see `arc_rows.py`.
        number: the number of kinds, 2 for RNN-T.
        depth: the states that a lane remembers.
    """

    code: int
    number: int
    depth: int


class RowTile(NamedTuple):
    """The blocks in which a single warp reads rows of V values, one after another.

    Fields:
        vector: elements that are aligned together.
        edges: whether some columns are read one per lane: those around the aligned part of a row,
            or those after the last whole block of a row that is added up.
        block: columns that a program loads at once.
        pieces: blocks of columns that are loaded together.
        words: whether rows of 16-bit values are read by words of 4 bytes.
    """

    vector: int
    edges: bool
    block: int
    pieces: int
    words: bool = False


@functools.lru_cache(maxsize=4096)
def lattice_plan(B: int, T: int, U1: int) -> LatticePlan:
    """Return the layout for B sequences of T steps and U1 values of u."""
    num_chunks = cdiv(U1, CHUNK)
    rows = cdiv(T + CHUNK, BLOCK_ROWS) * BLOCK_ROWS
    carry_steps = cdiv(T, BLOCK_ROWS) * BLOCK_ROWS
    return LatticePlan(num_chunks, rows, B * num_chunks * rows * CHUNK + MARGIN, carry_steps)


@functools.lru_cache(maxsize=256)
def arc_kinds(durations: tuple[int, ...]) -> ArcKinds:
    """Return the kinds of arcs of a TDT, blanks and then labels, or without durations of RNN-T."""
    if max(durations, default=0) > MAX_DURATION:
        raise ValueError(
            f"durations: expected at most {MAX_DURATION} on a GPU, got {max(durations)}"
        )
    blanks, labels = (durations, durations) if durations else ((1,), (0,))
    bytes_of_kinds = [*blanks, *(d + 128 for d in labels)]
    code = sum(byte << (8 * i) for i, byte in enumerate(bytes_of_kinds))
    return ArcKinds(code, len(bytes_of_kinds), max(1, *blanks, *(d + 1 for d in labels)))


def overlap_registers(tile: RowTile, hat: bool, kinds: ArcKinds) -> int:
    """Return the registers that a thread may have where a scan runs beside the rows of a tile.

    With 64 of them, 32 programs of one warp run on a multiprocessor, and none more could. More
    elements of a row and the sums of HAT need more, without a scan too. With many kinds of arcs,
    those that a scan waits for and all of its addresses stay in 144 registers, with which 14
    programs run.
    """
    if kinds.number > 2:
        return 144
    return 64 if tile.pieces * tile.block <= 1024 and not hat else 80


def overlaps(
    B: int, T: int, U1: int, V: int, itemsize: int, directions: int, kinds: ArcKinds
) -> bool:
    """Return whether the scan in 1 or 2 directions runs beside the pass over the logits."""
    # With many kinds of arcs, 64 scans beside the pass take longer than one kernel after the other.
    max_scans = MAX_OVERLAP_SCANS if kinds.number == 2 else MAX_OVERLAP_SCANS // 2
    return (
        directions * B * cdiv(U1, CHUNK) <= max_scans
        and kinds.number <= MAX_OVERLAP_KINDS
        and kinds.depth <= MAX_OVERLAP_DEPTH
        and itemsize < 8
        and T <= MAX_OVERLAP_STEPS
        and V * itemsize >= MIN_OVERLAP_ROW_BYTES
        and B * T * U1 * V * itemsize >= MIN_OVERLAP_BYTES
    )


@functools.lru_cache(maxsize=4096)
def row_tile(V: int, itemsize: int, alignment: int, has_edges: bool | None = None) -> RowTile:
    """Return how a kernel reads rows of V values, 16 bytes of a block in each lane.

    Where a kernel adds up its rows, the columns of a lane depend on V and `itemsize` alone, so that
    a sum has the same bits wherever its row starts.

    Args:
        V: the columns.
        itemsize: the bytes of a value.
        alignment: the greatest power of two, up to 16, that divides the byte offsets of all rows
            and the address of the first; 0 if columns are not adjacent.
        has_edges: whether aligned parts of rows may be read: columns are adjacent, the first row
            starts on 16 bytes, and all tensors have the same strides. None if rows are added up.
    """
    block = min(512 // itemsize, next_power_of_2(max(V, 1)))
    edges = has_edges is None and V > block and 0 < V % block <= CHUNK
    columns, vector = V // block * block if edges else V, max(alignment // itemsize, 1)
    while columns % vector:
        vector //= 2
    if has_edges and vector * itemsize < 8 and itemsize < 8 and V >= 256:
        edges, vector = True, 16 // itemsize
        columns = V // vector * vector
    elements = MAX_LANE_ELEMENTS if itemsize < 8 else MAX_LANE_ELEMENTS // 2
    pieces = min(cdiv(columns, block), 32 * elements // block)
    words = has_edges is None and alignment in (2, 4, 8) and itemsize == 2 and block == 256
    return RowTile(vector, edges, block, pieces, words)


register_cache("rnnt.gpu.plan.arc_kinds", arc_kinds.cache_clear)
register_cache("rnnt.gpu.plan.lattice_plans", lattice_plan.cache_clear)
register_cache("rnnt.gpu.plan.row_tiles", row_tile.cache_clear)
