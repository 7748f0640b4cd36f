"""Read the tables of this folder, for the figures that pages quote."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
OURS = "partita"
# No peers: PyTorch itself, what no method can do without, a loss that filters, and Partita's own.
NO_PEERS = (
    *("torch", "products", "copy", "naive", "one shard", "cce"),
    *("causal_lm_loss", "fuse"),
)
NAMES = {
    "compile": "`torch.compile`",
    "quack": "quack",
    "liger": "Liger",
    "liger-cute": "Liger in CuTe",
    "megatron": "Megatron's way",
}
GIB = 2.0**30
Record = dict[str, str]
FIGURES: dict[str, Callable[[], str]] = {}


def figure(function: Callable[[], str]) -> Callable[[], str]:
    """Give the pages a figure to quote, by the name of its function."""
    FIGURES[function.__name__] = function
    return function


@cache
def _records(name: str) -> tuple[Record, ...]:
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def rows(name: str, **wanted: object) -> list[Record]:
    """Return the rows of a table that have these values."""
    return [
        row
        for row in _records(name)
        if all(row[key] == str(value) for key, value in wanted.items())
    ]


def row(name: str, **wanted: object) -> Record:
    """Return the only row with these values.

    Raises:
        LookupError: there is none, or there are several.
    """
    found = rows(name, **wanted)
    if len(found) != 1:
        raise LookupError(f"{name}: expected one row with {wanted}, got {len(found)}")
    return found[0]


def card(name: str) -> str:
    """Return the short name of the GPU of a table, such as H100."""
    return row(name, op="machine", part="copy")["provider"].split()[1]


def number(name: str, column: str, **wanted: object) -> float:
    return float(row(name, **wanted)[column])


def digits(value: float, precision: int = 3) -> str:
    """Return a number rounded to so many digits, without an exponent."""
    rounded = float(f"{value:.{precision}g}")
    exponent = math.floor(math.log10(abs(rounded))) if rounded else 0
    return f"{rounded:,.{max(precision - 1 - exponent, 0)}f}"


def ratio(value: float) -> str:
    """Return a ratio with the digits that tell it from 1."""
    return f"{digits(value, 3 if value < 2 else 2)} ×"


def error(value: float, precision: int = 1) -> str:
    """Return an error with so many digits, such as 5e-7; from 1 on with two digits at least."""
    if value >= 1:
        return digits(value, max(precision, 2))
    mantissa, exponent = f"{value:.{precision - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def span(values: Iterable[float], precision: int = 2) -> str:
    """Return the least and the greatest of some numbers."""
    values = sorted(values)
    first, last = digits(values[0], precision), digits(values[-1], precision)
    return first if first == last else f"{first} to {last}"


def best_peer(name: str, column: str = "median_ms", **wanted: object) -> tuple[str, float]:
    """Return the fastest peer that was timed, and its time."""
    timed = [
        (float(each[column]), each["provider"])
        for each in rows(name, **wanted)
        if each[column] and not each["provider"].startswith(OURS)
        if each["provider"] not in NO_PEERS
    ]
    if not timed:
        raise LookupError(f"{name}: no peer with {wanted}")
    time, provider = min(timed)
    return NAMES.get(provider, provider), time


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown with a line break on both sides."""
    text = [header, ["---"] * len(header), *lines]
    return "\n" + "\n".join("| " + " | ".join(line) + " |" for line in text) + "\n"
