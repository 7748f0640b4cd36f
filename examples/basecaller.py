"""Call bases from the simulated current of a nanopore: train CTC-CRF, decode, and plot it.

    python examples/basecaller.py --batches 300 --out basecaller.png --fastq basecaller.fastq

The current depends on the three bases inside of the pore. A base stays there for 4 to 8 samples,
and the current is noisy. The network learns from short pieces of random sequences and is never told
where a base begins. Then it reads one long strand in overlapping chunks, as basecallers do: each
chunk is decoded by itself, and `stitch` joins the called bases. The three methods of
`ctc_crf_decode` are compared with the true sequence. Qualities are calibrated on more strands whose
sequence is known, and compared with the errors of others. The calls of the beam search are written
as FASTQ with calibrated qualities. The exit code is 1 when they have an identity below 97 %, or
more or fewer errors than twice or half of what the qualities say, at low, middle or high ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from digits import BLUE, INK, MUTED, RED, log_axis, positive, training_bar
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import partita
from partita import Basecalls

BATCHES = 300  # by default
REQUIRED_IDENTITY = 0.97
BATCH, SAMPLES = 32, 160
SHORTEST, LONGEST = 4, 8  # samples of a base
NOISE = 0.2
STRIDE = 2  # samples of a step of the network
K, BASES = 3, 4
SIZES = {"state_len": K, "alphabet_size": BASES + 1}
STRAND = 9000  # samples
STRANDS = 8  # to calibrate qualities, and as many to compare them with errors
GROUPS = 3  # of bases by their quality, as large as each other
CHUNK, OVERLAP = 400, 80  # steps
METHODS = ("viterbi", "posterior", "beam")
MARGIN = 50  # samples that the picture shows on both sides of an overlap
COLOURS = {"A": "#2f855a", "C": BLUE, "G": "#b7791f", "T": "#805ad5"}


class Reads(NamedTuple):
    """Currents, and the bases that made them."""

    signals: Tensor  # [N, samples]
    targets: Tensor  # [N, bases] from 1, 0 past the length
    lengths: Tensor  # [N]
    ends: Tensor  # [N, bases], the sample at which each base leaves the pore


class Comparison(NamedTuple):
    """Called bases beside the true ones."""

    identity: float  # 1 - edit distance / number of true bases
    is_right: list[bool]  # whether each called base is that of the best alignment


class Errors(NamedTuple):
    """The errors in a group of called bases."""

    bases: int
    wrong: int
    before: float  # the number of wrong bases according to the qualities before the calibration
    after: float  # and with it


@dataclass(frozen=True)
class Report:
    """The results of a run. All but the first two are those of the beam search."""

    identity: dict[str, float]  # of the calls of each method with the truth
    bases: int
    chunks: int
    like_whole: float  # identity with the calls of the strand in one piece
    calibration: tuple[float, float]  # offset and scale
    errors: list[Errors]  # of strands that the calibration has not seen, by quality
    mean_quality: float  # of these strands, calibrated

    @property
    def holds(self) -> bool:
        """Return whether each group has from half to twice as many errors as its qualities say.

        Three standard deviations of their number count as none.
        """
        spread = [3 * each.after**0.5 for each in self.errors]
        return all(
            each.after / 2 - sigma <= each.wrong <= each.after * 2 + sigma
            for each, sigma in zip(self.errors, spread, strict=True)
        )


def levels() -> Tensor:
    """Return the current of each 3-mer, `[4, 4, 4]`. The middle base has the greatest effect."""
    g = torch.Generator().manual_seed(1)
    effects = torch.tensor([-1.5, -0.5, 0.5, 1.5])
    before, after = (0.4 * torch.randn(4, generator=g) for _ in range(2))
    mixed = 0.1 * torch.randn(4, 4, 4, generator=g)
    return before[:, None, None] + effects[:, None] + after + mixed


def simulate(N: int, samples: int, generator: torch.Generator) -> Reads:
    """Return N reads of random bases. Bases that are cut off at the end are no targets."""
    bases = samples // SHORTEST + 1
    sequence = torch.randint(4, (N, bases + 2), generator=generator)
    current = levels()[sequence[:, :-2], sequence[:, 1:-1], sequence[:, 2:]]
    ends = torch.randint(SHORTEST, LONGEST + 1, (N, bases), generator=generator).cumsum(1)
    base = torch.searchsorted(ends, torch.arange(samples).repeat(N, 1), right=True)
    lengths = (ends <= samples).sum(1)
    noise = NOISE * torch.randn(N, samples, generator=generator)
    targets = (1 + sequence[:, 1:-1]).masked_fill(torch.arange(bases) >= lengths[:, None], 0)
    return Reads(current.gather(1, base) + noise, targets, lengths, ends)


class Basecaller(nn.Module):
    """Convolutions over the current, and scores of all edges between k-mers at each step."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(1, width, 9, stride=STRIDE, padding=4),
            nn.SiLU(),
            nn.Conv1d(width, width, 9, padding=4),
            nn.SiLU(),
            nn.Conv1d(width, width, 9, padding=4),
            nn.SiLU(),
        )
        self.head = nn.Linear(width, BASES**K * (BASES + 1))

    def forward(self, signals: Tensor) -> Tensor:
        """Return scores `[T, N, C * A]` of signals `[N, samples]`."""
        features = self.convolutions(signals[:, None]).permute(2, 0, 1)
        return 5 * self.head(features).tanh()


def train(model: nn.Module, batches: int, generator: torch.Generator, quiet: bool) -> list[float]:
    """Train the model and return the loss of each batch, in nats per base."""
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=batches)
    losses = []
    with training_bar(quiet) as progress:
        task = progress.add_task("", total=batches, loss=float("nan"))
        for _ in range(batches):
            reads = simulate(BATCH, SAMPLES, generator)
            loss = partita.ctc_crf_loss(model(reads.signals), reads.targets, reads.lengths, **SIZES)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            progress.update(task, advance=1, loss=losses[-1])
    return losses


def chunks_of(signal: Tensor) -> tuple[Tensor, list[int], int]:
    """Return overlapping chunks `[N, CHUNK * STRIDE]` of a signal, their steps, and all steps."""
    total = -(-len(signal) // STRIDE)
    stride = CHUNK - OVERLAP
    N = 1 + max(0, -(-(total - CHUNK) // stride))
    padded = nn.functional.pad(signal, (0, STRIDE * ((N - 1) * stride + CHUNK) - len(signal)))
    chunks = padded.unfold(0, STRIDE * CHUNK, STRIDE * stride)
    return chunks, [*[CHUNK] * (N - 1), total - (N - 1) * stride], total


def truths(reads: Reads) -> list[str]:
    """Return the true bases of each read."""
    rows = zip(reads.targets.tolist(), reads.lengths.tolist(), strict=True)
    return ["".join("NACGT"[base] for base in row[:length]) for row, length in rows]


def call(model: nn.Module, signals: Tensor, method: str) -> Basecalls:
    """Return the called bases of strands, all of whose chunks are one batch."""
    chunks, lengths, totals = zip(*map(chunks_of, signals), strict=True)
    calls = partita.ctc_crf_decode(
        model(torch.cat(chunks)), **SIZES, input_lengths=[*chain(*lengths)], method=method
    )
    return partita.stitch(calls, OVERLAP, chunks=[*map(len, chunks)], length=totals)


def compare(called: str, truth: str) -> Comparison:
    """Compare two sequences of bases by their edit distance."""
    a, b = (np.frombuffer(text.encode(), dtype=np.uint8) for text in (called, truth))
    index = np.arange(len(b) + 1)
    rows = [index]  # the distance of the first bases of both
    for base in a:
        row = np.append(rows[-1][0] + 1, np.minimum(rows[-1][1:] + 1, rows[-1][:-1] + (b != base)))
        rows.append(np.minimum.accumulate(row - index) + index)
    is_right, i, j = [], len(a), len(b)
    while i:
        if j and rows[i][j] == rows[i - 1][j - 1] + (a[i - 1] != b[j - 1]):
            is_right.append(bool(a[i - 1] == b[j - 1]))
            i, j = i - 1, j - 1
        elif j and rows[i][j] == rows[i][j - 1] + 1:  # a base that was not called
            j -= 1
        else:
            is_right.append(False)
            i -= 1
    return Comparison(float(1 - rows[-1][-1] / max(len(b), 1)), is_right[::-1])


def correct_bases(calls: Basecalls, reads: Reads) -> Tensor:
    """Return whether each called base is right, `[N, S]`."""
    correct = torch.zeros_like(calls.labels, dtype=torch.bool)
    for row, text, truth in zip(correct, calls.to_string(), truths(reads), strict=True):
        row[: len(text)] = torch.tensor(compare(text, truth).is_right, dtype=torch.bool)
    return correct


def phred_of(qualities: list[str]) -> Tensor:
    """Return the numbers that stand for all qualities of some lines of FASTQ."""
    return torch.tensor([*"".join(qualities).encode("ascii")], dtype=torch.float64) - 33


def errors_of(calls: Basecalls, correct: Tensor, calibration: tuple[float, float]) -> list[Errors]:
    """Return the errors of groups of bases, from the worst quality to the best."""
    valid = torch.arange(correct.shape[1]) < calls.lengths[:, None]
    before, after = phred_of(calls.qstring()), phred_of(calls.qstring(*calibration))
    columns = ~correct[valid], 10 ** (-before / 10), 10 ** (-after / 10)
    order = calls.log_probs[valid].argsort(stable=True)
    parts = zip(*(column[order].tensor_split(GROUPS) for column in columns), strict=True)
    return [Errors(len(x), int(x.sum()), float(y.sum()), float(z.sum())) for x, y, z in parts]


def draw_bases(
    current: Axes, bars: Axes, reads: Reads, calls: Basecalls, is_right: list[bool]
) -> None:
    """Plot the current around the first overlap, with the called bases and their qualities.

    A base has the steps from its move up to the next one.
    """
    first = STRIDE * (CHUNK - OVERLAP)
    begin, end = first - MARGIN, first + STRIDE * OVERLAP + MARGIN
    signal = reads.signals[0, begin:end]
    low, high = signal.min().item() - 0.3, signal.max().item() + 0.3
    current.plot(range(begin, end), signal, color=INK, lw=0.9, marker=".", ms=2.5)
    for sample in reads.ends[0].tolist():
        if begin < sample < end:
            current.plot([sample, sample], [low, low + 0.35], color=MUTED, lw=1)
    text = calls.to_string()[0]
    starts = [*(STRIDE * calls.steps[0, : len(text)]).tolist(), reads.signals.shape[1]]
    qualities = phred_of(calls.qstring()[:1]).tolist()
    rows = zip(text, starts, starts[1:], qualities, is_right, strict=False)
    for base, start, stop, quality, right in rows:
        if begin <= start and stop <= end:
            middle, colour = (start + stop) / 2, COLOURS[base]
            current.axvspan(start, stop, color=colour, alpha=0.2, lw=0)
            current.axvline(start, color="white", lw=1.2)
            bars.bar(middle, quality, width=stop - start - 0.6, color=colour if right else RED)
            current.text(
                middle,
                high + 0.12,
                base,
                ha="center",
                color=colour if right else RED,
                weight="bold",
            )
    bars.plot([first, first + STRIDE * OVERLAP], [-3, -3], color=MUTED, lw=4, clip_on=False)
    current.set(xlim=(begin, end), ylim=(low, high), xticks=[], ylabel="current")
    bars.set(xlim=(begin, end), ylim=(0, 52), xlabel="sample; two chunks share the marked ones")
    bars.set(ylabel="Phred quality,\nnot calibrated", yticks=[0, 20, 40])
    current.set_title(
        "Current around an overlap of two chunks, and the called bases from their moves on"
        " (ticks: true bases; red: wrong)",
        pad=22,
    )


def draw_errors(axes: Axes, errors: list[Errors]) -> None:
    """Plot the quality that was written beside that of the errors, with two standard deviations."""
    errors = [each for each in errors if each.bases]
    for name, colour, label in (("before", MUTED, "not calibrated"), ("after", BLUE, "calibrated")):
        written = [-10 * np.log10(getattr(each, name) / each.bases) for each in errors]
        # Half of an error stands for none.
        ends = [
            [-10 * np.log10(max(each.wrong + z * each.wrong**0.5, 0.5) / each.bases) for z in zs]
            for each in errors
            for zs in [(2, 0, -2)]
        ]
        seen = [middle for _, middle, _ in ends]
        bars = np.array([[middle - low, high - middle] for low, middle, high in ends]).T
        axes.errorbar(written, seen, bars, color=colour, label=label, fmt="o", capsize=3)
    axes.axline((0, 0), slope=1, color=INK, lw=1)
    axes.set(xlim=(0, 32), ylim=(0, 32), xlabel="Phred quality that is written")
    axes.set(ylabel="that of the errors", title="Qualities and errors of other strands")
    axes.legend(frameon=False, loc="lower right")


def draw(
    path: Path,
    losses: list[float],
    reads: Reads,
    calls: Basecalls,
    found: Comparison,
    errors: list[Errors],
) -> None:
    figure = Figure(figsize=(13, 8), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(2.2, 1, 1.8))
    current, bars = figure.add_subplot(grid[0, :]), figure.add_subplot(grid[1, :])
    draw_bases(current, bars, reads, calls, found.is_right)
    training, reliability = figure.add_subplot(grid[2, 0]), figure.add_subplot(grid[2, 1])
    training.plot(losses, color=BLUE, lw=1)
    log_axis(training, steps=(1.0, 2.0, 5.0))
    training.set(xlabel="batch", title="CTC-CRF loss of a base, nats")
    draw_errors(reliability, errors)
    for axes in (current, bars, training, reliability):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.suffix[1:].lower() in figure.canvas.get_supported_filetypes()
    figure.savefig(path, dpi=110, format=None if known else "png")


def run(
    batches: int, seed: int, out: Path, fastq: Path | None = None, quiet: bool = False
) -> Report:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Basecaller()
    losses = train(model, batches, generator, quiet)
    reads = simulate(1, STRAND, generator)
    (truth,) = truths(reads)
    known, others = simulate(STRANDS, STRAND, generator), simulate(STRANDS, STRAND, generator)
    beam = METHODS[-1]
    with torch.no_grad():
        calls = {method: call(model, reads.signals, method) for method in METHODS}
        of_known, of_others = call(model, known.signals, beam), call(model, others.signals, beam)
        scores = model(reads.signals)
    best = calls[beam]
    found = {method: compare(each.to_string()[0], truth) for method, each in calls.items()}
    whole = partita.ctc_crf_decode(scores, **SIZES, method=beam)
    correct = correct_bases(of_known, known)
    # A network that has hardly been trained calls few bases, and they may all be right.
    all_right = int(correct.sum()) == int(of_known.lengths.sum())
    calibration = (0.0, 1.0) if all_right else of_known.calibrate(correct)
    errors = errors_of(of_others, correct_bases(of_others, others), calibration)
    draw(out, losses, reads, best, found[beam], errors)
    offset, scale = calibration
    if fastq:
        fastq.parent.mkdir(parents=True, exist_ok=True)
        text = best.to_fastq(["strand"], offset=offset, scale=scale)
        fastq.write_text(text, encoding="ascii")
    return Report(
        identity={method: each.identity for method, each in found.items()},
        bases=len(truth),
        chunks=len(chunks_of(reads.signals[0])[0]),
        like_whole=compare(best.to_string()[0], whole.to_string()[0]).identity,
        calibration=calibration,
        errors=errors,
        mean_quality=float(of_others.mean_q(offset=offset, scale=scale).mean()),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Train a basecaller on simulated currents with Partita's CTC-CRF."
    )
    parser.add_argument(
        "--batches",
        type=positive,
        default=BATCHES,
        help=f"batches of {BATCH} reads (default {BATCHES})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("basecaller.png"),
        help="picture to write (default basecaller.png)",
    )
    parser.add_argument("--fastq", type=Path, help="file of the called bases (default: none)")
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)  # layers this small spend more time on sharing than on work
    report = run(options.batches, options.seed, options.out, options.fastq, options.quiet)
    print(f"Strand: {report.bases} bases, read in {report.chunks} chunks")
    for method, identity in report.identity.items():
        print(f"Identity of {method}: {identity:.1%}")
    print(f"Identity with the strand in one piece: {report.like_whole:.1%}")
    offset, scale = report.calibration
    print(f"Calibration: offset {offset:.1f}, scale {scale:.2f}, from {STRANDS} strands")
    for name, each in zip(("low", "middle", "high"), report.errors, strict=True):
        print(
            f"Errors at {name} qualities of others: {each.wrong} of {each.bases} bases,"
            f" by qualities {each.after:.0f} (not calibrated {each.before:.0f})"
        )
    print(f"Mean quality: {report.mean_quality:.1f}")
    print(f"Picture: {options.out}")
    learnt = report.identity[METHODS[-1]] >= REQUIRED_IDENTITY
    if not (learnt and report.holds) and options.batches < BATCHES:
        print(f"{options.batches} batches are too few to learn this; {BATCHES} are the default.")
    elif not learnt:
        print(f"The identity is below {REQUIRED_IDENTITY:.0%}.", file=sys.stderr)
        return 1
    elif not report.holds:
        print("Other strands have more or fewer errors than their qualities say.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
