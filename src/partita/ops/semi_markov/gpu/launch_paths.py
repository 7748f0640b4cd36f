"""Allocate results and launch the kernels for the best paths and for samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import launch
from . import plan
from .launch import scan_weights, score_tables, semi_markov_logz
from .sample import semi_markov_sample_kernel
from .viterbi import semi_markov_trace_kernel, semi_markov_viterbi_kernel


def semi_markov_viterbi(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best score `[N]`, and the states and starts of the best path `[T, N]`."""
    T, N, C = emissions.shape
    D, device = len(durations), emissions.device
    score = torch.empty(N, dtype=acc_dtype(emissions.dtype), device=device)
    states = torch.empty((T, N), dtype=torch.int64, device=device)
    starts = torch.empty((T, N), dtype=torch.bool, device=device)
    choices = torch.empty((2, T, N, C), dtype=torch.int32, device=device)
    last = torch.empty(N, dtype=torch.int32, device=device)
    lengths = None if lengths is None else lengths.contiguous()
    inputs = (emissions, start, end, lengths)
    results = (choices, score, last)
    strides = (*emissions.stride(), *start.stride(), *end.stride())
    resident = plan.is_resident(C, D)
    if resident:
        from .best_scan import semi_markov_best_scan_kernel

        launch(
            semi_markov_best_scan_kernel,
            N,
            *(*inputs, scan_weights(transitions, durations), *results, T, N, C, D, *strides),
            **plan.scan_options(C, D),
        )
    else:
        ring = torch.empty((N, D + 2, C), dtype=torch.float64, device=device)
        launch(
            semi_markov_viterbi_kernel,
            N,
            *(*inputs, score_tables(transitions, durations), ring, *results),
            *(T, N, C, D, plan.duration_block(D), *strides),
            **plan.viterbi_options(C, D),
        )
    launch(
        semi_markov_trace_kernel,
        N,
        *(choices, last, states, starts, lengths, T, N, C),
        BY_END=resident,
        BLOCK=32,
        num_warps=1,
    )
    return score, states, starts


def semi_markov_sample(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the states and starts `[k, T, N]` of k paths from the posterior."""
    chain = (emissions, transitions, durations, start, end, lengths)
    logz, _, saved = semi_markov_logz(*chain, True)
    T, N, C = emissions.shape
    D, k, device = len(durations), uniforms.shape[2], emissions.device
    states = torch.empty((k, T, N), dtype=torch.int64, device=device)
    starts = torch.empty((k, T, N), dtype=torch.bool, device=device)
    lengths = None if lengths is None else lengths.contiguous()
    launch(
        semi_markov_sample_kernel,
        k * N,
        *(emissions, transitions, durations, end, lengths, logz, saved, uniforms.contiguous()),
        *(states, starts, T, N, C, D, k),
        *(*emissions.stride(), *transitions.stride(), *durations.stride(), *end.stride()),
        **plan.sample_options(C, D),
    )
    return states, starts
