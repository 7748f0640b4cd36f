"""Sparse linear chains under Log: α and β run at the same time in programs of their own, and meet in the middle.

A state is fp64: where α or β matters it lies thousands below its greatest value, and an fp32 state would lose it. Only exponentials and
logarithms of differences are fp32. Of a chain of `length` steps, `kept[t]` is α for t <= middle and β beyond.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import exp
from ....runtime.launch import launch
from .fast import chain_fast_gradient_kernel, chain_fast_halves_kernel, chain_fast_logz_kernel
from .plan import ahead, directions_of, fast_options, shape_options, table_of
from .state_scores import chain_scan
from .steps import (
    alpha_after,
    beta_before,
    clear_past,
    length_of,
    log_add,
    log_total,
    put_end_marginals,
    put_ends,
    put_marginals,
    renewed,
    slot_of,
    state_total,
)

__all__ = ["chain_gradient", "chain_logz", "chain_scan"]


@triton.jit
def chain_halves_kernel(
    scores_ptr,  # [steps, chains, states, slots]
    source_ptr,  # [states, slots] int32
    first_ptr,  # [states + 1] int32
    edges_ptr,  # [states * slots] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    kept_ptr,  # [steps + 1, chains, states] fp64, or [4, chains, states]
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
    KEEP: tl.constexpr,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """α up to the middle, or β down to behind it: what stands before the middle step, and behind it."""
    n = (tl.program_id(0) // 2).to(tl.int64)
    length, wrong = length_of(lengths_ptr, n, steps)
    middle = tl.maximum(length - 1, 0) // 2
    state_ptr, row = kept_ptr + n * states, tl.full([], chains, tl.int64) * states
    score_ptr = scores_ptr + n * stride_n
    lane = tl.arange(0, BLOCK_C)
    if tl.program_id(0) % 2 == 0:
        put_ends(
            state_ptr + slot_of(0, 0, KEEP) * row,
            initial_ptr + n * initial_n,
            states,
            initial_c,
            wrong,
            BLOCK_C,
        )
        for t in range(0, middle):
            alpha_ptr, step_ptr = (
                state_ptr + slot_of(t, 0, KEEP) * row,
                score_ptr + tl.full([], t, tl.int64) * stride_t,
            )
            for c0 in range(0, states, BLOCK_C):
                value = alpha_after(
                    alpha_ptr,
                    step_ptr,
                    source_ptr,
                    c0 + lane,
                    states,
                    slots,
                    stride_c,
                    stride_k,
                    SLOTS,
                    WIDE,
                )
                tl.store(
                    state_ptr + slot_of(t + 1, 0, KEEP) * row + c0 + lane,
                    value,
                    mask=c0 + lane < states,
                )
    elif length > 0:
        put_ends(
            state_ptr + slot_of(length, 1, KEEP) * row,
            final_ptr + n * final_n,
            states,
            final_c,
            0.0,
            BLOCK_C,
        )
        for i in range(0, length - 1 - middle):
            t = length - 1 - i
            beta_ptr, step_ptr = (
                state_ptr + slot_of(t + 1, 1, KEEP) * row,
                score_ptr + tl.full([], t, tl.int64) * stride_t,
            )
            for c0 in range(0, states, BLOCK_C):
                value = beta_before(
                    beta_ptr,
                    step_ptr,
                    first_ptr,
                    edges_ptr,
                    c0 + lane,
                    states,
                    slots,
                    stride_c,
                    stride_k,
                    MOST,
                    WIDE,
                )
                tl.store(
                    state_ptr + slot_of(t, 1, KEEP) * row + c0 + lane,
                    value,
                    mask=c0 + lane < states,
                )


@triton.jit
def chain_logz_kernel(
    scores_ptr,  # [steps, chains, states, slots]
    source_ptr,  # [states, slots] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    kept_ptr,  # [steps + 1, chains, states] fp64, or [4, chains, states]
    logz_ptr,  # [chains] fp64
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
    KEEP: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """log Z of a chain from α before its middle step and β behind it."""
    n = tl.program_id(0).to(tl.int64)
    length, wrong = length_of(lengths_ptr, n, steps)
    middle = tl.maximum(length - 1, 0) // 2
    state_ptr, row = kept_ptr + n * states, tl.full([], chains, tl.int64) * states
    lane = tl.arange(0, BLOCK_C)
    maximum, rest = tl.full([BLOCK_C], -float("inf"), tl.float64), tl.zeros([BLOCK_C], WIDE)
    alpha_ptr, beta_ptr = (
        state_ptr + slot_of(middle, 0, KEEP) * row,
        state_ptr + slot_of(middle + 1, 1, KEEP) * row,
    )
    step_ptr = scores_ptr + n * stride_n + tl.full([], middle, tl.int64) * stride_t
    for c0 in range(0, states, BLOCK_C):
        c = c0 + lane
        if length > 0:
            value = alpha_after(
                alpha_ptr, step_ptr, source_ptr, c, states, slots, stride_c, stride_k, SLOTS, WIDE
            )
            value += tl.load(beta_ptr + c, mask=c < states, other=-float("inf"))
        else:
            value = tl.load(
                initial_ptr + n * initial_n + c * initial_c, mask=c < states, other=-float("inf")
            ).to(tl.float64)
            value += tl.load(final_ptr + n * final_n + c * final_c, mask=c < states, other=0.0).to(
                tl.float64
            )
        maximum, rest = log_add(maximum, rest, tl.where(c < states, value, -float("inf")))
    most = tl.max(maximum, axis=0)
    shift = tl.where(most == -float("inf"), 0.0, most)
    summed = tl.sum((1.0 + rest) * exp((maximum - shift).to(WIDE)), axis=0)
    tl.store(logz_ptr + n, log_total(shift, summed) + wrong)


@triton.jit
def chain_gradient_kernel(
    grad_ptr,  # [chains] fp64
    scores_ptr,  # [steps, chains, states, slots]
    source_ptr,  # [states, slots] int32
    first_ptr,  # [states + 1] int32
    edges_ptr,  # [states * slots] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    logz_ptr,  # [chains] fp64
    kept_ptr,  # [steps + 1, chains, states] fp64
    work_ptr,  # [4, chains, states] fp64
    d_scores_ptr,  # [steps, chains, states, slots]
    d_initial_ptr,  # [chains, states]
    d_final_ptr,  # [chains, states]
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
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """α and β go on through each other's half and leave the marginals behind them."""
    n = (tl.program_id(0) // 2).to(tl.int64)
    length, wrong = length_of(lengths_ptr, n, steps)
    middle = tl.maximum(length - 1, 0) // 2
    row = tl.full([], chains, tl.int64) * states
    kept_ptr += n * states
    work_ptr += n * states
    scores_ptr += n * stride_n
    d_scores_ptr += n * states * slots
    initial_ptr += n * initial_n
    final_ptr += n * final_n
    grad = tl.load(grad_ptr + n).to(WIDE)
    total = tl.load(logz_ptr + n)
    total = tl.where(
        total == -float("inf"), float("inf"), total
    )  # a chain without a path has no marginals
    if tl.program_id(0) % 2 == 0:
        alpha_onwards(
            d_scores_ptr,
            kept_ptr,
            work_ptr,
            scores_ptr,
            source_ptr,
            length,
            middle,
            total,
            grad,
            row,
            states,
            slots,
            stride_t,
            stride_c,
            stride_k,
            SLOTS,
            BLOCK_C,
            WIDE,
        )
        clear_past(d_scores_ptr, length, steps, row * slots, states * slots, wrong, BLOCK_C)
        if length > 0:
            last_ptr = work_ptr + slot_of(length, 0, False) * row
            put_end_marginals(
                d_final_ptr + n * states,
                final_ptr,
                final_c,
                last_ptr,
                1,
                states,
                total,
                grad,
                BLOCK_C,
            )
        else:
            put_end_marginals(
                d_final_ptr + n * states,
                final_ptr,
                final_c,
                initial_ptr,
                initial_c,
                states,
                total,
                grad,
                BLOCK_C,
            )
    elif length > 0:
        beta_onwards(
            d_scores_ptr,
            kept_ptr,
            work_ptr,
            scores_ptr,
            source_ptr,
            first_ptr,
            edges_ptr,
            middle,
            total,
            grad,
            row,
            states,
            slots,
            stride_t,
            stride_c,
            stride_k,
            SLOTS,
            MOST,
            BLOCK_C,
            WIDE,
        )
        first_state_ptr = work_ptr + slot_of(0, 1, False) * row
        put_end_marginals(
            d_initial_ptr + n * states,
            initial_ptr,
            initial_c,
            first_state_ptr,
            1,
            states,
            total,
            grad,
            BLOCK_C,
        )
    else:
        put_end_marginals(
            d_initial_ptr + n * states,
            initial_ptr,
            initial_c,
            final_ptr,
            final_c,
            states,
            total,
            grad,
            BLOCK_C,
        )


@triton.jit
def alpha_onwards(
    d_scores_ptr,
    kept_ptr,
    work_ptr,
    scores_ptr,
    source_ptr,
    length,
    middle,
    total,
    grad,
    row,
    states,
    slots,
    stride_t,
    stride_c,
    stride_k,
    SLOTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """α from the middle to the end, with the marginals of its steps."""
    lane = tl.arange(0, BLOCK_C)
    for c0 in range(0, states, BLOCK_C):
        value = tl.load(
            kept_ptr + slot_of(middle, 0, True) * row + c0 + lane, mask=c0 + lane < states
        )
        tl.store(
            work_ptr + slot_of(middle, 0, False) * row + c0 + lane, value, mask=c0 + lane < states
        )
    for i in range(0, length - middle):
        t = middle + i
        at = tl.full([], t, tl.int64)
        alpha_ptr, beta_ptr = work_ptr + slot_of(t, 0, False) * row, kept_ptr + (at + 1) * row
        if renewed(i):
            total = state_total(alpha_ptr, kept_ptr + at * row, states, total, BLOCK_C, WIDE)
        for c0 in range(0, states, BLOCK_C):
            c = c0 + lane
            beta = tl.load(beta_ptr + c, mask=c < states, other=-float("inf"))
            value = put_marginals(
                d_scores_ptr + at * row * slots,
                alpha_ptr,
                scores_ptr + at * stride_t,
                source_ptr,
                c,
                beta,
                total,
                grad,
                states,
                slots,
                stride_c,
                stride_k,
                SLOTS,
                WIDE,
            )
            tl.store(work_ptr + slot_of(t + 1, 0, False) * row + c, value, mask=c < states)


@triton.jit
def beta_onwards(
    d_scores_ptr,
    kept_ptr,
    work_ptr,
    scores_ptr,
    source_ptr,
    first_ptr,
    edges_ptr,
    middle,
    total,
    grad,
    row,
    states,
    slots,
    stride_t,
    stride_c,
    stride_k,
    SLOTS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """β from behind the middle step to the start, with the marginals of the steps before the middle."""
    lane = tl.arange(0, BLOCK_C)
    at = tl.full([], middle, tl.int64)
    for c0 in range(0, states, BLOCK_C):
        c = c0 + lane
        value = beta_before(
            kept_ptr + (at + 1) * row,
            scores_ptr + at * stride_t,
            first_ptr,
            edges_ptr,
            c,
            states,
            slots,
            stride_c,
            stride_k,
            MOST,
            WIDE,
        )
        tl.store(work_ptr + slot_of(middle, 1, False) * row + c, value, mask=c < states)
    for i in range(0, middle):
        t = middle - 1 - i
        at = tl.full([], t, tl.int64)
        step_ptr, beta_ptr = scores_ptr + at * stride_t, work_ptr + slot_of(t + 1, 1, False) * row
        if renewed(i):
            total = state_total(kept_ptr + (at + 1) * row, beta_ptr, states, total, BLOCK_C, WIDE)
        for c0 in range(0, states, BLOCK_C):
            c = c0 + lane
            value = beta_before(
                beta_ptr,
                step_ptr,
                first_ptr,
                edges_ptr,
                c,
                states,
                slots,
                stride_c,
                stride_k,
                MOST,
                WIDE,
            )
            tl.store(work_ptr + slot_of(t, 1, False) * row + c, value, mask=c < states)
            beta = tl.load(beta_ptr + c, mask=c < states, other=-float("inf"))
            put_marginals(
                d_scores_ptr + at * row * slots,
                kept_ptr + at * row,
                step_ptr,
                source_ptr,
                c,
                beta,
                total,
                grad,
                states,
                slots,
                stride_c,
                stride_k,
                SLOTS,
                WIDE,
            )


def chain_logz(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    steps, chains, states, slots = scores.shape
    table = table_of(source)
    fast = fast_options(scores, table)
    state = torch.empty(
        (steps + 1 if keep else 4, chains, states), dtype=torch.float64, device=scores.device
    )
    logz = torch.empty(chains, dtype=torch.float64, device=scores.device)
    sizes = (steps, chains, states, slots, *scores.stride(), *initial.stride(), *final.stride())
    ends = (initial, final, None if lengths is None else lengths.contiguous())
    if table.wrong:
        logz.fill_(torch.nan)
    elif fast is not None:
        both = directions_of(table, fast["BLOCK_C"], fast["BLOCK_E"])
        inputs = (scores, both.order, both.others, both.edges, *ends, state.view(torch.int64))
        launch(
            chain_fast_halves_kernel,
            2 * chains,
            *inputs,
            *sizes,
            KEEP=keep,
            WHOLE=both.whole,
            **ahead(fast),
            **fast,
        )
        launch(
            chain_fast_logz_kernel,
            chains,
            *inputs,
            logz,
            *sizes,
            KEEP=keep,
            WHOLE=both.whole,
            **fast,
        )
    else:
        options = shape_options(scores, table)
        tables = (table.source, table.first, table.edges)
        launch(
            chain_halves_kernel,
            2 * chains,
            scores,
            *tables,
            *ends,
            state,
            *sizes,
            KEEP=keep,
            **options,
        )
        del options["MOST"]
        launch(
            chain_logz_kernel,
            chains,
            scores,
            table.source,
            *ends,
            state,
            logz,
            *sizes,
            KEEP=keep,
            **options,
        )
    return logz, state if keep else state.new_empty(0)


def chain_gradient(
    grad: Tensor,
    scores: Tensor,
    initial: Tensor,
    final: Tensor,
    source: Tensor,
    lengths: Tensor | None,
    logz: Tensor,
    kept: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    steps, chains, states, slots = scores.shape
    table = table_of(source)
    fast = fast_options(scores, table)
    d_scores = torch.empty(scores.shape, dtype=dtype, device=scores.device)
    d_initial, d_final = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (initial, final)
    )
    results = d_scores, d_initial, d_final
    ends = (initial, final, None if lengths is None else lengths.contiguous())
    sizes = (steps, chains, states, slots, *scores.stride(), *initial.stride(), *final.stride())
    if table.wrong:
        for result in results:
            result.fill_(torch.nan)
    elif fast is not None:
        both = directions_of(table, fast["BLOCK_C"], fast["BLOCK_E"])
        inputs = (
            grad.contiguous(),
            scores,
            both.order,
            both.others,
            both.edges,
            both.places,
            *ends,
            logz,
            kept.view(torch.int64),
        )
        launch(
            chain_fast_gradient_kernel,
            2 * chains,
            *inputs,
            *results,
            *sizes,
            WHOLE=both.whole,
            **ahead(fast),
            **fast,
        )
    else:
        work = torch.empty((4, chains, states), dtype=torch.float64, device=scores.device)
        tensors = (grad.contiguous(), scores, table.source, table.first, table.edges, *ends)
        launch(
            chain_gradient_kernel,
            2 * chains,
            *tensors,
            logz,
            kept,
            work,
            *results,
            *sizes,
            **shape_options(scores, table),
        )
    return results
