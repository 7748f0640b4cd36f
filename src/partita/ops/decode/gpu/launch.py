"""Greedy and prefix beam search of CTC on a GPU: allocation and launches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ....primitives.rows import aligned_rows
from ....runtime.constants import constant
from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, next_power_of_2, tl_acc_dtype
from ...logprobs.common import topk_fake
from ...logprobs.gpu.launch import topk_of_rows
from ..common import Hypotheses, empty_hypotheses
from .beam import Memory, Sizes, SortedRows, ctc_beam_search_kernel, ctc_beam_trace_kernel
from .greedy import ctc_best_class_kernel, ctc_collapse_kernel
from .plan import ALIGNMENT, aligned_classes, beam_plan, extension_pairs, greedy_options
from .select import Candidates

BLOCK_T = 256
BLOCK_COLLAPSED = 1024  # steps of greedy search


def ctc_greedy_search(
    logits: Tensor, input_lengths: Tensor, blank: int, from_logits: bool
) -> Hypotheses:
    """Decode each sequence by the most probable class of each step."""
    T, N, C = logits.shape
    dtype = acc_dtype(logits.dtype)
    if from_logits:
        logits = aligned_rows(logits, ALIGNMENT // logits.element_size())
    vec = aligned_classes(C, logits.element_size(), logits.stride(), logits.data_ptr())
    options = greedy_options(C, vec)
    classes = torch.empty((N, T), dtype=torch.int32, device=logits.device)
    scores = torch.empty((N, T), dtype=dtype, device=logits.device)
    found = empty_hypotheses(logits)
    launch(
        ctc_best_class_kernel,
        cdiv(T * N, options["ROWS"]),
        logits_ptr=logits,
        input_lengths_ptr=input_lengths,
        classes_ptr=classes,
        scores_ptr=scores,
        T=T,
        N=N,
        C=C,
        stride_t=logits.stride(0),
        stride_n=logits.stride(1),
        stride_c=logits.stride(2),
        FROM_LOGITS=from_logits,
        ACC_DTYPE=tl_acc_dtype(dtype),
        **options,
    )
    launch(
        ctc_collapse_kernel,
        N,
        classes_ptr=classes,
        class_scores_ptr=scores,
        input_lengths_ptr=input_lengths,
        found=found,
        T=T,
        blank=blank,
        BLOCK_T=BLOCK_COLLAPSED,
        num_warps=4,
    )
    return found


def _packed_pairs(width: int, *, device: torch.device) -> Tensor:
    packed = [i << 16 | k for i, k in extension_pairs(width)]
    return torch.tensor(packed, dtype=torch.int32).to(device)


def as_rows(logits: Tensor) -> tuple[Tensor, int, int]:
    """Return all steps as rows `[T * N, C]`, and the strides of steps and sequences in rows."""
    T, N, C = logits.shape
    if logits.stride(0) != N * logits.stride(1) and logits.stride(1) == T * logits.stride(0):
        return logits.transpose(0, 1).reshape(-1, C), 1, T
    return logits.reshape(-1, C), N, 1


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
    """Return the best prefixes of each sequence, from the sorted classes of each step."""
    (T, N, C), device = logits.shape, logits.device
    plan = beam_plan(T, beam_width)
    rows, row_t, row_n = as_rows(logits)
    K = min(cutoff_top_n + 1, C)
    top = topk_fake(rows, K)
    topk_of_rows(rows, K, 1.0, 0.0, top)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((N, *shape), dtype=dtype, device=device)

    keys, stamps = plan.table_size + plan.block_w, plan.table_size + 1
    memory = Memory(
        numbers=empty(torch.float64, 3, 5, beam_width),
        integers=empty(torch.int32, 3, 6, beam_width),
        children=empty(torch.int64, plan.block_w),
        candidates=Candidates(
            scores=empty(torch.float64, plan.block_p),
            ties=empty(torch.int64, plan.block_p),
            order=empty(torch.int32, plan.block_p),
        ),
        chosen=empty(torch.int32, beam_width),
        keys=torch.zeros((N, keys), dtype=torch.int64, device=device),
        stamps=torch.zeros((N, stamps), dtype=torch.int32, device=device),
        events=empty(torch.int64, T, beam_width),
    )
    ends = torch.empty(N, dtype=torch.int32, device=device)
    found = empty_hypotheses(logits, nbest)
    launch(
        ctc_beam_search_kernel,
        N,
        logits_ptr=logits,
        input_lengths_ptr=input_lengths,
        rows=SortedRows(top.indices, top.entries, top.maximum, top.sumexp),
        pairs_ptr=constant(_packed_pairs, beam_width, device=device),
        batch=memory,
        ends_ptr=ends,
        T=T,
        N=N,
        size=Sizes(K, min(cutoff_top_n, C - 1), plan.pairs, beam_width, plan.table_size),
        blank=blank,
        skipped=math.log(blank_skip_threshold) if blank_skip_threshold else math.inf,
        row_t=row_t,
        row_n=row_n,
        stride_t=logits.stride(0),
        stride_n=logits.stride(1),
        stride_c=logits.stride(2),
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
        numbers_ptr=memory.numbers,
        integers_ptr=memory.integers,
        events_ptr=memory.events,
        ends_ptr=ends,
        found=found,
        T=T,
        nbest=nbest,
        width=beam_width,
        BLOCK_T=BLOCK_T,
        num_warps=1,
    )
    return found
