"""Colour source code without a parser: train a linear-chain CRF on the characters of Python's standard library, and draw what it sees.

    python examples/tagger.py --batches 400 --out tagger.png

The text is the standard library of the Python that runs this, in snippets of six lines; the `tokenize` module says of each character whether it begins a
token (B-) or goes on in one (I-), and of which kind. A few convolutions score the tags of each character; they see no more than six characters to either
side. Whether all that is within a string may have been settled lines before, and this can only travel along the chain. The same network is trained on the
same batches once more, with a softmax at each character in place of the chain; the farther a network sees, the less it gains from one (try `--layers 12`). A
tenth of the files is held out. The exit code is 1 when the CRF tags fewer than 90 % of their characters rightly.
"""

from __future__ import annotations

import argparse
import io
import keyword
import random
import sys
import sysconfig
import time
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from digits import BLUE, INK, MUTED, RED, Difference, positive
from language_model import LEFT_OUT
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import partita

REQUIRED_ACCURACY = 0.9
BATCH = 32
HELD_OUT = 10  # one file of so many
LINES, LONGEST = 6, 256  # of a snippet: lines, and characters at most
WIDEST = 84  # characters of a line in the picture
CHARACTERS = 128  # of ASCII; any other counts as a question mark
COLOURS = {
    "name": INK,
    "keyword": "#6b46c1",
    "number": "#b7791f",
    "string": "#2f855a",
    "comment": "#718096",
    "operator": "#2b6cb0",
}
KINDS = list(COLOURS)
TAGS = [
    "space",
    *(f"{place}-{kind}" for kind in KINDS for place in "BI"),
]  # B of kind k is 2k + 1, I is 2k + 2
UNSURE = "#f6ad55"


class Snippets(NamedTuple):
    text: Tensor  # [N, T] ASCII, 0 past the length
    tags: Tensor  # [N, T], -1 past the length
    lengths: Tensor  # [N]

    def take(self, index: Tensor | slice) -> Snippets:
        """Some of them, no longer than they have to be."""
        lengths = self.lengths[index]
        most = int(lengths.max())
        return Snippets(self.text[index, :most], self.tags[index, :most], lengths)


class Guess(NamedTuple):
    tags: Tensor  # [N, T]
    confidence: Tensor  # [N, T], the probability of each of them


class Score(NamedTuple):
    characters: float  # share of them that is right
    lines: float  # share of the lines, blank ones left out, that is right throughout
    broken: int  # tags that go on in a token that the one before does not belong to
    confidence: float  # mean


@dataclass(frozen=True)
class Report:
    scores: dict[str, Score]
    difference: Difference
    milliseconds: dict[str, float] = field(compare=False)  # a batch


class Tagger(nn.Module):
    """A network from characters `[N, T]` to the chain's emissions `[T, N, tags]`, and the tables of the chain."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(CHARACTERS, width)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(layers))
        self.emit = nn.Linear(width, len(TAGS))
        self.transitions = nn.Parameter(torch.zeros(len(TAGS), len(TAGS)))
        self.ends = nn.Parameter(torch.zeros(2, len(TAGS)))  # of the first tag and of the last

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text).mT
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.emit(x.permute(2, 0, 1))

    def chain(self, emissions: Tensor, lengths: Tensor) -> partita.Chain:
        return partita.linear_chain(emissions, self.transitions, *self.ends, lengths=lengths)


def chain_loss(chain: partita.Chain, batch: Snippets) -> Tensor:
    """Log Z minus the score of the right path, nats a character."""
    return -chain.log_prob(states=batch.tags.T).sum() / batch.lengths.sum()


def crf_loss(model: Tagger, batch: Snippets) -> Tensor:
    return chain_loss(model.chain(model(batch.text), batch.lengths), batch)


def softmax_loss(model: Tagger, batch: Snippets) -> Tensor:
    return partita.cross_entropy(
        model(batch.text).flatten(0, 1), batch.tags.T.flatten(), ignore_index=-1
    )


def crf_guess(model: Tagger, batch: Snippets) -> Guess:
    """The best path, and the posterior of each of its tags."""
    chain = model.chain(model(batch.text), batch.lengths)
    states, edges = chain.viterbi().states, chain.marginals()  # [T, N], [T - 1, N, to, from]
    posterior = torch.cat([edges[:1].sum(2), edges.sum(3)])
    return Guess(states.T, posterior.gather(2, states.clamp(min=0)[..., None])[..., 0].T)


def softmax_guess(model: Tagger, batch: Snippets) -> Guess:
    confidence, tags = partita.softmax(model(batch.text), dim=-1).max(-1)
    return Guess(tags.T, confidence.T)


METHODS: dict[str, tuple[Callable[..., Tensor], Callable[..., Guess]]] = {
    "CRF": (crf_loss, crf_guess),
    "Softmax": (softmax_loss, softmax_guess),
}


def line_starts(text: str) -> list[int]:
    return [0, *accumulate(len(line) + 1 for line in text.split("\n"))]


def tags_of(text: str) -> list[int]:
    """The tag of each character, as `tokenize` has it; what is in no token is space."""
    tags, starts = [0] * len(text), line_starts(text)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type].lower()
        name = {
            "op": "operator",
            "name": "keyword" if keyword.iskeyword(token.string) else "name",
        }.get(name, name)
        name = (
            "string" if name.startswith(("fstring", "tstring")) else name
        )  # the parts of one, from Python 3.12 on
        begin, end = (starts[row - 1] + column for row, column in (token.start, token.end))
        if name in KINDS and begin < end:
            first = TAGS.index(f"B-{name}")
            tags[begin:end] = [first, *[first + 1] * (end - begin - 1)]
    return tags


def snippets_of(tagged: Sequence[tuple[str, list[int]]]) -> Snippets:
    codes = [torch.tensor(list(text.encode("ascii", "replace"))) for text, _ in tagged]
    tags = [torch.tensor(tags) for _, tags in tagged]
    lengths = torch.tensor([len(text) for text, _ in tagged])
    return Snippets(
        pad_sequence(codes, batch_first=True),
        pad_sequence(tags, batch_first=True, padding_value=-1),
        lengths,
    )


def load(files: int, seed: int) -> tuple[Snippets, Snippets]:
    """Snippets of the library's files, to train on and held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not LEFT_OUT & set(path.relative_to(root).parts)
    ]
    parts: list[list[tuple[str, list[int]]]] = [[], []]
    for i, path in enumerate(random.Random(seed).sample(paths, min(files, len(paths)))):
        text = path.read_text(encoding="utf-8", errors="ignore")
        tags, starts = tags_of(text), [*line_starts(text)[::LINES], len(text)]
        pieces = [
            slice(start, min(stop, start + LONGEST))
            for start, stop in pairwise(starts)
            if stop - start > 1
        ]
        parts[i % HELD_OUT == 0].extend((text[piece], tags[piece]) for piece in pieces)
    if not all(parts):
        raise ValueError(
            f"files: expected enough of them to train on some and hold out others, got {files}"
        )
    return snippets_of(parts[0]), snippets_of(parts[1])


def train(
    name: str, model: Tagger, snippets: Snippets, batches: int, seed: int, quiet: bool
) -> None:
    loss_of = METHODS[name][0]
    generator = torch.Generator().manual_seed(seed)
    network = [parameter for module in model.children() for parameter in module.parameters()]
    optimizer = torch.optim.Adam([{"params": network}, {"params": [model.transitions, model.ends]}])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[2e-2, 1e-1], total_steps=batches
    )  # the tables have farther to go
    columns = (
        f"{name:8}",
        BarColumn(),
        MofNCompleteColumn(),
        "batches",
        TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    with Progress(*columns, disable=quiet) as progress:
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
    counted = snippets.tags >= 0
    wrong = (found.tags != snippets.tags) & counted
    ends = snippets.text == ord("\n")
    line = (ends.cumsum(1) - ends.long()) + ends.shape[1] * torch.arange(len(ends))[:, None]
    faults, solid = (
        torch.zeros(ends.numel()).index_add(0, line[counted], what[counted].float())
        for what in (wrong, snippets.tags > 0)
    )
    before, after = found.tags[:, :-1], found.tags[:, 1:]
    goes_on = (after > 0) & (after % 2 == 0) & counted[:, 1:]
    broken = goes_on & (before != after) & (before != after - 1)
    right = 1 - wrong.sum() / counted.sum()
    return Score(
        right.item(),
        (faults[solid > 0] == 0).float().mean().item(),
        int(broken.sum()),
        found.confidence[counted].mean().item(),
    )


def plain_loss(emissions: Tensor, transitions: Tensor, ends: Tensor, batch: Snippets) -> Tensor:
    """`chain_loss`, by the forward recursion in plain PyTorch."""
    start, end = ends
    tags, rows = batch.tags.T.clamp(min=0), torch.arange(len(batch.lengths))
    alpha, path = start + emissions[0], start[tags[0]] + emissions[0, rows, tags[0]]
    for t in range(1, len(emissions)):
        inside = t < batch.lengths
        alpha = torch.where(
            inside[:, None], (alpha[:, :, None] + transitions).logsumexp(1) + emissions[t], alpha
        )
        path = torch.where(
            inside, path + transitions[tags[t - 1], tags[t]] + emissions[t, rows, tags[t]], path
        )
    path = path + end[tags[batch.lengths - 1, rows]]
    return ((alpha + end).logsumexp(1) - path).sum() / batch.lengths.sum()


def compare(model: Tagger, batch: Snippets) -> Difference:
    """Loss and gradients in emissions and tables, beside the plain recursion in fp64."""
    ours = [
        t.detach().clone().requires_grad_()
        for t in (model(batch.text), model.transitions, model.ends)
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
    """Write a snippet from a row on: tokens underlined, mistakes overlined, doubt as background. Gives the next free row."""
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
            first, last = (
                tag % 2 == 1,
                tags[i + 1 : i + 2] != [2 * ((tag + 1) // 2)],
            )  # the next one does not go on in this token
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
    """A snippet as it comes, by both methods, and two that are hard for the CRF."""
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
    table = model.transitions.detach().numpy()
    most = abs(table).max()
    image = axes.imshow(table, cmap="RdBu", vmin=-most, vmax=most)
    axes.set(xticks=range(len(TAGS)), yticks=range(len(TAGS)), xlabel="to", ylabel="from")
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
    """Held-out source, beside what the chain learnt and what it is worth."""
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
    snippets, held_out = load(files, seed)
    scores, milliseconds, models, guesses = {}, {}, {}, {}
    for name in METHODS:
        torch.manual_seed(seed)
        models[name] = Tagger(width, layers)
        start = time.perf_counter()
        train(name, models[name], snippets, batches, seed, quiet)
        milliseconds[name] = 1e3 * (time.perf_counter() - start) / batches
        guesses[name] = guess(name, models[name], held_out)
        scores[name] = score(guesses[name], held_out)
    draw(out, models["CRF"], held_out, guesses, scores)
    return Report(scores, compare(models["CRF"], held_out.take(slice(0, BATCH))), milliseconds)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Tag the characters of Python's standard library with a CRF by Partita."
    )
    parser.add_argument(
        "--batches", type=positive, default=400, help=f"batches of {BATCH} snippets (default 400)"
    )
    parser.add_argument(
        "--files",
        type=positive,
        default=200,
        help=f"of the library, of which one in {HELD_OUT} is held out (default 200)",
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

    torch.set_num_threads(
        1
    )  # of a network this small; on a busy machine more of them mostly wait for each other
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
            f"{name}: {found.characters:.1%} of characters right (mean confidence {found.confidence:.1%}), {found.lines:.1%} of lines without a fault, "
            f"{found.broken:,} broken tokens, {report.milliseconds[name]:.0f} ms a batch"
        )
    print(f"Picture: {options.out}")
    if report.scores["CRF"].characters < REQUIRED_ACCURACY:
        print(
            f"Fewer than {REQUIRED_ACCURACY:.0%} of the characters were tagged rightly.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
