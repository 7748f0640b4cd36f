"""Time, bandwidth and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime import private_names
from ..testing.timing import between, mark

WARM_UP = 3
SLOW_SECONDS, SLOW_REPETITIONS = 0.25, 3  # work that takes longer is repeated less often
REPETITIONS = 20
# The host queues work for some 60 ms, so that the device never waits for it.
HEAD_START_CYCLES = 120_000_000
REPLAY_BYTES = 2e9  # a graph this long hides the cost of its launch
# Tiny rows would need a million calls in a graph to move these bytes, whose replay was seen to
# crash.
MAX_CALLS = 256
# Inputs and outputs that rotate through this multiple of the L2 cache are not found in it.
CACHES = 4

Step = tuple[str, Callable[[], object]]


def nothing() -> None:
    pass


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Timing:
    """Milliseconds of repetitions."""

    mean: float
    median: float
    least: float
    greatest: float
    repetitions: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        middle = (statistics.fmean(samples), statistics.median(samples))
        return cls(*middle, min(samples), max(samples), len(samples))

    def each(self, calls: int) -> Timing:
        """Return the time of one call, where a repetition has this number of calls."""
        times = (self.mean, self.median, self.least, self.greatest)
        mean, median, least, greatest = (milliseconds / calls for milliseconds in times)
        return Timing(mean, median, least, greatest, self.repetitions)

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.least:.3f}–{self.greatest:.3f})"


@dataclass(frozen=True)
class Machine:
    """A device and its measured bandwidths."""

    device: torch.device
    name: str
    copy: float  # bytes a second of a copy, read plus written
    read: float  # bytes a second of reading alone

    def bandwidth(self, limit: str) -> float:
        return self.read if limit == "read" else self.copy


def time_steps(
    steps: Sequence[Step],
    device: torch.device,
    *,
    before: Callable[[], None] = nothing,
    repetitions: int = REPETITIONS,
) -> dict[str, Timing]:
    """Time steps that follow one another, and the `total` of several steps.

    `before` runs untimed before each repetition.
    """
    for _ in range(max(1, min(WARM_UP, repetitions // 3))):
        start = time.perf_counter()
        before()
        for _, step in steps:
            step()
        wait(device)
        if time.perf_counter() - start > SLOW_SECONDS:
            repetitions = min(repetitions, SLOW_REPETITIONS)
            break
    if device.type == "cuda":
        private_names.sleep(HEAD_START_CYCLES)
    marks = []
    for _ in range(repetitions):
        before()
        marks.append([mark(device)])
        for _, step in steps:
            step()
            marks[-1].append(mark(device))
    wait(device)
    result = {
        name: Timing.of([between(m[i], m[i + 1]) for m in marks])
        for i, (name, _) in enumerate(steps)
    }
    if len(steps) > 1:
        result["total"] = Timing.of([between(m[0], m[-1]) for m in marks])
    return result


def time_call(call: Callable[[], object], device: torch.device, repetitions: int) -> Timing:
    return time_steps([("call", call)], device, repetitions=repetitions)["call"]


def rotation(bytes_moved: int, device: torch.device) -> int:
    """Return the number of sets of inputs and outputs that do not fit the L2 cache together."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_CALLS, max(2, -(-CACHES * cache // bytes_moved)))


def time_replay(
    function: Callable[[Tensor], Tensor],
    inputs: Sequence[Tensor],
    device: torch.device,
    *,
    bytes_moved: int,
    repetitions: int = REPETITIONS,
) -> Timing:
    """Time one call inside a CUDA graph of many, over all inputs in turn.

    Plain calls are timed where there is no GPU. All results live until the last replay is over, so
    that no call writes to memory that the cache still has from another call.
    """
    if device.type != "cuda":
        timing = time_call(lambda: [function(x) for x in inputs], device, repetitions)
        return timing.each(len(inputs))
    inputs = inputs[:MAX_CALLS]
    rounds = max(1, int(min(MAX_CALLS, REPLAY_BYTES / bytes_moved) / len(inputs)))
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for x in inputs:  # compiles, loads and allocates before the capture
            function(x)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    results: list[Tensor] = []
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(rounds):
            results += [function(x) for x in inputs]
    try:
        return time_call(graph.replay, device, repetitions).each(rounds * len(inputs))
    finally:  # a replay that was interrupted still writes to the results
        torch.cuda.synchronize(device)
        results.clear()


def time_do_bench(call: Callable[[], object]) -> Timing:
    """Time a call on the GPU by Triton's `do_bench`."""
    from triton.testing import do_bench

    return Timing.of(do_bench(call, return_mode="all"))


def time_calls(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the milliseconds of one call on the host, of several that follow one another."""
    wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e3 * (time.perf_counter() - start) / calls


def peak_extra_memory(
    steps: Sequence[Step], device: torch.device, *, before: Callable[[], None] = nothing
) -> int | None:
    """Return the peak bytes that the steps allocate beyond the present; None without a GPU."""
    if device.type != "cuda":
        return None
    before()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    present = torch.cuda.memory_allocated(device)
    for _, step in steps:
        step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - present


def measure_machine(device: torch.device, elements: int, repetitions: int = REPETITIONS) -> Machine:
    """Measure the copy and read bandwidths with a tensor of `elements` fp32 numbers.

    PyTorch copies the tensor. A kernel that only reads, or a sum without Triton, reads it.
    """
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    size = source.nbytes

    def milliseconds(function: Callable[[Tensor], object]) -> float:
        return time_call(lambda: function(source), device, repetitions).median

    readers: list[Callable[[Tensor], Tensor]] = [torch.sum]
    if device.type == "cuda":
        from .read_kernel import read

        readers.append(read)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Machine(
        device,
        name,
        copy=2e3 * size / milliseconds(target.copy_),
        read=1e3 * size / min(map(milliseconds, readers)),
    )
