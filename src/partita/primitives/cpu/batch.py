"""Batches of sequences for Numba kernels: arrays, threads, and rows that are read with strides."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from ...primitives.cpu.math import FLAGS
from ...runtime.caches import register_cache

INF = np.inf
LOWEST = np.finfo(np.float64).min  # replaces -inf in maxima, so that no difference from one is NaN
SMALL = 2**18  # edges times steps; with fewer, threads take longer to start than they save


class Steps(NamedTuple):
    """The numbers of the edges of all steps, at any strides in memory.

    Fields:
        numbers: the memory from the first to the last number, one-dimensional.
        strides: the strides of steps, chains, states and edges into a state, `[4]`.
    """

    numbers: Any
    strides: Any


@njit(**FLAGS)
def row_at(steps: Any, t: int, n: int) -> Any:
    """Return the memory from step t of chain n on."""
    return steps.numbers[t * steps.strides[0] + n * steps.strides[1] :]


def empty_batch(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return uninitialized memory from NumPy, which asks for large pages.

    PyTorch's memory takes several times as long to touch for the first time.
    """
    return torch.from_numpy(np.empty(tuple(shape), dtype=str(dtype).removeprefix("torch.")))


def as_array(tensor: Tensor) -> Any:
    """Return a small tensor as a contiguous fp64 array."""
    return tensor.detach().double().contiguous().resolve_neg().numpy()


def as_steps(tensor: Tensor) -> Steps:
    """Return `[T, N, C, K]` of any strides in its own memory; half types become fp32."""
    numbers = (tensor.float() if tensor.element_size() == 2 else tensor).detach().resolve_neg()
    extent = 0
    if numbers.numel():
        sizes = zip(numbers.shape, numbers.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in sizes)
    return Steps(numbers.as_strided((extent,), (1,)).numpy(), np.array(numbers.stride()))


def fill_nan(result: Tensor, invalid: Tensor) -> None:
    """Write NaN for the invalid chains `[N]` into `[T, N, ...]`."""
    if bool(invalid.any()) and result.numel():
        result[:, invalid] = torch.nan


@functools.lru_cache(maxsize=16)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "partita")


def run_over_batch(kernel: Callable[..., Any], batch: Any, *args: Any) -> None:
    """Run `kernel(chains, batch, *args)` for all chains, on as many threads as PyTorch has.

    Each call of the kernel gets the indices of some chains. Long chains come first, so that the
    threads end at about the same time.
    """
    longest = batch.lengths.argsort(kind="stable")[::-1].copy()
    threads = min(torch.get_num_threads(), len(longest))
    if threads < 2 or int(batch.lengths.sum()) * len(batch.sources) < SMALL:
        kernel(longest, batch, *args)
        return
    parts = min(4 * threads, len(longest))
    # Each thread stops at a None.
    queue = deque([*(longest[i::parts].copy() for i in range(parts)), *[None] * threads])

    def work() -> None:
        while (chains := queue.popleft()) is not None:
            kernel(chains, batch, *args)

    others = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    work()
    for other in others:
        other.result()


register_cache("primitives.cpu.batch.thread_pools", _pool.cache_clear)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has no threads
