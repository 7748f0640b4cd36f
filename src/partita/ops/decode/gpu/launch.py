"""Prefix beam search on a GPU: the sort of each step's classes, the search, and the trace."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....runtime.constants import constant
from ....runtime.launch import launch, next_power_of_2
from ...logprobs.common import topk_fake
from ...logprobs.gpu.launch_topk import topk_of_rows
from ..common import Hypotheses, empty_hypotheses
from .plan import BeamPlan, beam_plan, extension_pairs
from .search import ctc_beam_search_kernel, ctc_beam_trace_kernel

BLOCK_T = 256


def _packed_pairs(width: int, *, device: torch.device) -> Tensor:
    packed = [i << 16 | k for i, k in extension_pairs(width)]
    return torch.tensor(packed, dtype=torch.int32).to(device)


def as_rows(logits: Tensor) -> tuple[Tensor, int, int]:
    """Return all steps as rows `[T * N, C]`, and the strides of steps and sequences in rows."""
    T, N, C = logits.shape
    if logits.stride(0) != N * logits.stride(1) and logits.stride(1) == T * logits.stride(0):
        return logits.transpose(0, 1).reshape(-1, C), 1, T
    return logits.reshape(-1, C), N, 1


def beam_memory(
    N: int, T: int, width: int, plan: BeamPlan, device: torch.device
) -> tuple[Tensor, ...]:
    """Return the memory of N sequences in the order of `Memory`."""

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((N, *shape), dtype=dtype, device=device)

    keys = plan.table_size + plan.block_w
    return (
        empty(torch.float64, 3, 5, width),
        empty(torch.int32, 3, 6, width),
        empty(torch.int64, plan.block_w),
        empty(torch.float64, plan.block_p),
        empty(torch.int64, plan.block_p),
        empty(torch.int32, plan.block_p),
        empty(torch.int32, width),
        torch.zeros((N, keys), dtype=torch.int64, device=device),
        torch.zeros((N, plan.table_size + 1), dtype=torch.int32, device=device),
        empty(torch.int64, T, width),
    )


def ctc_beam_search(
    logits: Tensor,
    input_lengths: Tensor,
    blank: int,
    beam_width: int,
    nbest: int,
    cutoff_top_n: int,
    blank_skip_threshold: float,
    from_logits: bool,
) -> Hypotheses:
    """Return the best prefixes of each sequence."""
    (T, N, C), device = logits.shape, logits.device
    plan = beam_plan(T, beam_width)
    rows, row_t, row_n = as_rows(logits)
    K = min(cutoff_top_n + 1, C)
    top = topk_fake(rows, K)
    topk_of_rows(rows, K, 1.0, 0.0, top, False)
    memory = beam_memory(N, T, beam_width, plan, device)
    ends = torch.empty(N, dtype=torch.int32, device=device)
    found = empty_hypotheses(logits, nbest)
    launch(
        ctc_beam_search_kernel,
        N,
        logits,
        input_lengths,
        top.indices,
        top.entries,
        top.maximum,
        top.sumexp,
        constant(_packed_pairs, beam_width, device=device),
        *memory,
        ends,
        T,
        N,
        C,
        K,
        min(cutoff_top_n, C - 1),
        plan.pairs,
        beam_width,
        plan.table_size,
        blank,
        math.log(blank_skip_threshold) if blank_skip_threshold else math.inf,
        row_t,
        row_n,
        *logits.stride(),
        FROM_LOGITS=from_logits,
        FILTER=plan.filters,
        BLOCK_W=plan.block_w,
        BLOCK_P=plan.block_p,
        BLOCK_I=plan.block_i,
        BLOCK_K=next_power_of_2(K),
        num_warps=plan.num_warps,
    )
    launch(
        ctc_beam_trace_kernel,
        N * nbest,
        memory[0],
        memory[1],
        memory[-1],
        ends,
        *found,
        T,
        nbest,
        beam_width,
        BLOCK_T=BLOCK_T,
        num_warps=1,
    )
    return found
