"""Reading of n-gram models from ARPA files.

The lines of a block are split and converted by functions of the interpreter that loop in C, so a
line costs no bytecode. Where one of them fails, the lines of the block are read again one by one,
to name the first that is wrong.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import re
import sys
import time
import zlib
from array import array
from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO, NamedTuple, NoReturn

import torch
from torch import Tensor

from ...runtime import checks

BLOCK = 2**12  # lines that are converted together
UNKNOWN, OTHER_UNKNOWN = b"<unk>", b"<UNK>"  # the two are one word
MISSING_UNKNOWN = -100.0  # its log10 probability where a file does not have it, as in kenlm
SECONDS_BEFORE_PROGRESS = 3.0
# What files of other formats start with.
OTHER_FORMATS = {
    b"mmap lm http": "a binary file of kenlm",
    b"BZh": "a file of bzip2",
    b"\xfd7zXZ": "a file of xz",
    b"\x28\xb5\x2f\xfd": "a file of zstd",
    b"PK\x03\x04": "an archive; what NgramLM.save has written is read by NgramLM.load",
}


class Section(NamedTuple):
    """The n-grams of one order, in the order of the file.

    Fields:
        words: `[K, n]` int64, the places of the words among the 1-grams.
        log_probs: `[K]` float64, natural logarithms.
        backoffs: `[K]` float64, the logarithms of the back-off weights; 0 where the file has none.
        first_line: the number of the line of the first n-gram.
    """

    words: Tensor
    log_probs: Tensor
    backoffs: Tensor
    first_line: int


class ArpaFile:
    """An ARPA file that is read from the first line to the last.

    Args:
        path: the file, as text or as gzip.

    After `sections` has yielded the 1-grams, `words` has their words. `<UNK>` is read as `<unk>`,
    and where there is no `<unk>`, it is added as the last word.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.words: list[str] = []
        self.counts: list[int] = []
        self._places: dict[bytes, int] = {}
        self._line = 0  # lines that have been read
        self._done, self._start = 0, time.monotonic()

    def fail(self, line: int, message: str) -> NoReturn:
        raise ValueError(f"{self.path}: line {line}: {message}")

    def sections(self) -> Iterator[Section]:
        """Yield the n-grams of each order, from the 1-grams on."""
        with open(self.path, "rb") as raw:
            start = raw.read(512)
            raw.seek(0)
            for magic, format in OTHER_FORMATS.items():
                if start.startswith(magic):
                    self.fail(1, f"expected an ARPA file, as text or gzip, got {format}")
            is_gzip = start.startswith(b"\x1f\x8b")
            if not is_gzip and b"\0" in start:
                self.fail(1, "expected an ARPA file, as text or gzip, got a binary file")
            # The buffer finds the ends of lines in C, GzipFile in Python.
            self._file: BinaryIO = (
                io.BufferedReader(gzip.GzipFile(fileobj=raw), 2**20) if is_gzip else raw
            )
            following = self._read_counts()
            try:
                for n, count in enumerate(self.counts, 1):
                    self._expect(following, b"\\%d-grams:" % n)
                    yield self._read_section(n, count)
                    following = self._next_line()
            finally:
                self._show_progress(end=True)
            self._expect(following, b"\\end\\")

    def _read_lines(self, number: int) -> list[bytes]:
        """Return the next lines, fewer at the end of the file."""
        lines: list[bytes] = []
        try:
            lines.extend(islice(self._file, number))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.fail(self._line + len(lines) + 1, f"the gzip stream is broken: {error}")
        self._line += len(lines)
        return lines

    def _next_line(self) -> bytes:
        """Return the next line that is not empty, without the spaces around it; b"" at the end."""
        while lines := self._read_lines(1):
            if line := lines[0].strip():
                return line
        return b""

    def _expect(self, line: bytes, header: bytes) -> None:
        if line == header:
            return
        counted = " after all n-grams that \\data\\ counts" if self.words else ""
        self.fail(max(self._line, 1), f"expected {_shown(header)}{counted}, got {_shown(line)}")

    def _read_counts(self) -> bytes:
        """Read `\\data\\` and the number of n-grams of each order; return the line that follows."""
        while (line := self._next_line()) != b"\\data\\":
            if not line or line.startswith(b"\\"):
                self._expect(line, b"\\data\\")
        while match := re.fullmatch(rb"ngram\s+(\d+)\s*=\s*(\d+)", line := self._next_line()):
            n, count = map(int, match.groups())
            if n != len(self.counts) + 1:
                self.fail(
                    self._line, f"expected the count of {len(self.counts) + 1}-grams, got {n}"
                )
            self.counts.append(count)
        if not self.counts or not self.counts[0]:
            self.fail(self._line, "expected the number of 1-grams, as ngram 1=10")
        return line

    def _read_section(self, n: int, count: int) -> Section:
        """Read the n-grams of one order."""
        first_line, left = self._line + 1, count
        log_probs, backoffs = array("d"), array("d")
        columns = [array("q") for _ in range(n)]
        while left:
            lines = self._read_lines(min(left, BLOCK))
            block_line = self._line - len(lines) + 1
            if not lines:
                self.fail(self._line + 1, f"the file ends {left} {n}-grams before their count")
            lines, width = self._fill_backoffs(lines, n, block_line)
            fields = b"".join(lines).split()
            if n == 1:
                self._add_words(fields[1::width], block_line)
            try:
                log_probs.extend(_floats(fields[::width]))
                for i, column in enumerate(columns, 1):
                    column.extend(map(self._places.__getitem__, fields[i::width]))
                if width > n + 1:
                    backoffs.extend(_floats(fields[n + 1 :: width]))
                else:
                    backoffs.frombytes(bytes(8 * len(lines)))
            except (KeyError, ValueError):
                self._explain(lines, n, block_line)
            left -= len(lines)
            self._done += len(lines)
            self._show_progress()
        if n == 1 and UNKNOWN not in self._places:
            self._add_words([UNKNOWN], first_line)
            log_probs.append(MISSING_UNKNOWN)
            backoffs.append(0.0)
            columns[0].append(self._places[UNKNOWN])
        found = _as_tensor(log_probs), _as_tensor(backoffs)
        self._check_numbers(*found, n, first_line)
        words = torch.stack(list(map(_as_tensor, columns)), 1)
        return Section(words, found[0] * math.log(10), found[1] * math.log(10), first_line)

    def _fill_backoffs(self, lines: list[bytes], n: int, line: int) -> tuple[list[bytes], int]:
        """Return the lines and their number of fields, with a back-off weight if one has it.

        The lists of fields end one by one, so that the garbage collector never sees them.
        """
        widths = list(map(len, map(bytes.split, lines)))
        for i, width in enumerate(widths if not set(widths) <= {n + 1, n + 2} else ()):
            if width not in (n + 1, n + 2):
                counted = f"another one of the {self.counts[n - 1]} {n}-grams that \\data\\ counts"
                parts = f"a log-probability, {n} word{'s' * (n > 1)}, perhaps a back-off weight"
                got = _shown(lines[i].strip(), "an empty line")
                self.fail(line + i, f"expected {counted} ({parts}), got {got}")
        most = max(widths)
        if min(widths) < most:
            lines = [
                text if width == most else text.rstrip() + b" 0\n"
                for text, width in zip(lines, widths, strict=True)
            ]
        return lines, most

    def _add_words(self, names: list[bytes], line: int) -> None:
        """Append the words of 1-grams, of which the first is on this line."""
        names = [UNKNOWN if name == OTHER_UNKNOWN else name for name in names]
        first = len(self.words)
        self._places.update(zip(names, range(first, first + len(names)), strict=True))
        if len(self._places) - (OTHER_UNKNOWN in self._places) != first + len(names):
            seen = set(map(str.encode, self.words))
            for i, name in enumerate(names):
                if name in seen:
                    self.fail(line + i, f"the word {_shown(name)} is among the 1-grams twice")
                seen.add(name)
        try:
            self.words.extend(map(bytes.decode, names))
        except UnicodeDecodeError:
            i = next(i for i, name in enumerate(names) if "\ufffd" in name.decode(errors="replace"))
            self.fail(line + i, f"expected a word in UTF-8, got {names[i]!r}")
        if UNKNOWN in self._places:
            self._places[OTHER_UNKNOWN] = self._places[UNKNOWN]

    def _explain(self, lines: list[bytes], n: int, line: int) -> NoReturn:
        """Raise for the first line whose fields cannot be converted."""
        for i, row in enumerate(map(bytes.split, lines), line):
            for name, fields in (("log-probability", row[:1]), ("back-off weight", row[n + 1 :])):
                try:
                    list(_floats(fields))
                except ValueError:
                    self.fail(i, f"expected a {name}, got {_shown(fields[0])}")
            for word in row[1 : n + 1]:
                if word not in self._places:
                    self.fail(i, f"the word {_shown(word)} is not among the 1-grams")
        raise AssertionError("a block could not be converted, but each of its lines can be")

    def _check_numbers(self, log_probs: Tensor, backoffs: Tensor, n: int, line: int) -> None:
        """Raise for the first logarithm that is none of a probability or of a weight."""
        allowed = [
            (log_probs, log_probs <= 0, "a log-probability of at most 0"),
            (backoffs, backoffs.isfinite(), "a finite back-off weight"),
        ]
        if n == len(self.counts):
            expected = f"no back-off weight, as nothing follows {n}-grams"
            allowed.append((backoffs, backoffs == 0, expected))
        for numbers, are_right, expected in allowed:
            if (wrong := checks.first_index(~are_right)) is not None:
                self.fail(line + wrong[0], f"expected {expected}, got {numbers[wrong]:g}")

    def _show_progress(self, end: bool = False) -> None:
        """Show on a terminal how much has been read, if it takes more than a few seconds."""
        seconds = time.monotonic() - self._start
        if seconds < SECONDS_BEFORE_PROGRESS or not sys.stderr.isatty():
            return
        total = sum(self.counts)
        left = seconds * (total - self._done) / max(1, self._done)
        text = f"{self.path}: {self._done / total:.0%} of {total} n-grams, {left:.0f} s left"
        print(f"\r\x1b[K{'' if end else text}", end="", file=sys.stderr, flush=True)


def _floats(fields: list[bytes]) -> Iterator[float]:
    """Return the numbers of fields, or raise `ValueError`. Python's `float` takes 1_0 as 10."""
    if b"_" in b" ".join(fields):
        raise ValueError
    return map(float, fields)


def _as_tensor(numbers: array[float] | array[int]) -> Tensor:
    """Return an array as a tensor, which shares its memory."""
    dtype = torch.float64 if numbers.typecode == "d" else torch.int64
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype)


def _shown(text: bytes, empty: str = "the end of the file") -> str:
    """Return a line or a word as messages quote it."""
    if not text:
        return empty
    decoded = text.decode(errors="replace")
    return repr(decoded if len(decoded) <= 60 else f"{decoded[:57]}...").replace("\\\\", "\\")
