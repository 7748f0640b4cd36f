"""Log Z of dense linear chains, in parallel over the batch and in time.

Each sequence is cut in the middle. Alpha runs over the first half and beta over the second, on two
threads, and log Z is formed where they meet. Like alpha, beta includes the emission of its token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import empty_batch, run_over_sequences
from ....primitives.cpu.jit import ONE, jit
from ....primitives.cpu.vectors import copy_numbers, pointer_to
from ....runtime.dtypes import acc_dtype
from .steps import (
    BLOCK,
    chain_arrays,
    copy_row,
    halves_of,
    load_tokens,
    load_weights,
    log_of_sum,
    middle_of,
    scan,
)


@jit(nogil=True)
def forward_kernel(
    halves: Any, chain: Any, save: bool, saved: Any, meeting: Any, log_scale: Any
) -> None:
    """Scan half h % 2 of sequence h // 2: alpha forwards over the first, beta backwards.

    Write the state at the middle, `meeting` `[2N, W]`, the log of its scale, `[2N]`, and with
    `save` all states, `[T, N, C]`.
    """
    C, width = chain.weights.shape[1:]
    size = 1 if chain.varies else BLOCK
    scores, sums = np.empty((size, width)), np.empty((size, width))
    states = np.empty((size + 1, width))
    buffer = np.zeros((C, width) if chain.varies else (0, 0))
    for half in halves:
        n, backward = half // 2, half % 2
        length = chain.lengths[n]
        middle = middle_of(length)
        weights = buffer if chain.varies else chain.weights[backward]
        first, by = (length - 1, -1) if backward else (0, 1)
        tokens = length - middle if backward else middle
        offset = 0.0
        for k in range(0, tokens, size):
            t, K = first + k * by, min(size, tokens - k)
            offset += load_tokens(
                *(chain.emissions, chain.start, chain.end, length),
                *(t, by, n, chain.linear, scores[:K]),
            )
            if k and chain.varies:
                step = t if backward else t - 1
                load_weights(chain.transitions, step, n, backward, weights)
            offset += scan(chain.linear, weights, scores[:K], sums[:K], states[: K + 1], k == 0)
            store_states(states[1 : K + 1], t, by, n, saved[: len(saved) if save else 0])
            copy_row(states[K], states[0])
        log_scale[half] = offset + chain.shift * max(tokens - 1, 0)
        copy_row(states[0], meeting[half])


@jit
def store_states(states: Any, t: int, by: int, n: int, saved: Any) -> None:
    """Write the states of tokens t, t + by, ... to `[T, N, C]`, or nothing if that is empty."""
    (N, C), width = saved.shape[1:], states.shape[1]
    source, target = pointer_to(states), pointer_to(saved)
    for k in range(len(states) if len(saved) else 0):
        copy_numbers(source, k * width, target, ((t + k * by) * N + n) * C, C)


@jit(nogil=True)
def join_kernel(sequences: Any, chain: Any, meeting: Any, log_scale: Any, logz: Any) -> None:
    """Compute log Z where alpha and beta meet."""
    C, width = chain.weights.shape[1:]
    scores, sums, states = np.zeros((1, width)), np.empty((1, width)), np.empty((2, width))
    buffer = np.zeros((C, width) if chain.varies else (0, 0))
    for n in sequences:
        middle, offset = middle_of(chain.lengths[n]), log_scale[2 * n]
        weights = buffer if chain.varies else chain.weights[1]
        has_beta = middle < chain.lengths[n]
        if has_beta:
            offset += log_scale[2 * n + 1] + chain.shift
            if chain.varies:
                load_weights(chain.transitions, middle - 1, n, ONE, weights)
            copy_row(meeting[2 * n + 1], states[0])
        scan(chain.linear, weights, scores, sums, states, not has_beta)
        logz[n] = offset + log_of_sum(chain.linear, meeting[2 * n], sums[0])


def linear_chain_logz(
    emissions: Tensor,
    transitions: Tensor,
    start: Tensor | None,
    end: Tensor | None,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and the states of both halves."""
    chain, invalid = chain_arrays(emissions, transitions, start, end, lengths)
    T, N, C = emissions.shape
    saved = empty_batch((T if save else 0, N, C))
    meeting = np.empty((2 * N, chain.weights.shape[2]))
    log_scale, logz = np.empty(2 * N), np.empty(N)
    halves, edges = halves_of(chain)
    run_over_sequences(
        forward_kernel, halves, edges, chain, save, saved.numpy(), meeting, log_scale
    )
    run_over_sequences(join_kernel, np.ones(N, np.int64), edges, chain, meeting, log_scale, logz)
    result = torch.from_numpy(logz).masked_fill_(invalid, torch.nan)
    rounded = result.to(acc_dtype(emissions.dtype), copy=True)
    return result, rounded, saved if save else saved.new_empty(0)
