"""`partita report`: the results of info, check and bench in one HTML file, for a bug report.

The page loads nothing and names neither user nor host.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import html
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from .. import __version__
from ..cli import check, info
from ..cli.check import Line
from ..cli.console import Table, UsageError, first_line, require_writable
from ..runtime.backend import is_installed
from . import cli, picture
from .case import is_ours
from .cli import Measured
from .measure import Machine
from .providers import PEERS
from .report import describe, summary, times
from .runner import Row, failed

# The page loads nothing and runs nothing. The policy makes a browser enforce that.
HEAD = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
"""

CSS = """\
:root { color-scheme: light dark; }
body { margin: 0 auto; max-width: 90rem; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif; }
nav a { margin-right: 1rem; }
.side { display: flex; flex-wrap: wrap; gap: 0 2.5rem; align-items: flex-start; }
details { max-width: 100%; overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: left; white-space: nowrap; }
tr { border-bottom: 1px solid #8886; }
.number { text-align: right; }
.note:not(:empty) { min-width: 20rem; white-space: normal; overflow-wrap: anywhere; }
.ours, .verdict { font-weight: 600; }
.bad, .fail { color: #d33; font-weight: 600; }
figure { flex: 1 1 36rem; margin: .5rem 0; overflow-x: auto; background: #fff; }
"""

READING = """\
Times are means (least–greatest) of several runs. Shares are of the bandwidth that was measured on \
this machine, counting the fewest bytes that the work must move. Errors are the greatest against \
fp64, in the unit that the column names, else as plain numbers. Wrong results are not timed."""

SMALL = (
    "A small timing on the CPU, which says little about a GPU. Other work of the machine shows"
    " in it."
)

# HOME matches the home of a user. FOLDERS matches the folders of a path from the root of a disk or
# from a home, but no addresses of the web.
PART = r"[^\s\\/'\"<>|:,;()]+"
HOME = re.compile(rf"[\\/](?:home|Users)[\\/]+{PART}")
FOLDERS = re.compile(
    rf"(?<![\w./\\])(?<!https:)(?<!http:)(?:[A-Za-z]:|~[\w.-]*)?(?:[\\/]+{PART})+[\\/]+"
)
# These names identify nobody.
COMMON = {"root", "user", "host", "localhost", "cpu", "gpu", "cuda", "torch", "partita"}


@dataclass(frozen=True)
class Report:
    """The content of the page."""

    command: str
    date: str
    lines: list[Line]  # of the check
    left_out: list[str]  # messages for devices that were left out
    bench: Measured | None
    absent: Sequence[str] = ()  # messages for peers that are not installed

    @property
    def code(self) -> int:
        failed_checks = not all(line.passed for line in self.lines)
        return (self.bench.code if self.bench else 0) or int(failed_checks)


def public(text: str) -> str:
    """Return the text without folders and without the names of the user and the host."""
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w-])", "~", text)
    text = FOLDERS.sub("…/", HOME.sub("~", text))
    host = platform.node()
    names = [(host, "(host)"), (host.partition(".")[0], "(host)")]
    with contextlib.suppress(OSError, KeyError):  # an account without a name
        names.append((getpass.getuser(), "(user)"))
    for name, substitute in names:
        if len(name) > 2 and name not in COMMON:
            text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", substitute, text)
    return text


def _text(text: str) -> str:
    return html.escape(public(text))


def _lines(lines: Iterable[str], kind: str = "") -> str:
    """Return a paragraph for each line."""
    return "".join(f'<p class="{kind}">{_text(line)}</p>\n' for line in lines)


def _section(name: str, title: str, *parts: str, level: int = 2) -> str:
    heading = f"<h{level}>{_text(title)}</h{level}>"
    return f'<section id="{_text(name)}">{heading}\n{"".join(parts)}</section>\n'


def _tables(tables: Iterable[Table], pictures: str = "") -> str:
    """Return pictures and tables, side by side where there is room for them."""
    return f'<div class="side">{pictures}\n{"".join(map(_table, tables))}</div>\n'


def _table(table: Table) -> str:
    """Return a table that folds under its title."""
    aligned = ["number" if align == ">" else "" for align in table.aligned]
    aligned = [kind if name else "note" for name, kind in zip(table.header, aligned, strict=True)]

    def line(row: Sequence[str], tag: str, kind: str = "") -> str:
        ours = ["ours" * (is_ours(name) or is_ours(row[0])) for name in table.header]
        cells = "".join(
            f'<{tag} class="{" ".join(kinds).strip()}">{_text(text)}</{tag}>'
            for *kinds, text in zip(aligned, ours, row, strict=True)
        )
        return f'<tr class="{kind}">{cells}</tr>\n'

    lines = line(table.header, "th")
    for row in table.rows:
        has_failed = "FAIL" in row or (is_ours(row[0]) and row[-1].startswith(("wrong", "refuses")))
        lines += line(row, "td", "fail" * has_failed)
    title = f"<summary>{_text(table.title)}</summary>"
    return f"<details open>{title}\n<table>\n{lines}</table></details>\n"


def _picture(rows: list[Row], machine: Machine, name: str) -> str:
    """Return the picture as inline SVG; `name` makes its anchors unique in the page."""
    svg = picture.render([rows], machine, "svg").decode().partition("<svg")[2]
    for anchor in ('id="', 'href="#', "url(#"):
        svg = svg.replace(anchor, f"{anchor}{name}-")
    label = rows[0].case.caption or "bandwidth by number of columns"
    return f'<figure><svg role="img" aria-label="{_text(label)}"{svg}</figure>\n'


def verdicts(report: Report) -> list[str]:
    """Return one line each for the check and the bench."""
    verdict = f"check: {check.verdict(report.lines)}"
    if report.bench is None:
        return [verdict]
    measured = report.bench
    failures = len(failed(measured.rows))
    found = "all results of Partita right" if measured.rows else "nothing measured"
    if failures:
        found = f"{failures} result{'s' * (failures > 1)} of Partita wrong or refused"
    return [verdict, "; ".join(filter(None, (f"bench: {found}", measured.problem)))]


def _header(report: Report) -> str:
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    versions = f"Python {platform.python_version()}, PyTorch {torch.__version__}, {info.cpu()}{gpu}"
    title = f"<h1>Partita {_text(__version__)}: report</h1>\n"
    verdict = _lines(verdicts(report), "bad" if report.code else "verdict")
    about = [f"{report.date} · {versions}", report.command, *info.missing()]
    return f"<header>\n{title}{verdict}{_lines(about)}</header>\n"


def _machine() -> str:
    none = f"No variable is set that begins with one of {', '.join(info.VARIABLES)}."
    variables = _lines(info.variables() or [none])
    return _section("machine", "Machine", _tables(info.tables()), "<h3>Environment</h3>", variables)


def _check(report: Report) -> str:
    lines = sorted(report.lines, key=lambda line: line.passed)  # the failures come first
    intro = (
        "The ops that have a gradient, forward and backward, on this machine. The bound of an error"
        " is two times that of PyTorch in the same dtype, or 2 ulp."
    )
    failures = [f"{x.op} {x.dtype}, {x.backend}: {x.note}" for x in lines if not x.passed]
    tables = "".join(map(_table, check.tables(lines)))
    content = _lines(failures, "bad"), _lines([intro, *report.left_out]), tables
    return _section("check", "Check", *content)


def _bench(bench: Measured, absent: Sequence[str]) -> str:
    rows, machine = bench.rows, bench.machine
    intro, ops = [READING], ""
    if machine:
        intro += [describe(machine)] + [SMALL] * (machine.device.type == "cpu")
        for op in _ops(rows):
            ops += _op(op, [row for row in rows if row.case.op == op], machine)
    if not is_installed("matplotlib"):
        brings = f"{info.EXTRAS['matplotlib'][1]} brings it"
        intro.append(f"No pictures: matplotlib is not installed; {brings}.")
    problems = [f"{row.case}: {row.provider} {row.note}" for row in failed(rows)]
    problems += filter(None, [bench.problem])
    return _section("bench", "Bench", _lines(problems, "bad"), _lines([*intro, *absent]), ops)


def _ops(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.case.op for row in rows))


def _op(op: str, rows: Sequence[Row], machine: Machine) -> str:
    """Return the section of an op: pictures, the summary, and the times."""
    panels = picture.panels(rows) if is_installed("matplotlib") else []
    pictures = "".join(_picture(panel, machine, f"{op}-{i}") for i, panel in enumerate(panels))
    tables = (*summary(rows, machine), *times(rows, machine))
    return _section(op, op, _tables(tables, pictures), level=3)


def page(report: Report) -> str:
    """Return the whole file."""
    bench = report.bench
    names = ["machine", "check", *(["bench", *_ops(bench.rows)] if bench else [])]
    links = "\n".join(f'<a href="#{_text(name)}">{_text(name)}</a>' for name in names)
    sections = _machine() + _check(report) + (_bench(bench, report.absent) if bench else "")
    title = f"<title>Partita report: {check.verdict(report.lines)}</title>"
    body = f"{_header(report)}<nav>\n{links}\n</nav>\n<main>\n{sections}</main>"
    return f"{HEAD}{title}\n<style>\n{CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"


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
    """Raise UsageError, before the work begins, if the file cannot be written or is there."""
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


def _measured(plan: cli.Plan) -> Measured:
    try:
        machine = cli.machine_of(plan)
    # With too little memory, or a GPU that a check has broken, the report matters most.
    except Exception as error:
        return Measured([], None, first_line(error), 1)
    return cli.measure(plan, machine)


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
    devices, left_out = check.served(args.device)
    if not devices:
        raise UsageError(f"nothing is left to check: {'; '.join(left_out)}")
    plan = None if args.no_bench else _plan(args)
    _prepare(args.out, args.force)
    date = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    lines = check.run_all(devices)
    bench = (_measured(plan), plan.absent) if plan else (None,)
    found = Report(_command(args), date, lines, left_out, *bench)
    try:
        _write(args.out, page(found))
    except OSError as error:
        print(f"partita report: {args.out}: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    for line in verdicts(found):
        print(line)
    print(f"wrote {args.out}")
    return found.code
