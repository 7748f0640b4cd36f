"""Allocate results and launch the kernels for best paths, samples and posteriors of states."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....primitives.gpu.target import target_of
from ....runtime.launch import launch
from ....runtime.sizes import cdiv
from ..common import ChainPotentials, fake_sample, fake_viterbi
from . import plan
from .arguments import (
    ChainPaths,
    Chains,
    ChainTotals,
    chains_of,
    resident_arguments,
)
from .edge_table import edge_table
from .launch import chain_scan, scan_boundaries
from .paths import chain_sample_kernel, chain_viterbi_kernel
from .resident_logz import (
    chain_resident_halves_kernel,
    chain_resident_logz_kernel,
    chain_resident_posteriors_kernel,
)
from .resident_viterbi import (
    SegmentMaps,
    chain_resident_final_state_kernel,
    chain_resident_middle_kernel,
    chain_resident_segment_maps_kernel,
    chain_resident_trace_kernel,
    chain_resident_viterbi_kernel,
)
from .segments import (
    SegmentGroups,
    chain_group_maps_kernel,
    chain_segment_pointers_kernel,
    chain_trace_maps_kernel,
    chain_trace_steps_kernel,
)

SUMMED_STATES = 4  # of which one kernel stores the sum


def chain_viterbi(
    chain: ChainPotentials, trace: bool, saved: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best score of each chain, and the states and edges of its path.

    Register-resident kernels also fill in `saved`, `[T + 1, N, C]` int64, with alpha and beta under
    Log up to the meeting point, for `launch_posteriors`.
    """
    scores, table = chain.scores, edge_table(chain.source)
    (T, N, C, K), device = scores.shape, scores.device
    score, states, edges = fake_viterbi(scores, trace)
    paths = ChainPaths(score, states, edges)
    chains = chains_of(chain, table)
    if saved is None and plan.is_parallel(T, N, C):
        _parallel_viterbi(chains, trace, paths)
    elif (resident := resident_arguments(chain, table)) is not None:
        _resident_viterbi(trace, resident, paths, saved)
    else:
        pointers = torch.empty((T, N, C) if trace else 0, dtype=_pointer_dtype(K), device=device)
        launch(
            chain_viterbi_kernel,
            N,
            chains=chains,
            alpha_ptr=torch.empty((2, N, C), dtype=torch.float64, device=device),
            backpointers_ptr=pointers,
            paths=paths,
            TRACE=trace,
            **plan.block_options(C),
        )
    return score, states, edges


def _pointer_dtype(K: int) -> torch.dtype:
    """Return the dtype of backpointers, which are numbers of edges into a state."""
    return torch.uint8 if K <= 256 else torch.int32


def _parallel_viterbi(chains: Chains, trace: bool, paths: ChainPaths) -> None:
    """Fill in the best path of few long chains of few states."""
    T, N, C, K = chains.T, chains.N, chains.edges.C, chains.edges.K
    device = chains.scores.ptr.device
    sizes, rows = plan.segment_sizes(T, N, C, target_of(device)), plan.segment_options(C)
    steps, segments, size, groups = sizes
    integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
    last = torch.empty(N, **integers)
    boundaries = torch.empty((N, segments + 1, C), dtype=torch.float64, device=device)
    totals = ChainTotals(None, paths.score_ptr, last)
    scan_boundaries(chains, boundaries if trace else None, 1, totals)
    if not trace:
        return
    backpointers = torch.empty((T, N, C), dtype=_pointer_dtype(K), device=device)
    maps, group_maps = (torch.empty((N, number, C), **integers) for number in (segments, groups))
    after, group_after = (torch.empty((N, number), **integers) for number in (segments, groups))
    launch(
        chain_segment_pointers_kernel,
        cdiv(N * segments, rows["ROWS"]),
        chains=chains,
        boundaries_ptr=boundaries,
        backpointers_ptr=backpointers,
        maps_ptr=maps,
        segments=segments,
        steps=steps,
        DEGREE=plan.unroll_options(K, 0)["UNROLL_IN"],
        **rows,
    )
    inner, outer = SegmentGroups(segments, groups, size), SegmentGroups(groups, 1, groups)
    launch(
        chain_group_maps_kernel,
        N * groups,
        maps_ptr=maps,
        group_maps_ptr=group_maps,
        C=C,
        groups=inner,
        BLOCK_C=rows["BLOCK_C"],
        num_warps=1,
    )
    lanes: dict[str, Any] = {"LANES": plan.SEGMENT_LANES, "num_warps": 1}
    for traced, known, states, level in (
        (group_maps, last, group_after, outer),
        (maps, group_after, after, inner),
    ):
        launch(
            chain_trace_maps_kernel,
            cdiv(N * level.number, plan.SEGMENT_LANES),
            maps_ptr=traced,
            known_ptr=known,
            states_ptr=states,
            N=N,
            C=C,
            groups=level,
            **lanes,
        )
    launch(
        chain_trace_steps_kernel,
        cdiv(N * segments, plan.SEGMENT_LANES),
        chains=chains,
        backpointers_ptr=backpointers,
        known_ptr=after,
        paths=paths._replace(score_ptr=None),
        segments=segments,
        steps=steps,
        **lanes,
    )


def _resident_viterbi(
    trace: bool,
    resident: dict[str, Any],
    paths: ChainPaths,
    saved: Tensor | None,
) -> None:
    """Fill in the best path of each chain.

    The first round meets in the middle. The second round runs forward only, for chains whose best
    path has a tie, to break ties in the promised order.
    """
    chains: Chains = resident["chains"]
    T, N, device = chains.T, chains.N, chains.scores.ptr.device
    shape, num_warps = resident["shape"], resident["num_warps"]
    block, degree = shape.BLOCK_C.value, shape.DEGREE.value
    half = plan.path_segments(T, False)[1]
    middle = torch.empty((2, N, block), dtype=torch.float64, device=device)
    backpointers = torch.empty((T, N, block) if trace else 0, dtype=torch.int16, device=device)
    maps_shape = (2, half, N, block) if trace and half > 1 else 0
    segment_maps = torch.empty(maps_shape, dtype=torch.int16, device=device)
    segment_starts = torch.empty((2, half, N), dtype=torch.int32, device=device)
    has_tie = torch.empty(N, dtype=torch.int32, device=device)
    for forward_only in (False, True) if trace else (False,):
        segment, segments = plan.path_segments(T, forward_only)
        maps = SegmentMaps(segment_maps, segment_starts, segments)
        options = {"chains": chains, "SEGMENT": segment, "BLOCK_C": block, "has_tie_ptr": has_tie}
        scans = N if forward_only else 2 * N
        launch(
            chain_resident_viterbi_kernel,
            scans,
            has_tie_ptr=has_tie,
            middle_ptr=middle,
            backpointers_ptr=backpointers,
            saved_ptr=None if forward_only else saved,
            TRACE=trace,
            FORWARD_ONLY=forward_only,
            **resident,
        )
        if trace and segments > 1:
            launch(
                chain_resident_segment_maps_kernel,
                scans * segments,
                backpointers_ptr=backpointers,
                maps=maps._replace(starts_ptr=None),
                FORWARD_ONLY=forward_only,
                num_warps=min(4, num_warps),
                **options,
            )
        if forward_only:
            launch(
                chain_resident_final_state_kernel,
                N,
                alpha_ptr=middle,
                maps=maps,
                paths=paths._replace(edges_ptr=None),
                num_warps=num_warps,
                **options,
            )
        else:
            launch(
                chain_resident_middle_kernel,
                N,
                middle_ptr=middle,
                maps=maps,
                paths=paths,
                TRACE=trace,
                DEGREE=degree,
                num_warps=num_warps,
                **options,
            )
        if trace:
            launch(
                chain_resident_trace_kernel,
                scans * segments,
                backpointers_ptr=backpointers,
                maps=maps._replace(ptr=None),
                paths=paths._replace(score_ptr=None),
                FORWARD_ONLY=forward_only,
                DEGREE=degree,
                num_warps=1,
                **options,
            )


def chain_sample(chain: ChainPotentials, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states and edges of paths from the posterior."""
    scores, table = chain.scores, edge_table(chain.source)
    N, _, K = scores.shape[1:]
    samples = uniforms.shape[1]
    states, edges = fake_sample(scores, uniforms)
    options = plan.sample_options(K, samples)
    launch(
        chain_sample_kernel,
        N * cdiv(samples, options["BLOCK_S"]),
        chains=chains_of(chain, table),
        alpha_ptr=chain_scan(chain, False, False),
        uniforms_ptr=uniforms.contiguous(),
        paths=ChainPaths(None, states, edges),
        samples=samples,
        **options,
    )
    return states, edges


class PosteriorBuffers(NamedTuple):
    """The memory for posteriors of states.

    Fields:
        saved: `[T + 1, N, C]` int64, alpha up to the meeting point and beta after it.
        logz: `[N]` fp64.
        posteriors: `[T + 1, N, C]` fp32, or `[T + 1, N, C / 4]` if each is a sum over four states,
            which equal its column modulo 4. Not written past the length.
        first: `[N, C]` fp32, the posteriors of the states at time 0.
    """

    saved: Tensor
    logz: Tensor
    posteriors: Tensor
    first: Tensor


def posterior_buffers(scores: Tensor, source: Tensor, modulus: int) -> PosteriorBuffers | None:
    """Allocate for `launch_posteriors`, or return None where its kernels do not serve the call.

    The caller adds the posteriors of the states that are equal modulo `modulus`. Where they can,
    the kernels add four of them at a time.
    """
    T, N, C, _ = scores.shape
    table = edge_table(source)
    resident = plan.resident_options(scores, table.max_out_degree, target_of(scores.device))
    if table.has_invalid or resident is None:
        return None
    can_sum = SUMMED_STATES % modulus == 0 and C == resident["BLOCK_C"]
    columns = C // SUMMED_STATES if can_sum else C
    return PosteriorBuffers(
        torch.empty((T + 1, N, C), dtype=torch.int64, device=scores.device),
        torch.empty(N, dtype=torch.float64, device=scores.device),
        torch.empty((T + 1, N, columns), dtype=torch.float32, device=scores.device),
        torch.empty((N, C), dtype=torch.float32, device=scores.device),
    )


def launch_posteriors(
    chain: ChainPotentials, buffers: PosteriorBuffers, *, are_saved: bool
) -> None:
    """Fill in the posteriors of the states at each time.

    `chain_viterbi` has filled in `buffers.saved` if they `are_saved`.
    """
    scores, table = chain.scores, edge_table(chain.source)
    N = scores.shape[1]
    resident = resident_arguments(chain, table)
    assert resident is not None
    options = {**resident, "saved_ptr": buffers.saved}
    if not are_saved:
        launch(chain_resident_halves_kernel, 2 * N, SAVE=True, BETA=False, **options)
    options["logz_ptr"] = buffers.logz
    unlimited = options | {"maxnreg": None}
    launch(chain_resident_logz_kernel, N, rounded_ptr=None, SAVE=True, **unlimited)
    launch(
        chain_resident_posteriors_kernel,
        2 * N,
        posteriors_ptr=buffers.posteriors,
        first_ptr=buffers.first,
        SUM=buffers.posteriors.shape[2] < scores.shape[2],
        **options,
    )


def launch_backward_scores(chain: ChainPotentials, result: Tensor) -> None:
    """Fill in beta at each time, `[T + 1, N, C]` fp64, of which about 48 bits are right."""
    table = edge_table(chain.source)
    resident = resident_arguments(chain, table)
    assert resident is not None
    options = {"saved_ptr": result, "SAVE": True, "BETA": True, **resident}
    launch(chain_resident_halves_kernel, chain.scores.shape[1], **options)
