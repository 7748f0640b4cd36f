"""Means over the paths of sparse linear chains: α with the mean of the values over the paths into each state, and back; a program a chain."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....primitives.gpu.math import exp, finite_shift
from ....runtime.launch import launch
from .plan import shape_options, table_of
from .steps import edge_score, leaving, length_of, log_total, put_ends, renewed, state_total


@triton.jit
def weighed(weight, value):
    """weight · value in fp64, with 0 · (±inf) = 0."""
    return tl.where(weight == 0.0, 0.0, weight.to(tl.float64) * value)


@triton.jit
def pair_after(
    state_ptr,
    mean_ptr,
    score_ptr,
    value_ptr,
    source_ptr,
    c,
    states,
    slots,
    stride_c,
    stride_k,
    value_c,
    value_k,
    WIDE: tl.constexpr,
):
    """α of states c after a step, and the mean of the values over the paths into them, [BLOCK_C] each."""
    most, total, mean = (
        tl.full(c.shape, -float("inf"), tl.float64),
        tl.zeros(c.shape, WIDE),
        tl.zeros(c.shape, tl.float64),
    )
    for k in range(slots):
        left, held = leaving(source_ptr, c, k, states, slots)
        most = tl.maximum(
            most,
            tl.load(state_ptr + left, mask=held, other=-float("inf"))
            + edge_score(score_ptr, c, k, held, stride_c, stride_k),
        )
    shift = finite_shift(most)
    for k in range(slots):
        left, held = leaving(source_ptr, c, k, states, slots)
        term = tl.load(state_ptr + left, mask=held, other=-float("inf")) + edge_score(
            score_ptr, c, k, held, stride_c, stride_k
        )
        value = tl.load(
            value_ptr + c.to(tl.int64) * value_c + k * tl.cast(value_k, tl.int64),
            mask=held,
            other=0.0,
        ).to(tl.float64)
        weight = exp((term - shift).to(WIDE))
        total += weight
        mean += weighed(weight, value + tl.load(mean_ptr + left, mask=held, other=0.0))
    return log_total(shift, total), tl.where(total == 0.0, 0.0, mean / total.to(tl.float64))


@triton.jit
def pair_before(
    state_ptr,
    mean_ptr,
    score_ptr,
    value_ptr,
    first_ptr,
    edges_ptr,
    s,
    states,
    slots,
    stride_c,
    stride_k,
    value_c,
    value_k,
    WIDE: tl.constexpr,
):
    """β of states s before a step, and the mean of the values over the paths onwards from them, likewise."""
    most, total, mean = (
        tl.full(s.shape, -float("inf"), tl.float64),
        tl.zeros(s.shape, WIDE),
        tl.zeros(s.shape, tl.float64),
    )
    start = tl.load(first_ptr + s, mask=s < states, other=0)
    degree = tl.load(first_ptr + s + 1, mask=s < states, other=0) - start
    for j in range(tl.max(degree, axis=0)):
        edge = tl.load(edges_ptr + start + j, mask=j < degree, other=0)
        b = tl.load(state_ptr + edge // slots, mask=j < degree, other=-float("inf"))
        most = tl.maximum(
            most,
            b + edge_score(score_ptr, edge // slots, edge % slots, j < degree, stride_c, stride_k),
        )
    shift = finite_shift(most)
    for j in range(tl.max(degree, axis=0)):
        edge = tl.load(edges_ptr + start + j, mask=j < degree, other=0)
        b = tl.load(state_ptr + edge // slots, mask=j < degree, other=-float("inf"))
        term = b + edge_score(
            score_ptr, edge // slots, edge % slots, j < degree, stride_c, stride_k
        )
        place = (
            value_ptr
            + (edge // slots).to(tl.int64) * value_c
            + edge % slots * tl.cast(value_k, tl.int64)
        )
        value = tl.load(place, mask=j < degree, other=0.0).to(tl.float64)
        weight = exp((term - shift).to(WIDE))
        total += weight
        mean += weighed(
            weight, value + tl.load(mean_ptr + edge // slots, mask=j < degree, other=0.0)
        )
    return log_total(shift, total), tl.where(total == 0.0, 0.0, mean / total.to(tl.float64))


@triton.jit
def chain_expectation_kernel(
    scores_ptr,  # [steps, chains, states, slots]
    source_ptr,  # [states, slots] int32
    initial_ptr,  # [chains, states]
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    values_ptr,  # [steps, chains, states, slots]
    first_values_ptr,  # [chains, states]
    last_values_ptr,  # [chains, states]
    kept_ptr,  # [2, steps + 1, chains, states] fp64, or [2, 2, chains, states]: α and means
    mean_ptr,  # [chains] fp64
    logz_ptr,  # [chains] fp64
    kept_half,
    steps,
    chains,
    states,
    slots,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    value_t,
    value_n,
    value_c,
    value_k,
    initial_n,
    initial_c,
    final_n,
    final_c,
    first_n,
    first_c,
    last_n,
    last_c,
    KEEP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The mean of the values over all paths of a chain, and log Z."""
    n = tl.program_id(0).to(tl.int64)
    length, wrong = length_of(lengths_ptr, n, steps)
    row, lane = tl.full([], chains, tl.int64) * states, tl.arange(0, BLOCK_C)
    kept_ptr += n * states
    put_ends(kept_ptr, initial_ptr + n * initial_n, states, initial_c, wrong, BLOCK_C)
    put_ends(kept_ptr + kept_half, first_values_ptr + n * first_n, states, first_c, 0.0, BLOCK_C)
    for t in range(0, length):
        before, after = tl.full([], t, tl.int64), tl.full([], t + 1, tl.int64)
        score_ptr, value_ptr = (
            scores_ptr + n * stride_n + before * stride_t,
            values_ptr + n * value_n + before * value_t,
        )
        if not KEEP:
            before, after = before % 2, after % 2
        tl.debug_barrier()
        for c0 in range(0, states, BLOCK_C):
            c = c0 + lane
            alpha, mean = pair_after(
                kept_ptr + before * row,
                kept_ptr + kept_half + before * row,
                score_ptr,
                value_ptr,
                source_ptr,
                c,
                states,
                slots,
                stride_c,
                stride_k,
                value_c,
                value_k,
                WIDE,
            )
            tl.store(kept_ptr + after * row + c, alpha, mask=c < states)
            tl.store(kept_ptr + kept_half + after * row + c, mean, mask=c < states)
    tl.debug_barrier()
    last = tl.full([], length, tl.int64)
    if not KEEP:
        last = last % 2
    most, total, mean = (
        tl.full([], -float("inf"), tl.float64),
        tl.zeros([BLOCK_C], WIDE),
        tl.zeros([BLOCK_C], tl.float64),
    )
    for c0 in range(0, states, BLOCK_C):
        most = tl.maximum(
            most,
            tl.max(
                last_terms(
                    kept_ptr + last * row, final_ptr + n * final_n, c0 + lane, states, final_c
                ),
                axis=0,
            ),
        )
    shift = finite_shift(most)
    for c0 in range(0, states, BLOCK_C):
        c = c0 + lane
        weight = exp(
            (
                last_terms(kept_ptr + last * row, final_ptr + n * final_n, c, states, final_c)
                - shift
            ).to(WIDE)
        )
        value = tl.load(kept_ptr + kept_half + last * row + c, mask=c < states, other=0.0)
        value += tl.load(last_values_ptr + n * last_n + c * last_c, mask=c < states, other=0.0).to(
            tl.float64
        )
        total += weight
        mean += weighed(weight, value)
    summed = tl.sum(total, axis=0)
    tl.store(
        mean_ptr + n,
        tl.where(summed == 0.0, 0.0, tl.sum(mean, axis=0) / summed.to(tl.float64)) + wrong,
    )
    tl.store(logz_ptr + n, log_total(shift, summed) + wrong)


@triton.jit
def last_terms(alpha_ptr, final_ptr, c, states, final_c):
    value = tl.load(alpha_ptr + c, mask=c < states, other=-float("inf"))
    value += tl.load(final_ptr + c * final_c, mask=c < states, other=0.0).to(tl.float64)
    return tl.where(c < states, value, -float("inf"))


@triton.jit
def put_gradients(
    scores_ptr,
    values_ptr,
    place,
    posterior,
    value,
    held,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
):
    """The posterior of edges or states for their values, and for their scores that times how far the mean through them lies from that over all."""
    if OF_SCORES:
        tl.store(
            scores_ptr + place, weighed(posterior, value).to(scores_ptr.dtype.element_ty), mask=held
        )
    if OF_VALUES:
        tl.store(values_ptr + place, posterior.to(values_ptr.dtype.element_ty), mask=held)


@triton.jit
def chain_expectation_gradient_kernel(
    grad_ptr,  # [chains] fp64
    scores_ptr,  # [steps, chains, states, slots]
    source_ptr,  # [states, slots] int32
    first_ptr,  # [states + 1] int32
    edges_ptr,  # [states * slots] int32
    final_ptr,  # [chains, states]
    lengths_ptr,  # [chains] or None
    values_ptr,  # [steps, chains, states, slots]
    last_values_ptr,  # [chains, states]
    mean_ptr,  # [chains] fp64
    logz_ptr,  # [chains] fp64
    kept_ptr,  # [2, steps + 1, chains, states] fp64: α and means
    work_ptr,  # [2, 2, chains, states] fp64: β and means onwards
    d_scores_ptr,  # [steps, chains, states, slots]
    d_initial_ptr,  # [chains, states]
    d_final_ptr,  # [chains, states]
    d_values_ptr,  # [steps, chains, states, slots]
    d_first_ptr,  # [chains, states]
    d_last_ptr,  # [chains, states]
    kept_half,
    steps,
    chains,
    states,
    slots,
    stride_t,
    stride_n,
    stride_c,
    stride_k,
    value_t,
    value_n,
    value_c,
    value_k,
    final_n,
    final_c,
    last_n,
    last_c,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """β and the mean onwards, down from the length, with the gradients of each step."""
    n = tl.program_id(0).to(tl.int64)
    length, wrong = length_of(lengths_ptr, n, steps)
    row, lane = tl.full([], chains, tl.int64) * states, tl.arange(0, BLOCK_C)
    grad, mean, total = tl.load(grad_ptr + n), tl.load(mean_ptr + n), tl.load(logz_ptr + n)
    total = tl.where(
        total == -float("inf"), float("inf"), total
    )  # a chain without a path has no posterior
    kept_ptr += n * states
    work_ptr += n * states
    work_half = 2 * row
    for t in range(length, steps):
        for e0 in range(0, states * slots, BLOCK_C):
            nothing = tl.zeros([BLOCK_C], tl.float64) + wrong
            place = (tl.full([], t, tl.int64) * chains + n) * states * slots + e0 + lane
            put_gradients(
                d_scores_ptr,
                d_values_ptr,
                place,
                nothing,
                nothing,
                e0 + lane < states * slots,
                OF_SCORES,
                OF_VALUES,
            )
    put_ends(work_ptr + length % 2 * row, final_ptr + n * final_n, states, final_c, 0.0, BLOCK_C)
    put_ends(
        work_ptr + work_half + length % 2 * row,
        last_values_ptr + n * last_n,
        states,
        last_c,
        0.0,
        BLOCK_C,
    )
    tl.debug_barrier()
    put_state_gradients(
        d_final_ptr,
        d_last_ptr,
        kept_ptr + length * row,
        kept_half,
        work_ptr + length % 2 * row,
        work_half,
        n,
        states,
        total,
        mean,
        grad,
        OF_SCORES,
        OF_VALUES,
        BLOCK_C,
        WIDE,
    )
    for i in range(0, length):
        t = length - 1 - i
        at = tl.full([], t, tl.int64)
        score_ptr, value_ptr = (
            scores_ptr + n * stride_n + at * stride_t,
            values_ptr + n * value_n + at * value_t,
        )
        behind_ptr, before_ptr = work_ptr + (t + 1) % 2 * row, work_ptr + t % 2 * row
        tl.debug_barrier()
        if renewed(i):
            total = state_total(kept_ptr + (at + 1) * row, behind_ptr, states, total, BLOCK_C, WIDE)
        for c0 in range(0, states, BLOCK_C):
            c = c0 + lane
            put_edge_gradients(
                d_scores_ptr,
                d_values_ptr,
                kept_ptr + at * row,
                kept_half,
                behind_ptr,
                work_half,
                score_ptr,
                value_ptr,
                source_ptr,
                c,
                (at * chains + n) * states * slots,
                total,
                mean,
                grad,
                states,
                slots,
                stride_c,
                stride_k,
                value_c,
                value_k,
                OF_SCORES,
                OF_VALUES,
                WIDE,
            )
            beta, onwards = pair_before(
                behind_ptr,
                behind_ptr + work_half,
                score_ptr,
                value_ptr,
                first_ptr,
                edges_ptr,
                c,
                states,
                slots,
                stride_c,
                stride_k,
                value_c,
                value_k,
                WIDE,
            )
            tl.store(before_ptr + c, beta, mask=c < states)
            tl.store(before_ptr + work_half + c, onwards, mask=c < states)
    tl.debug_barrier()
    put_state_gradients(
        d_initial_ptr,
        d_first_ptr,
        kept_ptr,
        kept_half,
        work_ptr,
        work_half,
        n,
        states,
        total,
        mean,
        grad,
        OF_SCORES,
        OF_VALUES,
        BLOCK_C,
        WIDE,
    )


@triton.jit
def put_edge_gradients(
    d_scores_ptr,
    d_values_ptr,
    alpha_ptr,
    kept_half,
    beta_ptr,
    work_half,
    score_ptr,
    value_ptr,
    source_ptr,
    c,
    place,
    total,
    mean,
    grad,
    states,
    slots,
    stride_c,
    stride_k,
    value_c,
    value_k,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gradients of the edges into states c, [BLOCK_C]."""
    beta = tl.load(beta_ptr + c, mask=c < states, other=-float("inf"))
    onwards = tl.load(beta_ptr + work_half + c, mask=c < states, other=0.0) - mean
    for k in range(slots):
        left, held = leaving(source_ptr, c, k, states, slots)
        term = tl.load(alpha_ptr + left, mask=held, other=-float("inf")) + edge_score(
            score_ptr, c, k, held, stride_c, stride_k
        )
        value = tl.load(
            value_ptr + c.to(tl.int64) * value_c + k * tl.cast(value_k, tl.int64),
            mask=held,
            other=0.0,
        ).to(tl.float64)
        value += tl.load(alpha_ptr + kept_half + left, mask=held, other=0.0) + onwards
        posterior = exp((term + (beta - total)).to(WIDE)) * grad
        put_gradients(
            d_scores_ptr,
            d_values_ptr,
            place + c * slots + k,
            posterior,
            value,
            c < states,
            OF_SCORES,
            OF_VALUES,
        )


@triton.jit
def put_state_gradients(
    d_scores_ptr,
    d_values_ptr,
    alpha_ptr,
    kept_half,
    beta_ptr,
    work_half,
    n,
    states,
    total,
    mean,
    grad,
    OF_SCORES: tl.constexpr,
    OF_VALUES: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Gradients of the first or last states."""
    for c0 in range(0, states, BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        both = tl.load(alpha_ptr + c, mask=c < states, other=-float("inf")) + tl.load(
            beta_ptr + c, mask=c < states, other=0.0
        )
        value = (
            tl.load(alpha_ptr + kept_half + c, mask=c < states, other=0.0)
            + tl.load(beta_ptr + work_half + c, mask=c < states, other=0.0)
            - mean
        )
        posterior = exp((both - total).to(WIDE)) * grad
        put_gradients(
            d_scores_ptr,
            d_values_ptr,
            n * states + c,
            posterior,
            value,
            c < states,
            OF_SCORES,
            OF_VALUES,
        )


def chain_expectation(
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    values: Tensor,
    first_values: Tensor,
    last_values: Tensor,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    steps, chains, states, slots = scores.shape
    table = table_of(source)
    kept = torch.empty(
        (2, steps + 1 if keep else 2, chains, states), dtype=torch.float64, device=scores.device
    )
    mean, logz = (torch.empty(chains, dtype=torch.float64, device=scores.device) for _ in range(2))
    ends = (initial, final, None if lengths is None else lengths.contiguous())
    tensors = (scores, table.source, *ends, values, first_values, last_values, kept, mean, logz)
    strides = (scores, values, initial, final, first_values, last_values)
    sizes = (
        kept.stride(0),
        steps,
        chains,
        states,
        slots,
        *(number for t in strides for number in t.stride()),
    )
    if table.wrong:
        mean.fill_(torch.nan)
        logz.fill_(torch.nan)
    else:
        options = shape_options(scores, table)
        del options["SLOTS"], options["MOST"]
        launch(chain_expectation_kernel, chains, *tensors, *sizes, KEEP=keep, **options)
    return mean, logz, kept if keep else kept.new_empty(0)


def chain_expectation_gradient(
    grad: Tensor,
    scores: Tensor,
    source: Tensor,
    initial: Tensor,
    final: Tensor,
    lengths: Tensor | None,
    values: Tensor,
    first_values: Tensor,
    last_values: Tensor,
    mean: Tensor,
    logz: Tensor,
    kept: Tensor,
    of_scores: bool,
    of_values: bool,
) -> tuple[Tensor, ...]:
    steps, chains, states, slots = scores.shape
    table = table_of(source)
    kinds = (scores, initial, final, values, first_values, last_values)
    wanted = (of_scores,) * 3 + (of_values,) * 3
    results = tuple(
        torch.empty(t.shape if w else 0, dtype=t.dtype, device=t.device)
        for t, w in zip(kinds, wanted, strict=True)
    )
    if table.wrong:
        return tuple(result.fill_(torch.nan) for result in results)
    work = torch.empty((2, 2, chains, states), dtype=torch.float64, device=scores.device)
    tables = (table.source, table.first, table.edges)
    tensors = (
        grad.contiguous(),
        scores,
        *tables,
        final,
        None if lengths is None else lengths.contiguous(),
        values,
        last_values,
    )
    numbers = (mean.contiguous(), logz.contiguous(), kept, work)
    sizes = (
        kept.stride(0),
        steps,
        chains,
        states,
        slots,
        *(number for t in (scores, values, final, last_values) for number in t.stride()),
    )
    options = shape_options(scores, table)
    del options["SLOTS"], options["MOST"]
    launch(
        chain_expectation_gradient_kernel,
        chains,
        *tensors,
        *numbers,
        *results,
        *sizes,
        OF_SCORES=of_scores,
        OF_VALUES=of_values,
        **options,
    )
    return results
