"""Pictures that compare providers: losses from hidden states by the bare products, and CTC."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from partita.bench.picture import COLOURS

HERE = Path(__file__).parent
Record = dict[str, str]
HIGHEST = 3.0  # times the products; a longer bar ends here, and its number says how long it is
NAMES = {
    "partita-fast": "Partita",
    "partita-lean": "Partita, least memory",
    "torch": "PyTorch",
    "compile": "torch.compile",
    "liger": "Liger",
    "cce": "cut-cross-entropy",
    "cce-exact": "cut-cross-entropy, exact",
    "seqdist": "seqdist",
    "koi": "koi",
}
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


def linear_cross_entropy(panels: Sequence[Axes]) -> None:
    """Draw the time in units of the bare products, from 1, as exact methods need no fewer."""
    axes, rows = panels[0], totals("linear_cross_entropy.csv", "linear_cross_entropy")
    sizes = list(dict.fromkeys((row["tokens"], row["hidden"], row["vocabulary"]) for row in rows))
    names = [name for name in NAMES if any(row["provider"] == name for row in rows)]
    means = {
        (row["tokens"], row["hidden"], row["vocabulary"], row["provider"]): float(row["mean_ms"])
        for row in rows
    }
    width = 0.84 / len(names)
    for index, name in enumerate(names):
        ratios = [means[*size, name] / means[*size, "products"] for size in sizes]
        bars = axes.bar(
            [group + (index - (len(names) - 1) / 2) * width for group in range(len(sizes))],
            [min(ratio, HIGHEST) - 1 for ratio in ratios],
            0.92 * width,
            bottom=1.0,
            color=COLOURS[name],
            label=NAMES[name],
        )
        axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=1, fontsize=6.5)
    labels = [
        f"{int(tokens):,} tokens × {int(hidden):,}\n× {int(vocabulary):,} classes"
        for tokens, hidden, vocabulary in sizes
    ]
    axes.set_xticks(range(len(sizes)), labels, fontsize=9)
    axes.set(
        ylim=(1.0, HIGHEST + 0.45),
        ylabel="time in units of the bare products",
        title="loss and gradients from hidden states, bf16, one H200 (less is better, cut at 3)",
    )
    axes.grid(alpha=0.3, axis="y")
    axes.set_axisbelow(True)
    axes.legend(fontsize=8, ncols=len(names), loc="upper center", columnspacing=1.0)


def ctc(panels: Sequence[Axes]) -> None:
    """Draw how many times as long as Partita the others take, for cases with names."""
    axes, rows = panels[0], totals("ctc.csv", "ctc")
    cases = {
        name: [
            row
            for row in rows
            if (row["steps"], row["sequences"], row["classes"], row["longest"]) == key
        ]
        for key, name in CASES.items()
    }
    cases["basecaller, CTC-CRF"] = totals("ctc.csv", "ctc_crf")
    for group, own in enumerate(cases.values()):
        times = {row["provider"]: float(row["median_ms"]) for row in own if row["median_ms"]}
        others = [name for name in ("torch", "seqdist", "koi") if name in times]
        if "torch" not in times:
            others = ["torch", *others]
        for index, name in enumerate(others):
            y = group + (index - (len(others) - 1) / 2) * 0.38
            if name not in times:
                axes.text(1.05, y, f"{NAMES[name]}: wrong result", va="center", fontsize=8)
                continue
            ratio = times[name] / times["partita"]
            axes.barh(y, ratio - 1, 0.34, left=1.0, color=COLOURS[name])
            times_as_long = f"{ratio:.0f}" if ratio > 9.95 else f"{ratio:.1f}"
            axes.text(1.03 * ratio, y, f"{NAMES[name]} {times_as_long} ×", va="center", fontsize=8)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.invert_yaxis()
    axes.set(
        xscale="log",
        xlim=(1, 400),
        xlabel="time of others in units of Partita's",
        title="CTC with its gradient on one H200 (more is better for Partita)",
    )
    axes.xaxis.set_major_formatter("{x:g} ×")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
