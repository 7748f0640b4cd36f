"""The results of `partita bench host`: tables, CSV and a picture."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..cli.console import Table
from ..cli.info import cpu
from . import picture
from .host_cases import Unit
from .host_trial import Trial
from .measure import Timing
from .report import write_records

FIRST_CALL = "first call"
LABEL = 14  # letters of a name in the picture, before it gets a second line
# All peers are in one picture here, so their colours differ.
COLOURS = {**picture.COLOURS, "koi": "#64b5f6", "seqdist": "#81c784"}
COLUMNS = (
    "op",
    "variant",
    "provider",
    "host_us",
    "host_median_us",
    "waited_us",
    "waited_median_us",
    "ratio",
    "unit",
    "kernels",
    "device_us",
    "empty_cache_s",
    "filled_cache_s",
    "note",
)


@dataclass(frozen=True)
class FirstCall:
    """The first call of a fresh process, in seconds without the context of the GPU."""

    op: str
    provider: str
    empty: float | None  # with an empty Triton cache; None where the call failed
    filled: float | None  # with a filled one; None for a provider without a cache
    note: str  # why there is no time


def machine_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu()


def _us(timing: Timing | None) -> str:
    """Return the least microseconds, as other programs of the machine only add to a time."""
    return "" if timing is None else f"{1e3 * timing.least:.0f}"


def ratio(row: Trial, rows: Sequence[Trial]) -> float | None:
    """Return the time of the host in units of another measurement, or None without both."""
    unit = next((x.host for x in rows if x.measured == row.case.unit and x.host), None)
    return None if unit is None or row.host is None else row.host.least / unit.least


def _unit_name(unit: Unit) -> str:
    return f"{unit.provider} {unit.op}"


def tables(rows: Sequence[Trial], first_calls: Sequence[FirstCall]) -> Iterator[Table]:
    """Yield a table of times for each op, and that of first calls where there are some."""
    header = ["case", "provider", "host", "waited for", "ratio", "kernels", "device", ""]
    for op in dict.fromkeys(row.case.op for row in rows):
        own = [row for row in rows if row.case.op == op]
        unit = _unit_name(own[0].case.unit)
        title = f"{op}: forward + backward of a tiny input, us; ratio to {unit}"
        yield Table(title, header, [_cells(row, rows) for row in own], left=2)
    if first_calls:
        cells = [
            [call.op, call.provider, _seconds(call.empty), _seconds(call.filled), call.note]
            for call in first_calls
        ]
        header = ["op", "provider", "empty cache, s", "filled cache, s", ""]
        yield Table("The first call of a process", header, cells, left=2)


def _cells(row: Trial, rows: Sequence[Trial]) -> list[str]:
    factor = ratio(row, rows)
    return [
        row.case.variant or "the usual one",
        row.provider,
        _us(row.host),
        _us(row.waited),
        "" if factor is None else f"{factor:.2f}",
        "" if row.kernels is None else str(row.kernels),
        "" if row.device_us is None else f"{row.device_us:.0f}",
        row.note,
    ]


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def write_csv(
    path: Path, rows: Sequence[Trial], first_calls: Sequence[FirstCall], machine: str
) -> None:
    records = [_record(row, ratio(row, rows)) for row in rows]
    for call in first_calls:
        times = {"empty_cache_s": call.empty, "filled_cache_s": call.filled}
        numbers = {name: f"{value:.4g}" for name, value in times.items() if value is not None}
        record = {"op": call.op, "variant": FIRST_CALL, "provider": call.provider}
        records.append({**record, **numbers, "note": call.note})
    write_records(path, COLUMNS, [{"op": "machine", "provider": machine}], records)


def _record(row: Trial, factor: float | None) -> dict[str, object]:
    record: dict[str, object] = {**row.measured._asdict(), "note": row.note}
    for name, timing in (("host", row.host), ("waited", row.waited)):
        if timing is not None:
            record[f"{name}_us"] = f"{1e3 * timing.least:.5g}"
            record[f"{name}_median_us"] = f"{1e3 * timing.median:.5g}"
    if factor is not None:
        record |= {"ratio": f"{factor:.3f}", "unit": _unit_name(row.case.unit)}
    if row.kernels is not None and row.device_us is not None:
        record |= {"kernels": row.kernels, "device_us": f"{row.device_us:.5g}"}
    return record


# The bars of the picture: the name of a group, a provider, and microseconds.
Bar = tuple[str, str, float]


def bars_of_csv(path: Path) -> tuple[str, list[Bar]]:
    """Return the name of the machine and the bars of a CSV that `write_csv` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        records = list(csv.DictReader(file))
    machine = next(record["provider"] for record in records if record["op"] == "machine")
    return machine, [
        (_group(record["op"], record["variant"]), record["provider"], float(record["host_us"]))
        for record in records
        if record["host_us"]
    ]


def bars_of(rows: Sequence[Trial]) -> list[Bar]:
    return [
        (_group(row.case.op, row.case.variant), row.provider, 1e3 * row.host.least)
        for row in rows
        if row.host
    ]


def _group(op: str, variant: str) -> str:
    """Return the label below a group of bars, in short lines."""
    name = op.replace("_", "_\n", 1) if len(op) > LABEL else op
    for word in ("at", "on"):
        variant = variant.replace(f" {word} ", f"\n{word} ")
    return "\n".join(filter(None, (name, variant)))


def render(bars: Sequence[Bar], machine: str, format: str) -> bytes:
    """Return the picture of some bars as a file of this format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    groups = list(dict.fromkeys(group for group, _, _ in bars))
    values: dict[str, dict[int, float]] = {}
    for group, provider, microseconds in bars:
        values.setdefault(provider, {})[groups.index(group)] = microseconds

    def draw(axes: Any) -> None:
        title, label = f"What a call costs the host, {machine}", "host, forward + backward, µs"
        options: dict[str, Any] = {"colours": COLOURS, "gaps": False, "upright": False}
        picture.grouped_bars(axes, groups, values, title, label, **options)
        times = [bar[2] for bar in bars]
        axes.set_ylim(min(times) / 3, 4 * max(times))  # leaves room for the legend

    return picture.render_subplots([draw], picture.bars_width(len(groups), len(bars)), format)
