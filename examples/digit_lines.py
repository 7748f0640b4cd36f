"""Read lines of handwritten digits: train a small network with Partita's CTC loss, and plot it.

    python examples/digit_lines.py --batches 900 --out digit_lines.png

A line is 4 to 10 scans of the digits of `digits.py`, cropped, shifted, and set side by side with
gaps between them. The network is never told where a digit ends. The test lines are made of digits
that it has never seen. The exit code is 1 when it reads fewer than 90 % of them without a fault.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from digits import BLUE, INK, MUTED, RED, Difference, Digits, load, log_axis, positive, training_bar
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import partita

BATCHES = 900  # by default
REQUIRED_ACCURACY = 0.9
BATCH = 32
TEST_LINES = 500
SHORTEST, LONGEST = 4, 10
HEIGHT, WIDEST_GAP = 10, 3
WIDTH = LONGEST * (8 + WIDEST_GAP)
CLASSES = 11  # the blank, and digit d as class d + 1
COLUMNS_A_STEP = 2


class Lines(NamedTuple):
    """A batch of lines. `input_lengths` counts the network's steps; each sees two columns."""

    images: Tensor  # [N, 1, HEIGHT, WIDTH]
    targets: Tensor  # [N, LONGEST], 0 past the length
    input_lengths: Tensor  # [N]
    target_lengths: Tensor  # [N]


@dataclass(frozen=True)
class Report:
    """The share of test lines read without a fault, and the comparison with PyTorch."""

    accuracy: float
    difference: Difference


class Reader(nn.Module):
    """Convolutions over the line, then a recurrent network along its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(24, 64, 3, padding=1),
            nn.ReLU(),
            nn.Dropout(0.1),
        )
        self.recurrent = nn.GRU(64 * (HEIGHT // 2), 64, bidirectional=True)
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(2 * 64, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, `[T, N, CLASSES]`."""
        columns = self.convolutions(images).flatten(1, 2).permute(2, 0, 1)
        return self.head(self.recurrent(columns)[0])


def compose(
    digits: Digits,
    N: int,
    generator: torch.Generator,
    shortest: int = SHORTEST,
    longest: int = LONGEST,
) -> Lines:
    """Return N random lines of `shortest` to `longest` of these digits."""
    images = torch.zeros(N, 1, HEIGHT, longest * (8 + WIDEST_GAP))
    targets = torch.zeros(N, longest, dtype=torch.int64)
    lengths = torch.randint(shortest, longest + 1, (N,), generator=generator)
    widths = torch.zeros(N, dtype=torch.int64)
    for n, length in enumerate(lengths.tolist()):
        x = 0
        chosen = torch.randint(len(digits.labels), (length,), generator=generator)
        for position, i in enumerate(chosen.tolist()):
            picture = digits.images[i, 0]
            inked = picture.sum(0).nonzero().flatten()
            picture = picture[:, int(inked[0]) : int(inked[-1]) + 1]
            gap, drop = (
                int(torch.randint(top, (), generator=generator))
                for top in (WIDEST_GAP + 1, HEIGHT - 7)
            )
            x += gap
            images[n, 0, drop : drop + 8, x : x + picture.shape[1]] = picture
            x += picture.shape[1]
            targets[n, position] = digits.labels[i] + 1
        widths[n] = x
    return Lines(images, targets, (widths + COLUMNS_A_STEP - 1) // COLUMNS_A_STEP, lengths)


def train(
    model: nn.Module, digits: Digits, batches: int, generator: torch.Generator, quiet: bool
) -> list[float]:
    """Train the model and return the loss of each batch."""
    criterion = partita.nn.CTCLoss(from_logits=True)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=batches)
    losses = []
    model.train()
    with training_bar(quiet) as progress:
        task = progress.add_task("", total=batches, loss=float("nan"))
        for _ in range(batches):
            lines = compose(digits, BATCH, generator)
            loss = criterion(
                model(lines.images), lines.targets, lines.input_lengths, lines.target_lengths
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            progress.update(task, advance=1, loss=losses[-1])
    return losses


def read(logits: Tensor, input_lengths: Tensor) -> list[list[int]]:
    """Return the digits of each line, by a beam search that sums over their alignments."""
    found = partita.ctc_beam_search(logits, input_lengths, from_logits=True)
    rows = zip(found.tokens[:, 0].tolist(), found.lengths[:, 0].tolist(), strict=True)
    return [[c - 1 for c in tokens[:length]] for tokens, length in rows]


def truth(lines: Lines) -> list[list[int]]:
    """Return the digits that each line was composed of."""
    return [
        [int(c) - 1 for c in target[:length]]
        for target, length in zip(lines.targets, lines.target_lengths.tolist(), strict=True)
    ]


def compare(logits: Tensor, lines: Lines) -> Difference:
    """Compare the loss and its gradient in the logits with PyTorch's log-softmax and loss."""
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    rest = lines.targets, lines.input_lengths, lines.target_lengths
    loss = partita.ctc_loss(ours, *rest, from_logits=True)
    expected = nn.functional.ctc_loss(theirs.log_softmax(-1), *rest)
    loss.backward()
    expected.backward()
    assert ours.grad is not None and theirs.grad is not None
    return Difference(
        abs(loss.item() - expected.item()), (ours.grad - theirs.grad).abs().max().item()
    )


def draw_line(picture: Axes, posterior: Axes, lines: Lines, logits: Tensor, n: int) -> None:
    """Plot a line with the span of each digit, over the classes' probabilities.

    A confidence that rounds to 100 % is not written, so that narrow digits keep their distance.
    """
    length, labels = int(lines.input_lengths[n]), int(lines.target_lengths[n])
    width = COLUMNS_A_STEP * length
    picture.imshow(
        lines.images[n, 0, :, :width],
        cmap="gray_r",
        extent=(0, width, HEIGHT, 0),
        aspect="auto",
        interpolation="bicubic",
    )
    best = partita.ctc_align(
        logits[:, n : n + 1], lines.targets[n : n + 1], [length], [labels], from_logits=True
    )
    start, end, score = (t[0].tolist() for t in best.spans())
    for digit, a, b, s in zip(truth(lines)[n], start, end, score, strict=False):
        confidence = float(torch.tensor(s).exp())
        colour = BLUE if confidence > 0.5 else RED
        picture.axvspan(COLUMNS_A_STEP * a, COLUMNS_A_STEP * b, color=colour, alpha=0.25, lw=0)
        picture.text(
            COLUMNS_A_STEP * (a + b) / 2, -0.6, f"{digit}", ha="center", color=colour, weight="bold"
        )
        if confidence < 0.995:
            picture.text(
                COLUMNS_A_STEP * (a + b) / 2,
                HEIGHT + 0.4,
                f"{confidence:.0%}",
                ha="center",
                va="top",
                size=6.5,
                color=MUTED,
            )
    probabilities = partita.softmax(logits[:length, n], dim=-1).T
    posterior.imshow(
        probabilities, cmap="Blues", vmin=0, vmax=1, extent=(0, width, 10.5, -0.5), aspect="auto"
    )
    found = partita.ctc_beam_search(logits[:, n], [length], from_logits=True)
    emitted = slice(int(found.lengths))
    steps, classes = found.steps[0, 0, emitted], found.tokens[0, 0, emitted]
    middle = (COLUMNS_A_STEP * (steps + 0.5)).tolist()
    posterior.plot(middle, classes, ".", color=RED, ms=4)
    posterior.set_xticks(middle, [str(step) for step in steps.tolist()], size=6.5, color=RED)
    posterior.tick_params(axis="x", length=2, pad=1)
    posterior.set(yticks=range(11))
    posterior.set_yticklabels(["–", *map(str, range(10))], size=6.5, color=INK)
    picture.set(xticks=[], yticks=[], ylim=(HEIGHT, 0))
    for axes in (picture, posterior):
        axes.set_xlim(0, WIDTH)
        axes.spines[:].set_visible(False)


def draw(path: Path, losses: list[float], lines: Lines, logits: Tensor) -> None:
    """Plot the training loss, three test lines and the one with the greatest loss per digit."""
    rest = lines.targets, lines.input_lengths, lines.target_lengths
    line_losses = partita.ctc_loss(logits, *rest, reduction="none", from_logits=True)
    hardest = int((line_losses / lines.target_lengths).argmax())
    figure = Figure(figsize=(12, 9), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 2.2))
    axes = left.subplots()
    axes.plot(losses, color=BLUE, lw=1)
    log_axis(axes, steps=(1.0, 2.0, 5.0))
    axes.set(xlabel="batch", title="CTC loss of a digit, nats")
    axes.spines[["top", "right"]].set_visible(False)
    right.suptitle(
        "Test lines: the digits that ctc_align finds, and the probabilities at each step;\n"
        "red: the steps at which ctc_beam_search emits the digits",
        size=11,
        weight="bold",
        color=INK,
    )
    for cell, n in zip(right.subfigures(4, 1), [0, 1, 2, hardest], strict=True):
        draw_line(*cell.subplots(2, 1, height_ratios=(1, 1.6)), lines, logits, n)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.suffix[1:].lower() in figure.canvas.get_supported_filetypes()
    figure.savefig(path, dpi=130, format=None if known else "png")


def run(batches: int, seed: int, out: Path, quiet: bool = False) -> Report:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    digits, test_digits = load(seed, torch.device("cpu"))
    model = Reader()
    losses = train(model, digits, batches, generator, quiet)
    lines = compose(test_digits, TEST_LINES, generator)
    model.eval()
    with torch.no_grad():
        logits = model(lines.images)
    draw(out, losses, lines, logits)
    right = [a == b for a, b in zip(read(logits, lines.input_lengths), truth(lines), strict=True)]
    few = Lines(*(t[:BATCH] for t in lines))
    return Report(sum(right) / len(right), compare(logits[:, :BATCH], few))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Train on lines of scikit-learn's handwritten digits with Partita's CTC loss."
    )
    parser.add_argument(
        "--batches",
        type=positive,
        default=BATCHES,
        help=f"batches of {BATCH} lines (default {BATCHES})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("digit_lines.png"),
        help="picture to write (default digit_lines.png)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    options = parser.parse_args(argv)

    torch.set_num_threads(1)  # layers this small spend more time on sharing than on work
    report = run(options.batches, options.seed, options.out, options.quiet)
    print(f"Loss diff: {report.difference.loss:.2e}")
    print(f"Grad diff (max): {report.difference.grad:.2e}")
    print(f"Lines read without a fault: {report.accuracy:.1%}")
    print(f"Picture: {options.out}")
    if report.accuracy < REQUIRED_ACCURACY and options.batches < BATCHES:
        print(f"{options.batches} batches are too few to learn this; {BATCHES} are the default.")
    elif report.accuracy < REQUIRED_ACCURACY:
        print(f"Fewer than {REQUIRED_ACCURACY:.0%} of the lines were read.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
