"""`partita bench host`: what a call costs the host, beside PyTorch and the installed peers.

The work of the device is tiny, so the time of a loop of calls is that of the host: of Python, of
autograd, of allocations and of launches.

The host of a shared machine is faster at one moment than at another. So the trials take turns, a
round each, and what slows the host for a while slows all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cli.console import Progress, Table, UsageError, device_named, first_line, words
from ..cli.fresh_process import run_fresh
from ..cli.info import cpu, no_gpu
from ..ops.linear_heads.api import linear_cross_entropy
from . import chain, ctc, heads, linear_chain, picture, providers, rows
from .case import Attempt, Buffers, Case, Function, Provider
from .measure import time_calls, wait
from .report import Files, Record, files_of
from .runner import finish, judge, require_device

OURS = "partita"
ALWAYS = ("torch", "partita")
PEERS = ("liger", "quack", "koi", "seqdist")
ROUNDS, QUICK_ROUNDS = 12, 3
FIRST_CALL = "first call"
FIRST_CALL_COLUMNS = (
    "empty_cache_s",
    "filled_cache_s",
)  # seconds, by the state of the cache of kernels
LABEL = 14  # letters of a name in the picture, before it gets a second line
# All peers are in one picture here, so their colours differ.
COLOURS = {**picture.COLOURS, "koi": "#64b5f6", "seqdist": "#81c784"}

# The calls of a round. A call with a new shape needs inputs of its own.
NEW_SHAPE_CALLS, WARM_UP_CALLS, FIRST_CALLS_OF_ROUND = 10, 20, 3

SAME, ON_DEVICE, NEW_SHAPES = "", "lengths on the device", "a new shape at every call"
Call = Callable[[], object]


# Those queued one after another, and those that are waited for. On a CPU calls do the work.
CALLS = {"cpu": (10, 10), "cuda": (50, 20)}


@dataclass(frozen=True)
class HostCase:
    """A case of the benchmark on tiny inputs, and the backward pass of the sum of its result."""

    op: str
    case: Case
    providers: tuple[str, ...]
    variant: str = SAME  # how the case differs from other cases of the op
    functions: Mapping[str, Function] = field(default_factory=dict)  # instead of the providers'

    @property
    def unit(self) -> tuple[str, str, str]:
        """Return op, provider and variant of the unit of this time: of PyTorch, or of a row."""
        op = self.op if "torch" in self.providers else "cross_entropy"
        return op, "torch", self.variant if self.variant == NEW_SHAPES else SAME

    @property
    def name(self) -> str:
        return f"{self.op}, {self.variant}" if self.variant else self.op

    def inputs(self, buffers: Buffers, number: int = 0) -> Any:
        """Return the inputs of a shape by its number, 0 for the usual one."""
        case: Any = self.case
        if number and isinstance(case, ctc.CTCCase):
            # Steps, labels and sequences count up like the digits of a number, so shapes differ.
            T, S, N = 30 + number % 40, 4 + number // 40 % 8, 2 + number // 320
            case = replace(case, steps=T, sequences=N, shortest=S - 3, longest=S)
        elif number:
            case = replace(case, rows=case.rows + number)
        inputs = case.inputs(buffers)
        if self.variant == ON_DEVICE:
            return inputs._make(each.to(buffers.device) for each in inputs)
        return inputs

    def step(self, attempt: Attempt) -> Callable[[], Tensor]:
        """Return what runs forward, and backward where the result has a gradient.

        Gradients are added to those of the step before, as in a loop that accumulates them.
        """
        function, inputs, provider = attempt
        learned, others = self.case.learned, inputs[self.case.learned : self.case.arguments]
        arguments = [*(x.detach().requires_grad_() for x in inputs[:learned]), *others]

        def run() -> Tensor:
            logits = arguments[0].clone() if provider.overwrites else arguments[0]
            result = function(logits, *arguments[1:])
            result = result[0] if isinstance(result, tuple) else result
            if result.requires_grad:
                (result.sum() if result.ndim else result).backward()
            return result

        return run

    def served_by(self, name: str) -> tuple[Function, Provider]:
        everyone = (*providers.OURS, *providers.PEERS)
        provider = next(each for each in everyone if each.name == name)
        return self.functions.get(name) or provider.ops[self.case.op](), provider


def _torch_logprob(logits: Tensor, target: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(1, target[:, None])


def _torch_ctc_loss(logits: Tensor, targets: Tensor, steps: Tensor, lengths: Tensor) -> Tensor:
    return F.ctc_loss(logits.log_softmax(-1), targets, steps, lengths)


_ROWS, _SEQUENCES = (torch.float32, 8, 1000), (torch.float32, 50, 4)
_CROSS_ENTROPY = HostCase(
    "cross_entropy", rows.CrossEntropy("cross_entropy", *_ROWS), (*ALWAYS, "quack", "liger")
)
_CTC = HostCase(
    "ctc_loss",
    ctc.Loss("ctc", *_SEQUENCES, 20, 10, 10),
    (*ALWAYS, "seqdist"),
    functions={"torch": _torch_ctc_loss},
)
_LIBRARIES = ("partita", "koi", "seqdist")
CASES = (
    HostCase("softmax", rows.Softmax("softmax", *_ROWS), (*ALWAYS, "liger", "quack")),
    _CROSS_ENTROPY,
    replace(_CROSS_ENTROPY, variant=NEW_SHAPES),
    HostCase(
        "token_stats",
        rows.TokenStats("token_stats", *_ROWS),
        ALWAYS,
        functions={"torch": _torch_logprob},
    ),
    HostCase(
        "linear_cross_entropy",
        heads.LinearCrossEntropy("linear_cross_entropy", torch.float32, 64, 64, 1000),
        ("torch", "liger", "partita"),
        functions={"partita": linear_cross_entropy},
    ),
    _CTC,
    replace(_CTC, variant=ON_DEVICE),
    replace(_CTC, variant=NEW_SHAPES),
    HostCase("ctc_align", ctc.Align("ctc_align", *_SEQUENCES, 20, 10, 10), ("partita",)),
    HostCase("logz", chain.LogZ("chain", *_SEQUENCES, 64, chain.kmers), _LIBRARIES),
    HostCase("viterbi", chain.Viterbi("viterbi", *_SEQUENCES, 64, chain.kmers), _LIBRARIES),
    HostCase("linear_chain", linear_chain.LogZ("linear_chain", *_SEQUENCES, 10), ("partita",)),
    HostCase("ctc_crf_loss", ctc.Crf("ctc_crf", *_SEQUENCES, 5, 10, 10, 3), ("partita", "koi")),
)
OPS = tuple(dict.fromkeys(case.op for case in CASES))


def usual_case(op: str) -> HostCase:
    return next(case for case in CASES if case.op == op and not case.variant)


@dataclass
class Trial:
    """A case that a provider serves, and what was measured of it."""

    case: HostCase
    provider: str
    buffers: Buffers
    timed: Call | None = None  # the call that is timed; None once the provider has refused
    calls: tuple[int, int] = CALLS["cpu"]
    ahead: list[float] = field(default_factory=list)  # milliseconds of a call in each round
    waited_for: list[float] = field(default_factory=list)  # and of waiting for the device too
    kernels: int | None = None  # kernels, copies and fills on the device; None where not counted
    device_us: float | None = None  # the microseconds that these take
    note: str = ""  # why the case is not timed

    def prepare(self, rounds: int) -> None:
        """Draw the inputs of all rounds, warm up, and check our own results."""
        case, buffers = self.case, self.buffers
        try:
            function, provider = case.served_by(self.provider)
            attempt = Attempt(function, case.inputs(buffers), provider)
            if reason := provider.refusal(case.case.op, attempt.inputs):
                self.note = f"refuses: {reason}"
                return
            self.timed, self.calls = case.step(attempt), CALLS[buffers.device.type]
            if case.variant == NEW_SHAPES:
                self.calls = (NEW_SHAPE_CALLS, NEW_SHAPE_CALLS)
                a_round = sum(self.calls) + 2 * FIRST_CALLS_OF_ROUND
                numbers = range(1, 1 + WARM_UP_CALLS + rounds * a_round)
                shapes = [attempt._replace(inputs=case.inputs(buffers, n)) for n in numbers]
                steps = iter([case.step(each) for each in shapes])
                self.timed = lambda: next(steps)()
            for _ in range(WARM_UP_CALLS):
                self.timed()
            if self.provider == OURS:
                self.note = judge(case.case, attempt, case.case.standard(attempt.inputs))[1]
                self.timed = None if self.note else self.timed
        except Exception as error:
            self._refuse(error)

    def time_round(self) -> None:
        """Time a round of calls, unless the provider has refused."""
        if (timed := self.timed) is None:
            return
        device, (ahead, waited) = self.buffers.device, self.calls

        def waited_for() -> None:
            timed()
            torch.cuda.synchronize(device)

        try:
            _warm_caches(timed)
            self.ahead.append(time_calls(timed, ahead, device))
            if device.type == "cuda":  # on a CPU nothing is left to wait for
                _warm_caches(waited_for)
                self.waited_for.append(time_calls(waited_for, waited, device))
        except Exception as error:
            self._refuse(error)

    def count(self) -> None:
        """Count the device work of a call, after all times: a profiler slows later launches."""
        if self.timed is None or self.case.variant == NEW_SHAPES:
            return
        try:
            if work := device_work(self.timed, self.buffers.device):
                self.kernels, self.device_us = work
        except Exception as error:
            require_device(self.buffers.device, error)
            self.note = f"not profiled: {first_line(error)[:120]}"

    def _refuse(self, error: Exception) -> None:
        require_device(self.buffers.device, error)
        self.timed, self.note = None, f"refuses: {first_line(error)[:120]}"
        self.ahead.clear()
        self.waited_for.clear()


def _warm_caches(call: Call) -> None:
    """Bring code and data of a call back into the caches, after the turns of others."""
    for _ in range(FIRST_CALLS_OF_ROUND):
        call()


def device_work(call: Call, device: torch.device) -> tuple[int, float] | None:
    """Return the number of kernels, copies and fills of a call, and their microseconds.

    Returns None where the profiler sees nothing of the GPU.
    """
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize(device)
    events = profiler.events() or []
    times = [event.device_time for event in events if event.device_type.name == "CUDA"]
    return (len(times), float(sum(times))) if times else None


def seconds(op: str, provider: str, device_name: str) -> float:
    """Return the seconds of a first forward and backward, waited for.

    The inputs are made before, so the context of the GPU is not counted.
    """
    case, device = usual_case(op), device_named(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    function, served_by = case.served_by(provider)
    step = case.step(Attempt(function, case.inputs(Buffers(device)), served_by))

    def waited_for() -> None:
        step()
        wait(device)

    return time_calls(waited_for, 1, device) / 1e3


def first_call(op: str, provider: str, device: torch.device) -> Record:
    """Measure the first call in fresh processes: the cache of kernels is empty, and then filled.

    PyTorch has no such cache, so it gets one process. A process before these, with a cache of its
    own, leaves the bytecode of all modules, which an installation compiles.
    """
    record: Record = {"op": op, "variant": FIRST_CALL, "provider": provider}
    columns = FIRST_CALL_COLUMNS if provider == OURS else FIRST_CALL_COLUMNS[:1]
    with tempfile.TemporaryDirectory(prefix="partita-") as cache:
        try:
            for folder, column in (("before", ""), *(("kernels", column) for column in columns)):
                variables = "TRITON_CACHE_DIR", "NUMBA_CACHE_DIR"
                environment = dict.fromkeys(variables, f"{cache}/{folder}")
                first = run_fresh(seconds, op, provider, str(device), environment=environment)
                record |= {column: first} if column else {}
        except (RuntimeError, OSError) as error:
            return record | {columns[0]: None, "note": f"refuses: {str(error)[:120]}"}
    return record


@dataclass(frozen=True)
class HostPlan:
    device: torch.device
    trials: list[Trial]  # of the user's ops, and those whose time is the unit of others
    absent: list[str]  # a message for each provider that is not installed
    first_calls: list[tuple[str, str]]  # ops and providers
    rounds: int
    files: Files


def make_plan(args: argparse.Namespace) -> HostPlan:
    """Return the plan of the arguments of `partita bench`, or raise UsageError."""
    ops = tuple(dict.fromkeys(args.ops[1:])) or OPS
    for op in ops:
        if op not in OPS:
            raise UsageError(f"host: expected some of {', '.join(OPS)}, got {op!r}")
    for option in ("dtype", "columns", "elements"):
        if getattr(args, option):
            raise UsageError(f"--{option}: host has inputs of its own, of one size and fp32")
    peers = [each.name for each in providers.choose([] if args.only_ours else words(args.peers))]
    names = [*ALWAYS, *(name for name in PEERS if name in peers)]
    units = {case.unit for case in CASES if case.op in ops}
    pairs = [
        (case, name)
        for case in CASES
        for name in case.providers
        if (name in names and case.op in ops) or (case.op, name, case.variant) in units
    ]
    named = {name for _, name in pairs}
    absent = providers.missing(peer for peer in providers.PEERS if peer.name in named)
    buffers = Buffers(device_named(args.device))
    first_calls = [
        (op, name) for op in ops * args.cold for name in ALWAYS if name in usual_case(op).providers
    ]
    return HostPlan(
        buffers.device,
        [Trial(case, name, buffers) for case, name in pairs if name not in absent],
        list(absent.values()),
        first_calls,
        QUICK_ROUNDS if args.quick else ROUNDS,
        files_of(args, "host"),
    )


def measured(plan: HostPlan, progress: Progress, first_calls: list[Record]) -> Iterator[None]:
    """Measure all trials, and then the first calls; each step ends in a yield."""
    for trial in plan.trials:
        progress.say(f"{trial.case.name}: {trial.provider}")
        trial.prepare(plan.rounds)
        yield
    for number in range(1, plan.rounds + 1):
        progress.say(f"round {number}")
        for trial in plan.trials:
            trial.time_round()
            yield
    for trial in plan.trials if plan.device.type == "cuda" else ():
        progress.say(f"kernels of {trial.case.op}: {trial.provider}")
        trial.count()
        yield
    for op, name in plan.first_calls:
        progress.say(f"first call of {op}: {name}")
        first_calls.append(first_call(op, name, plan.device))
        yield


def records_of(trials: Sequence[Trial]) -> list[Record]:
    """Return the lines of the table and of the CSV, with least times.

    Other programs of the machine only add to a time. A ratio is to the time of the case's unit.
    """
    hosts = {(x.case.op, x.provider, x.case.variant): min(x.ahead) for x in trials if x.ahead}
    records = []
    for row in trials:
        record: Record = {"op": row.case.op, "variant": row.case.variant, "provider": row.provider}
        for name, times in (("host", row.ahead), ("waited", row.waited_for)):
            record[f"{name}_us"] = 1e3 * min(times) if times else None
            record[f"{name}_median_us"] = 1e3 * statistics.median(times) if times else None
        unit = hosts.get(row.case.unit)
        record |= {
            "ratio": min(row.ahead) / unit if row.ahead and unit else None,
            "unit": f"torch {row.case.unit[0]}",
            "kernels": row.kernels,
            "device_us": row.device_us,
            "note": row.note,
        }
        if row.ahead or row.note:
            records.append(record)
    return records


def failures(records: Sequence[Record]) -> list[str]:
    """Return what Partita refused or computed wrongly."""
    return [
        f"{', '.join(filter(None, (row['op'], row['variant'])))}: {OURS} {row['note']}"
        for row in records
        if row["provider"] == OURS and not (row.get("host_us") or row.get(FIRST_CALL_COLUMNS[0]))
    ]


def tables(records: Sequence[Record]) -> Iterator[Table]:
    """Yield a table of times for each op, and that of first calls where there are some."""

    def cells(row: Record, formats: Mapping[str, str]) -> list[str]:
        found = [(row.get(name), form) for name, form in formats.items()]
        return ["" if value is None else f"{value:{form}}" for value, form in found]

    header = ["case", "provider", "host", "waited for", "ratio", "kernels", "device", ""]
    formats = {"host_us": ".0f", "waited_us": ".0f", "ratio": ".2f"}
    formats |= {"kernels": "d", "device_us": ".0f", "note": ""}
    calls = [row for row in records if row["variant"] != FIRST_CALL]
    for op in dict.fromkeys(row["op"] for row in calls):
        own = [row for row in calls if row["op"] == op]
        lines = [
            [row["variant"] or "the usual one", row["provider"], *cells(row, formats)]
            for row in own
        ]
        title = f"{op}: forward + backward of a tiny input, us; ratio to {own[0]['unit']}"
        yield Table(title, header, lines, left=2)
    if first_calls := [row for row in records if row["variant"] == FIRST_CALL]:
        formats = {**dict.fromkeys(FIRST_CALL_COLUMNS, ".2f"), "note": ""}
        lines = [[row["op"], row["provider"], *cells(row, formats)] for row in first_calls]
        header = ["op", "provider", "empty cache, s", "filled cache, s", ""]
        yield Table("The first call of a process", header, lines, left=2)


def _group(op: str, variant: str) -> str:
    """Return the label below a group of bars, in short lines."""
    name = op.replace("_", "_\n", 1) if len(op) > LABEL else op
    for word in ("at", "on"):
        variant = variant.replace(f" {word} ", f"\n{word} ")
    return "\n".join(filter(None, (name, variant)))


def render(records: Sequence[Mapping[str, Any]], machine: str, format: str) -> bytes:
    """Return the picture of records, also of those of a CSV, as a file of this format."""
    timed = [row for row in records if row.get("host_us")]
    groups = list(dict.fromkeys(_group(row["op"], row["variant"]) for row in timed))
    values: dict[str, dict[int, float]] = {}
    for row in timed:
        group = groups.index(_group(row["op"], row["variant"]))
        values.setdefault(row["provider"], {})[group] = float(row["host_us"])

    def draw(axes: Any) -> None:
        title, label = f"What a call costs the host, {machine}", "host, forward + backward, µs"
        picture.grouped_bars(axes, groups, values, title, label, colours=COLOURS)
        times = [float(row["host_us"]) for row in timed]
        axes.set_ylim(min(times) / 3, 4 * max(times))  # leaves room for the legend

    return picture.render_subplots([draw], picture.bars_width(len(groups), len(timed)), format)


def main(args: argparse.Namespace) -> int:
    """Measure, print and write, and return the exit code."""
    plan = make_plan(args)
    on_gpu = plan.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(plan.device)
    else:
        reason = f"{no_gpu()} " if not torch.cuda.is_available() else ""
        print(f"{reason}On the CPU a call includes its work, and there are no kernels to count.")
    for message in plan.absent:
        print(message)
    first_calls: list[Record] = []
    steps = len(plan.trials) * (1 + plan.rounds + on_gpu) + len(plan.first_calls)
    with Progress(steps) as progress:
        problem, code = finish(measured(plan, progress, first_calls), progress)
    if problem:
        print(f"partita bench: {problem}", file=sys.stderr)
    records = [*records_of(plan.trials), *first_calls]
    name = torch.cuda.get_device_name(plan.device) if on_gpu else cpu()
    has_times = any(row.get("host_us") for row in records)
    plan.files.publish(
        tables(records),
        name,
        [{"op": "machine", "provider": name}, *records],
        (lambda format: render(records, name, format)) if has_times else None,
        failures(records),
    )
    return code or int(bool(failures(records)))
