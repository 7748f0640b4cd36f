"""Tables and a progress bar: by rich on a terminal that has it, in plain text elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

# The dtypes by the names that tables show.
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
SECONDS_BETWEEN_LINES = 15.0


class UsageError(ValueError):
    """An argument that cannot be used."""


class Table(NamedTuple):
    """A table of text.

    Fields:
        title: the line above the table.
        header: the names of the columns.
        rows: the cells.
        left: how many leading columns are aligned to the left, like columns without a name.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1

    @property
    def aligned(self) -> list[str]:
        """Return `<` or `>` for each column."""
        return ["<" if i < self.left or not name else ">" for i, name in enumerate(self.header)]


def has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def print_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1
) -> None:
    """Print the `Table` of these fields."""
    aligned = Table(title, header, rows, left).aligned
    if has_rich() and sys.stdout.isatty():
        _print_rich(title, header, rows, aligned)
        return
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print(f"\n{title}")
    for row in (
        header,
        ["-" * width * bool(name) for name, width in zip(header, widths, strict=True)],
        *rows,
    ):
        print(
            "  ".join(
                f"{cell:{align}{width}}"
                for cell, align, width in zip(row, aligned, widths, strict=True)
            ).rstrip()
        )


def _print_rich(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], aligned: Sequence[str]
) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, align in zip(header, aligned, strict=True):
        table.add_column(name, justify="left" if align == "<" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def first_line(error: BaseException) -> str:
    """Return the name of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Progress:
    """A progress bar on the error stream, or a line now and then where that is no terminal."""

    def __init__(self, total: int, *, quiet: bool = False) -> None:
        self._total, self._done, self._quiet = total, 0, quiet
        self._bar: Any = None
        self._said = time.monotonic()

    def __enter__(self) -> Progress:
        if not self._quiet and has_rich() and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
            )
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif not self._quiet and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)

    def say(self, text: str) -> None:
        """Show what is being done now."""
        if self._bar is not None:
            self._bar.update(self._task, description=text)
        elif not self._quiet and sys.stderr.isatty():
            print(
                f"\r\x1b[K[{self._done}/{self._total}] {text}", end="", file=sys.stderr, flush=True
            )
        elif not self._quiet and time.monotonic() - self._said > SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            print(f"[{self._done}/{self._total}] {text}", file=sys.stderr, flush=True)

    def advance(self) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.advance(self._task)
