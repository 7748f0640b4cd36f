"""Train a small network on handwritten digits with Partita's cross-entropy, and plot the results.

    python examples/digits.py --epochs 20 --out digits.png

The digits are the 1,797 scans of 8 × 8 pixels that come with scikit-learn (E. Alpaydin and C.
Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998). A quarter
of them is the test set. The exit code is 1 when the network reads fewer than 97 % of those.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import partita

REQUIRED_ACCURACY = 0.97
BATCH = 64
INK, MUTED, FAINT, BLUE, RED = "#1f2933", "#9aa5b1", "#e4e7eb", "#2b6cb0", "#c53030"


class Digits(NamedTuple):
    """Scans of digits and their classes."""

    images: Tensor  # [N, 1, 8, 8], 0 … 1
    labels: Tensor  # [N]


class Difference(NamedTuple):
    """The greatest differences of Partita's loss and gradient from PyTorch's."""

    loss: float
    grad: float


@dataclass(frozen=True)
class TrainingCurves:
    """The losses of a run."""

    batch_losses: list[float]  # one for each batch
    test_losses: list[float]  # one for each epoch


@dataclass(frozen=True)
class Report:
    """The test accuracy, and the comparison with PyTorch."""

    accuracy: float
    difference: Difference


def load(seed: int, device: torch.device) -> tuple[Digits, Digits]:
    """Return the training set and the test set, with every digit equally frequent in both."""
    from sklearn.datasets import load_digits  # The other examples need no scikit-learn.
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16, dtype=torch.float32, device=device).view(-1, 1, 8, 8)
    targets = torch.tensor(labels, device=device)
    train, test = train_test_split(
        torch.arange(len(labels)), test_size=0.25, stratify=labels, random_state=seed
    )
    return Digits(images[train], targets[train]), Digits(images[test], targets[test])


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * 4 * 4, 10),
    )


def logits_of(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits, `[N, 10]`, of a model in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return model(images)


def training_bar(
    quiet: bool,
    *,
    title: str = "Training",
    unit: str = "batches",
    text: str = "loss {task.fields[loss]:.3f}",
) -> Progress:
    """Return a progress bar that ends with a text from the fields of its task."""
    columns = (
        *(title, BarColumn(), MofNCompleteColumn(), unit, TimeElapsedColumn()),
        TextColumn(text),
    )
    return Progress(*columns, disable=quiet)


def train(
    model: nn.Module, digits: Digits, test: Digits, epochs: int, quiet: bool
) -> TrainingCurves:
    criterion = partita.nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = len(digits.labels) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=5e-3, total_steps=epochs * batches
    )
    batch_losses: list[float] = []
    test_losses: list[float] = []
    text = "test loss {task.fields[loss]:.4f}"
    with training_bar(quiet, unit="epochs", text=text) as progress:
        task = progress.add_task("", total=epochs, loss=float("nan"))
        for _ in range(epochs):
            model.train()
            losses = []
            for index in torch.randperm(len(digits.labels)).tensor_split(batches):
                loss = criterion(model(digits.images[index]), digits.labels[index])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.detach())
            batch_losses += torch.stack(losses).tolist()
            test_losses.append(criterion(logits_of(model, test.images), test.labels).item())
            progress.update(task, advance=1, loss=test_losses[-1])
    return TrainingCurves(batch_losses, test_losses)


def compare(logits: Tensor, labels: Tensor) -> Difference:
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss, expected = (
        partita.cross_entropy(ours, labels),
        nn.functional.cross_entropy(theirs, labels),
    )
    loss.backward()
    expected.backward()
    assert ours.grad is not None and theirs.grad is not None
    return Difference(
        abs(loss.item() - expected.item()), (ours.grad - theirs.grad).abs().max().item()
    )


def log_axis(axes: Axes, steps: Sequence[float] = (1.0,)) -> None:
    """Make the vertical axis logarithmic, with plain numbers at these multiples of 1, 10, 100, …"""
    axes.set(yscale="log")
    axes.yaxis.set_major_locator(LogLocator(subs=steps))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def draw_losses(axes: Axes, training: TrainingCurves) -> None:
    epochs = range(1, len(training.test_losses) + 1)
    per_epoch = len(training.batch_losses) / len(epochs)
    time = [(i + 1) / per_epoch for i in range(len(training.batch_losses))]
    axes.plot(time, training.batch_losses, color=MUTED, lw=0.8, label="each training batch")
    axes.plot(epochs, training.test_losses, color=BLUE, lw=2, marker="o", ms=4, label="test digits")
    log_axis(axes)
    axes.set(xlabel="epoch", xlim=(0, len(epochs) * 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.tick_params(which="both", color=MUTED, labelcolor=INK)
    axes.grid(axis="y", color=FAINT, lw=0.8)
    axes.legend(frameon=False, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)


def draw_digit(
    picture: Axes, bars: Axes, image: np.ndarray, label: int, probabilities: np.ndarray
) -> None:
    guess = int(probabilities.argmax())
    picture.imshow(image, cmap="gray_r", vmin=0, vmax=1, interpolation="bicubic")
    picture.set(xticks=[], yticks=[])
    picture.spines[:].set_color(FAINT)
    colours = [MUTED] * 10
    colours[guess] = BLUE if guess == label else RED
    bars.bar(range(10), probabilities, width=0.9, color=colours)
    bars.set(ylim=(0, 1), yticks=[], xticks=range(10))
    bars.tick_params(length=0, labelsize=7.5, labelcolor=MUTED, pad=3)
    bars.get_xticklabels()[label].set(color=INK, weight="bold")
    bars.spines[["top", "left", "right"]].set_visible(False)
    bars.spines["bottom"].set_color(MUTED)


def draw(path: Path, training: TrainingCurves, test: Digits, logits: Tensor) -> None:
    """Plot the loss curve and a dozen test digits.

    These are eight in order and the four that the network is least sure of.
    """
    entropy = partita.token_stats(logits, test.labels).entropy
    unsure = entropy.argsort(descending=True)[:4].tolist()
    chosen = [i for i in range(len(entropy)) if i not in unsure][:8] + unsure
    probabilities = partita.softmax(logits, dim=-1).cpu().numpy()
    pictures = test.images.squeeze(1).cpu().numpy()

    figure = Figure(figsize=(12, 6.4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.35), wspace=0.04)
    heading = {"x": 0.02, "ha": "left", "size": 12, "weight": "bold", "color": INK}
    left.suptitle("Cross-entropy", **heading)
    draw_losses(left.subplots(), training)
    certain, uncertain = right.subfigures(2, 1, height_ratios=(2, 1.05))
    right.supxlabel(
        "blue: read correctly   red: misread   bold: the true digit", size=9, color=MUTED
    )
    certain.suptitle("Test digits, and the class that the network gives them", **heading)
    uncertain.suptitle("The four it is least sure of", **heading)
    cells = [*certain.subfigures(2, 4).flat, *uncertain.subfigures(1, 4)]
    for cell, i in zip(cells, chosen, strict=True):
        picture, bars = cell.subplots(2, 1, height_ratios=(2, 1))
        draw_digit(picture, bars, pictures[i], int(test.labels[i]), probabilities[i])
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.suffix[1:].lower() in figure.canvas.get_supported_filetypes()
    figure.savefig(path, dpi=150, format=None if known else "png")


def run(epochs: int, seed: int, out: Path, quiet: bool = False) -> Report:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    digits, test = load(seed, device)
    model = network().to(device)
    training = train(model, digits, test, epochs, quiet)
    logits = logits_of(model, test.images)
    draw(out, training, test, logits)
    accuracy = (logits.argmax(-1) == test.labels).float().mean().item()
    return Report(accuracy, compare(logits[:BATCH], test.labels[:BATCH]))


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError
    return value


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Train on scikit-learn's handwritten digits with Partita's cross-entropy."
    )
    parser.add_argument(
        "--epochs", type=positive, default=20, help="passes over the training digits (default 20)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the split, the weights and the order of the batches (default 0)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("digits.png"),
        help="where to write the picture (default digits.png)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    options = parser.parse_args(argv)

    report = run(options.epochs, options.seed, options.out, options.quiet)
    print("Loss diff:", report.difference.loss)
    print("Grad diff (max):", report.difference.grad)
    print(f"Test accuracy: {report.accuracy:.2%}")
    print("Picture:", options.out)
    if report.accuracy < REQUIRED_ACCURACY:
        print(f"The test accuracy is below {REQUIRED_ACCURACY:.0%}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
