"""Find the regimes of El Niño: fit a hidden Markov model by log Z, and draw it.

    python examples/hmm.py --regimes 4 --starts 16 --out hmm.png
    python examples/hmm.py --method em --steps 200

The series is the temperature of the sea off Peru (0-10° S, 80-90° W) in each month from 1950 to
2010, minus the mean of its calendar month; it comes with statsmodels (NOAA, ERSST.V3B, Niño 1+2).
Each month has one of a few regimes, and each regime has its own normal distribution. The next
regime depends on the present one alone; the first is drawn from the stationary distribution. Log Z
of this chain is the log-likelihood. The random starts are the chains of one batch. Adam moves all
of them together along the gradient of log Z, or expectation maximization does, by the expected
counts of the chain. statsmodels computes the log-likelihood and the posterior again from the
parameters that were found; the exit code is 1 when its results differ. Neighbouring months are more
alike than such a model believes, so a better BIC is no proof of more regimes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from digits import FAINT, INK, MUTED, positive
from hmm_fit import METHODS, Fit, Model, chain_of, fit
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.figure import Figure
from statsmodels.datasets import elnino
from statsmodels.tsa.regime_switching.markov_regression import MarkovRegression
from torch import Tensor

import partita

ALLOWED = 1e-8  # the greatest difference to statsmodels
SAMPLES = 12
COLD, COOL, WARM, HOT = "#2b6cb0", "#7cc1f0", "#f6ad55", "#c53030"
COLOURS = {2: (COLD, HOT), 3: (COLD, WARM, HOT), 4: (COLD, COOL, WARM, HOT)}


class Series(NamedTuple):
    """The temperature of each of T months."""

    years: Tensor  # [T]
    values: Tensor  # [T], °C


class Posterior(NamedTuple):
    """The posterior of the regime of each month under the best model, N = 1."""

    marginals: Tensor  # [T, C]
    best: Tensor  # [T], the most probable path
    samples: Tensor  # [SAMPLES, T]
    best_log_prob: float
    entropy: float  # the entropy of the path in nats
    changes: float  # the expected number


class Difference(NamedTuple):
    """The differences of log-likelihood and posterior to those of statsmodels."""

    log_likelihood: float
    posterior: float


@dataclass(frozen=True)
class Report:
    """The results of a run."""

    log_likelihood: float
    bic: float
    as_good: int  # starts that end within 1 nat of the best
    # Mean, deviation, share of the time and duration in months of each regime.
    regimes: list[tuple[float, float, float, float]]
    best_log_prob: float
    entropy: float
    changes: float
    difference: Difference


def load() -> Series:
    table = elnino.load_pandas().data
    columns = torch.tensor(table.to_numpy(), dtype=torch.float64)
    years, temperatures = columns.tensor_split([1], dim=1)  # [years, 1], [years, 12]
    middles = (torch.arange(12, dtype=torch.float64) + 0.5) / 12
    return Series((years + middles).flatten(), (temperatures - temperatures.mean(0)).flatten())


def posterior_of(chain: partita.LinearChain, generator: torch.Generator) -> Posterior:
    """Return the posterior of the chain of one model."""
    marginals, best = chain.state_marginals()[:, 0], chain.viterbi()
    stays = torch.eye(marginals.shape[-1], dtype=marginals.dtype)
    changes = chain.expectation(transition_values=1 - stays).item()
    return Posterior(
        marginals=marginals,
        best=best.states[:, 0],
        samples=chain.sample(SAMPLES, generator).states[:, :, 0],
        best_log_prob=chain.log_prob(best.states).item(),
        entropy=chain.entropy().item(),
        changes=changes,
    )


def compare(model: Model, values: Tensor, log_likelihood: float, marginals: Tensor) -> Difference:
    """Compare with the same model in statsmodels.

    Its parameters are the transitions into all regimes but the last, ordered by target, then the
    means and the variances.
    """
    regimes = len(model.means[0])
    into = model.transitions[0].exp().mT[:-1].flatten()
    theirs = MarkovRegression(values.numpy(), k_regimes=regimes, trend="c", switching_variance=True)
    smoothed = theirs.smooth(
        torch.cat([into, model.means[0], model.deviations[0] ** 2]).numpy(), return_raw=True
    )
    posterior = torch.tensor(smoothed.smoothed_marginal_probabilities).T
    return Difference(
        abs(log_likelihood - smoothed.llf_obs.sum()), (marginals - posterior).abs().max().item()
    )


def summary(fitted: Fit, values: Tensor, found: Posterior, difference: Difference) -> Report:
    ends, model = fitted.curves[-1], fitted.model
    best = ends.max().item()
    regimes = len(model.means[0])
    parameters = regimes * (regimes - 1) + 2 * regimes
    lasts = 1 / -torch.expm1(model.transitions[0].diagonal())
    rows = [
        tuple(row)
        for row in torch.stack(
            [model.means[0], model.deviations[0], model.stationary[0].exp(), lasts], 1
        ).tolist()
    ]
    bic = parameters * math.log(len(values)) - 2 * best
    return Report(
        best,
        bic,
        int((ends > best - 1).sum()),
        rows,
        found.best_log_prob,
        found.entropy,
        found.changes,
        difference,
    )


def draw_series(axes: Axes, series: Series, found: Posterior, colours: Sequence[str]) -> None:
    """Draw the series over a background that mixes the regimes' colours by their posterior."""
    shade = found.marginals @ torch.tensor(
        [to_rgb(colour) for colour in colours], dtype=torch.float64
    )
    low, high = series.values.min().item() - 0.3, series.values.max().item() + 0.3
    span = float(series.years[0]) - 1 / 24, float(series.years[-1]) + 1 / 24
    axes.imshow(
        shade[None].numpy(),
        extent=(*span, low, high),
        aspect="auto",
        alpha=0.45,
        interpolation="nearest",
    )
    axes.plot(series.years, series.values, color=INK, lw=1)
    axes.set(xlim=span, ylim=(low, high), ylabel="°C above the mean of the calendar month")


def draw_paths(
    axes: Axes, states: Tensor, span: tuple[float, float], colours: Sequence[str]
) -> None:
    extent = (*span, len(states), 0)
    axes.imshow(
        states.numpy(),
        cmap=ListedColormap(colours),
        vmin=-0.5,
        vmax=len(colours) - 0.5,
        extent=extent,
        aspect="auto",
        interpolation="nearest",
    )
    axes.set(yticks=[], xlim=span)


def draw_densities(axes: Axes, series: Series, model: Model, colours: Sequence[str]) -> None:
    """Draw each regime's density times its share of the time, and the histogram of the series."""
    axes.hist(series.values, bins=50, density=True, orientation="horizontal", color=FAINT)
    grid = torch.linspace(*axes.get_ylim(), 400, dtype=torch.float64)[:, None]
    densities = (
        torch.distributions.Normal(model.means[0], model.deviations[0]).log_prob(grid)
        + model.stationary[0]
    ).exp()
    for density, colour in zip(densities.T, colours, strict=True):
        axes.plot(density, grid[:, 0], color=colour, lw=2)
    axes.plot(densities.sum(1), grid[:, 0], color=INK, lw=1, ls="--")
    axes.set(xticks=[])


def draw_transitions(axes: Axes, model: Model, colours: Sequence[str]) -> None:
    probabilities = model.transitions[0].exp()
    axes.imshow(probabilities.numpy(), cmap="Greys", vmin=0, vmax=1.6, aspect="auto")
    names = [f"{mean:+.1f}°" for mean in model.means[0].tolist()]
    for i, row in enumerate(probabilities.tolist()):
        for j, probability in enumerate(row):
            axes.text(
                j,
                i,
                f"{probability:.0%}" if probability >= 0.005 else "·",
                ha="center",
                va="center",
                color=INK,
                size=9,
            )
    axes.set(xticks=range(len(names)), yticks=range(len(names)))
    axes.set_xticklabels(names, weight="bold")
    axes.set_yticklabels(names, weight="bold")
    for labels in (axes.get_xticklabels(), axes.get_yticklabels()):
        for label, colour in zip(labels, colours, strict=True):
            label.set_color(colour)
    axes.tick_params(length=0)


def draw(path: Path, series: Series, fitted: Fit, found: Posterior) -> None:
    colours = COLOURS[len(fitted.model.means[0])]
    figure = Figure(figsize=(14, 9), layout="constrained")
    grid = figure.add_gridspec(4, 2, width_ratios=(3.4, 1), height_ratios=(5, 1.7, 0.5, 2.2))
    top = figure.add_subplot(grid[0, 0])
    stack, best, drawn = (figure.add_subplot(grid[row, 0], sharex=top) for row in (1, 2, 3))
    density = figure.add_subplot(grid[0, 1], sharey=top)
    curves, matrix = (figure.add_subplot(grid[rows, 1]) for rows in (slice(1, 3), 3))
    titles = {
        top: "Sea off Peru: the series, shaded by the posterior of its regimes",
        stack: "Posterior of the regime of each month: state_marginals()",
        best: "Most probable path: viterbi()",
        drawn: f"{len(found.samples)} paths from the posterior: sample()",
        density: "Density of each regime",
        curves: "Log-likelihood of each start",
        matrix: "Next month, from row to column",
    }
    for axes, title in titles.items():
        axes.set_title(title, size=11, weight="bold", color=INK, loc="left")
        axes.spines[:].set_visible(False)
        axes.tick_params(color=MUTED, labelcolor=INK)
    draw_series(top, series, found, colours)
    span = top.get_xlim()
    stack.stackplot(series.years, found.marginals.T, colors=colours, step="mid", lw=0)
    stack.set(ylim=(0, 1), yticks=[0, 1])
    draw_paths(best, found.best[None], span, colours)
    draw_paths(drawn, found.samples, span, colours)
    draw_densities(density, series, fitted.model, colours)
    density.tick_params(labelleft=False, length=0)
    for axes in (top, stack, best):
        axes.tick_params(labelbottom=False)
    ends = fitted.curves[-1]
    curves.plot(fitted.curves, color=MUTED, lw=0.8)
    curves.plot(fitted.curves[:, int(ends.argmax())], color=INK, lw=2)
    curves.set(ylim=(ends.max().item() - 100, ends.max().item() + 5))
    draw_transitions(matrix, fitted.model, colours)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.suffix[1:].lower() in figure.canvas.get_supported_filetypes()
    figure.savefig(path, dpi=130, format=None if known else "png")


def run(
    regimes: int,
    starts: int,
    steps: int,
    seed: int,
    out: Path,
    quiet: bool = False,
    method: str = "gradient",
) -> Report:
    generator = torch.Generator().manual_seed(seed)
    series = load()
    fitted = fit(series.values, regimes, starts, steps, generator, quiet, method)
    chain = chain_of(fitted.model, series.values)
    found = posterior_of(chain, generator)
    draw(out, series, fitted, found)
    return summary(
        fitted,
        series.values,
        found,
        compare(fitted.model, series.values, chain.logz().item(), found.marginals),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Fit a hidden Markov model to the sea temperatures of El Niño with Partita."
    )
    parser.add_argument(
        "--regimes",
        type=int,
        choices=sorted(COLOURS),
        default=4,
        help="regimes of the model (default 4)",
    )
    parser.add_argument(
        "--method",
        choices=sorted(METHODS),
        default="gradient",
        help="Adam on the gradient of log Z, or expectation maximization (default gradient)",
    )
    parser.add_argument(
        "--starts",
        type=positive,
        default=16,
        help="random starts, fitted as one batch (default 16)",
    )
    parser.add_argument("--steps", type=positive, default=500, help="steps of it (default 500)")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the starts and of the samples (default 0)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("hmm.png"), help="picture to write (default hmm.png)"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)  # for tensors this small, threads cost more time than they save
    report = run(
        options.regimes,
        options.starts,
        options.steps,
        options.seed,
        options.out,
        options.quiet,
        options.method,
    )
    print(
        f"Log-likelihood: {report.log_likelihood:.4f} (BIC {report.bic:.1f});"
        f" {report.as_good} of {options.starts} starts within 1 nat of it"
    )
    print(f"Log-likelihood diff to statsmodels: {report.difference.log_likelihood:.2e}")
    print(f"Posterior diff to statsmodels (max): {report.difference.posterior:.2e}")
    for i, (mean, deviation, share, lasts) in enumerate(report.regimes, 1):
        print(
            f"Regime {i}: {mean:+.2f} ± {deviation:.2f} °C, {share:.0%} of the time,"
            f" lasts {lasts:.1f} months"
        )
    print(f"Probability of the best path: {math.exp(report.best_log_prob):.1e}")
    print(f"Entropy of the path: {report.entropy:.1f} nats")
    print(f"Changes of regime: {report.changes:.1f} expected")
    print(f"Picture: {options.out}")
    if not all(value <= ALLOWED for value in report.difference):
        print(f"statsmodels differs by more than {ALLOWED:.0e}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
