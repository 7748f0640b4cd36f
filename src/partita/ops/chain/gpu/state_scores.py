"""The scores of states of sparse linear chains, α or β, under Log or Max: a program a chain."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....runtime.launch import launch
from .plan import shape_options, table_of
from .steps import alpha_after, beta_before, length_of, put_ends


@triton.jit
def chain_scan_kernel(
    scores_ptr,  # [steps, chains, states, slots]
    source_ptr,  # [states, slots] int32
    first_ptr,  # [states + 1] int32
    edges_ptr,  # [states * slots] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    result_ptr,  # [steps + 1, chains, states] fp64
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
    BEST: tl.constexpr,
    REVERSE: tl.constexpr,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """α from the first step on, and as it is at the length behind it; or β from the final scores, which stand at the length and behind it, back."""
    n = tl.program_id(0).to(tl.int64)
    length, wrong = length_of(lengths_ptr, n, steps)
    result_ptr += n * states
    scores_ptr += n * stride_n
    row, lane = tl.full([], chains, tl.int64) * states, tl.arange(0, BLOCK_C)
    if REVERSE:
        for t in range(length, steps + 1):
            put_ends(
                result_ptr + tl.full([], t, tl.int64) * row,
                final_ptr + n * final_n,
                states,
                final_c,
                wrong,
                BLOCK_C,
            )
        for i in range(0, length):
            at = tl.full([], length - 1 - i, tl.int64)
            for c0 in range(0, states, BLOCK_C):
                value = beta_before(
                    result_ptr + (at + 1) * row,
                    scores_ptr + at * stride_t,
                    first_ptr,
                    edges_ptr,
                    c0 + lane,
                    states,
                    slots,
                    stride_c,
                    stride_k,
                    MOST,
                    WIDE,
                    BEST,
                )
                tl.store(result_ptr + at * row + c0 + lane, value, mask=c0 + lane < states)
    else:
        put_ends(result_ptr, initial_ptr + n * initial_n, states, initial_c, wrong, BLOCK_C)
        for t in range(0, length):
            at = tl.full([], t, tl.int64)
            for c0 in range(0, states, BLOCK_C):
                value = alpha_after(
                    result_ptr + at * row,
                    scores_ptr + at * stride_t,
                    source_ptr,
                    c0 + lane,
                    states,
                    slots,
                    stride_c,
                    stride_k,
                    SLOTS,
                    WIDE,
                    BEST,
                )
                tl.store(result_ptr + (at + 1) * row + c0 + lane, value, mask=c0 + lane < states)
        tl.debug_barrier()
        for t in range(length, steps):
            for c0 in range(0, states, BLOCK_C):
                value = tl.load(result_ptr + length * row + c0 + lane, mask=c0 + lane < states)
                tl.store(
                    result_ptr + tl.full([], t + 1, tl.int64) * row + c0 + lane,
                    value,
                    mask=c0 + lane < states,
                )


def chain_scan(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    best: bool,
    reverse: bool,
) -> Tensor:
    steps, chains, states, slots = scores.shape
    table = table_of(source)
    result = torch.empty((steps + 1, chains, states), dtype=torch.float64, device=scores.device)
    if table.wrong:
        return result.fill_(torch.nan)
    sizes = (steps, chains, states, slots, *scores.stride(), *initial.stride(), *final.stride())
    tensors = (
        scores,
        table.source,
        table.first,
        table.edges,
        initial,
        final,
        None if lengths is None else lengths.contiguous(),
        result,
    )
    launch(
        chain_scan_kernel,
        chains,
        *tensors,
        *sizes,
        BEST=best,
        REVERSE=reverse,
        **shape_options(scores, table),
    )
    return result
