"""The files that a benchmark writes beside what it prints."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from ..cli.arguments import require_writable
from ..cli.console import Table, UsageError, print_table


class Files(NamedTuple):
    """Where the measurements and their picture are written, or None."""

    csv: Path | None
    svg: Path | None

    def publish(
        self,
        tables: Iterable[Table],
        machine: str,
        write_csv: Callable[[Path], None],
        render: Callable[[str], bytes] | None,
        failures: Iterable[str],
    ) -> None:
        """Print the tables, write the files, and print what failed; None for no picture.

        `render` returns a picture in a format, that of the end of the name of its file.
        """
        for table in tables:
            print_table(*table)
        print(f"\n{machine}")
        if self.csv:
            write_csv(self.csv)
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
    """Return the files of the arguments, in `--out` with this name, once they can be written.

    Raises:
        UsageError: a file cannot be written, or matplotlib is missing for a picture.
    """
    if args.svg and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--svg: needs matplotlib (pip install matplotlib)")
    files = Files(
        args.csv or (args.out and args.out / f"{name}.csv"),
        args.svg or (args.out and args.out / f"{name}.svg"),
    )
    for path in filter(None, files):
        require_writable(path)
    return files
