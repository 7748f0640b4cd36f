"""Layouts of a table of edges for the scans, built once for each table.

`source[c, k]` lists the edges into each state, which alpha needs. Beta needs the edges out of
each state. So the table is transposed: first to compressed rows (`EdgeTable`, for tables of any
size), then to a padded layout for each direction (`DirectedEdges`, for the register-resident
kernels).

Tables are cached by tensor object and version, because the transposition waits for the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ....runtime import private_names, recording
from ....runtime.caches import register_cache


class EdgeTable(NamedTuple):
    """A table `[C, K]` of edges, by the states that they enter and by the states that they leave.

    Fields:
        source: `[C, K]` int32, the state that each edge leaves; -1 for no edge.
        out_offsets: `[C + 1]` int32, where the edges that leave each state begin in `out_edges`.
        out_edges: `[C * K]` int32, c·K + k, sorted by the state that they leave; missing last.
        max_out_degree: the greatest number of edges that leave a state.
        has_missing: whether the table has entries without an edge.
        has_invalid: whether a source is out of range.
        directed: the `DirectedEdges` of this table, by block sizes.
    """

    source: Tensor
    out_offsets: Tensor
    out_edges: Tensor
    max_out_degree: int
    has_missing: bool
    has_invalid: bool
    directed: dict[tuple[int, int], DirectedEdges]


class DirectedEdges(NamedTuple):
    """A table of edges in the lanes of a block, for alpha (direction 0) and for beta (direction 1).

    Alpha takes the edges into a state and beta the edges out of it. `degree` is the greatest number
    of either.

    Fields:
        state_of_lane: `[block]` int32, the state of each lane, -1 for none.
        neighbors: `[2, degree, block]` int32, the lane of the state at the other end; -1 for none.
        edges: `[2, degree, block]` int32, c·K + k.
        edge_positions: `[2, edge_block]` int32, the index of each edge in a row of `edges`; or -1.
        is_regular: whether every entry of both directions has an edge.
    """

    state_of_lane: Tensor
    neighbors: Tensor
    edges: Tensor
    edge_positions: Tensor
    is_regular: bool


Layout = TypeVar("Layout", EdgeTable, DirectedEdges)

# Edges up to which tables are laid out on the CPU. On a GPU the first call would load some thirty
# kernels of PyTorch, which takes longer.
MAX_EDGES_ON_HOST = 2**16

_edge_tables = WeakTensorKeyDictionary()  # The values are (version, table).


def edge_table(source: Tensor) -> EdgeTable:
    """Return the table of this tensor object in its present version.

    The first call for a tensor waits for the device.
    """
    version = private_names.version_of(source)  # without one, a table is built at each call
    cached = None if version is None else _edge_tables.get(source)
    if cached is not None and cached[0] == version:
        recording.depend_on(source)
        recording.keep(*cached[1][:3])
        return cached[1]
    _refuse_capture(source)
    table = _on_device(_build_edge_table(source.to(_builder(source))), source.device)
    _synchronize(source)
    if version is not None:
        _edge_tables[source] = version, table
    return table


def directed_edges(table: EdgeTable, block: int, edge_block: int) -> DirectedEdges:
    """Return both directions of a table, padded to blocks of lanes and of edges."""
    directed = table.directed.get((block, edge_block))
    if directed is None:
        _refuse_capture(table.source)
        device = table.source.device
        builder = _on_device(table, _builder(table.source))
        directed = _on_device(_build_directed_edges(builder, block, edge_block), device)
        _synchronize(table.source)
        table.directed[block, edge_block] = directed
    recording.keep(*directed[:4])
    return directed


def _builder(source: Tensor) -> torch.device:
    """Return the device that lays out a table."""
    return torch.device("cpu") if source.numel() <= MAX_EDGES_ON_HOST else source.device


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
    C = source.shape[0]
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
    return EdgeTable(
        source=source.clamp(-2, C).int().contiguous(),
        out_offsets=out_offsets,
        out_edges=out_edges,
        max_out_degree=max_out_degree,
        has_missing=bool(num_missing),
        has_invalid=bool(num_invalid),
        directed={},
    )


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


def _build_directed_edges(table: EdgeTable, block: int, edge_block: int) -> DirectedEdges:
    C, K = table.source.shape
    degree, device = max(K, table.max_out_degree), table.source.device
    state_of_lane = _state_of_lane(C, block, device)
    has_state = state_of_lane >= 0
    lane_of_state = torch.empty(block, dtype=torch.int32, device=device)
    lanes = torch.arange(block, dtype=torch.int32, device=device)
    lane_of_state[state_of_lane[has_state].long()] = lanes[has_state]

    edge = torch.arange(C * K, dtype=torch.int32, device=device)
    source = table.source.flatten()
    valid = (source >= 0) & (source < C)
    # The index of each edge among those that leave the same state, by column, then by target. So
    # the edges of one index that leave neighboring k-mers are all stays, or moves by the same base.
    rank, leaves = torch.empty_like(edge), torch.where(valid, source, C)
    by_source = (leaves * K + edge % K).argsort(stable=True)
    rank[by_source] = edge - table.out_offsets[leaves[by_source].long()]
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
    is_regular = not table.has_missing and table.max_out_degree == K and block == C
    return DirectedEdges(state_of_lane, neighbors, edges.clamp(min=0), edge_positions, is_regular)


register_cache("chain.gpu.edge_table.edge_tables", _edge_tables.clear)
