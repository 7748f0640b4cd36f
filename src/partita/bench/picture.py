"""The picture of a sweep: bandwidth against width, a line a provider."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .measure import Machine
from .runner import Row

COLOURS = {"partita": "#c2185b", "torch": "#ef6c00", "compile": "#6a1b9a", "naive": "#757575", "quack": "#1565c0", "liger": "#2e7d32"}


def sweep(rows: Sequence[Row]) -> list[Row]:
    """The rows that the picture shows."""
    return [row for row in rows if row.part == "replay"]


def draw(path: Path, rows: Sequence[Row], machine: Machine) -> None:
    """Write the picture; the end of the file's name chooses the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "partita", "font.size": 11}):
        figure = Figure(figsize=(8, 4.8), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        for name in dict.fromkeys(row.provider for row in rows):
            points = [(row.case.columns, row.bandwidth / 1e9) for row in rows if row.provider == name and row.bandwidth is not None]
            ours = name == "partita"
            axes.plot(*zip(*points, strict=True), label=name, color=COLOURS.get(name), linewidth=2.4 if ours else 1.4, zorder=3 if ours else 2)
        axes.axhline(machine.copy / 1e9, color="black", linestyle="--", linewidth=1, label="copy")
        case = rows[0].case
        axes.set_title(f"{case.op}, {case.rows:,} rows, fp32, {machine.name}")
        axes.set_xlabel("columns")
        axes.set_ylabel("bandwidth, GB/s (read + written)")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", ncols=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
