"""Paths through sparse linear chains: the best one, by back-pointers, and samples from the posterior, a path a thread."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime.launch import cdiv, launch, next_power_of_2
from .fast_viterbi import (
    chain_fast_best_kernel,
    chain_fast_last_kernel,
    chain_fast_maps_kernel,
    chain_fast_middle_kernel,
    chain_fast_trace_kernel,
)
from .plan import Table, ahead, directions_of, fast_options, shape_options, table_of
from .state_scores import chain_scan
from .steps import edge_score, leaving, length_of, put_ends

MOST_TOGETHER = 1024  # edges into a state, or last states, of which a sample is drawn at once


@triton.jit
def best_after(alpha_ptr, score_ptr, source_ptr, c, states, slots, stride_c, stride_k):
    """α of states c under Max, and the lowest edge that brings it, [BLOCK_C]."""
    most, best = tl.full(c.shape, -float("inf"), tl.float64), tl.zeros(c.shape, tl.int32)
    for k in range(slots):
        left, held = leaving(source_ptr, c, k, states, slots)
        term = tl.load(alpha_ptr + left, mask=held, other=-float("inf")) + edge_score(
            score_ptr, c, k, held, stride_c, stride_k
        )
        best = tl.where(term > most, k, best)
        most = tl.maximum(most, term)
    return most, best


@triton.jit
def best_last(alpha_ptr, final_ptr, states, final_c, wrong, BLOCK_C: tl.constexpr):
    """The best score of a chain, and the lowest state in which it ends."""
    most, best = tl.full([], -float("inf"), tl.float64), tl.full([], 0, tl.int32)
    for c0 in range(0, states, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        value = tl.load(alpha_ptr + c, mask=c < states, other=-float("inf"))
        value += tl.load(final_ptr + c * final_c, mask=c < states, other=-float("inf")).to(
            tl.float64
        )
        value = tl.where(c < states, value, -float("inf"))
        here = tl.max(value, axis=0)
        first = tl.min(tl.where((value == here) & (c < states), c, states - 1), axis=0)
        best = tl.where(here > most, first, best)
        most = tl.maximum(most, here)
    return most + wrong, best


@triton.jit
def chain_viterbi_kernel(
    scores_ptr,  # [steps, chains, states, slots]
    source_ptr,  # [states, slots] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    alpha_ptr,  # [2, chains, states] fp64
    slots_ptr,  # [steps, chains, states] integers
    score_ptr,  # [chains] fp64
    path_ptr,  # [steps + 1, chains] int64
    taken_ptr,  # [steps, chains] int64
    steps,
    chains,
    states,
    slots,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    initial_n,
    initial_c,
    final_n,
    final_c,
    TRACE: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """α under Max with the edge that brings it to each state, and from the best last state back along these edges."""
    n = tl.program_id(0).to(tl.int64)
    length, wrong = length_of(lengths_ptr, n, steps)
    row, lane = tl.full([], chains, tl.int64) * states, tl.arange(0, BLOCK_C)
    alpha_ptr += n * states
    slots_ptr += n * states
    scores_ptr += n * stride_n
    put_ends(alpha_ptr, initial_ptr + n * initial_n, states, initial_c, wrong, BLOCK_C)
    for t in range(0, length):
        tl.debug_barrier()
        step_ptr = scores_ptr + tl.full([], t, tl.int64) * stride_t
        for c0 in range(0, states, BLOCK_C):
            c = c0 + lane
            most, best = best_after(
                alpha_ptr + t % 2 * row, step_ptr, source_ptr, c, states, slots, stride_c, stride_k
            )
            tl.store(alpha_ptr + (t + 1) % 2 * row + c, most, mask=c < states)
            if TRACE:
                tl.store(
                    slots_ptr + tl.full([], t, tl.int64) * row + c,
                    best.to(slots_ptr.dtype.element_ty),
                    mask=c < states,
                )
    tl.debug_barrier()
    score, state = best_last(
        alpha_ptr + length % 2 * row, final_ptr + n * final_n, states, final_c, wrong, BLOCK_C
    )
    tl.store(score_ptr + n, score)
    if TRACE:
        possible = score > -float("inf")
        for i in range(0, steps + 1):
            t = steps - i
            place = tl.full([], t, tl.int64)
            tl.store(
                path_ptr + place * chains + n,
                tl.where(possible & (t <= length), state, -1).to(tl.int64),
            )
            if t > 0:
                inside = possible & (t <= length)
                slot = tl.load(slots_ptr + (place - 1) * row + state, mask=inside, other=0).to(
                    tl.int32
                )
                edge = state * slots + slot
                tl.store(
                    taken_ptr + (place - 1) * chains + n, tl.where(inside, edge, -1).to(tl.int64)
                )
                state = tl.where(inside, tl.load(source_ptr + edge, mask=inside, other=0), state)


def chain_viterbi(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    trace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    steps, chains, states, slots = scores.shape
    table, device = table_of(source), scores.device
    score = torch.empty(chains, dtype=torch.float64, device=device)
    path = torch.empty((steps + 1, chains) if trace else 0, dtype=torch.int64, device=device)
    taken = torch.empty((steps, chains) if trace else 0, dtype=torch.int64, device=device)
    results = score, path, taken
    if table.wrong:
        return score.fill_(torch.nan), path.fill_(-1), taken.fill_(-1)
    lengths = None if lengths is None else lengths.contiguous()
    fast = fast_options(scores, table)
    if fast is not None:
        _fast_viterbi(scores, table, initial, final, lengths, trace, fast, results)
        return results
    kind = torch.uint8 if slots <= 256 else torch.int32
    pointers = torch.empty((steps, chains, states) if trace else 0, dtype=kind, device=device)
    alpha = torch.empty((2, chains, states), dtype=torch.float64, device=device)
    options = shape_options(scores, table)
    tensors = (scores, table.source, initial, final, lengths, alpha, pointers, *results)
    sizes = (steps, chains, states, slots, *scores.stride(), *initial.stride(), *final.stride())
    launch(
        chain_viterbi_kernel,
        chains,
        *tensors,
        *sizes,
        TRACE=trace,
        BLOCK_C=options["BLOCK_C"],
        num_warps=options["num_warps"],
    )
    return results


def _fast_viterbi(
    scores: Tensor,
    table: Table,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    trace: bool,
    fast: dict[str, Any],
    results: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fill the results: all chains from the middle; then, where there are ties, once more in the order that they are promised to have."""
    steps, chains, _, slots = scores.shape
    device, block, warps = scores.device, fast["BLOCK_C"], fast["num_warps"]
    both = directions_of(table, block, fast["BLOCK_E"])
    segment = min(
        max(16, 2 ** round(math.log2(steps + 2) / 2 - 0.5)), 256
    )  # about as many steps in a segment as there are segments
    segments = cdiv(steps, 2 * segment)
    middle = torch.empty((2, chains, block), dtype=torch.float64, device=device)
    pointers = torch.empty((steps, chains, block) if trace else 0, dtype=torch.int16, device=device)
    maps = torch.empty(
        (2, segments, chains, block) if trace else 0, dtype=torch.int16, device=device
    )
    starts = torch.empty((2, segments, chains), dtype=torch.int32, device=device)
    marked = torch.empty(chains, dtype=torch.int32, device=device)
    score, path, taken = results
    tables = both.order, both.others, both.edges
    sizes = (steps, chains, *scores.shape[2:], *scores.stride(), *initial.stride(), *final.stride())
    inputs = (scores, *tables, initial, final, lengths, marked, middle, pointers, *sizes)
    scan = {"TRACE": trace, "WHOLE": both.whole, **ahead(fast), **fast}
    small = {"SEGMENT": segment, "BLOCK_C": block}
    numbers = (
        scores,
        *tables,
        lengths,
        middle,
        maps,
        marked,
        starts,
        *results,
        segments,
        steps,
        chains,
        slots,
        *scores.stride(),
    )
    for lone in (False, True) if trace else (False,):
        count = cdiv(steps, segment) if lone else segments
        programs = chains if lone else 2 * chains
        launch(chain_fast_best_kernel, programs, *inputs, LONE=lone, **scan)
        if trace:
            tensors = (pointers, lengths, marked, maps, steps, chains, count)
            launch(
                chain_fast_maps_kernel,
                programs * count,
                *tensors,
                LONE=lone,
                **small,
                num_warps=min(4, warps),
            )
        if lone:
            tensors = (
                both.order,
                final,
                lengths,
                marked,
                middle,
                maps,
                starts,
                score,
                path,
                count,
                steps,
                chains,
                *final.stride(),
            )
            launch(chain_fast_last_kernel, chains, *tensors, **small, num_warps=warps)
        else:
            launch(
                chain_fast_middle_kernel,
                chains,
                *numbers,
                TRACE=trace,
                WIDTH=fast["WIDTH"],
                **small,
                num_warps=warps,
            )
        if trace:
            tensors = (
                pointers,
                both.order,
                both.edges,
                lengths,
                starts,
                marked,
                path,
                taken,
                steps,
                chains,
                count,
            )
            launch(
                chain_fast_trace_kernel,
                programs * count,
                *tensors,
                LONE=lone,
                WIDTH=fast["WIDTH"],
                **small,
                num_warps=1,
            )


@triton.jit
def edge_terms(alpha_ptr, score_ptr, source_ptr, state, k, slots, stride_c, stride_k):
    """What the k-th edges into states bring, [BLOCK_S, BLOCK_K]."""
    left = tl.load(
        source_ptr + state[:, None] * slots + k[None, :], mask=k[None, :] < slots, other=-1
    )
    scores = tl.load(
        score_ptr + state[:, None].to(tl.int64) * stride_c + k[None, :].to(tl.int64) * stride_k,
        mask=left >= 0,
        other=0.0,
    )
    return tl.load(alpha_ptr + left, mask=left >= 0, other=-float("inf")) + scores.to(tl.float64)


@triton.jit
def end_terms(alpha_ptr, final_ptr, c, states, final_c):
    """What the last states bring, [1, BLOCK_K]."""
    value = tl.load(alpha_ptr + c, mask=c < states, other=-float("inf"))
    value += tl.load(final_ptr + c * final_c, mask=c < states, other=0.0).to(tl.float64)
    return tl.where(c < states, value, -float("inf"))[None, :]


@triton.jit
def weights_of(terms, most):
    return tl.exp(terms - tl.where(most == -float("inf"), 0.0, most)[:, None])


@triton.jit
def drawn(weights, before, threshold, k0):
    """How many places of a block of weights a draw passes, the last place that has a weight, and the weight so far."""
    total = before[:, None] + tl.cumsum(weights, axis=1)
    place = tl.arange(0, weights.shape[1])[None, :]
    passed = tl.sum((total <= threshold[:, None]).to(tl.int32), axis=1)
    return (
        passed,
        tl.max(tl.where(weights > 0.0, k0 + place, -1), axis=1),
        before + tl.sum(weights, axis=1),
    )


@triton.jit
def chain_sample_kernel(
    scores_ptr,  # [steps, chains, states, slots]
    source_ptr,  # [states, slots] int32
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    alpha_ptr,  # [steps + 1, chains, states] fp64
    uniforms_ptr,  # [steps + 1, samples, chains] fp64
    path_ptr,  # [samples, steps + 1, chains] int64
    taken_ptr,  # [samples, steps, chains] int64
    samples,
    steps,
    chains,
    states,
    slots,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    final_n,
    final_c,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Last states in proportion to exp(α + final), then edges back in proportion to their share in the α of the states that they enter."""
    n = (tl.program_id(0) % chains).to(tl.int64)
    sample = tl.program_id(0) // chains * BLOCK_S + tl.arange(0, BLOCK_S)
    there = sample < samples
    length, wrong = length_of(lengths_ptr, n, steps)
    row, lane = tl.full([], chains, tl.int64) * states, tl.arange(0, BLOCK_K)
    alpha_ptr += n * states
    scores_ptr += n * stride_n
    final_ptr += n * final_n
    uniforms_ptr += sample.to(tl.int64) * chains + n
    path_ptr += sample.to(tl.int64) * (steps + 1) * chains + n
    taken_ptr += sample.to(tl.int64) * steps * chains + n
    nothing = tl.zeros([BLOCK_S], tl.float64)
    most, total, before = nothing - float("inf"), nothing, nothing
    for c0 in range(0, states, BLOCK_K):
        most = tl.maximum(
            most,
            tl.max(
                end_terms(alpha_ptr + length * row, final_ptr, c0 + lane, states, final_c), axis=1
            ),
        )
    for c0 in range(0, states, BLOCK_K):
        total += tl.sum(
            weights_of(
                end_terms(alpha_ptr + length * row, final_ptr, c0 + lane, states, final_c), most
            ),
            axis=1,
        )
    state, last = tl.zeros([BLOCK_S], tl.int32), tl.zeros([BLOCK_S], tl.int32)
    threshold = (
        tl.load(
            uniforms_ptr + tl.full([], steps, tl.int64) * samples * chains, mask=there, other=0.0
        )
        * total
    )
    for c0 in range(0, states, BLOCK_K):
        weights = weights_of(
            end_terms(alpha_ptr + length * row, final_ptr, c0 + lane, states, final_c), most
        )
        passed, held, before = drawn(weights, before, threshold, c0)
        state, last = state + passed, tl.maximum(last, held)
    state = tl.minimum(
        state, last
    )  # a product that rounds up to the total would pass the last place
    possible = (most > -float("inf")) & (total + wrong == total)
    for i in range(0, steps + 1):
        t = tl.full([], steps - i, tl.int64)
        inside = possible & (t <= length)
        tl.store(path_ptr + t * chains, tl.where(inside, state, -1).to(tl.int64), mask=there)
        if t > 0:
            slot = tl.zeros([BLOCK_S], tl.int32)
            if t <= length:
                slot = drawn_edge(
                    alpha_ptr + (t - 1) * row,
                    scores_ptr + (t - 1) * stride_t,
                    source_ptr,
                    state,
                    tl.load(uniforms_ptr + (t - 1) * samples * chains, mask=there, other=0.0),
                    slots,
                    stride_c,
                    stride_k,
                    BLOCK_K,
                )
            edge = state * slots + slot
            tl.store(
                taken_ptr + (t - 1) * chains, tl.where(inside, edge, -1).to(tl.int64), mask=there
            )
            state = tl.where(inside, tl.load(source_ptr + edge, mask=inside, other=0), state)


@triton.jit
def drawn_edge(
    alpha_ptr,
    score_ptr,
    source_ptr,
    state,
    uniform,
    slots,
    stride_c,
    stride_k,
    BLOCK_K: tl.constexpr,
):
    """One of the edges into each state, [BLOCK_S]."""
    nothing, lane = tl.zeros(state.shape, tl.float64), tl.arange(0, BLOCK_K)
    most, total, before = nothing - float("inf"), nothing, nothing
    for k0 in range(0, slots, BLOCK_K):
        most = tl.maximum(
            most,
            tl.max(
                edge_terms(
                    alpha_ptr, score_ptr, source_ptr, state, k0 + lane, slots, stride_c, stride_k
                ),
                axis=1,
            ),
        )
    for k0 in range(0, slots, BLOCK_K):
        total += tl.sum(
            weights_of(
                edge_terms(
                    alpha_ptr, score_ptr, source_ptr, state, k0 + lane, slots, stride_c, stride_k
                ),
                most,
            ),
            axis=1,
        )
    slot, last = tl.zeros(state.shape, tl.int32), tl.zeros(state.shape, tl.int32)
    for k0 in range(0, slots, BLOCK_K):
        weights = weights_of(
            edge_terms(
                alpha_ptr, score_ptr, source_ptr, state, k0 + lane, slots, stride_c, stride_k
            ),
            most,
        )
        passed, held, before = drawn(weights, before, uniform * total, k0)
        slot, last = slot + passed, tl.maximum(last, held)
    return tl.minimum(slot, last)


def chain_sample(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    steps, chains, states, slots = scores.shape
    samples = uniforms.shape[1]
    table = table_of(source)
    path = torch.empty((samples, steps + 1, chains), dtype=torch.int64, device=scores.device)
    taken = torch.empty((samples, steps, chains), dtype=torch.int64, device=scores.device)
    if table.wrong:
        return path.fill_(-1), taken.fill_(-1)
    alpha = chain_scan(scores, source, initial, final, lengths, False, False)
    block_k = min(max(16, next_power_of_2(max(slots, 1))), MOST_TOGETHER)
    block_s = max(1, min(next_power_of_2(max(samples, 1)), 1024 // block_k))
    tensors = (
        scores,
        table.source,
        final,
        None if lengths is None else lengths.contiguous(),
        alpha,
        uniforms.contiguous(),
        path,
        taken,
    )
    sizes = (samples, steps, chains, states, slots, *scores.stride(), *final.stride())
    programs = chains * cdiv(samples, block_s)
    launch(
        chain_sample_kernel,
        programs,
        *tensors,
        *sizes,
        BLOCK_S=block_s,
        BLOCK_K=block_k,
        num_warps=max(1, min(4, block_s * block_k // 256)),
    )
    return path, taken
