"""A case of `partita bench host` by one provider: its calls, and the times of its rounds.

The host of a shared machine is faster at one moment than at another. So the trials take turns, a
round each, and what slows the host for a while slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..cli.console import first_line
from ..runtime.backend import backend
from ..testing.samples import Draw
from .case import Function
from .host_cases import NEW_SHAPES, HostCase, Inputs, Unit, step
from .measure import Timing, time_calls
from .runner import require_device

# The calls of a round. A call with a new shape needs inputs of its own.
NEW_SHAPE_CALLS, WARM_UP_CALLS, FIRST_CALLS_OF_ROUND = 10, 20, 3
BOUND = 1e-3  # of an error against the reference, over the greatest value or 1
OURS = "partita"

Call = Callable[[], object]


class Calls(NamedTuple):
    """The calls of a round: queued one after another, and each waited for."""

    ahead: int
    waited: int


CALLS = (Calls(10, 10), Calls(50, 20))  # on a CPU, whose calls do the work, and on a GPU


@dataclass
class Trial:
    """A case that a provider serves, and what was measured of it."""

    case: HostCase
    provider: str
    draw: Draw
    timed: Call | None = None  # the call that is timed; None once the provider has refused
    counted: Call | None = None  # a call whose device work can be counted
    calls: Calls = CALLS[0]
    ahead: list[float] = field(default_factory=list)  # milliseconds of a call in each round
    waited_for: list[float] = field(default_factory=list)  # and of waiting for the device too
    kernels: int | None = None  # kernels, copies and fills on the device; None where not counted
    device_us: float | None = None  # the microseconds that these take
    note: str = ""  # why the case is not timed

    @property
    def device(self) -> torch.device:
        return torch.device(self.draw.device)

    @property
    def measured(self) -> Unit:
        """Return what was measured, as a unit of others."""
        return Unit(self.case.op, self.provider, self.case.variant)

    @property
    def host(self) -> Timing | None:
        """Return the time of a call that is not waited for; None where the provider refused."""
        return Timing.of(self.ahead) if self.timed and self.ahead else None

    @property
    def waited(self) -> Timing | None:
        """Return the time of a call and of waiting for the device; None on a CPU."""
        return Timing.of(self.waited_for) if self.timed and self.waited_for else None

    def prepare(self, rounds: int) -> None:
        """Draw the inputs of all rounds, warm up, and check our own results."""
        try:
            function, case = self.case.functions[self.provider](), self.case
            inputs, self.calls = case.inputs(self.draw, 0), CALLS[self.device.type == "cuda"]
            if case.variant == NEW_SHAPES:
                self.calls = Calls(NEW_SHAPE_CALLS, NEW_SHAPE_CALLS)
                a_round = sum(self.calls) + 2 * FIRST_CALLS_OF_ROUND
                shapes = self._new_shapes(WARM_UP_CALLS + rounds * a_round)
                self.timed = lambda: step(function, next(shapes))
            else:
                self.timed = self.counted = lambda: step(function, inputs)
            for _ in range(WARM_UP_CALLS):
                self.timed()
            if self.provider == OURS and (problem := disagreement(function, inputs)):
                self._give_up(f"wrong: {problem}")
        except Exception as error:
            self._refuse(error)

    def time_round(self) -> None:
        """Time a round of calls, unless the provider has refused."""
        if (timed := self.timed) is None:
            return
        device = self.device

        def waited_for() -> None:
            timed()
            torch.cuda.synchronize(device)

        try:
            _warm_caches(timed)
            self.ahead.append(time_calls(timed, self.calls.ahead, device))
            if device.type == "cuda":  # on a CPU nothing is left to wait for
                _warm_caches(waited_for)
                self.waited_for.append(time_calls(waited_for, self.calls.waited, device))
        except Exception as error:
            self._refuse(error)

    def count(self) -> None:
        """Count the device work of a call, after all times: a profiler slows later launches."""
        try:
            if self.counted and (work := device_work(self.counted, self.device)):
                self.kernels, self.device_us = work
        except Exception as error:
            require_device(self.device, error)
            self.note = f"not profiled: {first_line(error)[:120]}"

    def _new_shapes(self, number: int) -> Iterator[Inputs]:
        return iter([self.case.inputs(self.draw, 1 + i) for i in range(number)])

    def _refuse(self, error: Exception) -> None:
        require_device(self.device, error)
        self._give_up(f"refuses: {first_line(error)[:120]}")

    def _give_up(self, note: str) -> None:
        self.timed, self.counted, self.note = None, None, note


def _warm_caches(call: Call) -> None:
    """Bring code and data of a call back into the caches, after the turns of others."""
    for _ in range(FIRST_CALLS_OF_ROUND):
        call()


def device_work(call: Call, device: torch.device) -> tuple[int, float] | None:
    """Return the number of kernels, copies and fills of a call, and their microseconds.

    Returns None where there is no GPU, or where the profiler sees nothing of it.
    """
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize(device)
    events = profiler.events() or []
    times = [event.device_time for event in events if event.device_type.name == "CUDA"]
    return (len(times), float(sum(times))) if times else None


def _results(function: Function, inputs: Inputs) -> list[Tensor]:
    """Return the result and the gradients of the inputs that have one."""
    leaves = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    result = function(*inputs)
    grads = torch.autograd.grad(result, leaves) if result.requires_grad else ()
    return [result.detach(), *grads]


def disagreement(function: Function, inputs: Inputs) -> str:
    """Return how the results of warm calls differ from the reference; empty where they do not."""
    results = _results(function, inputs)
    with backend("reference"):
        expected = _results(function, inputs)
    for index, (got, truth) in enumerate(zip(results, expected, strict=True)):
        error = float((got - truth).abs().max() / truth.abs().max().clamp(min=1))
        if not error <= BOUND:
            return f"{'gradient' if index else 'result'} off by {error:.3g}, allowed {BOUND:g}"
    return ""
