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
from torch import Tensor

from ...runtime.caches import register_cache
from ...runtime.register import resolved
from .half import NO_NUMBERS, NO_WORDS, load_row, store_row
from .jit import ONE, jit

INF = np.inf
LOWEST = np.finfo(np.float64).min  # replaces -inf in maxima, so that no difference from one is NaN
SMALL = 2**18  # edges times steps; with fewer, threads take longer to start than they save


class Steps(NamedTuple):
    """The numbers of all steps, at any strides in the memory of their tensor.

    Fields:
        numbers: the memory from the first to the last number, flat; empty for half types.
        words: the same of half types, as words of 16 bits; empty for others.
        is_bf16: whether the words are bf16.
        strides: the strides of the tensor, of steps and chains first.
    """

    numbers: Any
    words: Any
    is_bf16: bool
    strides: Any


@jit
def start_of(steps: Any, t: int, n: int) -> int:
    """Return the index in memory of the first number of step t of chain n."""
    return t * steps.strides[0] + n * steps.strides[1]


@jit
def row_at(steps: Any, t: int, n: int) -> Any:
    """Return the memory from step t of chain n on; it is empty for half types."""
    return steps.numbers[start_of(steps, t, n) :]


@jit
def contiguous_row(scores: Any, t: int, n: int, buffer: Any) -> Any:
    """Return the scores of a step, `[C]`, contiguous: a view, or a copy in the buffer."""
    stride = scores.strides[2]
    if stride == 1 and not len(scores.words):
        return row_at(scores, t, n)[: len(buffer)]
    load_row(scores, start_of(scores, t, n), stride, buffer)
    return buffer


@jit
def row_to_write(result: Any, t: int, n: int, buffer: Any) -> Any:
    """Return the row of a step to write to: a view, or the buffer, which `finish_row` rounds."""
    first = start_of(result, t, n)
    return buffer if len(result.words) else result.numbers[first : first + len(buffer)]


@jit
def finish_row(result: Any, t: int, n: int, row: Any) -> None:
    """Store a row from `row_to_write`, whose numbers are contiguous in the result."""
    if len(result.words):
        store_row(result, start_of(result, t, n), ONE, row)


def empty_batch(shape: Sequence[int], dtype: torch.dtype = torch.float64) -> Tensor:
    """Return uninitialized memory from NumPy, which asks for large pages.

    PyTorch's memory takes several times as long to touch for the first time.
    """
    if dtype.itemsize == 2:  # NumPy has no bf16
        return torch.from_numpy(np.empty(tuple(shape), np.int16)).view(dtype)
    return torch.from_numpy(np.empty(tuple(shape), dtype=str(dtype).removeprefix("torch.")))


def as_array(tensor: Tensor) -> Any:
    """Return a small tensor as a contiguous fp64 array."""
    return resolved(tensor.detach()).double().contiguous().numpy()


def as_integers(tensor: Tensor) -> Any:
    """Return labels or lengths as a contiguous int64 array."""
    return resolved(tensor).long().contiguous().numpy()


def as_steps(tensor: Tensor) -> Steps:
    """Return a tensor of any dtype and strides in its own memory."""
    tensor = resolved(tensor.detach())
    extent = 0
    if tensor.numel():
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in sizes)
    memory, strides = tensor.as_strided((extent,), (1,)), np.array(tensor.stride())
    if tensor.element_size() > 2:
        return Steps(memory.numpy(), NO_WORDS, False, strides)
    words = memory.view(torch.int16).numpy().view(np.uint16)
    return Steps(NO_NUMBERS, words, tensor.dtype == torch.bfloat16, strides)


def fill_nan(result: Tensor, failed: Tensor, steps: Tensor | None = None) -> None:
    """Write NaN for the failed sequences `[N]` into their first steps, or all, of `[T, N, ...]`."""
    for n in failed.nonzero().flatten().tolist() if result.numel() else ():
        result[: None if steps is None else int(steps[n]), n] = torch.nan


@functools.lru_cache(maxsize=16)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "partita")


def run_over_sequences(kernel: Callable[..., Any], lengths: Any, edges: int, *args: Any) -> None:
    """Run `kernel(sequences, *args)` for all sequences, on as many threads as PyTorch has.

    Each call of the kernel gets the indices of some sequences. Long ones come first, so that the
    threads end at about the same time.

    Args:
        kernel: a function that Numba compiled without the interpreter's lock.
        lengths: the number of steps of each sequence, `[N]`.
        edges: the number of edges of a step.
        args: the other arguments of the kernel.
    """
    threads = min(torch.get_num_threads(), len(lengths))
    if threads < 2 or int(lengths.sum()) * edges < SMALL:
        kernel(np.arange(len(lengths)), *args)
        return
    longest = lengths.argsort(kind="stable")[::-1].copy()
    parts = min(4 * threads, len(longest))
    # Each thread stops at a None.
    queue = deque([*(longest[i::parts].copy() for i in range(parts)), *[None] * threads])

    def work() -> None:
        while (chains := queue.popleft()) is not None:
            kernel(chains, *args)

    others = [_pool(threads - 1).submit(work) for _ in range(threads - 1)]
    work()
    for other in others:
        other.result()


register_cache("primitives.cpu.batch.thread_pools", _pool.cache_clear)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a forked child has no threads
