"""`partita report`: the results of info, check and bench in one HTML file, for a bug report."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from ..cli import check
from ..cli.arguments import require_writable
from ..cli.console import UsageError, first_line
from . import cli
from .page import Bench, Report, page, verdicts
from .providers import PEERS

# The quick bench on a CPU has fewer logits and repetitions than the bench itself, and one peer
# less, so that it takes a minute or two.
CPU_ELEMENTS, CPU_REPETITIONS = 2**17, 5
SLOW_ON_CPU = "compile"

DESCRIPTION = """\
Run info, check and a quick bench, and write their results to one HTML file, to read in a browser or
to attach to a bug report.

The file has tables, and pictures where matplotlib is installed. It loads nothing from elsewhere
and runs no scripts. The names of the user, the host and folders are left out. The command takes a
few minutes. On a CPU the quick bench is smaller, and leaves out torch.compile unless --peers names
it."""

EPILOG = """\
examples:
  partita report report.html                               everything, quickly
  partita report report.html --no-bench                    does it work? without times
  partita report slow.html --ops ctc --peers torch --full --device cuda:1
  partita report report.html --force                       replaces the last one

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
        help="cpu, cuda, cuda:1; by default the CPU and the current GPU are checked, and the GPU"
        " is timed",
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
    """Return the command of these arguments, without the folder of the file."""
    words = ["partita", "report", args.out.name]
    for name in ("force", "full", "no_bench", "device", "ops", "peers"):
        value, option = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and value is not False:
            words.append(option if value is True else f"{option}={value}")
    return shlex.join(words)


def _prepare(path: Path, force: bool) -> None:
    """Check before the work begins that the file can be written and that nothing is lost.

    Raises:
        UsageError: the file cannot be written, or is there already.
    """
    require_writable(path)
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is no ordinary file")
    if path.exists() and not force:
        raise UsageError(f"{path}: is there already; --force overwrites it")
    if not os.access(path.parent, os.W_OK):  # a new file replaces the old one
        raise UsageError(f"{path}: cannot be written: no right to write to the folder")


def _plan(args: argparse.Namespace) -> cli.Plan:
    """Return the plan of the bench with the defaults of the report."""
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
    try:
        machine = cli.machine_of(plan)
    # With too little memory, or a GPU that a check has broken, the report matters most.
    except Exception as error:
        return Bench(cli.Measured([], first_line(error), 1), None, plan.absent)
    return Bench(cli.measure(plan, machine), machine, plan.absent)


def _write(path: Path, text: str) -> None:
    """Write the whole file or nothing."""
    part = path.with_name(f".{path.name[:100]}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def main(args: argparse.Namespace) -> int:
    """Check, measure and write, and return the exit code."""
    try:
        served = check.served(args.device)
        if not served.backends:
            raise UsageError(f"nothing is left to check: {'; '.join(served.left_out)}")
        plan = None if args.no_bench else _plan(args)
        _prepare(args.out, args.force)
    except UsageError as error:
        print(f"partita report: {error}", file=sys.stderr)
        return 2
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    lines = check.run_all(served.backends)
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
