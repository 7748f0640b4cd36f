"""`partita report`: the results of info, check and bench in one HTML file, for a bug report.

The page loads nothing and names neither user nor host.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import html
import importlib.util
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from .. import __version__
from ..cli import check, info
from ..cli.check import Line
from ..cli.console import Table, UsageError, first_line, require_writable
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
:root {
  color-scheme: light dark; --text: light-dark(#1c1e21, #e3e5e8); --page: light-dark(#fff, #16181b);
  --soft: light-dark(#5d636b, #9aa1aa); --card: light-dark(#f6f7f8, #1f2226);
  --line: light-dark(#dcdfe3, #34383e); --ours: light-dark(#ad1457, #f48fb1);
  --good: light-dark(#1b6e34, #7bd494); --bad: light-dark(#b3261e, #ff9c93);
  --bad-card: light-dark(#fdecea, #3c1f1d);
}
body { margin: 0 auto; max-width: 90rem; padding: 1.5rem 1rem 4rem; background: var(--page); }
body { color: var(--text); font: 1rem/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.6rem; }
h2 { margin: 3rem 0 .5rem; padding-bottom: .25rem; font-size: 1.3rem; }
h2 { border-bottom: 1px solid var(--line); }
h3 { margin: 2.5rem 0 .5rem; font-size: 1.1rem; }
p, ul { margin: .5rem 0; max-width: 60rem; overflow-wrap: anywhere; }
a { color: inherit; }
nav a { margin-right: 1rem; }
code { font: .9em ui-monospace, monospace; }
.soft { color: var(--soft); }
.verdict { margin: 1rem 0; padding: .5rem 1rem; background: var(--card); font-weight: 600; }
.verdict { border-left: .3rem solid var(--good); }
.verdict p { margin: .25rem 0; }
.verdict.bad { border-color: var(--bad); background: var(--bad-card); }
.bad, .fail { color: var(--bad); }
.side { display: flex; flex-wrap: wrap; gap: 0 2.5rem; align-items: flex-start; }
details { min-width: 0; max-width: 100%; }
summary { margin: .8rem 0 .3rem; font-weight: 600; cursor: pointer; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: left; white-space: nowrap; }
th, td { border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
th.number, td.number { text-align: right; }
.note:not(:empty) { min-width: 20rem; white-space: normal; overflow-wrap: anywhere; }
.ours { color: var(--ours); font-weight: 600; }
tr.fail td { background: var(--bad-card); color: var(--bad); font-weight: 600; }
figure { flex: 1 1 36rem; min-width: 0; margin: .5rem 0; padding: .5rem; overflow-x: auto; }
figure { border: 1px solid var(--line); border-radius: .5rem; background: #fff; }
figure svg { display: block; min-width: 34rem; max-width: 100%; height: auto; margin: auto; }
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


def _paragraphs(lines: Sequence[str], *, bad: bool = False) -> str:
    return "".join(f"<p{_class(bad=bad)}>{_text(line)}</p>\n" for line in lines)


def _items(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{_text(line)}</li>\n" for line in lines)
    return f"<ul>\n{items}</ul>\n" if items else ""


def _in_rows(parts: str) -> str:
    """Return the parts in rows that fill the width of the page."""
    return f'<div class="side">\n{parts}</div>\n' if parts else ""


def _section(name: str, content: str) -> str:
    return f'<section id="{name}">\n{content}</section>\n'


def _class(**kinds: bool) -> str:
    """Return the class attribute of the kinds that hold, or nothing."""
    names = " ".join(kind for kind, holds in kinds.items() if holds)
    return f' class="{names}"' if names else ""


def _table(table: Table) -> str:
    """Return a table that folds under its title and scrolls where the page is too narrow."""
    number, note = [align == ">" for align in table.aligned], [not name for name in table.header]

    def cells(tag: str, row: Sequence[str]) -> str:
        ours = [is_ours(name) or is_ours(row[0]) for name in table.header]
        classes = [_class(number=number[i], note=note[i], ours=ours[i]) for i in range(len(row))]
        return "".join(
            f"<{tag}{kind}>{_text(text)}</{tag[:2]}>"
            for kind, text in zip(classes, row, strict=True)
        )

    head = cells('th scope="col"', table.header)
    body = ""
    for row in table.rows:
        has_failed = "FAIL" in row or (is_ours(row[0]) and row[-1].startswith(("wrong", "refuses")))
        body += f"<tr{_class(fail=has_failed)}>{cells('td', row)}</tr>\n"
    content = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"
    summary = f"<summary>{_text(table.title)}</summary>"
    return f'<details open>{summary}\n<div class="scroll">{content}</div></details>\n'


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
    kind = _class(verdict=True, bad=report.code != 0)
    verdict = f"<div{kind}>{_paragraphs(verdicts(report))}</div>\n"
    date = f'<p class="soft">{_text(report.date)} · {_text(versions)}</p>\n'
    command = f'<p class="soft"><code>{_text(report.command)}</code></p>\n'
    title = f"<h1>Partita {_text(__version__)}: report</h1>\n"
    return f"<header>\n{title}{verdict}{date}{command}{_items(info.missing())}</header>\n"


def _machine() -> str:
    none = f"No variable is set that begins with one of {', '.join(info.VARIABLES)}."
    variables = info.variables() or [none]
    tables = "".join(_table(table) for table in info.tables())
    environment = f"<h3>Environment</h3>\n{_items(variables)}"
    return _section("machine", f"<h2>Machine</h2>\n{_in_rows(tables)}{environment}")


def _check(report: Report) -> str:
    lines = sorted(report.lines, key=lambda line: line.passed)  # the failures come first
    intro = (
        "The ops that have a gradient, forward and backward, on this machine. The bound of an error"
        " is two times that of PyTorch in the same dtype, or 2 ulp."
    )
    failures = _paragraphs(
        [f"{x.op} {x.dtype}, {x.backend}: {x.note}" for x in lines if not x.passed], bad=True
    )
    tables = "".join(_table(table) for table in check.tables(lines))
    content = _paragraphs([intro, *report.left_out]) + tables
    return _section("check", f"<h2>Check</h2>\n{failures}{content}")


def _bench(bench: Measured, absent: Sequence[str]) -> str:
    rows, machine = bench.rows, bench.machine
    intro, ops = [READING], ""
    if machine:
        intro += [describe(machine)] + [SMALL] * (machine.device.type == "cpu")
        for op in _ops(rows):
            ops += _op(op, [row for row in rows if row.case.op == op], machine)
    if importlib.util.find_spec("matplotlib") is None:
        brings = f"{info.EXTRAS['matplotlib'][1]} brings it"
        intro.append(f"No pictures: matplotlib is not installed; {brings}.")
    problems = [f"{row.case}: {row.provider} {row.note}" for row in failed(rows)]
    problems += filter(None, [bench.problem])
    about = _paragraphs(problems, bad=True) + _paragraphs(intro)
    content = f"{about}{_items(absent)}{ops}"
    return _section("bench", f"<h2>Bench</h2>\n{content}")


def _ops(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.case.op for row in rows))


def _op(op: str, rows: Sequence[Row], machine: Machine) -> str:
    """Return the section of an op: pictures, the summary, and the times."""
    panels = picture.panels(rows) if importlib.util.find_spec("matplotlib") else []
    pictures = "".join(_picture(panel, machine, f"{op}-{i}") for i, panel in enumerate(panels))
    tables = "".join(_table(table) for table in (*summary(rows, machine), *times(rows, machine)))
    return _section(_text(op), f"<h3>{_text(op)}</h3>\n{_in_rows(pictures)}{_in_rows(tables)}")


def page(report: Report) -> str:
    """Return the whole file."""
    ops = _ops(report.bench.rows) if report.bench else []
    names = ["machine", "check", *(["bench", *ops] if report.bench else [])]
    links = "\n".join(f'<a href="#{_text(name)}">{_text(name)}</a>' for name in names)
    title = f"<title>Partita report: {check.verdict(report.lines)}</title>"
    head = f"{HEAD}{title}\n<style>\n{CSS}</style>\n</head>\n"
    sections = _machine() + _check(report)
    if report.bench:
        sections += _bench(report.bench, report.absent)
    body = f"{_header(report)}<nav>\n{links}\n</nav>\n<main>\n{sections}</main>"
    return f"{head}<body>\n{body}\n</body>\n</html>\n"


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
