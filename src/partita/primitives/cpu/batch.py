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

from ...primitives.cpu.half import load_row, memory_of, store_row
from ...primitives.cpu.jit import jit
from ...primitives.cpu.math import exp_floor
from ...runtime.caches import register_cache
from ...runtime.register import resolved

INF = np.inf
LOWEST = np.finfo(np.float64).min  # replaces -inf in maxima, so that no difference from one is NaN
HUGE = 2.0**40  # of log-sum-exps, whose digits may be too few
LANES = 64  # partial sums of a log-sum-exp
SMALL = 2**18  # edges times steps; with fewer, threads take longer to start than they save


class Steps(NamedTuple):
    """The numbers of the edges of all steps, at any strides in memory.

    Fields:
        numbers, words, is_bf16: the memory, as from `memory_of`.
        strides: the strides of steps, chains, states and edges into a state, `[4]`.
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
        store_row(result, start_of(result, t, n), 1, row)


@jit
def logsumexp_row(row: Any, maxima: Any, sums: Any) -> float:
    """Return the log-sum-exp of a step's classes, by way of partial results `[LANES]`.

    A single running sum would not become vector code. Neither would two rows of one array, which
    might overlap, so maxima and sums are two arrays.
    """
    whole = len(row) - len(row) % LANES
    highest, total = LOWEST, 0.0
    for c in range(whole, len(row)):
        highest = row[c] if row[c] > highest else highest
    if whole:
        for i in range(LANES):
            maxima[i], sums[i] = highest, 0.0
        for c in range(0, whole, LANES):
            part = row[c : c + LANES]
            for i in range(LANES):
                maxima[i] = part[i] if part[i] > maxima[i] else maxima[i]
        for i in range(LANES):
            highest = maxima[i] if maxima[i] > highest else highest
        for c in range(0, whole, LANES):
            part = row[c : c + LANES]
            for i in range(LANES):
                sums[i] += exp_floor(part[i] - highest)
        for i in range(LANES):
            total += sums[i]
    rest = row[whole:]
    for i in range(len(rest)):
        sums[i] = exp_floor(rest[i] - highest)
    for i in range(len(rest)):
        total += sums[i]
    # A row of nothing but -inf gives NaN, as a log-softmax does.
    return highest + np.log(total) if highest > LOWEST else np.nan


@jit
def centered_row(row: Any, lse: float, buffer: Any, maxima: Any, sums: Any) -> tuple[Any, float]:
    """Return a row and its log-sum-exp; if that is huge, both minus the greatest number of the row.

    In fp64 a log-sum-exp near -1e30 has no digits left for the logarithm of the sum.
    """
    if not HUGE <= abs(lse) < INF:
        return row, lse
    shift = row.max()
    for c in range(len(row)):
        buffer[c] = row[c] - shift
    return buffer, logsumexp_row(buffer, maxima, sums)


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


def as_steps(tensor: Tensor) -> Steps:
    """Return `[T, N, C, K]` of any dtype and strides in its own memory."""
    return Steps(*memory_of(tensor))


def fill_nan(result: Tensor, failed: Tensor, steps: Tensor | None = None) -> None:
    """Write NaN for the failed sequences `[N]` into their first steps, or all, of `[T, N, ...]`."""
    for n in failed.nonzero().flatten().tolist() if result.numel() else ():
        result[: None if steps is None else int(steps[n]), n] = torch.nan


@functools.lru_cache(maxsize=16)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "partita")


def run_over_batch(kernel: Callable[..., Any], batch: Any, *args: Any) -> None:
    """Run `kernel(chains, batch, *args)` for all chains, as `run_over_sequences` does."""
    run_over_sequences(kernel, batch.lengths, len(batch.sources), batch, *args)


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
