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
class Measurement:
    """A case by a provider.

    Fields:
        op, variant, provider: as in `HostCase`.
        unit: whose time is the unit of the ratio.
        host: the milliseconds of a call that is not waited for; None where the provider refused.
        waited: the milliseconds of a call and of waiting for the device.
        kernels: the number of kernels, copies and fills on the device; None where not counted.
        device_us: the microseconds that these take.
        note: why the case was not timed.
    """

    op: str
    variant: str
    provider: str
    unit: Unit
    host: Timing | None = None
    waited: Timing | None = None
    kernels: int | None = None
    device_us: float | None = None
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.op}, {self.variant}" if self.variant else self.op


@dataclass(frozen=True)
class FirstCall:
    """The first call of a fresh process.

    Fields:
        op, provider: what is called.
        empty, filled: the seconds with an empty and with a filled Triton cache, without the context
            of the GPU; None where the call failed, and for a provider without a cache.
        note: why there is no time.
    """

    op: str
    provider: str
    empty: float | None
    filled: float | None
    note: str


def machine_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu()


def _us(timing: Timing | None) -> str:
    """Return the least microseconds, as other programs of the machine only add to a time."""
    return "" if timing is None else f"{1e3 * timing.least:.0f}"


def ratio(row: Measurement, rows: Sequence[Measurement]) -> float | None:
    """Return the time of the host in units of another measurement, or None without both."""
    unit = next(
        (x.host for x in rows if Unit(x.op, x.provider, x.variant) == row.unit and x.host), None
    )
    return None if unit is None or row.host is None else row.host.least / unit.least


def _unit_name(unit: Unit) -> str:
    return f"{unit.provider} {unit.op}"


def tables(rows: Sequence[Measurement], first_calls: Sequence[FirstCall]) -> Iterator[Table]:
    """Yield a table of times for each op, and that of first calls where there are some."""
    header = ["case", "provider", "host", "waited for", "ratio", "kernels", "device", ""]
    for op in dict.fromkeys(row.op for row in rows):
        own = [row for row in rows if row.op == op]
        title = f"{op}: forward + backward of a tiny input, us; ratio to {_unit_name(own[0].unit)}"
        yield Table(title, header, [_cells(row, rows) for row in own], left=2)
    if first_calls:
        cells = [
            [call.op, call.provider, _seconds(call.empty), _seconds(call.filled), call.note]
            for call in first_calls
        ]
        header = ["op", "provider", "empty cache, s", "filled cache, s", ""]
        yield Table("The first call of a process", header, cells, left=2)


def _cells(row: Measurement, rows: Sequence[Measurement]) -> list[str]:
    factor = ratio(row, rows)
    return [
        row.variant or "the usual one",
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
    path: Path, rows: Sequence[Measurement], first_calls: Sequence[FirstCall], machine: str
) -> None:
    """Write the machine, the versions, the measurements and the first calls."""
    records = [_record(row, ratio(row, rows)) for row in rows]
    for call in first_calls:
        times = {"empty_cache_s": call.empty, "filled_cache_s": call.filled}
        numbers = {name: f"{value:.4g}" for name, value in times.items() if value is not None}
        record = {"op": call.op, "variant": FIRST_CALL, "provider": call.provider}
        records.append({**record, **numbers, "note": call.note})
    write_records(path, COLUMNS, [{"op": "machine", "provider": machine}], records)


def _record(row: Measurement, factor: float | None) -> dict[str, object]:
    record: dict[str, object] = {
        "op": row.op,
        "variant": row.variant,
        "provider": row.provider,
        "note": row.note,
    }
    for name, timing in (("host", row.host), ("waited", row.waited)):
        if timing is not None:
            record[f"{name}_us"] = f"{1e3 * timing.least:.5g}"
            record[f"{name}_median_us"] = f"{1e3 * timing.median:.5g}"
    if factor is not None:
        record |= {"ratio": f"{factor:.3f}", "unit": _unit_name(row.unit)}
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


def _group(op: str, variant: str) -> str:
    """Return the label below a group of bars, in short lines."""
    name = op.replace("_", "_\n", 1) if len(op) > LABEL else op
    for word in ("at", "on"):
        variant = variant.replace(f" {word} ", f"\n{word} ")
    return "\n".join(filter(None, (name, variant)))


def draw(path: Path, rows: Sequence[Measurement], machine: str) -> None:
    """Write the picture in the format that the name of the file ends with.

    Raises:
        ImportError: matplotlib is not installed.
    """
    bars = [
        (_group(row.op, row.variant), row.provider, 1e3 * row.host.least)
        for row in rows
        if row.host is not None
    ]
    if bars:
        picture.write(path, render(bars, machine, path.suffix.removeprefix(".")))


def render(bars: Sequence[Bar], machine: str, format: str) -> bytes:
    """Return the picture of some bars as a file of this format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    groups = list(dict.fromkeys(group for group, _, _ in bars))
    values: dict[str, dict[int, float]] = {}
    for group, provider, microseconds in bars:
        values.setdefault(provider, {})[groups.index(group)] = microseconds

    def draw_bars(subplots: Sequence[Any]) -> None:
        (axes,) = subplots
        picture.grouped_bars(axes, values, colours=COLOURS, gaps=False, upright=False)
        axes.set_yscale("log")
        times = [bar[2] for bar in bars]
        axes.set_ylim(min(times) / 3, 4 * max(times))  # leaves room for the legend
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.set_xticks(range(len(groups)), groups, fontsize=9)
        axes.set_ylabel("host, forward + backward, µs")
        axes.set_title(f"What a call costs the host, {machine}")
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
        axes.legend(loc="upper left", ncols=picture.LEGEND, fontsize=9)

    width = max(picture.WIDTH, picture.GROUP * len(groups), picture.BAR * len(bars))
    return picture.render_subplots(draw_bars, 1, width, format)
