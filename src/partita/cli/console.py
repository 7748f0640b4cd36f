"""The arguments that several commands take, and tables and the progress of their work."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import torch

# The dtypes by the names that tables show.
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
SECONDS_BETWEEN_LINES = 15.0
GAP = 2  # spaces between columns
NOTE_WIDTH = 30  # letters that a column of notes has at least; longer notes wrap


class UsageError(ValueError):
    """An argument that cannot be used."""


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> tuple[int, ...]:
    result = tuple(int(word) if word.isdecimal() else 0 for word in words(text))
    if not all(result):
        raise argparse.ArgumentTypeError(f"expected positive whole numbers, got {text!r}")
    return result


def number(text: str) -> int:
    result = numbers(text)
    if len(result) != 1:
        raise argparse.ArgumentTypeError(f"expected one positive whole number, got {text!r}")
    return result[0]


def dtype_names(text: str) -> tuple[str, ...]:
    for name in words(text):
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"expected some of {','.join(DTYPES)}, got {name!r}")
    return tuple(dict.fromkeys(words(text)))


def dtypes(text: str) -> tuple[torch.dtype, ...]:
    return tuple(DTYPES[name] for name in dtype_names(text))


def device_named(name: str) -> torch.device:
    """Return the device of this name, with its index, or raise UsageError."""
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(f"--device: cannot use {name!r}: expected cpu, cuda or cuda:1")
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        message = str(error).splitlines()[0]
        raise UsageError(f"--device: cannot use {name!r}: {message}") from None


def require_writable(path: Path) -> None:
    """Make the folder of a file, and raise UsageError where the file cannot be written."""
    try:
        if path.is_dir():
            raise UsageError(f"{path}: is a folder; expected a file to write")
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        kind = "file" if path.exists() else "folder"
        raise UsageError(f"{path}: cannot be written: no right to write to the {kind}")


class Table(NamedTuple):
    """A table of text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1  # leading columns that are aligned to the left, like those without a name

    @property
    def aligned(self) -> list[str]:
        """Return `<` or `>` for each column."""
        return ["<" if i < self.left or not name else ">" for i, name in enumerate(self.header)]

    @property
    def has_notes(self) -> bool:
        """Return whether the last column has no name: it holds notes, which may wrap."""
        return len(self.header) > self.left and not self.header[-1]


def _widths(lines: Iterable[Sequence[str]]) -> list[int]:
    """Return the letters of the longest cell of each column."""
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _parts(table: Table, width: int) -> list[list[int]]:
    """Return the columns of parts that are at most `width` wide.

    Each part starts with the leading columns, which are never cut. A part has one column beside
    them even where they leave too little room.
    """
    widths, leading = _widths((table.header, *table.rows)), list(range(table.left))
    if table.has_notes:
        widths[-1] = min(widths[-1], NOTE_WIDTH)
    parts = [leading]
    for i in range(table.left, len(widths)):
        total = sum(widths[column] + GAP for column in (*parts[-1], i)) - GAP
        if parts[-1] != leading and total > width:
            parts.append(leading)
        parts[-1] = [*parts[-1], i]
    return parts


def print_table(table: Table) -> None:
    """Print a table, in parts where it is wider than the terminal.

    A pipe or a file counts as a terminal of 80 columns, unless COLUMNS is set. A part that goes on
    has no line without a cell of its own.
    """
    width = shutil.get_terminal_size().columns
    for part, columns in enumerate(_parts(table, width)):
        header, *rows = (
            [row[i] for i in columns]
            for row in (table.header, *table.rows)
            if part == 0 or row is table.header or any(row[i] for i in columns[table.left :])
        )
        if part and not rows:
            continue
        widths, notes = _widths((header, *rows)), not header[-1] and table.has_notes
        if notes:
            widths[-1] = max(width - sum(each + GAP for each in widths[:-1]), NOTE_WIDTH)
        rule = ["-" * each * bool(name) for name, each in zip(header, widths, strict=True)]
        aligned = [table.aligned[i] for i in columns]
        print(f"\n{table.title}{' (continued)' * (part > 0)}")
        for row in (header, rule, *rows):
            for cells in _wrapped(row, widths[-1]) if notes else [row]:
                line = (f"{c:{a}{w}}" for c, a, w in zip(cells, aligned, widths, strict=True))
                print((" " * GAP).join(line).rstrip())


def _wrapped(row: Sequence[str], width: int) -> list[list[str]]:
    """Return the lines of a row whose last cell is a note of any length."""
    notes = textwrap.wrap(row[-1], width, break_long_words=False, break_on_hyphens=False)
    blank = [""] * (len(row) - 1)
    return [[*(row[:-1] if i == 0 else blank), note] for i, note in enumerate(notes or [row[-1]])]


def first_line(error: BaseException) -> str:
    """Return the name of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Progress:
    """The progress on a line of the error stream, or a line now and then if it is no terminal."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._start = self._said = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)

    def say(self, text: str) -> None:
        """Show what is being done now, and on a terminal the time that is left."""
        line, now = f"[{self._done}/{self._total}] {text}", time.monotonic()
        if sys.stderr.isatty():
            left = (now - self._start) * (self._total - self._done) / max(1, self._done)
            left_text = f", {left:.0f} s left" if self._done else ""
            print(f"\r\x1b[K{line}{left_text}", end="", file=sys.stderr, flush=True)
        elif now - self._said > SECONDS_BETWEEN_LINES:
            self._said = now
            print(line, file=sys.stderr, flush=True)

    def advance(self) -> None:
        self._done += 1
