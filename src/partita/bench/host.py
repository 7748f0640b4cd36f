"""`partita bench host`: what a call costs the host, beside PyTorch and the installed peers.

The work of the device is tiny, so the time of a loop of calls is that of the host: of Python, of
autograd, of allocations and of launches.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from ..cli.arguments import device_named, require_writable, words
from ..cli.console import Progress, UsageError, first_line, print_table
from ..cli.fresh_process import run_module
from ..cli.info import no_gpu
from ..runtime.caches import register_cache
from ..testing.samples import Draw
from . import host_report, picture, providers
from .host_cases import CASES, OPS, PROVIDERS, HostCase, usual_case
from .host_report import FirstCall, Measurement
from .host_trial import OURS, Call, Trial
from .runner import DeviceLost, require_device

ALWAYS = ("torch", "partita")
PEERS = tuple(name for name in PROVIDERS if name not in ALWAYS)
ROUNDS, QUICK_ROUNDS = 12, 3
EMPTY, FILLED = "empty", "filled"


@dataclass(frozen=True)
class HostPlan:
    """The plan of a measurement of the host.

    Fields:
        device: the device of the inputs.
        ops: the ops that the user chose.
        cases: their cases, and those whose time is their unit, with the providers of each.
        cold: whether first calls of fresh processes are measured too.
        rounds: the number of timed rounds.
        csv, svg: the files that are written, or None.
    """

    device: torch.device
    ops: tuple[str, ...]
    cases: list[tuple[HostCase, list[str]]]
    cold: bool
    rounds: int
    csv: Path | None
    svg: Path | None

    @property
    def first_calls(self) -> list[tuple[str, str]]:
        """Return the ops and providers whose first calls are measured."""
        return [
            (op, name)
            for op in self.ops * self.cold
            for name in ALWAYS
            if name in usual_case(op).functions
        ]


@dataclass
class HostResults:
    """The measurements, and the problem that ended them early."""

    measured: list[Measurement] = field(default_factory=list)
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
    known = [peer.name for peer in providers.PEERS]
    peers = [] if args.only_ours else words(args.peers)
    for name in peers:
        if name not in known:
            raise UsageError(f"--peers: expected some of {', '.join(known)}, got {name!r}")
    if args.svg and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--svg: needs matplotlib (pip install matplotlib)")
    names = [*ALWAYS, *(name for name in PEERS if name in peers)]
    return HostPlan(
        device_named(args.device),
        ops,
        _choose(ops, names),
        args.cold,
        QUICK_ROUNDS if args.quick else ROUNDS,
        args.csv or (args.out and args.out / "host.csv"),
        args.svg or (args.out and args.out / "host.svg"),
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


def missing(plan: HostPlan) -> dict[str, str]:
    """Return the command that installs each peer of the plan that is missing."""
    named = {name for _, names in plan.cases for name in names}
    return {
        peer.name: message
        for peer in providers.PEERS
        if peer.name in named and (message := peer.missing())
    }


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
                seconds[state] = run_module("bench.first_call", arguments, environment)["first"]
        except (RuntimeError, ValueError, OSError) as error:
            return FirstCall(op, provider, None, None, f"refuses: {str(error)[:120]}")
    return FirstCall(op, provider, seconds[EMPTY], seconds.get(FILLED), "")


def _counted(results: HostResults, trials: Sequence[Trial]) -> Iterator[str]:
    """Count the device work of each trial, after all times: a profiler slows later launches."""
    for index, trial in enumerate(trials):
        if trial.counted is None:
            continue
        yield f"kernels of {trial.case.op}: {trial.provider}"
        found = results.measured[index]
        try:
            if work := device_work(trial.counted, trial.device):
                kernels, device_us = work
                results.measured[index] = replace(found, kernels=kernels, device_us=device_us)
        except Exception as error:
            require_device(trial.device, error)
            note = f"not profiled: {first_line(error)[:120]}"
            results.measured[index] = replace(found, note=note)


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
            results.measured = [trial.measurement for trial in trials]
            for text in _counted(results, trials if profiled else ()):
                progress.say(text)
                progress.advance()
            for op, name in plan.first_calls:
                progress.say(f"first call of {op}: {name}")
                results.first_calls.append(first_call(op, name, plan.device))
                progress.advance()
    except KeyboardInterrupt:
        results.problem, results.code = "interrupted", 130
    except DeviceLost as error:
        results.problem, results.code = f"the GPU no longer answers after {error}", 1
    else:
        results.code = int(bool(failures(results)))
    if not results.measured:
        results.measured = [trial.measurement for trial in trials if trial.ahead or trial.note]
    return results


def failures(results: HostResults) -> list[str]:
    """Return what Partita refused or computed wrongly."""
    rows = [row for row in results.measured if row.provider == OURS and row.host is None]
    calls = [row for row in results.first_calls if row.provider == OURS and row.empty is None]
    return [
        *(f"{row.name}: {row.provider} {row.note}" for row in rows),
        *(f"first call of {row.op}: {row.provider} {row.note}" for row in calls),
    ]


def main(args: argparse.Namespace) -> int:
    """Measure, print and write, and return the exit code."""
    try:
        plan = make_plan(args)
        for path in filter(None, (plan.csv, plan.svg)):
            require_writable(path)
    except UsageError as error:
        print(f"partita bench: {error}", file=sys.stderr)
        return 2
    if plan.device.type == "cuda":
        torch.cuda.set_device(plan.device)
    else:
        reason = f"{no_gpu()} " if not torch.cuda.is_available() else ""
        print(f"{reason}On the CPU a call includes its work, and there are no kernels to count.")
    absent = missing(plan)
    for message in absent.values():
        print(message)
    results = measure(plan, list(absent))
    if results.problem:
        print(f"partita bench: {results.problem}", file=sys.stderr)
    for table in host_report.tables(results.measured, results.first_calls):
        print_table(*table)
    name = host_report.machine_name(plan.device)
    print(f"\n{name}")
    if plan.csv:
        host_report.write_csv(plan.csv, results.measured, results.first_calls, name)
        print(f"wrote {plan.csv}")
    if plan.svg:
        measured = results.measured
        picture.draw_where_possible(plan.svg, lambda path: host_report.draw(path, measured, name))
    for text in failures(results):
        print(f"partita bench: {text}", file=sys.stderr)
    return results.code
