"""Allocate results and launch the kernels of semi-Markov chains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2
from ..common import SemiMarkovPotentials
from . import plan
from .gradient import (
    Splits,
    semi_markov_changes_kernel,
    semi_markov_pairs_kernel,
    semi_markov_segments_kernel,
    semi_markov_states_kernel,
    semi_markov_sum_kernel,
)
from .memory_scan import semi_markov_memory_scan_kernel, semi_markov_tables_kernel
from .nbest import semi_markov_nbest_scan_kernel, semi_markov_nbest_trace_kernel
from .paths import (
    semi_markov_best_scan_kernel,
    semi_markov_sample_kernel,
    semi_markov_trace_kernel,
)
from .scan import semi_markov_scan_kernel, semi_markov_weights_kernel
from .scores import Chains, Emissions, Matrix, Scans


def is_exact(chain: SemiMarkovPotentials) -> bool:
    """Return whether exponentials have to be right in fp64."""
    return any(scores.dtype == torch.float64 for scores in chain.variables[:3])


def strided(scores: Tensor) -> Matrix:
    """Return scores `[rows, columns]` with their strides, as kernels take them."""
    return Matrix(scores, *scores.stride())


def strided_emissions(chain: SemiMarkovPotentials) -> Emissions:
    """Return the emissions with their strides, as kernels take them."""
    return Emissions(chain.emissions, *chain.emissions.stride())


def contiguous_lengths(chain: SemiMarkovPotentials) -> Tensor | None:
    """Return the lengths as kernels take them."""
    return None if chain.lengths is None else chain.lengths.contiguous()


def chains_of(chain: SemiMarkovPotentials) -> Chains:
    """Return the chains of a batch, as the scans take them."""
    emissions, start, end = strided_emissions(chain), strided(chain.start), strided(chain.end)
    sizes = (*chain.emissions.shape, len(chain.durations))
    return Chains(emissions, start, end, contiguous_lengths(chain), *sizes)


def semi_markov_logz(
    chain: SemiMarkovPotentials,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and the scores of both scans."""
    chains, device = chains_of(chain), chain.emissions.device
    T, N, C, D = chains[-4:]
    fp64: dict[str, Any] = {"dtype": torch.float64, "device": device}
    logz = torch.empty(N, **fp64)
    rounded = torch.empty(N, dtype=acc_dtype(chain.emissions.dtype), device=device)
    saved = torch.empty((4, T, N, C) if save else (0,), **fp64)
    programs = 2 * N if save else N
    arguments: dict[str, Any] = {
        "chains": chains,
        "saved_ptr": saved,
        "logz_ptr": logz,
        "rounded_ptr": rounded,
        "SAVE": save,
        "EXACT": is_exact(chain),
    }
    if plan.is_resident(C, D):
        ring = (programs, plan.duration_block(D) + 1, plan.state_block(C) + 1)
        launch(
            semi_markov_scan_kernel,
            programs,
            weights_ptr=scan_weights(chain),
            ring_ptr=torch.empty(ring, **fp64),
            **arguments,
            **plan.scan_options(C, D),
        )
    else:
        launch_memory_scan(programs, chain, IS_MAX=False, **arguments)
    return logz, rounded, saved


def launch_memory_scan(programs: int, chain: SemiMarkovPotentials, **arguments: Any) -> None:
    """Launch the scan whose ring is in memory, and before it the tables that it reads."""
    D, C = chain.durations.shape
    fp64: dict[str, Any] = {"dtype": torch.float64, "device": chain.durations.device}
    slots = plan.duration_block(D)
    tables = torch.empty(2 * C * (C + slots), **fp64)
    launch(
        semi_markov_tables_kernel,
        cdiv(len(tables), 256),
        transitions=strided(chain.transitions),
        durations=strided(chain.durations),
        tables_ptr=tables,
        C=C,
        D=D,
        slots=slots,
        BLOCK=256,
        num_warps=4,
    )
    launch(
        semi_markov_memory_scan_kernel,
        programs,
        tables_ptr=tables,
        slots=slots,
        ring_ptr=torch.empty((programs, D + 2, C), **fp64),
        **arguments,
        **plan.memory_scan_options(C),
    )


def scan_weights(chain: SemiMarkovPotentials) -> Tensor:
    """Return transitions and durations as the scans in registers read them, see `scan.py`."""
    D, C = chain.durations.shape
    slots, block = plan.duration_block(D), plan.state_block(C)
    size = (4 * slots + 2 * block + 2, block + 1)
    weights = torch.empty(size, dtype=torch.float64, device=chain.durations.device)
    launch(
        semi_markov_weights_kernel,
        1,
        transitions=strided(chain.transitions),
        durations=strided(chain.durations),
        weights_ptr=weights,
        C=C,
        D=D,
        BLOCK_C=block,
        SLOTS=slots,
        num_warps=8,
    )
    return weights


def scans_of(chain: SemiMarkovPotentials, logz: Tensor, saved: Tensor) -> Scans:
    """Return what the scans left, as the kernels of posteriors take it."""
    return Scans(contiguous_lengths(chain), logz, saved, *chain.emissions.shape)


def semi_markov_gradient(
    grad_output: Tensor,
    chain: SemiMarkovPotentials,
    logz: Tensor,
    saved: Tensor,
    per_sequence: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of sum(grad_output * log Z) in the dtypes of the arguments."""
    (T, N, C), D, device = chain.emissions.shape, len(chain.durations), chain.emissions.device
    d_emissions, d_start, d_end = (
        torch.empty(scores.shape, dtype=scores.dtype, device=device)
        for scores in (chain.emissions, chain.start, chain.end)
    )
    splits = Splits(*plan.splits(T, N, C))
    common = {
        "scans": scans_of(chain, logz, saved),
        "splits": splits,
        "EXACT": is_exact(chain),
    }
    changes = torch.empty((N, splits.number, C), dtype=torch.float64, device=device)
    programs, block = N * splits.number if C else 0, plan.state_block(C)
    options = {"ROWS": max(1, min(plan.ROWS, 1024 // block)), "BLOCK_C": block, "num_warps": 4}
    launch(semi_markov_changes_kernel, programs, changes_ptr=changes, **common, **options)
    launch(
        semi_markov_states_kernel,
        programs,
        grad_ptr=grad_output,
        grad_n=grad_output.stride(0),
        emissions=strided_emissions(chain),
        changes_ptr=changes,
        d_emissions_ptr=d_emissions,
        d_start_ptr=d_start,
        d_end_ptr=d_end,
        **common,
        **options,
    )
    block = plan.posterior_block(C)
    pairs = torch.empty((N, splits.number, C * C), dtype=torch.float64, device=device)
    launch(
        semi_markov_pairs_kernel,
        N * splits.number * cdiv(C, block) ** 2,
        transitions=strided(chain.transitions),
        pairs_ptr=pairs,
        **common,
        BLOCK=block,
        num_warps=max(1, min(8, block * block // 256)),
    )
    counts = torch.empty((N, splits.number, D * C), dtype=torch.float64, device=device)
    launch(
        semi_markov_segments_kernel,
        N * splits.number * cdiv(C, block),
        emissions=strided_emissions(chain),
        durations=strided(chain.durations),
        result_ptr=counts,
        D=D,
        SEGMENTS=False,
        **common,
        ROWS=plan.ROWS,
        BLOCK_C=block,
        num_warps=4,
    )
    d_transitions, d_durations = (
        add_parts(grad_output, parts, scores, per_sequence, acc_dtype(chain.emissions.dtype))
        for parts, scores in ((pairs, chain.transitions), (counts, chain.durations))
    )
    return d_emissions, d_transitions, d_durations, d_start, d_end


def add_parts(
    grad_output: Tensor, parts: Tensor, scores: Tensor, per_sequence: bool, dtype: torch.dtype
) -> Tensor:
    """Return the sum of the parts `[N, splits, columns]` in the shape of the scores.

    With `per_sequence` there is a sum for each sequence, in `dtype`.
    """
    N, splits, columns = parts.shape
    shape, groups = tuple(scores.shape), 1
    if per_sequence:
        shape, groups = (N, *shape), N
    result = torch.empty(shape, dtype=dtype if per_sequence else scores.dtype, device=parts.device)
    if not parts.numel():
        return result.zero_()
    block = max(8, min(64, next_power_of_2(max(columns // 128, 1))))
    rows = next_power_of_2(max(N * splits // groups, 1))
    launch(
        semi_markov_sum_kernel,
        groups * cdiv(columns, block),
        grad_ptr=grad_output,
        grad_n=grad_output.stride(0),
        parts_ptr=parts,
        result_ptr=result,
        N=N,
        splits=splits,
        columns=columns,
        groups=groups,
        BLOCK_R=min(2048 // block, rows),
        BLOCK=block,
        num_warps=4,
    )
    return result


def semi_markov_segments(
    chain: SemiMarkovPotentials,
    logz: Tensor,
    saved: Tensor,
) -> Tensor:
    """Return the posteriors of segments, `[T, D, N, C]` in the dtype of results."""
    (T, N, C), D = chain.emissions.shape, len(chain.durations)
    dtype, device = acc_dtype(chain.emissions.dtype), chain.emissions.device
    result = torch.empty((T, D, N, C), dtype=dtype, device=device)
    splits, block = Splits(*plan.splits(T, N, C)), plan.posterior_block(C)
    launch(
        semi_markov_segments_kernel,
        N * splits.number * cdiv(C, block),
        emissions=strided_emissions(chain),
        durations=strided(chain.durations),
        scans=scans_of(chain, logz, saved),
        splits=splits,
        result_ptr=result,
        D=D,
        SEGMENTS=True,
        EXACT=is_exact(chain),
        ROWS=plan.ROWS,
        BLOCK_C=block,
        num_warps=4,
    )
    return result


def semi_markov_viterbi(
    chain: SemiMarkovPotentials,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best score `[N]`, and the states and starts of the best path `[T, N]`."""
    chains, device = chains_of(chain), chain.emissions.device
    T, N, C, D = chains[-4:]
    score = torch.empty(N, dtype=acc_dtype(chain.emissions.dtype), device=device)
    states = torch.empty((T, N), dtype=torch.int64, device=device)
    starts = torch.empty((T, N), dtype=torch.bool, device=device)
    choices = torch.empty((2, T, N, C), dtype=torch.int32, device=device)
    last = torch.empty(N, dtype=torch.int32, device=device)
    resident = plan.is_resident(C, D)
    if resident:
        launch(
            semi_markov_best_scan_kernel,
            N,
            weights_ptr=scan_weights(chain),
            chains=chains,
            choices_ptr=choices,
            score_ptr=score,
            last_ptr=last,
            **plan.scan_options(C, D),
        )
    else:
        launch_memory_scan(
            N,
            chain,
            chains=chains,
            saved_ptr=choices,
            logz_ptr=last,
            rounded_ptr=score,
            SAVE=True,
            EXACT=True,
            IS_MAX=True,
        )
    launch(
        semi_markov_trace_kernel,
        N,
        choices_ptr=choices,
        last_ptr=last,
        states_ptr=states,
        starts_ptr=starts,
        lengths_ptr=chains.lengths,
        T=T,
        N=N,
        C=C,
        BY_END=resident,
        BLOCK=32,
        num_warps=1,
    )
    return score, states, starts


def semi_markov_nbest(chain: SemiMarkovPotentials, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores `[k, N]` fp64 of the k best paths, their states and starts `[k, T, N]`."""
    chains, device = chains_of(chain), chain.emissions.device
    T, N, C, D = chains[-4:]
    options = plan.nbest_options(C, D, k)
    assert options is not None, "the autograd layer calls what the plan serves"
    scores = torch.empty((k, N), dtype=torch.float64, device=device)
    states = torch.empty((k, T, N), dtype=torch.int64, device=device)
    starts = torch.empty((k, T, N), dtype=torch.bool, device=device)
    ways = torch.empty((2, T, N, C, k), dtype=torch.int32, device=device)
    last = torch.empty((k, N), dtype=torch.int32, device=device)
    paths = {"ways_ptr": ways, "last_ptr": last}
    launch(
        semi_markov_nbest_scan_kernel,
        N,
        chains=chains,
        weights_ptr=scan_weights(chain),
        scores_ptr=scores,
        **paths,
        **options,
    )
    launch(
        semi_markov_nbest_trace_kernel,
        k * N,
        states_ptr=states,
        starts_ptr=starts,
        lengths_ptr=chains.lengths,
        T=T,
        N=N,
        C=C,
        **paths,
        K=k,
        BLOCK=32,
        num_warps=1,
    )
    return scores, states, starts


def semi_markov_sample(
    chain: SemiMarkovPotentials,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the states and starts `[k, T, N]` of k paths from the posterior."""
    logz, _, saved = semi_markov_logz(chain, True)
    (T, N, C), D = chain.emissions.shape, len(chain.durations)
    k, device = uniforms.shape[2], uniforms.device
    block_c, block_d = plan.state_block(C), plan.duration_block(D)
    states = torch.empty((k, T, N), dtype=torch.int64, device=device)
    starts = torch.empty((k, T, N), dtype=torch.bool, device=device)
    launch(
        semi_markov_sample_kernel,
        k * N,
        emissions=strided_emissions(chain),
        transitions=strided(chain.transitions),
        durations=strided(chain.durations),
        end=strided(chain.end),
        scans=scans_of(chain, logz, saved),
        uniforms_ptr=uniforms.contiguous(),
        states_ptr=states,
        starts_ptr=starts,
        D=D,
        samples=k,
        BLOCK_C=block_c,
        BLOCK_D=block_d,
        num_warps=max(1, min(8, max(block_c, block_d) // 128)),
    )
    return states, starts
