"""The layout of tables of edges in the lanes of a block."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import partita
from partita.ops.chain.gpu.edge_table import ResidentEdges, edge_table, resident_edges
from partita.runtime.sizes import next_power_of_2

BANKS = 32


def directed(source: Tensor) -> ResidentEdges:
    C, K = source.shape
    block = max(next_power_of_2(C), 32)
    return resident_edges(edge_table(source), block, next_power_of_2(max(C * K, 4 * block)))


def random_source(C: int, K: int) -> Tensor:
    """Return a table with missing and repeated edges, and a state that many edges leave."""
    g = torch.Generator().manual_seed(C)
    source = torch.randint(-1, C, (C, K), generator=g)
    source[:, 0] = torch.where(torch.arange(C) % 3 == 0, 0, source[:, 0])
    return source


def wavefronts(index: Tensor, size: int) -> float:
    """Return how many wavefronts the lanes of a warp need for elements of `size` bytes, on average.

    Lanes that read the same word share it. A wavefront has one word of each bank.
    """
    words = max(size // 4, 1)
    accesses = (index.view(-1, 32 // words) * size // 4).tolist()
    found = 0
    for access in accesses:
        read = {word + i for word in access for i in range(words)}
        found += max(sum(word % BANKS == bank for word in read) for bank in range(BANKS))
    return found / (index.numel() / 32)


@pytest.mark.parametrize(
    "source",
    [
        torch.tensor([[0]]),
        *(partita.debruijn_source(bases, k) for bases, k in ((2, 8), (3, 6), (4, 3), (4, 5))),
        *(random_source(C, K) for C, K in ((5, 2), (100, 3), (256, 4), (1024, 2))),
    ],
    ids=lambda source: str(list(source.shape)),
)
def test_each_direction_has_all_edges(source: Tensor) -> None:
    """Each lane has the edges into its state, or out of it, and no other lane has them."""
    C, K = source.shape
    table = directed(source)
    state = table.state_of_lane_ptr
    assert sorted(state[state >= 0].tolist()) == list(range(C))
    existing = (source >= 0).flatten().nonzero().flatten().tolist()
    for direction in (0, 1):
        neighbor = table.neighbors_ptr[direction].view(-1, len(state))
        edge = table.edges_ptr[direction].view(-1, len(state))
        has_edge = neighbor >= 0
        assert sorted(edge[has_edge].tolist()) == existing
        ends = torch.stack([state.expand_as(edge), state[neighbor.clamp(min=0).long()]])
        to, come_from = ends if direction == 0 else ends.flip(0)
        index = edge[has_edge].long()
        assert torch.equal(to[has_edge].long(), index // K)
        assert torch.equal(come_from[has_edge].long(), source.flatten()[index])
        position = table.edge_positions_ptr[direction]
        assert torch.equal(edge.flatten()[position[existing].long()], torch.tensor(existing).int())
        assert (position >= 0).sum() == len(existing)


@pytest.mark.parametrize("k", [3, 4, 5])
def test_lanes_of_k_mers_read_different_banks(k: int) -> None:
    """The lanes of a warp have no conflicts where they read states, nor scores of large tables."""
    table = directed(partita.debruijn_source(4, k))
    for direction in (0, 1):
        edges, neighbors = (
            t[direction].view(5, -1) for t in (table.edges_ptr, table.neighbors_ptr)
        )
        assert sum(wavefronts(row, 8) for row in neighbors) == 10  # two for 32 pairs
        if k > 3 or direction == 0:
            assert sum(wavefronts(row, 4) for row in edges) == 5


@pytest.mark.parametrize(("bases", "k"), [(2, 6), (2, 7), (2, 10), (4, 3), (4, 4), (4, 5)])
def test_lanes_that_are_summed_have_the_same_last_base(bases: int, k: int) -> None:
    """Sums of the lanes that differ in bits 2 and 3 are sums over states with one last base."""
    state = directed(partita.debruijn_source(bases, k)).state_of_lane_ptr.view(-1, 4, 4)
    assert torch.equal(state % 4, (state[:, :1] % 4).expand_as(state))


def write_in_place(source: Tensor) -> None:
    source[0, 0] = 2


def assign_data(source: Tensor) -> None:
    source.data = torch.tensor([[2, 1], [1, 2], [2, 0]])


def assign_data_that_lies_otherwise(source: Tensor) -> None:
    source.data = source.data.flatten().as_strided((3, 2), (1, 3))


@pytest.mark.parametrize(
    "change",
    [write_in_place, assign_data, assign_data_that_lies_otherwise],
    ids=lambda f: f.__name__,
)
def test_a_table_that_changed_is_laid_out_anew(change: Callable[[Tensor], None]) -> None:
    source = torch.tensor([[0, 1], [1, 2], [2, 0]])
    table = edge_table(source)
    assert edge_table(source) is table
    change(source)
    assert torch.equal(edge_table(source).edges.source_ptr, source.int())
