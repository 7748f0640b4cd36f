"""The launches of token-and-duration transducers whose scan runs beside the pass over the logits.

Here is also what these share with separate launches: the kinds of arcs, and the posteriors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import INTERPRETED, cdiv, launch, next_power_of_2
from .call import ScanZeros, Targets, tile_of, tile_options
from .durations import tdt_words_kernel
from .overlap_tdt import tdt_overlap_kernel
from .plan import (
    CHUNK,
    LSE_DTYPE,
    MARGIN,
    MAX_DURATION,
    NODES_PER_PROGRAM,
    TDT_OVERLAP_BLOCK_ROWS,
    TDT_OVERLAP_REGISTERS,
    LatticePlan,
    lattice_plan,
)
from .posterior_tdt import tdt_posterior_kernel

BLOCK_NODES = 128  # nodes of a program


class ArcKinds(NamedTuple):
    """The kinds of arcs that a scan is compiled for.

    Fields:
        code: the kinds; see `arc_rows.py`.
        number: the number of kinds.
        depth: the states that a lane remembers.
    """

    code: int
    number: int
    depth: int


def arc_kinds(arcs: Sequence[tuple[int, bool]]) -> ArcKinds:
    """Return the kinds of arcs, given the duration of each and whether it emits a label."""
    code = sum((d | (128 if label else 0)) << (8 * i) for i, (d, label) in enumerate(arcs))
    return ArcKinds(code, len(arcs), max(1, *(d + label for d, label in arcs)))


def duration_arcs(durations: Sequence[int]) -> tuple[tuple[int, bool], ...]:
    """Return the arcs of a token-and-duration transducer: blanks, then labels."""
    if max(durations, default=0) > MAX_DURATION:
        raise ValueError(
            f"durations: expected at most {MAX_DURATION} on a GPU, got {max(durations)}"
        )
    return tuple((d, label) for label in (False, True) for d in durations)


def chunk_programs(plan: LatticePlan, B: int) -> int:
    """Return the programs that have BLOCK_NODES nodes each of all chunks."""
    return B * plan.num_chunks * cdiv(plan.rows * CHUNK, BLOCK_NODES)


def duration_code(durations: Sequence[int]) -> int:
    """Return the durations as bytes of a number."""
    return sum(d << (8 * k) for k, d in enumerate(durations))


class WordScan(NamedTuple):
    """What a scan of words leaves in memory; see `arc_words.py`.

    Fields:
        arcs: the words of the arcs, `[2 K * nodes]`.
        states: the words of α and β, `[2, nodes]`, or None for the loss alone.
        flags: `[B]`, which sequences are invalid or have NaN.
        totals: the sums over all paths, `[2, B]`: the bits of their significands, and exponents.
    """

    arcs: Tensor
    states: Tensor | None
    flags: Tensor
    totals: Tensor


def new_scan(
    plan: LatticePlan, arcs: Tensor, flags: Tensor, B: int, need_posteriors: bool
) -> WordScan:
    """Return a scan with memory for its results."""
    totals = torch.empty((2, B), dtype=torch.int64, device=arcs.device)
    if not need_posteriors:
        return WordScan(arcs, None, flags, totals)
    states = torch.empty((2, plan.nodes), dtype=torch.int64, device=arcs.device)
    return WordScan(arcs, states, flags, totals)


def launch_duration_posteriors(
    scan: WordScan,
    targets: Targets,
    sizes: tuple[int, int, int],
    durations: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the losses, and the posteriors `[2 + K, B, T, U1]` or an empty one without states."""
    (B, T, U1), K, device = sizes, len(durations), scan.arcs.device
    plan, need_posteriors = lattice_plan(B, T, U1), scan.states is not None
    nll = torch.empty(B, dtype=acc_dtype(dtype), device=device)
    shape = (2 + K, B, T, U1) if need_posteriors else (0,)
    posteriors = torch.empty(shape, dtype=nll.dtype, device=device)
    launch(
        tdt_posterior_kernel,
        chunk_programs(plan, B) if need_posteriors else B,
        scan.arcs,
        scan.states,
        targets.logit_lengths,
        targets.target_lengths,
        scan.flags,
        scan.totals,
        nll,
        posteriors if need_posteriors else None,
        T,
        B,
        U1,
        plan.num_chunks,
        plan.rows,
        plan.nodes,
        DURATIONS=duration_code(durations),
        K=K,
        PRECISE=dtype == torch.float64,
        BLOCK=BLOCK_NODES,
        num_warps=4,
    )
    return nll, posteriors


def scan_words(
    plan: LatticePlan,
    targets: Targets,
    sizes: tuple[int, int, int],
    directions: int,
    durations: Sequence[int],
) -> ScanZeros:
    """Return the words of a scan that waits for its arcs, prepared by one launch."""
    (B, T, U1), K, device = sizes, len(durations), targets.logit_lengths.device
    carries = directions * plan.num_chunks * B * plan.carry_steps if plan.num_chunks > 1 else 0
    # Rows of words start on 256 bytes.
    zeros = cdiv(B + carries + 1, CHUNK) * CHUNK
    words = torch.empty(zeros + MARGIN + 2 * K * plan.nodes, dtype=torch.int64, device=device)
    programs = chunk_programs(plan, B) + MARGIN // BLOCK_NODES
    launch(
        tdt_words_kernel,
        programs + cdiv(zeros + MARGIN, BLOCK_NODES),
        words,
        targets.logit_lengths,
        targets.target_lengths,
        zeros,
        T,
        B,
        U1,
        plan.num_chunks,
        plan.rows,
        plan.nodes,
        DURATIONS=duration_code(durations),
        K=K,
        MARGIN=MARGIN,
        BLOCK=BLOCK_NODES,
        num_warps=4,
    )
    flags, arcs = words[:B], words[zeros + MARGIN :]
    if not carries:
        return ScanZeros(None, flags, None, arcs)
    return ScanZeros(words[B + carries : B + carries + 1], flags, words[B : B + carries], arcs)


def scan_durations_beside_rows(
    token_logits: Tensor,
    duration_logits: Tensor,
    targets: Targets,
    blank: int,
    durations: Sequence[int],
    sigma: float,
    need_posteriors: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `launch_tdt.tdt_forward` does, by a scan beside the pass over the logits."""
    (B, T, U1, V), device, K = token_logits.shape, token_logits.device, len(durations)
    plan, kinds = lattice_plan(B, T, U1), arc_kinds(duration_arcs(durations))
    directions = 2 if need_posteriors else 1
    words = scan_words(plan, targets, (B, T, U1), directions, durations)
    assert words.arcs is not None
    shape = (B, T, U1) if need_posteriors else (0,)
    token_lse = torch.empty(shape, dtype=LSE_DTYPE, device=device)
    duration_lse = torch.empty(shape, dtype=LSE_DTYPE, device=device)
    scan = new_scan(plan, words.arcs, words.flags, B, need_posteriors)
    launch(
        tdt_overlap_kernel,
        directions * B * plan.num_chunks + B * T * cdiv(U1, NODES_PER_PROGRAM),
        token_logits,
        duration_logits,
        *targets,
        token_lse if need_posteriors else None,
        duration_lse if need_posteriors else None,
        scan.arcs,
        scan.states,
        words.carries,
        scan.flags,
        scan.totals,
        words.tile_counter,
        *plan.scan_sizes(T, B, U1, V),
        blank,
        sigma,
        targets.stride,
        *token_logits.stride(),
        *duration_logits.stride(),
        DIRECTIONS=directions,
        BLOCK=TDT_OVERLAP_BLOCK_ROWS,
        SCANS_FIRST=not INTERPRETED,  # The interpreter runs one program after the other.
        CODE=kinds.code,
        DEPTH=kinds.depth,
        DURATIONS=duration_code(durations),
        K=K,
        KINDS=next_power_of_2(K),
        maxnreg=TDT_OVERLAP_REGISTERS,
        **tile_options(tile_of(token_logits), token_logits.dtype),
    )
    nll, posteriors = launch_duration_posteriors(
        scan, targets, (B, T, U1), durations, token_logits.dtype
    )
    return nll, token_lse, duration_lse, posteriors
