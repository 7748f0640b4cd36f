"""The table of a chain in the order of the states that its edges leave, built once for each table."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Table(NamedTuple):
    """Both orders of a table `[C, K]`.

    Fields:
        source: `[C, K]` int32, as given.
        first: `[C + 1]` int32, where the edges that leave each state begin in `edges`.
        edges: `[C * K]` int32, c·K + k, sorted by the state that they leave; those that leave none stand last.
        most: the greatest number of edges that leave a state.
        whole: whether no edge is missing.
    """

    source: Tensor
    first: Tensor
    edges: Tensor
    most: int
    whole: bool


_tables = WeakTensorKeyDictionary()  # of [version, table]


def table_of(source: Tensor) -> Table:
    """The table of this tensor object, in this version of it; the first call for it waits for the device, once."""
    found = _tables.get(source)
    if found is not None and found[0] == source._version:
        return found[1]
    if source.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("source: its transposed table is not built during a capture; run the op once with this tensor before")
    states = source.shape[0]
    leaving = torch.where((source < 0) | (source >= states), states, source.long()).flatten()
    degree = torch.bincount(leaving, minlength=states + 1)[:states]
    first = torch.nn.functional.pad(degree.cumsum(0), (1, 0)).int()
    edges = leaving.argsort(stable=True).int()
    most, missing = torch.stack([degree.max(), (leaving == states).sum()]).tolist() if states else (0, 0)
    table = Table(source.clamp(-2, states).int().contiguous(), first, edges, most, not missing)
    _tables[source] = source._version, table
    return table
