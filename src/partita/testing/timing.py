"""The time of a function, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

import torch

from .compare import floating, forward, leaves


class Timing(NamedTuple):
    """Times of one function, one number a repeat, in milliseconds.

    Fields:
        forward, backward: the times of each pass.
        total: the times of both passes.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    total: tuple[float, ...]


def time_forward_backward(
    function: Callable[..., Any], *inputs: Any, repeats: int = 20, warmup: int = 3
) -> Timing:
    """Time both passes of a function, by events on a GPU and by the clock on the CPU.

    Args:
        function: maps `inputs` to a tensor or a tuple of tensors, and is differentiable in all
            floating inputs.
        inputs: tensors and other arguments, which are not changed.
        repeats: the number of timed runs.
        warmup: the number of runs before them.

    Returns:
        `Timing(forward, backward, total)`, `repeats` numbers each, in milliseconds.

    Raises:
        ValueError: no floating input, or no repeats.

    Example:
        >>> import partita
        >>> from partita.testing import sample_labels, time_forward_backward
        >>> len(time_forward_backward(partita.cross_entropy, *sample_labels(), repeats=5).total)
        5
    """
    variables = floating(args := leaves(inputs))
    if not variables:
        raise ValueError("inputs: expected a floating tensor among them, got none")
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    device = variables[0].device
    marks: list[list[Any]] = []
    for _ in range(warmup + repeats):
        start = mark(device)
        results = forward(function, args)
        upstream = [torch.ones_like(r) for r in results]
        middle = mark(device)
        torch.autograd.grad(results, variables, upstream)
        marks.append([start, middle, mark(device)])
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    times = [(between(a, b), between(b, c), between(a, c)) for a, b, c in marks[warmup:]]
    return Timing(*map(tuple, zip(*times, strict=True)))


def mark(device: torch.device) -> Any:
    """Return a moment of the device's current stream, or of the clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def between(start: Any, end: Any) -> float:
    """Return the milliseconds between two moments that the device has passed."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def report(timing: Timing, file: TextIO | None = None) -> None:
    """Print forward, backward and total time as mean (least-greatest) in milliseconds.

    Args:
        timing: from `time_forward_backward`.
        file: the stream; the standard output by default.

    Example:
        >>> from partita.testing import Timing, report
        >>> report(Timing((1.0, 2.0), (3.0, 3.0), (4.0, 5.0)))
        fwd: 1.50ms (1.00-2.00ms)
        bwd: 3.00ms (3.00-3.00ms)
        tot: 4.50ms (4.00-5.00ms)
    """
    for name, times in zip(("fwd", "bwd", "tot"), timing, strict=True):
        mean = sum(times) / len(times)
        print(f"{name}: {mean:.2f}ms ({min(times):.2f}-{max(times):.2f}ms)", file=file)
