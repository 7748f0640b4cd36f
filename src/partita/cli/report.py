"""`partita report`: what info, check and bench find, in one HTML file to attach to a bug report."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from ..bench import cli
from ..bench.providers import PEERS
from . import check as _check_machine
from .console import UsageError, first_line
from .page import Bench, Report, page, verdicts

# The quick bench on a CPU: logits and repetitions in place of bench's own, and a peer left out, so that all of it takes a minute or two.
CPU_ELEMENTS, CPU_REPETITIONS = 2**17, 5
SLOW_ON_CPU = "compile"

DESCRIPTION = """\
Run info, check and a quick bench, and write what they find to one HTML file, to read in a browser or to attach to a bug report.

It holds tables, and pictures where matplotlib is installed; it loads nothing from elsewhere and runs no scripts. Names of the user, of
the host and of folders are left out. It takes a few minutes. The quick bench is smaller yet on a CPU, and without torch.compile there
unless --peers names it."""

EPILOG = """\
examples:
  partita report report.html                               everything, quickly
  partita report report.html --no-bench                    does it work? without times
  partita report slow.html --ops ctc --peers torch --full --device cuda:1
  partita report report.html --force                       in place of the last one

exit codes (of these, the report is written at 0, at 1, and at 130 once the bench has begun):
  0  well                1  a check failed, a result of Partita was wrong, or the bench broke off
  2  wrong arguments   130  interrupted"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "out", type=Path, metavar="FILE", help="to write; a folder that is not there is made"
    )
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="cpu, cuda, cuda:1; by default the CPU and the current GPU are checked, and the GPU is timed",
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--full", action="store_true", help="every size of the bench, as `partita bench` has them"
    )
    length.add_argument("--no-bench", action="store_true", help="only info and check")
    parser.add_argument(
        "--ops",
        metavar="NAMES",
        help=f"of the bench: some of {', '.join(cli.OPS)}, without blanks; all by default",
    )
    parser.add_argument(
        "--peers", metavar="NAMES", help="of the bench, as in `partita bench`; '' for nobody"
    )


def _command(args: argparse.Namespace) -> str:
    """That gave these arguments, with the name of the file alone."""
    words = ["partita", "report", args.out.name]
    for name in ("force", "full", "no_bench", "device", "ops", "peers"):
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        words += (
            [option] * (value is True)
            if isinstance(value, bool)
            else [f"{option}={value}"] * (value is not None)
        )
    return shlex.join(words)


def _prepare(path: Path, force: bool) -> None:
    """Refuse what could not be written, or would be lost, before the work begins.

    Raises:
        UsageError: so it is.
    """
    try:
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; expected a file to write")
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: is no ordinary file")
        if path.exists() and not force:
            raise UsageError(f"{path}: is there already; --force overwrites it")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: cannot be written: no right to write to the folder")


def _plan(args: argparse.Namespace) -> cli.Plan:
    """Of the bench: its own arguments, and ours in place of its defaults."""
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    parser.set_defaults(
        quick=not args.full, ops=[op.strip() for op in (args.ops or "").split(",") if op.strip()]
    )
    if args.device is not None:
        parser.set_defaults(device=args.device)
    if not args.full and parser.get_default("device") == "cpu":
        peers = ",".join(peer.name for peer in PEERS if peer.name != SLOW_ON_CPU)
        parser.set_defaults(elements=CPU_ELEMENTS, repetitions=CPU_REPETITIONS, peers=peers)
    if args.peers is not None:
        parser.set_defaults(peers=args.peers)
    return cli.make_plan(parser.parse_args([]))


def _bench(plan: cli.Plan) -> Bench:
    absent = cli.missing(plan)
    try:
        machine = cli.machine_of(plan)
    except Exception as error:  # too little memory, say, or a GPU that a check has broken: the report is wanted all the more
        return Bench(cli.Measured([], first_line(error), 1), None, list(absent.values()))
    providers = [provider for provider in plan.providers if provider.name not in absent]
    return Bench(cli.measure(plan, providers, machine), machine, list(absent.values()))


def _write(path: Path, text: str) -> None:
    """Whole, or not at all."""
    part = path.with_name(f".{path.name[:100]}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def main(args: argparse.Namespace) -> int:
    """Check, measure, write; the exit code."""
    try:
        served = _check_machine.served(args.device)
        if not served.backends:
            raise UsageError(f"nothing is left to check: {'; '.join(served.left_out)}")
        plan = None if args.no_bench else _plan(args)
        _prepare(args.out, args.force)
    except UsageError as error:
        print(f"partita report: {error}", file=sys.stderr)
        return 2
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    lines = _check_machine.run_all(served.backends)
    report = Report(_command(args), date, lines, served.left_out, _bench(plan) if plan else None)
    try:
        _write(args.out, page(report))
    except OSError as error:
        print(f"partita report: {args.out}: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    for line in verdicts(report):
        print(line)
    print(f"wrote {args.out}")
    return report.code
