"""Launch the kernels for paths of dense linear chains: the best one, and samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import cdiv, launch
from . import plan
from .launch import linear_chain_logz
from .launch_lanes import best_path_in_lanes
from .sample import linear_chain_sample_kernel
from .saved import end_strides, split_saved, transition_strides
from .viterbi import (
    linear_chain_path_maps_kernel,
    linear_chain_trace_kernel,
    linear_chain_viterbi_kernel,
)


def linear_chain_viterbi(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the best score `[N]` and the states of the best path `[T, N]`."""
    T, N, C = emissions.shape
    device = emissions.device
    score = torch.empty(N, dtype=acc_dtype(emissions.dtype), device=device)
    states = torch.empty((T, N), dtype=torch.int64, device=device)
    if C == 0:
        return score.fill_(-torch.inf), states.fill_(-1)
    lengths = None if lengths is None else lengths.contiguous()
    if transitions.ndim == 2 and plan.uses_lanes(T, N, C, plan.MAX_PARALLEL_STATES):
        best_path_in_lanes(emissions, transitions, start, end, lengths, score, states)
        return score, states
    index_dtype = torch.int16 if C <= 2**15 else torch.int32
    previous = torch.empty((T, N, C), dtype=index_dtype, device=device)
    recent = torch.empty((2, N, C), dtype=torch.float64, device=device)
    last = torch.empty(N, dtype=torch.int32, device=device)
    launch(
        linear_chain_viterbi_kernel,
        N,
        *(emissions, transitions, start, end, lengths, previous, recent, score, last),
        *(T, N, C),
        *emissions.stride(),
        *transition_strides(transitions),
        *end_strides(start),
        *end_strides(end),
        CONSTANT=transitions.ndim == 2,
        **plan.viterbi_options(C),
    )
    steps = plan.trace_steps(T)
    segments = max(cdiv(T - 1, steps), 1)
    maps = torch.empty((N, segments, C), dtype=torch.int32, device=device)
    sizes = (T, N, C, segments)
    launch(
        linear_chain_path_maps_kernel,
        N * segments * cdiv(C, 128),
        *(previous, lengths, maps),
        *sizes,
        STEPS=steps,
        BLOCK_C=128,
        num_warps=4,
    )
    launch(
        linear_chain_trace_kernel,
        N * segments,
        *(previous, lengths, maps, last, states),
        *sizes,
        STEPS=steps,
        num_warps=1,
    )
    return score, states


def linear_chain_sample(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    uniforms: Tensor,
) -> Tensor:
    """Return the states `[k, T, N]` of k paths from the posterior."""
    T, N, C = emissions.shape
    samples = uniforms.shape[1]
    states = torch.empty((samples, T, N), dtype=torch.int64, device=emissions.device)
    if C == 0:
        return states.fill_(-1)
    lengths = None if lengths is None else lengths.contiguous()
    logz, _, saved = linear_chain_logz(emissions, transitions, start, end, lengths, True)
    parts, alpha = plan.range_parts(transitions), split_saved(saved, T, N, C)
    launch(
        linear_chain_sample_kernel,
        N * samples,
        *(transitions, lengths, alpha.span, alpha.states, logz, uniforms, states),
        *(T, N, C, parts, samples),
        *transition_strides(transitions),
        *uniforms.stride(),
        BLOCK_PARTS=plan.parts_block(parts),
        **plan.sample_options(C),
    )
    return states
