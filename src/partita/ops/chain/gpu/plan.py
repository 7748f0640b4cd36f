"""The table of a chain in the order of the states that its edges leave, built once for each table."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ....runtime.launch import INTERPRETED, NVIDIA, next_power_of_2, tl_acc_dtype

MOST_UNROLLED = 8  # edges into or out of a state that are loaded together, before anything waits
MOST_STATES = 1024  # in a block


class Table(NamedTuple):
    """Both orders of a table `[C, K]`.

    Fields:
        source: `[C, K]` int32, as given.
        first: `[C + 1]` int32, where the edges that leave each state begin in `edges`.
        edges: `[C * K]` int32, c·K + k, sorted by the state that they leave; those that leave none stand last.
        most: the greatest number of edges that leave a state.
        missing: whether there are edges that leave no state.
        wrong: whether there are some that would leave a state that does not exist.
    """

    source: Tensor
    first: Tensor
    edges: Tensor
    most: int
    missing: bool
    wrong: bool
    made: dict[tuple[int, int], Directions]


class Directions(NamedTuple):
    """A table as α sees it, which takes the edges into a state, and as β does, which takes those out of it; `width` of them at most.

    Fields:
        order: `[block]` int32, the state at each place of the block, -1 for none.
        others: `[2, width, block]` int32, the places of the states at their other ends, -1 where there is none.
        edges: `[2, width, block]` int32, c·K + k.
        places: `[2, block of edges]` int32, where each edge stands in a direction's `[width, block]`; -1 where there is none.
        whole: whether no place is empty.
    """

    order: Tensor
    others: Tensor
    edges: Tensor
    places: Tensor
    whole: bool


_tables = WeakTensorKeyDictionary()  # of [version, table]


def table_of(source: Tensor) -> Table:
    """The table of this tensor object, in this version of it; the first call for it waits for the device, once."""
    version = (
        None if source.is_inference() else source._version
    )  # those tell no version: their table is built each time
    found = None if version is None else _tables.get(source)
    if found is not None and found[0] == version:
        return found[1]
    _not_in_a_capture(source)
    states = source.shape[0]
    wide = source.long()  # a narrow type would wrap the bounds
    leaving = torch.where((wide < 0) | (wide >= states), states, wide).flatten()
    wrong = (wide < -1) | (wide >= states)
    degree = torch.bincount(leaving, minlength=states + 1)[:states]
    first = torch.nn.functional.pad(degree.cumsum(0), (1, 0)).int()
    edges = leaving.argsort(stable=True).int()
    most, missing, wrong = (
        torch.stack([degree.max(), (leaving == states).sum(), wrong.sum()]).tolist()
        if source.numel()
        else (0, 0, 0)
    )
    table = Table(
        wide.clamp(-2, states).int().contiguous(),
        first,
        edges,
        most,
        bool(missing),
        bool(wrong),
        {},
    )
    _wait_for(source)
    if version is not None:
        _tables[source] = version, table
    return table


def directions_of(table: Table, block: int, edge_block: int) -> Directions:
    """The two directions of this table, padded to blocks."""
    found = table.made.get((block, edge_block))
    if found is None:
        _not_in_a_capture(table.source)
        found = _directions(table, block, edge_block)
        _wait_for(table.source)
        table.made[block, edge_block] = found
    return found


def _not_in_a_capture(source: Tensor) -> None:
    if source.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "source: its transposed table is not built during a capture; run the op once with this tensor before"
        )


def _wait_for(source: Tensor) -> None:
    """What is kept may be read on another stream next."""
    if source.is_cuda:
        torch.cuda.current_stream(source.device).synchronize()


def _order(states: int, block: int, device: torch.device) -> Tensor:
    """Which state stands at each place of a block, -1 where none does, `[block]` int32.

    States that are a power of two apart, as those at the ends of one k-mer's edges are, would share a bank of shared memory: the lowest bits of a
    place are mixed with higher ones.
    """
    place = torch.arange(block, dtype=torch.int32, device=device)
    if block >= 64:
        state = torch.arange(block, dtype=torch.int32, device=device)
        place = state ^ (state >> 4 & 3) ^ ((state >> block.bit_length() - 3 & 3) << 3)
    order = torch.empty(block, dtype=torch.int32, device=device)
    order[place.long()] = torch.arange(block, dtype=torch.int32, device=device)
    return order.masked_fill(order >= states, -1)


def _directions(table: Table, block: int, edge_block: int) -> Directions:
    states, slots = table.source.shape
    width, device = max(slots, table.most), table.source.device
    order = _order(states, block, device)
    place = torch.empty(block, dtype=torch.int32, device=device)  # of each state
    place[order[order >= 0].long()] = torch.arange(block, dtype=torch.int32, device=device)[
        order >= 0
    ]
    flat = torch.arange(states * slots, device=device, dtype=torch.int32)
    leaving = table.source.flatten()
    held = (leaving >= 0) & (leaving < states)
    rank = torch.empty_like(flat)  # of each edge among those that leave the same state
    edge = table.edges.long()
    rank[edge] = flat - table.first[leaving[edge].clamp(0, states).long()]
    left, entered = place[leaving.clamp(0, states - 1).long()], place[(flat // slots).long()]
    others, edges = torch.full((2, 2, width * block), -1, dtype=torch.int32, device=device)
    places = torch.full((2, edge_block), -1, dtype=torch.int32, device=device)
    spare = width * block  # where edges go that stand nowhere
    for direction, (at, other) in enumerate(
        [(flat % slots * block + entered, left), (rank * block + left, entered)]
    ):
        at = torch.where(held, at, spare).long()
        for row, values in ((others[direction], other), (edges[direction], flat)):
            row.copy_(torch.nn.functional.pad(row, (0, 1)).scatter(0, at, values)[:spare])
        places[direction, : len(flat)] = torch.where(held, at, -1).int()
    whole = not table.missing and table.most == slots and block == states
    return Directions(order, others, edges.clamp(min=0), places, whole)


def shape_options(scores: Tensor, table: Table) -> dict[str, Any]:
    """Compile-time arguments: edges that are loaded together, and states of a block, one a thread."""
    states, slots = scores.shape[2:]
    block = min(next_power_of_2(max(states, 1)), MOST_STATES)
    unrolled = {
        "SLOTS": slots if slots <= MOST_UNROLLED else 0,
        "MOST": table.most if table.most <= MOST_UNROLLED else 0,
    }
    return {
        **unrolled,
        "BLOCK_C": block,
        "WIDE": tl_acc_dtype(scores.dtype),
        "num_warps": max(1, block // 32),
    }


def fast_options(scores: Tensor, table: Table) -> dict[str, Any] | None:
    """Compile-time arguments of the kernels for small tables; None where they do not serve."""
    states, slots = scores.shape[2:]
    width = max(slots, table.most)
    reach = (states - 1) * scores.stride(2) + (slots - 1) * scores.stride(3)
    if INTERPRETED or not NVIDIA or scores.dtype == torch.float64:
        return None
    if not 0 < states <= MOST_STATES or not 0 < width <= MOST_UNROLLED or reach >= 2**31:
        return None
    block, vec = max(next_power_of_2(states), 32), 16 // scores.element_size()
    plain = scores.stride()[2:] == (slots, 1)
    vectors = plain and all(
        number % 16 == 0 for number in (states * slots, *scores.stride()[:2], scores.data_ptr())
    )
    return {
        "WIDTH": width,
        "PARTS": next_power_of_2(width),
        "PLAIN": plain,
        "VEC": vec if vectors else 1,
        "BLOCK_C": block,
        "BLOCK_E": max(
            next_power_of_2(states * slots), block * (vec if vectors else 1)
        ),  # a vector for each thread at least
        "num_warps": block // 32,
    }


def ahead(fast: dict[str, Any]) -> dict[str, int]:
    """Steps whose scores are loaded before they are used, as registers allow."""
    warps = fast["num_warps"]
    return {
        "AHEAD": 4 if warps <= 16 else 1,
        **({"maxnreg": 128} if warps == 8 else {}),
    }  # so that two programs fit beside each other
