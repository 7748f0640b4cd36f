"""Tables and CSV, and the files that a benchmark writes beside what it prints."""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from ..cli.console import Table, UsageError, print_table, require_writable
from ..runtime.backend import is_installed
from . import providers
from .case import DTYPE_NAMES, Case
from .measure import Machine
from .runner import Row

PARTS = ("inference", "forward", "backward", "total", "replay", "do_bench")
Record = dict[str, Any]  # a line of a CSV


def _groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Group rows by the titles of their tables: op, kind of case and dtype."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        words = (row.case.op, row.case.label, DTYPE_NAMES[row.case.dtype])
        groups.setdefault(" ".join(filter(None, words)), []).append(row)
    return groups


def _percent(row: Row, machine: Machine) -> str:
    fraction = row.fraction(machine)
    return "" if fraction is None else f"{100 * fraction:.1f}%"


def times(rows: Sequence[Row], machine: Machine) -> Iterator[Table]:
    """Yield tables of all measurements, with a line for each case and provider.

    Times are milliseconds as mean (min–max), with the percent of the bandwidth that bounds the
    part on a GPU.
    """
    for title, group in _groups(rows).items():
        kind = group[0].case
        parts = [part for part in PARTS if any(row.part == part for row in group)]
        limits = {part: limit for row in group for part, (_, limit) in row.case.moves.items()}
        if machine.device.type == "cpu":
            limits = {}
        memory = any(row.extra_memory is not None for row in group)
        header = ["provider", " × ".join(kind.sizes)]
        for part in parts:
            header += [f"{part}, ms", *([f"of {limits[part]}"] if part in limits else [])]
        header += ["extra memory"] * memory + [kind.unit or "error", ""]
        by_case: dict[tuple[Case, str], dict[str, Row]] = {}
        for row in group:
            by_case.setdefault((row.case, row.provider), {})[row.part] = row
        lines = []
        for (case, provider), found in by_case.items():
            line, any_row = [provider, case.size(case.sizes)], next(iter(found.values()))
            for part in parts:
                measured = found.get(part)
                line.append(str(measured.timing) if measured else "")
                if part in limits:
                    line.append(_percent(measured, machine) if measured else "")
            line += [_memory(any_row)] * memory
            line.append("" if math.isnan(any_row.error) else f"{any_row.error:.2g}")
            lines.append([*line, any_row.note[:120]])
        yield Table(title, header, lines, left=2)


def _memory(row: Row) -> str:
    if row.extra_memory is None:
        return ""
    share = f"{row.extra_memory / row.case.bytes:.2f} {row.case.scores}"
    return f"{row.extra_memory / 2**20:,.1f} MiB = {share}"


def summary(rows: Sequence[Row], machine: Machine) -> Iterator[Table]:
    """Yield tables with a line for each size and a column for each provider.

    They show the percent of the limit, the speed-up over the provider `versus`, and time and memory
    relative to the yardstick, where the case has these.
    """
    for title, group in _groups(rows).items():
        kind = group[0].case
        for part in PARTS:
            timed = {x: x.timing.median for x in group if x.part == part and x.timing}
            measured = {row: time for row, time in timed.items() if part in row.case.moves}
            if measured and machine.device.type != "cpu":
                limit = next(iter(measured)).case.moves[part].limit
                shares = {row: _percent(row, machine) for row in measured}
                yield _by_size(
                    f"{title}, {part}: percent of {limit} bandwidth", group, part, shares
                )
            for name, own, words, power in (
                (kind.versus, measured, "times faster than", -1),
                (kind.yardstick, timed, "times the", 1),
            ):
                units = {row.case: time for row, time in own.items() if row.provider == name}
                if units:
                    ratios = {
                        row: f"{(time / units[row.case]) ** power:.2f}"
                        for row, time in own.items()
                        if row.case in units
                    }
                    yield _by_size(f"{title}, {part}: {words} {name}", group, part, ratios)
        sizes = {
            row: f"{row.extra_memory / 2**30:.2f}" for row in group if row.extra_memory is not None
        }
        if kind.yardstick and sizes:
            yield _by_size(f"{title}: extra memory, GiB", group, kind.memory_of, sizes)


def _by_size(title: str, group: Sequence[Row], part: str, cells: Mapping[Row, str]) -> Table:
    """Return a table with a line for each size and a column for each provider, or the reason."""
    providers = list(dict.fromkeys(row.provider for row in group))
    lines: dict[str, dict[str, str]] = {}  # the cells of each provider by size
    for row in group:
        line = lines.setdefault(row.case.size(row.case.sizes), dict.fromkeys(providers, ""))
        if row.part in (part, ""):
            line[row.provider] = cells.get(row) or row.note.partition(":")[0]
    return Table(
        title,
        [" × ".join(group[0].case.sizes), *providers],
        [[size, *line.values()] for size, line in lines.items()],
    )


def describe(machine: Machine) -> str:
    copy, read = machine.copy / 1e9, machine.read / 1e9
    return f"{machine.name}: copy {copy:,.0f} GB/s (read + written), read {read:,.0f} GB/s"


def records_of(rows: Iterable[Row], machine: Machine) -> Iterator[Record]:
    """Yield the lines of the CSV: the bandwidths of the machine, and the measurements."""
    for part, bandwidth in (("copy", machine.copy), ("read", machine.read)):
        here = {"op": "machine", "provider": machine.name, "part": part}
        yield here | {"gb_per_s": bandwidth / 1e9}
    for row in rows:
        case, timing, fraction = row.case, row.timing, row.fraction(machine)
        is_bounded = fraction is not None and row.bandwidth is not None
        yield {
            "op": case.op,
            "part": row.part,
            "provider": row.provider,
            "dtype": DTYPE_NAMES[case.dtype],
            **{name: getattr(case, name) for name in case.sizes},
            "mean_ms": timing and timing.mean,
            "median_ms": timing and timing.median,
            "min_ms": timing and timing.least,
            "max_ms": timing and timing.greatest,
            "repetitions": timing and timing.repetitions,
            "bytes": row.moved if is_bounded else None,
            "gb_per_s": row.bandwidth / 1e9 if row.bandwidth and is_bounded else None,
            "limit": case.moves[row.part].limit if is_bounded else None,
            "fraction": fraction,
            "extra_memory_bytes": row.extra_memory if row.part == case.memory_of else None,
            f"error_{case.unit}".rstrip("_"): None if math.isnan(row.error) else row.error,
            "note": row.note,
        }


def write_csv(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Write records, and before them the versions of the installed packages that are timed."""
    modules = ("torch", "triton", "numba", *(m for peer in providers.PEERS for m in peer.packages))
    installed = metadata.packages_distributions()
    names = [name for m in modules for name in installed.get(m.partition(".")[0], ())]
    versions = [
        {"op": "version", "provider": name, "note": metadata.version(name)}
        for name in dict.fromkeys(names)
    ]
    lines = [*versions, *records]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, list(dict.fromkeys(k for line in lines[::-1] for k in line)))
        table.writeheader()
        for line in lines:
            table.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in line.items()})


class Files(NamedTuple):
    """The files of the measurements and of their picture, or None."""

    csv: Path | None
    svg: Path | None

    def publish(
        self,
        tables: Iterable[Table],
        machine: str,
        records: Sequence[Record],
        render: Callable[[str], bytes] | None,
        failures: Iterable[str],
    ) -> None:
        """Print the tables, write the files, and print what failed; None for no picture.

        `render` returns a picture in a format, that of the end of the name of its file.
        """
        for table in tables:
            print_table(table)
        print(f"\n{machine}")
        if self.csv:
            write_csv(self.csv, records)
            print(f"wrote {self.csv}")
        if self.svg and render:
            try:
                picture = render(self.svg.suffix.removeprefix("."))
                self.svg.parent.mkdir(parents=True, exist_ok=True)
                self.svg.write_bytes(picture)
                print(f"wrote {self.svg}")
            except ImportError:
                print(f"no {self.svg}: it needs matplotlib (pip install matplotlib)")
        for failure in failures:
            print(f"partita bench: {failure}", file=sys.stderr)


def files_of(args: argparse.Namespace, name: str) -> Files:
    """Return the files of the arguments, in `--out` with this name, or raise UsageError."""
    if args.svg and not is_installed("matplotlib"):
        raise UsageError("--svg: needs matplotlib (pip install matplotlib)")
    files = Files(
        args.csv or (args.out and args.out / f"{name}.csv"),
        args.svg or (args.out and args.out / f"{name}.svg"),
    )
    for path in filter(None, files):
        require_writable(path)
    return files
