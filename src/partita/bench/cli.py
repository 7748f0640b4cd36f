"""`partita bench`: the arguments and the course of the benchmark."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..cli.console import Progress, UsageError, device_named, dtypes, number, numbers, words
from ..cli.info import no_gpu
from ..runtime.backend import has_triton
from . import host, picture, report
from .case import Case, Provider, Settings
from .measure import REPETITIONS, Machine, measure_machine
from .providers import FAMILIES, PEERS, choose, missing
from .runner import Row, failed, finish, run, takers

OPS: dict[str, Callable[[Settings], Iterator[Case]]] = {
    op: cases for family in FAMILIES for op, cases in family.OPS.items()
}
HOST = "host"

DESCRIPTION = f"""\
Time Partita, PyTorch and other libraries on the first GPU, or a small case on the CPU.

The copy and read bandwidths of the machine are measured first. Each time is then given with its
share of them, counting the fewest bytes that the op must move. Results that are wrong against fp64
are reported and not timed.

{chr(10).join(family.__doc__ or "" for family in FAMILIES)}
`partita bench host` measures something else: what one call on tiny inputs costs the host, how many
kernels it launches, and, with --cold, the first call of a process. PyTorch is always beside it."""

EPILOG = """\
examples:
  partita bench softmax cross_entropy --out results     writes results/bench.csv and bench.svg
  partita bench softmax --quick --peers torch,quack     fewer sizes, two peers
  partita bench chain --peers torch,koi,seqdist --svg chain.svg    log Z, gradient, best path
  partita bench ctc --peers torch,seqdist,koi --dtype fp32 --out results
  partita bench linear_cross_entropy --peers torch,liger,cce,cce-exact --out results
  partita bench decode --peers pyctcdecode,flashlight-text --device cpu
  partita bench cross_entropy --peers '' --columns 32768,131072 --dtype bf16
  partita bench softmax --do-bench --svg softmax.svg    as Triton's tutorial measures it
  partita bench host --cold --out results               writes results/host.csv and host.svg
  partita bench host softmax ctc_loss --quick --peers '' two ops, three rounds

exit codes:
  0  measured          1  a result of Partita was wrong, an op failed, or the bench broke off
  2  wrong arguments   130  interrupted (what was measured is still written)"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    peers = ",".join(peer.name for peer in PEERS)
    elements = (
        "number of logits, 2**28 by default (2**20 on the CPU); a limit for chains, CTC and from"
        " hidden states"
    )
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "ops",
        nargs="*",
        metavar="op",
        help=f"some of {', '.join(OPS)}, all by default; or host, then some of"
        f" {', '.join(host.OPS)}",
    )
    parser.add_argument(
        "--peers",
        default=peers,
        metavar="NAMES",
        help=f"the peers to time: {peers} by default, '' for none",
    )
    parser.add_argument("--only-ours", action="store_true", help="the same as --peers ''")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument(
        "--dtype",
        type=dtypes,
        default=(),
        metavar="NAMES",
        help="fp32,bf16 by default, from hidden states bf16; also fp16, fp64",
    )
    parser.add_argument(
        "--columns",
        type=numbers,
        default=(),
        metavar="NUMBERS",
        help="widths instead of the op's own; states of chains, else classes",
    )
    parser.add_argument("--elements", type=number, metavar="NUMBER", help=elements)
    parser.add_argument(
        "--repetitions",
        type=number,
        default=REPETITIONS,
        metavar="NUMBER",
        help=f"of each measurement; {REPETITIONS} by default",
    )
    parser.add_argument(
        "--no-sweep",
        action="store_true",
        help="leave out the sweep of softmax over narrow rows, which the picture shows",
    )
    parser.add_argument(
        "--do-bench",
        action="store_true",
        help="of softmax, time the sweep alone: by triton.testing.do_bench, whose times include"
        " launching, over wider rows",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="of host, also time the first call of a process, with an empty and with a filled"
        " Triton cache; takes minutes",
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        metavar="NAME",
        help="cuda, cuda:1, cpu",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write DIR/bench.csv and DIR/bench.svg (host.csv, host.svg)",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every measurement")
    parser.add_argument(
        "--svg",
        type=Path,
        metavar="FILE",
        help="draw the sweep of softmax, and the times of other ops and of the host (needs"
        " matplotlib)",
    )


@dataclass(frozen=True)
class Plan:
    """The course of the benchmark."""

    settings: Settings
    providers: list[Provider]
    absent: list[str]  # a message for each provider that is not installed
    cases: list[Case]
    files: report.Files


@dataclass(frozen=True)
class Measured:
    """The measurements, and the problem that ended them early."""

    rows: list[Row]
    machine: Machine | None  # None where its bandwidth could not be measured
    problem: str = ""
    code: int = 0


def make_plan(args: argparse.Namespace) -> Plan:
    """Return the plan of these arguments, or raise UsageError."""
    device = device_named(args.device)
    for op in args.ops:
        if op not in OPS:
            alone = "; it comes first, and then its own ops" if op == HOST else ""
            raise UsageError(f"op: expected some of {', '.join(OPS)}, got {op!r}{alone}")
    if args.cold:
        raise UsageError("--cold: belongs to `partita bench host`")
    if args.do_bench and "softmax" not in (args.ops or OPS):
        raise UsageError("--do-bench: times softmax, which is not among the ops")
    if args.do_bench and (device.type != "cuda" or not has_triton()):
        raise UsageError("--do-bench: needs a GPU and Triton")
    providers = choose([] if args.only_ours else words(args.peers))
    settings = Settings(
        args.dtype,
        args.columns,
        args.elements,
        args.quick,
        not args.no_sweep,
        args.repetitions,
        device,
        args.do_bench,
    )
    cases = [case for op in dict.fromkeys(args.ops or OPS) for case in OPS[op](settings)]
    ops = {case.op for case in cases}
    absent = missing(each for each in providers if not ops.isdisjoint(each.ops))
    present = [each for each in providers if each.name not in absent]
    files = report.files_of(args, "bench")
    return Plan(settings, present, list(absent.values()), cases, files)


def machine_of(plan: Plan) -> Machine:
    """Make the device of the plan the current one, and measure its bandwidths."""
    settings = plan.settings
    if settings.device.type == "cuda":
        torch.cuda.set_device(settings.device)
    return measure_machine(settings.device, settings.logits, settings.repetitions)


def measure(plan: Plan, machine: Machine) -> Measured:
    """Run all cases with all providers and a progress bar; an interrupted run returns its rows."""
    rows: list[Row] = []
    with Progress(sum(len(takers(case, plan.providers)) for case in plan.cases)) as progress:
        work = run(plan.cases, plan.providers, machine, plan.settings.repetitions, progress)
        problem, code = finish(map(rows.extend, work), progress)
    return Measured(rows, machine, problem, code or int(bool(failed(rows))))


def main(args: argparse.Namespace) -> int:
    """Measure, print and write, and return the exit code."""
    if args.ops[:1] == [HOST]:
        return host.main(args)
    plan = make_plan(args)
    if not torch.cuda.is_available():
        print(f"{no_gpu()} This is a small timing on the CPU, which says little about a GPU.")
    for message in plan.absent:
        print(message)
    machine = machine_of(plan)
    print(report.describe(machine), flush=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\._")  # its compiler comments on choices
        measured = measure(plan, machine)
    if measured.problem:
        print(f"partita bench: {measured.problem}", file=sys.stderr)
    rows, panels = measured.rows, picture.panels(measured.rows)
    plan.files.publish(
        (*report.times(rows, machine), *report.summary(rows, machine)),
        report.describe(machine),
        list(report.records_of(rows, machine)),
        (lambda format: picture.render(panels, machine, format)) if panels else None,
        [f"{row.case}: {row.provider} {row.note}" for row in failed(rows)],
    )
    return measured.code
