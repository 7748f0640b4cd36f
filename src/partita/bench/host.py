"""`partita bench host`: what a call costs the host, beside PyTorch and the installed peers.

The work of the device is tiny, so the time of a loop of calls is that of the host: of Python, of
autograd, of allocations and of launches.

The host of a shared machine is faster at one moment than at another. So the trials take turns, a
round each, and what slows the host for a while slows all of them.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cli.console import Progress, Table, UsageError, device_named, first_line, words
from ..cli.fresh_process import run_module
from ..cli.info import cpu, no_gpu
from ..runtime.backend import backend
from ..runtime.caches import register_cache
from ..testing.samples import Draw
from . import picture, providers
from .case import Function
from .host_cases import (
    CASES,
    NEW_SHAPES,
    OPS,
    PROVIDERS,
    HostCase,
    Inputs,
    Unit,
    step,
    usual_case,
)
from .measure import Timing, time_calls
from .report import Files, files_of, write_records
from .runner import DeviceLost, require_device

OURS = "partita"
ALWAYS = ("torch", "partita")
PEERS = tuple(name for name in PROVIDERS if name not in ALWAYS)
ROUNDS, QUICK_ROUNDS = 12, 3
EMPTY, FILLED = "empty", "filled"
FIRST_CALL = "first call"
LABEL = 14  # letters of a name in the picture, before it gets a second line
# All peers are in one picture here, so their colours differ.
COLOURS = {**picture.COLOURS, "koi": "#64b5f6", "seqdist": "#81c784"}
COLUMNS = (
    "op",
    "variant",
    "provider",
    "host_us",
    "host_median_us",
    "waited_us",
    "waited_median_us",
    "ratio",
    "unit",
    "kernels",
    "device_us",
    "empty_cache_s",
    "filled_cache_s",
    "note",
)


# The calls of a round. A call with a new shape needs inputs of its own.
NEW_SHAPE_CALLS, WARM_UP_CALLS, FIRST_CALLS_OF_ROUND = 10, 20, 3
BOUND = 1e-3  # of an error against the reference, over the greatest value or 1

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
                numbers = range(1, 1 + WARM_UP_CALLS + rounds * a_round)
                shapes = iter([case.inputs(self.draw, number) for number in numbers])
                self.timed = lambda: step(function, next(shapes))
            else:
                self.timed = lambda: step(function, inputs)
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
        if self.timed is None or self.case.variant == NEW_SHAPES:
            return
        try:
            if work := device_work(self.timed, self.device):
                self.kernels, self.device_us = work
        except Exception as error:
            require_device(self.device, error)
            self.note = f"not profiled: {first_line(error)[:120]}"

    def _refuse(self, error: Exception) -> None:
        require_device(self.device, error)
        self._give_up(f"refuses: {first_line(error)[:120]}")

    def _give_up(self, note: str) -> None:
        self.timed, self.note = None, note


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


@dataclass(frozen=True)
class FirstCall:
    """The first call of a fresh process, in seconds without the context of the GPU."""

    op: str
    provider: str
    empty: float | None  # with an empty Triton cache; None where the call failed
    filled: float | None  # with a filled one; None for a provider without a cache
    note: str  # why there is no time


@dataclass(frozen=True)
class HostPlan:
    """The plan of a measurement of the host."""

    device: torch.device
    ops: tuple[str, ...]  # those that the user chose
    cases: list[tuple[HostCase, list[str]]]  # theirs and their units, with the providers of each
    cold: bool  # whether first calls of fresh processes are measured too
    rounds: int
    files: Files

    @property
    def first_calls(self) -> list[tuple[str, str]]:
        return [
            (op, name)
            for op in self.ops * self.cold
            for name in ALWAYS
            if name in usual_case(op).functions
        ]


@dataclass
class HostResults:
    """The measurements, and the problem that ended them early."""

    measured: list[Trial] = field(default_factory=list)
    first_calls: list[FirstCall] = field(default_factory=list)
    problem: str = ""
    code: int = 0


def make_plan(args: argparse.Namespace) -> HostPlan:
    """Return the plan of the arguments of `partita bench`, whose first op is `host`.

    Raises:
        UsageError: an argument cannot be used.
    """
    ops = tuple(dict.fromkeys(args.ops[1:])) or OPS
    for op in ops:
        if op not in OPS:
            raise UsageError(f"host: expected some of {', '.join(OPS)}, got {op!r}")
    for option in ("dtype", "columns", "elements"):
        if getattr(args, option):
            raise UsageError(f"--{option}: host has inputs of its own, of one size and fp32")
    peers = [each.name for each in providers.choose([] if args.only_ours else words(args.peers))]
    names = [*ALWAYS, *(name for name in PEERS if name in peers)]
    return HostPlan(
        device_named(args.device),
        ops,
        _choose(ops, names),
        args.cold,
        QUICK_ROUNDS if args.quick else ROUNDS,
        files_of(args, "host"),
    )


def _choose(ops: Sequence[str], names: Sequence[str]) -> list[tuple[HostCase, list[str]]]:
    """Return the cases of these ops with their providers, and the units of their times."""
    units = {case.unit for case in CASES if case.op in ops}
    chosen = []
    for case in CASES:
        own = [
            name
            for name in case.functions
            if (name in names and case.op in ops) or (case.op, name, case.variant) in units
        ]
        if own:
            chosen.append((case, own))
    return chosen


@functools.lru_cache(maxsize=1)
def _bytecode() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with the bytecode of Partita and Triton, which an installation compiles.

    Otherwise the first call of a package that runs from its sources would be longer.
    """
    folder = tempfile.TemporaryDirectory(prefix="partita-")
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder.name, "PYTHONDONTWRITEBYTECODE": ""}
    for name in ("partita", "triton"):
        if found := importlib.util.find_spec(name):
            command = [sys.executable, "-m", "compileall", "-q", "-j", "0"]
            command += found.submodule_search_locations or []
            # Files that Python cannot read are left to their import.
            subprocess.run(command, env=environment, capture_output=True, check=False)
    return folder


register_cache("bench.host.bytecode", _bytecode.cache_clear)


def first_call(op: str, provider: str, device: torch.device) -> FirstCall:
    """Measure the first call in fresh processes: Triton's cache is empty, and then it is filled.

    The cache is a temporary folder. PyTorch has none, so it gets one process.
    """
    seconds: dict[str, float] = {}
    states = (EMPTY, FILLED) if provider == OURS else (EMPTY,)
    with tempfile.TemporaryDirectory(prefix="partita-") as cache:
        environment = {
            "TRITON_CACHE_DIR": f"{cache}/triton",
            "PYTHONPYCACHEPREFIX": _bytecode().name,
            "PYTHONDONTWRITEBYTECODE": "",
        }
        try:
            for state in states:
                arguments = [op, provider, str(device)]
                seconds[state] = run_module("bench.host_cases", arguments, environment)["first"]
        except (RuntimeError, ValueError, OSError) as error:
            return FirstCall(op, provider, None, None, f"refuses: {str(error)[:120]}")
    return FirstCall(op, provider, seconds[EMPTY], seconds.get(FILLED), "")


def measure(plan: HostPlan, absent: Sequence[str] = ()) -> HostResults:
    """Measure everything with a progress bar; an interrupted run returns what it has."""
    results, draw = HostResults(), Draw(device=plan.device)
    pairs = [(case, name) for case, names in plan.cases for name in names if name not in absent]
    trials = [Trial(case, name, draw) for case, name in pairs]
    profiled = plan.device.type == "cuda"
    total = len(trials) * (1 + plan.rounds + profiled) + len(plan.first_calls)
    try:
        with Progress(total) as progress:
            for trial in trials:
                progress.say(f"{trial.case.name}: {trial.provider}")
                trial.prepare(plan.rounds)
                progress.advance()
            for number in range(1, plan.rounds + 1):
                progress.say(f"round {number}")
                for trial in trials:
                    trial.time_round()
                    progress.advance()
            for trial in trials if profiled else ():
                progress.say(f"kernels of {trial.case.op}: {trial.provider}")
                trial.count()
                progress.advance()
            for op, name in plan.first_calls:
                progress.say(f"first call of {op}: {name}")
                results.first_calls.append(first_call(op, name, plan.device))
                progress.advance()
    except KeyboardInterrupt:
        results.problem, results.code = "interrupted", 130
    except DeviceLost as error:
        results.problem, results.code = f"the GPU no longer answers after {error}", 1
    results.measured = [trial for trial in trials if trial.ahead or trial.note]
    results.code = results.code or int(bool(failures(results)))
    return results


def failures(results: HostResults) -> list[str]:
    """Return what Partita refused or computed wrongly."""
    rows = [row for row in results.measured if row.provider == OURS and row.host is None]
    calls = [row for row in results.first_calls if row.provider == OURS and row.empty is None]
    return [
        *(f"{row.case.name}: {row.provider} {row.note}" for row in rows),
        *(f"first call of {row.op}: {row.provider} {row.note}" for row in calls),
    ]


def _us(timing: Timing | None) -> str:
    """Return the least microseconds, as other programs of the machine only add to a time."""
    return "" if timing is None else f"{1e3 * timing.least:.0f}"


def ratio(row: Trial, rows: Sequence[Trial]) -> float | None:
    """Return the time of the host in units of another measurement, or None without both."""
    unit = next((x.host for x in rows if x.measured == row.case.unit and x.host), None)
    return None if unit is None or row.host is None else row.host.least / unit.least


def _unit_name(unit: Unit) -> str:
    return f"{unit.provider} {unit.op}"


def tables(rows: Sequence[Trial], first_calls: Sequence[FirstCall]) -> Iterator[Table]:
    """Yield a table of times for each op, and that of first calls where there are some."""
    header = ["case", "provider", "host", "waited for", "ratio", "kernels", "device", ""]
    for op in dict.fromkeys(row.case.op for row in rows):
        own = [row for row in rows if row.case.op == op]
        unit = _unit_name(own[0].case.unit)
        title = f"{op}: forward + backward of a tiny input, us; ratio to {unit}"
        yield Table(title, header, [_cells(row, rows) for row in own], left=2)
    if first_calls:
        cells = [
            [call.op, call.provider, _seconds(call.empty), _seconds(call.filled), call.note]
            for call in first_calls
        ]
        header = ["op", "provider", "empty cache, s", "filled cache, s", ""]
        yield Table("The first call of a process", header, cells, left=2)


def _cells(row: Trial, rows: Sequence[Trial]) -> list[str]:
    factor = ratio(row, rows)
    return [
        row.case.variant or "the usual one",
        row.provider,
        _us(row.host),
        _us(row.waited),
        "" if factor is None else f"{factor:.2f}",
        "" if row.kernels is None else str(row.kernels),
        "" if row.device_us is None else f"{row.device_us:.0f}",
        row.note,
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def write_csv(
    path: Path, rows: Sequence[Trial], first_calls: Sequence[FirstCall], machine: str
) -> None:
    records = [_record(row, ratio(row, rows)) for row in rows]
    for call in first_calls:
        times = {"empty_cache_s": call.empty, "filled_cache_s": call.filled}
        numbers = {name: f"{value:.4g}" for name, value in times.items() if value is not None}
        record = {"op": call.op, "variant": FIRST_CALL, "provider": call.provider}
        records.append({**record, **numbers, "note": call.note})
    write_records(path, COLUMNS, [{"op": "machine", "provider": machine}], records)


def _record(row: Trial, factor: float | None) -> dict[str, object]:
    record: dict[str, object] = {**row.measured._asdict(), "note": row.note}
    for name, timing in (("host", row.host), ("waited", row.waited)):
        if timing is not None:
            record[f"{name}_us"] = f"{1e3 * timing.least:.5g}"
            record[f"{name}_median_us"] = f"{1e3 * timing.median:.5g}"
    if factor is not None:
        record |= {"ratio": f"{factor:.3f}", "unit": _unit_name(row.case.unit)}
    if row.kernels is not None and row.device_us is not None:
        record |= {"kernels": row.kernels, "device_us": f"{row.device_us:.5g}"}
    return record


# The bars of the picture: the name of a group, a provider, and microseconds.
Bar = tuple[str, str, float]


def bars_of_csv(path: Path) -> tuple[str, list[Bar]]:
    """Return the name of the machine and the bars of a CSV that `write_csv` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        records = list(csv.DictReader(file))
    machine = next(record["provider"] for record in records if record["op"] == "machine")
    return machine, [
        (_group(record["op"], record["variant"]), record["provider"], float(record["host_us"]))
        for record in records
        if record["host_us"]
    ]


def bars_of(rows: Sequence[Trial]) -> list[Bar]:
    return [
        (_group(row.case.op, row.case.variant), row.provider, 1e3 * row.host.least)
        for row in rows
        if row.host
    ]


def _group(op: str, variant: str) -> str:
    """Return the label below a group of bars, in short lines."""
    name = op.replace("_", "_\n", 1) if len(op) > LABEL else op
    for word in ("at", "on"):
        variant = variant.replace(f" {word} ", f"\n{word} ")
    return "\n".join(filter(None, (name, variant)))


def render(bars: Sequence[Bar], machine: str, format: str) -> bytes:
    """Return the picture of some bars as a file of this format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    groups = list(dict.fromkeys(group for group, _, _ in bars))
    values: dict[str, dict[int, float]] = {}
    for group, provider, microseconds in bars:
        values.setdefault(provider, {})[groups.index(group)] = microseconds

    def draw(axes: Any) -> None:
        title, label = f"What a call costs the host, {machine}", "host, forward + backward, µs"
        options: dict[str, Any] = {"colours": COLOURS, "gaps": False, "upright": False}
        picture.grouped_bars(axes, groups, values, title, label, **options)
        times = [bar[2] for bar in bars]
        axes.set_ylim(min(times) / 3, 4 * max(times))  # leaves room for the legend

    return picture.render_subplots([draw], picture.bars_width(len(groups), len(bars)), format)


def main(args: argparse.Namespace) -> int:
    """Measure, print and write, and return the exit code."""
    try:
        plan = make_plan(args)
    except UsageError as error:
        print(f"partita bench: {error}", file=sys.stderr)
        return 2
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)
    else:
        reason = f"{no_gpu()} " if not torch.cuda.is_available() else ""
        print(f"{reason}On the CPU a call includes its work, and there are no kernels to count.")
    named = {name for _, names in plan.cases for name in names}
    absent = providers.missing(peer for peer in providers.PEERS if peer.name in named)
    for message in absent.values():
        print(message)
    results = measure(plan, list(absent))
    if results.problem:
        print(f"partita bench: {results.problem}", file=sys.stderr)
    found = results.measured, results.first_calls
    name = torch.cuda.get_device_name(plan.device) if plan.device.type == "cuda" else cpu()
    bars = bars_of(results.measured)
    plan.files.publish(
        tables(*found),
        name,
        lambda path: write_csv(path, *found, name),
        (lambda format: render(bars, name, format)) if bars else None,
        failures(results),
    )
    return results.code
