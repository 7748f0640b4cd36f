"""Draw pictures of the tables in this folder, and one that is computed by this script.

    python docs/bench/figures.py

`softmax.svg` and `cross_entropy.svg` show rows.csv, `ctc_exactness.svg` and `ctc_crf.svg` show
ctc.csv, and `parallel.svg` shows parallel.csv and the arithmetic of its page. `chain.svg`,
`ctc.svg`, `host.svg`, `linear_budget.svg` and `linear_cross_entropy.svg` show the tables of their
names. `row_exactness.svg` and its table are arithmetic in fp32 on the CPU: two ways to form a loss
and an entropy. `chain_exactness.svg` comes from `examples/chain_exactness.py`.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parent))
import figures_compared
from figures_compared import CARD
from scaling import loss_ms

from partita.bench import host
from partita.bench.picture import COLOURS

HERE = Path(__file__).parent
Record = dict[str, str]


def rows_of(name: str, **wanted: str) -> list[Record]:
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return [
            row
            for row in csv.DictReader(file)
            if all(row[key] == value for key, value in wanted.items())
        ]


def drawn(path: Path, panels: int, width: float, draw: Callable[[Sequence[Axes]], None]) -> None:
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "partita", "font.size": 10}):
        figure = Figure(figsize=(width * panels, 3.9), layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.subplots(1, panels, squeeze=False)[0])
        figure.savefig(path, metadata={"Date": None})


def line(axes: Axes, name: str, points: Sequence[tuple[float, float]], **options: Any) -> None:
    style = {
        "color": COLOURS.get(name),
        "linewidth": 2.4 if name.startswith("partita") else 1.4,
        "marker": "o",
        "markersize": 4,
    }
    label = figures_compared.NAMES.get(name, name)
    axes.plot(*zip(*sorted(points), strict=True), label=label, **(style | options))
    axes.grid(alpha=0.3)


def cross_entropy(panels: Sequence[Axes]) -> None:
    """Draw the share of the copy bandwidth by classes, for the loss and its gradient."""
    for axes, dtype in zip(panels, ("fp32", "bf16"), strict=True):
        rows = [
            row
            for row in rows_of("rows.csv", op="cross_entropy", part="total", dtype=dtype)
            if row["fraction"]
        ]
        for name in dict.fromkeys(row["provider"] for row in rows):
            if name != "partita-inplace":
                line(
                    axes,
                    name,
                    [
                        (int(row["columns"]), 100 * float(row["fraction"]))
                        for row in rows
                        if row["provider"] == name
                    ],
                )
        axes.set(
            xscale="log",
            title=f"cross-entropy with its gradient, {dtype}",
            xlabel="classes",
            xlim=(7000, 1_000_000),  # with room for the names
            ylim=(0, 100),
        )
        axes.set_xticks(
            [8192, 16384, 32768, 131072, 262144],
            ["8 k", "16 k", "32 k", "128 k", "256 k"],
            minor=False,
        )
        axes.set_xticks([], minor=True)
        axes.spines[["top", "right"]].set_visible(False)
        figures_compared.label_ends(axes, 5)
    panels[0].set_ylabel(f"% of the copy bandwidth of one {CARD}\n(higher is better)")


def ctc_exactness(panels: Sequence[Axes]) -> None:
    """Draw the greatest error of a posterior by the length of the input, with untimed results."""
    rows = [
        row for row in rows_of("ctc.csv", op="ctc") if row["error"] and row["part"] in ("total", "")
    ]
    (axes,) = panels
    for name in dict.fromkeys(row["provider"] for row in rows):
        found = [
            (int(row["steps"]), float(row["error"])) for row in rows if row["provider"] == name
        ]
        line(axes, name, found, linestyle="none")
    axes.axhline(2e-6, color="black", linestyle="--", linewidth=1, label="contract, 2e-6")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="steps",
        ylabel="greatest error of a posterior",
        title=f"CTC against fp64, logits in fp32, NVIDIA {CARD}",
    )
    axes.legend(fontsize=9, loc="upper left")


def linear_budget(panels: Sequence[Axes]) -> None:
    """Draw time against workspace."""
    (axes,) = panels
    size = {"tokens": "16384", "hidden": "2048", "classes": "262144"}
    for provider in ("partita", "compile"):
        found = rows_of("linear_budget.csv", provider=provider, **size)
        points = [(float(row["workspace_gib"]), float(row["median_ms"])) for row in found]
        options = {"linestyle": "none"} if provider == "compile" else {}
        line(axes, provider, points, **options)
    products = float(rows_of("linear_budget.csv", **size)[0]["products_ms"])
    axes.axhline(products, color=COLOURS["products"], linestyle="--", label="three products")
    axes.set(xlabel="workspace, GiB", ylabel="forward + backward, ms", ylim=(0, None))
    title = f"16,384 tokens of 2,048, 262,144 classes, bf16, one {CARD}: lower is better"
    axes.set_title(title, fontsize=10)
    axes.legend()


def parallel(panels: Sequence[Axes]) -> None:
    """Draw the losses and their memory by the number of GPUs, with others and perfect scaling."""
    rows, linear = (
        rows_of("parallel.csv", op="cross_entropy"),
        rows_of("parallel.csv", op="linear_cross_entropy"),
    )
    colours = COLOURS | {
        "loss_parallel": COLOURS["torch"],
        "megatron": COLOURS["koi"],
        "one shard": COLOURS["products"],
    }
    worlds = sorted({int(row["gpus"]) for row in rows})
    names = list(dict.fromkeys(row["provider"] for row in rows))
    for axes, column in ((panels[0], "median_ms"), (panels[2], "extra_gib")):
        for i, name in enumerate(names):
            own = [row for row in rows if row["provider"] == name]
            values = [float(row[column]) for row in own]
            positions = [worlds.index(int(row["gpus"])) + 0.2 * i for row in own]
            label = figures_compared.NAMES.get(name, name)
            bars = axes.bar(positions, values, 0.18, label=label, color=colours[name])
            axes.bar_label(bars, [f"{value:.3g}" for value in values], fontsize=8)
        axes.set_xticks(
            [position + 0.3 for position in range(len(worlds))],
            [f"{world} GPUs" for world in worlds],
        )
    panels[0].set(
        yscale="log",
        ylim=(0.03, 60),
        ylabel="forward + backward, ms",
        title="cross-entropy, 8,192 × 131,072 logits",
    )
    panels[2].set(
        ylim=(0, 9),
        ylabel="GiB on each GPU",
        title="memory beside these logits",
    )
    points = [(int(row["gpus"]), float(row["median_ms"])) for row in linear]
    line(panels[1], "partita", points)
    line(
        panels[1],
        "perfect scaling",
        [(gpus, points[0][1] / gpus) for gpus in (1, 512)],
        color="black",
        linestyle="--",
        marker="none",
    )
    line(
        panels[1],
        "on paper: vocabulary over all",
        [(gpus, loss_ms(gpus, 1)) for gpus in (8, 64)],
        color=COLOURS["cce"],
        linestyle=":",
    )
    line(
        panels[1],
        "on paper: tokens over machines",
        [(8 * n, loss_ms(8, n)) for n in (1, 8, 64)],
        color=COLOURS["liger"],
        linestyle=":",
    )
    panels[1].set(
        xscale="log",
        yscale="log",
        ylabel="forward + backward, ms",
        title="from hidden states, 8,192 × 4,096 × 128,256",
    )
    ticks = [1, 2, 4, 8, 64, 512]
    panels[1].set_xlabel("GPUs")
    panels[1].set_xticks(ticks, [str(tick) for tick in ticks])
    panels[1].set_xticks([], minor=True)
    for axes in panels[:2]:
        axes.yaxis.set_major_formatter("{x:g}")
    for axes in panels:
        axes.legend(fontsize=8, loc="upper right")


OFFSETS = (1.0, 10.0, 100.0, 1_000.0, 10_000.0, 100_000.0)


def row_errors() -> list[Record]:
    """Compute the greatest errors of a loss and an entropy in fp32, formed in two ways.

    The logits lie around an offset, and the truth is fp64 of the same logits.
    """
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
                "entropy: log d - Σ e (x - m) / d": d.log()
                - (e * (x - m)).sum(-1, keepdim=True) / d,
            }

        truth = formed(x.double())
        result += [
            {
                "offset": f"{offset:g}",
                "formed as": name,
                "error": f"{(value - truth[name]).abs().max():.3g}",
            }
            for name, value in formed(x).items()
        ]
    return result


def row_exactness(errors: Sequence[Record]) -> Callable[[Sequence[Axes]], None]:
    def draw(panels: Sequence[Axes]) -> None:
        for axes, what in zip(panels, ("loss", "entropy"), strict=True):
            for i, name in enumerate(
                dict.fromkeys(
                    row["formed as"] for row in errors if row["formed as"].startswith(what)
                )
            ):
                points = [
                    (float(row["offset"]), float(row["error"]))
                    for row in errors
                    if row["formed as"] == name
                ]
                axes.plot(
                    *zip(*points, strict=True),
                    label=name.partition(": ")[2],
                    color=(COLOURS["naive"], COLOURS["partita"])[i],
                    marker="o",
                    markersize=4,
                )
            axes.set(
                xscale="log",
                yscale="log",
                xlabel="offset of the logits",
                title=f"{what} in fp32, 1,000 classes",
            )
            axes.grid(alpha=0.3)
            axes.legend(fontsize=9, loc="upper left")
        panels[0].set_ylabel("greatest error against fp64")

    return draw


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw pictures of the tables in this folder.")
    parser.add_argument(
        "--out", type=Path, default=HERE, help="folder for the pictures (default: this one)"
    )
    out = parser.parse_args(argv).out
    errors = row_errors()
    with (out / "row_exactness.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(errors[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(errors)
    drawn(out / "softmax.svg", 1, 7.4, figures_compared.softmax)
    drawn(out / "cross_entropy.svg", 2, 4.6, cross_entropy)
    drawn(out / "linear_cross_entropy.svg", 1, 9.6, figures_compared.linear_cross_entropy)
    drawn(out / "ctc.svg", 1, 7.4, figures_compared.ctc)
    drawn(out / "ctc_exactness.svg", 1, 6.4, ctc_exactness)
    drawn(out / "ctc_crf.svg", 2, 4.6, figures_compared.ctc_crf)
    drawn(out / "chain.svg", 1, 7.4, figures_compared.chain)
    drawn(out / "linear_budget.svg", 1, 6.4, linear_budget)
    drawn(out / "parallel.svg", 3, 4.2, parallel)
    drawn(out / "row_exactness.svg", 2, 4.6, row_exactness(errors))
    (machine,) = rows_of("host.csv", op="machine")
    picture = host.render(rows_of("host.csv"), machine["provider"], "svg")
    (out / "host.svg").write_bytes(picture)


if __name__ == "__main__":
    main()
