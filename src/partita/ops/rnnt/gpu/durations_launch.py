"""The launches of token-and-duration transducers whose scan runs beside the pass over the logits.

Here is also what these share with separate launches: the kinds of arcs, and the posteriors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....runtime.launch import cdiv, launch
from .call import LatticeCall, ScanZeros, new_scan, node_strides, tile_of, tile_options
from .durations import tdt_words_kernel
from .overlap_tdt import tdt_overlap_kernel
from .plan import (
    CHUNK,
    MARGIN,
    MAX_DURATION,
    NODES_PER_PROGRAM,
    TDT_OVERLAP_REGISTERS,
    LatticePlan,
)
from .posterior import tdt_posterior_kernel
from .rows import Logits
from .scan import Carries, Scan

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


def duration_strides(duration_logits: Tensor) -> dict[str, int]:
    """Return the strides of the logits of durations over B, T and U1 by name."""
    b, t, u, _ = duration_logits.stride()
    return {"duration_stride_b": b, "duration_stride_t": t, "duration_stride_u": u}


def chunk_programs(plan: LatticePlan, B: int) -> int:
    """Return the programs that have BLOCK_NODES nodes each of all chunks."""
    return B * plan.num_chunks * cdiv(plan.rows * CHUNK, BLOCK_NODES)


def duration_code(durations: Sequence[int]) -> int:
    """Return the durations as bytes of a number."""
    return sum(d << (8 * k) for k, d in enumerate(durations))


def launch_duration_posteriors(
    call: LatticeCall, scan: Scan, durations: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the losses, and the posteriors `[2 + K, B, T, U1]` or an empty tensor."""
    nll, posteriors, results = call.results(2 + len(durations))
    launch(
        tdt_posterior_kernel,
        chunk_programs(call.plan, call.B) if call.need_posteriors else call.B,
        scan=scan,
        lengths=call.targets.lengths,
        **results,
        **call.sizes,
        DURATIONS=duration_code(durations),
        K=len(durations),
        PRECISE=call.dtype == torch.float64,
        BLOCK=BLOCK_NODES,
        num_warps=4,
    )
    return nll, posteriors


def scan_words(call: LatticeCall, durations: Sequence[int]) -> ScanZeros:
    """Return the words of a scan that waits for its arcs, prepared by one launch."""
    plan, B, K = call.plan, call.B, len(durations)
    carries = call.directions * plan.num_chunks * B * plan.carry_steps if plan.num_chunks > 1 else 0
    # Rows of words start on 256 bytes.
    zeros = cdiv(B + carries + 1, CHUNK) * CHUNK
    size = zeros + MARGIN + 2 * K * plan.nodes
    words = torch.empty(size, dtype=torch.int64, device=call.device)
    programs = chunk_programs(plan, B) + MARGIN // BLOCK_NODES
    launch(
        tdt_words_kernel,
        programs + cdiv(zeros + MARGIN, BLOCK_NODES),
        words_ptr=words,
        lengths=call.targets.lengths,
        zeros=zeros,
        **call.sizes,
        DURATIONS=duration_code(durations),
        K=K,
        BLOCK=BLOCK_NODES,
        num_warps=4,
    )
    flags, arcs = words[:B], words[zeros + MARGIN :]
    if not carries:
        return ScanZeros(flags, None, arcs)
    counter = words[B + carries : B + carries + 1]
    return ScanZeros(flags, Carries(words[B : B + carries], counter), arcs)


def scan_durations_beside_rows(
    call: LatticeCall, token_logits: Tensor, duration_logits: Tensor, durations: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what `launch_tdt.tdt_forward` does, by a scan beside the pass over the logits."""
    B, T, U1, V = token_logits.shape
    plan, kinds = call.plan, arc_kinds(duration_arcs(durations))
    targets, blank, sigma = call.targets, call.options.blank, call.options.sigma
    directions, words = call.directions, scan_words(call, durations)
    assert words.arcs is not None
    token_lse, duration_lse = call.empty_lse(), call.empty_lse()
    lses = (token_lse, duration_lse) if call.need_posteriors else (None, None)
    scan = new_scan(call, words.arcs, words.flags)
    launch(
        tdt_overlap_kernel,
        directions * B * plan.num_chunks + B * T * cdiv(U1, NODES_PER_PROGRAM),
        tokens=Logits(token_logits, token_logits.stride(3), lses[0]),
        durations=Logits(duration_logits, duration_logits.stride(3), lses[1]),
        targets=targets,
        scan=scan,
        carries=words.carries,
        **plan.scan_sizes(T, B, U1, V),
        blank=blank,
        sigma=sigma,
        target_stride=targets.stride,
        **node_strides(token_logits, T),
        **duration_strides(duration_logits),
        DIRECTIONS=directions,
        CODE=kinds.code,
        maxnreg=TDT_OVERLAP_REGISTERS,
        **tile_options(tile_of(token_logits)),
    )
    nll, posteriors = launch_duration_posteriors(call, scan, durations)
    return nll, token_lse, duration_lse, posteriors
