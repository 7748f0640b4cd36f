"""Allocate results and launch the kernels for the best paths and for samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ....runtime.dtypes import acc_dtype
from ....runtime.launch import launch
from . import plan
from .launch import (
    batch_of,
    launch_memory_scan,
    scan_weights,
    scans_of,
    semi_markov_logz,
    strided,
)
from .sample import semi_markov_sample_kernel
from .scores import Emissions
from .viterbi import semi_markov_best_scan_kernel, semi_markov_trace_kernel


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
    chains, resident = batch_of(emissions, durations, start, end, lengths), plan.is_resident(C, D)
    if resident:
        launch(
            semi_markov_best_scan_kernel,
            N,
            weights_ptr=scan_weights(transitions, durations),
            chains=chains,
            choices_ptr=choices,
            score_ptr=score,
            last_ptr=last,
            **plan.scan_options(C, D),
        )
    else:
        launch_memory_scan(
            N,
            transitions,
            durations,
            chains=chains,
            saved_ptr=choices,
            logz_ptr=last,
            rounded_ptr=score,
            SAVE=True,
            EXACT=True,
            IS_MAX=True,
        )
    launch(
        semi_markov_trace_kernel,
        N,
        choices_ptr=choices,
        last_ptr=last,
        states_ptr=states,
        starts_ptr=starts,
        lengths_ptr=chains.lengths,
        T=T,
        N=N,
        C=C,
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
    launch(
        semi_markov_sample_kernel,
        k * N,
        emissions=Emissions(emissions, *emissions.stride()),
        transitions=strided(transitions),
        durations=strided(durations),
        end=strided(end),
        scans=scans_of(lengths, logz, saved, emissions),
        uniforms_ptr=uniforms.contiguous(),
        states_ptr=states,
        starts_ptr=starts,
        D=D,
        samples=k,
        **plan.sample_options(C, D),
    )
    return states, starts
