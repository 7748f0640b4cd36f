"""Find recessions: fit a hidden Markov model to a country's economy, draw it, and look ahead.

    python examples/regimes.py --regimes 2 --out regimes.png

The series come with statsmodels: real gross domestic product and unemployment of the USA in each
quarter from 1959 to 2009. Each quarter has one of a few regimes, and each regime has its own normal
distribution of growth and of the change of unemployment. The tutorial on regimes explains it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from digits import INK, MUTED, positive
from matplotlib.figure import Figure
from statsmodels.datasets import macrodata
from torch import Tensor

from partita.hmm import GaussianHMM


class Series(NamedTuple):
    """Growth in per cent a year and the change of unemployment in points, for each quarter."""

    years: Tensor  # [T]
    values: Tensor  # [T, 2]


def load() -> Series:
    columns = ("year", "quarter", "realgdp", "unemp")
    table = macrodata.load_pandas().data[list(columns)].to_numpy().copy()
    year, quarter, gdp, unemployment = torch.from_numpy(table).unbind(1)
    values = torch.stack([400 * gdp.log().diff(), unemployment.diff()], 1)
    return Series((year + (quarter - 1) / 4)[1:], values)


def fit(values: Tensor, regimes: int, starts: int) -> GaussianHMM:
    model = GaussianHMM(regimes, "full", n_iter=200, n_init=starts, random_state=0)
    return model.fit(values)


def draw(path: Path, series: Series, model: GaussianHMM) -> None:
    """Draw both series over the best path, and the posterior of the regime that grows least."""
    slowest = int(model.means_[:, 0].argmin())
    states, posterior = model.predict(series.values), model.predict_proba(series.values)
    figure = Figure(figsize=(11, 6), layout="constrained")
    top, middle, low = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.5))
    for axes, column, title in (
        (top, 0, "Growth of the gross domestic product, % a year, and the regime of slow growth"),
        (middle, 1, "Change of unemployment, points"),
    ):
        axes.plot(series.years, series.values[:, column], color=INK, lw=1)
        low_end, high_end = axes.get_ylim()
        axes.fill_between(
            *(series.years, low_end, high_end),
            where=(states == slowest).numpy(),
            step="post",
            color="#e0567a",
            alpha=0.25,
            lw=0,
        )
        axes.set_ylim(low_end, high_end)
        axes.set_title(title, loc="left", color=INK, size=11, weight="bold")
    low.fill_between(series.years, posterior[:, slowest], color="#e0567a", lw=0)
    low.plot(series.years, model.filter(series.values)[:, slowest], color=INK, lw=0.8)
    low.set(ylim=(0, 1), yticks=[0, 1])
    low_title = "Its probability given all quarters (area) and the past (line)"
    low.set_title(low_title, loc="left", color=INK, size=11, weight="bold")
    for axes in (top, middle, low):
        axes.spines[:].set_visible(False)
        axes.tick_params(color=MUTED, labelcolor=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Find regimes of the economy with Partita.")
    parser.add_argument("--regimes", type=positive, default=2, help="regimes (default 2)")
    parser.add_argument("--starts", type=positive, default=16, help="restarts (default 16)")
    parser.add_argument("--out", type=Path, default=Path("regimes.png"), help="picture to write")
    options = parser.parse_args(argv)

    series = load()
    model = fit(series.values, options.regimes, options.starts)
    print(f"Log-likelihood: {model.score(series.values):.2f}, BIC {model.bic(series.values):.1f}")
    moves = model.transmat_.diagonal().tolist()
    for (growth, change), stay in zip(model.means_.tolist(), moves, strict=True):
        lasts = f", lasts {1 / (1 - stay):.0f} quarters" if stay < 1 else ""
        print(f"Regime: growth {growth:+.1f} %, unemployment {change:+.2f} points{lasts}")
    ahead = model.forecast(series.values, 4)
    for quarter, (growth, change) in enumerate(ahead.means.tolist(), 1):
        print(
            f"{quarter} quarters ahead: growth {growth:+.1f} %, unemployment {change:+.2f} points"
        )
    draw(options.out, series, model)
    print(f"Picture: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
