"""Log Z of semi-Markov chains, in parallel over the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....primitives.cpu.batch import empty_batch, run_over_sequences
from ....primitives.cpu.jit import jit
from ....runtime.dtypes import acc_dtype
from .steps import scan_forward, semi_markov_arrays, work_of


@jit(nogil=True)
def logz_kernel(sequences: Any, chain: Any, saved: Any, logz: Any) -> None:
    """Compute log Z of each sequence, and write begin and alpha to `[2, R, N, C]`.

    R is the number of steps, or 2 if nothing is saved.
    """
    for n in sequences:
        logz[n] = scan_forward(chain, n, saved[0, :, n], saved[1, :, n])


def semi_markov_logz(
    emissions: Tensor,
    transitions: Tensor,
    durations: Tensor,
    start: Tensor,
    end: Tensor,
    lengths: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log Z in fp64 and in the dtype of results, and with `save` begin and alpha."""
    chain, invalid = semi_markov_arrays(emissions, transitions, durations, start, end, lengths)
    T, N, C = emissions.shape
    saved, logz = empty_batch((2, T if save else 2, N, C)), np.empty(N)
    run_over_sequences(logz_kernel, chain.lengths, work_of(chain), chain, saved.numpy(), logz)
    result = torch.from_numpy(logz).masked_fill_(invalid, torch.nan)
    rounded = result.to(acc_dtype(emissions.dtype), copy=True)
    return result, rounded, saved if save else saved.new_empty(0)
