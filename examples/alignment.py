"""Find the wrong labels of a long transcript by aligning it to a page of real handwriting.

    python examples/alignment.py --lines 100 --errors 40 --out alignment.png

The page is one signal of thousands of steps: lines of test digits, set side by side, as
`digit_lines.py` composes and reads them. Its transcript has hundreds of labels; some of them are
changed and some are inserted. `ctc_align` finds the span of each label, and the score of a span
shows where the network does not believe the transcript. The exit code is 1 when fewer than 95 % of
the labels lie on their digits, or when the scores do not tell wrong labels from right ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch
from digit_lines import (
    CLASSES,
    COLUMNS_A_STEP,
    HEIGHT,
    LONGEST,
    SHORTEST,
    WIDTH,
    Reader,
    compose,
    train,
)
from digits import BLUE, FAINT, INK, MUTED, RED, Digits, load, positive
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

import partita
from partita.integrations.torchaudio import forced_align

BATCHES = 300  # by default
REQUIRED_PLACED = 0.95
REQUIRED_AREA = 0.95
ERRORS_PER_LINE = SHORTEST // 2  # at most, so that no two wrong labels are neighbours
ROWS, STEPS_PER_ROW = 3, 75  # the greatest size of the part that the picture shows in full
SURE = LinearSegmentedColormap.from_list("sure", [RED, "#d69e2e", "#38a89d", BLUE])


class Page(NamedTuple):
    """Lines of digits in one row."""

    signal: Tensor  # [HEIGHT, W], ink
    labels: Tensor  # [D], the class of each digit
    spans: Tensor  # [D, 2], its first column, and the column after its last


class Transcript(NamedTuple):
    """The labels that a transcriber gives for the page, some of them wrong."""

    labels: Tensor  # [L]
    digit: Tensor  # [L], index of the digit on the page that a label stands for; -1 if inserted
    is_error: Tensor  # [L]


@dataclass(frozen=True)
class Report:
    """The quality of an alignment, measured by the known page and the known errors."""

    steps: int
    labels: int
    errors: int
    placed: float  # the share of labels whose span overlaps their digit
    distance: float  # the mean distance of their centres, in steps
    area: float  # under the ROC curve of the errors, ranked by confidence
    found: int  # errors among the E labels of least confidence, where E is the number of errors
    same_path: bool  # whether forced_align finds the same path
    score_difference: float
    seconds: float = field(compare=False)


def compose_page(digits: Digits, N: int, seed: int) -> Page:
    """Return a page of N lines.

    The page is composed from the scans and, with the same seed, from marks of the first and last
    column of each scan. The marks give the spans of the digits.
    """
    inked = digits.images.amax(2, keepdim=True) > 0
    first, last = inked & (inked.cumsum(3) == 1), inked & (inked.flip(3).cumsum(3).flip(3) == 1)
    marks = (first + 2.0 * last).expand_as(digits.images)
    lines, marked = (
        compose(digits._replace(images=images), N, torch.Generator().manual_seed(seed))
        for images in (digits.images, marks)
    )
    on_page = torch.arange(WIDTH) < COLUMNS_A_STEP * lines.input_lengths[:, None]
    mark = marked.images.amax((1, 2))[on_page]
    spans = torch.cat([(mark % 2 == 1).nonzero(), (mark >= 2).nonzero() + 1], 1)
    labels = lines.targets[torch.arange(LONGEST) < lines.target_lengths[:, None]]
    return Page(lines.images[:, 0].transpose(0, 1)[:, on_page], labels, spans)


def spoil(truth: Tensor, errors: int, generator: torch.Generator) -> Transcript:
    """Return a transcript with errors: at random, a label is changed or another one inserted.

    A wrong label differs from its neighbours.
    """
    positions = set((2 * torch.randperm(len(truth) // 2, generator=generator)[:errors]).tolist())
    rows = []
    for i, label in enumerate(truth.tolist()):
        if i in positions:
            others = sorted({*range(1, CLASSES)} - {*truth[max(i - 1, 0) : i + 2].tolist()})
            other, changed = (
                int(torch.randint(top, (), generator=generator)) for top in (len(others), 2)
            )
            rows.append((others[other], i if changed else -1, True))
        if i not in positions or not changed:
            rows.append((label, i, False))
    labels, digit, is_error = torch.tensor(rows).unbind(1)
    return Transcript(labels, digit, is_error.bool())


def align(logits: Tensor, labels: Tensor) -> partita.CTCAlignment:
    """Return the best alignment of one transcript `[L]` to logits `[T, 1, CLASSES]`."""
    return partita.ctc_align(logits, labels[None], [len(logits)], [len(labels)], from_logits=True)


def judge(
    logits: Tensor, best: partita.CTCAlignment, page: Page, transcript: Transcript, seconds: float
) -> Report:
    """Measure an alignment by the known page and errors, and compare it with `forced_align`."""
    start, end, score = (t[0] for t in best.spans())
    is_error = transcript.is_error
    span = page.spans[transcript.digit] / COLUMNS_A_STEP
    placed = (start < span[:, 1]) & (end > span[:, 0])
    distance = ((start + end) / 2 - span.mean(1)).abs()
    on_page = transcript.digit >= 0
    right, doubted = score[~is_error][:, None], score[is_error]
    area = ((right > doubted).double() + (right == doubted).double() / 2).mean()
    found = is_error[score.argsort(stable=True)[: len(doubted)]].sum()
    log_probs = partita.log_softmax(logits, dim=-1).transpose(0, 1)
    path, scores = forced_align(log_probs, transcript.labels[None])
    return Report(
        steps=len(logits),
        labels=len(is_error),
        errors=len(doubted),
        placed=placed[on_page].double().mean().item(),
        distance=distance[on_page].double().mean().item(),
        area=area.item(),
        found=int(found),
        same_path=torch.equal(path, best.labels),
        score_difference=abs(scores.double().sum() - best.score.double()).item(),
        seconds=seconds,
    )


def draw_row(
    picture: Axes,
    curve: Axes,
    begin: int,
    end: int,
    page: Page,
    transcript: Transcript,
    spans: partita.TokenSpans,
) -> None:
    """Plot some steps of the page: the scans over each column's ink, with the labels' spans."""
    signal = page.signal[:, COLUMNS_A_STEP * begin : COLUMNS_A_STEP * end]
    time = begin + (torch.arange(signal.shape[1]) + 0.5) / COLUMNS_A_STEP
    picture.imshow(
        signal.numpy(),
        cmap="gray_r",
        extent=(begin, end, HEIGHT, 0),
        aspect="auto",
        interpolation="bicubic",
    )
    curve.fill_between(time, signal.sum(0), color=FAINT, lw=0)
    curve.plot(time, signal.sum(0), color=MUTED, lw=0.8)
    for label, is_error, first, last, score in zip(
        transcript.labels.tolist(),
        transcript.is_error.tolist(),
        *(t[0].tolist() for t in spans),
        strict=True,
    ):
        if begin <= first < end:
            colour = SURE(exp(score))
            for axes in (picture, curve):
                axes.axvspan(first, last, color=colour, alpha=0.4, lw=0)
            ring = {"boxstyle": "circle,pad=0.2", "ec": INK, "fc": "none"} if is_error else None
            picture.text(
                (first + last) / 2,
                -2,
                f"{label - 1}",
                ha="center",
                va="center",
                color=colour,
                weight="bold",
                bbox=ring,
            )
    picture.set(xticks=[], yticks=[], ylim=(HEIGHT, 0))
    curve.set(yticks=[], ylim=(0, HEIGHT - 2))
    curve.tick_params(color=MUTED, labelcolor=MUTED, labelsize=7.5)
    for axes in (picture, curve):
        axes.set_xlim(begin, begin + STEPS_PER_ROW)
        axes.spines[:].set_visible(False)


def draw_overview(
    axes: Axes,
    steps: int,
    shown: tuple[int, int],
    transcript: Transcript,
    spans: partita.TokenSpans,
) -> None:
    """Plot the confidence of every label, with the errors ringed."""
    start, end, score = (t[0] for t in spans)
    time, confidence = (start + end) / 2, score.exp().clamp(min=1e-8)
    axes.axvspan(*shown, color=FAINT, lw=0)
    axes.scatter(time, confidence, c=SURE(confidence.numpy()), s=9, zorder=2, clip_on=False)
    axes.scatter(
        time[transcript.is_error],
        confidence[transcript.is_error],
        s=42,
        facecolor="none",
        edgecolor=INK,
        lw=0.9,
        zorder=2,
        clip_on=False,
    )
    axes.set(yscale="log", xlim=(0, steps), ylim=(1e-8, 1.5), xlabel="step")
    axes.tick_params(color=MUTED, labelcolor=INK)
    axes.grid(axis="y", color=FAINT, lw=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)


def draw(
    path: Path, page: Page, transcript: Transcript, spans: partita.TokenSpans, steps: int
) -> None:
    """Plot the part of the page with the most errors, and the confidence of every label."""
    edges = torch.cat([page.spans[:, 0] // COLUMNS_A_STEP, torch.tensor([steps])])
    start = spans.start[0, transcript.is_error]
    within = (start >= edges[:-1, None]) & (start < edges[:-1, None] + ROWS * STEPS_PER_ROW)
    cuts = [int(edges[within.sum(1).argmax()])]
    while len(cuts) <= ROWS and cuts[-1] < steps:
        cuts.append(int(edges[edges <= cuts[-1] + STEPS_PER_ROW].max()))
    rows = len(cuts) - 1
    figure = Figure(figsize=(12, 3.4 + 1.5 * rows), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.5 * rows, 3.2), hspace=0.03)
    heading = {"x": 0.01, "ha": "left", "size": 12, "weight": "bold", "color": INK}
    top.suptitle("The transcript, laid over the page by ctc_align", **heading)
    cells = top.subplots(2 * rows, 1, height_ratios=(1.6, 1) * rows).reshape(rows, 2)
    for (picture, curve), begin, end in zip(cells, cuts[:-1], cuts[1:], strict=True):
        draw_row(picture, curve, begin, end, page, transcript, spans)
    bottom.suptitle("The confidence in each label of the page", **heading)
    bottom.supxlabel(
        "ringed: wrong labels, changed or inserted   grey: the part above", size=9, color=MUTED
    )
    axes = bottom.subplots()
    draw_overview(axes, steps, (cuts[0], cuts[-1]), transcript, spans)
    bottom.colorbar(ScalarMappable(cmap=SURE), ax=axes, pad=0.01, label="colour: confidence")
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.suffix[1:].lower() in figure.canvas.get_supported_filetypes()
    figure.savefig(path, dpi=130, format=None if known else "png")


def run(lines: int, errors: int, batches: int, seed: int, out: Path, quiet: bool = False) -> Report:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    digits, test_digits = load(seed, torch.device("cpu"))
    model = Reader()
    train(model, digits, batches, generator, quiet)
    page = compose_page(test_digits, lines, seed)
    transcript = spoil(page.labels, errors, generator)
    model.eval()
    with torch.no_grad():
        logits = model(page.signal[None, None])
    align(logits[:1], transcript.labels[:1])  # The first call compiles and is not timed.
    begin = perf_counter()
    best = align(logits, transcript.labels)
    seconds = perf_counter() - begin
    draw(out, page, transcript, best.spans(), len(logits))
    return judge(logits, best, page, transcript, seconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Find the wrong labels in a transcript of scikit-learn's handwritten digits."
    )
    parser.add_argument(
        "--lines", type=positive, default=100, help="lines of the page (default 100)"
    )
    parser.add_argument(
        "--errors",
        type=positive,
        default=40,
        help=f"wrong labels, at most {ERRORS_PER_LINE} to a line (default 40)",
    )
    parser.add_argument(
        "--batches",
        type=positive,
        default=BATCHES,
        help=f"batches of lines to train on (default {BATCHES})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("alignment.png"),
        help="picture to write (default alignment.png)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    options = parser.parse_args(argv)
    if options.errors > ERRORS_PER_LINE * options.lines:
        limit = ERRORS_PER_LINE * options.lines
        parser.error(
            f"argument --errors: expected at most {ERRORS_PER_LINE} to a line, {limit},"
            f" got {options.errors}"
        )

    torch.set_num_threads(1)  # layers this small spend more time on sharing than on work
    report = run(
        options.lines, options.errors, options.batches, options.seed, options.out, options.quiet
    )
    path = "the same path" if report.same_path else "another path"
    print(
        f"Page: {report.steps:,} steps, {report.labels:,} labels, {report.errors:,} of them wrong"
    )
    print(f"Time of the alignment: {1000 * report.seconds:.1f} ms")
    print(f"Labels on their digits: {report.placed:.1%}, centres {report.distance:.2f} steps apart")
    print(
        f"Wrong labels: {report.found:,} among the {report.errors:,} least sure,"
        f" area under ROC {report.area:.4f}"
    )
    print(f"Compared with forced_align: {path}, score diff {report.score_difference:.2e}")
    print(f"Picture: {options.out}")
    learned = report.placed >= REQUIRED_PLACED and report.area >= REQUIRED_AREA
    if report.same_path and not learned and options.batches < BATCHES:
        print(f"{options.batches} batches are too few to learn this; {BATCHES} are the default.")
    elif not (learned and report.same_path):
        print(
            f"Below {REQUIRED_PLACED:.0%} of labels on their digits, below an area of"
            f" {REQUIRED_AREA}, or not the path of forced_align.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
