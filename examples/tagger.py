"""Colour source code without a parser: train a linear-chain CRF on Python's standard library.

    python examples/tagger.py --batches 400 --out tagger.png

The text is the standard library of the Python that runs this, in snippets of six lines. For each
character the `tokenize` module tells whether it begins a token (B-) or is inside one (I-), and the
kind of the token. A few convolutions score the tags of each character; they see six characters to
either side. Whether a character is within a string may depend on text many lines before, and only
the chain can carry that. It obeys the rules of the scheme BIO: no I- follows a tag of another
token, though a snippet may begin inside of one. The same network is trained on the same batches
with a softmax at each character instead of the chain. The farther a network sees, the less it gains
from a chain (try `--layers 12`). A tenth of the files is for the test. The exit code is 1 when the
CRF tags fewer than 90 % of their characters correctly.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from digits import BLUE, INK, MUTED, RED, Difference, positive, training_bar
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tagger_data import (
    BROKEN,
    CHARACTERS,
    KINDS,
    TAGS,
    TEST_FILES,
    Snippets,
    load,
)
from torch import Tensor, nn

import partita

BATCHES = 400  # by default
REQUIRED_ACCURACY = 0.9
BATCH = 32
WIDEST = 84  # the characters of a line in the picture
COLOURS = {
    "name": INK,
    "keyword": "#6b46c1",
    "number": "#b7791f",
    "string": "#2f855a",
    "comment": "#718096",
    "operator": "#2b6cb0",
}
UNSURE = "#f6ad55"


class Guess(NamedTuple):
    """Tags that a method finds, and the probability of each."""

    tags: Tensor  # [N, T]
    confidence: Tensor  # [N, T]


class Score(NamedTuple):
    """The accuracy of a guess."""

    characters: float  # the share of characters with the correct tag
    lines: float  # the share of lines without a mistake; blank lines do not count
    broken: int  # the number of I- tags after a tag of another token
    confidence: float  # the mean confidence


@dataclass(frozen=True)
class Report:
    """The results of a run for each method."""

    scores: dict[str, Score]
    difference: Difference
    milliseconds: dict[str, float] = field(compare=False)  # the time of a batch


class Tagger(nn.Module):
    """A network from characters `[N, T]` to emissions `[T, N, C]`, and the tables of the chain."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(layers))
        self.emit = nn.Linear(width, len(TAGS))
        self.transitions = nn.Parameter(torch.zeros(len(TAGS), len(TAGS)))
        self.ends = nn.Parameter(torch.zeros(2, len(TAGS)))  # scores of the first and last tags

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text).mT
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.emit(x.permute(2, 0, 1))

    def moves(self) -> Tensor:
        """Return the transitions; those that the scheme forbids are -inf, whatever is learnt."""
        return self.transitions.masked_fill(BROKEN, -torch.inf)

    def chain(self, emissions: Tensor, mask: Tensor) -> partita.LinearChain:
        return partita.linear_chain(emissions, self.moves(), *self.ends, mask=mask)


def chain_loss(chain: partita.LinearChain, batch: Snippets) -> Tensor:
    """Return log Z minus the score of the correct path, in nats a character."""
    return -chain.log_prob(states=batch.tags.T).sum() / batch.lengths.sum()


def crf_loss(model: Tagger, batch: Snippets) -> Tensor:
    return chain_loss(model.chain(model(batch.text), batch.mask), batch)


def softmax_loss(model: Tagger, batch: Snippets) -> Tensor:
    return partita.cross_entropy(
        model(batch.text).flatten(0, 1), batch.tags.T.flatten(), ignore_index=-1
    )


def crf_guess(model: Tagger, batch: Snippets) -> Guess:
    """Return the best path and the posterior of each of its tags."""
    chain = model.chain(model(batch.text), batch.mask)
    states, posterior = chain.viterbi().states, chain.state_marginals()  # [T, N], [T, N, C]
    return Guess(states.T, posterior.gather(2, states.clamp(min=0)[..., None])[..., 0].T)


def softmax_guess(model: Tagger, batch: Snippets) -> Guess:
    confidence, tags = partita.softmax(model(batch.text), dim=-1).max(-1)
    return Guess(tags.T, confidence.T)


METHODS: dict[str, tuple[Callable[..., Tensor], Callable[..., Guess]]] = {
    "CRF": (crf_loss, crf_guess),
    "Softmax": (softmax_loss, softmax_guess),
}


def train(
    name: str, model: Tagger, snippets: Snippets, batches: int, seed: int, quiet: bool
) -> None:
    loss_of = METHODS[name][0]
    generator = torch.Generator().manual_seed(seed)
    network = [parameter for module in model.children() for parameter in module.parameters()]
    optimizer = torch.optim.Adam([{"params": network}, {"params": [model.transitions, model.ends]}])
    # The tables need a greater rate than the network.
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[2e-2, 1e-1], total_steps=batches
    )
    with training_bar(quiet, title=f"{name:8}") as progress:
        task = progress.add_task("", total=batches, loss=float("nan"))
        for _ in range(batches):
            loss = loss_of(
                model,
                snippets.take(torch.randint(len(snippets.lengths), (BATCH,), generator=generator)),
            )
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            progress.update(task, advance=1, loss=loss.item())


@torch.no_grad()
def guess(name: str, model: Tagger, snippets: Snippets) -> Guess:
    found = Guess(torch.full_like(snippets.tags, -1), torch.zeros(snippets.tags.shape))
    for start in range(0, len(snippets.lengths), BATCH):
        some = slice(start, start + BATCH)
        batch = snippets.take(some)
        for whole, part in zip(found, METHODS[name][1](model, batch), strict=True):
            whole[some, : part.shape[1]] = part
    return found


def score(found: Guess, snippets: Snippets) -> Score:
    valid = snippets.tags >= 0
    mistakes = (found.tags != snippets.tags) & valid
    ends = snippets.text == ord("\n")
    line = (ends.cumsum(1) - ends.long()) + ends.shape[1] * torch.arange(len(ends))[:, None]
    line_mistakes, line_tokens = (
        torch.zeros(ends.numel()).index_add(0, line[valid], mask[valid].float())
        for mask in (mistakes, snippets.tags > 0)
    )
    before, after = found.tags[:, :-1], found.tags[:, 1:]
    broken = BROKEN[before, after] & valid[:, 1:]
    correct = 1 - mistakes.sum() / valid.sum()
    return Score(
        correct.item(),
        (line_mistakes[line_tokens > 0] == 0).float().mean().item(),
        int(broken.sum()),
        found.confidence[valid].mean().item(),
    )


def plain_loss(emissions: Tensor, transitions: Tensor, ends: Tensor, batch: Snippets) -> Tensor:
    """Return `chain_loss`, computed by the forward recursion in plain PyTorch."""
    start, end = ends
    tags, rows = batch.tags.T.clamp(min=0), torch.arange(len(batch.lengths))
    alpha, path = start + emissions[0], start[tags[0]] + emissions[0, rows, tags[0]]
    for t in range(1, len(emissions)):
        active = t < batch.lengths
        alpha = torch.where(
            active[:, None], (alpha[:, :, None] + transitions).logsumexp(1) + emissions[t], alpha
        )
        path = torch.where(
            active, path + transitions[tags[t - 1], tags[t]] + emissions[t, rows, tags[t]], path
        )
    path = path + end[tags[batch.lengths - 1, rows]]
    return ((alpha + end).logsumexp(1) - path).sum() / batch.lengths.sum()


def compare(model: Tagger, batch: Snippets) -> Difference:
    """Compare the loss and its gradients with those of the plain recursion in fp64."""
    ours = [
        t.detach().clone().requires_grad_() for t in (model(batch.text), model.moves(), model.ends)
    ]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    loss = chain_loss(
        partita.linear_chain(ours[0], ours[1], *ours[2], lengths=batch.lengths), batch
    )
    expected = plain_loss(*theirs, batch)
    pairs = zip(torch.autograd.grad(loss, ours), torch.autograd.grad(expected, theirs), strict=True)
    return Difference(
        abs(loss.item() - expected.item()),
        torch.stack([(a - b).abs().max() for a, b in pairs]).max().item(),
    )


def draw_snippet(axes: Axes, top: float, snippets: Snippets, found: Guess, n: int) -> float:
    """Write a snippet from a row on, and return the next free row.

    Tokens are underlined, mistakes are overlined, and doubt is the background.
    """
    length = int(snippets.lengths[n])
    text, truth, tags, confidence = (
        t[n, :length].tolist() for t in (snippets.text, snippets.tags, *found)
    )
    y, x = top, 0
    for i, (code, true, tag, sure) in enumerate(zip(text, truth, tags, confidence, strict=True)):
        if x == WIDEST:
            y, x = y + 1, 0
        axes.add_patch(Rectangle((x, y - 0.5), 1, 1, color=UNSURE, alpha=1 - sure, lw=0))
        if tag:
            colour = COLOURS[KINDS[(tag - 1) // 2]]
            axes.text(
                x + 0.5,
                y,
                chr(code),
                color=colour,
                family="monospace",
                size=10,
                ha="center",
                va="center_baseline",
                parse_math=False,
            )
            # The last character of a token is one before any tag but this token's I.
            first, last = tag % 2 == 1, tags[i + 1 : i + 2] != [2 * ((tag + 1) // 2)]
            axes.plot(
                [x + 0.15 * first, x + 1 - 0.15 * last],
                [y + 0.42] * 2,
                color=colour,
                lw=1.2,
                solid_capstyle="butt",
            )
        if tag != true:
            axes.plot([x, x + 1], [y - 0.42] * 2, color=RED, lw=2.5, solid_capstyle="butt")
        y, x = (y + 1, 0) if code == ord("\n") else (y, x + 1)
    return y + (x > 0) + 0.4


def draw_text(axes: Axes, snippets: Snippets, guesses: dict[str, Guess]) -> None:
    """Write one snippet with the tags of both methods, and two that are hard for the CRF."""
    crf = guesses["CRF"]
    common = len(snippets.lengths) // 2
    unsure = int((crf.confidence.sum(1) / snippets.lengths).argmin())
    worst = int((crf.tags != snippets.tags).sum(1).argmax())
    parts = {f"As it comes, by {name}": (found, common) for name, found in guesses.items()}
    parts |= {
        "The one that the CRF is least sure of": (crf, unsure),
        "The one that it gets most wrong": (crf, worst),
    }
    row = 0.0
    for heading, (found, n) in parts.items():
        axes.text(0, row, heading, color=INK, size=11, weight="bold", va="center")
        row = draw_snippet(axes, row + 1, snippets, found, n)
    for i, (what, colour) in enumerate({**COLOURS, "mistake": RED, "doubt": UNSURE}.items()):
        axes.text(WIDEST / 8 * i, row, what, color=colour, size=10, weight="bold", va="center")
    axes.set(xlim=(-0.5, WIDEST + 0.5), ylim=(row + 0.6, -0.6))
    axes.axis("off")


def draw_transitions(axes: Axes, model: Tagger) -> None:
    table = model.transitions.detach()
    limit, table = table.abs().max().item(), table.masked_fill(BROKEN, torch.nan).numpy()
    image = axes.imshow(table, cmap="RdBu", vmin=-limit, vmax=limit)
    axes.set(
        xticks=range(len(TAGS)),
        yticks=range(len(TAGS)),
        xlabel="to (blank: forbidden)",
        ylabel="from",
    )
    axes.set_xticklabels(TAGS, rotation=90, size=8)
    axes.set_yticklabels(TAGS, size=8)
    axes.tick_params(length=0)
    axes.figure.colorbar(image, ax=axes, shrink=0.6).outline.set_visible(False)


def draw_errors(axes: Axes, scores: dict[str, Score]) -> None:
    """Shares that are wrong, of characters and of lines."""
    for i, (name, colour) in enumerate(zip(scores, (BLUE, MUTED), strict=True)):
        bars = axes.barh(
            [i, i + 3],
            [1 - scores[name].lines, 1 - scores[name].characters],
            color=colour,
            height=0.9,
        )
        axes.bar_label(
            bars, [f"{name} {bar.get_width():.1%}" for bar in bars], color=INK, padding=4
        )
    axes.set(
        yticks=[0.5, 3.5],
        xticks=[],
        xlim=(0, 1.5 * max(1 - score.lines for score in scores.values())),
    )
    axes.set_yticklabels(["lines", "characters"])
    axes.tick_params(length=0, labelcolor=INK)


def draw(
    path: Path,
    model: Tagger,
    snippets: Snippets,
    guesses: dict[str, Guess],
    scores: dict[str, Score],
) -> None:
    """Draw tagged test files, the transitions that the chain learnt, and the errors."""
    figure = Figure(figsize=(15, 11), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1.8, 1))
    draw_text(left.subplots(), snippets, guesses)
    table, errors = right.subplots(2, 1, height_ratios=(2.4, 1))
    draw_transitions(table, model)
    draw_errors(errors, scores)
    for axes, title in (
        (table, "Transitions that the CRF learnt, nats"),
        (errors, "Wrong on held-out files"),
    ):
        axes.set_title(title, size=11, weight="bold", color=INK)
        axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.suffix[1:].lower() in figure.canvas.get_supported_filetypes()
    figure.savefig(path, dpi=130, format=None if known else "png")


def run(
    batches: int, files: int, width: int, layers: int, seed: int, out: Path, quiet: bool = False
) -> Report:
    snippets, test_snippets = load(files, seed)
    scores, milliseconds, models, guesses = {}, {}, {}, {}
    for name in METHODS:
        torch.manual_seed(seed)
        models[name] = Tagger(width, layers)
        start = time.perf_counter()
        train(name, models[name], snippets, batches, seed, quiet)
        milliseconds[name] = 1e3 * (time.perf_counter() - start) / batches
        guesses[name] = guess(name, models[name], test_snippets)
        scores[name] = score(guesses[name], test_snippets)
    draw(out, models["CRF"], test_snippets, guesses, scores)
    difference = compare(models["CRF"], test_snippets.take(slice(0, BATCH)))
    return Report(scores, difference, milliseconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Tag the characters of Python's standard library with a CRF by Partita."
    )
    parser.add_argument(
        "--batches",
        type=positive,
        default=BATCHES,
        help=f"batches of {BATCH} snippets (default {BATCHES})",
    )
    parser.add_argument(
        "--files",
        type=positive,
        default=200,
        help=f"files of the library; one in {TEST_FILES} is for the test (default 200)",
    )
    parser.add_argument(
        "--width", type=positive, default=48, help="channels of the network (default 48)"
    )
    parser.add_argument(
        "--layers",
        type=positive,
        default=3,
        help="layers of the network, which sees two characters farther with each (default 3)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
    parser.add_argument(
        "--out", type=Path, default=Path("tagger.png"), help="picture to write (default tagger.png)"
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    options = parser.parse_args(argv)

    # The network is so small that more threads mostly wait for each other on a busy machine.
    torch.set_num_threads(1)
    report = run(
        options.batches,
        options.files,
        options.width,
        options.layers,
        options.seed,
        options.out,
        options.quiet,
    )
    print(f"Loss diff: {report.difference.loss:.2e}")
    print(f"Grad diff (max): {report.difference.grad:.2e}")
    for name, found in report.scores.items():
        print(
            f"{name}: {found.characters:.1%} of characters right"
            f" (mean confidence {found.confidence:.1%}),"
            f" {found.lines:.1%} of lines without a fault, "
            f"{found.broken:,} broken tokens, {report.milliseconds[name]:.0f} ms a batch"
        )
    print(f"Picture: {options.out}")
    if report.scores["CRF"].characters < REQUIRED_ACCURACY and options.batches < BATCHES:
        print(f"{options.batches} batches are too few to learn this; {BATCHES} are the default.")
    elif report.scores["CRF"].characters < REQUIRED_ACCURACY:
        print(
            f"Fewer than {REQUIRED_ACCURACY:.0%} of the characters were tagged rightly.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
