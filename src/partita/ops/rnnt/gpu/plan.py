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
# With these and 2 rows that are loaded together, the arcs that a scan waits for and all of its
# addresses stay in registers. 14 programs of 144 registers run on a multiprocessor.
TDT_OVERLAP_REGISTERS = 144
MAX_TDT_OVERLAP_SCANS = 32  # with 64, one kernel after the other takes less time
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

    @property
    def layout(self) -> dict[str, int]:
        """The layout as arguments of kernels."""
        return {"num_chunks": self.num_chunks, "rows": self.rows, "nodes": self.nodes}

    def scan_sizes(self, T: int, B: int, U1: int, V: int) -> dict[str, int]:
        """Return the sizes as arguments of kernels with a scan; see `scan.ScanSizes`."""
        return {"T": T, "B": B, "U1": U1, "V": V, **self.layout, "carry_steps": self.carry_steps}


class RowTile(NamedTuple):
    """The blocks in which a single warp reads rows of V values, one after another.

    Fields:
        vector: elements that are aligned together.
        edges: whether the aligned part of a row begins and ends inside it.
        block: columns that a program loads at once.
        pieces: blocks of columns that are loaded together.
    """

    vector: int
    edges: bool
    block: int
    pieces: int


@functools.lru_cache(maxsize=4096)
def lattice_plan(B: int, T: int, U1: int) -> LatticePlan:
    """Return the layout for B sequences of T steps and U1 values of u."""
    num_chunks = cdiv(U1, CHUNK)
    rows = cdiv(T + CHUNK, BLOCK_ROWS) * BLOCK_ROWS
    carry_steps = cdiv(T, BLOCK_ROWS) * BLOCK_ROWS
    return LatticePlan(num_chunks, rows, B * num_chunks * rows * CHUNK + MARGIN, carry_steps)


def overlap_registers(tile: RowTile, hat: bool) -> int:
    """Return the registers that a thread may have where a scan runs beside the rows of a tile.

    With 64 of them, 32 programs of one warp run on a multiprocessor, and none more could. More
    elements of a row and the sums of HAT need more, without a scan too.
    """
    return 64 if tile.pieces * tile.vector <= 32 and not hat else 80


def overlaps(B: int, T: int, U1: int, V: int, itemsize: int, directions: int) -> bool:
    """Return whether the scan runs beside the pass over the logits.

    Args:
        B, T, U1, V: the sizes of the logits.
        itemsize: the bytes of a logit.
        directions: 2 for α and β, 1 for α alone.
    """
    return (
        itemsize < 8
        and directions * B * cdiv(U1, CHUNK) <= MAX_OVERLAP_SCANS
        and T <= MAX_OVERLAP_STEPS
        and V * itemsize >= MIN_OVERLAP_ROW_BYTES
        and B * T * U1 * V * itemsize >= MIN_OVERLAP_BYTES
    )


def tdt_overlaps(
    B: int, T: int, U1: int, V: int, itemsize: int, directions: int, kinds: int, depth: int
) -> bool:
    """Return whether the scan of a token-and-duration transducer runs beside the pass.

    Args:
        B, T, U1, V, itemsize, directions: see `overlaps`.
        kinds: the number of kinds of arcs.
        depth: the states that a lane remembers.
    """
    fits = kinds <= MAX_OVERLAP_KINDS and depth <= MAX_OVERLAP_DEPTH
    few = directions * B * cdiv(U1, CHUNK) <= MAX_TDT_OVERLAP_SCANS
    return fits and few and overlaps(B, T, U1, V, itemsize, directions)


@functools.lru_cache(maxsize=4096)
def row_tile(V: int, itemsize: int, alignment: int, has_edges: bool) -> RowTile:
    """Return how a kernel reads rows of V values.

    Args:
        V: the number of values.
        itemsize: the bytes of a value.
        alignment: the greatest power of two, up to 16, that divides the byte offsets of all rows
            and the address of the first.
        has_edges: whether aligned parts of rows may be read, for which columns are adjacent, the
            first row starts on 16 bytes, and all tensors have the same strides.
    """
    vector = max(1, min(alignment // itemsize, 16 // itemsize))
    while V % vector:
        vector //= 2
    edges = has_edges and vector * itemsize < 8 and itemsize < 8 and V >= 256
    if edges:
        vector = 16 // itemsize
    columns = V // vector * vector if edges else V
    block = min(32 * vector, next_power_of_2(max(V, 1)))
    elements = MAX_LANE_ELEMENTS if itemsize < 8 else MAX_LANE_ELEMENTS // 2
    pieces = min(cdiv(columns, block), elements // vector)
    return RowTile(vector, edges, block, pieces)


register_cache("rnnt.gpu.plan.lattice_plans", lattice_plan.cache_clear)
register_cache("rnnt.gpu.plan.row_tiles", row_tile.cache_clear)
