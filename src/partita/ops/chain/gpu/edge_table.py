"""Layouts of a table of edges for the scans, built once for each table.

`source[c, k]` lists the edges into each state, which alpha needs. Beta needs the edges out of
each state. So the table is transposed: first to compressed rows (`ChainEdges`, for tables of any
size), then to a padded layout for each direction (`ResidentEdges`, for the register-resident
kernels).

Tables are laid out on the CPU, since on a GPU the first call would load some thirty kernels of
PyTorch. They are cached by tensor object, because the transposition waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ....runtime import recording
from ....runtime.caches import TableCache


class ChainEdges(NamedTuple):
    """A table of edges, by the states that they enter and by the states that they leave.

    Kernels get this tuple with tensors, and device functions with pointers.

    Fields:
        source_ptr: `[C, K]` int32, the state that the k-th edge into c leaves; -1 for no edge.
        out_offsets_ptr: `[C + 1]` int32, where the edges that leave each state start.
        out_edges_ptr: `[C * K]` int32, c·K + k, sorted by the state that they leave; missing last.
        C: the number of states.
        K: the number of edges into a state.
    """

    source_ptr: Any
    out_offsets_ptr: Any
    out_edges_ptr: Any
    C: int
    K: int


class ResidentEdges(NamedTuple):
    """A table of edges in the lanes of a block, for alpha (direction 0) and for beta (direction 1).

    Alpha takes the edges into a state and beta the edges out of it. `degree` is the greatest number
    of either.

    Fields:
        state_of_lane_ptr: `[block]` int32, the state of each lane, -1 for none.
        neighbors_ptr: `[2, degree, block]` int32, the lane of the state at the other end, or -1.
        edges_ptr: `[2, degree, block]` int32, c·K + k.
        edge_positions_ptr: `[2, edge_block]` int32, the index of each edge in a row, or -1.
        C, K: as in `ChainEdges`.
    """

    state_of_lane_ptr: Any
    neighbors_ptr: Any
    edges_ptr: Any
    edge_positions_ptr: Any
    C: int
    K: int


class EdgeTable(NamedTuple):
    """What is known of a table `[C, K]` of edges.

    Fields:
        edges: the edges by their states.
        max_out_degree: the greatest number of edges that leave a state.
        has_missing: whether the table has entries without an edge.
        has_invalid: whether a source is out of range.
        resident: the edges in lanes, by block sizes.
    """

    edges: ChainEdges
    max_out_degree: int
    has_missing: bool
    has_invalid: bool
    resident: dict[tuple[int, int], ResidentEdges]


Layout = TypeVar("Layout", ChainEdges, ResidentEdges)

_edge_tables = TableCache("chain.gpu.edge_table.edge_tables")


def edge_table(source: Tensor) -> EdgeTable:
    """Return the table of this tensor object with its present values.

    The first call for a tensor waits for the device.
    """
    found: EdgeTable | None = _edge_tables.get(source)
    if found is not None:
        recording.depend_on(source)
        recording.keep(*found.edges[:3])
        return found
    _refuse_capture(source)
    table = _build_edge_table(source.cpu())
    table = table._replace(edges=_on_device(table.edges, source.device))
    _synchronize(source)
    _edge_tables.store(source, table)
    return table


def resident_edges(table: EdgeTable, block: int, edge_block: int) -> ResidentEdges:
    """Return both directions of a table, padded to blocks of lanes and of edges."""
    found = table.resident.get((block, edge_block))
    if found is None:
        source = table.edges.source_ptr
        _refuse_capture(source)
        edges = _on_device(table.edges, torch.device("cpu"))
        built = _build_resident_edges(edges, table.max_out_degree, block, edge_block)
        found = table.resident[block, edge_block] = _on_device(built, source.device)
        _synchronize(source)
    recording.keep(*found[:4])
    return found


def _on_device(layout: Layout, device: torch.device) -> Layout:
    """Return a layout with its tensors on a device."""
    fields: list[Any] = [x.to(device) if isinstance(x, Tensor) else x for x in layout]
    return type(layout)(*fields)


def _refuse_capture(source: Tensor) -> None:
    if source.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "source: its transposed table is not built during a capture; run the op once with this"
            " tensor before"
        )


def _synchronize(source: Tensor) -> None:
    """Wait for the current stream, because another stream may read the cached table next."""
    if source.is_cuda:
        torch.cuda.current_stream(source.device).synchronize()


def _build_edge_table(source: Tensor) -> EdgeTable:
    C, K = source.shape
    source = source.long()  # A narrow integer type would wrap the bounds.
    leaves = torch.where((source < 0) | (source >= C), C, source).flatten()
    invalid = (source < -1) | (source >= C)
    out_degree = torch.bincount(leaves, minlength=C + 1)[:C]
    out_offsets = torch.nn.functional.pad(out_degree.cumsum(0), (1, 0)).int()
    out_edges = leaves.argsort(stable=True).int()
    max_out_degree, num_missing, num_invalid = (
        torch.stack([out_degree.max(), (leaves == C).sum(), invalid.sum()]).tolist()
        if source.numel()
        else (0, 0, 0)
    )
    source = source.masked_fill(invalid, -1).int().contiguous()
    edges = ChainEdges(source, out_offsets, out_edges, C, K)
    return EdgeTable(edges, max_out_degree, bool(num_missing), bool(num_invalid), {})


def _state_of_lane(C: int, block: int, device: torch.device) -> Tensor:
    """Return the state of each lane of a block, -1 for none, `[block]` int32.

    The addresses in shared memory that the 32 lanes of a warp read should lie in different banks.
    If lanes were states, the k-mers at the ends of one k-mer's edges would be a power of two apart
    and share a bank. So the low bits of a lane are mixed with higher bits of its state. In a large
    block without spare lanes, a warp also has k-mers of each two highest bits: the scores of the
    edges out of k-mers that are 8 apart share a bank, unless they are in different columns, and
    those bits are the column.

    Lanes that differ in bits 2 and 3 alone have states that are equal modulo 4.
    """
    state = torch.arange(block, dtype=torch.int32, device=device)
    lane, high = state, block.bit_length() - 3  # the lower of the two highest bits
    if block >= 256 and block == C:
        a, b = state >> high & 1, state >> high + 1 & 1
        lane = state ^ ((a ^ b) << 3) ^ (a << 4) ^ ((state >> 3 & 3) << high)
    elif block >= 64:
        lane = state ^ ((state >> high & 3) << 3)
    if block >= 64:
        lane = lane ^ (lane >> 4 & 3)
    state_of_lane = torch.empty_like(state)
    state_of_lane[lane.long()] = state
    return state_of_lane.masked_fill(state_of_lane >= C, -1)


def _build_resident_edges(
    table: ChainEdges, max_out_degree: int, block: int, edge_block: int
) -> ResidentEdges:
    source, out_offsets, _, C, K = table
    degree, device = max(K, max_out_degree), source.device
    state_of_lane = _state_of_lane(C, block, device)
    has_state = state_of_lane >= 0
    lane_of_state = torch.empty(block, dtype=torch.int32, device=device)
    lanes = torch.arange(block, dtype=torch.int32, device=device)
    lane_of_state[state_of_lane[has_state].long()] = lanes[has_state]

    edge = torch.arange(C * K, dtype=torch.int32, device=device)
    source = source.flatten()
    valid = source >= 0
    # The index of each edge among those that leave the same state, by column, then by target. So
    # the edges of one index that leave neighboring k-mers are all stays, or moves by the same base.
    rank, leaves = torch.empty_like(edge), torch.where(valid, source, C)
    by_source = (leaves * K + edge % K).argsort(stable=True)
    rank[by_source] = edge - out_offsets[leaves[by_source].long()]
    source_lane = lane_of_state[source.clamp(0, C - 1).long()]
    target_lane = lane_of_state[(edge // K).long()]

    neighbors, edges = torch.full((2, 2, degree * block), -1, dtype=torch.int32, device=device)
    edge_positions = torch.full((2, edge_block), -1, dtype=torch.int32, device=device)
    unused = degree * block  # Entries without an edge go to a spare position.
    alpha = edge % K * block + target_lane, source_lane
    beta = rank * block + source_lane, target_lane
    for direction, (position, neighbor) in enumerate([alpha, beta]):
        index = torch.where(valid, position, unused).long()
        for row, values in ((neighbors[direction], neighbor), (edges[direction], edge)):
            padded = torch.nn.functional.pad(row, (0, 1))
            row.copy_(padded.scatter(0, index, values)[:unused])
        edge_positions[direction, : len(edge)] = torch.where(valid, position, -1).int()
    return ResidentEdges(state_of_lane, neighbors, edges.clamp(min=0), edge_positions, C, K)
