"""Log Z of dense linear chains, in parallel over the batch and in time.

Each sequence is cut in the middle. Alpha runs over the first half and beta over the second, on two
threads, and log Z is formed where they meet. Like alpha, beta includes the emission of its token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import empty_batch
from ....primitives.cpu.jit import MINUS_ONE, ONE, jit
from ....primitives.cpu.vectors import copy_numbers, pointer_to
from ....runtime.dtypes import acc_dtype
from .steps import (
    Tokens,
    chain_arrays,
    copy_row,
    halves_of,
    log_of_sum,
    middle_of,
    run,
    scan,
    scan_buffers,
)


@jit(nogil=True)
def forward_kernel(halves: Any, chain: Any, saved: Any, meeting: Any, log_scale: Any) -> None:
    """Scan half h % 2 of sequence h // 2: alpha forwards over the first, beta backwards.

    Write the state at the middle, `meeting` `[2N, W]`, the log of its scale, `[2N]`, and all
    states, `[T, N, C]`, unless `saved` is empty.
    """
    (N, C), buffers = saved.shape[1:], scan_buffers(chain)
    size, width = buffers.scores.shape
    states = np.empty((size + 1, width))
    for half in halves:
        n, backward = half // 2, half % 2
        length = chain.lengths[n]
        middle = middle_of(length)
        first, by = (length - 1, -1) if backward else (0, 1)
        steps, offset = length - middle if backward else middle, 0.0
        for k in range(0, steps, size):
            tokens = Tokens(n, length, first + k * by, by, min(size, steps - k))
            offset = scan(chain, tokens, buffers, states, offset)
            for i in range(tokens.count if len(saved) else 0):
                at = ((tokens.first + i * by) * N + n) * C
                copy_numbers(pointer_to(states), (i + 1) * width, pointer_to(saved), at, C)
            copy_row(states[tokens.count], states[0])
        log_scale[half] = offset + chain.shift * max(steps - 1, 0)
        copy_row(states[0], meeting[half])


@jit(nogil=True)
def join_kernel(sequences: Any, chain: Any, meeting: Any, log_scale: Any, logz: Any) -> None:
    """Compute log Z where alpha and beta meet."""
    buffers, states = scan_buffers(chain), np.empty((2, meeting.shape[1]))
    for n in sequences:
        length, offset = chain.lengths[n], log_scale[2 * n]
        middle = middle_of(length)
        if middle < length:
            offset += log_scale[2 * n + 1] + chain.shift
            copy_row(meeting[2 * n + 1], states[0])
        scan(chain, Tokens(n, length, middle - 1, MINUS_ONE, ONE), buffers, states, 0.0)
        logz[n] = offset + log_of_sum(chain.linear, meeting[2 * n], buffers.sums[0])


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
    run(forward_kernel, halves_of(chain), chain, saved.numpy(), meeting, log_scale)
    run(join_kernel, np.ones(N, np.int64), chain, meeting, log_scale, logz)
    result = torch.from_numpy(logz).masked_fill_(invalid, torch.nan)
    rounded = result.to(acc_dtype(emissions.dtype), copy=True)
    return result, rounded, saved if save else saved.new_empty(0)
