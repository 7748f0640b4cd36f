"""Allocate results and launch the kernels for the best paths of chains and for samples."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import launch
from ....runtime.sizes import cdiv
from .edge_table import EdgeTable, directed_edges, edge_table
from .launch import chain_scan
from .launch_segments import scan_boundaries
from .plan import (
    SEGMENT_LANES,
    block_options,
    is_parallel,
    path_segments,
    prefetch_options,
    resident_options,
    sample_options,
    segment_options,
    segment_sizes,
    unroll_options,
)
from .resident_path import (
    chain_resident_final_state_kernel,
    chain_resident_middle_kernel,
    chain_resident_segment_maps_kernel,
    chain_resident_trace_kernel,
)
from .resident_viterbi import chain_resident_viterbi_kernel
from .sample import chain_sample_kernel
from .segment_paths import (
    chain_group_maps_kernel,
    chain_segment_pointers_kernel,
    chain_trace_maps_kernel,
    chain_trace_steps_kernel,
)
from .viterbi import chain_viterbi_kernel


class ViterbiResults(NamedTuple):
    """The results of the Viterbi algorithm; states and edges are empty without a trace.

    Fields:
        score: `[N]`, the score of the best path, fp64 for fp64 scores and otherwise fp32.
        states: `[T + 1, N]` int64, its states; -1 after the length and where there is no path.
        edges: `[T, N]` int64, its edges c·K + k; -1 after the length and where there is no path.
    """

    score: Tensor
    states: Tensor
    edges: Tensor


def chain_viterbi(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    trace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the score of the best path, its states and its edges."""
    T, N = scores.shape[:2]
    table, device = edge_table(source), scores.device
    path = ViterbiResults(
        torch.empty(N, dtype=acc_dtype(scores.dtype), device=device),
        torch.empty((T + 1, N) if trace else 0, dtype=torch.int64, device=device),
        torch.empty((T, N) if trace else 0, dtype=torch.int64, device=device),
    )
    if table.has_invalid:
        return path.score.fill_(torch.nan), path.states.fill_(-1), path.edges.fill_(-1)
    lengths = None if lengths is None else lengths.contiguous()
    resident = resident_options(scores, table.max_out_degree)
    if is_parallel(T, N, scores.shape[2]):
        _parallel_viterbi(scores, table, (initial, final, lengths), trace, path)
    elif resident is not None:
        _resident_viterbi(scores, table, initial, final, lengths, trace, resident, path)
    else:
        _general_viterbi(scores, table, initial, final, lengths, trace, path)
    return path.score, path.states, path.edges


def _pointer_dtype(K: int) -> torch.dtype:
    """Return the dtype of backpointers, which are numbers of edges into a state."""
    return torch.uint8 if K <= 256 else torch.int32


def _general_viterbi(
    scores: Tensor,
    table: EdgeTable,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    trace: bool,
    path: ViterbiResults,
) -> None:
    """Fill in the best path of each chain, for tables of any size."""
    T, N, C, K = scores.shape
    pointers_shape = (T, N, C) if trace else 0
    launch(
        chain_viterbi_kernel,
        N,
        scores,
        table.source,
        initial,
        final,
        lengths,
        torch.empty((2, N, C), dtype=torch.float64, device=scores.device),
        torch.empty(pointers_shape, dtype=_pointer_dtype(K), device=scores.device),
        *path,
        *scores.shape,
        *scores.stride(),
        *initial.stride(),
        *final.stride(),
        TRACE=trace,
        **block_options(C),
    )


def _parallel_viterbi(
    scores: Tensor,
    table: EdgeTable,
    ends: tuple[Tensor, Tensor, Tensor | None],
    trace: bool,
    path: ViterbiResults,
) -> None:
    """Fill in the best path of few long chains of few states."""
    T, N, C, K = scores.shape
    sizes, rows, device = segment_sizes(T, N, C), segment_options(C), scores.device
    steps, segments, size, groups = sizes
    integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
    last = torch.empty(N, **integers)
    boundaries = torch.empty((N, segments + 1, C), dtype=torch.float64, device=device)
    outputs = (None, path.score, last)
    scan_boundaries(scores, table, ends, boundaries if trace else None, 1, outputs)
    if not trace:
        return
    backpointers = torch.empty((T, N, C), dtype=_pointer_dtype(K), device=device)
    maps, group_maps = (torch.empty((N, number, C), **integers) for number in (segments, groups))
    after, group_after = (torch.empty((N, number), **integers) for number in (segments, groups))
    launch(
        chain_segment_pointers_kernel,
        cdiv(N * segments, rows["ROWS"]),
        scores,
        table.source,
        ends[2],
        boundaries,
        backpointers,
        maps,
        *scores.shape,
        *scores.stride(),
        segments,
        steps,
        DEGREE=unroll_options(K, 0)["UNROLL_IN"],
        **rows,
    )
    launch(
        chain_group_maps_kernel,
        N * groups,
        maps,
        group_maps,
        *(C, segments, groups, size),
        BLOCK_C=rows["BLOCK_C"],
        num_warps=1,
    )
    lanes: dict[str, Any] = {"LANES": SEGMENT_LANES, "num_warps": 1}
    for traced, known, states, members, number in (
        (group_maps, last, group_after, groups, 1),
        (maps, group_after, after, segments, groups),
    ):
        launch(
            chain_trace_maps_kernel,
            cdiv(N * number, SEGMENT_LANES),
            *(traced, known, states),
            *(N, C, members, number, groups if number == 1 else size),
            **lanes,
        )
    launch(
        chain_trace_steps_kernel,
        cdiv(N * segments, SEGMENT_LANES),
        *(table.source, ends[2], backpointers, after, path.states, path.edges),
        *(*scores.shape, segments, steps),
        **lanes,
    )


class ViterbiWorkspace(NamedTuple):
    """The buffers of the register-resident Viterbi kernels, with S segments in each direction.

    Fields:
        middle: `[2, N, BLOCK_C]` fp64, alpha and beta at the meeting point.
        backpointers: `[T, N, BLOCK_C]` int16.
        segment_maps: `[2, S, N, BLOCK_C]` int16, the outer lane of a segment for each inner lane.
            It is empty if there is one segment, whose outer lane has no use.
        segment_starts: `[2, S, N]` int32, the lane in which the path enters each segment.
        has_tie: `[N]` int32, whether the best path has an equal.
    """

    middle: Tensor
    backpointers: Tensor
    segment_maps: Tensor
    segment_starts: Tensor
    has_tie: Tensor


def _viterbi_workspace(
    T: int, N: int, block: int, segments: int, trace: bool, device: torch.device
) -> ViterbiWorkspace:
    maps_shape = (2, segments, N, block)
    return ViterbiWorkspace(
        torch.empty((2, N, block), dtype=torch.float64, device=device),
        torch.empty((T, N, block) if trace else 0, dtype=torch.int16, device=device),
        torch.empty(maps_shape if trace and segments > 1 else 0, dtype=torch.int16, device=device),
        torch.empty((2, segments, N), dtype=torch.int32, device=device),
        torch.empty(N, dtype=torch.int32, device=device),
    )


def _resident_viterbi(
    scores: Tensor,
    table: EdgeTable,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    trace: bool,
    resident: dict[str, Any],
    path: ViterbiResults,
) -> None:
    """Fill in the best path of each chain.

    The first round meets in the middle. The second round runs forward only, for chains whose best
    path has a tie, to break ties in the promised order.
    """
    T, N, _, K = scores.shape
    block, num_warps, degree = resident["BLOCK_C"], resident["num_warps"], resident["DEGREE"]
    edges = directed_edges(table, block, resident["BLOCK_E"])
    tables = (edges.state_of_lane, edges.neighbors, edges.edges)
    half_segments = path_segments(T, False).number
    w = _viterbi_workspace(T, N, block, half_segments, trace, scores.device)
    for forward_only in (False, True) if trace else (False,):
        segment, segments = path_segments(T, forward_only)
        segment_options = {"SEGMENT": segment, "BLOCK_C": block}
        scans = N if forward_only else 2 * N
        launch(
            chain_resident_viterbi_kernel,
            scans,
            scores,
            *tables,
            initial,
            final,
            lengths,
            w.has_tie,
            w.middle,
            w.backpointers,
            *scores.shape,
            *scores.stride(),
            *initial.stride(),
            *final.stride(),
            TRACE=trace,
            FORWARD_ONLY=forward_only,
            REGULAR=edges.is_regular,
            **prefetch_options(resident),
            **resident,
        )
        if trace and segments > 1:
            launch(
                chain_resident_segment_maps_kernel,
                scans * segments,
                w.backpointers,
                lengths,
                w.has_tie,
                w.segment_maps,
                T,
                N,
                segments,
                FORWARD_ONLY=forward_only,
                **segment_options,
                num_warps=min(4, num_warps),
            )
        if forward_only:
            launch(
                chain_resident_final_state_kernel,
                N,
                edges.state_of_lane,
                final,
                lengths,
                w.has_tie,
                w.middle,
                w.segment_maps,
                w.segment_starts,
                path.score,
                path.states,
                segments,
                T,
                N,
                *final.stride(),
                **segment_options,
                num_warps=num_warps,
            )
        else:
            launch(
                chain_resident_middle_kernel,
                N,
                scores,
                *tables,
                lengths,
                w.middle,
                w.segment_maps,
                w.has_tie,
                w.segment_starts,
                *path,
                segments,
                T,
                N,
                K,
                *scores.stride(),
                TRACE=trace,
                DEGREE=degree,
                **segment_options,
                num_warps=num_warps,
            )
        if trace:
            launch(
                chain_resident_trace_kernel,
                scans * segments,
                w.backpointers,
                edges.state_of_lane,
                edges.edges,
                lengths,
                w.segment_starts,
                w.has_tie,
                path.states,
                path.edges,
                T,
                N,
                segments,
                FORWARD_ONLY=forward_only,
                DEGREE=degree,
                **segment_options,
                num_warps=1,
            )


def chain_sample(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw paths from the posterior, given `uniforms`, `[T + 1, samples, N]` fp64.

    Returns:
        The states `[samples, T + 1, N]` and the edges `[samples, T, N]`; -1 for a chain without a
        path.
    """
    T, N, _, K = scores.shape
    samples = uniforms.shape[1]
    table = edge_table(source)
    states = torch.empty((samples, T + 1, N), dtype=torch.int64, device=scores.device)
    edges = torch.empty((samples, T, N), dtype=torch.int64, device=scores.device)
    if table.has_invalid:
        return states.fill_(-1), edges.fill_(-1)
    options = sample_options(K, samples)
    launch(
        chain_sample_kernel,
        N * cdiv(samples, options["BLOCK_S"]),
        scores,
        table.source,
        final,
        None if lengths is None else lengths.contiguous(),
        chain_scan(scores, source, initial, final, lengths, False, False),
        uniforms.contiguous(),
        states,
        edges,
        samples,
        *scores.shape,
        *scores.stride(),
        *final.stride(),
        **options,
    )
    return states, edges
