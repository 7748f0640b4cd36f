"""The tuples that kernels of chains take: tensors with strides, tables of edges, results.

Kernels get these tuples with tensors, and device functions with pointers. A field that a kernel
does not read is None.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.target import target_of
from ..common import ChainPotentials
from . import plan
from .edge_table import ChainEdges, EdgeTable, ResidentEdges, resident_edges
from .resident_steps import resident_shape


class StridedEdges(NamedTuple):
    """A number for each edge at each step, `[T, N, C, K]` with the strides `t, n, c, k`."""

    ptr: tl.tensor
    t: tl.tensor
    n: tl.tensor
    c: tl.tensor
    k: tl.tensor


class StridedStates(NamedTuple):
    """A number for each state of each chain, `[N, C]` with the strides `n, c`."""

    ptr: tl.tensor
    n: tl.tensor
    c: tl.tensor


class StridedChains(NamedTuple):
    """A number for each chain, `[N]` with the stride `n`."""

    ptr: tl.tensor
    n: tl.tensor


class Chains(NamedTuple):
    """N chains of T steps, as their kernels take them.

    Kernels take the tuple apart at once, because Triton 3.6 forgets constants of tuples in a tuple,
    such as strides of 1, where a branch or a loop begins.

    Fields:
        scores: the scores of the edges.
        edges: the edges; `ResidentEdges` for the register-resident kernels.
        initial: the scores of the first states.
        final: the scores of the last states.
        lengths_ptr: the number of steps of each chain, `[N]`, or None for T.
    """

    scores: StridedEdges
    edges: ChainEdges | ResidentEdges
    initial: StridedStates
    final: StridedStates
    lengths_ptr: Tensor | None
    T: int
    N: int


class ChainGradients(NamedTuple):
    """The gradients of edges `[T, N, C, K]`, first states `[N, C]` and last states `[N, C]`."""

    edges_ptr: tl.tensor
    initial_ptr: tl.tensor
    final_ptr: tl.tensor


class ChainTotals(NamedTuple):
    """The results of whole chains.

    Fields:
        logz_ptr: log Z or the best score, `[N]` fp64.
        rounded_ptr: the same, `[N]` in the dtype of results.
        last_ptr: the last state of the best path or -1, `[N]` int32.
    """

    logz_ptr: tl.tensor
    rounded_ptr: tl.tensor
    last_ptr: tl.tensor


class ChainPaths(NamedTuple):
    """The best paths of chains, or samples; `states` and `edges` are -1 where there is no path.

    Fields:
        score_ptr: `[N]`, the score of the best path.
        states_ptr: `[T + 1, N]` int64, or `[samples, T + 1, N]`.
        edges_ptr: `[T, N]` int64, or `[samples, T, N]`: the edges c * K + k.
    """

    score_ptr: tl.tensor
    states_ptr: tl.tensor
    edges_ptr: tl.tensor


def chains_of(chain: ChainPotentials, table: EdgeTable) -> Chains:
    """Return what kernels get of chains. A source out of range makes all lengths invalid."""
    scores, _, initial, final, lengths = chain
    if table.has_invalid:
        lengths = torch.full(scores.shape[1:2], -1, device=scores.device)
    return Chains(
        StridedEdges(scores, *scores.stride()),
        table.edges,
        StridedStates(initial, *initial.stride()),
        StridedStates(final, *final.stride()),
        None if lengths is None else lengths.contiguous(),
        *scores.shape[:2],
    )


def resident_arguments(chain: ChainPotentials, table: EdgeTable) -> dict[str, Any] | None:
    """Return what register-resident kernels share, or None where they do not serve the call."""
    scores = chain.scores
    options = plan.resident_options(scores, table.max_out_degree, target_of(scores.device))
    if options is None:
        return None
    block = options["BLOCK_C"]
    edges = resident_edges(table, block, options["BLOCK_E"])
    # Every lane has a state, and every entry of both directions an edge.
    is_regular = not table.has_missing and (edges.C, edges.K) == (block, table.max_out_degree)
    return {
        "chains": chains_of(chain, table)._replace(edges=edges),
        "shape": resident_shape(REGULAR=is_regular, **options),
        "num_warps": block // 32,
        # With 8 warps, two programs fit on a multiprocessor.
        "maxnreg": 128 if block == 256 else None,
    }
