"""Draw the pictures that show tables of this folder in another way, and one that is computed on the spot.

    python docs/bench/figures.py

`cross_entropy.svg` is of h200.csv, `ctc_exactness.svg` and `ctc_crf.svg` are of ctc.csv. `row_exactness.svg` and its table are arithmetic in fp32 on the
CPU: two ways to form a loss and an entropy. The other pictures here come from `partita bench` and `examples/chain_exactness.py`.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from partita.bench.picture import COLOURS

HERE = Path(__file__).parent
Record = dict[str, str]


def rows_of(name: str, **wanted: str) -> list[Record]:
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]


def drawn(path: Path, panels: int, width: float, draw: Callable[[Sequence[Axes]], None]) -> None:
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "partita", "font.size": 10}):
        figure = Figure(figsize=(width * panels, 3.9), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.subplots(1, panels, squeeze=False)[0])
        figure.savefig(path, metadata={"Date": None})


def line(axes: Axes, name: str, points: Sequence[tuple[float, float]], **options: Any) -> None:
    ours = name.startswith("partita")
    axes.plot(*zip(*sorted(points), strict=True), label=name, color=COLOURS.get(name), linewidth=2.4 if ours else 1.4, marker="o", markersize=4, **options)
    axes.grid(alpha=0.3)


def cross_entropy(panels: Sequence[Axes]) -> None:
    """Loss and gradient: the share of the copy bandwidth, by classes."""
    for axes, dtype in zip(panels, ("fp32", "bf16"), strict=True):
        rows = [row for row in rows_of("h200.csv", op="cross_entropy", part="total", dtype=dtype) if row["fraction"]]
        for name in dict.fromkeys(row["provider"] for row in rows):
            if name != "partita-inplace":
                line(axes, name, [(int(row["columns"]), 100 * float(row["fraction"])) for row in rows if row["provider"] == name])
        axes.set(xscale="log", title=f"cross-entropy with its gradient, {dtype}", xlabel="classes", ylim=(0, 105))
        axes.set_xticks([8192, 16384, 32768, 131072, 262144], ["8 k", "16 k", "32 k", "128 k", "256 k"], minor=False)
        axes.set_xticks([], minor=True)
    panels[0].set_ylabel("% of the copy bandwidth of one H200")
    panels[0].legend(ncols=3, fontsize=9, loc="lower center")


def ctc_exactness(panels: Sequence[Axes]) -> None:
    """The greatest error of a posterior, by the length of the input; what was too wrong to be timed too."""
    rows = [row for row in rows_of("ctc.csv", op="ctc") if row["error"] and row["part"] in ("total", "")]
    (axes,) = panels
    for name in dict.fromkeys(row["provider"] for row in rows):
        found = [(int(row["steps"]), float(row["error"])) for row in rows if row["provider"] == name]
        line(axes, name, found, linestyle="none")
    axes.axhline(2e-6, color="black", linestyle="--", linewidth=1, label="contract, 2e-6")
    axes.set(xscale="log", yscale="log", xlabel="steps", ylabel="greatest error of a posterior", title="CTC against fp64, logits in fp32, NVIDIA H200")
    axes.legend(fontsize=9, loc="upper left")


def ctc_crf(panels: Sequence[Axes]) -> None:
    """Time and memory."""
    rows = rows_of("ctc.csv", op="ctc_crf", part="total")
    names = [row["provider"] for row in rows]
    columns = (("median_ms", "forward + backward, ms", 1.0), ("extra_memory_bytes", "memory beside the scores, GiB", 2.0**30))
    for axes, (column, label, unit) in zip(panels, columns, strict=True):
        values = [float(row[column]) / unit for row in rows]
        bars = axes.barh(names, values, color=[COLOURS[name] for name in names], height=0.6)
        axes.bar_label(bars, [f"{value:,.3g}" for value in values], padding=3, fontsize=9)
        axes.set(xlabel=label, **({"xscale": "log", "xlim": (1, 4 * max(values))} if column == "median_ms" else {"xlim": (0, 1.15 * max(values))}))
        axes.invert_yaxis()
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3, axis="x")
    panels[0].set_title("CTC-CRF, 2,000 steps × 64 sequences × 4⁵ k-mers, fp32, NVIDIA H200", loc="left")


OFFSETS = (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0)


def row_errors() -> list[Record]:
    """Of fp32 logits around an offset, against fp64 of the same logits: the greatest error of a loss and of an entropy, formed in two ways."""
    noise = torch.randn(256, 1000, generator=torch.Generator().manual_seed(0))
    result = []
    for offset in OFFSETS:
        x = noise + offset
        labels = torch.zeros(len(x), 1, dtype=torch.int64)

        def formed(x: torch.Tensor, labels: torch.Tensor = labels) -> dict[str, torch.Tensor]:
            m = x.amax(-1, keepdim=True)
            e = (x - m).exp()
            d = e.sum(-1, keepdim=True)
            logz, p = m + d.log(), e / d
            return {
                "loss: log Z - x": logz - x.gather(-1, labels),
                "loss: log d + (m - x)": d.log() + (m - x.gather(-1, labels)),
                "entropy: log Z - Σ p x": logz - (p * x).sum(-1, keepdim=True),
                "entropy: log d - Σ e (x - m) / d": d.log() - (e * (x - m)).sum(-1, keepdim=True) / d,
            }

        truth = formed(x.double())
        result += [{"offset": f"{offset:g}", "formed as": name, "error": f"{(value - truth[name]).abs().max():.3g}"} for name, value in formed(x).items()]
    return result


def row_exactness(errors: Sequence[Record]) -> Callable[[Sequence[Axes]], None]:
    def draw(panels: Sequence[Axes]) -> None:
        for axes, what in zip(panels, ("loss", "entropy"), strict=True):
            for i, name in enumerate(dict.fromkeys(row["formed as"] for row in errors if row["formed as"].startswith(what))):
                points = [(float(row["offset"]), float(row["error"])) for row in errors if row["formed as"] == name]
                axes.plot(*zip(*points, strict=True), label=name.partition(": ")[2], color=(COLOURS["naive"], COLOURS["partita"])[i], marker="o", markersize=4)
            axes.set(xscale="log", yscale="log", xlabel="offset of the logits", title=f"{what} in fp32, 1,000 classes")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=9, loc="upper left")
        panels[0].set_ylabel("greatest error against fp64")

    return draw


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw what the tables in this folder say.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the pictures (default: this one)")
    out = parser.parse_args(argv).out
    errors = row_errors()
    with (out / "row_exactness.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(errors[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(errors)
    drawn(out / "cross_entropy.svg", 2, 4.6, cross_entropy)
    drawn(out / "ctc_exactness.svg", 1, 6.4, ctc_exactness)
    drawn(out / "ctc_crf.svg", 2, 4.6, ctc_crf)
    drawn(out / "row_exactness.svg", 2, 4.6, row_exactness(errors))


if __name__ == "__main__":
    main()
