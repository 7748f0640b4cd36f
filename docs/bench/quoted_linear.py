"""The figures of chains and of workspaces; the name of a function is the name of a quote."""

from __future__ import annotations

from collections.abc import Sequence

from quoted_rows import OURS, digits, figure, number, ratio, row, rows, table

BUDGET, CHAINS, SEGMENTS = "linear_budget.csv", "linear_chain_gpu.csv", "semi_markov_gpu.csv"
SIZE = {"tokens": 16384, "hidden": 2048, "classes": 262144}


def _chains(name: str, sizes: Sequence[str]) -> list[list[str]]:
    return [
        [
            ", ".join(f"{int(each[key]):,}" for key in sizes),
            *(digits(float(each[key]), 2) for key in ("loss_ms", "best_path_ms")),
        ]
        for each in rows(name)
    ]


@figure
def linear_chain_speed() -> str:
    lines = _chains(CHAINS, ("steps", "sequences", "states"))
    return table(["T, N, C", "log Z with all gradients", "best path"], lines)


@figure
def semi_markov_speed() -> str:
    lines = _chains(SEGMENTS, ("steps", "sequences", "states", "durations"))
    return table(["T, N, C, D", "log Z with all gradients", "best path"], lines)


def _cells(each: dict[str, str]) -> list[str]:
    of_products = ratio(float(each["median_ms"]) / float(each["products_ms"]))
    return [digits(float(each["median_ms"])), of_products, f"{float(each['workspace_gib']):.1f}"]


@figure
def linear_budgets() -> str:
    found = rows(BUDGET, provider=OURS, **SIZE)
    found.sort(key=lambda each: float(each["workspace_gib"]))
    lines = []
    for each in found:
        budget, plan = each["budget_gib"], each["plan"]
        name = "the default" if budget == "default" else f"{budget} GiB"
        unit = "classes" if plan == "lean" else "tokens"
        lines.append([name, f"{plan}, {int(each['chunk']):,} {unit}", *_cells(each)])
    lines.append(["`torch.compile`", "", *_cells(row(BUDGET, provider="compile", **SIZE))])
    return table(["budget", "plan and chunk", "ms", "of the products", "workspace, GiB"], lines)


def _default(tokens: int, hidden: int, classes: int) -> str:
    size = {"tokens": tokens, "hidden": hidden, "classes": classes, "budget_gib": "default"}
    time, unit = (number(BUDGET, column, **size) for column in ("median_ms", "products_ms"))
    return f"{ratio(time / unit)} in {number(BUDGET, 'workspace_gib', **size):.1f} GiB"


@figure
def linear_default_of_tokens() -> str:
    return _default(32768, 4096, 128256)


@figure
def linear_default_of_width() -> str:
    return _default(8192, 8192, 256000)
