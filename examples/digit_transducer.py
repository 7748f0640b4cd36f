"""Read lines of handwritten digits with a small transducer, and plot when it writes each digit.

    python examples/digit_transducer.py --batches 600 --out digit_transducer.png

The lines are those of `digit_lines.py`, of 2 or 3 digits. An encoder sees the columns of the line,
a predictor the digit that was written last, and a joint network decides at each step whether to
write the next digit or to go on. `linear_rnnt_loss` trains all three without the output of the
joint in memory, and CTC on the encoder helps it, as is usual. The test lines are read by greedy
search, by beam search, and with a model of how long lines are. The exit code is 1 when greedy
search reads fewer than 60 % of them without a fault.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import digit_lines
import torch
from digit_lines import CLASSES, HEIGHT, Lines, compose, truth
from digits import BLUE, INK, Difference, Digits, load, positive
from matplotlib.figure import Figure
from torch import Tensor, nn

import partita

BATCHES = 600  # by default
REQUIRED_ACCURACY = 0.6
BATCH = 32
TEST_LINES = 200
SHORTEST, LONGEST = 2, 3
HIDDEN = 64
BLANK = 0
MAX_DIGITS_A_STEP = 2  # the searches write no more at one step


@dataclass(frozen=True)
class Report:
    """The share of test lines read with a fault by each search, and the comparison."""

    errors: dict[str, float]
    difference: Difference


class Transducer(nn.Module):
    """An encoder of columns, a predictor of the last digit, and the matrix of the joint."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, HIDDEN, (HEIGHT, 9), stride=(1, 2), padding=(0, 4)),
            nn.ReLU(),
        )
        self.recurrent = nn.GRU(HIDDEN, HIDDEN // 2, batch_first=True, bidirectional=True)
        self.predictor = nn.Embedding(CLASSES, HIDDEN)  # of the last digit; 0 before the first
        self.head = nn.Linear(HIDDEN, CLASSES)
        self.ctc_head = nn.Linear(HIDDEN, CLASSES)

    def encode(self, images: Tensor) -> Tensor:
        """Return the states of the steps, `[N, T, HIDDEN]`."""
        columns = self.convolutions(images).squeeze(2).transpose(1, 2)
        return columns + self.recurrent(columns)[0]

    def predict(self, targets: Tensor) -> Tensor:
        """Return the states before and after each digit, `[N, U + 1, HIDDEN]`."""
        return self.predictor(nn.functional.pad(targets, (1, 0)))

    def loss(self, lines: Lines, encoder: Tensor | None = None) -> Tensor:
        """Return the mean loss, without the output of the joint network in memory."""
        return partita.linear_rnnt_loss(
            self.encode(lines.images) if encoder is None else encoder,
            self.predict(lines.targets),
            self.head.weight,
            lines.targets,
            lines.input_lengths,
            lines.target_lengths,
            linear_bias=self.head.bias,
            activation="tanh",
            blank=BLANK,
            reduction="mean_volume",
        )

    def loss_with_ctc(self, lines: Lines) -> tuple[Tensor, Tensor]:
        """Return the loss, and its sum with CTC on the encoder, which learns digits faster."""
        encoder = self.encode(lines.images)
        loss, steps = self.loss(lines, encoder), self.ctc_head(encoder).transpose(0, 1)
        lengths = (lines.input_lengths, lines.target_lengths)
        return loss, loss + partita.ctc_loss(steps, lines.targets, *lengths, from_logits=True)

    def logits(self, lines: Lines) -> Tensor:
        """Return the output of the joint network, `[N, T, U + 1, CLASSES]`."""
        encoder, predictor = self.encode(lines.images), self.predict(lines.targets)
        return self.head((encoder[:, :, None] + predictor[:, None]).tanh())


def train(
    model: Transducer, digits: Digits, batches: int, generator: torch.Generator
) -> list[float]:
    """Train the model and return the loss of each batch."""
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=batches)
    losses = []
    for _ in range(batches):
        lines = compose(digits, BATCH, generator, SHORTEST, LONGEST)
        loss, total = model.loss_with_ctc(lines)
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


class LineLengths:
    """A language model of lines that knows how many digits they have; its states count them."""

    def start(self, B: int) -> Tensor:
        return torch.zeros(B, dtype=torch.int64)

    def advance(self, states: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.zeros(len(states)).masked_fill(states >= LONGEST, -math.inf)
        return scores[:, None].expand(-1, CLASSES), (states + 1)[:, None].expand(-1, CLASSES)

    def final(self, states: Tensor) -> Tensor:
        return torch.zeros(len(states)).masked_fill(states < SHORTEST, -math.inf)


def read(model: Transducer, lines: Lines) -> dict[str, list[list[int]]]:
    """Return the digits of each line as each search finds them."""

    def predict(tokens: Tensor, state: None) -> tuple[Tensor, None]:
        return model.predictor(tokens), state

    def join(frames: Tensor, output: Tensor) -> Tensor:
        return model.head((frames + output).tanh())

    network = (model.encode(lines.images), lines.input_lengths, predict, join)
    options = {"blank": BLANK, "max_symbols_per_step": MAX_DIGITS_A_STEP}
    beam = {**options, "beam_width": 4}
    model_of_lines = {"language_model": LineLengths(), "alpha": 1.0}
    searches = {
        "greedy": partita.rnnt_greedy_search(*network, **options),
        "beam 4": partita.rnnt_beam_search(*network, **beam),
        "beam 4 and a model": partita.rnnt_beam_search(*network, **beam, **model_of_lines),
    }
    return {
        name: [
            [digit - 1 for digit in tokens[0, : lengths[0]].tolist()]
            for tokens, lengths in zip(found.tokens, found.lengths, strict=True)
        ]
        for name, found in searches.items()
    }


def compare(model: Transducer, lines: Lines) -> Difference:
    """Compare the loss and a gradient with those of all logits, in plain PyTorch."""
    weight = model.head.weight
    (ours,) = torch.autograd.grad(loss := model.loss(lines), weight)
    lengths = (lines.input_lengths, lines.target_lengths)
    with partita.backend("reference"):
        logits, options = model.logits(lines), {"blank": BLANK, "reduction": "mean_volume"}
        expected = partita.rnnt_loss(logits, lines.targets, *lengths, **options)
        (theirs,) = torch.autograd.grad(expected, weight)
    return Difference(abs(loss.item() - expected.item()), (ours - theirs).abs().max().item())


def draw(path: Path, losses: list[float], lines: Lines, logits: Tensor) -> None:
    """Plot the training loss, and three lines with the step at which each digit is written."""
    lengths = (lines.input_lengths, lines.target_lengths)
    best = partita.rnnt_align(logits, lines.targets, *lengths, blank=BLANK)
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes, *rows = figure.subplots(4, 1, height_ratios=(2, 1, 1, 1))
    axes.plot(losses, color=BLUE, lw=1)
    axes.set(yscale="log", xlabel="batch", title="Transducer loss of a digit, nats")
    axes.spines[["top", "right"]].set_visible(False)
    for n, row in enumerate(rows):
        row.imshow(lines.images[n, 0], cmap="gray_r", aspect="auto", interpolation="bicubic")
        for step, digit in zip(best.steps[n].tolist(), truth(lines)[n], strict=False):
            x = digit_lines.COLUMNS_A_STEP * step
            row.axvline(x, color=BLUE, lw=1)
            row.text(x, -0.8, f"{digit}", ha="center", color=INK, weight="bold")
        row.set(xticks=[], yticks=[])
        row.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.suffix[1:].lower() in figure.canvas.get_supported_filetypes()
    figure.savefig(path, dpi=130, format=None if known else "png")


def run(batches: int, seed: int, out: Path) -> Report:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    digits, test_digits = load(seed, torch.device("cpu"))
    model = Transducer()
    losses = train(model, digits, batches, generator)
    lines = compose(test_digits, TEST_LINES, generator, SHORTEST, LONGEST)
    few = Lines(*(t[:BATCH] for t in lines))
    with torch.no_grad():
        found, logits = read(model, lines), model.logits(few)
    draw(out, losses, few, logits)
    expected = truth(lines)
    errors = {
        name: sum(a != b for a, b in zip(texts, expected, strict=True)) / len(expected)
        for name, texts in found.items()
    }
    return Report(errors, compare(model, few))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Train a transducer on lines of scikit-learn's handwritten digits."
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
        default=Path("digit_transducer.png"),
        help="picture to write (default digit_transducer.png)",
    )
    options = parser.parse_args(argv)

    torch.set_num_threads(1)  # layers this small spend more time on sharing than on work
    report = run(options.batches, options.seed, options.out)
    print(f"Loss diff: {report.difference.loss:.2e}")
    print(f"Grad diff (max): {report.difference.grad:.2e}")
    for name, error in report.errors.items():
        print(f"Lines read with a fault, {name}: {error:.1%}")
    print(f"Picture: {options.out}")
    accuracy = 1 - report.errors["greedy"]
    if accuracy < REQUIRED_ACCURACY and options.batches < BATCHES:
        print(f"{options.batches} batches are too few to learn this; {BATCHES} are the default.")
    elif accuracy < REQUIRED_ACCURACY:
        print(f"Fewer than {REQUIRED_ACCURACY:.0%} of the lines were read.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
