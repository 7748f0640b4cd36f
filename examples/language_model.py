"""Train a small language model on the source of Python's standard library, and plot what it costs.

    python examples/language_model.py --batches 400 --out language_model.png

The loss is `linear_causal_lm_loss`, which needs no logits in memory. The text is the standard
library of the Python that runs this. The script trains a byte-pair tokenizer on it and then a
transformer; a twentieth of the files is for validation. At the end it measures a training step,
forward and backward, with that loss and with `F.linear` and `F.cross_entropy`. The memory of a step
is the peak that PyTorch allocates above what it had allocated before the step. A GPU's allocator
reports it. On a CPU it comes from the memory events of PyTorch's profiler, which miss only the
allocations of the libraries below PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from digits import BLUE, INK, MUTED, Difference, positive, training_bar
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

import partita
from partita.integrations.transformers import linear_causal_lm_loss

VALIDATION_PERIOD = 20  # one file in 20 is for validation
# Folders with other packages, with tables and with repetitions.
LEFT_OUT = {"dist-packages", "encodings", "site-packages", "test", "tests"}
END = 0  # the token after each file
PROMPT = "import os\n\n\ndef"
TIMED_STEPS = 5
PLAIN, OURS = "F.linear + F.cross_entropy", "linear_causal_lm_loss"


class Sizes(NamedTuple):
    megabytes: int  # of text
    vocabulary: int
    width: int
    layers: int
    length: int  # tokens of context
    batch: int


ON_CPU = Sizes(megabytes=8, vocabulary=8192, width=128, layers=3, length=64, batch=16)
ON_GPU = Sizes(megabytes=16, vocabulary=32768, width=768, layers=8, length=1024, batch=32)


class Text(NamedTuple):
    tokenizer: Tokenizer
    train: Tensor  # [N]
    validation: Tensor  # [M]


class Cost(NamedTuple):
    mebibytes: float
    milliseconds: float


@dataclass(frozen=True)
class Report:
    validation_loss: float
    difference: Difference
    costs: dict[str, Cost]
    sample: str


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = 1 if width % 64 else width // 64
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.attend(self.before_attention(x))
            .unflatten(-1, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )  # each [N, heads, T, width / heads]
        x = x + self.merge(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.before_mlp(x))


class LanguageModel(nn.Module):
    """A transformer from tokens `[N, T]` to hidden states `[N, T, width]`.

    `head` maps hidden states to logits.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.Sequential(*(Block(sizes.width) for _ in range(sizes.layers)))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        for table in (self.embed, self.position):
            # This gives the first logits the variance 1.
            nn.init.normal_(table.weight, std=sizes.width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.blocks(self.embed(tokens) + self.position.weight[: tokens.shape[1]]))


def precision(device: torch.device) -> torch.autocast:
    """Return a context that computes in bf16 on a GPU and leaves the dtype of the weights."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def our_loss(model: LanguageModel, tokens: Tensor) -> Tensor:
    with precision(tokens.device):
        return linear_causal_lm_loss(model(tokens), model.head.weight, tokens)


def plain_loss(model: LanguageModel, tokens: Tensor) -> Tensor:
    with precision(tokens.device):
        logits = F.linear(model(tokens)[:, :-1], model.head.weight)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def step(
    loss_of: Callable[[LanguageModel, Tensor], Tensor], model: LanguageModel, tokens: Tensor
) -> Tensor:
    """Return the loss and add its gradient to the model."""
    loss = loss_of(model, tokens)
    loss.backward()
    return loss.detach()


def load(sizes: Sizes, seed: int) -> Text:
    """Read files of the library in random order, up to the given number of megabytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not LEFT_OUT & set(path.relative_to(root).parts)
    ]
    random.Random(seed).shuffle(paths)
    files = [path.read_text(encoding="utf-8", errors="ignore") for path in paths]
    files = [
        file
        for file, size in zip(files, accumulate(map(len, files)), strict=True)
        if size <= sizes.megabytes * 10**6
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=sizes.vocabulary,
        initial_alphabet=alphabet,
        special_tokens=["<end>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(files, trainer)
    parts: tuple[list[int], list[int]] = [], []
    for i, encoding in enumerate(tokenizer.encode_batch(files)):
        parts[i % VALIDATION_PERIOD == 0].extend([*encoding.ids, END])
    return Text(tokenizer, *map(torch.tensor, parts))


def batches(
    tokens: Tensor, sizes: Sizes, generator: torch.Generator, device: torch.device
) -> Iterator[Tensor]:
    """Yield random pieces of the text, `[batch, length]`."""
    while True:
        starts = torch.randint(len(tokens) - sizes.length, (sizes.batch, 1), generator=generator)
        yield tokens[starts + torch.arange(sizes.length)].to(device)


def train(model: LanguageModel, pieces: Iterator[Tensor], steps: int, quiet: bool) -> list[float]:
    """Train the model and return the loss of each batch."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.64 / model.head.in_features, total_steps=steps
    )
    losses = []
    with training_bar(quiet) as progress:
        task = progress.add_task("", total=steps, loss=float("nan"))
        for _, tokens in zip(range(steps), pieces, strict=False):
            optimizer.zero_grad()
            loss = step(our_loss, model, tokens)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            progress.update(task, advance=1, loss=losses[-1])
    return losses


def peak_memory(work: Callable[[], object], device: torch.device) -> float:
    """Return the peak of memory during the work, in MiB above what was allocated before."""
    if device.type == "cuda":
        # The bytes of the blocks that the allocator hands out depend on what it has cached.
        before = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
        torch.cuda.reset_peak_memory_stats()
        work()
        return (torch.cuda.memory_stats()["requested_bytes.all.peak"] - before) / 2**20
    # The profiler would log when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted(
        (event["ts"], i, event["args"]["Bytes"])
        for i, event in enumerate(events)
        if event.get("name") == "[memory]"
    )
    return max(accumulate(size for _, _, size in changes), default=0) / 2**20


def duration(work: Callable[[], object], device: torch.device) -> float:
    """Return the time of the work in ms."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def compare(model: LanguageModel, tokens: Tensor) -> tuple[Difference, dict[str, Cost]]:
    """Compare the two losses and their gradients on one batch, and measure a step with each."""
    steps = {
        PLAIN: partial(step, plain_loss, model, tokens),
        OURS: partial(step, our_loss, model, tokens),
    }
    losses, gradients, memory = {}, {}, {}
    times = {name: [] for name in steps}
    for name, run_step in steps.items():
        model.zero_grad()
        losses[name] = run_step().item()
        gradients[name] = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        memory[name] = peak_memory(run_step, tokens.device)
    for _ in range(TIMED_STEPS):
        for name, run_step in steps.items():
            model.zero_grad()
            times[name].append(duration(run_step, tokens.device))
    pairs = zip(gradients[OURS], gradients[PLAIN], strict=True)
    grad = max((a - b).abs().max().item() for a, b in pairs)
    difference = Difference(abs(losses[OURS] - losses[PLAIN]), grad)
    return difference, {name: Cost(memory[name], statistics.median(times[name])) for name in steps}


def continue_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    new_tokens: int,
    length: int,
    generator: torch.Generator,
) -> str:
    """Return the prompt and `new_tokens` more tokens, drawn one by one."""
    tokens = tokenizer.encode(prompt).ids
    for _ in range(new_tokens):
        context = torch.tensor([tokens[-length:]], device=model.head.weight.device)
        with torch.no_grad(), precision(context.device):
            logits = model.head(model(context)[0, -1]).float()
        best = logits.topk(min(40, len(logits)))
        probabilities = partita.softmax(best.values / 0.8, dim=0).cpu()
        choice = torch.multinomial(probabilities, 1, generator=generator)
        tokens.append(int(best.indices[choice]))
    return tokenizer.decode(tokens)


def draw_bars(axes: Axes, title: str, unit: str, values: Sequence[float]) -> None:
    bars = axes.bar(
        [PLAIN.replace(" + ", "\n+ "), OURS.replace("_lm", "\n_lm")],
        values,
        color=[MUTED, BLUE],
        width=0.6,
    )
    axes.bar_label(
        bars, [f"{value:,.0f} {unit}" for value in values], color=INK, weight="bold", padding=3
    )
    axes.set_title(title, size=11, weight="bold", color=INK)
    axes.set(yticks=[], ylim=(0, 1.12 * max(values)))
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.spines[["left", "top", "right"]].set_visible(False)


def draw(
    path: Path, losses: list[float], validation_loss: float, costs: dict[str, Cost], where: str
) -> None:
    """Plot the loss of each batch and the cost of a step."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    curve, memory, times = figure.subplots(1, 3, width_ratios=(1.6, 1, 1))
    curve.plot(range(1, len(losses) + 1), losses, color=BLUE, lw=1, label="each training batch")
    curve.axhline(
        validation_loss,
        color=MUTED,
        ls="--",
        label=f"held-out files, in the end: {validation_loss:.2f}",
    )
    curve.set_title("Loss of a token, nats", size=11, weight="bold", color=INK)
    curve.set(xlabel="batch")
    curve.legend(frameon=False, labelcolor=INK)
    curve.spines[["top", "right"]].set_visible(False)
    draw_bars(memory, "Peak memory of a step", "MiB", [cost.mebibytes for cost in costs.values()])
    draw_bars(times, "Time of a step", "ms", [cost.milliseconds for cost in costs.values()])
    figure.supxlabel(where, size=9, color=MUTED)
    path.parent.mkdir(parents=True, exist_ok=True)
    supported = path.suffix[1:].lower() in figure.canvas.get_supported_filetypes()
    figure.savefig(path, dpi=130, format=None if supported else "png")


def run(
    sizes: Sizes, steps: int, seed: int, out: Path, device: torch.device, quiet: bool = False
) -> Report:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    text = load(sizes, seed)
    if len(text.validation) <= sizes.length:
        raise ValueError(
            f"megabytes: expected text enough for {sizes.length} tokens,"
            f" got {len(text.validation)} in the held-out files"
        )
    model = LanguageModel(sizes._replace(vocabulary=text.tokenizer.get_vocab_size())).to(device)
    pieces, validation = (
        batches(tokens, sizes, generator, device) for tokens in (text.train, text.validation)
    )
    losses = train(model, pieces, steps, quiet)
    with torch.no_grad():
        validation_loss = statistics.mean(
            our_loss(model, next(validation)).item() for _ in range(10)
        )
    difference, costs = compare(model, next(pieces))
    sample = continue_text(model, text.tokenizer, PROMPT, 120, sizes.length, generator)
    where = (
        torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} threads"
    )
    shape = (
        f"{sizes.batch} × {sizes.length} tokens, {model.head.out_features:,} classes,"
        f" width {sizes.width}, {sizes.layers} layers"
    )
    draw(out, losses, validation_loss, costs, f"{where}: {shape}")
    return Report(validation_loss, difference, costs, sample)


def main(argv: Sequence[str] | None = None) -> int:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser = argparse.ArgumentParser(
        description="Train a language model on Python's standard library"
        " with Partita's linear cross-entropy."
    )
    parser.add_argument(
        "--batches", type=positive, default=400, help="batches to train on (default 400)"
    )
    for name, value in (ON_GPU if device.type == "cuda" else ON_CPU)._asdict().items():
        parser.add_argument(
            f"--{name}",
            type=positive,
            default=value,
            help=f"{'of text' if name == 'megabytes' else 'of the model'} (default {value})",
        )
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("language_model.png"),
        help="picture to write (default language_model.png)",
    )
    parser.add_argument("--quiet", action="store_true", help="show no progress bar")
    options = parser.parse_args(argv)

    sizes = Sizes(*(getattr(options, name) for name in Sizes._fields))
    report = run(sizes, options.batches, options.seed, options.out, device, options.quiet)
    print(f"Held-out loss: {report.validation_loss:.3f} nats a token")
    print(f"Loss diff: {report.difference.loss:.2e}")
    print(f"Grad diff (max): {report.difference.grad:.2e}")
    for name, cost in report.costs.items():
        print(f"A step with {name}: {cost.mebibytes:,.0f} MiB, {cost.milliseconds:,.0f} ms")
    print(f"Picture: {options.out}")
    print(f"Sample:\n{report.sample}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
