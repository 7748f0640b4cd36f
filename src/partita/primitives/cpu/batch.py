"""Batches of sequences on the CPU: arrays, threads, and rows that are read through strides."""

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

INF = np.inf
LOWEST = np.finfo(
    np.float64
).min  # takes the place of -inf in maxima, so that no difference from one is NaN


class Steps(NamedTuple):
    """Numbers of the edges of all steps, anywhere in memory.

    Fields:
        numbers: from the first to the last of them, `[...]`.
        strides: of steps, chains, states and slots, `[4]`.
    """

    numbers: Any
    strides: Any


@njit(**FLAGS)
def row_at(steps: Any, t: int, n: int) -> Any:
    """The numbers from a step of a chain on."""
    return steps.numbers[t * steps.strides[0] + n * steps.strides[1] :]


def empty_batch(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Memory from NumPy, which asks for large pages: PyTorch's takes several times as long to touch for the first time."""
    return torch.from_numpy(np.empty(tuple(shape), dtype=str(dtype).removeprefix("torch.")))


def as_array(tensor: Tensor) -> Any:
    """What is small, in fp64 and side by side."""
    return tensor.detach().double().contiguous().resolve_neg().numpy()


def as_steps(tensor: Tensor) -> Steps:
    """`[T, N, C, K]` in its own memory, whatever its strides; half types as fp32."""
    wide = (tensor.float() if tensor.element_size() == 2 else tensor).detach().resolve_neg()
    extent = (
        1 + sum((size - 1) * stride for size, stride in zip(wide.shape, wide.stride(), strict=True))
        if wide.numel()
        else 0
    )
    return Steps(wide.as_strided((extent,), (1,)).numpy(), np.array(wide.stride()))


def fill_nan(result: Tensor, spoilt: Tensor) -> None:
    """NaN for some of the chains of `[T, N, ...]`."""
    if bool(spoilt.any()) and result.numel():
        result[:, spoilt] = torch.nan


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "partita")


def run_over_batch(kernel: Callable[..., Any], batch: Any, *args: Any) -> None:
    """The kernel, whose first argument is a share of the chains `[...]`, for all of them, on as many threads as PyTorch has."""
    longest = batch.lengths.argsort(kind="stable")[::-1].copy()
    threads = min(torch.get_num_threads(), len(longest))
    if threads < 2 or int(batch.lengths.sum()) * len(batch.sources) < SMALL:
        kernel(longest, batch, *args)
        return
    parts = min(4 * threads, len(longest))
    shares = deque([*(longest[i::parts].copy() for i in range(parts)), *[None] * threads])

    def work() -> None:
        while (share := shares.popleft()) is not None:
            kernel(share, batch, *args)

    others = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    work()
    for other in others:
        other.result()


SMALL = 2**18  # edges times steps: with fewer, other threads take longer to start than they save


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has no threads
