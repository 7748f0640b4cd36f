"""Pictures that compare providers: losses of rows by bandwidth or by products, and speed-ups."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from quoted_rows import card, digits

from partita.bench.picture import COLOURS

HERE = Path(__file__).parent
Record = dict[str, str]
CARD = card("rows.csv")
NAMES = {
    "partita": "Partita",
    "partita-fast": "Partita",
    "partita-lean": "Partita, least memory",
    "torch": "PyTorch",
    "compile": "torch.compile",
    "naive": "the formula in PyTorch",
    "quack": "QuACK",
    "liger": "Liger",
    "liger-cute": "Liger, CuTe",
    "cce": "cut-cross-entropy",
    "cce-exact": "cut-cross-entropy, exact",
    "seqdist": "seqdist",
    "koi": "koi",
    "loss_parallel": "loss_parallel",
    "megatron": "Megatron",
}
LINEAR_COLOURS = COLOURS | {"quack": "#00838f"}  # cut-cross-entropy has QuACK's colour elsewhere
# Steps, sequences, classes and longest target of ctc.csv; a step is 20 ms where there is audio.
CASES = {
    ("1000", "64", "32", "200"): "speech, letters",
    ("150", "128", "5000", "30"): "speech, word pieces",
    ("2000", "16", "500", "300"): "long speech, 500 pieces",
    ("30000", "1", "32", "2500"): "ten minutes of audio",
    ("500", "128", "20", "100"): "lines of handwriting",
    ("4000", "256", "5", "500"): "basecaller, CTC",
}


def totals(name: str, op: str) -> list[Record]:
    """Return the rows of a table for loss and gradient together."""
    with (HERE / name).open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["op"] == op and row["part"] == "total"]


def label_ends(axes: Axes, gap: float) -> None:
    """Write the name of each line at its right end, with at least `gap` between two names."""
    lines = sorted(axes.lines, key=lambda line: -float(line.get_ydata()[-1]))  # type: ignore[index]
    height = float("inf")
    for line in lines:
        height = min(float(line.get_ydata()[-1]), height - gap)  # type: ignore[index]
        axes.annotate(
            str(line.get_label()),
            (line.get_xdata()[-1], height),  # type: ignore[index]
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=line.get_color(),
            weight="bold" if line.get_label() == "Partita" else "normal",
        )


def softmax(panels: Sequence[Axes]) -> None:
    """Draw the bandwidth by the width of a row, with the copy bandwidth of the machine."""
    (axes,) = panels
    with (HERE / "rows.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    copy = next(float(row["gb_per_s"]) for row in rows if row["part"] == "copy")
    rows = [row for row in rows if row["op"] == "softmax" and row["part"] == "replay"]
    for name in dict.fromkeys(row["provider"] for row in rows):
        points = [
            (int(row["columns"]), float(row["gb_per_s"]))
            for row in rows
            if row["provider"] == name and row["gb_per_s"]
        ]
        width = 2.4 if name == "partita" else 1.4
        axes.plot(
            *zip(*points, strict=True), label=NAMES[name], color=COLOURS[name], linewidth=width
        )
    right = max(int(row["columns"]) for row in rows)
    axes.plot([0, right], [copy, copy], color="black", linestyle="--", linewidth=1, label="a copy")
    axes.set(
        xlim=(0, 1.32 * right),
        ylim=(0, 1.1 * copy),
        xlabel="columns",
        ylabel="bandwidth, GB/s (read + written)",
        title=f"softmax, 4,096 rows, fp32, one {CARD}: higher is better",
    )
    axes.set_xticks(range(0, right, 1000))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    label_ends(axes, 180)


def linear_cross_entropy(panels: Sequence[Axes]) -> None:
    """Draw the time in units of the bare products, of which exact methods need no fewer."""
    axes, rows = panels[0], totals("linear_cross_entropy.csv", "linear_cross_entropy")
    sizes = list(dict.fromkeys((row["tokens"], row["hidden"], row["vocabulary"]) for row in rows))
    names = [name for name in NAMES if any(row["provider"] == name for row in rows)]
    means = {
        (row["tokens"], row["hidden"], row["vocabulary"], row["provider"]): float(row["mean_ms"])
        for row in rows
    }
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        timed = [(group, size) for group, size in enumerate(sizes) if (*size, name) in means]
        ratios = [means[*size, name] / means[*size, "products"] for _, size in timed]
        bars = axes.bar(
            [group + (index - (len(names) - 1) / 2) * width for group, _ in timed],
            ratios,
            0.92 * width,
            color=LINEAR_COLOURS[name],
            label=NAMES[name],
        )
        axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=1, fontsize=6.5)
    labels = [
        f"{int(tokens):,} tokens of {int(hidden):,}\n{int(vocabulary):,} classes"
        for tokens, hidden, vocabulary in sizes
    ]
    axes.set_xticks(range(len(sizes)), labels, fontsize=9)
    what = "loss and gradients from hidden states, bf16"
    axes.set(
        ylim=(0.0, 1.25 * max(means[key] / means[*key[:3], "products"] for key in means)),
        ylabel="time / time of the three products",
        title=f"{what}, one {CARD}: lower is better",
    )
    axes.axhline(1.0, color=COLOURS["products"], linestyle="--", linewidth=1)
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, ncols=-(-len(names) // 2), loc="upper center", columnspacing=1.0)


def speed_ups(axes: Axes, cases: dict[str, list[Record]], highest: float) -> None:
    """Draw how many times as fast as the others Partita is, for cases with names.

    PyTorch has a bar or the reason for which it has none; other providers may be missing.
    """
    for group, own in enumerate(cases.values()):
        times = {row["provider"]: float(row["median_ms"]) for row in own if row["median_ms"]}
        failed = {row["provider"] for row in own if row["note"].startswith("wrong")}
        others = [name for name in ("torch", "seqdist", "koi") if name in times or name in failed]
        for index, name in enumerate(others):
            y = group + (index - (len(others) - 1) / 2) * 0.38
            if name in times:
                ratio = times[name] / times["partita"]
                axes.barh(y, ratio - 1, 0.34, left=1.0, color=COLOURS[name])
                number = f"{ratio:.0f}" if ratio > 9.95 else f"{ratio:.1f}"
                label = f"{number} × {NAMES[name]}"
            else:
                ratio, label = 1.0, f"{NAMES[name]}: wrong gradient"
            colour = "black" if name in times else COLOURS[name]
            axes.text(1.03 * ratio, y, label, va="center", fontsize=8, color=colour)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(1, highest), xlabel="time of the other / time of Partita")
    axes.xaxis.set_major_formatter("{x:g} ×")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)


def rows_by_case(table: str, op: str, keys: Sequence[str]) -> dict[tuple[str, ...], list[Record]]:
    """Return the rows of each size: those of loss and gradient, and of what was not timed."""
    cases: dict[tuple[str, ...], list[Record]] = {}
    with (HERE / table).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["op"] == op and row["part"] in ("total", "") and row["steps"]:
                cases.setdefault(tuple(row[key] for key in keys), []).append(row)
    return cases


def ctc(panels: Sequence[Axes]) -> None:
    """Draw the speed-up of CTC and CTC-CRF."""
    found = rows_by_case("ctc.csv", "ctc", ("steps", "sequences", "classes", "longest"))
    cases = {name: found[key] for key, name in CASES.items()}
    cases["basecaller, CTC-CRF"] = totals("ctc.csv", "ctc_crf")
    speed_ups(panels[0], cases, 400)
    panels[0].set_title(f"Speed-up of CTC with its gradient, one {CARD}: higher is better")


def chain(panels: Sequence[Axes]) -> None:
    """Draw the speed-up of log Z where others take the table of the chain."""
    found = rows_by_case("chain.csv", "chain", ("dtype", "steps", "chains", "states"))
    cases = {
        f"{int(steps):,} steps × {chains} chains\n× {int(states):,} states": rows
        for (dtype, steps, chains, states), rows in found.items()
        if dtype == "fp32"
        and any(row["provider"] != "partita" and row["median_ms"] for row in rows)
    }
    times = [
        {row["provider"]: float(row["median_ms"]) for row in rows if row["median_ms"]}
        for rows in cases.values()
    ]
    greatest = max(max(own.values()) / own["partita"] for own in times)
    highest = max(20.0, 3 * greatest)  # with room for the names
    speed_ups(panels[0], cases, highest)
    panels[0].set_xticks([x for x in (1, 2, 5, 10, 20, 50, 100, 200, 500) if x <= highest])
    panels[0].set_xticks([], minor=True)
    title = f"Speed-up of log Z with its gradient, fp32, one {CARD}: higher is better"
    panels[0].set_title(title, fontsize=10)


def ctc_crf(panels: Sequence[Axes]) -> None:
    """Draw time and memory."""
    rows = totals("ctc.csv", "ctc_crf")
    names = [NAMES[row["provider"]] for row in rows]
    columns = (
        ("median_ms", "loss and gradient, ms (a log scale)", 1.0),
        ("extra_memory_bytes", "memory beside the scores, GiB", 2.0**30),
    )
    for axes, (column, label, unit) in zip(panels, columns, strict=True):
        values = [float(row[column]) / unit for row in rows]
        bars = axes.barh(
            names, values, color=[COLOURS[row["provider"]] for row in rows], height=0.6
        )
        axes.bar_label(bars, [digits(value) for value in values], padding=3, fontsize=9)
        axes.set(xlabel=label, xlim=(0, 1.15 * max(values)))
        if column == "median_ms":
            axes.set(xscale="log", xlim=(1, 4 * max(values)))
            axes.xaxis.set_major_formatter("{x:,g}")
        axes.invert_yaxis()
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3, axis="x")
    panels[0].figure.suptitle(
        f"CTC-CRF, 2,000 steps × 64 sequences × 4⁵ k-mers, fp32, one {CARD}: lower is better"
    )
