"""Pictures: bandwidth by width for the sweep of softmax, and milliseconds by size for other ops."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .case import DTYPE_NAMES, Case
from .measure import Machine
from .runner import Row

WIDTH, HEIGHT = 8, 4.8  # the size of a panel in inches
GROUP, BAR = 1.15, 0.28  # the least width of a group of bars, and of a bar, in inches
LEGEND = 6  # names in a line of the legend
# Without metadata, an SVG of the same data is the same file.
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
COLOURS = {
    "partita": "#c2185b",
    "partita-fast": "#c2185b",
    "partita-lean": "#f06292",
    "products": "#bdbdbd",
    "torch": "#ef6c00",
    "torch-linear": "#ffb74d",
    "compile": "#6a1b9a",
    "naive": "#757575",
    "quack": "#1565c0",
    "liger": "#2e7d32",
    "liger-cute": "#81c784",
    "cce": "#1565c0",
    "cce-exact": "#64b5f6",
    "koi": "#1565c0",
    "seqdist": "#2e7d32",
}


SWEEP = ("replay", "do_bench")


def panels(rows: Sequence[Row]) -> list[list[Row]]:
    """Return what panels show: the sweep, and each dtype of an op that has a caption."""
    sweep = [row for row in rows if row.part in SWEEP]
    kinds: dict[tuple[str, torch.dtype], list[Row]] = {}
    for row in rows:
        if row.case.caption and row.part == "total" and row.timing:
            kinds.setdefault((row.case.op, row.case.dtype), []).append(row)
    return [*[sweep] * bool(sweep), *kinds.values()]


def render(panels: Sequence[list[Row]], machine: Machine, format: str) -> bytes:
    """Return the picture as a file of this format; see `render_subplots`."""
    bars = [rows if rows[0].part not in SWEEP else [] for rows in panels]
    width = max(bars_width(len({row.case for row in rows}), len(rows)) for rows in bars)
    draw = [
        functools.partial(_bars if own else _sweep, rows=rows, machine=machine)
        for rows, own in zip(panels, bars, strict=True)
    ]
    return render_subplots(draw, width, format)


def bars_width(groups: int, bars: int) -> float:
    return max(WIDTH, GROUP * groups, BAR * bars)


def render_subplots(draw: Sequence[Callable[[Any], None]], width: float, format: str) -> bytes:
    """Return axes one below the other, each with its function, as a file of this format."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "partita", "font.size": 11}):
        figure = Figure(figsize=(width, HEIGHT * len(draw)), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, draw_on in zip(figure.subplots(len(draw), squeeze=False).flat, draw, strict=True):
            draw_on(axes)
        file = io.BytesIO()
        figure.savefig(
            file, format=format or None, metadata=NO_METADATA if format == "svg" else None
        )
    return file.getvalue()


def _sweep(axes: Any, rows: list[Row], machine: Machine) -> None:
    """Draw a line for each provider."""
    for name in dict.fromkeys(row.provider for row in rows):
        points = [
            (row.case.shape[-1], row.bandwidth / 1e9)
            for row in rows
            if row.provider == name and row.bandwidth is not None
        ]
        ours = name == "partita"
        axes.plot(
            *zip(*points, strict=True),
            label=name,
            color=COLOURS.get(name),
            linewidth=2.4 if ours else 1.4,
            zorder=3 if ours else 2,
        )
    axes.axhline(machine.copy / 1e9, color="black", linestyle="--", linewidth=1, label="copy")
    case = rows[0].case
    axes.set_title(f"{case.op}, {case.shape[0]:,} rows, fp32, {machine.name}")
    axes.set_xlabel("columns")
    axes.set_ylabel("bandwidth, GB/s (read + written)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", ncols=2)


def _two_a_line(case: Case) -> str:
    return " ×\n".join(case.size(case.sizes[i : i + 2]) for i in range(0, len(case.sizes), 2))


def grouped_bars(
    axes: Any,
    groups: Sequence[str],
    values: Mapping[str, Mapping[int, float]],
    title: str,
    label: str,
    *,
    least: Mapping[int, float] | None = None,
    colours: Mapping[str, str] = COLOURS,
) -> None:
    """Draw the bars of each name at the groups that have a value, with the value above.

    Dashed lines show the `least` values of some groups.
    """
    names, width = list(values), 0.84 / len(values)

    def position(name: str, group: int) -> float:
        present = [other for other in names if group in values[other]]
        return group + (present.index(name) - (len(present) - 1) / 2) * width

    for name, own in values.items():
        bars = axes.bar(
            [position(name, group) for group in own],
            list(own.values()),
            0.94 * width,
            label=name,
            color=colours.get(name),
        )
        axes.bar_label(
            bars,
            [f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in own.values()],
            padding=3,
            fontsize=7.5,
            rotation=90,  # values have room beside each other above narrow bars
        )
    if least:
        ends = ([group + side for group in least] for side in (-0.45, 0.45))
        style = {"color": "black", "linestyle": "--", "linewidth": 1}
        axes.hlines(list(least.values()), *ends, label="copy", **style)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xticks(range(len(groups)), groups, fontsize=9)
    axes.set_ylabel(label)
    axes.set_title(title)
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", ncols=LEGEND, fontsize=9)


def _bars(axes: Any, rows: list[Row], machine: Machine) -> None:
    """Draw a group of bars for each size, a bar for each provider, and a line at the limit."""
    cases = list(dict.fromkeys(row.case for row in rows))
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.timing:
            times.setdefault(row.provider, {})[cases.index(row.case)] = row.timing.median
    least = {
        group: 1e3 * limit.bytes / machine.bandwidth(limit.limit)
        for group, case in enumerate(cases)
        if (limit := case.moves.get("total"))
    }
    case = cases[0]
    title = f"{case.caption}, {DTYPE_NAMES[case.dtype]} {case.scores}, {machine.name}"
    groups = [_two_a_line(case) for case in cases]
    grouped_bars(axes, groups, times, title, "forward + backward, ms", least=least)
    measured = [time for own in times.values() for time in own.values()]
    shown = [*least.values(), *measured]
    bottom = max(min(shown), min(measured) / 20) / 2
    axes.set_ylim(bottom, 8 * max(shown))  # leaves room for the legend above the bars
    margin = max(0.6, 2 - len(cases) / 2)
    axes.set_xlim(-margin, len(cases) - 1 + margin)
    axes.set_xlabel(" × ".join(case.sizes))
