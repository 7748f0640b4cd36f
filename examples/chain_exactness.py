"""Measure how far marginals and log Z of long chains are from fp64.

    python examples/chain_exactness.py --steps 100 1000 2000 20000 100000 --out docs/bench

It compares Partita with a plain forward-backward recursion in fp32, and writes a table (CSV) and a
picture (SVG). The exit code is 1 when Partita misses its contract: marginals within 2e-6, log Z
within 1e-6 · max(1, |log Z|) + 1e-9 · T.
"""

from __future__ import annotations

import argparse
import csv
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from partita import Chain, debruijn_source, linear_chain

STEPS = (100, 1_000, 2_000, 20_000, 100_000)
MARGINAL_LIMIT = 2e-6
CHUNK = 4096
COLOURS = {"partita": "#c2185b", "plain fp32": "#757575"}


@dataclass(frozen=True)
class Posterior:
    """Log Z and the marginals of a chain.

    Fields:
        logz: log Z in nats.
        marginals: takes a first step and an end, and returns the marginals between, `[T, C, K]`.
    """

    logz: float
    marginals: Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Row:
    """The errors of one provider on one chain; `logz_share` is in units of the allowed error."""

    chain: str
    steps: int
    states: int
    edges_per_state: int
    provider: str
    logz: float
    marginal_error: float
    logz_error: float
    logz_share: float
    device: str
    torch: str

    @property
    def passed(self) -> bool:
        return self.marginal_error <= MARGINAL_LIMIT and self.logz_share <= 1


def kmers(steps: int, generator: torch.Generator) -> Chain:
    """Return a chain of 64 k-mers of 4 bases with normal scores.

    Each k-mer is entered from itself and from the 4 k-mers that overlap with it.
    """
    return Chain(torch.randn(steps, 1, 64, 5, generator=generator), debruijn_source(4, 3))


def sticky(steps: int, generator: torch.Generator) -> Chain:
    """Return the chain of a hidden Markov model with 8 states that last 100 to 1,000 steps.

    The deviation of the normal noise is twice the distance of the states.
    """
    stay = torch.linspace(0.99, 0.999, 8)
    transitions = ((1 - stay) / 7)[:, None].expand(8, 8).clone()
    transitions.diagonal().copy_(stay)
    moves = (torch.rand(steps + 1, generator=generator) < 0.005) * torch.randint(
        1, 8, (steps + 1,), generator=generator
    )
    levels = 0.5 * torch.arange(8)
    seen = levels[moves.cumsum(0) % 8] + torch.randn(steps + 1, generator=generator)
    emissions = torch.distributions.Normal(levels, 1.0).log_prob(seen[:, None, None])
    chain = linear_chain(emissions, transitions.log(), torch.full((8,), 1 / 8).log())
    return chain.to_chain()


def ctc(steps: int, generator: torch.Generator) -> Chain:
    """Return the chain of the alignments of a target with 1 label for 20 steps, at most 200."""
    S = min(max(steps // 20, 1), 200)
    labels = torch.zeros(2 * S + 1, dtype=torch.int64)
    labels[1::2] = torch.randint(1, 30, (S,), generator=generator)
    entered = (2 * torch.randn(steps, 1, 30, generator=generator)).log_softmax(-1)[..., labels]
    scores = entered[..., None].repeat(1, 1, 1, 3)
    scores[..., labels == labels.roll(2), 2] = -torch.inf
    source = (torch.arange(len(labels))[:, None] - torch.arange(3)).clamp(min=-1)
    initial, final = torch.full((2, 1, len(labels)), -torch.inf)
    initial[:, 0] = final[:, -2:] = 0.0
    return Chain(scores, source, initial, final)


def ring(steps: int, generator: torch.Generator) -> Chain:
    """Return a chain of 4 states in a ring, each entered from itself and from the one before."""
    return Chain(
        torch.randn(steps, 1, 4, 2, generator=generator),
        torch.tensor([[0, 3], [1, 0], [2, 1], [3, 2]]),
    )


CHAINS = {
    "k-mers, 64 states": kmers,
    "sticky HMM, 8 states": sticky,
    "CTC, up to 200 labels": ctc,
    "ring, 4 states": ring,
}


def moved(chain: Chain, device: torch.device, dtype: torch.dtype = torch.float32) -> Chain:
    ends = (None if end is None else end.to(device, dtype) for end in (chain.initial, chain.final))
    return Chain(chain.scores.to(device, dtype), chain.source.to(device), *ends)


def ours(chain: Chain) -> Posterior:
    marginals = chain.marginals()[:, 0]
    return Posterior(chain.logz().item(), lambda start, stop: marginals[start:stop])


def outgoing_edges(source: Tensor) -> Tensor:
    """Return the edges c·K + k that leave each state, padded with -1, `[C, D]`."""
    flat = source.flatten().tolist()
    edges = [
        [edge for edge, origin in enumerate(flat) if origin == state]
        for state in range(len(source))
    ]
    D = max(map(len, edges))
    return torch.tensor([[*row, *[-1] * (D - len(row))] for row in edges], device=source.device)


def plain(chain: Chain) -> Posterior:
    """Run the forward-backward algorithm in log space as it is usually written.

    Alpha and beta have the dtype of the scores. There is one log-sum-exp a step, and no scaling.
    """
    scores, source, outgoing = chain.scores[:, 0], chain.source, outgoing_edges(chain.source)
    steps, states = scores.shape[:2]
    no_path = scores.new_full((1,), -torch.inf)  # the value at index -1
    alpha, beta = scores.new_zeros(2, steps + 1, states)
    if chain.initial is not None:
        alpha[0] = chain.initial[0]
    if chain.final is not None:
        beta[-1] = chain.final[0]
    for t in range(steps):
        torch.logsumexp(scores[t] + torch.cat([alpha[t], no_path])[source], -1, out=alpha[t + 1])
    for t in reversed(range(steps)):
        terms = (scores[t] + beta[t + 1, :, None]).flatten()
        torch.logsumexp(torch.cat([terms, no_path])[outgoing], -1, out=beta[t])
    logz = torch.logsumexp(alpha[-1] + beta[-1], -1)

    def marginals(start: int, stop: int) -> Tensor:
        before = torch.cat([alpha[start:stop], no_path.expand(stop - start, 1)], 1)[:, source]
        return (before + scores[start:stop] + beta[start + 1 : stop + 1, :, None] - logz).exp()

    return Posterior(logz.item(), marginals)


def worst(found: Posterior, truth: Posterior, steps: int) -> float:
    """Return the greatest absolute error of a marginal, over one part of the chain at a time."""
    parts = [(start, min(start + CHUNK, steps)) for start in range(0, steps, CHUNK)]
    return max(
        (found.marginals(*part).double() - truth.marginals(*part)).abs().max().item()
        for part in parts
    )


def measure(name: str, steps: int, device: torch.device, seed: int) -> list[Row]:
    """Return a row for each provider, compared with Partita on the same scores in fp64.

    The tests compare those kernels, which are fp64 throughout, with the reference.
    """
    chain = CHAINS[name](steps, torch.Generator().manual_seed(seed))
    truth = ours(moved(chain, device, torch.float64))
    allowed = 1e-6 * max(1.0, abs(truth.logz)) + 1e-9 * steps
    rows = []
    for provider, run in (("partita", ours), ("plain fp32", plain)):
        found = run(moved(chain, device))
        logz_error = abs(found.logz - truth.logz)
        errors = worst(found, truth, steps), logz_error, logz_error / allowed
        rows.append(
            Row(
                name,
                steps,
                *chain.source.shape,
                provider,
                truth.logz,
                *errors,
                name_of(device),
                torch.__version__,
            )
        )
    return rows


def name_of(device: torch.device) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU ({platform.machine()})"
    )


def write(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(asdict(rows[0])))
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def draw(path: Path, rows: Sequence[Row]) -> None:
    """Draw a panel for each chain: the worst marginal against the number of steps."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.chain for row in rows))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "partita", "font.size": 10}):
        figure = Figure(figsize=(3 * len(names), 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(names), sharex=True, sharey=True, squeeze=False)[0]
        for axes, name in zip(panels, names, strict=True):
            for provider, colour in COLOURS.items():
                points = [
                    (row.steps, row.marginal_error)
                    for row in rows
                    if (row.chain, row.provider) == (name, provider)
                ]
                axes.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    marker="o",
                    markersize=4,
                    linewidth=2,
                    label=provider,
                )
            axes.axhline(
                MARGINAL_LIMIT, color="black", linestyle="--", linewidth=1, label="contract, 2e-6"
            )
            axes.set(xscale="log", yscale="log", title=name, xlabel="steps")
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("greatest error of a marginal")
        panels[0].legend(loc="upper left", fontsize=9)
        figure.suptitle(f"Marginals against fp64, scores in fp32, {rows[0].device}")
        figure.savefig(path, metadata={"Date": None})


def run(
    steps: Sequence[int], out: Path, device: torch.device, seed: int = 0, quiet: bool = False
) -> list[Row]:
    """Measure every chain at every length, and write the table and the picture into a folder."""
    cases = [(name, length) for length in sorted(set(steps)) for name in CHAINS]
    rows: list[Row] = []
    with Progress(
        BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"), disable=quiet
    ) as progress:
        task = progress.add_task("", total=sum(length for _, length in cases))
        for name, length in cases:
            progress.update(task, description=f"{name}, {length:,} steps")
            rows += measure(name, length, device, seed)
            progress.advance(task, length)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "chain_exactness.csv", rows)
    draw(out / "chain_exactness.svg", rows)
    return rows


def print_rows(rows: Sequence[Row]) -> None:
    print(
        f"On {rows[0].device}, torch {rows[0].torch};"
        " the error of log Z is in units of what the contract allows.\n"
    )
    print(f"{'chain':26} {'steps':>8} {'provider':10} {'marginals':>10} {'log Z':>10}")
    for row in rows:
        print(
            f"{row.chain:26} {row.steps:8,} {row.provider:10}"
            f" {row.marginal_error:10.1e} {row.logz_share:10.1e}"
        )


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Errors of marginals and log Z of long chains against fp64."
    )
    parser.add_argument(
        "--steps",
        type=positive,
        nargs="+",
        default=STEPS,
        help="lengths of the chains (default 100 to 100,000)",
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where they run (default cuda where there is one)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the scores (default 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("docs/bench"),
        help="folder for the table and the picture (default docs/bench)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    options = parser.parse_args(argv)

    rows = run(
        options.steps, options.out, torch.device(options.device), options.seed, options.quiet
    )
    print_rows(rows)
    table, picture = options.out / "chain_exactness.csv", options.out / "chain_exactness.svg"
    print(f"\nTable and picture: {table}, {picture}")
    missed = [row for row in rows if row.provider == "partita" and not row.passed]
    for row in missed:
        print(f"Out of contract: {row.chain}, {row.steps:,} steps.", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
