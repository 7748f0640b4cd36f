"""Greedy search on a GPU: allocation and launches."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch, tl_acc_dtype
from ..common import Hypotheses, empty_hypotheses
from .greedy import ctc_best_class_kernel, ctc_collapse_kernel
from .plan import aligned_classes, greedy_plan

BLOCK_T = 1024


def ctc_greedy_search(
    logits: Tensor, input_lengths: Tensor, blank: int, from_logits: bool
) -> Hypotheses:
    """Decode each sequence by the most probable class of each step."""
    T, N, C = logits.shape
    dtype = acc_dtype(logits.dtype)
    plan = greedy_plan(
        C, aligned_classes(C, logits.element_size(), logits.stride(), logits.data_ptr())
    )
    classes = torch.empty((N, T), dtype=torch.int32, device=logits.device)
    scores = torch.empty((N, T), dtype=dtype, device=logits.device)
    found = empty_hypotheses(logits)
    launch(
        ctc_best_class_kernel,
        cdiv(T * N, plan.rows),
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
        VEC=plan.vec,
        PIECES=plan.pieces,
        ROWS=plan.rows,
        BLOCK_V=plan.block,
        num_warps=plan.num_warps,
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
        BLOCK_T=BLOCK_T,
        num_warps=4,
    )
    return found
